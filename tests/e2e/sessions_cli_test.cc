// `efla sessions`, `efla generate --session` and `efla chat` against a server.
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/fake_server.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using nlohmann::json;

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class SessionsCliTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = ServerProcess::Start(SourceDir() / "model/demo").release(); }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    name_ = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }

  static ProgramResult Efla(std::vector<std::string> words) {
    words.insert(words.begin(), ProgramPath("efla"));
    words.insert(words.end(), {"--target", server_->grpc_address()});
    return RunProgram(words);
  }
  static json Json(const std::vector<std::string>& words) {
    std::vector<std::string> all = words;
    all.push_back("--json");
    const ProgramResult result = Efla(all);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    EXPECT_EQ(result.err, "");
    std::istringstream lines(result.out);
    std::string line, last;
    while (std::getline(lines, line)) last = line;
    json parsed = json::parse(last, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(parsed.is_discarded()) << result.out;
    return parsed.is_object() ? parsed : json::object();
  }
  static void ExpectFails(const ProgramResult& result, int exit_status, const std::string& words) {
    EXPECT_EQ(result.exit_status, exit_status) << result.out;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }
  // The shell's command for a chat with `lines` on its standard input.
  std::vector<std::string> ChatCommand(const std::string& lines, const std::string& flags) const {
    const std::string input = folder_.path() / "input";
    std::ofstream(input) << lines;
    return {"/bin/sh", "-c",
            "exec " + ProgramPath("efla") + " chat --target " + server_->grpc_address() + " " + flags +
                " < " + input};
  }
  ProgramResult Chat(const std::string& lines,
                     const std::string& flags = "--temperature 0 --max-tokens 12") const {
    return RunProgram(ChatCommand(lines, flags));
  }

  static ServerProcess* server_;
  TempDir folder_;
  std::string name_;
};

ServerProcess* SessionsCliTest::server_ = nullptr;

TEST_F(SessionsCliTest, EverySubcommandWorks) {
  const json created = Json({"sessions", "create", "--id", name_, "--prompt", "Once upon a time"});
  EXPECT_EQ(created.at("session_id"), name_);
  const int tokens = created.at("tokens");
  EXPECT_GT(tokens, 3);
  const json generated = Json({"generate", "--session", name_, "--prompt", " there was", "--max-tokens", "5",
                               "--temperature", "0", "--ignore-eos"});
  EXPECT_EQ(generated.at("session").at("session_id"), name_);
  EXPECT_EQ(generated.at("session").at("tier"), "device");
  EXPECT_EQ(generated.at("session").at("replayed"), false);
  const int after = generated.at("session").at("tokens");
  EXPECT_GT(after, tokens + 5);
  EXPECT_EQ(Json({"sessions", "get", name_}).at("tokens"), after);
  const json marked = Json({"sessions", "mark", name_, "here"});
  EXPECT_EQ(marked.at("marks").at(0).at("name"), "here");
  const json appended = Json({"sessions", "append", name_, "--token-ids", "5,6,7"});
  EXPECT_EQ(appended.at("appended_tokens"), 3);
  EXPECT_EQ(Json({"sessions", "rewind", name_}).at("tokens"), after);
  EXPECT_EQ(Json({"sessions", "fork", name_, "--child", name_ + ".child", "--mark", "here"}).at("tokens"),
            after);
  EXPECT_EQ(Json({"sessions", "move", name_, "host"}).at("tier"), "host");
  const std::string file = folder_.path() / "snapshot";
  EXPECT_GT(Json({"sessions", "export", name_, file}).at("bytes"), 1000);
  EXPECT_EQ(Json({"sessions", "import", file, "--id", name_ + ".copy"}).at("tokens"), after);
  const ProgramResult list = Efla({"sessions", "list", "--prefix", name_});
  EXPECT_EQ(list.exit_status, 0) << list.err;
  EXPECT_EQ(std::count(list.out.begin(), list.out.end(), '\n'), 3) << list.out;
  EXPECT_EQ(Json({"sessions", "delete", name_}).at("deleted"), true);
  ExpectFails(Efla({"sessions", "get", name_}), 1, "NOT_FOUND: session " + name_ + " does not exist");
}

TEST_F(SessionsCliTest, ASessionIsMadeAndContinuedByGenerate) {
  const std::vector<std::string> flags = {"--temperature", "0",         "--max-tokens", "10",
                                          "--ignore-eos",  "--session", name_};
  std::vector<std::string> first = {"generate", "--prompt", "Once upon a time", "--create"},
                           more = {"generate"},
                           alone = {"generate",     "--prompt", "Once upon a time", "--temperature", "0",
                                    "--max-tokens", "20",       "--ignore-eos"};
  first.insert(first.end(), flags.begin(), flags.end());
  more.insert(more.end(), flags.begin(), flags.end());
  const ProgramResult a = Efla(first), b = Efla(more), whole = Efla(alone);
  ASSERT_EQ(a.exit_status, 0) << a.err;
  ASSERT_EQ(b.exit_status, 0) << b.err;
  const std::vector<std::string> made = {"generate",     "--create", "--temperature", "0",
                                         "--max-tokens", "5",        "--session"};
  std::vector<std::string> without = made, with = made;
  without.push_back(name_ + ".without");
  with.insert(with.end(), {name_ + ".with", "--prompt", ""});
  const ProgramResult c = Efla(without), d = Efla(with);
  EXPECT_EQ(c.exit_status, 0) << c.err;
  EXPECT_EQ(c.out, d.out) << "no prompt is an empty one";
  EXPECT_EQ(a.out.substr(0, a.out.size() - 1) + b.out, whole.out) << "two turns are one text";
}

