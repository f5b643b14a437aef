// A checkpoint's weights on a device, stacked the way the forward pass uses them.
#ifndef EFLA_MODEL_WEIGHTS_H_
#define EFLA_MODEL_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/device.h"
#include "model/checkpoint.h"
#include "model/config.h"

namespace efla {

struct LayerWeights {
  const float* attn_norm = nullptr;      // [hidden]
  std::unique_ptr<Matrix> projection;    // [q|k|v|gate channels, hidden]
  std::unique_ptr<Matrix> coefficients;  // [b|a heads, hidden]; null when the model has neither
  MixLayer mix;                          // shapes, and vectors on the device
  std::unique_ptr<Matrix> o_proj;        // [hidden, heads * d_v]
  const float* mlp_norm = nullptr;       // [hidden]
  std::unique_ptr<Matrix> gate_up;       // [2 * intermediate, hidden]
  std::unique_ptr<Matrix> down_proj;     // [hidden, intermediate]
};

struct Weights {
  std::unique_ptr<Matrix> embeddings;  // [vocab, hidden]; may read the checkpoint's mapping
  std::vector<LayerWeights> layers;
  const float* norm = nullptr;      // [hidden]
  std::unique_ptr<Matrix> lm_head;  // [vocab, hidden]
  Buffer vectors;                   // every norm, convolution, A_log and dt_bias, as float32
  int64_t bytes = 0;                // all of the above, matrices in the checkpoint's dtype
};

// The token mixing of a config: shapes only, pointers null.
MixLayer MixShapes(const ModelConfig& config);

// Copies every weight, telling the checkpoint to drop the pages of what has been copied. INVALID_ARGUMENT
// when tensors of one stacked matrix differ in dtype, RESOURCE_EXHAUSTED when the device lacks the memory.
// The checkpoint must outlive the weights.
absl::StatusOr<Weights> LoadWeights(const Checkpoint& checkpoint, Device& device);

}  // namespace efla

#endif  // EFLA_MODEL_WEIGHTS_H_
