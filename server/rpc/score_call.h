// Score: log-probabilities of a given text, or of several that follow it.
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
  v1::ScoreResponse Reply(const Usage& usage);

  std::vector<TokenId> prompt_;
  std::vector<std::vector<TokenId>> continuations_;
  int top_logprobs_ = 0;                 // as asked for
  std::vector<FinishedEvent> finished_;  // of the text, or of each continuation
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SCORE_CALL_H_
