// One connection to a Redis server: commands out, replies in, each by a deadline.
#ifndef EFLA_SERVER_SESSIONS_REDIS_CONNECTION_H_
#define EFLA_SERVER_SESSIONS_REDIS_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/host_lookup.h"
#include "server/sessions/redis_address.h"

namespace efla {

struct RedisReply {
  enum class Type { kNil, kInteger, kText, kArray, kError };
  Type type = Type::kNil;
  int64_t integer = 0;
  std::string text;  // also of an error
  std::vector<RedisReply> elements;

  // The error that it is: RESOURCE_EXHAUSTED (out of memory), PERMISSION_DENIED (credentials), UNAVAILABLE
  // (loading, read-only, disk trouble), INTERNAL (a command of ours was wrong).
  absl::Status status() const;
};

// One thread at a time. A transport error or a deadline that passes leaves it unusable: what is on the wire
// can no longer be told.
class RedisConnection {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Logs in and selects the database. `host`: of the address. UNAVAILABLE; PERMISSION_DENIED.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisAddress& address,
                                                                  HostLookup& host, TimePoint deadline);
  ~RedisConnection();

  // UNAVAILABLE. Commands may be sent ahead of the replies to earlier ones.
  absl::Status Send(std::span<const std::string_view> words, TimePoint deadline);
  // The reply to the earliest command that has none. Errors are statuses only where the transport failed.
  absl::StatusOr<RedisReply> Receive(TimePoint deadline);
  // Likewise, where a text is expected: its bytes go to `to` and nowhere else, when they are as many;
  // `integer` is how many there were.
  absl::StatusOr<RedisReply> ReceiveInto(std::span<std::byte> to, TimePoint deadline);
  // One command; error replies are statuses.
  absl::StatusOr<RedisReply> Call(std::span<const std::string_view> words, TimePoint deadline);

  bool usable() const { return usable_; }
  // Every command has had its reply: somebody else may go on with it.
  bool in_step() const { return usable_ && outstanding_ == 0; }
  // The server closed it, rather than let it wait: another connection may do better.
  bool closed_by_server() const { return closed_by_server_; }
  // Of an idle connection: nothing has arrived, not even its end.
  bool IsQuiet() const;

 private:
  struct ReaderDeleter {
    void operator()(void* reader) const;
  };

  RedisConnection(int fd, std::string name);
  // `more`: bytes of the same command follow.
  absl::Status SendBytes(std::string_view bytes, bool more, TimePoint deadline);
  absl::Status WaitFor(short events, TimePoint deadline);
  absl::Status Broken(const std::string& why);

  const int fd_;
  const std::string name_;  // of the server, for messages
  std::unique_ptr<void, ReaderDeleter> reader_;
  std::span<std::byte> place_;  // for the text of the next reply
  std::vector<char> received_;
  bool usable_ = true, closed_by_server_ = false;
  int64_t outstanding_ = 0;  // replies to come
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_REDIS_CONNECTION_H_
