#ifndef EFLA_SERVER_RPC_GENERATION_SERVICE_H_
#define EFLA_SERVER_RPC_GENERATION_SERVICE_H_

#include "efla/v1/generation.grpc.pb.h"
#include "server/rpc/rpc_environment.h"

namespace efla {

// efla.v1.Generation: one reactor a call.
class GenerationService : public v1::Generation::CallbackService {
 public:
  explicit GenerationService(RpcEnvironment& environment) : environment_(environment) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Complete(grpc::CallbackServerContext* context, const v1::GenerateRequest* request,
                                     v1::CompleteResponse* response) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context, const v1::ScoreRequest* request,
                                  v1::ScoreResponse* response) override;

 private:
  RpcEnvironment& environment_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_GENERATION_SERVICE_H_
