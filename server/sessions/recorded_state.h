// Between a session's state and the payload of its records: what is put into a store for it and named, and
// found again.
#ifndef EFLA_SERVER_SESSIONS_RECORDED_STATE_H_
#define EFLA_SERVER_SESSIONS_RECORDED_STATE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/residency.h"
#include "server/sessions/session.h"
#include "server/sessions/session_store.h"

namespace efla {

// Thread-safe, as far as the residency is. Knows nothing of who owns a session and which record is the
// latest.
class RecordedStates {
 public:
  RecordedStates(std::shared_ptr<Residency> residency, SessionStore* disk);  // which may be null

  struct Read {
    SessionState state;
    std::vector<ResidencePtr> named;
  };
  // States that are known here already keep what they have in memory. Session errors SNAPSHOT_DAMAGED and
  // SNAPSHOT_MISMATCH.
  absl::StatusOr<Read> FromPayload(const std::string& session_id, const std::string& payload,
                                   StoreIndex store);
  // What the store has of it: without kept turns that it has not, and those before them, and without marks
  // whose states are lost. Nullopt: it has not the head or a mark. `named`: whose snapshots the record names.
  std::optional<std::string> ToPayload(const SessionState& state, StoreIndex store,
                                       std::map<ResidencePtr, std::string>& named);

  // Sees to it that the store has the states of head and marks, and of `all_turns`.
  absl::Status Store(const SessionState& state, StoreIndex store, bool all_turns);
  // Whether it has those of head and marks, but for lost ones.
  bool AllStored(const SessionState& state, StoreIndex store) const;
  // Whether there is a kept turn that it has not.
  bool HasUnstoredTurn(const SessionState& state, StoreIndex store) const;

 private:
  const std::shared_ptr<Residency> residency_;
  SessionStore* const disk_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_RECORDED_STATE_H_
