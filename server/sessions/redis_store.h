// Sessions in a Redis server that replicas share.
#ifndef EFLA_SERVER_SESSIONS_REDIS_STORE_H_
#define EFLA_SERVER_SESSIONS_REDIS_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/host_buffer.h"
#include "server/sessions/redis_address.h"
#include "server/sessions/session_store.h"

namespace efla {

struct RedisStoreOptions {
  std::string key_prefix = "efla:";
  std::chrono::milliseconds connect_timeout{500};
  // Of a command; of each MiB for snapshots.
  std::chrono::milliseconds command_timeout{1000};
  // Connections at most. Half of them may carry snapshots at once; the rest stays free for records and
  // leases.
  int max_connections = 8;
  // The circuit breaker: after so many calls in a row that could not reach the server, calls fail at once for
  // breaker_open; then one goes through as a probe.
  int breaker_failures = 3;
  std::chrono::milliseconds breaker_open{1000};
  // How long a snapshot lives that no record names (yet, or any longer), and how much longer than the records
  // that name it.
  std::chrono::milliseconds unnamed_grace{std::chrono::minutes(5)};
  std::chrono::milliseconds tombstone_ttl{std::chrono::hours(24)};
  // Of records that never expire, since their last put.
  std::chrono::milliseconds longest_ttl{std::chrono::hours(24 * 60)};
  std::shared_ptr<HostBuffers> buffers = nullptr;  // for snapshots read; null: its own
};

// Beyond SessionStore: keys and scripts are in README.md. A call that timed out may have been carried out:
// its error says so, and GetRecord tells. Durable means what the Redis server's own configuration makes of
// it.
class RedisStore : public SessionStore {
 public:
  // Does not connect. INVALID_ARGUMENT: options out of range.
  static absl::StatusOr<std::unique_ptr<RedisStore>> Create(const RedisAddress& address,
                                                            const RedisStoreOptions& options);

  // UNAVAILABLE, or PERMISSION_DENIED when the server refuses user and password.
  virtual absl::Status Ping() = 0;
  // The same, but while the server answers that it is loading its data, asks again until `patience` has
  // passed. `on_wait` is called once, when there is something to wait for.
  virtual absl::Status PingLoaded(std::chrono::milliseconds patience,
                                  const std::function<void()>& on_wait) = 0;
  // What the server does when its memory is full: "noeviction", or how it chooses what to forget
  // ("allkeys-lru"). PERMISSION_DENIED when it does not tell this user.
  virtual absl::StatusOr<std::string> MaxMemoryPolicy() = 0;

  enum class Breaker { kClosed, kOpen, kHalfOpen };
  struct Stats {
    Breaker breaker = Breaker::kClosed;
    int connections = 0;  // open now
    uint64_t calls = 0, failures = 0, refused_by_breaker = 0, connects = 0;
  };
  virtual Stats stats() const = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_REDIS_STORE_H_
