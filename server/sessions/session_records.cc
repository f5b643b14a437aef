#include "server/sessions/session_records.h"

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/random_id.h"
#include "server/sessions/session_checks.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

// Between looks at a record that another replica has not released yet.
constexpr std::chrono::milliseconds kClaimPoll{20};
// Attempts at writing a session that changes all the while, before its states are written with changes held
// off.
constexpr int kWriteAttempts = 3;
// Records outlive their sessions in the stores by so much: a turn may take longer than its session's time to
// live.
constexpr int64_t kRecordSlackMs = 3'600'000;
// What the first change after a takeover leaves out: more than the former owner can have acknowledged since
// its last write, so that no expected revision of its clients is taken for one of ours.
constexpr uint64_t kSkippedRevisions = 1000;
constexpr char kOwnerSeparator = '/';
// A replica takes over from others when it has held its own lease for this share of one: several times what
// another one takes to renew its lease once the store is back.
constexpr int kLeaseShareBeforeTakeover = 3;
// Owner of a session that was taken over and released again without a change: nobody has left out yet what
// the former owner may have given out. No lease bears this name, so whoever claims it next takes it over.
constexpr char kLapsedOwner[] = "-/lapsed";

constexpr char kNeverWritten[] = "was lost with the replica that made it, before its first write";

// Of a store that cannot be reached or takes nothing more.
bool IsStoreFailure(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
}

// No fault of the client's, and no limit of its own: another time, or when somebody has seen to the store.
absl::Status StoreError(absl::Status status) {
  if (!IsStoreFailure(status) || GetSessionError(status)) return status;
  const char* const what = absl::IsUnavailable(status) ? "cannot be reached" : "is full";
  return WithSessionError(absl::UnavailableError(absl::StrFormat("the session store %s: %s", what,
                                                                 std::string(status.message()))),
                          "STORE_UNAVAILABLE");
}

absl::StatusOr<bool> TrueIf(const absl::Status& status) {
  if (!status.ok()) return status;
  return true;
}

}  // namespace

// One call of Acquire.
struct SessionRecords::Claim {
  const std::function<absl::Status()>& check;
  const bool owned, doubtful;  // the session, as it was found
  const Clock::time_point deadline;
  bool lacks_snapshots = false;  // the store has refused the record for that
};

// What a claim rests on, of the record as it was read.
struct SessionRecords::ClaimTerms {
  uint64_t lease_term;  // before the store was asked
  bool takeover;        // its owner was gone
  bool skips;           // that owner may have given out revisions
};

// One call of PutState.
struct SessionRecords::Draft {
  SessionState state;
  SessionRecord record;
  std::vector<ResidencePtr> residences;      // that the record names
  std::vector<ResidencePtr> former, others;  // that records name so far: this store's, the other store's
  uint64_t changes = 0, expected = 0;        // expected: the stored epoch
  bool stays_owned = false, in_doubt = false;

  bool releases(StoreIndex store) const { return store == kSharedStore && !stays_owned; }
};

SessionRecords::SessionRecords(std::shared_ptr<Residency> residency, SessionStore* disk, SessionStore* shared,
                               const Options& options)
    : residency_(std::move(residency)),
      states_(residency_, disk),
      stores_{disk, shared},
      home_(shared != nullptr ? kSharedStore : kDiskStore),
      options_(options),
      owner_(options.replica + kOwnerSeparator + RandomId()),
      start_(Now()),
      start_unix_ms_(std::chrono::duration_cast<std::chrono::milliseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count()) {}

int64_t SessionRecords::UnixMs(Clock::time_point time) const {
  return start_unix_ms_ + std::chrono::duration_cast<std::chrono::milliseconds>(time - start_).count();
}

bool SessionRecords::Expired(const Session& session) const {
  return session.writer == Session::Writer::kNone &&
         Now() - session.last_use >= std::chrono::milliseconds(session.state.ttl_ms);
}

bool SessionRecords::RetireIf(Session& session, Session::Life life, bool only_idle) {
  SessionState state;  // its contexts are let go of without the lock
  std::function<void()> stop_turn;
  {
    const std::lock_guard lock(session.mutex);
    if (session.life != Session::Life::kLive) return true;
    const bool here_only = session.owned || session.changes != session.written_changes;
    const bool idle =
        session.writer == Session::Writer::kNone && !(life == Session::Life::kEvicted && here_only);
    if (only_idle && !idle) return false;
    session.life = life;
    session.owned = false;
    state.revision = session.state.revision;
    std::swap(session.state, state);
    std::swap(session.stop_turn, stop_turn);
    session.left.notify_all();
  }
  if (stop_turn) stop_turn();
  for (int store = 0; store < kNumStores; ++store) SetNamed(session, static_cast<StoreIndex>(store), {});
  return true;
}

