#include "server/rpc/complete_call.h"

#include <optional>
#include <utility>

#include "server/rpc/request_validation.h"
#include "server/rpc/wire.h"

namespace efla {

CompleteCall::CompleteCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                           const grpc::ByteBuffer& request, grpc::ByteBuffer& response)
    : EngineCall(environment, RpcMethod::kComplete, context), request_(request), response_(response) {
  Start(request.Length());
}

absl::StatusOr<GenerationRequest> CompleteCall::Prepare(const ServedModel& model) {
  v1::GenerateRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  return ToGenerationRequest(request, model, ReplyKind::kWhole);
}

void CompleteCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    AppendEvent(reply_context(), *event, message_);
  }
  if (std::optional<absl::Status> end = generation.TakeEnd()) {
    // Serialising a large reply would hold up every stream.
    environment().workers.Post(message_.ByteSizeLong(), [this, status = *std::move(end)] {
      if (status.ok()) SerializeReply(message_, response_);
      EndAs(status);
    });
  }
}

void CompleteCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
