// Where a Redis server is and who we are to it.
#ifndef EFLA_SERVER_SESSIONS_REDIS_ADDRESS_H_
#define EFLA_SERVER_SESSIONS_REDIS_ADDRESS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace efla {

struct RedisAddress {
  std::string host;
  int port = 6379;
  std::string user, password;  // empty: none
  int database = 0;

  // redis://[[user]:password@]host[:port][/database], with %XX in user and password, IPv6 in brackets.
  // INVALID_ARGUMENT says what is wrong and never holds the user or the password.
  static absl::StatusOr<RedisAddress> Parse(std::string_view url);
  // For messages: without user and password.
  std::string ToString() const;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_REDIS_ADDRESS_H_
