#include "server/sessions/session_manager.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/random_id.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_manager_impl.h"
#include "server/sessions/session_turn.h"

namespace efla {
namespace {

constexpr size_t kMaxIdBytes = 128;
constexpr size_t kMaxChildren = 1024;
constexpr size_t kMaxRemembered = 10'000;
// Calls wait for one another so long; for a turn they do not.
constexpr std::chrono::seconds kCallWait{10};

std::string RevisionText(uint64_t revision) { return absl::StrFormat("%d", revision); }

absl::Status Busy(const Session& session) {
  return WithSessionError(
      absl::AbortedError(absl::StrFormat("session %s is being changed by another call; its revision is %d",
                                         session.id, session.state.revision)),
      "SESSION_BUSY", {{"revision", RevisionText(session.state.revision)}});
}

absl::Status NotFound(const std::string& id) {
  return WithSessionError(absl::NotFoundError(absl::StrFormat("session %s does not exist", id)),
                          "SESSION_NOT_FOUND");
}

absl::Status Draining() {
  return WithSessionError(absl::UnavailableError("the server is shutting down"), "DRAINING");
}

absl::Status CheckRevision(const std::string& id, const std::optional<uint64_t>& expected,
                           uint64_t revision) {
  if (!expected || *expected == revision) return absl::OkStatus();
  return WithSessionError(absl::AbortedError(absl::StrFormat(
                              "session %s has revision %d; the call expects %d", id, revision, *expected)),
                          "REVISION_MISMATCH",
                          {{"revision", RevisionText(revision)}, {"expected", RevisionText(*expected)}});
}

// The head, or a mark's. With the session's mutex held.
absl::StatusOr<ContextPtr> ContextOf(const Session& session, const std::string& mark) {
  if (mark.empty()) return session.state.head;
  const auto found = session.state.marks.find(mark);
  if (found != session.state.marks.end()) return found->second.context;
  return WithSessionError(absl::NotFoundError(absl::StrFormat("session %s has no mark %s", session.id, mark)),
                          "MARK_NOT_FOUND");
}

}  // namespace

// ---- The table ----

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
                .now = options.now}) {}

