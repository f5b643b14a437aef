#include "tests/e2e/admin_page.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <regex>
#include <sstream>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

int Connect(const std::string& address) {
  const size_t colon = address.rfind(':');
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints, &found) != 0) {
    return -1;
  }
  int fd = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
  timeval timeout = {.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  if (connect(fd, found->ai_addr, found->ai_addrlen) != 0) {
    close(fd);
    fd = -1;
  }
  freeaddrinfo(found);
  return fd;
}

// The body of a reply with "Transfer-Encoding: chunked".
std::string JoinChunks(std::string_view chunks) {
  std::string body;
  while (!chunks.empty()) {
    const size_t size = std::strtoul(std::string(chunks.substr(0, 16)).c_str(), nullptr, 16);
    const size_t begin = chunks.find("\r\n");
    if (size == 0 || begin == std::string_view::npos || begin + 2 + size > chunks.size()) break;
    body += chunks.substr(begin + 2, size);
    chunks.remove_prefix(std::min(chunks.size(), begin + 2 + size + 2));
  }
  return body;
}

}  // namespace

HttpReply HttpGet(const std::string& address, const std::string& path) {
  HttpReply reply;
  const int fd = Connect(address);
  if (fd < 0) return reply;
  const std::string request =
      "GET " + path + " HTTP/1.1\r\nHost: " + address + "\r\nConnection: close\r\n\r\n";
  std::string all;
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    char part[16384];
    ssize_t size = 0;
    while ((size = recv(fd, part, sizeof(part), 0)) > 0) all.append(part, size);
  }
  close(fd);
  const size_t head_end = all.find("\r\n\r\n");
  if (head_end == std::string::npos || all.compare(0, 7, "HTTP/1.") != 0) return reply;
  reply.status = std::atoi(all.c_str() + 9);
  reply.body = all.substr(head_end + 4);
  if (all.substr(0, head_end).find("chunked") != std::string::npos) reply.body = JoinChunks(reply.body);
  return reply;
}

Metrics Metrics::Read(const std::string& admin_address) {
  const HttpReply reply = HttpGet(admin_address, "/metrics");
  EXPECT_EQ(reply.status, 200) << reply.body;
  static const std::regex kType("# TYPE ([a-z_:][a-z0-9_:]*) (counter|gauge|histogram|summary|untyped)");
  static const std::regex kSample("([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\\{(.*)\\})? ([^ ]+)");
  Metrics metrics;
  std::istringstream lines(reply.body);
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.rfind("# HELP ", 0) == 0) continue;
    if (std::regex_match(line, match, kType)) {
      metrics.types_[match[1]] = match[2];
    } else if (std::regex_match(line, match, kSample)) {
      metrics.series_.emplace(match[1], Series{absl::StrFormat(",%s,", match[2].str()), std::stod(match[3])});
    } else {
      ADD_FAILURE() << "not a line of the Prometheus text format: " << line;
    }
  }
  return metrics;
}

std::string Metrics::TypeOf(const std::string& family) const {
  const auto found = types_.find(family);
  return found == types_.end() ? "" : found->second;
}

double Metrics::Sum(const std::string& name, const std::vector<std::string>& labels) const {
  double sum = 0;
  const auto [begin, end] = series_.equal_range(name);
  for (auto it = begin; it != end; ++it) {
    bool all = true;
    for (const std::string& label : labels) {
      all = all && it->second.labels.find(absl::StrFormat(",%s,", label)) != std::string::npos;
    }
    if (all) sum += it->second.value;
  }
  return sum;
}

int Metrics::NumSeries(const std::string& name) const { return static_cast<int>(series_.count(name)); }

void ExpectIdle(const std::string& admin_address) {
  double waiting = -1, running = -1, in_use = -1;
  const auto is_idle = [&] {
    const Metrics metrics = Metrics::Read(admin_address);
    EXPECT_GT(metrics.NumSeries("efla_requests_waiting"), 0);
    EXPECT_GT(metrics.NumSeries("efla_requests_running"), 0);
    EXPECT_GT(metrics.Sum("efla_state_slots", {"kind=\"total\""}), 0);
    waiting = metrics.Sum("efla_requests_waiting");
    running = metrics.Sum("efla_requests_running");
    in_use = metrics.Sum("efla_state_slots", {"kind=\"total\""}) -
             metrics.Sum("efla_state_slots", {"kind=\"free\""}) - metrics.Sum("efla_prefix_cache_slots");
    return waiting == 0 && running == 0 && in_use == 0;
  };
  EXPECT_TRUE(Eventually(is_idle)) << "waiting " << waiting << ", running " << running << ", slots in use "
                                   << in_use;
}

}  // namespace efla::e2e
