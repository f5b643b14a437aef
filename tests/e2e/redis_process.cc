#include "tests/e2e/redis_process.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace efla::e2e {
namespace {

constexpr char kProgram[] = "/usr/bin/redis-server";

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

// One that nobody uses now.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  bind(fd, reinterpret_cast<const sockaddr*>(&address), size);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  close(fd);
  return ntohs(address.sin_port);
}

bool Answers(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  char reply[8] = {};
  const bool good = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                    send(fd, "PING\r\n", 6, MSG_NOSIGNAL) == 6 && recv(fd, reply, 7, MSG_WAITALL) == 7 &&
                    std::string(reply, 5) == "+PONG";
  close(fd);
  return good;
}

}  // namespace

bool RedisProcess::Available() { return access(kProgram, X_OK) == 0; }

std::unique_ptr<RedisProcess> RedisProcess::Start() {
  constexpr int kTries = 5;  // somebody else may take the port in between
  for (int i = 0; i < kTries; ++i) {
    std::unique_ptr<RedisProcess> redis(new RedisProcess());
    redis->port_ = FreePort();
    redis->process_ = std::make_unique<ChildProcess>(std::vector<std::string>{
        kProgram, "--bind", "127.0.0.1", "--port", std::to_string(redis->port_), "--save", "", "--appendonly",
        "no", "--dir", redis->folder_.path().string()});
    const int port = redis->port_;
    ChildProcess& process = *redis->process_;
    const bool up = Eventually([&] { return Answers(port) || process.WaitForExit(milliseconds(0)); });
    if (up && !process.WaitForExit(milliseconds(0))) return redis;
  }
  ADD_FAILURE() << "redis-server does not answer";
  return nullptr;
}

std::string RedisProcess::url() const { return "redis://127.0.0.1:" + std::to_string(port_); }
void RedisProcess::Freeze() { process_->Signal(SIGSTOP); }
void RedisProcess::Thaw() { process_->Signal(SIGCONT); }

void RedisProcess::Kill() {
  process_->Signal(SIGKILL);
  process_->WaitForExit(seconds(10));
}

}  // namespace efla::e2e
