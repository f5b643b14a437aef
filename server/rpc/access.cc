#include "server/rpc/access.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "server/rpc/session_validation.h"
#include "server/rpc/status.h"
#include "server/trace_context.h"

namespace efla {
namespace {

constexpr std::string_view kTokenHeader = "authorization", kKeyHeader = "x-api-key",
                           kTraceHeader = "traceparent";
// Of lines about refused calls; a flood of them would hide everything else.
constexpr int kMostAuditLinesASecond = 20;

// Empty: there is none. Several of one name: the first.
std::string_view MetadataOf(const grpc::CallbackServerContext& context, std::string_view name) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(grpc::string_ref(name.data(), name.size()));
  if (found == metadata.end()) return {};
  return {found->second.data(), found->second.size()};
}

std::string_view WithoutBlanks(std::string_view text) {
  constexpr std::string_view kBlanks = " \t";
  const size_t begin = std::min(text.find_first_not_of(kBlanks), text.size());
  return text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

// RFC 6750: the scheme's case does not matter. No token begins or ends with blanks.
std::string_view TokenOf(const grpc::CallbackServerContext& context) {
  constexpr std::string_view kScheme = "bearer ";
  const std::string_view header = WithoutBlanks(MetadataOf(context, kTokenHeader));
  if (header.size() > kScheme.size()) {
    bool bearer = true;
    for (size_t i = 0; i < kScheme.size(); ++i) {
      bearer = bearer && absl::ascii_tolower(static_cast<unsigned char>(header[i])) == kScheme[i];
    }
    if (bearer) return WithoutBlanks(header.substr(kScheme.size()));
  }
  return WithoutBlanks(MetadataOf(context, kKeyHeader));
}

bool IsAdmin(RpcMethod method) { return method >= kFirstAdminMethod && method <= kLastAdminMethod; }

// gRPC's spelling of addresses: ipv4:127.0.0.1:5, ipv6:[::1]:5 or with %5B and %5D, unix:...
bool IsLocal(std::string_view peer) {
  return peer.starts_with("ipv4:127.") || peer.starts_with("ipv6:[::1]:") ||
         peer.starts_with("ipv6:%5B::1%5D:") || peer.starts_with("unix:");
}

absl::Status Refusal(const TenantRefusal& refusal) {
  const char* reason = "";
  switch (refusal.limit) {
    case TenantLimit::kRequests:
      reason = "TENANT_REQUEST_RATE";
      break;
    case TenantLimit::kTokens:
      reason = "TENANT_TOKEN_RATE";
      break;
    case TenantLimit::kConcurrent:
      reason = "TENANT_CONCURRENCY";
      break;
    case TenantLimit::kQueued:
      reason = "TENANT_QUEUE_FULL";
      break;
  }
  return WithRetry(WithReason(absl::ResourceExhaustedError(refusal.message), reason), refusal.retry);
}

}  // namespace

CallOrigin::CallOrigin(const grpc::CallbackServerContext& context)
    : peer(context.peer()), trace_id(TraceIdOf(MetadataOf(context, kTraceHeader))) {}

// ---- TenantWork ----

TenantWork::TenantWork(TenantWork&& other) noexcept
    : use_(std::move(other.use_)), begin_(other.begin_), queued_(other.queued_), drawn_(other.drawn_) {
  other.use_ = nullptr;
}

TenantWork& TenantWork::operator=(TenantWork&& other) noexcept {
  if (this == &other) return *this;
  End();
  use_ = std::exchange(other.use_, nullptr);
  begin_ = other.begin_;
  queued_ = other.queued_;
  drawn_ = other.drawn_;
  return *this;
}

absl::Status TenantWork::Queue(int64_t prompt_tokens) {
  if (use_ == nullptr) return absl::OkStatus();
  if (queued_) {
    use_->Draw(prompt_tokens, Clock::now());
    return absl::OkStatus();
  }
  if (const std::optional<TenantRefusal> refusal = use_->Queue(prompt_tokens, Clock::now())) {
    return Refusal(*refusal);
  }
  queued_ = true;
  return absl::OkStatus();
}

void TenantWork::Refund(int64_t prompt_tokens) {
  if (use_ != nullptr) use_->Refund(prompt_tokens, Clock::now());
}

void TenantWork::LeaveQueue() {
  if (use_ == nullptr || !queued_) return;
  queued_ = false;
  use_->LeaveQueue();
}

void TenantWork::Drawn(int64_t total) {
  if (use_ == nullptr || total <= drawn_) return;
  use_->Draw(total - drawn_, Clock::now());
  drawn_ = total;
}

void TenantWork::End() {
  if (use_ == nullptr) return;
  LeaveQueue();
  use_->EndWork(Clock::now() - begin_);
  use_ = nullptr;
}

// ---- Access ----

Access::Access(const ServingState& state, Metrics& metrics, const Log& log,
               std::unique_ptr<AuthFile> auth_file)
    : state_(state), metrics_(metrics), log_(log), auth_file_(std::move(auth_file)) {
  if (auth_file_ == nullptr) return;
  TakeTenants();
  metrics_.SetTenants([this] { return TenantStats(); });
}

Access::~Access() { metrics_.SetTenants(nullptr); }

void Access::TakeTenants() {
  const std::shared_ptr<const Credentials> credentials = auth_file_->current();
  const Clock::time_point now = Clock::now();
  const std::scoped_lock lock(mutex_);
  for (const auto& [tenant, limits] : credentials->tenants()) {
    std::shared_ptr<TenantUse>& use = uses_[tenant];
    if (use == nullptr) use = std::make_shared<TenantUse>(tenant);
    use->SetLimits(limits, now);
  }
}

void Access::Reload(bool force) {
  if (auth_file_ == nullptr) return;
  const absl::StatusOr<bool> reloaded = auth_file_->Reload(force);
  if (!reloaded.ok()) {
    metrics_.OnAuthReload(false);
    log_.Error("auth_file_refused", "the auth file cannot be used; the one before stays in force",
               {{"message", std::string(reloaded.status().message())}});
  } else if (*reloaded) {
    TakeTenants();
    metrics_.OnAuthReload(true);
    log_.Info("auth_file_loaded", "the auth file has been read",
              {{"tokens", auth_file_->current()->num_tokens()},
               {"tenants", auth_file_->current()->tenants().size()}});
  }
}

std::shared_ptr<TenantUse> Access::UseOf(const std::string& tenant) {
  const std::scoped_lock lock(mutex_);
  const auto found = uses_.find(tenant);
  return found == uses_.end() ? nullptr : found->second;
}

absl::StatusOr<Caller> Access::Identify(const grpc::CallbackServerContext& context, const CallOrigin& origin,
                                        RpcMethod method, std::string& credential_name) {
  const auto refuse = [this](AuthFailure failure, const char* reason, absl::Status status) {
    metrics_.OnAuthFailure(failure);
    return WithReason(std::move(status), reason);
  };
  if (auth_file_ == nullptr) {
    if (!IsAdmin(method) || IsLocal(origin.peer)) return Caller{};
    return refuse(
        AuthFailure::kRole, "ADMIN_NOT_LOCAL",
        absl::PermissionDeniedError("without an auth file, Admin answers callers on its own machine only; "
                                    "start the server with --auth-file"));
  }
  const std::string_view token = TokenOf(context);
  if (token.empty()) {
    return refuse(
        AuthFailure::kMissing, "NO_CREDENTIAL",
        absl::UnauthenticatedError("the call carries no token; send it as authorization: Bearer TOKEN, or "
                                   "as x-api-key"));
  }
  const std::shared_ptr<const Credentials> credentials = auth_file_->current();
  const Credential* credential = credentials->Find(token);
  if (credential == nullptr) {
    return refuse(AuthFailure::kUnknown, "INVALID_CREDENTIAL",
                  absl::UnauthenticatedError("the token is not known"));
  }
  credential_name = credential->name;
  Caller caller{.tenant = credential->tenant,
                .credential = credential->name,
                .max_priority = credential->max_priority,
                .use = UseOf(credential->tenant)};
  if (credential->expires && *credential->expires <= std::chrono::system_clock::now()) {
    return refuse(AuthFailure::kExpired, "CREDENTIAL_EXPIRED",
                  absl::UnauthenticatedError("the token has expired"));
  }
  if (IsAdmin(method) ? !credential->admin : !credential->user) {
    return refuse(AuthFailure::kRole, "ROLE_MISSING",
                  absl::PermissionDeniedError(
                      absl::StrFormat("%s needs the role \"%s\", which this token lacks",
                                      RpcMethodName(method), IsAdmin(method) ? "admin" : "user")));
  }
  return caller;
}

absl::Status Access::Admit(const grpc::CallbackServerContext& context, const CallOrigin& origin,
                           RpcMethod method, Caller& caller) {
  std::string credential_name;
  absl::StatusOr<Caller> identified = Identify(context, origin, method, credential_name);
  if (!identified.ok()) {
    Audit(identified.status(), "", credential_name, origin, method);
    return identified.status();
  }
  caller = *std::move(identified);
  if (caller.use == nullptr || IsAdmin(method)) return absl::OkStatus();
  if (const std::optional<TenantRefusal> refusal = caller.use->AdmitCall(Clock::now())) {
    absl::Status status = Refusal(*refusal);
    NoteRefusal(status, caller, origin, method);
    return status;
  }
  return absl::OkStatus();
}

absl::Status Access::CheckPriority(const Caller& caller, int priority, const CallOrigin& origin,
                                   RpcMethod method) {
  if (priority <= caller.max_priority) return absl::OkStatus();
  metrics_.OnAuthFailure(AuthFailure::kPriority);
  absl::Status status =
      WithReason(absl::PermissionDeniedError(absl::StrFormat(
                     "priority is %d; this token may ask for %d at most", priority, caller.max_priority)),
                 "PRIORITY_TOO_HIGH");
  NoteRefusal(status, caller, origin, method);
  return status;
}

absl::StatusOr<TenantWork> Access::BeginWork(const Caller& caller) {
  if (caller.use == nullptr) return TenantWork();
  if (const std::optional<TenantRefusal> refusal = caller.use->BeginWork(Clock::now()))
    return Refusal(*refusal);
  return TenantWork(caller.use);
}

void Access::NoteRefusal(const absl::Status& status, const Caller& caller, const CallOrigin& origin,
                         RpcMethod method) {
  Audit(status, caller.tenant, caller.credential, origin, method);
}

void Access::Audit(const absl::Status& status, std::string_view tenant, std::string_view credential,
                   const CallOrigin& origin, RpcMethod method) {
  int64_t dropped = 0;
  {
    const Clock::time_point now = Clock::now();
    const std::scoped_lock lock(audit_mutex_);
    if (now - audit_second_ >= std::chrono::seconds(1)) {
      audit_second_ = now;
      audit_lines_ = 0;
    }
    if (audit_lines_ >= kMostAuditLinesASecond) {
      ++audit_dropped_;
      return;
    }
    ++audit_lines_;
    dropped = std::exchange(audit_dropped_, 0);
  }
  log_.Warning("access_refused", "a call was refused",
               {{"method", RpcMethodName(method)},
                {"tenant", tenant},
                {"credential", credential},
                {"code", absl::StatusCodeToString(status.code())},
                {"reason", ErrorReason(status)},
                {"trace_id", origin.trace_id},
                {"peer", origin.peer},
                {"lines_left_out", dropped}});
}

const ServedModel* Access::ModelOf(const Caller& caller) {
  const ServedModel* const model = state_.model();
  if (model == nullptr || model->sessions == nullptr) return model;
  const std::scoped_lock lock(mutex_);
  std::unique_ptr<View>& view = views_[caller.tenant];
  if (view == nullptr) {
    view = std::make_unique<View>();
    view->sessions = std::make_unique<TenantSessions>(*model->sessions, caller.tenant, [use = caller.use] {
      return use == nullptr ? 0 : use->limits().max_sessions;
    });
    view->model = *model;
    view->model.sessions = view->sessions.get();
  }
  return &view->model;
}

std::vector<TenantUse::Stats> Access::TenantStats() const {
  const std::scoped_lock lock(mutex_);
  std::vector<TenantUse::Stats> stats;
  for (const auto& [tenant, use] : uses_) stats.push_back(use->stats());
  return stats;
}

std::string LoggedName(const std::string& session_id) {
  return CheckOptionalName("session_id", session_id).ok() ? session_id : "";
}

void LogCallEnd(const Log& log, const CallEnd& end, std::vector<LogField> more) {
  const std::string code = absl::StatusCodeToString(end.code);
  std::vector<LogField> fields = {{"request_id", end.request_id},
                                  {"session", end.session},
                                  {"tenant", end.caller.tenant},
                                  {"credential", end.caller.credential},
                                  {"method", RpcMethodName(end.method)},
                                  {"code", code},
                                  {"reason", end.reason},
                                  {"message", end.message}};
  fields.insert(fields.end(), more.begin(), more.end());
  fields.push_back({"total_ms", end.total.count()});
  fields.push_back({"trace_id", end.origin.trace_id});
  fields.push_back({"peer", end.origin.peer});
  log.Write(LogLevel::kInfo, "request_end", "request ended", fields);
}

}  // namespace efla
