#include "client/client.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

// A ClientContext with the options applied, cancelled when the stop token says so, until it goes out of
// scope.
class Call {
 public:
  explicit Call(const CallOptions& options) : on_stop_(options.stop, [this] { context_.TryCancel(); }) {
    if (options.timeout) context_.set_deadline(std::chrono::system_clock::now() + *options.timeout);
  }
  grpc::ClientContext* context() { return &context_; }

 private:
  grpc::ClientContext context_;
  std::stop_callback<std::function<void()>> on_stop_;  // after context_: unregistered before it dies
};

template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> CallUnary(Stub& stub, const CallOptions& options, const Request& request,
                                   grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                                Response*)) {
  Call call(options);
  Response response;
  grpc::Status status = (stub.*method)(call.context(), request, &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  // The two libraries number the same codes alike.
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

Client::Client(ClientOptions options) : options_(std::move(options)) {
  grpc::ChannelArguments arguments;
  // A scored text's reply carries some 30 bytes a token: the length of the request bounds it, not a fixed 4
  // MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  // The target is where the server is: an http_proxy variable is meant for other things.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  channel_ = grpc::CreateCustomChannel(options_.target, grpc::InsecureChannelCredentials(), arguments);
  generation_ = v1::Generation::NewStub(channel_);
  models_ = v1::Models::NewStub(channel_);
  sessions_ = v1::Sessions::NewStub(channel_);
}

absl::Status Client::Connect(std::stop_token stop) {
  constexpr std::chrono::milliseconds kStopCheckInterval{50};
  const auto deadline = std::chrono::steady_clock::now() + options_.connect_timeout;
  for (;;) {
    grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return absl::OkStatus();
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) {
      return absl::UnavailableError(absl::StrFormat("cannot connect to %s", options_.target));
    }
    if (stop.stop_requested()) return absl::CancelledError("stopped while connecting");
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::UnavailableError(absl::StrFormat("no connection to %s within %d ms", options_.target,
                                                    options_.connect_timeout.count()));
    }
    channel_->WaitForStateChange(state, std::chrono::system_clock::now() + kStopCheckInterval);
  }
}

absl::Status Client::Generate(const v1::GenerateRequest& request, const CallOptions& options,
                              const std::function<bool(const v1::GenerateResponse&)>& on_event) {
  Call call(options);
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader =
      generation_->Generate(call.context(), request);
  v1::GenerateResponse event;
  bool finished = false;
  bool wanted = true;
  while (reader->Read(&event)) {
    finished = finished || event.has_finished();
    if (wanted && !on_event(event)) {
      wanted = false;
      call.context()->TryCancel();
    }
  }
  grpc::Status status = reader->Finish();
  if (!status.ok()) return FromGrpc(status);
  if (!wanted) return absl::CancelledError("cancelled by the caller");
  if (!finished) return absl::InternalError("the stream ended without a finished event");
  return absl::OkStatus();
}

absl::StatusOr<v1::ScoreResponse> Client::Score(const v1::ScoreRequest& request, const CallOptions& options) {
  return CallUnary(*generation_, options, request, &v1::Generation::Stub::Score);
}

absl::StatusOr<v1::Model> Client::GetModel(const v1::GetModelRequest& request, const CallOptions& options) {
  return CallUnary(*models_, options, request, &v1::Models::Stub::GetModel);
}

absl::StatusOr<v1::TokenizeResponse> Client::Tokenize(const v1::TokenizeRequest& request,
                                                      const CallOptions& options) {
  return CallUnary(*models_, options, request, &v1::Models::Stub::Tokenize);
}

absl::StatusOr<v1::DetokenizeResponse> Client::Detokenize(const v1::DetokenizeRequest& request,
                                                          const CallOptions& options) {
  return CallUnary(*models_, options, request, &v1::Models::Stub::Detokenize);
}

absl::StatusOr<v1::Session> Client::CreateSession(const v1::CreateSessionRequest& request,
                                                  const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Create);
}

absl::StatusOr<v1::Session> Client::GetSession(const v1::GetSessionRequest& request,
                                               const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Get);
}

absl::StatusOr<v1::ListSessionsResponse> Client::ListSessions(const v1::ListSessionsRequest& request,
                                                              const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::List);
}

absl::StatusOr<v1::AppendResponse> Client::Append(const v1::AppendRequest& request,
                                                  const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Append);
}

absl::StatusOr<v1::ForkResponse> Client::Fork(const v1::ForkRequest& request, const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Fork);
}

absl::StatusOr<v1::Session> Client::Mark(const v1::MarkRequest& request, const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Mark);
}

absl::StatusOr<v1::Session> Client::Rewind(const v1::RewindRequest& request, const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Rewind);
}

absl::Status Client::DeleteSession(const v1::DeleteSessionRequest& request, const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Delete).status();
}

absl::StatusOr<v1::Session> Client::MoveSession(const v1::MoveSessionRequest& request,
                                                const CallOptions& options) {
  return CallUnary(*sessions_, options, request, &v1::Sessions::Stub::Move);
}

absl::StatusOr<std::string> Client::Export(const v1::ExportRequest& request, const CallOptions& options) {
  Call call(options);
  std::unique_ptr<grpc::ClientReader<v1::ExportResponse>> reader = sessions_->Export(call.context(), request);
  std::string snapshot;
  for (v1::ExportResponse part; reader->Read(&part);) snapshot += part.chunk();
  if (grpc::Status status = reader->Finish(); !status.ok()) return FromGrpc(status);
  return snapshot;
}

absl::StatusOr<v1::Session> Client::Import(const v1::ImportOptions& import, std::string_view snapshot,
                                           const CallOptions& options) {
  constexpr size_t kChunkBytes = size_t{1} << 20;  // the server's limit
  const auto next = [&]() -> absl::StatusOr<std::string> {
    std::string chunk(snapshot.substr(0, kChunkBytes));
    snapshot.remove_prefix(chunk.size());
    return chunk;
  };
  return Import(import, next, options);
}

absl::StatusOr<v1::Session> Client::Import(const v1::ImportOptions& import,
                                           const std::function<absl::StatusOr<std::string>()>& next,
                                           const CallOptions& options) {
  Call call(options);
  v1::Session session;
  std::unique_ptr<grpc::ClientWriter<v1::ImportRequest>> writer = sessions_->Import(call.context(), &session);
  v1::ImportRequest part;
  *part.mutable_options() = import;
  while (writer->Write(part)) {
    absl::StatusOr<std::string> chunk = next();
    if (!chunk.ok()) {
      call.context()->TryCancel();
      writer->Finish();
      return chunk.status();
    }
    if (chunk->empty()) break;
    part.set_chunk(*std::move(chunk));
  }
  writer->WritesDone();
  if (grpc::Status status = writer->Finish(); !status.ok()) return FromGrpc(status);
  return session;
}

}  // namespace efla
