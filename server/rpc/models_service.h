#ifndef EFLA_SERVER_RPC_MODELS_SERVICE_H_
#define EFLA_SERVER_RPC_MODELS_SERVICE_H_

#include "absl/status/status.h"
#include "efla/v1/models.grpc.pb.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/rpc_environment.h"

namespace efla {

// efla.v1.Models: answered by the workers, without the engine.
class ModelsService
    : public v1::Models::WithRawCallbackMethod_GetModel<
          v1::Models::WithRawCallbackMethod_Tokenize<v1::Models::WithRawCallbackMethod_Detokenize<
              v1::Models::WithRawCallbackMethod_RenderChat<v1::Models::Service>>>> {
 public:
  explicit ModelsService(RpcEnvironment& environment) : environment_(environment) {}

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RenderChat(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;

 private:
  // Has a worker parse the request, run `answer` and serialise the reply; counts the call.
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(RpcMethod method, grpc::CallbackServerContext& context,
                                   const grpc::ByteBuffer& request, grpc::ByteBuffer& response,
                                   absl::Status (*answer)(const Request&, const ServedModel&,
                                                          const StillWanted&, Response&));

  RpcEnvironment& environment_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_MODELS_SERVICE_H_
