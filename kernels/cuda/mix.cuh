// What the decode and the prefill form of token mixing share: where a head's channels lie, the activation,
// and the scalars of the recurrence.
#ifndef EFLA_KERNELS_CUDA_MIX_CUH_
#define EFLA_KERNELS_CUDA_MIX_CUH_

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/efla_math.h"

namespace efla::cuda {

// The three inputs of a head, in the order of the projection's columns.
enum Part : int { kQuery, kKey, kValue };

// First channel of a head's part among the q|k|v channels.
__device__ inline int64_t PartChannel(const MixLayer& layer, int part, int head) {
  switch (part) {
    case kQuery:
      return static_cast<int64_t>(head) * layer.d_k;
    case kKey:
      return static_cast<int64_t>(layer.num_heads + head) * layer.d_k;
    default:
      return static_cast<int64_t>(2 * layer.num_heads) * layer.d_k + static_cast<int64_t>(head) * layer.d_v;
  }
}

// The convolution weights of a head's part: [channels of the part, conv_size].
__device__ inline const float* PartConv(const MixLayer& layer, int part, int head) {
  const int64_t channel = static_cast<int64_t>(head) * (part == kValue ? layer.d_v : layer.d_k);
  const float* conv = part == kQuery ? layer.q_conv : part == kKey ? layer.k_conv : layer.v_conv;
  return conv + channel * layer.conv_size;
}

__device__ inline float Activate(float x, int part, QkActivation qk_activation) {
  if (part == kValue) return Silu(x);
  switch (qk_activation) {
    case QkActivation::kSilu:
      return Silu(x);
    case QkActivation::kRelu:
      return x < 0.0f ? 0.0f : x;  // NaN stays NaN
    case QkActivation::kElu:
      return x > 0.0f ? x + 1.0f : expf(x);
    case QkActivation::kIdentity:
      return x;
  }
  return x;
}

// Calls launch.operator()<d_k, d_v>() for the layer's head size; the sizes here are the supported ones.
template <typename Launch>
cudaError_t LaunchForHeadSize(int d_k, int d_v, const Launch& launch) {
  if (d_k == 128 && d_v == 128) return launch.template operator()<128, 128>();
  if (d_k == 64 && d_v == 64) return launch.template operator()<64, 64>();
  if (d_k == 32 && d_v == 128) return launch.template operator()<32, 128>();
  if (d_k == 64 && d_v == 128) return launch.template operator()<64, 128>();
  return cudaErrorInvalidValue;
}

// The scalars of one head of one token from its row of coef.
__device__ inline MixScalars HeadScalars(const MixLayer& layer, const float* coef, int head,
                                         float key_norm_squared) {
  float b = layer.allow_neg_eigval ? 2.0f : 1.0f, log_a = 0.0f;
  if (layer.use_beta) b = WriteStrength(coef[head], layer.allow_neg_eigval);
  if (IsGated(layer.type)) {
    log_a = LogForget(coef[(layer.use_beta ? layer.num_heads : 0) + head], layer.a_log[head],
                      layer.dt_bias[head]);
  }
  return EflaScalars(layer.type, key_norm_squared, b, log_a);
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_MIX_CUH_
