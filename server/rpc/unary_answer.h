// A unary method that a worker answers, without the engine.
#ifndef EFLA_SERVER_RPC_UNARY_ANSWER_H_
#define EFLA_SERVER_RPC_UNARY_ANSWER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/rpc/access.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/status.h"
#include "server/rpc/unknown_fields.h"
#include "server/rpc/wire.h"

namespace efla {

// Has `try_post` hand a worker the job of parsing the request, running `answer` and serialising its reply;
// counts the call. `try_post` returns false when the workers are full, which is told as `full`. The request
// and the response are gRPC's, until the reactor's end.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* AnswerUnary(
    RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context,
    const grpc::ByteBuffer& request, grpc::ByteBuffer& response,
    const std::function<bool(std::function<void()>)>& try_post, const char* full,
    std::function<absl::Status(const Request&, const ServedModel&, Response&)> answer) {
  constexpr std::chrono::milliseconds kRetry{1000};
  grpc::ServerUnaryReactor* const reactor = context.DefaultReactor();
  environment.metrics.OnCallStarted(method);
  const auto call = std::make_shared<CallRecord>(context);
  const auto end = [&environment, reactor, method, &context, call,
                    begin = Clock::now()](const absl::Status& status) {
    const Clock::duration lasted = Clock::now() - begin;
    environment.metrics.OnCallEnded(method, static_cast<int>(status.code()),
                                    std::chrono::duration<double>(lasted).count());
    LogCallEnd(environment.log, {.method = method,
                                 .request_id = call->request_id,
                                 .session = call->session,
                                 .caller = call->caller,
                                 .origin = call->origin,
                                 .code = status.code(),
                                 .reason = ErrorReason(status),
                                 .message = LoggedMessage(status),
                                 .total = lasted});
    EchoTrace(call->origin.trace_id, status, context);
    reactor->Finish(ToGrpcStatus(status, context));
  };
  const absl::Status admitted = environment.access.Admit(context, call->origin, method, call->caller);
  if (!admitted.ok()) {
    end(admitted);
    return reactor;
  }
  const ServedModel* model = environment.access.ModelOf(call->caller);
  if (model == nullptr) {
    end(WithRetry(WithReason(absl::UnavailableError("the model is being loaded"), "MODEL_LOADING"), kRetry));
    return reactor;
  }
  const auto job = [end, call, model, answer = std::move(answer), &request, &response] {
    Request message;
    Response reply;
    absl::Status status = ParseRequest(request, message);
    if (status.ok()) status = CheckNoUnknownFields(message);
    if constexpr (requires { message.request_id(); }) call->request_id = LoggedText(message.request_id());
    if constexpr (requires { message.session_id(); }) call->session = LoggedName(message.session_id());
    if (status.ok()) status = answer(message, *model, reply);
    if (status.ok()) SerializeReply(reply, response);
    end(status);
  };
  if (!try_post(job)) {
    end(WithRetry(WithReason(absl::ResourceExhaustedError(full), "QUEUE_FULL"), kRetry));
  }
  return reactor;
}

}  // namespace efla

#endif  // EFLA_SERVER_RPC_UNARY_ANSWER_H_
