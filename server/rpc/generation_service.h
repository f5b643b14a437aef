#ifndef EFLA_SERVER_RPC_GENERATION_SERVICE_H_
#define EFLA_SERVER_RPC_GENERATION_SERVICE_H_

#include "efla/v1/generation.grpc.pb.h"
#include "server/rpc/rpc_environment.h"

namespace efla {

// efla.v1.Generation: one reactor a call, which parses and serialises by itself (wire.h).
class GenerationService
    : public v1::Generation::WithRawCallbackMethod_Generate<v1::Generation::WithRawCallbackMethod_Complete<
          v1::Generation::WithRawCallbackMethod_Score<v1::Generation::Service>>> {
 public:
  explicit GenerationService(RpcEnvironment& environment) : environment_(environment) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Complete(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;

 private:
  RpcEnvironment& environment_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_GENERATION_SERVICE_H_
