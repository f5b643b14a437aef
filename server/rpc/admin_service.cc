#include "server/rpc/admin_service.h"

#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/status.h"
#include "server/rpc/unknown_fields.h"
#include "server/rpc/wire.h"

namespace efla {

template <typename Request, typename Response>
grpc::ServerUnaryReactor* AdminService::Answer(RpcMethod method, Context& context, const Bytes& request,
                                               Bytes& response,
                                               absl::Status (AdminService::*answer)(const Request&,
                                                                                    Response&)) {
  const Clock::time_point begin = Clock::now();
  grpc::ServerUnaryReactor* const reactor = context.DefaultReactor();
  environment_.metrics.OnCallStarted(method);
  const CallOrigin origin(context);
  Caller caller;
  absl::Status status = environment_.access.Admit(context, origin, method, caller);
  Request message;
  Response reply;
  if (status.ok()) status = ParseRequest(request, message);
  if (status.ok()) status = CheckNoUnknownFields(message);
  if (status.ok()) status = (this->*answer)(message, reply);
  if (status.ok()) SerializeReply(reply, response);
  const Clock::duration lasted = Clock::now() - begin;
  environment_.metrics.OnCallEnded(method, static_cast<int>(status.code()),
                                   std::chrono::duration<double>(lasted).count());
  LogCallEnd(environment_.log, {.method = method,
                                .request_id = "",
                                .session = "",
                                .caller = caller,
                                .origin = origin,
                                .code = status.code(),
                                .reason = ErrorReason(status),
                                .message = LoggedMessage(status),
                                .total = lasted});
  EchoTrace(origin.trace_id, status, context);
  reactor->Finish(ToGrpcStatus(status, context));
  return reactor;
}

absl::Status AdminService::DoGetServerInfo(const v1::GetServerInfoRequest&, v1::ServerInfo& info) {
  info.set_version(EFLA_VERSION);
  info.set_api("efla.v1");
  info.set_uptime_ms(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin_).count()));
  info.set_ready(state_.ready());
  info.set_draining(state_.leaving() || state_.draining() || state_.drain_requested());
  info.set_log_level(LogLevelName(log_.level()));
  for (const std::string& feature : features_) info.add_features(feature);
  if (const ServedModel* model = state_.model()) {
    info.set_model(model->name);
    info.set_device(model->device);
    info.set_replica(model->replica);
    info.add_features("sessions");
    if (model->has_disk_store) info.add_features("session-disk");
    if (model->has_shared_store) info.add_features("session-store");
  }
  return absl::OkStatus();
}

absl::Status AdminService::DoGetLoad(const v1::GetLoadRequest&, v1::Load& load) {
  const ServedModel* model = state_.model();
  if (model == nullptr) {
    return WithReason(absl::UnavailableError("the model is being loaded"), "MODEL_LOADING");
  }
  const EngineStats stats = model->engine->stats();
  load.set_requests_waiting(static_cast<uint32_t>(stats.waiting));
  load.set_requests_running(static_cast<uint32_t>(stats.running));
  load.set_state_slots(static_cast<uint32_t>(stats.slots.total));
  load.set_state_slots_free(static_cast<uint32_t>(stats.slots.free));
  load.set_waiting_tokens(static_cast<uint64_t>(stats.queued_prompt_tokens));
  load.set_sessions(static_cast<uint32_t>(model->sessions->stats().sessions));
  return absl::OkStatus();
}

absl::Status AdminService::DoDrain(const v1::DrainRequest&, v1::DrainResponse&) {
  log_.Warning("drain_requested", "an administrator asks for a drain");
  state_.RequestDrain();
  return absl::OkStatus();
}

absl::Status AdminService::DoSetLogLevel(const v1::SetLogLevelRequest& request,
                                         v1::SetLogLevelResponse& response) {
  const std::optional<LogLevel> level = ParseLogLevel(request.level());
  if (!level) {
    return InvalidField("level", absl::StrFormat("is \"%s\"; it must be debug, info, warning or error",
                                                 request.level().substr(0, 32)));
  }
  response.set_previous(LogLevelName(log_.level()));
  log_.Warning("log_level", "an administrator sets the log's level", {{"level", request.level()}});
  log_.SetLevel(*level);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AdminService::GetServerInfo(Context* context, const Bytes* request,
                                                      Bytes* response) {
  return Answer(RpcMethod::kGetServerInfo, *context, *request, *response, &AdminService::DoGetServerInfo);
}

grpc::ServerUnaryReactor* AdminService::GetLoad(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kGetLoad, *context, *request, *response, &AdminService::DoGetLoad);
}

grpc::ServerUnaryReactor* AdminService::Drain(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kDrain, *context, *request, *response, &AdminService::DoDrain);
}

grpc::ServerUnaryReactor* AdminService::SetLogLevel(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kSetLogLevel, *context, *request, *response, &AdminService::DoSetLogLevel);
}

}  // namespace efla
