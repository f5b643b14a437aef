#include "client/client.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_interceptor.h>

#include <algorithm>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"
#include "client/target.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

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
  // Balancers send what belongs to one session to one server. No session has an id that metadata cannot
  // carry: the server says so.
  void SetSession(const std::string& session_id) {
    const bool is_graphic = std::all_of(session_id.begin(), session_id.end(), absl::ascii_isgraph);
    if (!session_id.empty() && is_graphic) context_.AddMetadata("x-session-id", session_id);
  }

 private:
  grpc::ClientContext context_;
  std::stop_callback<std::function<void()>> on_stop_;  // after context_: unregistered before it dies
};

template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> CallUnary(Stub& stub, const CallOptions& options, const Request& request,
                                   grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                                Response*)) {
  Call call(options);
  if constexpr (requires { request.session_id(); }) call.SetSession(request.session_id());
  Response response;
  grpc::Status status = (stub.*method)(call.context(), request, &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
}

// gRPC's own call credentials go with TLS only; tokens are of use on one machine and behind a balancer, too.
class TokenSender final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenSender(const std::string& token) : header_("Bearer " + token) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new ForOneCall(header_);
  }

 private:
  class ForOneCall final : public grpc::experimental::Interceptor {
   public:
    explicit ForOneCall(const std::string& header) : header_(header) {}
    void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
      using grpc::experimental::InterceptionHookPoints;
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
        methods->GetSendInitialMetadata()->insert({"authorization", header_});
      }
      methods->Proceed();
    }

   private:
    const std::string header_;
  };
  const std::string header_;
};

// Ends each call with a status before anything of it is sent.
class CallRefuser final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit CallRefuser(grpc::Status status) : status_(std::move(status)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new ForOneCall(status_);
  }

 private:
  class ForOneCall final : public grpc::experimental::Interceptor {
   public:
    explicit ForOneCall(const grpc::Status& status) : status_(status) {}
    void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
      using grpc::experimental::InterceptionHookPoints;
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
        return methods->Hijack();
      }
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
        methods->FailHijackedSendMessage();
      }
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_RECV_MESSAGE)) {
        methods->FailHijackedRecvMessage();
      }
      if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_RECV_STATUS)) {
        *methods->GetRecvStatus() = status_;
      }
      methods->Proceed();
    }

   private:
    const grpc::Status status_;
  };
  const grpc::Status status_;
};

absl::Status CheckTokenIsSafe(const ClientOptions& options) {
  if (options.token.empty() || options.tls || options.insecure_token || IsOnThisMachine(options.target)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("the token would go to %s in clear text; it needs TLS", options.target));
}

std::shared_ptr<grpc::ChannelCredentials> Credentials(const std::optional<ClientTls>& tls) {
  if (!tls) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials(
      {.pem_root_certs = tls->ca, .pem_private_key = tls->key, .pem_cert_chain = tls->certificate});
}

// CANCELLED: what gRPC's server makes of a call that reaches it just as its port closes. A call that its own
// client cancels is not made again.
std::string RetryConfig(int retries) {
  return absl::StrFormat(
      R"({"methodConfig": [{"name": [{"service": "efla.v1.Generation"}, {"service": "efla.v1.Models"},
         {"service": "efla.v1.Sessions", "method": "Get"}, {"service": "efla.v1.Sessions", "method": "List"}],
         "retryPolicy": {"maxAttempts": %d, "initialBackoff": "0.2s", "maxBackoff": "5s",
         "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"]}}]})",
      retries + 1);
}