TEST_F(SessionsCliTest, WrongUseIsToldInOneLine) {
  ASSERT_EQ(Efla({"sessions", "create", "--id", name_}).exit_status, 0);
  ExpectFails(Efla({"sessions", "create", "--id", name_}), 1, "ALREADY_EXISTS");
  ExpectFails(Efla({"sessions", "create", "--id", "a b"}), 1, "session_id is \"a b\"");
  ExpectFails(Efla({"sessions", "append", name_, "--token-ids", "5", "--expected-revision", "9"}), 1,
              "ABORTED");
  ExpectFails(Efla({"sessions", "append", name_, "--token-ids", "5", "--durability", "sync"}), 1,
              "--session-dir");
  ExpectFails(Efla({"sessions", "import", "/no/such/file"}), 1, "/no/such/file");
  ExpectFails(Efla({"sessions", "import", "/dev/null"}), 1, "/dev/null is empty");
  ExpectFails(Efla({"sessions", "import", "/dev/zero"}), 1, "INVALID_ARGUMENT");
  ExpectFails(Efla({"tokenize", "--file", "/dev/zero"}), 1, "/dev/zero has more than 268435456 bytes");
  ExpectFails(Efla({"sessions", "export", name_, "/no/such/file"}), 1,
              "FAILED_PRECONDITION: cannot write /no/such/file: No such file or directory\n");
  ExpectFails(Efla({"sessions", "create", "--id="}), 2, "efla sessions create --help");
  ExpectFails(Efla({"sessions", "get"}), 2, "ID");
  ExpectFails(Efla({"sessions", "append", name_, "--token-ids", "5", "--expected-revision", "0"}), 2,
              "from 1 to");
  ExpectFails(Efla({"sessions", "move", name_, "moon"}), 2, "TIER");
  ExpectFails(Efla({"sessions", "rewind", name_, "--mark", "a", "--revision", "1"}), 2, "--mark");
  ExpectFails(Efla({"generate", "--prompt", "x", "--create"}), 2, "--session");
  ExpectFails(Efla({"generate", "--prompt", "x", "--on-cancel", "keep"}), 2, "--session");
  ExpectFails(RunProgram({ProgramPath("efla"), "sessions"}), 2, "subcommand");
}

TEST_F(SessionsCliTest, AChangeThatIsNotDurableIsTold) {
  FakeServer server;
  server.sessions.answer = [](const std::string&, const std::string&, v1::Session& session) {
    session.set_session_id("s");
    session.set_revision(3);
    session.set_durable_revision(2);
    return grpc::Status::OK;
  };
  server.generation.generate = [](grpc::ServerContext&, const v1::GenerateRequest&, auto& writer) {
    v1::GenerateResponse event = FinishedEvent(1, 1);
    v1::SessionAfterTurn& session = *event.mutable_finished()->mutable_session();
    session.set_session_id("s");
    session.set_revision(3);
    session.set_durable_revision(2);
    writer.Write(event);
    return grpc::Status::OK;
  };
  for (std::vector<std::string> words : {std::vector<std::string>{"sessions", "create"},
                                         {"sessions", "append", "s", "--prompt", "x"},
                                         {"sessions", "fork", "s"},
                                         {"sessions", "mark", "s", "m"},
                                         {"sessions", "rewind", "s"},
                                         {"generate", "--session", "s"}}) {
    words.insert(words.begin(), ProgramPath("efla"));
    words.insert(words.end(), {"--target", server.target()});
    EXPECT_EQ(RunProgram(words).exit_status, 0) << words[1] << " " << words[2];
    words.insert(words.end(), {"--durability", "sync"});
    ExpectFails(RunProgram(words), 1,
                "efla: session s: revision 3 is not durable; the last durable one is 2\n");
  }
  const ProgramResult chat = RunProgram({"/bin/sh", "-c",
                                         "echo x | " + ProgramPath("efla") + " chat --session s --target " +
                                             server.target() + " --durability sync"});
  EXPECT_EQ(chat.exit_status, 1);
  EXPECT_NE(chat.err.find("revision 3 is not durable"), std::string::npos) << chat.err;
}

TEST_F(SessionsCliTest, AChatDropsTheCarriageReturnOfALine) {
  const ProgramResult plain = Chat("Once upon a time\n"), returned = Chat("Once upon a time\r\n/quit\r\n");
  EXPECT_EQ(returned.exit_status, 0) << returned.err;
  EXPECT_EQ(returned.out, plain.out);
}

