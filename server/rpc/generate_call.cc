#include "server/rpc/generate_call.h"

#include <optional>
#include <utility>
#include <variant>

#include "server/rpc/request_validation.h"
#include "server/rpc/wire.h"

namespace efla {

GenerateCall::GenerateCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                           const grpc::ByteBuffer& request)
    : EngineCall(environment, RpcMethod::kGenerate, context), request_(request) {
  Start(request.Length());
}

absl::StatusOr<GenerationRequest> GenerateCall::Prepare(const ServedModel& model) {
  v1::GenerateRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  return ToGenerationRequest(request, model, ReplyKind::kStream);
}

void GenerateCall::OnReady(Generation& generation) {
  if (writing_) return;  // OnWriteDone delivers again
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    if (reader_gone_) continue;
    const bool is_last = std::holds_alternative<FinishedEvent>(*event);
    FillResponse(reply_context(), *event, message_);
    SerializeReply(message_, message_bytes_);
    if (is_last) {
      if (const std::optional<absl::Status> end = generation.TakeEnd()) {  // message and status in one go
        NoteEnd(*end);
        StartWriteAndFinish(&message_bytes_, grpc::WriteOptions(), grpc::Status::OK);
        return;
      }
    }
    writing_ = true;
    StartWrite(&message_bytes_);
    return;
  }
  if (const std::optional<absl::Status> end = generation.TakeEnd()) {
    EndAs(reader_gone_ && end->ok() ? absl::CancelledError("the client has gone") : *end);
  }
}

void GenerateCall::OnWriteDone(bool ok) {
  if (!ok) {
    reader_gone_ = true;
    Cancel();
  }
  writing_ = false;
  Deliver();
}

void GenerateCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
