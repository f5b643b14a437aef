#include "server/rpc/complete_call.h"

#include <optional>
#include <utility>

#include "server/rpc/session_messages.h"
#include "server/rpc/wire.h"

namespace efla {

CompleteCall::CompleteCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                           const grpc::ByteBuffer& request, grpc::ByteBuffer& response)
    : EngineCall(environment, RpcMethod::kComplete, context), request_(request), response_(response) {
  Start(request.Length());
}

absl::StatusOr<CallRequest> CompleteCall::Prepare(const ServedModel& model) {
  v1::GenerateRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  NoteSession(request.session().session_id());
  return ToGenerationRequest(request, model, ReplyKind::kWhole, [this] { return StillWanted(); });
}

void CompleteCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    AppendEvent(reply_context(), *event, message_);
  }
  if (std::optional<absl::Status> end = generation.TakeEnd()) {
    if (has_turn()) return EndTurn(*end);
    // Serialising a large reply would hold up every stream.
    environment().workers.Post(message_.ByteSizeLong(), [this, status = *std::move(end)] {
      if (status.ok()) SerializeReply(message_, response_);
      EndAs(status);
    });
  }
}

// Nothing was to be generated and everything waits for the next turn.
void CompleteCall::FinishWithoutEngine() {
  if (message_.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) return;
  Event finished = FinishedEvent{};
  Note(finished);
  AppendEvent(reply_context(), finished, message_);
}

std::string CompleteCall::Record(bool cut) {
  message_.set_request_id(reply_context().request_id);
  message_.set_model(reply_context().model);
  message_.set_seed(reply_context().seed);
  message_.mutable_usage()->set_prompt_tokens(static_cast<uint64_t>(appended_tokens()));
  if (cut) {
    message_.set_finish_reason(v1::FINISH_REASON_CANCELLED);
  } else {
    FinishWithoutEngine();
  }
  *message_.mutable_session() = expected();
  return EncodeRecord(message_);
}

void CompleteCall::OnTurnEnd(const SessionInfo& after, bool computed) {
  if (!computed) FinishWithoutEngine();
  FillAfterTurn(after, reply_context().session_revision, *message_.mutable_session());
  SerializeReply(message_, response_);
  EndAs(absl::OkStatus());
}

absl::Status CompleteCall::OnReplay(const std::string& record, const SessionInfo& now) {
  absl::StatusOr<v1::CompleteResponse> recorded = DecodeGenerationRecord(record);
  if (!recorded.ok()) return recorded.status();
  message_ = *std::move(recorded);
  message_.set_replayed(true);
  *message_.mutable_session() = RecordedTurn(message_.session(), now);
  SerializeReply(message_, response_);
  EndAs(absl::OkStatus());
  return absl::OkStatus();
}

void CompleteCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
