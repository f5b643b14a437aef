#include "server/rpc/generation_service.h"

#include "server/rpc/complete_call.h"
#include "server/rpc/generate_call.h"
#include "server/rpc/score_call.h"

namespace efla {

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::Generate(grpc::CallbackServerContext* context,
                                                                        const grpc::ByteBuffer* request) {
  return new GenerateCall(environment_, *context, *request);
}

grpc::ServerUnaryReactor* GenerationService::Complete(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return new CompleteCall(environment_, *context, *request, *response);
}

grpc::ServerUnaryReactor* GenerationService::Score(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  return new ScoreCall(environment_, *context, *request, *response);
}

}  // namespace efla
