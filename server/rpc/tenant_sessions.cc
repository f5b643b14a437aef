#include "server/rpc/tenant_sessions.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_key.h"

namespace efla {
namespace {

std::string Without(std::string text, const std::string& part) {
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at))
    text.erase(at, part.size());
  return text;
}

}  // namespace

class TenantSessions::TenantTurn final : public Turn {
 public:
  TenantTurn(const TenantSessions& tenant, std::unique_ptr<Turn> turn)
      : tenant_(tenant), turn_(std::move(turn)), before_(tenant.Outside(turn_->before())) {}

  absl::StatusOr<bool> Prepare(std::vector<TokenId> tokens, bool generates,
                               GenerationRequest& request) override {
    absl::StatusOr<bool> computes = turn_->Prepare(std::move(tokens), generates, request);
    if (!computes.ok()) return tenant_.Outside(computes.status());
    return computes;
  }
  absl::StatusOr<SessionInfo> Commit(std::optional<FinalState> state, bool cancelled,
                                     std::string reply) override {
    return tenant_.Outside(turn_->Commit(std::move(state), cancelled, std::move(reply)));
  }
  const SessionInfo& before() const override { return before_; }
  uint64_t next_revision() const override { return turn_->next_revision(); }
  std::optional<TokenId> last_drawn() const override { return turn_->last_drawn(); }
  void OnLost(std::function<void()> stop) override { turn_->OnLost(std::move(stop)); }
  absl::Status Lost() const override { return tenant_.Outside(turn_->Lost()); }

 private:
  const TenantSessions& tenant_;
  const std::unique_ptr<Turn> turn_;
  const SessionInfo before_;
};

// Sessions that are about to be made, counted against the tenant's limit while this lives. Several that come
// at once count each other: the limit is never passed, but one of them may be refused too early.
class TenantSessions::NewSessions {
 public:
  NewSessions(TenantSessions& tenant, int count)
      : tenant_(tenant), limit_(tenant.max_sessions_()), count_(count) {
    if (limit_ > 0) others_ = tenant_.being_made_.fetch_add(count_);
  }
  ~NewSessions() {
    if (limit_ > 0) tenant_.being_made_.fetch_sub(count_);
  }
  NewSessions(const NewSessions&) = delete;
  NewSessions& operator=(const NewSessions&) = delete;

  // RESOURCE_EXHAUSTED when there is no room for them.
  absl::Status Check() const {
    if (limit_ == 0) return absl::OkStatus();
    const int there = tenant_.Count("");
    if (there + others_ + count_ <= limit_) return absl::OkStatus();
    return WithSessionError(absl::ResourceExhaustedError(absl::StrFormat(
                                "this tenant has %d sessions and %d are to be made; the limit is %d", there,
                                others_ + count_, limit_)),
                            "SESSION_LIMIT");
  }

  // The same, but lets a name pass that is taken: that has an answer of its own, or is a repetition.
  absl::Status CheckUnlessThere(const std::string& name) const {
    absl::Status status = Check();
    if (!status.ok() && !name.empty() && tenant_.Get(name).ok()) return absl::OkStatus();
    return status;
  }

 private:
  TenantSessions& tenant_;
  const int limit_, count_;
  int others_ = 0;
};

TenantSessions::TenantSessions(SessionManager& all, const std::string& tenant,
                               std::function<int()> max_sessions)
    : all_(all), prefix_(tenant.empty() ? "" : tenant + kTenantEnd), max_sessions_(std::move(max_sessions)) {}

SessionChange TenantSessions::Inside(const SessionChange& change) const {
  SessionChange inside = change;
  inside.session_id = Inside(change.session_id);
  inside.request_id = InsideRequest(change.request_id);
  return inside;
}

SessionInfo TenantSessions::Outside(SessionInfo info) const {
  if (info.session_id.starts_with(prefix_)) info.session_id.erase(0, prefix_.size());
  return info;
}

absl::Status TenantSessions::Outside(const absl::Status& status) const {
  if (status.ok() || prefix_.empty()) return status;
  absl::Status outside(status.code(), Without(std::string(status.message()), prefix_));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    outside.SetPayload(url, absl::Cord(Without(std::string(payload), prefix_)));
  });
  return outside;
}

absl::StatusOr<SessionInfo> TenantSessions::Outside(absl::StatusOr<SessionInfo> info) const {
  if (!info.ok()) return Outside(info.status());
  return Outside(*std::move(info));
}