absl::Status SessionManagerImpl::CheckId(const char* what, const std::string& id) const {
  if (id.empty() || id.size() > kMaxIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d characters; it must have 1 to %d", what, id.size(), kMaxIdBytes));
  }
  for (const char c : id) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
        c == '-') {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has a character of code %d; letters, digits and ._- are allowed", what,
                        static_cast<unsigned char>(c)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::chrono::milliseconds> SessionManagerImpl::CheckTtl(std::chrono::milliseconds ttl) const {
  if (ttl.count() == 0) return options_.max_ttl;
  if (ttl.count() > 0 && ttl <= options_.max_ttl) return ttl;
  return absl::InvalidArgumentError(
      absl::StrFormat("ttl is %d ms; it must be 0 to %d", ttl.count(), options_.max_ttl.count()));
}

// With the session's mutex held.
SessionInfo SessionManagerImpl::Info(const Session& session) const {
  const SessionState& state = session.state;
  SessionInfo info;
  info.session_id = session.id;
  info.revision = state.revision;
  info.durable_revision = std::min(session.durable_revision, state.revision);
  info.epoch = session.epoch;
  info.tokens = state.head->total_tokens();
  info.waiting_tokens = state.head->waiting.size();
  if (state.head->residence != nullptr) {
    switch (residency_->tier(*state.head->residence)) {
      case Residency::Tier::kDevice:
        info.tier = SessionTier::kDevice;
        break;
      case Residency::Tier::kHost:
        info.tier = SessionTier::kHost;
        break;
      case Residency::Tier::kDisk:
        info.tier = SessionTier::kDisk;
        break;
      case Residency::Tier::kShared:
        info.tier = SessionTier::kShared;
        break;
    }
  }
  info.busy = session.writer == Session::Writer::kTurn;
  for (const auto& [name, mark] : state.marks)
    info.marks.push_back({name, mark.since, mark.context->total_tokens()});
  for (const SessionState::KeptTurn& turn : state.turns) info.turns.push_back(turn.since);
  info.created_unix_ms = state.created_unix_ms;
  info.expires_unix_ms = records_.UnixMs(session.last_use) + state.ttl_ms;
  return info;
}

void SessionManagerImpl::Unlist(const SessionPtr& session) {
  SessionPtr listed;  // let go of without the lock
  const std::lock_guard lock(table_mutex_);
  const auto found = table_.find(session->id);
  if (found == table_.end() || found->second != session) return;
  listed = std::move(found->second);
  table_.erase(found);
}

// From the table, or from the store.
absl::StatusOr<SessionPtr> SessionManagerImpl::Find(const std::string& id) {
  if (absl::Status status = CheckId("the session's id", id); !status.ok()) return status;
  SessionPtr session;
  {
    const std::lock_guard lock(table_mutex_);
    if (const auto found = table_.find(id); found != table_.end()) session = found->second;
  }
  if (session != nullptr) {
    std::unique_lock lock(session->mutex);
    // One that is being made, or not after all.
    session->left.wait_for(lock, kCallWait, [&] {
      return session->state.revision > 0 || session->life != Session::Life::kLive;
    });
    if (session->state.revision == 0 && session->life == Session::Life::kLive) return Busy(*session);
    if (session->life == Session::Life::kLive && !records_.Expired(*session)) return session;
    const bool gone = session->life == Session::Life::kLive && (!shared_ || session->owned);
    lock.unlock();
    if (gone) return NotFound(id);                  // upkeep will see to it
    if (!records_.Evict(*session)) return session;  // somebody has begun to use it
    Unlist(session);
  }
  if (!records_.has_home()) return NotFound(id);
  absl::StatusOr<SessionPtr> loaded = records_.LoadHome(id, /*may_wait=*/true);
  if (!loaded.ok()) return loaded.status();
  session = *std::move(loaded);
  bool full = false;
  SessionPtr known;
  {
    const std::lock_guard lock(table_mutex_);
    if (const auto found = table_.find(id); found != table_.end()) {
      known = found->second;
    } else if (std::ssize(table_) >= options_.max_sessions) {
      full = true;
    } else {
      table_[id] = session;
    }
  }
  if (known == nullptr && !full) return session;
  records_.Retire(*session, Session::Life::kEvicted);
  if (full) {
    return WithSessionError(
        absl::ResourceExhaustedError(absl::StrFormat("%d sessions are open; the limit is %d",
                                                     options_.max_sessions, options_.max_sessions)),
        "SESSION_LIMIT");
  }
  return known;
}

// ---- Changes ----

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
    return Busy(session);
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
  if (over) Unlist(session);
  if (release) Enqueue(session);
}

absl::StatusOr<SessionManagerImpl::Opened> SessionManagerImpl::Open(const SessionChange& change,
                                                                    Session::Writer writer,
                                                                    RecordedReply::Call call) {
  for (;;) {
    if (draining_) return Draining();
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
        return absl::IsNotFound(status) ? status : NotFound(session->id);
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
        Unlist(session);
        return lost;
      }
      info.durable_revision = std::min(session->durable_revision, info.revision);
      break;
    }
  }
  return info;
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
    RecordReply(session.state, {.call = call,
                                .request_id = change.request_id,
                                .revision = session.state.revision,
                                .has_content = true,
                                .content = change.request_id.empty() ? "" : SerializeInfos({info})});
  }
  return Finish(std::move(opened->hold), change.durability, std::move(info));
}

