#include "server/admin_http.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace efla {
namespace {

// The whole answer to a request of one line, on the loopback.
std::string Ask(int port, const std::string& line) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = line + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char part[4096];
      for (ssize_t n; (n = read(fd, part, sizeof(part))) > 0;) answer.append(part, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

TEST(AdminHttpTest, PagesAnswerAndAPortIsTakenOnce) {
  std::atomic<bool> is_ready = false;
  auto http = AdminHttp::Start(
      {"127.0.0.1", 0}, {.live =
                             [] {
                               return HttpReply{200, "ok\n"};
                             },
                         .ready =
                             [&] {
                               return is_ready ? HttpReply{200, "ready\n"} : HttpReply{503, "loading\n"};
                             },
                         .metrics =
                             [] {
                               return HttpReply{200, "efla_ready 1\n"};
                             }});
  ASSERT_TRUE(http.ok()) << http.status();
  const ListenAddress bound = (*http)->address();
  ASSERT_GT(bound.port, 0);

  EXPECT_EQ(Ask(bound.port, "GET /livez").find("HTTP/1.1 200 "), 0u);
  EXPECT_EQ(Ask(bound.port, "GET /readyz").find("HTTP/1.1 503 "), 0u);
  is_ready = true;
  EXPECT_EQ(Ask(bound.port, "GET /readyz").find("HTTP/1.1 200 "), 0u);
  const std::string metrics = Ask(bound.port, "GET /metrics");
  EXPECT_NE(metrics.find("text/plain; version=0.0.4"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("efla_ready 1\n"), std::string::npos) << metrics;
  EXPECT_NE(Ask(bound.port, "GET /").find("/readyz"), std::string::npos);
  for (const char* path : {"GET /nowhere", "GET /metrics/x", "GET /../etc/passwd"}) {
    EXPECT_EQ(Ask(bound.port, path).find("HTTP/1.1 200"), std::string::npos) << path;
  }

  const auto second = AdminHttp::Start(bound, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(second.status().message()).find("cannot listen on " + bound.ToString()),
            std::string::npos)
      << second.status();
  EXPECT_NE(std::string(second.status().message()).find("in use"), std::string::npos) << second.status();
}

}  // namespace
}  // namespace efla
