#include "server/rpc/append_call.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "server/rpc/session_messages.h"
#include "server/rpc/wire.h"

namespace efla {

AppendCall::AppendCall(RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context,
                       const grpc::ByteBuffer& request, grpc::ByteBuffer& response)
    : EngineCall(environment, method, context),
      creates_(method == RpcMethod::kCreate),
      request_(request),
      response_(response) {
  Start(request.Length());
}

absl::StatusOr<CallRequest> AppendCall::Prepare(const ServedModel& model) {
  if (creates_) {
    v1::CreateSessionRequest request;
    if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
    NoteRequestId(request.request_id());
    return ToCreateRequest(request, model);
  }
  v1::AppendRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  return ToAppendRequest(request, model);
}

void AppendCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    if (const auto* finished = std::get_if<FinishedEvent>(&*event))
      cached_tokens_ = finished->usage.cached_tokens;
  }
  if (const std::optional<absl::Status> end = generation.TakeEnd()) EndTurn(*end);
}

std::string AppendCall::Record(bool) {
  v1::AppendResponse message;
  message.set_appended_tokens(static_cast<uint64_t>(appended_tokens()));
  message.set_cached_tokens(static_cast<uint64_t>(std::min(cached_tokens_, appended_tokens())));
  return EncodeRecord(message);
}

void AppendCall::OnTurnEnd(const SessionInfo& after, bool) {
  v1::AppendResponse message;
  message.set_appended_tokens(static_cast<uint64_t>(appended_tokens()));
  message.set_cached_tokens(static_cast<uint64_t>(std::min(cached_tokens_, appended_tokens())));
  Answer(after, std::move(message));
}

absl::Status AppendCall::OnReplay(const std::string& record, const SessionInfo& now) {
  absl::StatusOr<v1::AppendResponse> recorded = DecodeAppendRecord(record);
  if (!recorded.ok()) return recorded.status();
  recorded->set_replayed(true);
  Answer(now, *std::move(recorded));
  return absl::OkStatus();
}

void AppendCall::Answer(const SessionInfo& session, v1::AppendResponse message) {
  FillSession(session, *message.mutable_session());
  if (creates_) {
    SerializeReply(message.session(), response_);
  } else {
    SerializeReply(message, response_);
  }
  EndAs(absl::OkStatus());
}

void AppendCall::OnDone() {
  RecordEnd();
  delete this;
}

}  // namespace efla
