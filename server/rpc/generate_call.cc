#include "server/rpc/generate_call.h"

#include <optional>
#include <utility>
#include <variant>

#include "server/rpc/session_messages.h"
#include "server/rpc/wire.h"

namespace efla {

GenerateCall::GenerateCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
                           const grpc::ByteBuffer& request)
    : EngineCall(environment, RpcMethod::kGenerate, context), request_(request) {
  Start(request.Length());
}

absl::StatusOr<CallRequest> GenerateCall::Prepare(const ServedModel& model) {
  v1::GenerateRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  NoteSession(request.session().session_id());
  return ToGenerationRequest(request, model, ReplyKind::kStream, [this] { return StillWanted(); });
}

void GenerateCall::OnReady(Generation& generation) {
  if (writing_) return;  // OnWriteDone delivers again
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    const bool is_last = std::holds_alternative<FinishedEvent>(*event);
    if (is_last && has_turn()) {
      finished_ = std::get<FinishedEvent>(*std::move(event));
      continue;
    }
    if (reader_gone_ && !records()) continue;
    FillResponse(reply_context(), *event, message_);
    if (records()) Gather();
    if (reader_gone_) continue;
    SerializeReply(message_, message_bytes_);
    if (is_last) {
      if (const std::optional<absl::Status> end = generation.TakeEnd()) {  // message and status in one go
        NoteEnd(*end);
        StartWriteAndFinish(&message_bytes_, grpc::WriteOptions(), grpc::Status::OK);
        return;
      }
    }
    writing_ = true;
    WriteBegins();
    StartWrite(&message_bytes_);
    return;
  }
  if (const std::optional<absl::Status> end = generation.TakeEnd()) {
    const bool broken = reader_gone_ && (end->ok() || absl::IsCancelled(*end));
    const absl::Status status = broken ? ReaderGone() : *end;
    has_turn() ? EndTurn(status) : EndAs(status);
  }
}

void GenerateCall::Gather() {
  if (gathered_bytes_ > kMaxRecordBytes) return;
  gathered_bytes_ += message_.ByteSizeLong();
  if (gathered_bytes_ > kMaxRecordBytes) {
    gathered_.Clear();
  } else {
    AppendMessage(message_, gathered_);
  }
}

std::string GenerateCall::Record(bool cut) {
  if (finished_) {
    FinishedEvent copy = *finished_;
    Event event = std::move(copy);
    FillResponse(reply_context(), event, message_);
    Gather();
  }
  if (gathered_bytes_ > kMaxRecordBytes) return EncodeTooLongRecord();
  if (!finished_) {
    gathered_.set_finish_reason(cut ? v1::FINISH_REASON_CANCELLED : v1::FINISH_REASON_MAX_TOKENS);
  }
  gathered_.set_request_id(reply_context().request_id);
  gathered_.set_model(reply_context().model);
  gathered_.set_seed(reply_context().seed);
  *gathered_.mutable_session() = expected();
  gathered_.mutable_usage()->set_prompt_tokens(static_cast<uint64_t>(appended_tokens()));
  return EncodeRecord(gathered_);
}

void GenerateCall::OnTurnEnd(const SessionInfo& after, bool computed) {
  if (computed) {
    Event event = *std::move(finished_);
    FillResponse(reply_context(), event, message_);
    FillAfterTurn(after, reply_context().session_revision, *message_.mutable_finished()->mutable_session());
    SerializeReply(message_, message_bytes_);
    NoteEnd(absl::OkStatus());
    StartWriteAndFinish(&message_bytes_, grpc::WriteOptions(), grpc::Status::OK);
    return;
  }
  // Nothing was to be generated and everything waits for the next turn.
  std::vector<v1::GenerateResponse> messages(2);
  Event accepted = AcceptedEvent{.prompt_tokens = appended_tokens(), .seed = reply_context().seed};
  FillResponse(reply_context(), accepted, messages[0]);
  Event finished = efla::FinishedEvent{};
  Note(finished);
  FillResponse(reply_context(), finished, messages[1]);
  FillAfterTurn(after, reply_context().session_revision, *messages[1].mutable_finished()->mutable_session());
  WriteAll(messages);
}

absl::Status GenerateCall::OnReplay(const std::string& record, const SessionInfo& now) {
  absl::StatusOr<v1::CompleteResponse> recorded = DecodeGenerationRecord(record);
  if (!recorded.ok()) return recorded.status();
  std::vector<v1::GenerateResponse> messages(3);
  v1::Accepted& accepted = *messages[0].mutable_accepted();
  accepted.set_request_id(recorded->request_id());
  accepted.set_model(recorded->model());
  accepted.set_prompt_tokens(recorded->usage().prompt_tokens());
  accepted.set_seed(recorded->seed());
  accepted.set_session_revision(recorded->session().began_revision());
  accepted.set_replayed(true);
  v1::Delta& delta = *messages[1].mutable_delta();
  delta.set_text(std::move(*recorded->mutable_text()));
  delta.mutable_token_ids()->Swap(recorded->mutable_token_ids());
  delta.mutable_logprobs()->Swap(recorded->mutable_logprobs());
  *delta.mutable_usage() = recorded->usage();
  *delta.mutable_timing() = recorded->timing();
  v1::Finished& finished = *messages[2].mutable_finished();
  finished.set_finish_reason(recorded->finish_reason());
  if (recorded->has_stop()) finished.set_stop(recorded->stop());
  if (recorded->has_token_id()) finished.set_token_id(recorded->token_id());
  *finished.mutable_usage() = recorded->usage();
  *finished.mutable_timing() = recorded->timing();
  *finished.mutable_session() = RecordedTurn(recorded->session(), now);
  WriteAll(messages);
  return absl::OkStatus();
}

void GenerateCall::WriteAll(const std::vector<v1::GenerateResponse>& messages) {
  BeginAnswer();
  whole_answer_.resize(messages.size());
  for (size_t i = 0; i < messages.size(); ++i) SerializeReply(messages[i], whole_answer_[i]);
  WriteNext();
}

void GenerateCall::WriteNext() {
  grpc::ByteBuffer* const next = &whole_answer_[num_written_++];
  if (num_written_ < whole_answer_.size()) {
    WriteBegins();
    return StartWrite(next);
  }
  NoteEnd(absl::OkStatus());
  StartWriteAndFinish(next, grpc::WriteOptions(), grpc::Status::OK);
}

void GenerateCall::OnWriteDone(bool ok) {
  WriteEnds();
  if (!whole_answer_.empty()) {
    if (!ok) return EndAs(ReaderGone());
    if (num_written_ < whole_answer_.size()) WriteNext();
    return;
  }
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
