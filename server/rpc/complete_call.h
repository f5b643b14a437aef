// Complete: a generation in one reply.
#ifndef EFLA_SERVER_RPC_COMPLETE_CALL_H_
#define EFLA_SERVER_RPC_COMPLETE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

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
  absl::StatusOr<GenerationRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }

  const grpc::ByteBuffer& request_;  // gRPC's, like the response, until OnDone
  grpc::ByteBuffer& response_;
  v1::CompleteResponse message_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_COMPLETE_CALL_H_
