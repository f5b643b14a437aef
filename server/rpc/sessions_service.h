#ifndef EFLA_SERVER_RPC_SESSIONS_SERVICE_H_
#define EFLA_SERVER_RPC_SESSIONS_SERVICE_H_

#include <chrono>

#include "absl/status/status.h"
#include "efla/v1/sessions.grpc.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/transfer_limit.h"

namespace efla {

// efla.v1.Sessions. What runs the engine is an AppendCall; the rest is answered by the session workers.
class SessionsService
    : public v1::Sessions::WithRawCallbackMethod_Create<v1::Sessions::WithRawCallbackMethod_Get<
          v1::Sessions::WithRawCallbackMethod_List<v1::Sessions::WithRawCallbackMethod_Append<
              v1::Sessions::WithRawCallbackMethod_Fork<v1::Sessions::WithRawCallbackMethod_Mark<
                  v1::Sessions::WithRawCallbackMethod_Rewind<v1::Sessions::WithRawCallbackMethod_Delete<
                      v1::Sessions::WithRawCallbackMethod_Move<v1::Sessions::WithRawCallbackMethod_Export<
                          v1::Sessions::WithRawCallbackMethod_Import<v1::Sessions::Service>>>>>>>>>>> {
 public:
  // A snapshot's transfer that stands still for `transfer_patience` gives way to others.
  SessionsService(RpcEnvironment& environment, std::chrono::milliseconds transfer_patience);

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  grpc::ServerUnaryReactor* Create(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Get(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* List(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Append(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Fork(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Mark(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Rewind(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Delete(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Move(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerWriteReactor<Bytes>* Export(Context* context, const Bytes* request) override;
  grpc::ServerReadReactor<Bytes>* Import(Context* context, Bytes* response) override;

 private:
  // Has a session worker parse the request, run `answer` and serialise the reply; counts the call.
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(RpcMethod method, Context& context, const Bytes& request, Bytes& response,
                                   absl::Status (*answer)(const Request&, const ServedModel&, Response&));

  RpcEnvironment& environment_;
  TransferLimit transfers_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SESSIONS_SERVICE_H_
