#ifndef EFLA_SERVER_RPC_MODELS_SERVICE_H_
#define EFLA_SERVER_RPC_MODELS_SERVICE_H_

#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "efla/v1/models.grpc.pb.h"
#include "server/rpc/rpc_environment.h"

namespace efla {

// efla.v1.Models: answered by the workers, without the engine.
class ModelsService : public v1::Models::CallbackService {
 public:
  explicit ModelsService(RpcEnvironment& environment) : environment_(environment) {}

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::Model* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;

 private:
  // Has a worker run `answer`, and counts the call.
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext& context, RpcMethod method, size_t bytes,
                                   std::function<absl::Status(const ServedModel&)> answer);

  RpcEnvironment& environment_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_MODELS_SERVICE_H_