template <typename Detail>
bool GetDetail(const absl::Status& status, Detail& detail) {
  const absl::optional<absl::Cord> payload =
      status.GetPayload("type.googleapis.com/" + Detail::descriptor()->full_name());
  return payload && detail.ParseFromString(std::string(*payload));
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  // The two libraries number the same codes alike.
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (converted.ok() || !details.ParseFromString(status.error_details())) return converted;
  for (const google::protobuf::Any& detail : details.details()) {
    converted.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return converted;
}

std::optional<std::chrono::milliseconds> RetryDelay(const absl::Status& status) {
  google::rpc::RetryInfo retry;
  if (!GetDetail(status, retry)) return std::nullopt;
  const std::chrono::milliseconds delay(retry.retry_delay().seconds() * 1000 +
                                        retry.retry_delay().nanos() / 1'000'000);
  return std::max(delay, std::chrono::milliseconds(0));
}

std::string ErrorReason(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  return GetDetail(status, info) ? info.reason() : "";
}

Client::Client(ClientOptions options) : options_(std::move(options)), refusal_(CheckTokenIsSafe(options_)) {
  grpc::ChannelArguments arguments;
  // A scored text's reply carries some 30 bytes a token: the length of the request bounds it, not a fixed 4
  // MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  // The target is where the server is: an http_proxy variable is meant for other things.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options_.retries > 0) arguments.SetServiceConfigJSON(RetryConfig(options_.retries));
  if (options_.tls && !options_.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options_.tls->server_name);
  }
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!refusal_.ok()) {
    interceptors.push_back(std::make_unique<CallRefuser>(
        grpc::Status(static_cast<grpc::StatusCode>(refusal_.code()), std::string(refusal_.message()))));
  } else if (!options_.token.empty()) {
    interceptors.push_back(std::make_unique<TokenSender>(options_.token));
  }
  channel_ = grpc::experimental::CreateCustomChannelWithInterceptors(
      options_.target, Credentials(options_.tls), arguments, std::move(interceptors));
  generation_ = v1::Generation::NewStub(channel_);
  models_ = v1::Models::NewStub(channel_);
  sessions_ = v1::Sessions::NewStub(channel_);
  admin_ = v1::Admin::NewStub(channel_);
}

absl::Status Client::Connect(std::stop_token stop) {
  if (!refusal_.ok()) return refusal_;
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
  call.SetSession(request.session().session_id());
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

absl::StatusOr<v1::CompleteResponse> Client::Complete(const v1::GenerateRequest& request,
                                                      const CallOptions& options) {
  Call call(options);
  call.SetSession(request.session().session_id());
  v1::CompleteResponse response;
  const grpc::Status status = generation_->Complete(call.context(), request, &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
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

absl::StatusOr<v1::RenderChatResponse> Client::RenderChat(const v1::RenderChatRequest& request,
                                                          const CallOptions& options) {
  return CallUnary(*models_, options, request, &v1::Models::Stub::RenderChat);
}

absl::StatusOr<v1::ServerInfo> Client::GetServerInfo(const CallOptions& options) {
  return CallUnary(*admin_, options, v1::GetServerInfoRequest(), &v1::Admin::Stub::GetServerInfo);
}

absl::StatusOr<v1::Load> Client::GetLoad(const CallOptions& options) {
  return CallUnary(*admin_, options, v1::GetLoadRequest(), &v1::Admin::Stub::GetLoad);
}

absl::Status Client::Drain(const CallOptions& options) {
  return CallUnary(*admin_, options, v1::DrainRequest(), &v1::Admin::Stub::Drain).status();
}

absl::StatusOr<std::string> Client::SetLogLevel(const std::string& level, const CallOptions& options) {
  v1::SetLogLevelRequest request;
  request.set_level(level);
  absl::StatusOr<v1::SetLogLevelResponse> reply =
      CallUnary(*admin_, options, request, &v1::Admin::Stub::SetLogLevel);
  if (!reply.ok()) return reply.status();
  return reply->previous();
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
  call.SetSession(request.session_id());
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
  call.SetSession(import.session_id());
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

absl::Status Client::CheckHealth(const std::string& service, const CallOptions& options) {
  // grpc.health.v1 without its generated code. Request: field 1, the name; reply: field 1, the status.
  constexpr char kNameTag = 0x0a, kStatusTag = 0x08, kServing = 1;
  if (service.size() > kMaxServiceBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("the service's name has %d characters; the limit is %d",
                                                      service.size(), kMaxServiceBytes));
  }
  const std::string request = std::string{kNameTag, static_cast<char>(service.size())} + service;
  const grpc::Slice slice(request);
  const grpc::ByteBuffer message(&slice, 1);
  grpc::ByteBuffer reply;
  Call call(options);
  std::promise<grpc::Status> done;
  grpc::GenericStub stub(channel_);
  stub.UnaryCall(call.context(), "/grpc.health.v1.Health/Check", grpc::StubOptions(), &message, &reply,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    return absl::NotFoundError(absl::StrFormat("there is no service %s", service));
  }
  if (!status.ok()) return FromGrpc(status);
  std::vector<grpc::Slice> parts;
  std::string bytes;
  if (reply.Dump(&parts).ok()) {
    for (const grpc::Slice& part : parts)
      bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  if (bytes == std::string{kStatusTag, kServing}) return absl::OkStatus();
  return absl::UnavailableError("not serving");
}

}  // namespace efla
