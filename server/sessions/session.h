// One session as the manager keeps it.
#ifndef EFLA_SERVER_SESSIONS_SESSION_H_
#define EFLA_SERVER_SESSIONS_SESSION_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/generation.h"
#include "server/sessions/residency.h"
#include "server/sessions/session_record.h"
#include "server/sessions/turn_tokens.h"

namespace efla {

// A context: an immutable value.
struct Context {
  ResidencePtr residence;  // null: nothing has been fed
  WaitingTokens waiting;

  int64_t total_tokens() const { return (residence ? residence->fed_tokens : 0) + waiting.size(); }
};
using ContextPtr = std::shared_ptr<const Context>;

// What a change changes and a record holds. Copying it copies pointers.
struct SessionState {
  struct KeptTurn {
    uint64_t since = 0, until = 0;  // the revisions whose head it was
    ContextPtr context;
  };
  struct Mark {
    uint64_t since = 0;  // the first revision whose head it was
    ContextPtr context;
  };
  uint64_t revision = 0;
  uint64_t skipped = 0;  // revisions that the next change leaves out: another replica may have given them out
  uint64_t head_since = 0;  // the revision that made the head what it is
  ContextPtr head = std::make_shared<const Context>();
  std::deque<KeptTurn> turns;  // oldest first
  std::map<std::string, Mark> marks;
  std::deque<RecordedReply> replies;  // oldest first
  int64_t created_unix_ms = 0, ttl_ms = 0;
};

inline constexpr size_t kMaxReplies = 16;
// Puts the reply behind the others and drops what is too much: more than kMaxReplies, and the content of long
// ones. One without a request id is not recorded.
void RecordReply(SessionState& state, RecordedReply reply);
const RecordedReply* FindReply(const SessionState& state, RecordedReply::Call call,
                               const std::string& request_id);
// ALREADY_EXISTS, naming the revision, for a reply whose content is no longer kept.
absl::Status CheckContent(const RecordedReply& reply);
// The number of the next change.
inline uint64_t NextRevision(const SessionState& state) { return state.revision + 1 + state.skipped; }
inline void CountChange(SessionState& state) {
  state.revision = NextRevision(state);
  state.skipped = 0;
}
// The head gives way to another one.
void SetHead(SessionState& state, ContextPtr head);

struct Session : std::enable_shared_from_this<Session> {
  explicit Session(std::string name) : id(std::move(name)) {}

  const std::string id;

  // Held while this session's record is read, written, claimed; may last as long as a store's call.
  std::mutex record_mutex;

  // Guards what follows; never held during a call to a store or the engine.
  mutable std::mutex mutex;
  std::condition_variable left;  // writer became kNone

  // kEvicted, kLost (taken over by another replica): ask the store again. kDeleted: by a call, or expired.
  enum class Life { kLive, kEvicted, kLost, kDeleted };
  Life life = Life::kLive;
  enum class Writer { kNone, kCall, kTurn };
  Writer writer = Writer::kNone;  // who is changing it: one at a time
  // Of a turn that is its writer: called once, without this lock, when its life ends.
  std::function<void()> stop_turn;

  SessionState state;
  uint64_t changes = 0;          // of state, those without a new revision included
  uint64_t written_changes = 0;  // as of the last record that its home store took
  uint64_t durable_revision = 0;
  Clock::time_point last_use;

  uint64_t epoch = 0;
  std::array<uint64_t, kNumStores>
      stored_epoch{};       // of the store's record, as far as we know; 0: none, a tombstone
  bool owned = false;       // with a shared store: claimed and not released
  uint64_t lease_term = 0;  // of this replica's lease, in which that was last known for certain
  bool doubtful =
      false;  // a put to the shared store has failed, which may have been carried out nevertheless

  // The states that its records name.
  std::array<std::vector<ResidencePtr>, kNumStores> named;

  bool queued = false;             // for the writers
  bool sink_wanted = false;        // with the next write everything goes down
  int failures = 0;                // of its writes in a row
  bool loss_told = false;          // the last write found the head's state lost, and that has been told
  Clock::time_point idle_until{};  // after such a write: upkeep lets it rest, by the manager's clock
};
using SessionPtr = std::shared_ptr<Session>;

// ABORTED: what became of a session that lives no longer. With its mutex held.
absl::Status Lost(const Session& session);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_H_
