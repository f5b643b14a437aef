#include "client/target.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <system_error>

#include "absl/strings/match.h"

namespace efla {
namespace {

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Of HOST, HOST:PORT, [HOST], [HOST]:PORT or a bare IPv6 address.
std::string HostOf(std::string_view address) {
  if (TakePrefix(address, "[")) return std::string(address.substr(0, address.find(']')));
  const size_t colon = address.find(':');
  const bool has_port = colon != address.npos && address.find(':', colon + 1) == address.npos;
  return std::string(has_port ? address.substr(0, colon) : address);
}

bool IsLoopback(const std::string& host) {
  constexpr uint8_t kLoopbackNet = 127;
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == kLoopbackNet;
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == kLoopbackNet);
}

}  // namespace

std::optional<HostPort> ParseHostPort(std::string_view target) {
  const size_t colon = target.rfind(':');
  if (colon == target.npos) return std::nullopt;
  std::string_view host = target.substr(0, colon), port = target.substr(colon + 1);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (host.empty() || host.find_first_of(bracketed ? "[]/ " : "[]/ :") != host.npos) return std::nullopt;
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number == 0) return std::nullopt;
  return HostPort{std::string(host), std::string(port)};
}

bool IsOnThisMachine(std::string_view target) {
  if (target.starts_with("unix:") || target.starts_with("unix-abstract:")) return true;
  if (TakePrefix(target, "ipv4:") || TakePrefix(target, "ipv6:")) {  // a list of addresses
    for (;;) {
      const size_t comma = std::min(target.find(','), target.size());
      if (!IsLoopback(HostOf(target.substr(0, comma)))) return false;
      if (comma == target.size()) return true;
      target.remove_prefix(comma + 1);
    }
  }
  // dns:///HOST; between the second slash and the third is a name server, which may answer what it likes.
  if (TakePrefix(target, "dns:") && target.starts_with("//") && !TakePrefix(target, "///")) return false;
  return IsLoopback(HostOf(target));
}

}  // namespace efla
