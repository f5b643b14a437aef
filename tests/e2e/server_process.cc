#include "tests/e2e/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include "absl/strings/str_format.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"

extern char** environ;

namespace efla::e2e {
namespace {

constexpr milliseconds kPollInterval{3};
// A sanitized server on a busy machine still has to load and start within this.
constexpr seconds kStartTimeout{60};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string Environment(const char* name, std::string_view otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? value : std::string(otherwise);
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

// A sanitizer's report among what a server wrote, from its first line on; empty: there is none.
std::string SanitizerReport(const std::string& log) {
  constexpr size_t kMostBytes = 12'000;
  const size_t found = std::min(log.find("Sanitizer"), log.find("runtime error:"));
  if (found == std::string::npos) return "";
  const size_t line = log.rfind('\n', found);
  return log.substr(line == std::string::npos ? 0 : line + 1, kMostBytes);
}

grpc::ChannelArguments OwnConnection() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return arguments;
}

}  // namespace

std::filesystem::path SourceDir() { return Environment("EFLA_TEST_SOURCE_DIR", EFLA_SOURCE_DIR); }

std::string ProgramPath(std::string_view name) {
  return (std::filesystem::path(Environment("EFLA_TEST_BIN_DIR", EFLA_BIN_DIR)) / name).string();
}

std::string TestDevice() { return Environment("EFLA_TEST_DEVICE", "cpu"); }

bool Sanitized() {
#ifdef EFLA_SANITIZED
  return true;
#else
  return false;
#endif
}

bool Eventually(const std::function<bool()>& condition, milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "efla_e2e.XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    ADD_FAILURE() << "no temporary folder " << pattern << ": " << strerror(errno);
    abort();
  }
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ChildProcess::ChildProcess(const std::vector<std::string>& command,
                           const std::vector<std::string>& environment) {
  // Everything that allocates is done before the fork: other threads of the test may hold the allocator's
  // lock.
  std::vector<std::string> arguments = command;
  std::vector<std::string> variables = environment;  // first: getenv takes the first of one name
  for (char** variable = environ; *variable != nullptr; ++variable) variables.push_back(*variable);
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(variables);
  const std::string out_file = files_.path() / "out", err_file = files_.path() / "err";
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    const int in = open("/dev/null", O_RDONLY);
    const int out = open(out_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int err = open(err_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(127);
    for (int fd = 3; fd < 1024; ++fd) close(fd);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  EXPECT_GT(pid_, 0) << "fork: " << strerror(errno);
}

ChildProcess::~ChildProcess() {
  if (pid_ <= 0 || exit_status_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void ChildProcess::Signal(int signal) {
  if (!exit_status_) kill(pid_, signal);
}

std::optional<int> ChildProcess::WaitForExit(milliseconds timeout) {
  Eventually(
      [this] {
        int status = 0;
        if (!exit_status_ && waitpid(pid_, &status, WNOHANG) == pid_) {
          exit_status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        return exit_status_.has_value();
      },
      timeout);
  return exit_status_;
}

std::string ChildProcess::out() const { return ReadFile(files_.path() / "out"); }
std::string ChildProcess::err() const { return ReadFile(files_.path() / "err"); }

int64_t ChildProcess::resident_bytes() const {
  int64_t total_pages = 0, resident_pages = 0;
  std::ifstream(absl::StrFormat("/proc/%d/statm", pid_)) >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

ProgramResult RunProgram(const std::vector<std::string>& command, milliseconds timeout,
                         const std::vector<std::string>& environment) {
  ChildProcess process(command, environment);
  ProgramResult result;
  result.exit_status = process.WaitForExit(timeout).value_or(-1);
  result.out = process.out();
  result.err = process.err();
  return result;
}

std::vector<std::string> ServerProcess::Command(const std::filesystem::path& checkpoint,
                                                const std::vector<std::string>& flags) {
  std::vector<std::string> command = {ProgramPath("efla_server")};
  const std::pair<const char*, std::string> kDefaults[] = {{"--checkpoint", checkpoint.string()},
                                                           {"--listen", "127.0.0.1:0"},
                                                           {"--admin", "127.0.0.1:0"},
                                                           {"--device", TestDevice()}};
  for (const auto& [name, value] : kDefaults) {
    if (std::find(flags.begin(), flags.end(), name) == flags.end())
      command.insert(command.end(), {name, value});
  }
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

std::unique_ptr<ServerProcess> ServerProcess::Start(const std::filesystem::path& checkpoint,
                                                    const std::vector<std::string>& flags) {
  std::unique_ptr<ServerProcess> server(new ServerProcess(Command(checkpoint, flags)));
  static const std::regex kReadyLine(
      "(?:^|\n)efla_server ready grpc=(\\S+:\\d+) admin=(\\S+:\\d+) device=(\\S+) model=(\\S+)\n");
  std::smatch match;
  std::string out;
  Eventually(
      [&] {
        out = server->process_.out();
        return std::regex_search(out, match, kReadyLine) || server->process_.WaitForExit(milliseconds(0));
      },
      kStartTimeout);
  if (match.empty()) {
    const std::optional<int> status = server->process_.WaitForExit(milliseconds(0));
    ADD_FAILURE() << "efla_server on " << checkpoint << " is not ready; exit status "
                  << (status ? std::to_string(*status) : "none, it still runs") << "\nstdout:\n"
                  << out << "\nstderr:\n"
                  << server->process_.err();
    server->terminated_ = true;
    return nullptr;
  }
  server->grpc_address_ = match[1];
  server->admin_address_ = match[2];
  server->device_ = match[3];
  server->model_ = match[4];
  return server;
}

ServerProcess::~ServerProcess() {
  const std::string log = process_.err();
  const std::string tail = log.size() > 4000 ? log.substr(log.size() - 4000) : log;
  if (!terminated_) {
    const std::optional<int> status = process_.WaitForExit(milliseconds(0));
    EXPECT_FALSE(status) << "the server ended by itself with status " << *status << "; it wrote:\n" << tail;
  }
  const std::string report = SanitizerReport(log);
  EXPECT_TRUE(report.empty()) << "a sanitizer reported:\n" << report;
}

std::shared_ptr<grpc::Channel> ServerProcess::NewChannel(const std::string& service_config) const {
  grpc::ChannelArguments arguments = OwnConnection();
  if (!service_config.empty()) arguments.SetServiceConfigJSON(service_config);
  return grpc::CreateCustomChannel(grpc_address_, grpc::InsecureChannelCredentials(), arguments);
}

std::shared_ptr<grpc::Channel> ServerProcess::NewSmallWindowChannel() const {
  grpc::ChannelArguments arguments = OwnConnection();
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // it would widen the window for a fast connection
  return grpc::CreateCustomChannel(grpc_address_, grpc::InsecureChannelCredentials(), arguments);
}

std::optional<int> ServerProcess::Terminate(milliseconds timeout) {
  process_.Signal(SIGTERM);
  return WaitForExit(timeout);
}

std::optional<int> ServerProcess::WaitForExit(milliseconds timeout) {
  terminated_ = true;
  return process_.WaitForExit(timeout);
}

}  // namespace efla::e2e