// ---- Leases ----

bool SessionRecords::LeaseIsGood() const {
  return Clock::now().time_since_epoch().count() < lease_until_.load();
}

bool SessionRecords::MayTakeOver() const {
  const Clock::duration held = Clock::now().time_since_epoch() - Clock::duration(lease_since_.load());
  return LeaseIsGood() && held >= options_.lease_ttl / kLeaseShareBeforeTakeover;
}

absl::Status SessionRecords::RenewLease() {
  const Clock::time_point now = Clock::now();
  const absl::Status status = home()->RenewLease(owner_, options_.address, options_.lease_ttl);
  if (status.ok()) {
    if (!LeaseIsGood()) {
      ++lease_term_;  // before the lease counts as good
      lease_since_ = Clock::now().time_since_epoch().count();
    }
    lease_until_ = (now + options_.lease_ttl).time_since_epoch().count();
  } else {
    residency_->CountStoreError();
  }
  return status;
}

void SessionRecords::EndLease() {
  lease_until_ = 0;
  // An error leaves it to run out.
  home()->RenewLease(owner_, options_.address, std::chrono::milliseconds(1)).IgnoreError();
}

// ---- Reading ----

// NOT_FOUND of deleted and expired ones as well.
absl::StatusOr<SessionRecord> SessionRecords::GetRecord(const std::string& id, StoreIndex store) {
  absl::StatusOr<SessionRecord> record = stores_[store]->GetRecord(id);
  if (absl::IsNotFound(record.status())) return SessionNotFound(id);
  if (!record.ok()) {
    residency_->CountStoreError();
    return StoreError(record.status());
  }
  if (record->deleted) return SessionNotFound(id, "has been deleted");
  if (ExpiredRecord(record->expires_unix_ms)) return SessionNotFound(id, "has expired");
  return record;
}

bool SessionRecords::ExpiredRecord(int64_t expires_unix_ms) const {
  return expires_unix_ms != 0 && expires_unix_ms - kRecordSlackMs <= UnixMs(Now());
}

absl::StatusOr<std::vector<std::string>> SessionRecords::ListShared(const std::string& prefix) {
  std::vector<std::string> ids;
  if (!has_shared()) return ids;
  absl::StatusOr<std::vector<ListedRecord>> records = stores_[kSharedStore]->ListRecords(prefix);
  if (!records.ok()) {
    residency_->CountStoreError();
    return StoreError(records.status());
  }
  for (ListedRecord& record : *records) {
    // Revision 0: only its name has been reserved.
    if (record.revision > 0 && !ExpiredRecord(record.expires_unix_ms))
      ids.push_back(std::move(record.session_id));
  }
  return ids;
}

// With record_mutex held. The session becomes what the record says.
absl::Status SessionRecords::Adopt(Session& session, const SessionRecord& record, StoreIndex store) {
  absl::StatusOr<RecordedStates::Read> read = states_.FromPayload(session.id, record.payload, store);
  if (!read.ok()) return read.status();
  if (!has_shared() && unclean_start_) read->state.skipped = kSkippedRevisions;

  {
    const std::lock_guard lock(session.mutex);
    std::swap(session.state, read->state);  // the former one is let go of without the lock
    ++session.changes;
    session.written_changes = store == home_ ? session.changes : session.changes - 1;
    session.durable_revision = store == home_ ? record.revision : 0;
    session.epoch = record.epoch;
    session.stored_epoch[store] = record.epoch;
    session.owned = false;
    session.doubtful = false;
    const int64_t last_use_unix_ms = record.expires_unix_ms - kRecordSlackMs - session.state.ttl_ms;
    session.last_use =
        Now() - std::chrono::milliseconds(std::max<int64_t>(0, UnixMs(Now()) - last_use_unix_ms));
  }
  SetNamed(session, store, std::move(read->named));
  return absl::OkStatus();
}

