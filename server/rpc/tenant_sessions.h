// A tenant's sessions: the session manager as one tenant sees it.
//
// To the manager and its stores the session NAME of tenant T is T~NAME. Neither a tenant's nor a session's
// name may hold a "~", so nobody can name another's. Sessions of the tenant "" (a server without an auth
// file) are called what they are called.
#ifndef EFLA_SERVER_RPC_TENANT_SESSIONS_H_
#define EFLA_SERVER_RPC_TENANT_SESSIONS_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/sessions/session_manager.h"

namespace efla {

// Names on the way in get the prefix; on the way out it is taken off: of names, of messages and of their
// details. Request ids get it too: the manager knows those of Create, Import and Delete across sessions.
// Thread-safe, as the manager is.
class TenantSessions final : public SessionManager {
 public:
  // `max_sessions`: of this tenant, as it is now; 0: no limit. `all` outlives this, and this its turns.
  TenantSessions(SessionManager& all, const std::string& tenant, std::function<int()> max_sessions);

  absl::StatusOr<Begun> BeginTurn(const SessionChange& change, OnCancel on_cancel, bool create) override;
  absl::StatusOr<SessionInfo> Create(const std::string& id, std::chrono::milliseconds ttl,
                                     const std::string& request_id, Durability durability,
                                     const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Get(const std::string& id) override;
  absl::StatusOr<std::vector<SessionInfo>> List(const std::string& prefix, const std::string& after,
                                                int limit) override;
  int Count(const std::string& prefix) override;
  absl::StatusOr<std::vector<SessionInfo>> Fork(const SessionChange& change,
                                                const std::vector<std::string>& ids, const std::string& mark,
                                                const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Mark(const SessionChange& change, const std::string& name) override;
  absl::StatusOr<SessionInfo> Rewind(const SessionChange& change, const std::string& mark,
                                     std::optional<uint64_t> revision) override;
  absl::Status Delete(const SessionChange& change) override;
  absl::StatusOr<HostBuffer> Export(const std::string& id, const std::string& mark) override;
  absl::StatusOr<SessionInfo> Import(const std::string& id, std::chrono::milliseconds ttl,
                                     std::span<const std::byte> snapshot, const std::string& request_id,
                                     Durability durability, const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Move(const std::string& id, SessionTier tier) override;

  using SessionManager::Create, SessionManager::Fork, SessionManager::Import;

  // Of all tenants: not for a tenant's calls.
  std::vector<std::string> Drain(std::chrono::milliseconds timeout) override { return all_.Drain(timeout); }
  Stats stats() const override { return all_.stats(); }
  absl::Status CheckInvariants() const override { return all_.CheckInvariants(); }

 private:
  class TenantTurn;
  class NewSessions;
  absl::Status MakeRoom(std::optional<NewSessions>& room, int count, const std::string& name,
                        const MayMake& may_make);
  std::string Inside(const std::string& name) const { return prefix_ + name; }
  std::string InsideRequest(const std::string& request_id) const {
    return request_id.empty() ? request_id : prefix_ + request_id;
  }
  SessionChange Inside(const SessionChange& change) const;
  SessionInfo Outside(SessionInfo info) const;
  absl::Status Outside(const absl::Status& status) const;
  absl::StatusOr<SessionInfo> Outside(absl::StatusOr<SessionInfo> info) const;

  SessionManager& all_;
  const std::string prefix_;  // "acme~"; empty for the tenant ""
  const std::function<int()> max_sessions_;
  std::atomic<int> being_made_ = 0;  // sessions, while there is a limit
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_TENANT_SESSIONS_H_
