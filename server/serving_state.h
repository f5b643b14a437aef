// Whether the server can answer: shared by main, which changes it, and by services and pages, which ask.
#ifndef EFLA_SERVER_SERVING_STATE_H_
#define EFLA_SERVER_SERVING_STATE_H_

#include <atomic>

#include "server/served_model.h"

namespace efla {

// Any thread.
class ServingState {
 public:
  // The model outlives every call that may ask for it.
  void Publish(const ServedModel* model) { model_.store(model); }
  // Null while the model is being loaded.
  const ServedModel* model() const { return model_.load(); }

  void SetHealthy(bool healthy) { healthy_.store(healthy); }
  // The gRPC port takes no connection any more, and never will. Those that are open go on.
  void SetDeaf() { deaf_.store(true); }
  // The two phases of a drain: first balancers are told, while whoever still comes is served; then new
  // generations are refused.
  void SetLeaving() { leaving_.store(true); }
  void SetDraining() { draining_.store(true); }
  // An administrator wants the drain that SIGTERM begins.
  void RequestDrain() { drain_requested_.store(true); }
  bool drain_requested() const { return drain_requested_.load(); }
  bool healthy() const { return healthy_.load(); }
  bool deaf() const { return deaf_.load(); }
  bool leaving() const { return leaving_.load(); }
  bool draining() const { return draining_.load(); }
  // New generations are welcome.
  bool ready() const { return model() != nullptr && healthy() && !deaf() && !leaving() && !draining(); }

 private:
  std::atomic<const ServedModel*> model_{nullptr};
  std::atomic<bool> healthy_{true}, deaf_{false};
  std::atomic<bool> drain_requested_{false}, leaving_{false}, draining_{false};
};

}  // namespace efla

#endif  // EFLA_SERVER_SERVING_STATE_H_
