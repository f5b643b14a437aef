#include "server/sessions/session_manager.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/session_checks.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_manager_impl.h"
#include "server/sessions/session_turn.h"

namespace efla {
namespace {

// Calls wait for one another so long; for a turn they do not.
constexpr std::chrono::seconds kCallWait{10};

}  // namespace

absl::StatusOr<std::unique_ptr<SessionManager>> SessionManager::Start(Engine& engine, SnapshotFormat format,
                                                                      std::unique_ptr<SessionStore> disk,
                                                                      std::unique_ptr<SessionStore> shared,
                                                                      const SessionOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t least) -> absl::Status {
    if (value >= least) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("%s is %d; the least is %d", name, value, least));
  };
  absl::Status status = at_least("max_sessions", options.max_sessions, 1);
  status.Update(at_least("max_marks", options.max_marks, 0));
  status.Update(at_least("max_kept_turns", options.max_kept_turns, 0));
  status.Update(at_least("host_bytes", options.host_bytes, 0));
  status.Update(at_least("device_idle in ms", options.device_idle.count(), 0));
  status.Update(at_least("host_idle in ms", options.host_idle.count(), 0));
  status.Update(at_least("max_ttl in ms", options.max_ttl.count(), 1));
  status.Update(at_least("lease_ttl in ms", options.lease_ttl.count(), 3));
  status.Update(at_least("claim_wait in ms", options.claim_wait.count(), 0));
  status.Update(at_least("slot_wait in ms", options.slot_wait.count(), 0));
  // A turn reads one slot and writes another.
  status.Update(at_least("the number of state slots, with sessions,", engine.stats().slots.total, 2));
  if (!status.ok()) return status;
  if (shared != nullptr && options.replica.empty()) {
    return absl::InvalidArgumentError("replica is empty; with a shared store it must name this server");
  }
  auto manager = std::make_unique<SessionManagerImpl>(engine, std::move(format), std::move(disk),
                                                      std::move(shared), options);
  if (status = manager->Begin(); !status.ok()) return status;
  return manager;
}

SessionManagerImpl::SessionManagerImpl(Engine& engine, SnapshotFormat format,
                                       std::unique_ptr<SessionStore> disk,
                                       std::unique_ptr<SessionStore> shared, const SessionOptions& options)
    : engine_(engine),
      disk_(std::move(disk)),
      shared_(std::move(shared)),
      options_(options),
      residency_(Residency::Create(engine, std::move(format), disk_.get(), shared_.get(),
                                   {.host_bytes = options.host_bytes,
                                    .slot_wait = options.slot_wait,
                                    .allow_other_numerics = options.allow_other_numerics,
                                    .now = options.now})),
      records_(residency_, disk_.get(), shared_.get(),
               {.replica = options.replica,
                .address = options.address,
                .lease_ttl = options.lease_ttl,
                .claim_wait = options.claim_wait,
                .now = options.now}),
      table_(options.max_sessions) {}

// From the table, or from the store.
absl::StatusOr<SessionPtr> SessionManagerImpl::Find(const std::string& id) {
  if (absl::Status status = CheckSessionKey("the session's id", id); !status.ok()) return status;
  SessionPtr session = table_.Find(id);
  if (session != nullptr) {
    std::unique_lock lock(session->mutex);
    // One that is being made, or not after all.
    session->left.wait_for(lock, kCallWait, [&] {
      return session->state.revision > 0 || session->life != Session::Life::kLive;
    });
    if (session->state.revision == 0 && session->life == Session::Life::kLive) return SessionBusy(*session);
    if (session->life == Session::Life::kLive && !records_.Expired(*session)) return session;
    const bool gone = session->life == Session::Life::kLive && (!shared_ || session->owned);
    lock.unlock();
    if (gone) return SessionNotFound(id);           // upkeep will see to it
    if (!records_.Evict(*session)) return session;  // somebody has begun to use it
    table_.Remove(session);
  }
  if (!records_.has_home()) return SessionNotFound(id);
  absl::StatusOr<SessionPtr> loaded = records_.LoadHome(id, /*may_wait=*/true);
  if (!loaded.ok()) return loaded.status();
  session = *std::move(loaded);
  absl::StatusOr<SessionPtr> listed = table_.Insert(session);
  if (!listed.ok() || *listed != session) records_.Retire(*session, Session::Life::kEvicted);
  return listed;
}