absl::StatusOr<SessionPtr> SessionRecords::Load(const std::string& id, StoreIndex store, bool may_wait) {
  const Clock::time_point deadline = Clock::now() + (may_wait ? options_.claim_wait : Clock::duration(0));
  absl::StatusOr<SessionRecord> record = GetRecord(id, store);
  while (record.ok() && record->revision == 0) {
    // Only its name has been reserved: its maker is at it, or died before the first write.
    bool wait, takeover;
    if (absl::Status status = CheckOwner(*record, deadline, wait, takeover); !status.ok()) return status;
    if (!wait) return SessionNotFound(id, kNeverWritten);
    std::this_thread::sleep_for(kClaimPoll);
    record = GetRecord(id, store);
  }
  if (!record.ok()) return record.status();
  auto session = std::make_shared<Session>(id);
  const std::lock_guard lock(session->record_mutex);
  if (absl::Status status = Adopt(*session, *record, store); !status.ok()) return status;
  return session;
}

// With record_mutex held, for a session that is not owned: takes over what the record has, unless this is
// what is here already, or what is here goes beyond it (it was changed here while the store was out of
// reach).
absl::Status SessionRecords::CatchUp(Session& session, const SessionRecord& record) {
  {
    const std::lock_guard lock(session.mutex);
    if (record.epoch == session.epoch) {
      if (session.state.revision > record.revision) {
        session.durable_revision = record.revision;
        session.stored_epoch[kSharedStore] = record.epoch;
        return absl::OkStatus();
      }
      if (session.state.revision == record.revision && session.changes == session.written_changes) {
        return absl::OkStatus();
      }
    }
  }
  return Adopt(session, record, kSharedStore);
}

absl::Status SessionRecords::Refresh(Session& session) {
  if (!has_shared()) return absl::OkStatus();
  const std::unique_lock record_lock(session.record_mutex, std::try_to_lock);
  if (!record_lock) return absl::OkStatus();  // it is being claimed or written here
  {
    const std::lock_guard lock(session.mutex);
    if (session.owned || session.life != Session::Life::kLive) return absl::OkStatus();
  }
  absl::StatusOr<SessionRecord> record = GetRecord(session.id, kSharedStore);
  if (absl::IsNotFound(record.status())) {
    Retire(session, Session::Life::kDeleted);
    return record.status();
  }
  if (!record.ok() || record->revision == 0) return absl::OkStatus();
  return CatchUp(session, *record);
}

// ---- Claiming ----

// May the record be claimed? `wait`: not yet. `takeover`: its owner is gone.
absl::Status SessionRecords::CheckOwner(const SessionRecord& record, Clock::time_point deadline, bool& wait,
                                        bool& takeover) {
  wait = takeover = false;
  if (record.owner.empty() || record.owner == owner_) return absl::OkStatus();
  // What an earlier process of this replica's name had is nobody's.
  const std::string owner = record.owner.substr(0, record.owner.find(kOwnerSeparator));
  if (owner == options_.replica || record.owner == kLapsedOwner) {
    takeover = true;
    return absl::OkStatus();
  }
  const absl::StatusOr<std::string> address = stores_[kSharedStore]->GetLease(record.owner);
  const bool lapsed = absl::IsNotFound(address.status());
  // A store that was out of reach has let all leases run out at once. Who lives renews its own first.
  if (lapsed && MayTakeOver()) {
    takeover = true;
    return absl::OkStatus();
  }
  if (!lapsed && !address.ok()) {
    residency_->CountStoreError();
    return StoreError(address.status());
  }
  wait = Clock::now() < deadline;
  if (wait) return absl::OkStatus();
  if (lapsed) {
    return WithSessionError(
        absl::UnavailableError(absl::StrFormat(
            "session %s is held by %s, whose lease has run out; it is taken over when "
            "this server has held its own for %d ms",
            record.session_id, owner, options_.lease_ttl.count() / kLeaseShareBeforeTakeover)),
        "STORE_UNAVAILABLE");
  }
  return WithSessionError(absl::UnavailableError(absl::StrFormat("session %s is held by %s at %s",
                                                                 record.session_id, owner, *address)),
                          "SESSION_ELSEWHERE", {{"address", *address}, {"owner", owner}});
}

absl::Status SessionRecords::Acquire(Session& session, const std::function<absl::Status()>& check) {
  const std::lock_guard record_lock(session.record_mutex);
  if (!has_shared()) return CheckAlive(session, check);

  bool owned, doubtful;
  {
    const std::lock_guard lock(session.mutex);
    owned = session.owned;
    doubtful = session.doubtful;
    if (owned && !doubtful && OwnsForCertain(session) && session.life == Session::Life::kLive) return check();
  }
  Claim claim{check, owned, doubtful, Clock::now() + options_.claim_wait};
  // Without a lease others would take over at once what is claimed here.
  if (!LeaseIsGood()) {
    if (absl::Status status = RenewLease(); !status.ok()) return GoOnWithout(session, claim, status);
  }
  for (;;) {
    const absl::StatusOr<bool> done = TryClaim(session, claim);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
  }
}

