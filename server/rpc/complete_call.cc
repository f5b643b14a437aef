#include "server/rpc/complete_call.h"

#include <optional>
#include <utility>

#include "server/rpc/request_validation.h"

namespace efla {

CompleteCall::CompleteCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                           const v1::GenerateRequest& request, v1::CompleteResponse& response)
    : EngineCall(environment, RpcMethod::kComplete, context), request_(request), response_(response) {
  Start(request.ByteSizeLong());
}

absl::StatusOr<GenerationRequest> CompleteCall::Prepare(const ServedModel& model) {
  return ToGenerationRequest(request_, model, ReplyKind::kWhole);
}

void CompleteCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    AppendEvent(reply_context(), *event, response_);
  }
  if (std::optional<absl::Status> end = generation.TakeEnd()) {
    // Serialising a large reply would hold up every stream.
    environment().workers.Post(response_.ByteSizeLong(), [this, status = *std::move(end)] { EndAs(status); });
  }
}

void CompleteCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