// ---- Changes ----

SessionInfo SessionManagerImpl::Info(const Session& session) const {
  return InfoOf(session, *residency_, records_);
}

absl::Status SessionManagerImpl::DamageOf(const Context& context) const {
  return context.residence == nullptr ? absl::OkStatus() : residency_->Damage(*context.residence);
}

// Makes the call the session's writer. With a value: the request has been seen, and the call is not the
// writer.
absl::StatusOr<std::optional<RecordedReply>> SessionManagerImpl::Enter(Session& session,
                                                                       const SessionChange& change,
                                                                       Session::Writer writer,
                                                                       RecordedReply::Call call) {
  std::unique_lock lock(session.mutex);
  session.left.wait_for(lock, kCallWait, [&] {
    return session.writer != Session::Writer::kCall || session.life != Session::Life::kLive;
  });
  if (session.life != Session::Life::kLive) return std::optional<RecordedReply>();
  if (session.writer != Session::Writer::kNone) {
    // Whoever has a writer here owns it, so what it has recorded is all there is.
    if (const RecordedReply* reply = FindReply(session.state, call, change.request_id)) {
      if (absl::Status status = CheckContent(*reply); !status.ok()) return status;
      return std::optional<RecordedReply>(*reply);
    }
    return SessionBusy(session);
  }
  session.writer = writer;
  return std::optional<RecordedReply>();
}

void SessionManagerImpl::Leave(const SessionPtr& session) {
  bool release, over;
  {
    const std::lock_guard lock(session->mutex);
    session->writer = Session::Writer::kNone;
    session->left.notify_all();
    over = session->life != Session::Life::kLive;
    release = session->doubtful || (session->owned && session->changes == session->written_changes);
  }
  if (over) table_.Remove(session);
  if (release) Enqueue(session);
}

absl::StatusOr<SessionManagerImpl::Opened> SessionManagerImpl::Open(const SessionChange& change,
                                                                    Session::Writer writer,
                                                                    RecordedReply::Call call) {
  for (;;) {
    if (draining_) return ServerDraining();
    absl::StatusOr<SessionPtr> found = Find(change.session_id);
    if (!found.ok()) return found.status();
    const SessionPtr session = *std::move(found);
    absl::StatusOr<std::optional<RecordedReply>> entered = Enter(*session, change, writer, call);
    if (!entered.ok()) return entered.status();
    if (entered->has_value()) return Opened{{}, std::move(*entered), session};
    {
      const std::lock_guard lock(session->mutex);
      if (session->life != Session::Life::kLive) continue;
    }
    Hold hold(*this, session);
    std::optional<RecordedReply> replay;
    const absl::Status status = records_.Acquire(*session, [&]() -> absl::Status {
      if (const RecordedReply* reply = FindReply(session->state, call, change.request_id)) {
        if (absl::Status content = CheckContent(*reply); !content.ok()) return content;
        replay = *reply;
        return absl::CancelledError("nothing needs to be claimed");
      }
      return CheckRevision(session->id, change.expected_revision, session->state.revision);
    });
    if (replay) return Opened{{}, std::move(replay), session};
    {
      const std::lock_guard lock(session->mutex);
      if (session->life == Session::Life::kDeleted)
        return absl::IsNotFound(status) ? status : SessionNotFound(session->id);
      if (session->life != Session::Life::kLive) continue;
    }
    if (!status.ok()) return status;
    return Opened{std::move(hold), std::nullopt, session};
  }
}

// Gives the session up and sees to the change's durability.
absl::StatusOr<SessionInfo> SessionManagerImpl::Finish(Hold hold, Durability durability, SessionInfo info) {
  const SessionPtr session = hold.session();
  hold.GiveUp();
  info.busy = false;
  switch (durability) {
    case Durability::kNone:
      break;
    case Durability::kAsync:
      Enqueue(session);
      break;
    case Durability::kSync: {
      const absl::Status status = records_.Write(*session, /*all_turns=*/false);
      if (!status.ok()) Enqueue(session);
      std::unique_lock lock(session->mutex);
      if (session->life != Session::Life::kLive) {
        const absl::Status lost = Lost(*session);
        lock.unlock();
        table_.Remove(session);
        return lost;
      }
      info.durable_revision = std::min(session->durable_revision, info.revision);
      break;
    }
  }
  return info;
}

