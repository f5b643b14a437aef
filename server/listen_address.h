// Where a server listens: HOST:PORT, with IPv6 hosts in brackets.
#ifndef EFLA_SERVER_LISTEN_ADDRESS_H_
#define EFLA_SERVER_LISTEN_ADDRESS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace efla {

struct ListenAddress {
  std::string host;  // without brackets
  int port = 0;      // 0: the system picks one

  // INVALID_ARGUMENT unless `text` is HOST:PORT with a port of 0 to 65535.
  static absl::StatusOr<ListenAddress> Parse(std::string_view text);
  // The same, but an IPv6 host may lack its brackets: what follows the last colon is the port, as where a
  // program has put ":PORT" behind an address.
  static absl::StatusOr<ListenAddress> ParseJoined(std::string_view text);
  std::string ToString() const;
};

// Why nothing can listen there, in the system's words ("Address already in use"); found by trying to bind.
std::string WhyNotListening(const ListenAddress& address);

// Opens a connection to whoever listens there, and closes it: wakes a loop that waits for one.
void TouchListener(const ListenAddress& address);

}  // namespace efla

#endif  // EFLA_SERVER_LISTEN_ADDRESS_H_
