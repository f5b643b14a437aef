// Who calls, whether they may, and what they see: credentials, tenants and their limits.
#ifndef EFLA_SERVER_RPC_ACCESS_H_
#define EFLA_SERVER_RPC_ACCESS_H_

#include <grpcpp/server_context.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/credentials.h"
#include "server/engine/generation.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/rpc/tenant_sessions.h"
#include "server/served_model.h"
#include "server/serving_state.h"
#include "server/tenant_use.h"

namespace efla {

struct Caller {
  std::string tenant, credential;  // empty on a server without an auth file
  int max_priority = kHighestPriority;
  std::shared_ptr<TenantUse> use;  // null there
};

// What is known of a call from its beginning, for its line in the log.
struct CallOrigin {
  explicit CallOrigin(const grpc::CallbackServerContext& context);
  std::string peer;      // gRPC forgets it when the connection is gone
  std::string trace_id;  // of a valid traceparent; else empty
};

// What a call's line in the log tells, as far as it is known.
struct CallRecord {
  explicit CallRecord(const grpc::CallbackServerContext& context) : origin(context) {}
  const CallOrigin origin;
  Caller caller;
  std::string request_id, session;
};

// A call's use of its tenant's shares, given back when it goes. Made by Access::BeginWork.
class TenantWork {
 public:
  TenantWork() = default;
  explicit TenantWork(std::shared_ptr<TenantUse> use) : use_(std::move(use)) {}
  TenantWork(TenantWork&& other) noexcept;
  TenantWork& operator=(TenantWork&& other) noexcept;
  ~TenantWork() { End(); }

  // RESOURCE_EXHAUSTED; the prompt's tokens are taken. Once; more prompts of the same call take tokens only.
  absl::Status Queue(int64_t prompt_tokens);
  // They have not been queued after all.
  void Refund(int64_t prompt_tokens);
  // One of its prompts has entered a step.
  void LeaveQueue();
  // The tokens drawn so far; what is new of them is taken.
  void Drawn(int64_t total);
  void End();

 private:
  std::shared_ptr<TenantUse> use_;  // null: no limits
  Clock::time_point begin_ = Clock::now();
  bool queued_ = false;
  int64_t drawn_ = 0;
};

// Any thread, but for Reload.
class Access {
 public:
  // `auth_file` null: everybody may do everything as the tenant "", and Admin is for callers on this machine.
  // References outlive this.
  Access(const ServingState& state, Metrics& metrics, const Log& log, std::unique_ptr<AuthFile> auth_file);
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

  // One of gRPC's threads, at the call's beginning. UNAUTHENTICATED and PERMISSION_DENIED with a reason;
  // RESOURCE_EXHAUSTED when the tenant makes too many requests. Refusals are counted and logged. `caller` is
  // set where the credential will do, also where a limit refuses the call.
  absl::Status Admit(const grpc::CallbackServerContext& context, const CallOrigin& origin, RpcMethod method,
                     Caller& caller);
  // PERMISSION_DENIED above what the credential allows.
  absl::Status CheckPriority(const Caller& caller, int priority, const CallOrigin& origin, RpcMethod method);
  // RESOURCE_EXHAUSTED when the tenant has too many calls under way.
  absl::StatusOr<TenantWork> BeginWork(const Caller& caller);
  // Logs and counts a refusal by a limit that was found later than Admit.
  void NoteRefusal(const absl::Status& status, const Caller& caller, const CallOrigin& origin,
                   RpcMethod method);

  // The model with the caller's own sessions; null while it is being loaded.
  const ServedModel* ModelOf(const Caller& caller);

  // Takes up a changed auth file. A broken one is logged and counted, and the old one stays in force. One
  // thread.
  void Reload(bool force);
  bool has_auth_file() const { return auth_file_ != nullptr; }

 private:
  struct View {
    std::unique_ptr<TenantSessions> sessions;
    ServedModel model;
  };
  absl::StatusOr<Caller> Identify(const grpc::CallbackServerContext& context, const CallOrigin& origin,
                                  RpcMethod method, std::string& credential_name);
  std::shared_ptr<TenantUse> UseOf(const std::string& tenant);
  void TakeTenants();
  void Audit(const absl::Status& status, std::string_view tenant, std::string_view credential,
             const CallOrigin& origin, RpcMethod method);
  std::vector<TenantUse::Stats> TenantStats() const;

  const ServingState& state_;
  Metrics& metrics_;
  const Log& log_;
  const std::unique_ptr<AuthFile> auth_file_;

  mutable std::mutex mutex_;  // guards what follows
  // Of every tenant that any reading of the file has named: their number is the operator's.
  std::map<std::string, std::shared_ptr<TenantUse>> uses_;
  std::map<std::string, std::unique_ptr<View>> views_;

  std::mutex audit_mutex_;  // guards what follows
  Clock::time_point audit_second_;
  int audit_lines_ = 0;        // in that second
  int64_t audit_dropped_ = 0;  // since the last line
};

// A request id as a log takes it: not if it is too long to be one. A session's name: not if it is none.
inline std::string LoggedText(const std::string& text) {
  constexpr size_t kMostBytes = 256;
  return text.size() <= kMostBytes ? text : std::string();
}
std::string LoggedName(const std::string& session_id);

// The end of a call in the log: one line, `more` behind what all lines have.
struct CallEnd {
  RpcMethod method;
  const std::string& request_id;
  const std::string& session;
  const Caller& caller;
  const CallOrigin& origin;
  absl::StatusCode code;
  const std::string& reason;
  const std::string& message;  // LoggedMessage's
  std::chrono::duration<double, std::milli> total;
};
void LogCallEnd(const Log& log, const CallEnd& end, std::vector<LogField> more = {});

}  // namespace efla

#endif  // EFLA_SERVER_RPC_ACCESS_H_