absl::StatusOr<SessionManager::Begun> SessionManagerImpl::BeginTurn(const SessionChange& change,
                                                                    OnCancel on_cancel, bool create) {
  for (;;) {
    absl::StatusOr<Opened> opened = Open(change, Session::Writer::kTurn, RecordedReply::Call::kTurn);
    if (create && absl::IsNotFound(opened.status())) {
      // What does not exist has revision 0.
      if (absl::Status status = CheckRevision(change.session_id, change.expected_revision, 0); !status.ok()) {
        return status;
      }
      absl::StatusOr<SessionInfo> made =
          Make(change.session_id, std::make_shared<const Context>(), options_.max_ttl,
               RecordedReply::Call::kCreate, "", Durability::kNone);
      if (!made.ok() && !absl::IsAlreadyExists(made.status())) return made.status();
      SessionChange next = change;
      next.expected_revision.reset();
      if (made.ok()) next.expected_revision = made->revision;
      opened = Open(next, Session::Writer::kTurn, RecordedReply::Call::kTurn);
      if (absl::IsNotFound(opened.status())) continue;  // deleted again in between
    }
    if (!opened.ok()) return opened.status();
    const SessionPtr session = opened->session;
    Begun begun;
    ContextPtr head;
    {
      const std::lock_guard lock(session->mutex);
      if (session->life != Session::Life::kLive) return Lost(*session);
      begun.info = Info(*session);
      head = session->state.head;
    }
    if (opened->replay) {
      begun.reply = std::move(opened->replay->content);
      return begun;
    }
    begun.turn = std::make_unique<TurnImpl>(*this, std::move(opened->hold), change, on_cancel, begun.info,
                                            std::move(head));
    return begun;
  }
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Mark(const SessionChange& change, const std::string& name) {
  if (absl::Status status = CheckId("the mark's name", name); !status.ok()) return status;
  return Change(change, RecordedReply::Call::kMark, [&](SessionState& state) -> absl::Status {
    if (!state.marks.contains(name) && std::ssize(state.marks) >= options_.max_marks) {
      return WithSessionError(absl::ResourceExhaustedError(
                                  absl::StrFormat("session %s has %d marks; the limit is %d",
                                                  change.session_id, state.marks.size(), options_.max_marks)),
                              "SESSION_LIMIT");
    }
    state.marks[name] = {state.head_since, state.head};
    NextRevision(state);
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
        return WithSessionError(
            absl::NotFoundError(absl::StrFormat("session %s has no mark %s", change.session_id, mark)),
            "MARK_NOT_FOUND");
      }
      // The turns before the marked one led to it.
      std::erase_if(turns, [&](const auto& turn) { return turn.until >= found->second.since; });
      SetHead(state, found->second.context);
      return absl::OkStatus();
    }
    if (revision && *revision >= state.head_since && *revision <= state.revision) {
      NextRevision(state);
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
          "REVISION_NOT_KEPT", {{"revision", RevisionText(state.revision)}});
    }
    ContextPtr head = turn->context;
    turns.erase(turn, turns.end());
    SetHead(state, std::move(head));
    return absl::OkStatus();
  });
}

absl::Status SessionManagerImpl::Delete(const SessionChange& change) {
  if (draining_) return Draining();
  const std::string key = "delete " + change.request_id;
  if (!change.request_id.empty()) {
    const std::lock_guard lock(table_mutex_);
    const auto seen = remembered_.find(key);
    if (seen != remembered_.end() && seen->second.session_id == change.session_id) return absl::OkStatus();
  }
  absl::StatusOr<SessionPtr> found = Find(change.session_id);
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
  Unlist(session);
  if (!change.request_id.empty()) {
    const std::lock_guard lock(table_mutex_);
    if (remembered_.insert_or_assign(key, Remembered{change.session_id, true}).second) {
      remembered_order_.push_back(key);
    }
    while (remembered_order_.size() > kMaxRemembered) {
      remembered_.erase(remembered_order_.front());
      remembered_order_.pop_front();
    }
  }
  return absl::OkStatus();
}

// ---- New sessions ----

