// A server that is out of file descriptors can take no connection any more, and knows it.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

// Connections that say nothing.
class IdleConnections {
 public:
  IdleConnections(int count, int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    for (int i = 0; i < count; ++i) {
      fds_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(connect(fds_.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    }
  }
  ~IdleConnections() {
    for (const int fd : fds_) close(fd);
  }
  IdleConnections(const IdleConnections&) = delete;
  IdleConnections& operator=(const IdleConnections&) = delete;

 private:
  std::vector<int> fds_;
};

class DescriptorsTest : public ::testing::Test {
 protected:
  // `limit` in the words of the shell's ulimit. False when the server does not become ready.
  bool Start(const std::string& limit, const std::vector<std::string>& flags = {}) {
    std::vector<std::string> command = {"/bin/sh", "-c", "ulimit " + limit + " && exec \"$@\"", "sh"};
    const std::vector<std::string> server = ServerProcess::Command(GoldenDir("efla_basic"), flags);
    command.insert(command.end(), server.begin(), server.end());
    process_ = std::make_unique<ChildProcess>(command);
    static const std::regex kReadyLine("grpc=\\S+:(\\d+) admin=(\\S+:\\d+) ");
    std::smatch match;
    std::string out;
    const bool ready = Eventually(
        [&] {
          out = process_->out();
          return std::regex_search(out, match, kReadyLine);
        },
        seconds(60));
    EXPECT_TRUE(ready) << process_->err();
    if (!ready) return false;
    port_ = std::stoi(match[1]);
    admin_ = match[2];
    return true;
  }
  int HttpStatus(const std::string& path) { return HttpGet(admin_, path).status; }

  std::unique_ptr<ChildProcess> process_;
  int port_ = 0;
  std::string admin_;
};

TEST_F(DescriptorsTest, AServerWithoutAnyForNewConnectionsEndsToBeStartedAgain) {
  ASSERT_TRUE(Start("-n 200", {"--drain-delay", "2"}));
  EXPECT_EQ(HttpStatus("/livez"), 200);
  std::this_thread::sleep_for(seconds(2));  // a probe is answered
  {
    const IdleConnections all(300, port_);
    std::this_thread::sleep_for(milliseconds(500));
  }
  EXPECT_TRUE(Eventually([&] { return process_->err().find("port_deaf") != std::string::npos; }, seconds(60)))
      << process_->err();
  EXPECT_EQ(HttpStatus("/livez"), 503);
  EXPECT_EQ(HttpStatus("/readyz"), 503);
  EXPECT_EQ(HttpStatus("/lbz"), 503);
  process_->Signal(SIGTERM);  // of a supervisor that has seen that: it is draining already
  EXPECT_EQ(process_->WaitForExit(seconds(30)), 1);
  const std::string log = process_->err();
  EXPECT_NE(log.find("sessions_drained"), std::string::npos) << log;
  EXPECT_NE(log.find("stopped: drained"), std::string::npos) << log;
  EXPECT_EQ(log.find("cancelling"), std::string::npos) << log;
}

TEST_F(DescriptorsTest, TheSoftLimitIsNone) {
  ASSERT_TRUE(Start("-Sn 150"));
  EXPECT_NE(process_->err().find("descriptor_limit"), std::string::npos) << process_->err();
  const IdleConnections many(400, port_);
  std::this_thread::sleep_for(seconds(1));
  EXPECT_EQ(HttpStatus("/readyz"), 200);
  const IdleConnections more(1, port_);
  process_->Signal(SIGTERM);
  EXPECT_EQ(process_->WaitForExit(seconds(30)), 0);
}

}  // namespace
}  // namespace efla::e2e