absl::Status SessionRecords::CheckAlive(Session& session, const std::function<absl::Status()>& check) const {
  const std::lock_guard lock(session.mutex);
  if (session.life != Session::Life::kLive) return absl::AbortedError("the session is alive no longer");
  return check();
}

// The store is out of reach or full: what is owned and not released goes on.
absl::Status SessionRecords::GoOnWithout(Session& session, const Claim& claim,
                                         const absl::Status& error) const {
  return claim.owned && !claim.doubtful ? CheckAlive(session, claim.check) : StoreError(error);
}

// One look at the record and, if that allows it, one put of the claim. With record_mutex held. False: to be
// tried again; waits where that is for another replica.
absl::StatusOr<bool> SessionRecords::TryClaim(Session& session, Claim& claim) {
  const uint64_t lease_term = lease_term_;  // before the store is asked
  absl::StatusOr<SessionRecord> record = GetRecord(session.id, kSharedStore);
  if (absl::IsNotFound(record.status())) {
    Retire(session, Session::Life::kDeleted);
    return record.status();
  }
  if (!record.ok()) return TrueIf(GoOnWithout(session, claim, record.status()));
  if (claim.owned && !IsStillOurs(session, *record)) {
    Retire(session, Session::Life::kLost);
    return absl::AbortedError("the session has been taken over");
  }
  bool wait, takeover;
  if (absl::Status status = CheckOwner(*record, claim.deadline, wait, takeover); !status.ok()) return status;
  if (wait) {
    std::this_thread::sleep_for(kClaimPoll);
    return false;
  }
  if (record->revision == 0 && !claim.owned) {
    Retire(session, Session::Life::kDeleted);
    return SessionNotFound(session.id, kNeverWritten);
  }
  bool skips = takeover;
  if (record->owner == owner_) {  // a claim of ours that was not heard of may have been a takeover
    const std::lock_guard lock(session.mutex);
    skips = session.state.skipped > 0;
  }
  if (!claim.owned) {
    if (absl::Status status = CatchUp(session, *record); !status.ok()) return status;
  }
  if (absl::Status status = CheckAlive(session, claim.check); !status.ok()) return status;
  if (claim.lacks_snapshots) DropMissing(*record);
  takeover = takeover && record->owner != kLapsedOwner;
  return PutClaim(session, claim, *std::move(record), {lease_term, takeover, skips});
}

// Puts the record as claimed. Returns what TryClaim returns.
absl::StatusOr<bool> SessionRecords::PutClaim(Session& session, Claim& claim, SessionRecord record,
                                              const ClaimTerms& terms) {
  const uint64_t expected = record.epoch++;
  record.owner = owner_;
  const absl::Status status = stores_[kSharedStore]->PutRecord(record, expected);
  if (status.ok()) {
    takeovers_ += terms.takeover;
    const std::lock_guard lock(session.mutex);
    session.epoch = session.stored_epoch[kSharedStore] = record.epoch;
    session.owned = true;
    session.lease_term = terms.lease_term;
    session.doubtful = false;
    if (terms.skips) session.state.skipped = kSkippedRevisions;
    return true;
  }
  if (absl::IsFailedPrecondition(status) && !std::exchange(claim.lacks_snapshots, true)) return false;
  if (!absl::IsAborted(status)) {
    residency_->CountStoreError();
    {
      const std::lock_guard lock(session.mutex);
      // A full store has refused it for certain; whether one that did not answer has it is not known.
      if (!absl::IsResourceExhausted(status)) session.doubtful = true;
      if (terms.skips) session.state.skipped = kSkippedRevisions;
    }
    return IsStoreFailure(status) ? TrueIf(GoOnWithout(session, claim, status))
                                  : absl::StatusOr<bool>(StoreError(status));
  }
  if (Clock::now() >= claim.deadline) {
    return WithSessionError(
        absl::UnavailableError(absl::StrFormat("other replicas keep claiming session %s", session.id)),
        "SESSION_ELSEWHERE");
  }
  return false;
}

