// Where the server of a gRPC target is.
#ifndef EFLA_CLIENT_TARGET_H_
#define EFLA_CLIENT_TARGET_H_

#include <optional>
#include <string>
#include <string_view>

namespace efla {

struct HostPort {
  std::string host, port;  // the host without brackets
};
// Of HOST:PORT or [HOST]:PORT with a port from 1 to 65535.
std::optional<HostPort> ParseHostPort(std::string_view target);

// Whether what is sent to the target stays on this machine: 127.0.0.0/8, ::1, localhost, unix:. Of any form
// of gRPC target; false for one that is not understood. Asks no name server.
bool IsOnThisMachine(std::string_view target);

}  // namespace efla

#endif  // EFLA_CLIENT_TARGET_H_
