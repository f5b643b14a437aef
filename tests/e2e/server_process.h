// The real programs as child processes: started with flags, observed from outside, ended with the test.
#ifndef EFLA_TESTS_E2E_SERVER_PROCESS_H_
#define EFLA_TESTS_E2E_SERVER_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "grpcpp/channel.h"

namespace efla::e2e {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The folder that holds tests/golden and model/demo: EFLA_TEST_SOURCE_DIR, or the source tree of the build.
std::filesystem::path SourceDir();
// A program of the build, or of EFLA_TEST_BIN_DIR (an installed bundle).
std::string ProgramPath(std::string_view name);
// EFLA_TEST_DEVICE: "cpu" (default) or "cuda". The servers of all tests run on it.
std::string TestDevice();
// Whether the programs were built with a sanitizer: memory then says nothing, and everything is slower.
bool Sanitized();

// Asks again every few milliseconds until `condition` holds (true) or `timeout` has passed (false).
bool Eventually(const std::function<bool()>& condition, milliseconds timeout = seconds(20));

// A folder of its own, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A program with its output captured. Killed when this object or the test process ends.
class ChildProcess {
 public:
  // `environment` holds NAME=VALUE entries, added to the test's own.
  explicit ChildProcess(const std::vector<std::string>& command,
                        const std::vector<std::string>& environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Signal(int signal);
  // The exit status, or 128 + the signal that ended it; nullopt when it still runs after `timeout`.
  std::optional<int> WaitForExit(milliseconds timeout);
  std::string out() const;
  std::string err() const;
  int64_t resident_bytes() const;

 private:
  TempDir files_;
  pid_t pid_ = -1;
  std::optional<int> exit_status_;
};

struct ProgramResult {
  int exit_status = -1;  // -1: it did not end in time and was killed
  std::string out, err;
};
ProgramResult RunProgram(const std::vector<std::string>& command, milliseconds timeout = seconds(60),
                         const std::vector<std::string>& environment = {});

// An efla_server on ports of its own. A server that has ended by itself, or has reported an error of a
// sanitizer, fails the test when this object goes.
class ServerProcess {
 public:
  // The command line: the checkpoint, ports 0 and the test's device where `flags` say nothing else, then
  // `flags`.
  static std::vector<std::string> Command(const std::filesystem::path& checkpoint,
                                          const std::vector<std::string>& flags);
  // Null, and a test failure with what the server wrote, when it does not become ready.
  static std::unique_ptr<ServerProcess> Start(const std::filesystem::path& checkpoint,
                                              const std::vector<std::string>& flags = {});
  ~ServerProcess();

  const std::string& grpc_address() const { return grpc_address_; }    // host:port
  const std::string& admin_address() const { return admin_address_; }  // host:port
  const std::string& device() const { return device_; }
  const std::string& model() const { return model_; }
  ChildProcess& process() { return process_; }

  // A channel with a connection of its own. `service_config` is JSON; empty: none.
  std::shared_ptr<grpc::Channel> NewChannel(const std::string& service_config = "") const;
  // The same, taking in no more than the smallest window of HTTP/2 ahead of the program's reads.
  std::shared_ptr<grpc::Channel> NewSmallWindowChannel() const;
  // The exit status; from here on the server may be gone.
  std::optional<int> WaitForExit(milliseconds timeout = seconds(30));
  // The same after a SIGTERM.
  std::optional<int> Terminate(milliseconds timeout = seconds(30));

 private:
  explicit ServerProcess(const std::vector<std::string>& command) : process_(command) {}

  ChildProcess process_;
  std::string grpc_address_, admin_address_, device_, model_;
  bool terminated_ = false;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_SERVER_PROCESS_H_
