#include "server/rpc/rpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/access.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/fair_lane.h"
#include "server/rpc/generation_service.h"
#include "server/rpc/models_service.h"
#include "server/rpc/session_workers.h"
#include "server/rpc/sessions_service.h"
#include "server/rpc/worker_pool.h"

namespace efla {
namespace {

constexpr int kKeepaliveTimeoutMs = 10'000;
// Clients that ping every 10 s must never be told that they ping too much; timers are not exact.
constexpr int kShortestPingIntervalMs = 9'000;
// Calls that came while a shutdown began are cancelled again and again, until all are gone.
constexpr std::chrono::milliseconds kCancelInterval{20};
// A client that reads again within this long is not cut off, however short --slow-reader-timeout is.
constexpr std::chrono::milliseconds kLeastWritePatience{1000};
constexpr int kMaxStreamsPerConnection = 10'000;
// Requests that wait to be prepared, beyond the engine's queue: preparation is quick, and it is the engine's
// queue that should refuse.
constexpr size_t kPreparationSlack = 1024;
constexpr size_t kMaxPreparationBytes = size_t{256} << 20;
// They wait for stores and copies, and one sync of a disk serves all that wait for it together.
constexpr int kSessionThreads = 16;

// gRPC's and protobuf's own messages go where ours go. Their hooks take no context.
std::atomic<const Log*> library_log = nullptr;
// gRPC's errors are details then: what cannot be listened on is an error of ours, in a line of its own.
std::atomic<bool> listening_begins = false;

void WriteGrpcLog(gpr_log_func_args* args) {
  const Log* log = library_log.load();
  if (log == nullptr) return;
  const LogLevel level = listening_begins                           ? LogLevel::kDebug
                         : args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning
                         : args->severity == GPR_LOG_SEVERITY_INFO  ? LogLevel::kInfo
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

absl::Status Prefixed(const char* what, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrFormat("%s: %s", what, std::string(status.message())));
}

class RpcServerImpl : public RpcServer {
 public:
  RpcServerImpl(const RpcServerOptions& options, ServingState& state, Metrics& metrics, Log& log,
                std::unique_ptr<AuthFile> auth_file, std::unique_ptr<TlsIdentity> tls)
      : state_(state),
        metrics_(metrics),
        log_(log),
        tls_(std::move(tls)),
        access_(state, metrics, log, std::move(auth_file)),
        session_workers_(kSessionThreads, static_cast<size_t>(options.max_queue) + kPreparationSlack),
        constraint_lane_(static_cast<size_t>(options.max_queue) + kPreparationSlack,
                         (static_cast<size_t>(options.max_queue) + kPreparationSlack) / 2),
        workers_(static_cast<size_t>(options.max_queue) + kPreparationSlack,
                 kMaxPreparationBytes + static_cast<size_t>(options.max_message_bytes)),
        write_watch_(std::max(2 * options.slow_reader_timeout, kLeastWritePatience)),
        environment_{state,        access_, workers_, constraint_lane_, session_workers_,
                     write_watch_, metrics, log},
        generation_(environment_),
        models_(environment_),
        sessions_(environment_, options.slow_reader_timeout),
        admin_(environment_, state, log, Features()),
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
    credentials_ = tls_ == nullptr ? grpc::InsecureServerCredentials() : tls_->NewCredentials();
    builder.AddListeningPort(address_.ToString(), credentials_, &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a taken port is an error
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(options.keepalive_time.count()));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    if (options.max_connection_age.count() > 0) {
      builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                                 static_cast<int>(std::min<int64_t>(options.max_connection_age.count(),
                                                                    std::numeric_limits<int>::max())));
    }
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kShortestPingIntervalMs);
    builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
    builder.RegisterService(&generation_);
    builder.RegisterService(&models_);
    builder.RegisterService(&sessions_);
    builder.RegisterService(&admin_);
    listening_begins = true;
    server_ = builder.BuildAndStart();
    listening_begins = false;
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
    health.SetServingStatus(v1::Admin::service_full_name(), true);
  }

  void ReloadFiles(bool force) override {
    access_.Reload(force);
    if (tls_ == nullptr) return;
    const absl::StatusOr<bool> reloaded = tls_->Reload(force);
    if (!reloaded.ok()) {
      metrics_.OnTlsReload(false);
      log_.Error("tls_files_refused", "the files of TLS cannot be used; those before stay in use",
                 {{"message", std::string(reloaded.status().message())}});
    } else if (*reloaded) {
      metrics_.OnTlsReload(true);
      metrics_.SetCertificateEnds(tls_->certificate_ends(), tls_->client_ca_ends());
      log_.Info("tls_files_loaded", "new connections use the new files of TLS");
    }
  }

  void BeginShutdown() override {
    if (closed_.valid()) return;
    closed_ = std::async(std::launch::async, [this] {
      server_->Shutdown();
      server_->Wait();
    });
  }

  void Shutdown(std::chrono::milliseconds patience) override {
    BeginShutdown();
    for (std::chrono::milliseconds wait = patience; closed_.wait_for(wait) != std::future_status::ready;
         wait = kCancelInterval) {
      grpc_server_cancel_all_calls(server_->c_server());
    }
    closed_.get();
    server_ = nullptr;
  }

 private:
  std::vector<std::string> Features() const {
    std::vector<std::string> features;
    if (tls_ != nullptr) features.push_back("tls");
    if (access_.has_auth_file()) features.push_back("auth");
    return features;
  }

  const ServingState& state_;
  Metrics& metrics_;
  const Log& log_;
  const std::unique_ptr<TlsIdentity> tls_;  // null: plain text
  Access access_;
  SessionWorkers session_workers_;  // before the lanes whose jobs go on there
  FairLane constraint_lane_;        // likewise before workers_
  WorkerPool workers_;
  WriteWatch write_watch_;
  RpcEnvironment environment_;
  GenerationService generation_;
  ModelsService models_;
  SessionsService sessions_;
  AdminService admin_;
  ListenAddress address_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::unique_ptr<grpc::Server> server_;  // its calls use all of the above
  std::future<void> closed_;              // when the shutdown is over
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            ServingState& state, Metrics& metrics, Log& log) {
  std::unique_ptr<AuthFile> auth_file;
  if (!options.auth_file.empty()) {
    absl::StatusOr<std::unique_ptr<AuthFile>> opened = AuthFile::Open(options.auth_file);
    if (!opened.ok()) return Prefixed("--auth-file", opened.status());
    auth_file = *std::move(opened);
  }
  std::unique_ptr<TlsIdentity> tls;
  if (!options.tls.certificate.empty()) {
    absl::StatusOr<std::unique_ptr<TlsIdentity>> opened = TlsIdentity::Open(options.tls);
    if (!opened.ok()) return Prefixed("TLS", opened.status());
    tls = *std::move(opened);
    metrics.SetCertificateEnds(tls->certificate_ends(), tls->client_ca_ends());
  }
  auto server =
      std::make_unique<RpcServerImpl>(options, state, metrics, log, std::move(auth_file), std::move(tls));
  if (absl::Status status = server->Listen(options); !status.ok()) return status;
  return server;
}

}  // namespace efla