// With record_mutex held, for a session that is owned: is this still its record? Claims of ours may have been
// carried out although they were not heard of: nobody else gives it this owner.
bool SessionRecords::IsStillOurs(Session& session, const SessionRecord& record) const {
  const std::lock_guard lock(session.mutex);
  if (record.epoch == session.epoch) return true;
  if (record.epoch < session.epoch || record.owner != owner_) return false;
  session.epoch = session.stored_epoch[kSharedStore] = record.epoch;
  return true;
}

// The store has lost snapshots that the record names; what stands on them is damaged, the rest goes on.
void SessionRecords::DropMissing(SessionRecord& record) {
  std::erase_if(record.snapshots, [&](const std::string& id) {
    const absl::StatusOr<bool> has = stores_[kSharedStore]->HasSnapshot(id);
    if (!has.ok() || *has) return false;
    residency_->MarkMissing(id, kSharedStore);
    return true;
  });
}

absl::Status SessionRecords::VerifyOwned(Session& session) {
  if (!has_shared()) return absl::OkStatus();
  {
    const std::lock_guard lock(session.mutex);
    if (OwnsForCertain(session)) return absl::OkStatus();
  }
  const std::lock_guard record_lock(session.record_mutex);
  // From here on nobody begins to take it over; whoever has is found next.
  if (!LeaseIsGood()) RenewLease().IgnoreError();
  const uint64_t lease_term = lease_term_;
  const absl::StatusOr<SessionRecord> record = stores_[kSharedStore]->GetRecord(session.id);
  if (!record.ok() && !absl::IsNotFound(record.status())) {
    residency_->CountStoreError();
    return absl::OkStatus();  // out of reach: what is owned goes on
  }
  {
    const std::lock_guard lock(session.mutex);
    if (session.life != Session::Life::kLive) return absl::OkStatus();  // the commit sees it
  }
  if (record.ok() && !record->deleted && IsStillOurs(session, *record)) {
    const std::lock_guard lock(session.mutex);
    session.lease_term = lease_term;
    return absl::OkStatus();
  }
  Retire(session, record.ok() && !record->deleted ? Session::Life::kLost : Session::Life::kDeleted);
  return absl::AbortedError("the session has been taken over");
}

// With record_mutex held. A claim whose outcome is not known: if it was carried out, the record is released
// again, and if it was not, it never will be.
absl::Status SessionRecords::Settle(Session& session) {
  bool skips;
  {
    const std::lock_guard lock(session.mutex);
    if (session.owned || !session.doubtful) return absl::OkStatus();  // it has been claimed since
    skips = session.state.skipped > 0;
  }
  absl::StatusOr<SessionRecord> record = GetRecord(session.id, kSharedStore);
  if (!record.ok() && !absl::IsNotFound(record.status())) return record.status();
  if (record.ok() && record->revision > 0 && (record->owner == owner_ || record->owner.empty())) {
    if (record->owner == owner_) record->owner = skips ? kLapsedOwner : "";
    const uint64_t expected = record->epoch++;
    const absl::Status status = stores_[kSharedStore]->PutRecord(*record, expected);
    if (!status.ok() && !absl::IsAborted(status)) return StoreError(status);
  }
  const std::lock_guard lock(session.mutex);
  session.doubtful = false;
  return absl::OkStatus();
}

// ---- Writing ----

void SessionRecords::SetNamed(Session& session, StoreIndex store, std::vector<ResidencePtr> named) {
  for (const ResidencePtr& residence : named) residency_->AddName(*residence, store);
  {
    const std::lock_guard lock(session.mutex);
    std::swap(session.named[store], named);
  }
  for (const ResidencePtr& residence : named) residency_->RemoveName(*residence, store);
}

// With the session's mutex held.
bool SessionRecords::NeedsWrite(const Session& session, StoreIndex store) const {
  if (session.life != Session::Life::kLive) return false;
  if (store != home_) return true;
  return session.changes != session.written_changes || session.doubtful ||
         (session.owned && session.writer == Session::Writer::kNone);
}

// With record_mutex held, all of whose states the store has.
absl::Status SessionRecords::PutState(Session& session, StoreIndex store) {
  Draft draft;
  if (!CopyState(session, store, draft)) return absl::OkStatus();
  if (absl::Status status = FillRecord(store, draft); !status.ok()) return status;
  if (draft.releases(store)) {
    // A release of which nobody knows whether it was carried out keeps the session from going on here, so it
    // is not tried while the store is out of reach.
    const absl::Status reached = stores_[store]->GetRecord(session.id).status();
    if (!reached.ok() && !absl::IsNotFound(reached)) {
      residency_->CountStoreError();
      return StoreError(reached);
    }
  }
  const absl::Status status = PutDraft(draft, store);
  if (!status.ok()) return NoteRefused(session, draft, store, status);
  NoteWritten(session, draft, store);
  return absl::OkStatus();
}

