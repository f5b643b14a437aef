#include "server/sessions/redis_address.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr std::string_view kScheme = "redis://";

// Decimal digits and nothing else, at most `limit`.
std::optional<int> ParseNumber(std::string_view text, int limit) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = !text.empty() && text.front() != '-' && error == std::errc() &&
                         end == text.data() + text.size() && value <= limit;
  return is_number ? std::optional(value) : std::nullopt;
}

// %XX to bytes.
std::optional<std::string> Unescape(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      plain += text[i];
      continue;
    }
    int value = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != 2 || digits.front() == '-' || error != std::errc() ||
        end != digits.data() + digits.size()) {
      return std::nullopt;
    }
    plain += static_cast<char>(value);
    i += 2;
  }
  return plain;
}

bool IsHost(std::string_view host, bool bracketed) {
  return !host.empty() && std::all_of(host.begin(), host.end(), [&](char c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool digit = c >= '0' && c <= '9';
    return letter || digit || c == '.' || c == '-' || (bracketed ? c == ':' : c == '_');
  });
}

}  // namespace

absl::StatusOr<RedisAddress> RedisAddress::Parse(std::string_view url) {
  const auto bad = [](const std::string& why) {
    return absl::InvalidArgumentError(
        "the store's address is redis://[[user]:password@]host[:port][/database]; " + why);
  };
  if (!url.starts_with(kScheme)) {
    return bad("this one does not begin with redis:// (TLS, rediss://, is not built in)");
  }
  url.remove_prefix(kScheme.size());
  RedisAddress address;
  if (const size_t at = url.rfind('@'); at != std::string_view::npos) {
    const std::string_view login = url.substr(0, at);
    url.remove_prefix(at + 1);
    const size_t colon = login.find(':');
    if (colon == std::string_view::npos) return bad("there is a user without a password");
    const auto user = Unescape(login.substr(0, colon));
    const auto password = Unescape(login.substr(colon + 1));
    if (login.find_first_of("/?#@") != std::string_view::npos || !user || !password || password->empty()) {
      return bad(
          "user or password is empty, or holds a % that is not %XX, or one of / ? # @ not written as %XX");
    }
    address.user = *user;
    address.password = *password;
  }
  if (const size_t slash = url.find('/'); slash != std::string_view::npos) {
    const auto database = ParseNumber(url.substr(slash + 1), 65535);
    if (!database) {
      return bad(
          absl::StrFormat("the database is \"%s\"; it is a number of 0 to 65535", url.substr(slash + 1)));
    }
    address.database = *database;
    url = url.substr(0, slash);
  }
  const bool bracketed = url.starts_with('[');
  size_t host_end = url.find(':');
  std::string_view host = url.substr(0, host_end);
  if (bracketed) {
    const size_t bracket = url.find(']');
    if (bracket == std::string_view::npos) return bad("the host has a [ without ]");
    host = url.substr(1, bracket - 1);
    host_end = bracket + 1 == url.size() ? std::string_view::npos : bracket + 1;
    if (host_end != std::string_view::npos && url[host_end] != ':')
      return bad("] is followed by something else");
  }
  if (!IsHost(host, bracketed)) return bad(absl::StrFormat("the host is \"%s\"", host));
  address.host = std::string(host);
  if (host_end != std::string_view::npos) {
    const auto port = ParseNumber(url.substr(host_end + 1), 65535);
    if (!port || *port == 0) {
      return bad(absl::StrFormat("the port is \"%s\"; it is 1 to 65535", url.substr(host_end + 1)));
    }
    address.port = *port;
  }
  return address;
}

std::string RedisAddress::ToString() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return is_ipv6 ? absl::StrFormat("redis://[%s]:%d/%d", host, port, database)
                 : absl::StrFormat("redis://%s:%d/%d", host, port, database);
}

}  // namespace efla