// What a repetition is answered with. Whoever reads it from a store sees that the store has it.
SessionInfo SessionManagerImpl::ToRecord(const SessionInfo& info, Durability durability) const {
  SessionInfo record = info;
  record.busy = false;
  if (durability == Durability::kSync && records_.has_home()) record.durable_revision = info.revision;
  return record;
}

// The call's answer is another one than was expected: the write has failed.
void SessionManagerImpl::CorrectReply(Session& session, RecordedReply::Call call,
                                      const std::string& request_id, const SessionInfo& info,
                                      Durability durability) {
  if (request_id.empty() || info.durable_revision == ToRecord(info, durability).durable_revision) return;
  const std::lock_guard lock(session.mutex);
  for (RecordedReply& reply : session.state.replies) {
    if (reply.call == call && reply.request_id == request_id) reply.content = SerializeInfos({info});
  }
}

// A change that only moves pointers.
absl::StatusOr<SessionInfo> SessionManagerImpl::Change(
    const SessionChange& change, RecordedReply::Call call,
    const std::function<absl::Status(SessionState&)>& edit) {
  absl::StatusOr<Opened> opened = Open(change, Session::Writer::kCall, call);
  if (!opened.ok()) return opened.status();
  if (opened->replay) {
    absl::StatusOr<std::vector<SessionInfo>> infos = ParseInfos(opened->replay->content);
    if (!infos.ok()) return infos.status();
    return infos->at(0);
  }
  Session& session = *opened->session;
  SessionInfo info;
  SessionState former;  // let go of without the lock
  {
    const std::lock_guard lock(session.mutex);
    if (session.life != Session::Life::kLive) return Lost(session);
    former = session.state;
    if (absl::Status status = edit(session.state); !status.ok()) return status;
    ++session.changes;
    session.last_use = records_.Now();
    info = Info(session);
    RecordReply(
        session.state,
        {.call = call,
         .request_id = change.request_id,
         .revision = session.state.revision,
         .has_content = true,
         .content = change.request_id.empty() ? "" : SerializeInfos({ToRecord(info, change.durability)})});
  }
  absl::StatusOr<SessionInfo> finished = Finish(std::move(opened->hold), change.durability, std::move(info));
  if (finished.ok()) CorrectReply(session, call, change.request_id, *finished, change.durability);
  return finished;
}

