// How sessions come to be, see session_manager_impl.h: created, imported, forked, made for a turn.
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/random_id.h"
#include "server/sessions/session_checks.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_key.h"
#include "server/sessions/session_manager_impl.h"

namespace efla {
namespace {

constexpr size_t kMaxChildren = 1024;

}  // namespace

// `for_turn`: gets the right to change it, for a turn.
absl::StatusOr<SessionInfo> SessionManagerImpl::Make(std::string id, ContextPtr head,
                                                     std::chrono::milliseconds ttl, RecordedReply::Call call,
                                                     const std::string& request_id, Durability durability,
                                                     Hold* for_turn) {
  if (draining_) return ServerDraining();
  if (WantsName(id)) id += RandomId();
  if (absl::Status status = CheckSessionKey("the session's id", id); !status.ok()) return status;
  const auto session = std::make_shared<Session>(id);
  session->writer = Session::Writer::kCall;
  session->last_use = records_.Now();
  session->state.head = std::move(head);
  session->state.ttl_ms = ttl.count();
  session->state.created_unix_ms = records_.UnixMs(session->last_use);
  for (;;) {
    const absl::StatusOr<SessionPtr> listed = table_.Insert(session);
    if (!listed.ok()) return listed.status();
    const SessionPtr& known = *listed;
    if (known == session) break;
    absl::StatusOr<SessionPtr> alive = Find(id);
    if (alive.ok()) return SessionExists(id);
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
    table_.Remove(known);
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
    RecordReply(session->state,
                {.call = call,
                 .request_id = request_id,
                 .revision = 1,
                 .has_content = true,
                 .content = request_id.empty() ? "" : SerializeInfos({ToRecord(info, durability)})});
    if (for_turn != nullptr) session->writer = Session::Writer::kTurn;
    session->left.notify_all();
  }
  if (for_turn != nullptr) {
    *for_turn = std::move(hold);
    return info;
  }
  absl::StatusOr<SessionInfo> finished = Finish(std::move(hold), durability, std::move(info));
  if (finished.ok()) CorrectReply(*session, call, request_id, *finished, durability);
  return finished;
}

// By its writer: there is none any more. One whose name stays reserved, since the store cannot be reached, is
// known to no other call.
void SessionManagerImpl::Unmake(const SessionPtr& session) {
  if (!records_.Delete(*session).ok()) records_.Retire(*session, Session::Life::kDeleted);
  table_.Remove(session);
}

// A repeated request gets what the first one got, as long as the session that it made is there.
absl::StatusOr<SessionInfo> SessionManagerImpl::MakeOnce(
    const std::string& id, RecordedReply::Call call, const std::string& request_id, const MayMake& may_make,
    const std::function<absl::StatusOr<SessionInfo>()>& make_it) {
  const auto make = [&]() -> absl::StatusOr<SessionInfo> {
    if (may_make) {
      if (absl::Status status = may_make(); !status.ok()) return status;
    }
    return make_it();
  };
  if (request_id.empty()) return make();
  const auto kind = call == RecordedReply::Call::kCreate ? RememberedRequests::Call::kCreate
                                                         : RememberedRequests::Call::kImport;
  const absl::StatusOr<std::optional<RememberedRequests::Outcome>> before =
      remembered_.Begin(kind, request_id);
  if (!before.ok()) return before.status();
  if (const std::optional<RememberedRequests::Outcome>& outcome = *before) {
    if (!WantsName(id) && id != outcome->session_id) {
      return absl::AlreadyExistsError(absl::StrFormat("request %s has made session %s; now it asks for %s",
                                                      request_id, outcome->session_id, id));
    }
    if (absl::Status status = Get(outcome->session_id).status(); !status.ok()) return status;
    return outcome->made;
  }
  absl::StatusOr<SessionInfo> info = make();
  // Made before this server came up, or by another replica.
  if (absl::IsAlreadyExists(info.status()) && !WantsName(id)) {
    if (absl::StatusOr<SessionPtr> session = Find(id); session.ok()) {
      const std::lock_guard lock((*session)->mutex);
      if (const RecordedReply* reply = FindReply((*session)->state, call, request_id)) {
        absl::StatusOr<std::vector<SessionInfo>> infos = ParseInfos(reply->content);
        if (infos.ok()) {
          info = std::move(infos->at(0));
        } else {
          info = infos.status();
        }
      }
    }
  }
  if (info.ok()) {
    remembered_.Finish(kind, request_id, {info->session_id, *info});
  } else {
    remembered_.Forget(kind, request_id);
  }
  return info;
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Create(const std::string& id, std::chrono::milliseconds ttl,
                                                       const std::string& request_id, Durability durability,
                                                       const MayMake& may_make) {
  const absl::StatusOr<std::chrono::milliseconds> lifetime = CheckTtl(ttl, options_.max_ttl);
  if (!lifetime.ok()) return lifetime.status();
  return MakeOnce(id, RecordedReply::Call::kCreate, request_id, may_make, [&] {
    return Make(id, std::make_shared<const Context>(), *lifetime, RecordedReply::Call::kCreate, request_id,
                durability);
  });
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Import(const std::string& id, std::chrono::milliseconds ttl,
                                                       std::span<const std::byte> snapshot,
                                                       const std::string& request_id, Durability durability,
                                                       const MayMake& may_make) {
  const absl::StatusOr<std::chrono::milliseconds> lifetime = CheckTtl(ttl, options_.max_ttl);
  if (!lifetime.ok()) return lifetime.status();
  return MakeOnce(id, RecordedReply::Call::kImport, request_id, may_make,
                  [&]() -> absl::StatusOr<SessionInfo> {
                    if (draining_) return ServerDraining();
                    absl::StatusOr<Snapshot> decoded =
                        residency_->format().Decode(snapshot, options_.allow_other_numerics);
                    if (!decoded.ok()) {
                      if (absl::IsDataLoss(decoded.status()))
                        return WithSessionError(decoded.status(), "SNAPSHOT_DAMAGED");
                      if (absl::IsFailedPrecondition(decoded.status()))
                        return WithSessionError(decoded.status(), "SNAPSHOT_MISMATCH");
                      return decoded.status();
                    }
                    const std::string name = WantsName(id) ? id + RandomId() : id;
                    Context head{.residence = nullptr, .waiting = WaitingOf(decoded->tokens)};
                    if (decoded->tokens.fed_tokens > 0) {
                      if (absl::Status status = MakeRoom(); !status.ok()) return status;
                      absl::StatusOr<ResidencePtr> residence =
                          residency_->AddHost(name, std::move(decoded->tokens), std::move(decoded->state));
                      if (!residence.ok()) return residence.status();
                      head.residence = *std::move(residence);
                    }
                    return Make(name, std::make_shared<const Context>(std::move(head)), *lifetime,
                                RecordedReply::Call::kImport, request_id, durability);
                  });
}

absl::StatusOr<std::vector<SessionInfo>> SessionManagerImpl::Fork(const SessionChange& change,
                                                                  const std::vector<std::string>& ids,
                                                                  const std::string& mark,
                                                                  const MayMake& may_make) {
  if (ids.empty() || ids.size() > kMaxChildren) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a fork into %d children; it must be 1 to %d", ids.size(), kMaxChildren));
  }
  std::set<std::string> distinct;
  for (const std::string& id : ids) {
    if (WantsName(id)) continue;
    if (absl::Status status = CheckSessionKey("a child's id", id); !status.ok()) return status;
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
  if (context->residence != nullptr) {
    if (absl::Status damage = residency_->CheckWhole(*context->residence); !damage.ok()) return damage;
  }
  if (may_make) {
    if (absl::Status status = may_make(); !status.ok()) return status;
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
          table_.Remove(*found);
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

}  // namespace efla