// What is to be written of the session. False: it is alive no longer.
bool SessionRecords::CopyState(Session& session, StoreIndex store, Draft& draft) const {
  const std::lock_guard lock(session.mutex);
  if (session.life != Session::Life::kLive) return false;
  draft.state = session.state;
  draft.changes = session.changes;
  draft.stays_owned = session.writer != Session::Writer::kNone;
  draft.in_doubt = session.doubtful && store == kSharedStore;
  draft.expected = session.stored_epoch[store];
  draft.former = session.named[store];
  draft.others = session.named[1 - store];
  draft.record.session_id = session.id;
  draft.record.epoch = session.epoch;
  draft.record.expires_unix_ms = UnixMs(session.last_use) + draft.state.ttl_ms + kRecordSlackMs;
  return true;
}

// FAILED_PRECONDITION: a state has left the store.
absl::Status SessionRecords::FillRecord(StoreIndex store, Draft& draft) {
  const SessionState& state = draft.state;
  SessionRecord& record = draft.record;
  record.revision = state.revision;
  if (store == kSharedStore)
    record.owner = draft.stays_owned ? owner_ : state.skipped > 0 ? kLapsedOwner : "";
  // What was put before and not heard of may still be carried out: not over a higher epoch.
  if (draft.in_doubt || record.owner == kLapsedOwner) ++record.epoch;
  std::map<ResidencePtr, std::string> named;
  std::optional<std::string> payload = states_.ToPayload(state, store, named);
  if (!payload) return absl::FailedPreconditionError("a state is not in the store any more");
  record.payload = *std::move(payload);
  // A state that only this record names and others here stand on stays named until theirs have been written.
  for (const ResidencePtr& residence : draft.former) {
    if (named.contains(residence)) continue;
    const std::vector<ResidencePtr>& others = draft.others;
    const long own = 2 + (std::find(others.begin(), others.end(), residence) != others.end() ? 2 : 0);
    if (!residency_->HasOneName(*residence, store) || residence.use_count() <= own) continue;
    if (std::string id = residency_->StoredId(*residence, store); !id.empty())
      named[residence] = std::move(id);
  }
  for (const auto& [residence, id] : named) {
    draft.residences.push_back(residence);
    record.snapshots.push_back(id);
  }
  return absl::OkStatus();
}

// Puts the record, over an earlier put of ours too that was carried out although it was not heard of. The
// draft's record becomes what is stored.
absl::Status SessionRecords::PutDraft(Draft& draft, StoreIndex store) {
  SessionRecord& record = draft.record;
  const absl::Status status = stores_[store]->PutRecord(record, draft.expected);
  if (!absl::IsAborted(status)) return status;
  if (draft.in_doubt) return PutInDoubt(record, draft.expected, status);
  if (store != kDiskStore) return status;
  // Nobody else writes here: an earlier put was carried out although it failed.
  const absl::StatusOr<SessionRecord> stored = stores_[store]->GetRecord(record.session_id);
  if (!stored.ok()) return absl::IsNotFound(stored.status()) ? status : stored.status();
  if (stored->deleted) return status;
  record.epoch = std::max(record.epoch, stored->epoch);
  return stores_[store]->PutRecord(record, stored->epoch);
}

void SessionRecords::NoteWritten(Session& session, const Draft& draft, StoreIndex store) {
  residency_->CountStored(std::ssize(draft.record.payload));
  SetNamed(session, store, draft.residences);
  const std::lock_guard lock(session.mutex);
  session.stored_epoch[store] = draft.record.epoch;
  if (store != home_) return;
  session.epoch = draft.record.epoch;
  session.written_changes = draft.changes;
  session.durable_revision = draft.state.revision;
  session.owned = session.owned && draft.record.owner == owner_;
  session.doubtful = false;
}

// What the store's refusal means for the session; the error for the caller.
absl::Status SessionRecords::NoteRefused(Session& session, const Draft& draft, StoreIndex store,
                                         const absl::Status& status) {
  if (store == home_ && absl::IsAborted(status)) {
    Retire(session, Session::Life::kLost);
    return WithSessionError(absl::AbortedError(absl::StrFormat("session %s has been taken over: %s",
                                                               session.id, std::string(status.message()))),
                            "SESSION_LOST");
  }
  residency_->CountStoreError();
  if (absl::IsFailedPrecondition(status)) {
    // The store has lost a snapshot; what memory has is put again.
    for (const ResidencePtr& residence : draft.residences) residency_->Recheck(*residence, store);
    return status;
  }
  const std::lock_guard lock(session.mutex);
  if (draft.releases(store)) session.doubtful = true;
  return StoreError(status);
}

