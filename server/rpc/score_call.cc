#include "server/rpc/score_call.h"

#include <optional>
#include <utility>
#include <variant>

#include "server/rpc/wire.h"

namespace efla {

ScoreCall::ScoreCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                     const grpc::ByteBuffer& request, grpc::ByteBuffer& response)
    : EngineCall(environment, RpcMethod::kScore, context), request_(request), response_(response) {
  Start(request.Length());
}

absl::StatusOr<CallRequest> ScoreCall::Prepare(const ServedModel& model) {
  v1::ScoreRequest message;
  if (absl::Status status = ParseRequest(request_, message); !status.ok()) return status;
  NoteRequestId(message.request_id());
  absl::StatusOr<CallRequest> call = ToScoringRequest(message, model);
  if (call.ok()) prompt_ = call->generation.prompt;
  return call;
}

void ScoreCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    if (auto* finished = std::get_if<FinishedEvent>(&*event)) finished_ = std::move(*finished);
  }
  const std::optional<absl::Status> end = generation.TakeEnd();
  if (!end) return;
  if (!end->ok()) return EndAs(*end);
  // Making a message of a long prompt's scores would hold up every stream.
  environment().workers.Post(prompt_.size() * sizeof(v1::TokenLogprob), [this] {
    v1::ScoreResponse message;
    FillScore(reply_context(), prompt_, finished_, message);
    SerializeReply(message, response_);
    EndAs(absl::OkStatus());
  });
}

void ScoreCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
