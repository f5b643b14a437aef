#include "server/rpc/rpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>
#include <string>

#include "absl/strings/str_format.h"
#include "server/rpc/generation_service.h"
#include "server/rpc/models_service.h"
#include "server/rpc/session_workers.h"
#include "server/rpc/sessions_service.h"
#include "server/rpc/worker_pool.h"

namespace efla {
namespace {

constexpr int kKeepaliveMs = 60'000, kKeepaliveTimeoutMs = 20'000;
// Clients that ping every 10 s must never be told that they ping too much; timers are not exact.
constexpr int kShortestPingIntervalMs = 9'000;
constexpr int kMaxStreamsPerConnection = 10'000;
// Requests that wait to be prepared, beyond the engine's queue: preparation is quick, and it is the engine's
// queue that should refuse.
constexpr size_t kPreparationSlack = 1024;
constexpr size_t kMaxPreparationBytes = size_t{256} << 20;
// They wait for stores and copies, and one sync of a disk serves all that wait for it together.
constexpr int kSessionThreads = 16;

// gRPC's and protobuf's own messages go where ours go. Their hooks take no context.
std::atomic<const Log*> library_log = nullptr;

void WriteGrpcLog(gpr_log_func_args* args) {
  const Log* log = library_log.load();
  if (log == nullptr) return;
  const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                   : LogLevel::kDebug;
  log->Write(level, "grpc", args->message, {{"file", args->file}, {"line", args->line}});
}

void WriteProtobufLog(google::protobuf::LogLevel level, const char* file, int line,
                      const std::string& message) {
  const Log* log = library_log.load();
  if (log == nullptr) return;
  log->Write(level >= google::protobuf::LOGLEVEL_ERROR ? LogLevel::kWarning : LogLevel::kInfo, "protobuf",
             message, {{"file", file}, {"line", line}});
}

class RpcServerImpl : public RpcServer {
 public:
  RpcServerImpl(const RpcServerOptions& options, const ServingState& state, Metrics& metrics, const Log& log)
      : state_(state),
        session_workers_(kSessionThreads, static_cast<size_t>(options.max_queue) + kPreparationSlack),
        workers_(static_cast<size_t>(options.max_queue) + kPreparationSlack,
                 kMaxPreparationBytes + static_cast<size_t>(options.max_message_bytes)),
        environment_{state, workers_, session_workers_, metrics, log},
        generation_(environment_),
        models_(environment_),
        sessions_(environment_, options.slow_reader_timeout),
        address_(options.listen) {
    library_log = &log;
    gpr_set_log_function(WriteGrpcLog);
    google::protobuf::SetLogHandler(WriteProtobufLog);
  }

  ~RpcServerImpl() override {
    if (server_ != nullptr) Shutdown(std::chrono::milliseconds(0));
    library_log = nullptr;
  }

  absl::Status Listen(const RpcServerOptions& options) {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address_.ToString(), grpc::InsecureServerCredentials(), &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a taken port is an error
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kShortestPingIntervalMs);
    builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
    builder.RegisterService(&generation_);
    builder.RegisterService(&models_);
    builder.RegisterService(&sessions_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      server_ = nullptr;
      return absl::UnavailableError(
          absl::StrFormat("cannot listen on %s: %s", address_.ToString(), WhyNotListening(address_)));
    }
    address_.port = port;
    UpdateHealth();
    return absl::OkStatus();
  }

  ListenAddress address() const override { return address_; }

  void UpdateHealth() override {
    grpc::HealthCheckServiceInterface& health = *server_->GetHealthCheckService();
    health.SetServingStatus(v1::Generation::service_full_name(), state_.ready());
    health.SetServingStatus(v1::Sessions::service_full_name(), state_.ready());
    health.SetServingStatus(v1::Models::service_full_name(), state_.model() != nullptr);
  }

  void Shutdown(std::chrono::milliseconds patience) override {
    server_->Shutdown(std::chrono::system_clock::now() + patience);
    server_->Wait();
    server_ = nullptr;
  }

 private:
  const ServingState& state_;
  SessionWorkers session_workers_;  // before workers_, whose jobs go on there
  WorkerPool workers_;
  RpcEnvironment environment_;
  GenerationService generation_;
  ModelsService models_;
  SessionsService sessions_;
  ListenAddress address_;
  std::unique_ptr<grpc::Server> server_;  // last: its calls use all of the above
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            const ServingState& state, Metrics& metrics,
                                                            const Log& log) {
  auto server = std::make_unique<RpcServerImpl>(options, state, metrics, log);
  if (absl::Status status = server->Listen(options); !status.ok()) return status;
  return server;
}

}  // namespace efla
