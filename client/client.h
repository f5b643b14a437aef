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
#include "efla/v1/generation.grpc.pb.h"
#include "efla/v1/models.grpc.pb.h"
#include "efla/v1/sessions.grpc.pb.h"

namespace efla {

struct ClientOptions {
  std::string target = "127.0.0.1:50051";            // HOST:PORT, or any gRPC target
  std::chrono::milliseconds connect_timeout{5'000};  // for Connect
};

struct CallOptions {
  std::optional<std::chrono::milliseconds> timeout;  // from the call's start; then DEADLINE_EXCEEDED
  std::stop_token stop;                              // cancels the call: CANCELLED
};

class Client {
 public:
  explicit Client(ClientOptions options);

  // Waits for the connection; UNAVAILABLE as soon as an attempt has failed or the time is up, CANCELLED on a
  // stop. The calls below connect by themselves too; this one tells a server that is not there from one that
  // refuses.
  absl::Status Connect(std::stop_token stop = {});

  // Streams a continuation. `on_event` runs on this thread for each event; false from it cancels the call. OK
  // once the server has ended the stream after its Finished event.
  absl::Status Generate(const v1::GenerateRequest& request, const CallOptions& options,
                        const std::function<bool(const v1::GenerateResponse&)>& on_event);
  absl::StatusOr<v1::ScoreResponse> Score(const v1::ScoreRequest& request, const CallOptions& options);
  absl::StatusOr<v1::Model> GetModel(const v1::GetModelRequest& request, const CallOptions& options);
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request,
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

  // For callers that drive the callback API themselves.
  v1::Generation::Stub& generation() { return *generation_; }

 private:
  ClientOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::unique_ptr<v1::Sessions::Stub> sessions_;
};

// The code and the message; the details are dropped.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace efla

#endif  // EFLA_CLIENT_CLIENT_H_
