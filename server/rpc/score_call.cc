#include "server/rpc/score_call.h"

#include <algorithm>
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
  absl::StatusOr<CallRequest> call = ToScoringRequest(message, model, [this] { return StillWanted(); });
  if (!call.ok()) return call;
  top_logprobs_ = static_cast<int>(message.top_logprobs());
  for (const Branch& branch : call->branches) continuations_.push_back(branch.continuation);
  finished_.resize(std::max<size_t>(continuations_.size(), 1));
  if (continuations_.empty()) prompt_ = call->generation.prompt;
  return call;
}

void ScoreCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    if (auto* finished = std::get_if<FinishedEvent>(&*event)) {
      finished_.at(static_cast<size_t>(finished->branch)) = std::move(*finished);
    }
  }
  const std::optional<absl::Status> end = generation.TakeEnd();
  if (!end) return;
  if (!end->ok()) return EndAs(*end);
  size_t scores = 0;
  for (const FinishedEvent& finished : finished_) scores += finished.prompt_logprobs.size();
  // Making a message of a long prompt's scores would hold up every stream.
  environment().workers.Post(scores * sizeof(v1::TokenLogprob), [this, usage = generation.usage()] {
    SerializeReply(Reply(usage), response_);
    EndAs(absl::OkStatus());
  });
}

v1::ScoreResponse ScoreCall::Reply(const Usage& usage) {
  v1::ScoreResponse message;
  if (continuations_.empty()) {
    FillScore(reply_context(), prompt_, finished_.front(), message);
    return message;
  }
  message.set_request_id(reply_context().request_id);
  message.set_model(reply_context().model);
  FillUsage(usage, *message.mutable_usage());
  const FinishedEvent* last = &finished_.front();
  for (size_t i = 0; i < continuations_.size(); ++i) {
    FillScore(reply_context(), continuations_[i], finished_[i], top_logprobs_, *message.add_continuations());
    if (finished_[i].timing.total_us > last->timing.total_us) last = &finished_[i];
  }
  FillTiming(last->timing, *message.mutable_timing());
  return message;
}

void ScoreCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
