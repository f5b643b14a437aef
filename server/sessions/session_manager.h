// Sessions: contexts that outlive calls. Who may continue one, what a turn changes, and where it rests
// meanwhile.
//
// A session is a name and a revision for a context; contexts are immutable and shared, so a fork, a mark and
// a rewind move a pointer. A context rests in a tier: a device slot, host memory, the local disk, a shared
// store; idle ones sink, a turn lifts what it stands on. One turn at a time writes a session: it commits when
// it has finished, and leaves no trace otherwise.
#ifndef EFLA_SERVER_SESSIONS_SESSION_MANAGER_H_
#define EFLA_SERVER_SESSIONS_SESSION_MANAGER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/generation.h"
#include "server/sessions/context.h"
#include "server/sessions/host_buffer.h"
#include "server/sessions/session_store.h"
#include "server/sessions/snapshot.h"

namespace efla {

// kNone: nothing has been fed yet, there is no state to keep.
enum class SessionTier { kNone, kDevice, kHost, kDisk, kShared };
// When a change must have reached a store: kSync before the reply, kAsync soon after it, kNone when the
// session sinks to that tier or the server drains (until then no other replica can have it).
enum class Durability { kNone, kAsync, kSync };
enum class OnCancel { kRollback, kKeep };  // kKeep: a cancelled turn commits what had been drawn

struct SessionOptions {
  int max_sessions = 100'000;
  int max_marks = 64;              // a session
  int max_kept_turns = 8;          // a session; how far Rewind reaches without a mark
  int64_t host_bytes = 1LL << 30;  // of host memory for states
  // Idle for so long: sinks to the tier below, where there is one.
  std::chrono::milliseconds device_idle{15'000}, host_idle{600'000};
  // Not used for so long: gone. Each session may ask for less.
  std::chrono::milliseconds max_ttl{std::chrono::hours(24 * 30)};
  std::chrono::milliseconds lease_ttl{10'000};
  std::chrono::milliseconds claim_wait{1'000};  // for another replica to release a session
  std::chrono::milliseconds slot_wait{5'000};  // for a device slot, or for room in memory, when a turn begins
  std::string replica;                         // this server's name in the shared store
  std::string address;                         // where clients reach it
  bool allow_other_numerics = false;           // import states of another build or device
  // Told at the start of each session that cannot be taken up, and why; null: nobody is.
  std::function<void(const std::string& id, const absl::Status& why)> on_unusable = nullptr;
  // Told when changes of a session cannot be written since the state of its head is lost; once, until a write
  // of it has succeeded. Called by a thread of the manager, without locks; null: nobody is.
  std::function<void(const std::string& id, const absl::Status& why)> on_lost = nullptr;
  std::function<Clock::time_point()> now = nullptr;  // for tests
};

struct SessionInfo {
  struct Mark {
    std::string name;
    uint64_t revision = 0;
    int64_t tokens = 0;
  };
  std::string session_id;
  uint64_t revision = 0;          // 1 when created; rises with every change
  uint64_t durable_revision = 0;  // the last one that a store has; 0: none
  uint64_t epoch = 0;
  int64_t tokens = 0;          // of the context, those that wait to be fed included
  int64_t waiting_tokens = 0;  // of these
  SessionTier tier = SessionTier::kNone;
  // The head's state is known to be lost or damaged: turns, marks, forks and exports of it fail with
  // DATA_LOSS. A rewind to a context that is whole ends this. Known once it has been read, or at the start
  // when it is missing.
  bool damaged = false;
  bool busy = false;            // a turn is under way
  std::vector<Mark> marks;      // by name
  std::vector<uint64_t> turns;  // revisions that Rewind can return to, oldest first
  int64_t created_unix_ms = 0, expires_unix_ms = 0;
};

// One change of one session. Destroyed without a Commit: the session is as it was. Any thread, one at a time.
// Must not outlive the manager.
class Turn {
 public:
  virtual ~Turn() = default;
  // Once. Sets what the engine is to compute for `tokens` appended: start, pending_token, prompt,
  // continues_text, keep_state; lifts the session's context to the device for it. With `generates`, the
  // prompt ends with the last token (INVALID_ARGUMENT when the session is empty and so is `tokens`). Without,
  // it ends on the grid, and max_tokens is set to 0; false: nothing needs to be computed, Commit may follow
  // at once.
  virtual absl::StatusOr<bool> Prepare(std::vector<TokenId> tokens, bool generates,
                                       GenerationRequest& request) = 0;
  // Ends the turn: the new revision. `state`: what the engine gave, absent when nothing needed computing.
  // `cancelled`: the call did not finish; commits only with OnCancel::kKeep and something drawn, else
  // ABORTED. A turn that ended before its prompt was computed commits nothing and returns the session as it
  // was. `reply`: what a repetition of the request id is answered with. The last 16 of a session are kept, of
  // up to 256 KiB each and 512 KiB together; a repetition of another one gets ALREADY_EXISTS naming the
  // revision. ABORTED: the session has been deleted or taken over meanwhile. With Durability::kSync, blocks
  // for the store; its error leaves the turn committed here and is no error of this call: the durable
  // revision is behind.
  virtual absl::StatusOr<SessionInfo> Commit(std::optional<FinalState> state, bool cancelled,
                                             std::string reply) = 0;
  // The session as the turn found it.
  virtual const SessionInfo& before() const = 0;
  // What a commit makes of its revision: the next one, or one further on where that may have been given out.
  virtual uint64_t next_revision() const = 0;
  // The context's last token, where the last turn drew it and nothing has been appended since.
  virtual std::optional<TokenId> last_drawn() const = 0;
  // `stop` is called once, by any thread, if the session is deleted or taken over while the turn is under way
  // (at once, if it has been): the commit cannot succeed any more. It must not block, and may be called at
  // the time when the turn is destroyed. Before Commit.
  virtual void OnLost(std::function<void()> stop) = 0;
  // ABORTED when that has happened, as Commit would say it.
  virtual absl::Status Lost() const = 0;
};

// Who changes what, for every changing call.
struct SessionChange {
  std::string session_id;
  std::optional<uint64_t> expected_revision;  // another one: ABORTED, naming the current
  std::string request_id;                     // repeated: the recorded result; empty: never recorded
  Durability durability = Durability::kAsync;
  bool undoes_creation = false;  // of Delete: the call that made the session failed, and may be repeated
};

// Thread-safe. Calls may block for a store or for a copy of a state: not for gRPC's or the engine's threads.
// Errors of all: NOT_FOUND (also of an expired or deleted one), ABORTED (a turn is under way; another
// revision than expected), UNAVAILABLE (another replica has it, naming that one; the store cannot be reached;
// draining), RESOURCE_EXHAUSTED (limits), INVALID_ARGUMENT (names: 1 to 128 characters of [A-Za-z0-9._-]).
// Each but the last carries a reason of session_error.h (WithSessionError): the RPC layer tells a busy
// session from a stale revision by it.
class SessionManager {
 public:
  // `disk` and `shared` may be null. Takes up what the disk store holds.
  static absl::StatusOr<std::unique_ptr<SessionManager>> Start(Engine& engine, SnapshotFormat format,
                                                               std::unique_ptr<SessionStore> disk,
                                                               std::unique_ptr<SessionStore> shared,
                                                               const SessionOptions& options);
  virtual ~SessionManager() = default;

  struct Begun {
    std::unique_ptr<Turn> turn;        // or:
    std::optional<std::string> reply;  // the request id has been seen: what was recorded
    SessionInfo info;                  // with `reply`: the session now
  };
  // Makes this replica the session's owner. `create`: makes the session when there is none; if the turn then
  // ends without a commit, there is none again.
  virtual absl::StatusOr<Begun> BeginTurn(const SessionChange& change, OnCancel on_cancel, bool create) = 0;

  // Asked before a call makes sessions of its own, but not for a repetition, which is answered as it was; its
  // error is the call's. Null: they are made.
  using MayMake = std::function<absl::Status()>;
  // An empty session. `id` empty: one is made. ALREADY_EXISTS. ttl 0: the longest.
  virtual absl::StatusOr<SessionInfo> Create(const std::string& id, std::chrono::milliseconds ttl,
                                             const std::string& request_id, Durability durability,
                                             const MayMake& may_make) = 0;
  absl::StatusOr<SessionInfo> Create(const std::string& id, std::chrono::milliseconds ttl,
                                     const std::string& request_id, Durability durability) {
    return Create(id, ttl, request_id, durability, nullptr);
  }
  virtual absl::StatusOr<SessionInfo> Get(const std::string& id) = 0;
  // In order of id, those after `after`, at most `limit`, that begin with `prefix` and are of its tenant (of
  // nobody where it has no "~"); other replicas' too, so UNAVAILABLE while the shared store cannot be
  // reached. Loads no others.
  virtual absl::StatusOr<std::vector<SessionInfo>> List(const std::string& prefix, const std::string& after,
                                                        int limit) = 0;
  // How many List would give without a limit, in one look at the shared store that loads none of them: what
  // is damaged or just being deleted may be counted.
  virtual int Count(const std::string& prefix) = 0;
  // `ids`: names for the children, or empty strings. `mark`: fork there instead of at the head. A state that
  // only a store has and that has not been read here is read once: children of a damaged one are not made.
  virtual absl::StatusOr<std::vector<SessionInfo>> Fork(const SessionChange& change,
                                                        const std::vector<std::string>& ids,
                                                        const std::string& mark, const MayMake& may_make) = 0;
  absl::StatusOr<std::vector<SessionInfo>> Fork(const SessionChange& change,
                                                const std::vector<std::string>& ids,
                                                const std::string& mark) {
    return Fork(change, ids, mark, nullptr);
  }
  // Names the head. An existing name moves.
  virtual absl::StatusOr<SessionInfo> Mark(const SessionChange& change, const std::string& name) = 0;
  // To a mark, or to a revision of SessionInfo::turns, or (neither) to before the last turn. OUT_OF_RANGE
  // when that is no longer kept. A new revision.
  virtual absl::StatusOr<SessionInfo> Rewind(const SessionChange& change, const std::string& mark,
                                             std::optional<uint64_t> revision) = 0;
  // A turn that is under way is stopped, and ends ABORTED.
  virtual absl::Status Delete(const SessionChange& change) = 0;
  // The head's, or a mark's, snapshot.
  virtual absl::StatusOr<HostBuffer> Export(const std::string& id, const std::string& mark) = 0;
  // A new session from untrusted bytes; errors of SnapshotFormat::Decode.
  virtual absl::StatusOr<SessionInfo> Import(const std::string& id, std::chrono::milliseconds ttl,
                                             std::span<const std::byte> snapshot,
                                             const std::string& request_id, Durability durability,
                                             const MayMake& may_make) = 0;
  absl::StatusOr<SessionInfo> Import(const std::string& id, std::chrono::milliseconds ttl,
                                     std::span<const std::byte> snapshot, const std::string& request_id,
                                     Durability durability) {
    return Import(id, ttl, snapshot, request_id, durability, nullptr);
  }
  // Sinks all its contexts to `tier` now (kHost, kDisk, kShared) or lifts the head to kDevice, or to kHost
  // where it rests below. INVALID_ARGUMENT: there is no such tier.
  virtual absl::StatusOr<SessionInfo> Move(const std::string& id, SessionTier tier) = 0;

  // After the engine has drained: writes what is not durable yet to the lowest tier and gives up ownership.
  // The names of the sessions that could not be kept.
  virtual std::vector<std::string> Drain(std::chrono::milliseconds timeout) = 0;

  struct Stats {
    int sessions = 0, turns = 0;
    int contexts_device = 0, contexts_host = 0, contexts_stored = 0;
    int64_t host_bytes = 0;
    uint64_t lifts_host = 0, lifts_disk = 0, lifts_shared = 0, sinks = 0, takeovers = 0, store_errors = 0;
    int64_t stored_bytes = 0;  // written to stores
    int dirty = 0;             // revisions that no store has yet, where there is one
  };
  virtual Stats stats() const = 0;
  // The books: every context's references, tiers and bytes agree. For tests.
  virtual absl::Status CheckInvariants() const = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_MANAGER_H_
