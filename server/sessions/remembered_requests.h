// Request ids of calls that make or delete a session: what has no session to record it in, or none any more.
#ifndef EFLA_SERVER_SESSIONS_REMEMBERED_REQUESTS_H_
#define EFLA_SERVER_SESSIONS_REMEMBERED_REQUESTS_H_

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/sessions/session_manager.h"

namespace efla {

// Thread-safe; its lock is taken alone. The last 10,000 are kept.
class RememberedRequests {
 public:
  enum class Call { kCreate, kImport, kDelete };
  struct Outcome {
    std::string session_id;
    SessionInfo made;  // what was answered; of a deletion nothing
  };

  // What the request has come to; nullopt: it is new, and under way until Finish or Forget. ABORTED: another
  // call of it is under way.
  absl::StatusOr<std::optional<Outcome>> Begin(Call call, const std::string& request_id);
  void Finish(Call call, const std::string& request_id, Outcome outcome);
  void Forget(Call call, const std::string& request_id);
  // Forgets the request that made this session, if it is remembered.
  void ForgetMaking(const std::string& session_id);
  // Without beginning anything.
  std::optional<Outcome> Find(Call call, const std::string& request_id) const;

 private:
  using Key = std::pair<Call, std::string>;
  void DropOldest();  // with mutex_ held

  mutable std::mutex mutex_;                        // guards what follows
  std::map<Key, std::optional<Outcome>> requests_;  // nullopt: under way
  std::deque<Key> order_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_REMEMBERED_REQUESTS_H_
