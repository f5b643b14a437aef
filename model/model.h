// The forward pass: the layers as a list of named device operations.
#ifndef EFLA_MODEL_MODEL_H_
#define EFLA_MODEL_MODEL_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/state_pool.h"

namespace efla {

struct ModelLimits {
  int max_tokens = 512;   // tokens a step, decode rows and prompt tokens together
  int max_decode = 256;   // decode rows a step
  int max_samples = 512;  // sample rows a step
};

// Weights on a device and the workspaces of one step. Threads: the thread that drives the device.
class Model {
 public:
  // Copies the weights to the device, releasing the checkpoint's pages as it goes.
  static absl::StatusOr<std::unique_ptr<Model>> Load(std::shared_ptr<const Checkpoint> checkpoint,
                                                     Device& device, const ModelLimits& limits);
  ~Model();

  // Enqueues one step: embedding, layers, head and sampling. The input is copied before it returns.
  void Submit(const StepInput& input, const StatePool& states);
  // Waits for the step. INTERNAL or RESOURCE_EXHAUSTED when the device failed.
  absl::StatusOr<StepOutput> Wait();

  const ModelConfig& config() const;
  const ModelLimits& limits() const;
  int64_t weight_bytes() const;  // on the device
  Device& device() const;

 private:
  struct Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace efla

#endif  // EFLA_MODEL_MODEL_H_
