// The gRPC listener: the services, health and reflection.
#ifndef EFLA_SERVER_RPC_RPC_SERVER_H_
#define EFLA_SERVER_RPC_RPC_SERVER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/listen_address.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/rpc/tls.h"
#include "server/serving_state.h"

namespace efla {

struct RpcServerOptions {
  ListenAddress listen;
  int64_t max_message_bytes = 0;  // of a request
  int max_queue = 0;              // the engine's
  std::chrono::milliseconds slow_reader_timeout{30'000};
  TlsFiles tls;
  std::string auth_file;  // empty: everybody may call
  // 0: without end. Calls outlive their connection's age.
  std::chrono::milliseconds max_connection_age{0};
  std::chrono::milliseconds keepalive_time{30'000};  // until a silent client is pinged
};

class RpcServer {
 public:
  // Listens at once and refuses calls with UNAVAILABLE until the state has a model. UNAVAILABLE with the
  // reason when nothing can listen there; errors that name the file when the auth file or one of TLS's will
  // not do. The references must outlive the server.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options,
                                                          ServingState& state, Metrics& metrics, Log& log);
  virtual ~RpcServer() = default;  // cancels what is left

  virtual ListenAddress address() const = 0;  // as bound

  // Tells health watchers what the state says now. Call it whenever the state may have changed; one thread.
  // "" is SERVING as long as the process lives; "efla.v1.Models" from when the model is loaded;
  // "efla.v1.Generation" and "efla.v1.Sessions" while new generations are welcome.
  virtual void UpdateHealth() = 0;

  // Takes up files of TLS and the auth file that have changed, or all of them with `force`. Broken ones are
  // logged and counted, and what was there before stays in use. Call it now and then; one thread.
  virtual void ReloadFiles(bool force) = 0;

  // Stops listening and asks clients to go elsewhere; calls go on. Returns at once. Health is not updated
  // any more.
  virtual void BeginShutdown() = 0;
  // The same, then lets calls end until `patience` has passed and cancels what is left. Returns when all
  // are gone.
  virtual void Shutdown(std::chrono::milliseconds patience) = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_RPC_SERVER_H_