TEST_F(SessionsCliTest, AChatStreamsAndKeepsItsSession) {
  const ProgramResult chat = Chat("Once upon a time\n\n/mark here\n/info\n",
                                  "--session " + name_ + " --temperature 0 --max-tokens 12");
  EXPECT_EQ(chat.exit_status, 0) << chat.err;
  const ProgramResult alone =
      Efla({"generate", "--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "24"});
  std::string text = chat.out;
  text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
  std::string expected = alone.out;
  expected.erase(std::remove(expected.begin(), expected.end(), '\n'), expected.end());
  EXPECT_EQ(text, expected) << "an empty line goes on";
  EXPECT_NE(chat.err.find("revision 2, "), std::string::npos) << chat.err;
  EXPECT_NE(chat.err.find("tokens/s"), std::string::npos) << chat.err;
  EXPECT_NE(chat.err.find("device"), std::string::npos) << chat.err;
  EXPECT_NE(chat.err.find("marks here at"), std::string::npos) << chat.err;
  const json session = Json({"sessions", "get", name_});
  EXPECT_EQ(session.at("revision"), 4);
}

TEST_F(SessionsCliTest, AChatUndoesForksAndReturns) {
  const std::string file = folder_.path() / "snapshot";
  const ProgramResult chat = Chat("Once upon a time\n/mark here\nA dog\n/undo\nA dog\n/fork " + name_ +
                                      ".fork\nA dog\n/undo\nA dog\n/save " + file + "\n/load " + file +
                                      "\n/info\n//x\n/quit\nnever sent\n",
                                  "--session " + name_ + " --temperature 0 --max-tokens 8 --ignore-eos");
  ASSERT_EQ(chat.exit_status, 0) << chat.err;
  EXPECT_GT(ReadFile(file).size(), 1000u);
  const json parent = Json({"sessions", "get", name_}), fork = Json({"sessions", "get", name_ + ".fork"});
  EXPECT_EQ(parent.at("revision"), 6) << "created, turn, mark, turn, undo, turn";
  EXPECT_EQ(fork.at("revision"), 4) << "forked, turn, undo, turn";
  EXPECT_GT(fork.at("tokens"), parent.at("tokens"));
  EXPECT_EQ(chat.out.find("never sent"), std::string::npos);
  // The same words after the same context are answered alike: undone and said again, in both sessions.
  const ProgramResult again =
      Chat("/rewind here\nA dog\n", "--session " + name_ + " --temperature 0 --max-tokens 8 --ignore-eos");
  ASSERT_EQ(again.exit_status, 0) << again.err;
  size_t times = 0;
  for (size_t at = chat.out.find(again.out); at != std::string::npos; at = chat.out.find(again.out, at + 1))
    ++times;
  EXPECT_GE(times, 2u) << again.out << "in " << chat.out;
}

TEST_F(SessionsCliTest, AChatsScriptEndsWithTheFirstError) {
  const ProgramResult chat = Chat("/rewind nowhere\nOnce\n", "--session " + name_);
  EXPECT_EQ(chat.exit_status, 1);
  EXPECT_EQ(chat.out, "");
  EXPECT_NE(chat.err.find("nowhere"), std::string::npos) << chat.err;
  EXPECT_EQ(Chat("/nonsense\n").exit_status, 1);
  EXPECT_EQ(Chat("/undo now\n").exit_status, 1);
  EXPECT_EQ(Chat("/mark\n").exit_status, 1);
  EXPECT_EQ(Chat("").exit_status, 0);
}

TEST_F(SessionsCliTest, CtrlCCancelsTheAnswerAndNotTheChat) {
  ChildProcess chat(
      ChatCommand("Once upon a time\n/info\n", "--session " + name_ + " --ignore-eos --max-tokens 1000000"));
  ASSERT_TRUE(Eventually([&] { return chat.out().size() > 20; })) << chat.err();
  chat.Signal(SIGINT);
  const auto status = chat.WaitForExit(seconds(20));
  ASSERT_TRUE(status);
  EXPECT_EQ(*status, 0) << chat.err();
  EXPECT_NE(chat.err().find("cancelled"), std::string::npos) << chat.err();
  const json session = Json({"sessions", "get", name_});
  EXPECT_EQ(session.at("revision"), 1) << "rolled back";
  EXPECT_EQ(session.at("tokens"), 0);
}

TEST_F(SessionsCliTest, ACancelledTurnOfGenerateMayBeKept) {
  ChildProcess generate({ProgramPath("efla"), "generate", "--target", server_->grpc_address(), "--session",
                         name_, "--create", "--prompt", "Once", "--ignore-eos", "--max-tokens", "1000000",
                         "--on-cancel", "keep"});
  ASSERT_TRUE(Eventually([&] { return generate.out().size() > 20; })) << generate.err();
  generate.Signal(SIGINT);
  EXPECT_EQ(generate.WaitForExit(seconds(20)), 130);
  EXPECT_TRUE(Eventually([&] { return Json({"sessions", "get", name_}).at("revision") == 2; }));
  EXPECT_GT(Json({"sessions", "get", name_}).at("tokens"), 5);
}

}  // namespace
}  // namespace efla::e2e
