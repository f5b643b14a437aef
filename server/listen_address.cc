#include "server/listen_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "absl/strings/str_format.h"

namespace efla {

absl::StatusOr<ListenAddress> ListenAddress::Parse(std::string_view text) {
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\" is not HOST:PORT with a port of 0 to 65535", text));
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return bad();
  std::string_view host = text.substr(0, colon), port_text = text.substr(colon + 1);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad();
  }
  ListenAddress address;
  address.host = std::string(host);
  const auto [end, error] =
      std::from_chars(port_text.data(), port_text.data() + port_text.size(), address.port);
  if (host.empty() || port_text.empty() || error != std::errc() ||
      end != port_text.data() + port_text.size() || address.port < 0 || address.port > 65535) {
    return bad();
  }
  return address;
}

absl::StatusOr<ListenAddress> ListenAddress::ParseJoined(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon != std::string_view::npos) {
    const std::string host(text.substr(0, colon));
    in6_addr ipv6{};
    if (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) {
      return Parse("[" + host + "]" + std::string(text.substr(colon)));
    }
  }
  return Parse(text);
}

std::string ListenAddress::ToString() const {
  return host.find(':') == std::string::npos ? absl::StrFormat("%s:%d", host, port)
                                             : absl::StrFormat("[%s]:%d", host, port);
}

namespace {

// The socket addresses behind it; null with `error` set to the reason.
std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> Resolve(const ListenAddress& address, std::string& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) error = gai_strerror(code);
  return {found, freeaddrinfo};
}

}  // namespace

std::string WhyNotListening(const ListenAddress& address) {
  std::string error;
  const auto found = Resolve(address, error);
  if (found == nullptr) return error;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    const int fd = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    if (fd < 0) return std::strerror(errno);
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    std::string why;
    if (bind(fd, one->ai_addr, one->ai_addrlen) != 0 || listen(fd, 1) != 0) why = std::strerror(errno);
    close(fd);
    if (!why.empty()) return why;
  }
  return "the address could not be bound";
}

void TouchListener(const ListenAddress& address) {
  std::string error;
  const auto found = Resolve(address, error);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    const int fd = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, one->ai_protocol);
    if (fd < 0) continue;
    (void)connect(fd, one->ai_addr, one->ai_addrlen);  // that it is under way is enough
    close(fd);
  }
}

}  // namespace efla
