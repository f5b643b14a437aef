// The addresses of a host, by a deadline.
#ifndef EFLA_SERVER_SESSIONS_HOST_LOOKUP_H_
#define EFLA_SERVER_SESSIONS_HOST_LOOKUP_H_

#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace efla {

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

// Thread-safe. The system's resolver knows no deadline and cannot be stopped: it runs in a thread of its own,
// which may outlive this. One runs at a time; an answer too late for those who waited is the next caller's.
class HostLookup {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Answer = absl::StatusOr<std::vector<SocketAddress>>;

  // A name or a number.
  HostLookup(std::string host, int port);
  // Asks `resolver` instead.
  explicit HostLookup(std::function<Answer()> resolver) : resolver_(std::move(resolver)) {}

  // In the order in which they are to be tried. UNAVAILABLE.
  Answer Find(TimePoint deadline);

 private:
  const std::function<Answer()> resolver_;
  std::mutex mutex_;
  std::shared_future<Answer> under_way_;  // guarded by mutex_; invalid: nobody has asked
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_HOST_LOOKUP_H_
