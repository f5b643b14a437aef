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
  void SetDraining() { draining_.store(true); }
  bool healthy() const { return healthy_.load(); }
  bool draining() const { return draining_.load(); }
  // New generations are welcome.
  bool ready() const { return model() != nullptr && healthy() && !draining(); }

 private:
  std::atomic<const ServedModel*> model_{nullptr};
  std::atomic<bool> healthy_{true};
  std::atomic<bool> draining_{false};
};

}  // namespace efla

#endif  // EFLA_SERVER_SERVING_STATE_H_