absl::StatusOr<SessionManager::Begun> SessionManagerImpl::BeginTurn(const SessionChange& change,
                                                                    OnCancel on_cancel, bool create) {
  for (;;) {
    bool made = false;
    absl::StatusOr<Opened> opened = Open(change, Session::Writer::kTurn, RecordedReply::Call::kTurn);
    if (create && absl::IsNotFound(opened.status())) {
      // What does not exist has revision 0.
      if (absl::Status status = CheckRevision(change.session_id, change.expected_revision, 0); !status.ok()) {
        return status;
      }
      Hold hold;
      const absl::Status status = Make(change.session_id, std::make_shared<const Context>(), options_.max_ttl,
                                       RecordedReply::Call::kCreate, "", Durability::kNone, &hold)
                                      .status();
      if (absl::IsAlreadyExists(status)) continue;  // made by another call in between
      if (!status.ok()) return status;
      made = true;
      const SessionPtr session = hold.session();
      opened = Opened{std::move(hold), std::nullopt, session};
    }
    if (!opened.ok()) return opened.status();
    const SessionPtr session = opened->session;
    Begun begun;
    ContextPtr head;
    uint64_t next_revision;
    {
      const std::lock_guard lock(session->mutex);
      if (session->life != Session::Life::kLive) return Lost(*session);
      begun.info = Info(*session);
      next_revision = NextRevision(session->state);
      head = session->state.head;
    }
    if (opened->replay) {
      begun.reply = std::move(opened->replay->content);
      return begun;
    }
    begun.turn = std::make_unique<TurnImpl>(*this, std::move(opened->hold), change, on_cancel, begun.info,
                                            next_revision, std::move(head), made);
    return begun;
  }
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Mark(const SessionChange& change, const std::string& name) {
  if (absl::Status status = CheckSessionKey("the mark's name", name); !status.ok()) return status;
  return Change(change, RecordedReply::Call::kMark, [&](SessionState& state) -> absl::Status {
    if (!state.marks.contains(name) && std::ssize(state.marks) >= options_.max_marks) {
      return WithSessionError(absl::ResourceExhaustedError(
                                  absl::StrFormat("session %s has %d marks; the limit is %d",
                                                  change.session_id, state.marks.size(), options_.max_marks)),
                              "SESSION_LIMIT");
    }
    if (absl::Status damage = DamageOf(*state.head); !damage.ok()) return damage;
    state.marks[name] = {state.head_since, state.head};
    CountChange(state);
    return absl::OkStatus();
  });
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Rewind(const SessionChange& change, const std::string& mark,
                                                       std::optional<uint64_t> revision) {
  if (!mark.empty() && revision) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a rewind to mark %s and to revision %d; give one of them", mark, *revision));
  }
  return Change(change, RecordedReply::Call::kRewind, [&](SessionState& state) -> absl::Status {
    auto& turns = state.turns;
    if (!mark.empty()) {
      const auto found = state.marks.find(mark);
      if (found == state.marks.end()) {
        return MarkNotFound(change.session_id, mark);
      }
      if (absl::Status damage = DamageOf(*found->second.context); !damage.ok()) return damage;
      // The turns before the marked one led to it.
      std::erase_if(turns, [&](const auto& turn) { return turn.until >= found->second.since; });
      SetHead(state, found->second.context);
      return absl::OkStatus();
    }
    if (revision && *revision >= state.head_since && *revision <= state.revision) {
      CountChange(state);
      return absl::OkStatus();
    }
    const auto turn = revision ? std::find_if(turns.begin(), turns.end(),
                                              [&](const auto& kept) {
                                                return kept.since <= *revision && *revision <= kept.until;
                                              })
                               : (turns.empty() ? turns.end() : turns.end() - 1);
    if (turn == turns.end()) {
      const std::string oldest =
          turns.empty() ? "none is" : absl::StrFormat("the oldest is %d", turns.front().since);
      return WithSessionError(
          absl::OutOfRangeError(revision
                                    ? absl::StrFormat("revision %d of session %s is not kept; %s", *revision,
                                                      change.session_id, oldest)
                                    : absl::StrFormat("no turn of session %s is kept", change.session_id)),
          "REVISION_NOT_KEPT", {{"revision", absl::StrFormat("%d", state.revision)}});
    }
    if (absl::Status damage = DamageOf(*turn->context); !damage.ok()) return damage;
    ContextPtr head = turn->context;
    turns.erase(turn, turns.end());
    SetHead(state, std::move(head));
    return absl::OkStatus();
  });
}

absl::Status SessionManagerImpl::Delete(const SessionChange& change) {
  if (draining_) return ServerDraining();
  if (!change.request_id.empty()) {
    const auto seen = remembered_.Find(RememberedRequests::Call::kDelete, change.request_id);
    if (seen && seen->session_id == change.session_id) return absl::OkStatus();
  }
  absl::StatusOr<SessionPtr> found = Find(change.session_id);
  // What is damaged, or cannot be read on this machine's disk, can at least be deleted: it has no revision to
  // expect.
  const bool unusable =
      absl::IsDataLoss(found.status()) || (absl::IsUnavailable(found.status()) && shared_ == nullptr);
  if (unusable) {
    if (absl::Status status = records_.DeleteUnusable(change.session_id); !status.ok()) return status;
  } else {
    if (!found.ok()) return found.status();
    const SessionPtr session = *std::move(found);
    if (absl::Status status = records_.Refresh(*session); !status.ok()) return status;
    {
      const std::lock_guard lock(session->mutex);
      if (absl::Status status = CheckRevision(session->id, change.expected_revision, session->state.revision);
          !status.ok()) {
        return status;
      }
    }
    if (absl::Status status = records_.Delete(*session); !status.ok()) return status;
    table_.Remove(session);
  }
  if (change.undoes_creation) remembered_.ForgetMaking(change.session_id);
  if (!change.request_id.empty()) {
    remembered_.Finish(RememberedRequests::Call::kDelete, change.request_id, {change.session_id, {}});
  }
  return absl::OkStatus();
}

}  // namespace efla
