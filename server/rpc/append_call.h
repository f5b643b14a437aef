// Sessions.Append, and Sessions.Create: what a call adds to a session without generating.
#ifndef EFLA_SERVER_RPC_APPEND_CALL_H_
#define EFLA_SERVER_RPC_APPEND_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <string>
#include <utility>

#include "efla/v1/sessions.pb.h"
#include "server/rpc/engine_call.h"

namespace efla {

// Deletes itself.
class AppendCall : public grpc::ServerUnaryReactor, private EngineCall {
 public:
  // `method` is kAppend or kCreate.
  AppendCall(RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context,
             const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  ~AppendCall() override = default;
  absl::StatusOr<CallRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }
  std::string Record(bool cut) override;
  void OnTurnEnd(const SessionInfo& after, bool computed) override;
  absl::Status OnReplay(const std::string& record, const SessionInfo& now) override;

  v1::AppendResponse Reply() const;
  void Answer(const SessionInfo& session, v1::AppendResponse message);

  const bool creates_;
  const grpc::ByteBuffer& request_;  // gRPC's, like the response, until OnDone
  grpc::ByteBuffer& response_;
  int64_t cached_tokens_ = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_APPEND_CALL_H_
