#ifndef EFLA_SERVER_RPC_ADMIN_SERVICE_H_
#define EFLA_SERVER_RPC_ADMIN_SERVICE_H_

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "efla/v1/admin.grpc.pb.h"
#include "server/log.h"
#include "server/rpc/rpc_environment.h"
#include "server/serving_state.h"

namespace efla {

// efla.v1.Admin: answered at once on gRPC's thread, also while the model is being loaded.
class AdminService : public v1::Admin::WithRawCallbackMethod_GetServerInfo<
                         v1::Admin::WithRawCallbackMethod_GetLoad<v1::Admin::WithRawCallbackMethod_Drain<
                             v1::Admin::WithRawCallbackMethod_SetLogLevel<v1::Admin::Service>>>> {
 public:
  // `features`: what ServerInfo names beside what the model brings.
  AdminService(RpcEnvironment& environment, ServingState& state, Log& log, std::vector<std::string> features)
      : environment_(environment), state_(state), log_(log), features_(std::move(features)) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  grpc::ServerUnaryReactor* GetServerInfo(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* GetLoad(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* Drain(Context* context, const Bytes* request, Bytes* response) override;
  grpc::ServerUnaryReactor* SetLogLevel(Context* context, const Bytes* request, Bytes* response) override;

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(RpcMethod method, Context& context, const Bytes& request, Bytes& response,
                                   absl::Status (AdminService::*answer)(const Request&, Response&));
  absl::Status DoGetServerInfo(const v1::GetServerInfoRequest& request, v1::ServerInfo& info);
  absl::Status DoGetLoad(const v1::GetLoadRequest& request, v1::Load& load);
  absl::Status DoDrain(const v1::DrainRequest& request, v1::DrainResponse& response);
  absl::Status DoSetLogLevel(const v1::SetLogLevelRequest& request, v1::SetLogLevelResponse& response);

  RpcEnvironment& environment_;
  ServingState& state_;
  Log& log_;
  const std::vector<std::string> features_;
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_ADMIN_SERVICE_H_