// The record was refused over `expected`: because an earlier put of ours, of which we have not heard, had
// been carried out? Then that is what was wanted, or the record is put over it. `record` becomes what is
// stored.
absl::Status SessionRecords::PutInDoubt(SessionRecord& record, uint64_t expected,
                                        const absl::Status& refusal) {
  const absl::StatusOr<SessionRecord> stored = stores_[kSharedStore]->GetRecord(record.session_id);
  if (absl::IsNotFound(stored.status())) return refusal;
  if (!stored.ok()) return stored.status();
  if (stored->deleted || stored->epoch <= expected) return refusal;
  if (stored->revision == record.revision && stored->payload == record.payload) {
    record = *stored;
    return absl::OkStatus();
  }
  if (stored->owner != owner_) return refusal;
  record.epoch = stored->epoch + 1;
  return stores_[kSharedStore]->PutRecord(record, stored->epoch);
}

// Gives a session free that was claimed and not changed, as its record is. False: it was changed, or the
// store cannot be reached.
bool SessionRecords::ReleaseUnchanged(Session& session) {
  const std::lock_guard record_lock(session.record_mutex);
  bool skips;
  {
    const std::lock_guard lock(session.mutex);
    if (session.life != Session::Life::kLive || !session.owned) return true;
    if (session.writer != Session::Writer::kNone || session.changes != session.written_changes) return false;
    skips = session.state.skipped > 0;
  }
  absl::StatusOr<SessionRecord> record = GetRecord(session.id, kSharedStore);
  if (!record.ok() || !IsStillOurs(session, *record)) return false;
  DropMissing(*record);
  record->owner = skips ? kLapsedOwner : "";
  const uint64_t expected = record->epoch++;
  const absl::Status status = stores_[kSharedStore]->PutRecord(*record, expected);
  const std::lock_guard lock(session.mutex);
  session.doubtful = !status.ok();
  if (!status.ok()) return false;
  session.owned = false;
  session.epoch = session.stored_epoch[kSharedStore] = record->epoch;
  return true;
}

absl::Status SessionRecords::WriteTo(Session& session, StoreIndex store, bool all_turns) {
  for (int attempt = 1;; ++attempt) {
    SessionState state;
    bool claim = false, settle = false;
    {
      const std::lock_guard lock(session.mutex);
      const bool more_turns = all_turns && !has_shared() && states_.HasUnstoredTurn(session.state, store);
      if (!NeedsWrite(session, store) && !more_turns) return absl::OkStatus();
      state = session.state;
      if (store == kSharedStore && !session.owned) {
        claim = session.changes != session.written_changes;
        settle = !claim;
      }
    }
    if (settle) {
      const std::lock_guard record_lock(session.record_mutex);
      return Settle(session);
    }
    if (claim) {
      // Changed here before a restart, while the shared store was out of reach.
      absl::Status status = Acquire(session, [] { return absl::OkStatus(); });
      if (!status.ok()) return status;
    }
    // States first and without the lock, so that the next turn can begin meanwhile.
    if (absl::Status status = states_.Store(state, store, all_turns); !status.ok()) {
      // With its state lost nothing new can be written, but the session must not stay here for that.
      if (absl::IsDataLoss(status) && store == kSharedStore && ReleaseUnchanged(session))
        return absl::OkStatus();
      return StoreError(status);
    }
    const std::lock_guard record_lock(session.record_mutex);
    {
      const std::lock_guard lock(session.mutex);
      if (session.life != Session::Life::kLive) return absl::OkStatus();
      if (store == kSharedStore && !session.owned) return absl::OkStatus();  // written and released meanwhile
      state = session.state;
    }
    if (!states_.AllStored(state, store)) {
      if (attempt < kWriteAttempts) continue;
      if (absl::Status status = states_.Store(state, store, false); !status.ok()) return StoreError(status);
    }
    absl::Status status = PutState(session, store);
    if (!absl::IsFailedPrecondition(status) || attempt >= kWriteAttempts) return status;
  }
}

