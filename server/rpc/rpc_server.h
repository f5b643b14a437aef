// The gRPC listener: the services, health and reflection.
#ifndef EFLA_SERVER_RPC_RPC_SERVER_H_
#define EFLA_SERVER_RPC_RPC_SERVER_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/listen_address.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/serving_state.h"

namespace efla {

struct RpcServerOptions {
  ListenAddress listen;
  int64_t max_message_bytes = 0;  // of a request
  int max_queue = 0;              // the engine's
  std::chrono::milliseconds slow_reader_timeout{30'000};
};

class RpcServer {
 public:
  // Listens at once and refuses calls with UNAVAILABLE until the state has a model. UNAVAILABLE with the
  // reason when nothing can listen there. The references must outlive the server.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options,
                                                          const ServingState& state, Metrics& metrics,
                                                          const Log& log);
  virtual ~RpcServer() = default;  // cancels what is left

  virtual ListenAddress address() const = 0;  // as bound

  // Tells health watchers what the state says now. Call it whenever the state may have changed; one thread.
  // "" is SERVING as long as the process lives; "efla.v1.Models" from when the model is loaded;
  // "efla.v1.Generation" and "efla.v1.Sessions" while new generations are welcome.
  virtual void UpdateHealth() = 0;

  // Closes the sockets, lets calls end until `patience` has passed, then cancels them. Returns when all are
  // gone.
  virtual void Shutdown(std::chrono::milliseconds patience) = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_RPC_SERVER_H_
