// Calls of an EFLA server for C++ programs: a request in, typed events and an absl::Status out.
//
// A Client is one channel (one HTTP/2 connection, reconnected as needed). Any number of threads may use it at
// once.
#ifndef EFLA_CLIENT_CLIENT_H_
#define EFLA_CLIENT_CLIENT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/admin.grpc.pb.h"
#include "efla/v1/generation.grpc.pb.h"
#include "efla/v1/models.grpc.pb.h"
#include "efla/v1/sessions.grpc.pb.h"

namespace efla {

struct ClientTls {
  std::string ca =
      "";  // PEM: the authorities that a server's certificate may be signed by; empty: the system's
  std::string certificate = "", key = "";  // PEM: the client's own, for servers that ask for one; empty: none
  std::string server_name = "";  // that the server's certificate must be for; empty: the target's host
};

struct ClientOptions {
  std::string target = "127.0.0.1:50051";            // HOST:PORT, or any gRPC target
  std::chrono::milliseconds connect_timeout{5'000};  // for Connect
  std::optional<ClientTls> tls = std::nullopt;       // absent: plain text
  std::string token = "";                            // goes along with every call; visible ASCII; empty: none
  // Without TLS everybody on the way can read the token: unless this is set, Connect and every call to a
  // target that is not on this machine (IsOnThisMachine of target.h) fail with FAILED_PRECONDITION, and
  // nothing is sent.
  bool insecure_token = false;
  // How often a call that the server ended with UNAVAILABLE or CANCELLED before it began is made again, 0 to
  // 4: of the Generation and Models services, and reads of Sessions. When, a server says in its refusal; else
  // after 0.2 s and more. For calls through a balancer, which find another server then.
  int retries = 0;
};

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;  // from the call's start; then DEADLINE_EXCEEDED
  std::stop_token stop;                              // cancels the call: CANCELLED
};

inline constexpr size_t kMaxServiceBytes = 127;  // of a name that CheckHealth asks for

class Client {
 public:
  explicit Client(ClientOptions options);

  const std::string& target() const { return options_.target; }

  // Waits for the connection; UNAVAILABLE as soon as an attempt has failed or the time is up, CANCELLED on a
  // stop. The calls below connect by themselves too; this one tells a server that is not there from one that
  // refuses.
  absl::Status Connect(std::stop_token stop = {});

  // Streams a continuation. `on_event` runs on this thread for each event; false from it cancels the call. OK
  // once the server has ended the stream after its Finished event.
  absl::Status Generate(const v1::GenerateRequest& request, const CallOptions& options,
                        const std::function<bool(const v1::GenerateResponse&)>& on_event);
  // The same in one reply.
  absl::StatusOr<v1::CompleteResponse> Complete(const v1::GenerateRequest& request,
                                                const CallOptions& options);
  absl::StatusOr<v1::ScoreResponse> Score(const v1::ScoreRequest& request, const CallOptions& options);
  absl::StatusOr<v1::Model> GetModel(const v1::GetModelRequest& request, const CallOptions& options);
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request,
                                                const CallOptions& options);
  // What a chat becomes by the model's template.
  absl::StatusOr<v1::RenderChatResponse> RenderChat(const v1::RenderChatRequest& request,
                                                    const CallOptions& options);
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest& request,
                                                    const CallOptions& options);

  absl::StatusOr<v1::Session> CreateSession(const v1::CreateSessionRequest& request,
                                            const CallOptions& options);
  absl::StatusOr<v1::Session> GetSession(const v1::GetSessionRequest& request, const CallOptions& options);
  absl::StatusOr<v1::ListSessionsResponse> ListSessions(const v1::ListSessionsRequest& request,
                                                        const CallOptions& options);
  absl::StatusOr<v1::AppendResponse> Append(const v1::AppendRequest& request, const CallOptions& options);
  absl::StatusOr<v1::ForkResponse> Fork(const v1::ForkRequest& request, const CallOptions& options);
  absl::StatusOr<v1::Session> Mark(const v1::MarkRequest& request, const CallOptions& options);
  absl::StatusOr<v1::Session> Rewind(const v1::RewindRequest& request, const CallOptions& options);
  absl::Status DeleteSession(const v1::DeleteSessionRequest& request, const CallOptions& options);
  absl::StatusOr<v1::Session> MoveSession(const v1::MoveSessionRequest& request, const CallOptions& options);
  // The whole snapshot.
  absl::StatusOr<std::string> Export(const v1::ExportRequest& request, const CallOptions& options);
  // Sends the snapshot in chunks; the server's refusal ends it early.
  absl::StatusOr<v1::Session> Import(const v1::ImportOptions& import, std::string_view snapshot,
                                     const CallOptions& options);
  // The same with chunks, 1 MiB at most, as `next` gives them: none is asked for after an empty one, which
  // ends the snapshot, after an error, which is returned, or after the server's refusal.
  absl::StatusOr<v1::Session> Import(const v1::ImportOptions& import,
                                     const std::function<absl::StatusOr<std::string>()>& next,
                                     const CallOptions& options);

  // OK when the server says that the service ("efla.v1.Generation"; empty: the process) is SERVING,
  // UNAVAILABLE when it says that it is not, NOT_FOUND when it has none of that name.
  absl::Status CheckHealth(const std::string& service, const CallOptions& options);

  absl::StatusOr<v1::ServerInfo> GetServerInfo(const CallOptions& options);
  absl::StatusOr<v1::Load> GetLoad(const CallOptions& options);
  absl::Status Drain(const CallOptions& options);
  // The level before.
  absl::StatusOr<std::string> SetLogLevel(const std::string& level, const CallOptions& options);

  // For callers that drive the callback API themselves.
  v1::Generation::Stub& generation() { return *generation_; }

 private:
  ClientOptions options_;
  absl::Status refusal_;  // that every call gets
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::unique_ptr<v1::Sessions::Stub> sessions_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// The code and the message; what the server says beside them is for the functions below.
absl::Status FromGrpc(const grpc::Status& status);
// When the server asks to come back; nothing where it does not.
std::optional<std::chrono::milliseconds> RetryDelay(const absl::Status& status);
// The upper-case word of an error ("QUEUE_FULL"); empty where there is none.
std::string ErrorReason(const absl::Status& status);

}  // namespace efla

#endif  // EFLA_CLIENT_CLIENT_H_