absl::StatusOr<SessionManager::Begun> TenantSessions::BeginTurn(const SessionChange& change,
                                                                OnCancel on_cancel, bool create) {
  std::optional<NewSessions> room;
  if (create && max_sessions_() > 0 && absl::IsNotFound(all_.Get(Inside(change.session_id)).status())) {
    room.emplace(*this, 1);
    if (absl::Status status = room->Check(); !status.ok()) return status;
  }
  absl::StatusOr<Begun> begun = all_.BeginTurn(Inside(change), on_cancel, create);
  if (!begun.ok()) return Outside(begun.status());
  if (begun->turn != nullptr) begun->turn = std::make_unique<TenantTurn>(*this, std::move(begun->turn));
  begun->info = Outside(std::move(begun->info));
  return begun;
}

// Counts `count` sessions that are about to be made while `room` lives, if there is room for them and the
// caller agrees. `name`: the one of them that is named.
absl::Status TenantSessions::MakeRoom(std::optional<NewSessions>& room, int count, const std::string& name,
                                      const MayMake& may_make) {
  room.emplace(*this, count);
  if (absl::Status status = room->CheckUnlessThere(name); !status.ok()) return status;
  return may_make ? may_make() : absl::OkStatus();
}

absl::StatusOr<SessionInfo> TenantSessions::Create(const std::string& id, std::chrono::milliseconds ttl,
                                                   const std::string& request_id, Durability durability,
                                                   const MayMake& may_make) {
  std::optional<NewSessions> room;
  return Outside(all_.Create(Inside(id), ttl, InsideRequest(request_id), durability,
                             [&] { return MakeRoom(room, 1, id, may_make); }));
}

absl::StatusOr<SessionInfo> TenantSessions::Get(const std::string& id) {
  return Outside(all_.Get(Inside(id)));
}

absl::StatusOr<std::vector<SessionInfo>> TenantSessions::List(const std::string& prefix,
                                                              const std::string& after, int limit) {
  absl::StatusOr<std::vector<SessionInfo>> mine =
      all_.List(Inside(prefix), after.empty() ? "" : Inside(after), limit);
  if (!mine.ok()) return Outside(mine.status());
  for (SessionInfo& info : *mine) info = Outside(std::move(info));
  return mine;
}

int TenantSessions::Count(const std::string& prefix) { return all_.Count(Inside(prefix)); }

absl::StatusOr<std::vector<SessionInfo>> TenantSessions::Fork(const SessionChange& change,
                                                              const std::vector<std::string>& ids,
                                                              const std::string& mark,
                                                              const MayMake& may_make) {
  std::optional<NewSessions> room;
  std::vector<std::string> inside;
  for (const std::string& id : ids) inside.push_back(Inside(id));
  absl::StatusOr<std::vector<SessionInfo>> children = all_.Fork(Inside(change), inside, mark, [&] {
    return MakeRoom(room, static_cast<int>(ids.size()), "", may_make);
  });
  if (!children.ok()) return Outside(children.status());
  for (SessionInfo& child : *children) child = Outside(std::move(child));
  return children;
}

absl::StatusOr<SessionInfo> TenantSessions::Mark(const SessionChange& change, const std::string& name) {
  return Outside(all_.Mark(Inside(change), name));
}

absl::StatusOr<SessionInfo> TenantSessions::Rewind(const SessionChange& change, const std::string& mark,
                                                   std::optional<uint64_t> revision) {
  return Outside(all_.Rewind(Inside(change), mark, revision));
}

absl::Status TenantSessions::Delete(const SessionChange& change) {
  return Outside(all_.Delete(Inside(change)));
}

absl::StatusOr<HostBuffer> TenantSessions::Export(const std::string& id, const std::string& mark) {
  absl::StatusOr<HostBuffer> snapshot = all_.Export(Inside(id), mark);
  if (!snapshot.ok()) return Outside(snapshot.status());
  return snapshot;
}

absl::StatusOr<SessionInfo> TenantSessions::Import(const std::string& id, std::chrono::milliseconds ttl,
                                                   std::span<const std::byte> snapshot,
                                                   const std::string& request_id, Durability durability,
                                                   const MayMake& may_make) {
  std::optional<NewSessions> room;
  return Outside(all_.Import(Inside(id), ttl, snapshot, InsideRequest(request_id), durability,
                             [&] { return MakeRoom(room, 1, id, may_make); }));
}

absl::StatusOr<SessionInfo> TenantSessions::Move(const std::string& id, SessionTier tier) {
  return Outside(all_.Move(Inside(id), tier));
}

}  // namespace efla
