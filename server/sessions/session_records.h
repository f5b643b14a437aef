// Sessions and their records in the stores: reading, claiming, writing, deleting; and this replica's lease.
#ifndef EFLA_SERVER_SESSIONS_SESSION_RECORDS_H_
#define EFLA_SERVER_SESSIONS_SESSION_RECORDS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/recorded_state.h"
#include "server/sessions/residency.h"
#include "server/sessions/session.h"
#include "server/sessions/session_store.h"

namespace efla {

// The home store is where sessions live: the shared one where there is one, else the disk. With both, the
// disk keeps what has sunk, and takes what the shared store cannot take while it is out of reach.
//
// Ownership in a shared store. A record names the replica that may continue the session. A change begins by
// claiming: compare-and-set of owner and epoch + 1. The write that makes the last change durable also gives
// the record free again (owner ""), so a session that rests can be continued anywhere. A replica whose lease
// has run out loses what it had not released: another one claims it from its last record, and the epoch
// refuses the former owner's writes. A replica that finds that its lease may have run out (it was frozen, the
// store was out of reach) claims each session that it held once more before it goes on, and asks its record
// before it acknowledges what was under way.
//
// A put of which nothing was heard may be carried out at any time later. After one the session is in doubt,
// and the next put raises the epoch, so that what comes late finds another one than it expects. To look at
// the record would not do: it may change behind the look.
//
// Thread-safe. Locks: a session's record_mutex over its mutex over the residency's; calls of stores are made
// under the first at most.
class SessionRecords {
 public:
  struct Options {
    std::string replica, address;
    std::chrono::milliseconds lease_ttl{10'000};
    std::chrono::milliseconds claim_wait{1'000};  // for another replica to release a session
    std::function<Clock::time_point()> now;
  };
  SessionRecords(std::shared_ptr<Residency> residency, SessionStore* disk, SessionStore* shared,
                 const Options& options);

  bool has_home() const { return stores_[home_] != nullptr; }
  bool has_shared() const { return stores_[kSharedStore] != nullptr; }
  bool has_both() const { return stores_[kDiskStore] != nullptr && has_shared(); }
  SessionStore* home() const { return stores_[home_]; }

  // A session as its record has it. NOT_FOUND: there is none, it is deleted or has expired. Waits for one
  // that another replica is just making, if it may.
  absl::StatusOr<SessionPtr> Load(const std::string& id, StoreIndex store, bool may_wait);
  absl::StatusOr<SessionPtr> LoadHome(const std::string& id, bool may_wait) {
    return Load(id, home_, may_wait);
  }
  // Keys of the sessions in the shared store that begin with `prefix`, in order: of those that have been
  // written and have not expired. Loads none. Empty: there is no such store.
  absl::StatusOr<std::vector<std::string>> ListShared(const std::string& prefix);
  // Before a reading call: what other replicas have made of it. A store out of reach leaves it as it is.
  absl::Status Refresh(Session& session);
  // Before a change by the session's writer: makes this replica the owner. `check` is called with the
  // session's mutex held when the session is as current as can be, and its error ends the attempt before
  // anything is claimed. The session may be alive no longer afterwards: then whatever is returned, its life
  // says what became of it.
  absl::Status Acquire(Session& session, const std::function<absl::Status()>& check);
  // Before a commit: ABORTED when another replica has taken the session over. Asks the store only where there
  // is doubt.
  absl::Status VerifyOwned(Session& session);
  // For a new session, by its writer: the name is ours from here on. ALREADY_EXISTS.
  absl::Status Reserve(Session& session);
  // Makes all changes durable in the home store, and releases the session unless it is being changed.
  // `all_turns`: those kept turns too that no store has yet. ABORTED: it has been taken over.
  absl::Status Write(Session& session, bool all_turns);
  // With both stores: likewise to the disk.
  absl::Status WriteToDisk(Session& session) { return WriteTo(session, kDiskStore, true); }
  // Leaves a tombstone; the session is deleted.
  absl::Status Delete(Session& session);
  // Likewise of one that cannot be loaded.
  absl::Status DeleteUnusable(const std::string& id);
  // Set before sessions are loaded: the store was not left in order, and revisions that were given out may be
  // lost. Of every session that is loaded from it the next change leaves some out. Without a shared store.
  void SetUncleanStart() { unclean_start_ = true; }
  // Its life here is over.
  void Retire(Session& session, Session::Life life) { RetireIf(session, life, false); }
  // Likewise, unless it is being changed; and, of an eviction, owned, or has changes to be written. Whether
  // it is over.
  bool Evict(Session& session) { return RetireIf(session, Session::Life::kEvicted, true); }
  bool Expire(Session& session) { return RetireIf(session, Session::Life::kDeleted, true); }

  absl::Status RenewLease();
  void EndLease();

  int64_t UnixMs(Clock::time_point time) const;
  Clock::time_point Now() const { return options_.now ? options_.now() : Clock::now(); }
  bool Expired(const Session& session) const;  // with its mutex held
  uint64_t takeovers() const { return takeovers_; }

 private:
  struct Claim;  // one call of Acquire
  struct ClaimTerms;
  struct Draft;  // one call of PutState
  bool RetireIf(Session& session, Session::Life life, bool only_idle);
  absl::StatusOr<SessionRecord> GetRecord(const std::string& id, StoreIndex store);
  bool ExpiredRecord(int64_t expires_unix_ms) const;
  absl::Status Adopt(Session& session, const SessionRecord& record, StoreIndex store);
  absl::Status CatchUp(Session& session, const SessionRecord& record);
  absl::Status CheckOwner(const SessionRecord& record, Clock::time_point deadline, bool& wait,
                          bool& takeover);
  absl::Status CheckAlive(Session& session, const std::function<absl::Status()>& check) const;
  absl::StatusOr<bool> TryClaim(Session& session, Claim& claim);
  absl::Status GoOnWithout(Session& session, const Claim& claim, const absl::Status& error) const;
  absl::StatusOr<bool> PutClaim(Session& session, Claim& claim, SessionRecord record,
                                const ClaimTerms& terms);
  bool IsStillOurs(Session& session, const SessionRecord& record) const;
  void DropMissing(SessionRecord& record);
  absl::Status Settle(Session& session);
  absl::Status LeaveTombstone(const std::string& id, uint64_t revision, StoreIndex store);
  bool NeedsWrite(const Session& session, StoreIndex store) const;
  bool ReleaseUnchanged(Session& session);
  absl::Status WriteTo(Session& session, StoreIndex store, bool all_turns);
  absl::Status PutState(Session& session, StoreIndex store);
  bool CopyState(Session& session, StoreIndex store, Draft& draft) const;
  absl::Status FillRecord(StoreIndex store, Draft& draft);
  absl::Status PutDraft(Draft& draft, StoreIndex store);
  absl::Status PutInDoubt(SessionRecord& record, uint64_t expected, const absl::Status& refusal);
  void NoteWritten(Session& session, const Draft& draft, StoreIndex store);
  absl::Status NoteRefused(Session& session, const Draft& draft, StoreIndex store,
                           const absl::Status& status);
  void SetNamed(Session& session, StoreIndex store, std::vector<ResidencePtr> named);
  bool LeaseIsGood() const;
  bool MayTakeOver() const;
  // Whether nobody can have taken the session over since its ownership was last known for certain: the lease
  // has held ever since. With its mutex held.
  bool OwnsForCertain(const Session& session) const {
    return LeaseIsGood() && session.lease_term == lease_term_;
  }

  const std::shared_ptr<Residency> residency_;
  RecordedStates states_;
  const std::array<SessionStore*, kNumStores> stores_;
  const StoreIndex home_;
  const Options options_;
  const std::string owner_;  // this process: the replica's name and something that no other process has
  const Clock::time_point start_;
  const int64_t start_unix_ms_;
  std::atomic<Clock::rep> lease_until_{0};  // in real time
  std::atomic<Clock::rep> lease_since_{0};  // it has held without a break
  std::atomic<uint64_t> lease_term_{0};     // rises whenever the lease may have run out before it was renewed
  std::atomic<uint64_t> takeovers_{0};
  std::atomic<bool> unclean_start_{false};
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_RECORDS_H_
