// Which sessions this server knows, by their keys (session_key.h).
#ifndef EFLA_SERVER_SESSIONS_SESSION_TABLE_H_
#define EFLA_SERVER_SESSIONS_SESSION_TABLE_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/sessions/session.h"

namespace efla {

// Thread-safe. Its lock is taken alone; sessions are let go of without it.
class SessionTable {
 public:
  explicit SessionTable(int max_sessions) : max_sessions_(max_sessions) {}

  SessionPtr Find(const std::string& id) const;  // null: none
  // The one that is listed under the session's key from now on: itself, or another one that was there before.
  // RESOURCE_EXHAUSTED when there are too many.
  absl::StatusOr<SessionPtr> Insert(const SessionPtr& session);
  // Lists it however many there are; its key is not there yet.
  void Add(SessionPtr session);
  // Nothing when another one, or none, is listed under its key.
  void Remove(const SessionPtr& session);

  std::vector<SessionPtr> All() const;
  // Those with keys behind `after` that begin with `prefix`.
  std::map<std::string, SessionPtr> Matching(const std::string& prefix, const std::string& after) const;
  // The next ones behind the key `after`, which moves on with them, and from the last one to the beginning.
  std::vector<SessionPtr> Next(std::string& after, size_t most) const;

 private:
  const int max_sessions_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::string, SessionPtr> sessions_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_TABLE_H_
