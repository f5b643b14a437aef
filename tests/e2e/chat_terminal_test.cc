// `efla chat` at a terminal: lines are edited as they are typed, and the terminal is given back as it was.
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr char kLeft[] = "\x1b[D", kUp[] = "\x1b[A", kBackspace[] = "\x7f", kCtrlC[] = "\x03",
               kCtrlD[] = "\x04";

// A program whose input, output and errors are a terminal of its own.
class Terminal {
 public:
  explicit Terminal(const std::string& command) {
    pid_ = forkpty(&master_, nullptr, nullptr, nullptr);
    if (pid_ == 0) {
      setenv("TERM", "xterm", 1);
      setenv("LC_ALL", "C", 1);  // lines are UTF-8 all the same
      setenv("HOME", "/", 1);
      execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), nullptr);
      _exit(127);
    }
  }
  ~Terminal() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(master_);
  }

  void Type(const std::string& keys) {
    seen_.clear();
    shown_ = 0;
    EXPECT_EQ(write(master_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }
  // Reads on until `words` have appeared since the last Type, after what has been found since then.
  testing::AssertionResult Shows(const std::string& words, milliseconds timeout = seconds(30)) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    size_t at;
    while ((at = seen_.find(words, shown_)) == std::string::npos) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
      timeval wait = {.tv_sec = left.count() / 1000, .tv_usec = left.count() % 1000 * 1000};
      fd_set ready;
      FD_ZERO(&ready);
      FD_SET(master_, &ready);
      char bytes[4096];
      ssize_t count = 0;
      if (left.count() <= 0 || select(master_ + 1, &ready, nullptr, nullptr, &wait) <= 0 ||
          (count = read(master_, bytes, sizeof(bytes))) <= 0) {
        return testing::AssertionFailure() << "no \"" << words << "\" in: " << seen_;
      }
      seen_.append(bytes, static_cast<size_t>(count));
    }
    shown_ = at + words.size();
    return testing::AssertionSuccess();
  }
  // Until a prompt is there whose keys are the editor's: between two lines they are the terminal's.
  testing::AssertionResult Prompts() {
    const testing::AssertionResult shows = Shows("> ");
    if (!shows) return shows;
    if (Eventually([&] { return EditsLines(); })) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "the terminal edits no line after: " << seen_;
  }
  const std::string& seen() const { return seen_; }
  bool EditsLines() const { return (Modes().c_lflag & (ICANON | ECHO)) == 0; }
  bool IsAsAtFirst() const { return (Modes().c_lflag & (ICANON | ECHO)) == (ICANON | ECHO); }
  // -1 where the program does not end, or ends by a signal.
  int ExitStatus() {
    int status = 0;
    if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  termios Modes() const {
    termios modes = {};
    tcgetattr(master_, &modes);
    return modes;
  }

  int master_ = -1;
  pid_t pid_ = -1;
  std::string seen_;
  size_t shown_ = 0;  // bytes of it up to the end of what was found last
};

class ChatTerminalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_ = ServerProcess::Start(SourceDir() / "model/demo");
    ASSERT_NE(server_, nullptr);
    terminal_ = std::make_unique<Terminal>(Efla("chat --session talk"));
  }

  std::string Efla(const std::string& flags) const {
    return ProgramPath("efla") + " " + flags + " --temperature 0 --max-tokens 4 --target " +
           server_->grpc_address();
  }
  ProgramResult Generate(const std::string& prompt) const {
    return RunProgram({"/bin/sh", "-c", Efla("generate --prompt '" + prompt + "'")});
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Terminal> terminal_;
};

TEST_F(ChatTerminalTest, LinesAreEditedAndCalledUpAgain) {
  ASSERT_TRUE(terminal_->Prompts());
  std::string keys = "Once upon atim\xc3\xa9";  // two bytes, and one character to take back
  keys += kBackspace;
  keys += "e";
  for (int i = 0; i < 4; ++i) keys += kLeft;
  terminal_->Type(keys + " \n");
  ASSERT_TRUE(terminal_->Shows("talk: revision 2,"));
  const ProgramResult expected = Generate("Once upon a time");
  EXPECT_NE(terminal_->seen().find(expected.out.substr(0, expected.out.find('\n'))), std::string::npos)
      << expected.out << expected.err << terminal_->seen();
  ASSERT_TRUE(terminal_->Prompts());
  terminal_->Type(std::string(kUp) + "\n");
  ASSERT_TRUE(terminal_->Shows("talk: revision 3,"));
  EXPECT_NE(terminal_->seen().find("Once upon a time"), std::string::npos) << terminal_->seen();
  ASSERT_TRUE(terminal_->Prompts());
  terminal_->Type(kCtrlD);
  EXPECT_EQ(terminal_->ExitStatus(), 0);
  EXPECT_TRUE(terminal_->IsAsAtFirst());
}

TEST_F(ChatTerminalTest, AnEndAtThePromptGivesTheTerminalBack) {
  ASSERT_TRUE(terminal_->Prompts());
  terminal_->Type(std::string("half a line") + kCtrlC);
  EXPECT_EQ(terminal_->ExitStatus(), 130);
  EXPECT_TRUE(terminal_->IsAsAtFirst());
}

}  // namespace
}  // namespace efla::e2e
