// Complete: a generation in one reply.
#ifndef EFLA_SERVER_RPC_COMPLETE_CALL_H_
#define EFLA_SERVER_RPC_COMPLETE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <string>
#include <utility>

#include "efla/v1/generation.pb.h"
#include "server/rpc/engine_call.h"

namespace efla {

// Deletes itself.
class CompleteCall : public grpc::ServerUnaryReactor, private EngineCall {
 public:
  CompleteCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
               const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  ~CompleteCall() override = default;
  absl::StatusOr<CallRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }
  std::string Record(bool cut) override;
  void FinishWithoutEngine();
  void OnTurnEnd(const SessionInfo& after, bool computed) override;
  absl::Status OnReplay(const std::string& record, const SessionInfo& now) override;

  const grpc::ByteBuffer& request_;  // gRPC's, like the response, until OnDone
  grpc::ByteBuffer& response_;
  v1::CompleteResponse message_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_COMPLETE_CALL_H_
