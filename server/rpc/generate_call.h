// Generate: a generation as a stream.
#ifndef EFLA_SERVER_RPC_GENERATE_CALL_H_
#define EFLA_SERVER_RPC_GENERATE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <utility>

#include "efla/v1/generation.pb.h"
#include "server/rpc/engine_call.h"

namespace efla {

// One write is under way at most; while it is, the generation merges what comes. Deletes itself.
class GenerateCall : public grpc::ServerWriteReactor<grpc::ByteBuffer>, private EngineCall {
 public:
  GenerateCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
               const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  ~GenerateCall() override = default;
  absl::StatusOr<GenerationRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }

  const grpc::ByteBuffer& request_;  // gRPC's, until OnDone
  v1::GenerateResponse message_;
  grpc::ByteBuffer message_bytes_;  // being written
  std::atomic<bool> writing_ = false;
  std::atomic<bool> reader_gone_ = false;  // a write failed: what comes is dropped until the generation ends
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_GENERATE_CALL_H_
