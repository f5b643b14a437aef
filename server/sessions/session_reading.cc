// Calls that change no session, see session_manager_impl.h: looking, listing, exporting, moving between
// tiers.
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/session_checks.h"
#include "server/sessions/session_key.h"
#include "server/sessions/session_manager_impl.h"

namespace efla {

// As current as can be without a claim. `look` is called with the session's mutex held, while it is alive.
absl::Status SessionManagerImpl::Look(const std::string& id,
                                      const std::function<absl::Status(Session&)>& look) {
  for (;;) {
    absl::StatusOr<SessionPtr> session = Find(id);
    if (!session.ok()) return session.status();
    if (absl::Status status = records_.Refresh(**session); !status.ok()) return status;
    const std::lock_guard lock((*session)->mutex);
    if ((*session)->life == Session::Life::kLive) return look(**session);
    if ((*session)->life == Session::Life::kDeleted) return SessionNotFound(id);
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

bool SessionManagerImpl::IsAlive(const Session& session) const {
  return session.life == Session::Life::kLive && session.state.revision > 0 && !records_.Expired(session);
}

absl::StatusOr<std::vector<SessionInfo>> SessionManagerImpl::List(const std::string& prefix,
                                                                  const std::string& after, int limit) {
  std::map<std::string, SessionPtr> found = table_.Matching(prefix, after);
  // Those that other replicas made. Without them it would be no list of the sessions.
  const absl::StatusOr<std::vector<std::string>> shared = records_.ListShared(prefix);
  if (!shared.ok()) return shared.status();
  for (const std::string& id : *shared) {
    if (id > after) found.try_emplace(id, nullptr);
  }
  std::vector<SessionInfo> infos;
  for (const auto& [id, listed] : found) {
    if (std::ssize(infos) >= limit) break;
    if (!IsOfTenant(id, prefix)) continue;
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
      if (IsAlive(*session)) infos.push_back(Info(*session));
    }
    if (listed == nullptr) records_.Retire(*session, Session::Life::kEvicted);
  }
  return infos;
}

int SessionManagerImpl::Count(const std::string& prefix) {
  // Those that this server owns before the store is asked: what is released in between has its record. What
  // it does not own is as the record says, unless the store is out of reach.
  std::set<std::string> counted, known;
  for (const auto& [id, session] : table_.Matching(prefix, "")) {
    const std::lock_guard lock(session->mutex);
    if (IsOfTenant(id, prefix) && IsAlive(*session))
      (shared_ == nullptr || session->owned ? counted : known).insert(id);
  }
  const absl::StatusOr<std::vector<std::string>> shared = records_.ListShared(prefix);
  if (!shared.ok()) {
    counted.merge(known);
  } else {
    for (const std::string& id : *shared) {
      if (IsOfTenant(id, prefix)) counted.insert(id);
    }
  }
  return static_cast<int>(counted.size());
}

absl::StatusOr<HostBuffer> SessionManagerImpl::Export(const std::string& id, const std::string& mark) {
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
  bool has_head = false;
  absl::Status found = Look(id, [&](Session& alive) {
    session = alive.shared_from_this();
    residences.clear();
    has_head = alive.state.head->residence != nullptr;
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
      if (has_head) {
        if (absl::Status status = residency_->LiftToHost(*residences.front()); !status.ok()) return status;
      }
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
  const std::vector<SessionPtr> sessions = table_.All();
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
  for (const SessionPtr& session : table_.All()) {
    const std::lock_guard lock(session->mutex);
    const absl::Status status = CheckFields(*session, options_.max_kept_turns, options_.max_marks);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace efla
