#include "server/admin_http.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/admin_generate.h"

namespace efla {
namespace {

// A connection to a port of this machine, not below 0.
int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// The whole answer to a request of one line and more headers, on the loopback.
std::string Ask(int port, const std::string& line, const std::string& headers = "Host: localhost\r\n",
                const std::string& body = "") {
  const int fd = ConnectTo(port);
  std::string answer;
  const std::string request = line + " HTTP/1.1\r\n" + headers + "Connection: close\r\n\r\n" + body;
  if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char part[4096];
    for (ssize_t n; (n = read(fd, part, sizeof(part))) > 0;) answer.append(part, static_cast<size_t>(n));
  }
  close(fd);
  return answer;
}

TEST(AdminHttpTest, PagesAnswerAndAPortIsTakenOnce) {
  std::atomic<bool> is_ready = false;
  AdminPages pages;
  pages.live = [] { return HttpReply{200, "ok\n"}; };
  pages.ready = [&] { return is_ready ? HttpReply{200, "ready\n"} : HttpReply{503, "loading\n"}; };
  pages.balancer = [] { return HttpReply{404, "draining\n"}; };
  pages.metrics = [] { return HttpReply{200, "efla_ready 1\n"}; };
  auto http = AdminHttp::Start({"127.0.0.1", 0}, std::move(pages));
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
  EXPECT_EQ(Ask(bound.port, "GET /lbz").find("HTTP/1.1 404 "), 0u);
  const std::string page = Ask(bound.port, "GET /");
  EXPECT_NE(page.find("text/html"), std::string::npos);
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("/readyz"), std::string::npos);
  EXPECT_EQ(page.substr(page.size() - 8), "</html>\n");
  EXPECT_NE(page.find(R"( id="generate" hidden>)"), std::string::npos) << "there are no completions";
  for (const char* path : {"GET /nowhere", "GET /v1/generate", "GET /metrics/x", "GET /../etc/passwd"}) {
    EXPECT_EQ(Ask(bound.port, path).find("HTTP/1.1 200"), std::string::npos) << path;
  }