absl::Status SessionRecords::Write(Session& session, bool all_turns) {
  if (!has_home()) return absl::OkStatus();
  absl::Status status = WriteTo(session, home_, all_turns);
  if (absl::IsUnavailable(status) && has_both()) {
    // Until the shared store is back, at least this machine's end shall not be the session's.
    WriteTo(session, kDiskStore, all_turns).IgnoreError();
  }
  return status;
}

absl::Status SessionRecords::Reserve(Session& session) {
  session.epoch = 1;
  if (!has_home()) return absl::OkStatus();
  const std::lock_guard record_lock(session.record_mutex);
  const absl::StatusOr<SessionRecord> former = home()->GetRecord(session.id);
  uint64_t expected = 0;
  if (former.ok()) {
    if (absl::StatusOr<SessionRecord> alive = GetRecord(session.id, home_); alive.ok()) {
      if (alive->revision > 0) return SessionExists(session.id);
      bool wait, takeover;
      if (!CheckOwner(*alive, Clock::now(), wait, takeover).ok()) return SessionExists(session.id);
    }
    session.epoch = former->epoch + 1;
    expected = former->deleted ? 0 : former->epoch;
  } else if (!absl::IsNotFound(former.status())) {
    residency_->CountStoreError();
    return StoreError(former.status());
  }
  session.stored_epoch[home_] = expected;
  if (!has_shared()) return absl::OkStatus();

  // An empty session or one whose states are there is durable with this; of another only the name is taken.
  if (!LeaseIsGood()) {
    if (absl::Status status = RenewLease(); !status.ok()) return StoreError(status);
  }
  SessionRecord record;
  record.session_id = session.id;
  record.epoch = session.epoch;
  record.owner = owner_;
  const uint64_t lease_term = lease_term_;
  record.expires_unix_ms = UnixMs(session.last_use) + session.state.ttl_ms + kRecordSlackMs;
  const absl::Status status = home()->PutRecord(record, expected);
  if (absl::IsAborted(status)) return SessionExists(session.id);
  if (!status.ok()) {
    residency_->CountStoreError();
    return StoreError(status);
  }
  const std::lock_guard lock(session.mutex);
  session.stored_epoch[kSharedStore] = session.epoch;
  session.owned = true;
  session.lease_term = lease_term;
  return absl::OkStatus();
}

// Over a record that is damaged, or that the disk cannot read, as over none.
absl::Status SessionRecords::LeaveTombstone(const std::string& id, uint64_t revision, StoreIndex store) {
  SessionRecord tombstone;
  tombstone.session_id = id;
  tombstone.deleted = true;
  tombstone.revision = revision;
  for (;;) {
    const absl::StatusOr<SessionRecord> record = stores_[store]->GetRecord(id);
    if (absl::IsNotFound(record.status()) || (record.ok() && record->deleted)) return absl::OkStatus();
    const bool unreadable = absl::IsUnavailable(record.status()) && store == kDiskStore;
    if (!record.ok() && !unreadable && !absl::IsDataLoss(record.status())) {
      residency_->CountStoreError();
      return StoreError(record.status());
    }
    const uint64_t expected = record.ok() ? record->epoch : 0;
    tombstone.epoch = expected + 1;
    if (record.ok()) tombstone.revision = std::max(revision, record->revision);
    const absl::Status status = stores_[store]->PutRecord(tombstone, expected);
    if (status.ok()) return status;
    if (absl::IsAborted(status) && !unreadable) continue;
    residency_->CountStoreError();
    return StoreError(absl::IsAborted(status) ? record.status() : status);
  }
}

absl::Status SessionRecords::DeleteUnusable(const std::string& id) {
  for (int store = kNumStores - 1; store >= 0; --store) {
    if (stores_[store] == nullptr) continue;
    if (absl::Status status = LeaveTombstone(id, 0, static_cast<StoreIndex>(store)); !status.ok())
      return status;
  }
  return absl::OkStatus();
}

absl::Status SessionRecords::Delete(Session& session) {
  std::unique_lock record_lock(session.record_mutex);
  for (int store = kNumStores - 1; store >= 0; --store) {
    if (stores_[store] == nullptr) continue;
    uint64_t revision;
    {
      const std::lock_guard lock(session.mutex);
      if (session.life != Session::Life::kLive) return SessionNotFound(session.id);
      revision = session.state.revision;
    }
    const absl::Status status = LeaveTombstone(session.id, revision, static_cast<StoreIndex>(store));
    if (!status.ok()) return status;
  }
  record_lock.unlock();
  Retire(session, Session::Life::kDeleted);
  return absl::OkStatus();
}

}  // namespace efla
