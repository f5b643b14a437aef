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
    NoteSession(request.session_id());
    return ToCreateRequest(request, model, [this] { return StillWanted(); });
  }
  v1::AppendRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  NoteRequestId(request.request_id());
  NoteSession(request.session_id());
  return ToAppendRequest(request, model, [this] { return StillWanted(); });
}

void AppendCall::OnReady(Generation& generation) {
  while (std::optional<Event> event = generation.TakeEvent()) {
    Note(*event);
    if (const auto* finished = std::get_if<FinishedEvent>(&*event))
      cached_tokens_ = finished->usage.cached_tokens;
  }
  if (const std::optional<absl::Status> end = generation.TakeEnd()) EndTurn(*end);
}

// All but the session.
v1::AppendResponse AppendCall::Reply() const {
  v1::AppendResponse message;
  message.set_appended_tokens(static_cast<uint64_t>(appended_tokens()));
  message.set_cached_tokens(static_cast<uint64_t>(std::min(cached_tokens_, appended_tokens())));
  return message;
}

std::string AppendCall::Record(bool) { return EncodeRecord(Reply()); }

void AppendCall::OnTurnEnd(const SessionInfo& after, bool) { Answer(after, Reply()); }

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
    if (message.appended_tokens() > 0) {
      v1::Usage& usage = *message.mutable_session()->mutable_usage();
      usage.set_prompt_tokens(message.appended_tokens());
      usage.set_cached_tokens(message.cached_tokens());
    }
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