absl::StatusOr<SessionInfo> SessionManagerImpl::Make(std::string id, ContextPtr head,
                                                     std::chrono::milliseconds ttl, RecordedReply::Call call,
                                                     const std::string& request_id, Durability durability) {
  if (draining_) return Draining();
  if (id.empty()) id = RandomId();
  if (absl::Status status = CheckId("the session's id", id); !status.ok()) return status;
  const auto session = std::make_shared<Session>(id);
  session->writer = Session::Writer::kCall;
  session->last_use = records_.Now();
  session->state.head = std::move(head);
  session->state.ttl_ms = ttl.count();
  session->state.created_unix_ms = records_.UnixMs(session->last_use);
  const absl::Status exists = WithSessionError(
      absl::AlreadyExistsError(absl::StrFormat("session %s exists already", id)), "SESSION_EXISTS");
  for (;;) {
    SessionPtr known;
    {
      const std::lock_guard lock(table_mutex_);
      if (const auto found = table_.find(id); found != table_.end()) {
        known = found->second;
      } else if (std::ssize(table_) >= options_.max_sessions) {
        return WithSessionError(
            absl::ResourceExhaustedError(absl::StrFormat("%d sessions are open; the limit is %d",
                                                         table_.size(), options_.max_sessions)),
            "SESSION_LIMIT");
      } else {
        table_[id] = session;
      }
    }
    if (known == nullptr) break;
    absl::StatusOr<SessionPtr> alive = Find(id);
    if (alive.ok()) return exists;
    if (!absl::IsNotFound(alive.status())) return alive.status();
    bool over;
    {
      const std::lock_guard lock(known->mutex);
      over = known->life != Session::Life::kLive;
    }
    if (!over) {  // expired, and nobody has looked after it yet
      if (absl::Status status = records_.Delete(*known); !status.ok() && !absl::IsNotFound(status))
        return status;
    }
    Unlist(known);
  }

  Hold hold(*this, session);
  if (absl::Status status = records_.Reserve(*session); !status.ok()) {
    records_.Retire(*session, Session::Life::kEvicted);
    return status;
  }
  SessionInfo info;
  {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) return Lost(*session);
    session->state.revision = session->state.head_since = 1;
    session->changes = 1;
    info = Info(*session);
    RecordReply(session->state, {.call = call,
                                 .request_id = request_id,
                                 .revision = 1,
                                 .has_content = true,
                                 .content = request_id.empty() ? "" : SerializeInfos({info})});
    session->left.notify_all();
  }
  return Finish(std::move(hold), durability, std::move(info));
}

