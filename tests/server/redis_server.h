// A Redis server of a test's own: on a free port, without files unless asked for, gone with the test.
#ifndef EFLA_TESTS_SERVER_REDIS_SERVER_H_
#define EFLA_TESTS_SERVER_REDIS_SERVER_H_

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/sessions/redis_address.h"
#include "tests/model/scratch.h"

namespace efla {

// A listening socket of this machine, on a port that nobody had.
class FreePort {
 public:
  explicit FreePort(int backlog = 1) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, backlog), 0);
    socklen_t length = sizeof(address);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  ~FreePort() { close(fd_); }
  FreePort(const FreePort&) = delete;
  FreePort& operator=(const FreePort&) = delete;
  int port() const { return port_; }
  int fd() const { return fd_; }

 private:
  int fd_, port_ = 0;
};

// Connects to a port of this machine; -1 when nobody listens.
inline int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

class RedisServer {
 public:
  // The program's path; empty where it is not installed: the test skips.
  static std::string Program() {
    const char* path = std::getenv("PATH");
    std::istringstream folders(path == nullptr ? "" : path);
    for (std::string folder; std::getline(folders, folder, ':');) {
      const std::string program = folder + "/redis-server";
      if (access(program.c_str(), X_OK) == 0) return program;
    }
    return "";
  }

  // `options` as on redis-server's command line, beside the port and no snapshots of its own.
  explicit RedisServer(std::vector<std::string> options = {}) : options_(std::move(options)) {
    port_ = FreePort().port();
    Start();
  }
  ~RedisServer() { Kill(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  RedisAddress address() const {
    RedisAddress address;
    address.host = "127.0.0.1";
    address.port = port_;
    return address;
  }
  int port() const { return port_; }
  std::string url() const { return "redis://127.0.0.1:" + std::to_string(port_); }

  // Returns when it accepts connections.
  void Start() {
    std::vector<std::string> words = {
        Program(), "--port", std::to_string(port_), "--bind",     "127.0.0.1", "--save",
        "",        "--dir",  folder_.path(),        "--loglevel", "warning"};
    words.insert(words.end(), options_.begin(), options_.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string log = folder_.File("redis.log");
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      dup2(out, 1);
      dup2(out, 2);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
    for (int tries = 0; tries < 1000; ++tries) {
      if (const int fd = ConnectTo(port_); fd >= 0) {
        close(fd);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << "redis-server did not start on port " << port_ << ":\n" << ReadWhole(log);
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Holds it as it is: connections stay, nothing is answered.
  void Pause() {
    kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
  }
  void Resume() { kill(pid_, SIGCONT); }

 private:
  ScratchDirectory folder_;
  std::vector<std::string> options_;
  int port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace efla

// In a test's body or SetUp.
#define EFLA_SKIP_WITHOUT_REDIS()             \
  if (::efla::RedisServer::Program().empty()) \
  GTEST_SKIP() << "redis-server is not installed (deploy/packages.txt, group test)"

#endif  // EFLA_TESTS_SERVER_REDIS_SERVER_H_