  const auto second = AdminHttp::Start(bound, {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(second.status().message()).find("cannot listen on " + bound.ToString()),
            std::string::npos)
      << second.status();
  EXPECT_NE(std::string(second.status().message()).find("in use"), std::string::npos) << second.status();
}

TEST(AdminHttpTest, ConnectionsThatSayNothingHoldUpNobodyAndAreEnded) {
  using std::chrono::seconds;
  using Clock = std::chrono::steady_clock;
  AdminPages pages;
  pages.live = [] { return HttpReply{200, "ok\n"}; };
  auto http = AdminHttp::Start({"127.0.0.1", 0}, std::move(pages));
  ASSERT_TRUE(http.ok()) << http.status();
  const int port = (*http)->address().port;
  std::vector<int> idle;
  for (int i = 0; i < 60; ++i) {
    idle.push_back(ConnectTo(port));
    // Some begin a request and leave it there.
    if (i % 2 == 0) {
      EXPECT_EQ(write(idle.back(), "GET /livez HTTP/1.1\r\n", 21), 21);
    }
  }
  const Clock::time_point begin = Clock::now();
  EXPECT_EQ(Ask(port, "GET /livez").find("HTTP/1.1 200 "), 0u);
  EXPECT_LT(Clock::now() - begin, seconds(1));
  for (const int fd : idle) {
    const timeval patience{.tv_sec = 10, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    char part[4096];
    ssize_t read_bytes = 0;
    while ((read_bytes = read(fd, part, sizeof(part))) > 0) {
    }
    EXPECT_EQ(read_bytes, 0) << "not ended: " << errno;
    close(fd);
  }
  EXPECT_LT(Clock::now() - begin, seconds(10));
}

TEST(AdminHttpTest, AnIpv6HostIsServedOrRefusedWithTheReason) {
  const auto http = AdminHttp::Start({"::1", 0}, {});
  if (http.ok()) return;
  EXPECT_EQ(http.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(http.status().ToString().find("cannot listen on [::1]:0: civetweb"), std::string::npos)
      << http.status();
}

TEST(AdminHttpTest, CompletionsStreamToThisMachineAlone) {
  AdminPages pages;
  pages.generate = [](std::string_view body, const HttpStream& stream) -> std::optional<HttpReply> {
    if (body == "bad") return HttpReply{400, "bad body\n"};
    EXPECT_TRUE(stream(std::string(body)));
    EXPECT_TRUE(stream("second"));
    return std::nullopt;
  };
  auto http = AdminHttp::Start({"127.0.0.1", 0}, std::move(pages));
  ASSERT_TRUE(http.ok()) << http.status();
  const int port = (*http)->address().port;
  const auto post = [port](const std::string& host, const std::string& type, const std::string& body) {
    return Ask(port, "POST /v1/generate",
               "Host: " + host + "\r\nContent-Type: " + type +
                   "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n",
               body);
  };
  constexpr char kJson[] = "application/json";
  for (const char* host : {"localhost", "localhost:9090", "127.0.0.1:1", "[::1]:9090"}) {
    const std::string reply = post(host, kJson, "first");
    EXPECT_EQ(reply.find("HTTP/1.1 200 "), 0u) << host << reply;
    EXPECT_NE(reply.find("text/event-stream"), std::string::npos) << reply;
    EXPECT_NE(reply.find("\r\n\r\ndata: first\n\ndata: second\n\n"), std::string::npos) << reply;
  }
  EXPECT_EQ(post("localhost", kJson, "bad").find("HTTP/1.1 400 "), 0u);
  // Web pages from elsewhere cannot send this type unasked, nor hide the name that they go by.
  EXPECT_EQ(post("localhost", "text/plain", "first").find("HTTP/1.1 415 "), 0u);
  for (const char* host : {"evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9090"}) {
    EXPECT_EQ(post(host, kJson, "first").find("HTTP/1.1 403 "), 0u) << host;
  }
  EXPECT_EQ(Ask(port, "POST /v1/generate", "Host: localhost\r\nContent-Type: application/json\r\n")
                .find("HTTP/1.1 411"),
            0u);
  EXPECT_EQ(Ask(port, "POST /v1/generate",
                "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 1048577\r\n")
                .find("HTTP/1.1 413 "),
            0u);
  EXPECT_EQ(Ask(port, "GET /v1/generate").find("HTTP/1.1 405 "), 0u);
  const std::string page = Ask(port, "GET /");
  EXPECT_EQ(page.find("HTTP/1.1 200 "), 0u);
  EXPECT_NE(page.find(R"( id="generate">)"), std::string::npos) << "the box is shown";
  EXPECT_EQ(page.substr(page.size() - 8), "</html>\n");
}

TEST(AdminHttpTest, RequestsOfACompletionAreReadStrictly) {
  const ServedModel model;  // without a tokenizer: nothing is computed
  ServingState state;
  state.Publish(&model);
  AdminPages pages;
  pages.generate = [&](std::string_view body, const HttpStream& stream) {
    return StreamCompletion(state, body, stream);
  };
  auto http = AdminHttp::Start({"127.0.0.1", 0}, std::move(pages));
  ASSERT_TRUE(http.ok()) << http.status();
  const auto nested = [](size_t levels) {
    return R"({"prompt": "a", "x": )" + std::string(levels, '[') + std::string(levels, ']') + "}";
  };
  constexpr char kGood[] = "the model has no tokenizer";
  const std::vector<std::pair<std::string, const char*>> cases = {
      {R"({"prompt": "a"})", kGood},
      {R"({"seed": 18446744073709551615, "temperature": 2, "max_tokens": 4096, "prompt": "a"})", kGood},
      {"", "not JSON"},
      {R"({"prompt": "a")", "not JSON"},
      {"{\"prompt\": \"\xff\"}", "not JSON"},
      {"[1]", "an object is needed"},
      {"{}", "prompt is missing"},
      {R"({"prompt": ["a"]})", "prompt is [\"a\"]; a string is needed"},
      {R"({"prompt": "a", "prompt": "b"})", "the key \"prompt\" is there twice"},
      {R"({"prompt": "a", "max_tokens": 0})", "max_tokens is 0; an integer from 1 to 4096 is needed"},
      {R"({"prompt": "a", "max_tokens": 4097})", "max_tokens is 4097"},
      {R"({"prompt": "a", "max_tokens": 1.5})", "max_tokens is 1.5"},
      {R"({"prompt": "a", "temperature": 2.5})", "temperature is 2.5; a number from 0 to 2 is needed"},
      {R"({"prompt": "a", "seed": -1})", "seed is -1; a whole number, 0 or above, is needed"},
      {R"({"prompt": "a", "x": 0})", "there is no field x"},
      {nested(31), "there is no field x"},
      {nested(32), "nested deeper than 32 levels"},
      {nested(1'000), "nested deeper than 32 levels"},
      {nested(500'000), "nested deeper than 32 levels"}};
  for (const auto& [body, words] : cases) {
    const std::string reply = Ask((*http)->address().port, "POST /v1/generate",
                                  "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
                                      std::to_string(body.size()) + "\r\n",
                                  body);
    EXPECT_EQ(reply.find("HTTP/1.1 400 "), 0u) << body.substr(0, 100) << reply;
    EXPECT_NE(reply.find(words), std::string::npos) << body.substr(0, 100) << reply;
  }
}

}  // namespace
}  // namespace efla
