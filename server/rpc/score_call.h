// Score: log-probabilities of a given text.
#ifndef EFLA_SERVER_RPC_SCORE_CALL_H_
#define EFLA_SERVER_RPC_SCORE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <utility>
#include <vector>

#include "efla/v1/generation.pb.h"
#include "server/rpc/engine_call.h"

namespace efla {

// Deletes itself.
class ScoreCall : public grpc::ServerUnaryReactor, private EngineCall {
 public:
  ScoreCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
            const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  ~ScoreCall() override = default;
  absl::StatusOr<CallRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }

  const grpc::ByteBuffer& request_;  // gRPC's, like the response, until OnDone
  grpc::ByteBuffer& response_;
  std::vector<TokenId> prompt_;
  FinishedEvent finished_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SCORE_CALL_H_