// A repeated request gets the session that the first one made.
absl::StatusOr<SessionInfo> SessionManagerImpl::MakeOnce(
    const std::string& id, RecordedReply::Call call, const std::string& request_id,
    const std::function<absl::StatusOr<SessionInfo>()>& make) {
  if (request_id.empty()) return make();
  const std::string key = (call == RecordedReply::Call::kCreate ? "create " : "import ") + request_id;
  std::string made_before;
  {
    const std::lock_guard lock(table_mutex_);
    const auto [seen, is_new] = remembered_.try_emplace(key);
    if (!is_new && !seen->second.done) {
      return WithSessionError(absl::AbortedError(absl::StrFormat("request %s is under way", request_id)),
                              "SESSION_BUSY", {{"revision", "0"}});
    }
    if (is_new) {
      remembered_order_.push_back(key);
    } else {
      made_before = seen->second.session_id;
    }
  }
  if (!made_before.empty()) {
    if (!id.empty() && id != made_before) {
      return absl::AlreadyExistsError(
          absl::StrFormat("request %s has made session %s; now it asks for %s", request_id, made_before, id));
    }
    return Get(made_before);
  }
  absl::StatusOr<SessionInfo> info = make();
  // Made before this server came up, or by another replica.
  if (absl::IsAlreadyExists(info.status()) && !id.empty()) {
    if (absl::StatusOr<SessionPtr> session = Find(id); session.ok()) {
      const std::lock_guard lock((*session)->mutex);
      if (FindReply((*session)->state, call, request_id) != nullptr) info = Info(**session);
    }
  }
  const std::lock_guard lock(table_mutex_);
  if (const auto seen = remembered_.find(key); seen != remembered_.end()) {
    if (info.ok()) {
      seen->second = {info->session_id, true};
    } else {
      remembered_.erase(seen);
      std::erase(remembered_order_, key);
    }
  }
  while (remembered_order_.size() > kMaxRemembered) {
    remembered_.erase(remembered_order_.front());
    remembered_order_.pop_front();
  }
  return info;
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Create(const std::string& id, std::chrono::milliseconds ttl,
                                                       const std::string& request_id, Durability durability) {
  const absl::StatusOr<std::chrono::milliseconds> lifetime = CheckTtl(ttl);
  if (!lifetime.ok()) return lifetime.status();
  return MakeOnce(id, RecordedReply::Call::kCreate, request_id, [&] {
    return Make(id, std::make_shared<const Context>(), *lifetime, RecordedReply::Call::kCreate, request_id,
                durability);
  });
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Import(const std::string& id, std::chrono::milliseconds ttl,
                                                       std::span<const std::byte> snapshot,
                                                       const std::string& request_id, Durability durability) {
  const absl::StatusOr<std::chrono::milliseconds> lifetime = CheckTtl(ttl);
  if (!lifetime.ok()) return lifetime.status();
  return MakeOnce(id, RecordedReply::Call::kImport, request_id, [&]() -> absl::StatusOr<SessionInfo> {
    if (draining_) return Draining();
    absl::StatusOr<Snapshot> decoded = residency_->format().Decode(snapshot, options_.allow_other_numerics);
    if (!decoded.ok()) {
      if (absl::IsDataLoss(decoded.status())) return WithSessionError(decoded.status(), "SNAPSHOT_DAMAGED");
      if (absl::IsFailedPrecondition(decoded.status()))
        return WithSessionError(decoded.status(), "SNAPSHOT_MISMATCH");
      return decoded.status();
    }
    Context head{.residence = nullptr, .waiting = WaitingOf(decoded->tokens)};
    if (decoded->tokens.fed_tokens > 0) {
      if (absl::Status status = MakeRoom(); !status.ok()) return status;
      absl::StatusOr<ResidencePtr> residence =
          residency_->AddHost(std::move(decoded->tokens), std::move(decoded->state));
      if (!residence.ok()) return residence.status();
      head.residence = *std::move(residence);
    }
    return Make(id, std::make_shared<const Context>(std::move(head)), *lifetime, RecordedReply::Call::kImport,
                request_id, durability);
  });
}

absl::StatusOr<std::vector<SessionInfo>> SessionManagerImpl::Fork(const SessionChange& change,
                                                                  const std::vector<std::string>& ids,
                                                                  const std::string& mark) {
  if (ids.empty() || ids.size() > kMaxChildren) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a fork into %d children; it must be 1 to %d", ids.size(), kMaxChildren));
  }
  std::set<std::string> distinct;
  for (const std::string& id : ids) {
    if (id.empty()) continue;
    if (absl::Status status = CheckId("a child's id", id); !status.ok()) return status;
    if (!distinct.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrFormat("child %s is named twice", id));
    }
  }
  absl::StatusOr<Opened> opened = Open(change, Session::Writer::kCall, RecordedReply::Call::kFork);
  if (!opened.ok()) return opened.status();
  if (opened->replay) return ParseInfos(opened->replay->content);
  const SessionPtr session = opened->session;
  ContextPtr context;
  std::chrono::milliseconds ttl;
  {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) return Lost(*session);
    ttl = std::chrono::milliseconds(session->state.ttl_ms);
    absl::StatusOr<ContextPtr> found = ContextOf(*session, mark);
    if (!found.ok()) return found.status();
    context = *std::move(found);
  }
  // At least in the background: their states are mostly written already, and must stay so when the parent
  // goes on.
  const Durability durability =
      change.durability == Durability::kNone ? Durability::kAsync : change.durability;
  std::vector<SessionInfo> children;
  for (const std::string& id : ids) {
    absl::StatusOr<SessionInfo> child = Make(id, context, ttl, RecordedReply::Call::kFork, "", durability);
    if (!child.ok()) {
      for (const SessionInfo& made : children) {
        if (absl::StatusOr<SessionPtr> found = Find(made.session_id); found.ok()) {
          records_.Delete(**found).IgnoreError();  // one that stays expires
          Unlist(*found);
        }
      }
      return child.status();
    }
    children.push_back(*std::move(child));
  }
  SessionInfo info;
  {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) return children;
    session->last_use = records_.Now();
    if (!change.request_id.empty()) {
      RecordReply(session->state, {.call = RecordedReply::Call::kFork,
                                   .request_id = change.request_id,
                                   .revision = session->state.revision,
                                   .has_content = true,
                                   .content = SerializeInfos(children)});
      ++session->changes;
    }
    info = Info(*session);
  }
  const Durability of_parent = change.request_id.empty() ? Durability::kNone : change.durability;
  absl::StatusOr<SessionInfo> finished = Finish(std::move(opened->hold), of_parent, std::move(info));
  if (!finished.ok()) return finished.status();
  return children;
}

// ---- Looking ----

// As current as can be without a claim. `look` is called with the session's mutex held, while it is alive.
absl::Status SessionManagerImpl::Look(const std::string& id,
                                      const std::function<absl::Status(Session&)>& look) {
  for (;;) {
    absl::StatusOr<SessionPtr> session = Find(id);
    if (!session.ok()) return session.status();
    if (absl::Status status = records_.Refresh(**session); !status.ok()) return status;
    const std::lock_guard lock((*session)->mutex);
    if ((*session)->life == Session::Life::kLive) return look(**session);
    if ((*session)->life == Session::Life::kDeleted) return NotFound(id);
  }
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Get(const std::string& id) {
  SessionInfo info;
  absl::Status status = Look(id, [&](Session& session) {
    info = Info(session);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return info;
}

std::vector<SessionInfo> SessionManagerImpl::List(const std::string& prefix, const std::string& after,
                                                  int limit) {
  const auto wanted = [&](const std::string& id) {
    return id > after && id.compare(0, prefix.size(), prefix) == 0;
  };
  std::map<std::string, SessionPtr> found;
  {
    const std::lock_guard lock(table_mutex_);
    auto next = prefix > after ? table_.lower_bound(prefix) : table_.upper_bound(after);
    for (; next != table_.end() && wanted(next->first); ++next) found.insert(*next);
  }
  if (shared_) {
    // Those that other replicas made. While the store is out of reach, those that are known here.
    const absl::StatusOr<std::vector<std::string>> ids = shared_->ListRecords();
    if (!ids.ok()) residency_->CountStoreError();
    for (const std::string& id : ids.ok() ? *ids : std::vector<std::string>()) {
      if (wanted(id)) found.try_emplace(id, nullptr);
    }
  }
  std::vector<SessionInfo> infos;
  for (const auto& [id, listed] : found) {
    if (std::ssize(infos) >= limit) break;
    SessionPtr session = listed;
    if (session == nullptr) {
      absl::StatusOr<SessionPtr> loaded = records_.LoadHome(id, /*may_wait=*/false);
      if (!loaded.ok()) continue;
      session = *std::move(loaded);
    } else if (!records_.Refresh(*session).ok()) {
      continue;
    }
    {
      const std::lock_guard lock(session->mutex);
      const bool alive = session->life == Session::Life::kLive && session->state.revision > 0;
      if (alive && !records_.Expired(*session)) infos.push_back(Info(*session));
    }
    if (listed == nullptr) records_.Retire(*session, Session::Life::kEvicted);
  }
  return infos;
}

absl::StatusOr<std::vector<std::byte>> SessionManagerImpl::Export(const std::string& id,
                                                                  const std::string& mark) {
  ContextPtr context;
  absl::Status status = Look(id, [&](Session& session) -> absl::Status {
    absl::StatusOr<ContextPtr> found = ContextOf(session, mark);
    if (!found.ok()) return found.status();
    context = *std::move(found);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (context->residence == nullptr)
    return residency_->format().Encode(WithWaiting({}, context->waiting), {});
  absl::StatusOr<Residency::State> state = residency_->Read(*context->residence);
  if (!state.ok()) return state.status();
  return residency_->format().Encode(WithWaiting(*state->base, context->waiting), *state->bytes);
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Move(const std::string& id, SessionTier tier) {
  SessionPtr session;
  std::vector<ResidencePtr> residences;  // the head's first
  absl::Status found = Look(id, [&](Session& alive) {
    session = alive.shared_from_this();
    const auto add = [&](const Context& context) {
      if (context.residence != nullptr) residences.push_back(context.residence);
    };
    add(*alive.state.head);
    if (tier == SessionTier::kDevice) return absl::OkStatus();
    for (const auto& [name, mark] : alive.state.marks) add(*mark.context);
    for (const SessionState::KeptTurn& turn : alive.state.turns) add(*turn.context);
    return absl::OkStatus();
  });
  if (!found.ok()) return found;
  const auto no_such = [&](const char* name) {
    return absl::InvalidArgumentError(
        absl::StrFormat("session %s cannot move to %s: there is none", id, name));
  };
  switch (tier) {
    case SessionTier::kNone:
      return absl::InvalidArgumentError(absl::StrFormat("session %s cannot move to no tier", id));
    case SessionTier::kDevice: {
      if (residences.empty()) break;
      const absl::StatusOr<Residency::Lifted> lifted = residency_->Lift(*residences.front());
      if (!lifted.ok()) return lifted.status();
      break;
    }
    case SessionTier::kHost:
      for (const ResidencePtr& residence : residences) {
        if (absl::Status status = residency_->Sink(*residence); !status.ok()) return status;
      }
      break;
    case SessionTier::kDisk:
    case SessionTier::kShared: {
      if (tier == SessionTier::kDisk && disk_ == nullptr) return no_such("the disk");
      if (tier == SessionTier::kShared && shared_ == nullptr) return no_such("a shared store");
      absl::Status status = records_.Write(*session, /*all_turns=*/true);
      if (status.ok() && tier == SessionTier::kDisk && shared_ != nullptr)
        status = records_.WriteToDisk(*session);
      if (!status.ok()) return status;
      for (const ResidencePtr& residence : residences) {
        residency_->DropFromMemory(*residence, std::chrono::milliseconds(0));
      }
      break;
    }
  }
  return Get(id);
}

SessionManager::Stats SessionManagerImpl::stats() const {
  const Residency::Stats states = residency_->stats();
  Stats stats;
  stats.turns = turns_;
  stats.contexts_device = states.device;
  stats.contexts_host = states.host;
  stats.contexts_stored = states.stored;
  stats.host_bytes = states.host_bytes;
  stats.lifts_host = states.lifts_host;
  stats.lifts_disk = states.lifts_disk;
  stats.lifts_shared = states.lifts_shared;
  stats.sinks = states.sinks;
  stats.takeovers = records_.takeovers();
  stats.store_errors = states.store_errors;
  stats.stored_bytes = states.stored_bytes;
  const std::vector<SessionPtr> sessions = AllSessions();
  stats.sessions = static_cast<int>(sessions.size());
  if (!records_.has_home()) return stats;
  for (const SessionPtr& session : sessions) {
    const std::lock_guard lock(session->mutex);
    stats.dirty += session->state.revision > session->durable_revision;
  }
  return stats;
}

absl::Status SessionManagerImpl::CheckInvariants() const {
  if (absl::Status status = residency_->CheckInvariants(); !status.ok()) return status;
  for (const SessionPtr& session : AllSessions()) {
    const std::lock_guard lock(session->mutex);
    const SessionState& state = session->state;
    const auto wrong = [&](const char* what) {
      return absl::InternalError(
          absl::StrFormat("session %s, revision %d: %s", session->id, state.revision, what));
    };
    if (state.head == nullptr) return wrong("it has no head");
    if (state.head_since > state.revision) return wrong("its head is newer than itself");
    if (session->durable_revision > state.revision) return wrong("more is durable than there is");
    if (session->written_changes > session->changes) return wrong("more is written than there is");
    if (std::ssize(state.turns) > options_.max_kept_turns) return wrong("it keeps too many turns");
    if (std::ssize(state.marks) > options_.max_marks) return wrong("it has too many marks");
    if (state.replies.size() > kMaxReplies) return wrong("it keeps too many replies");
    uint64_t until = 0;
    for (const SessionState::KeptTurn& turn : state.turns) {
      if (turn.context == nullptr || turn.since > turn.until || turn.since <= until)
        return wrong("its turns are in disorder");
      until = turn.until;
    }
    if (until >= state.head_since && until > 0) return wrong("its last kept turn is newer than its head");
    for (const auto& [name, mark] : state.marks) {
      if (mark.context == nullptr || mark.since > state.revision) return wrong("a mark is in disorder");
    }
    const auto waits = [](const Context& context) {
      return context.waiting.pending_prompt.size() <= kChunkTokens &&
             (context.residence != nullptr || !context.waiting.pending_token);
    };
    if (!waits(*state.head)) return wrong("too much waits to be fed");
  }
  return absl::OkStatus();
}

}  // namespace efla
