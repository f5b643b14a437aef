// The scalars of the recurrence, one definition for host and device:
//
//   S_t = decay (I - erase k k^T) S_{t-1} + write k v^T
//
// Sources: arXiv 2512.12602 equations 12-26, appendix A (guards) and appendix D (the gated form). The four
// model types differ in nothing else but whether the key is L2-normalised. Every exponential goes through
// expm1, and both ends of each coefficient are exact: it tends to b for a vanishing key and to 1 / |k|^2 for
// a large one.
#ifndef EFLA_KERNELS_EFLA_MATH_H_
#define EFLA_KERNELS_EFLA_MATH_H_

#include <math.h>

#include "kernels/types.h"

#if defined(__CUDACC__)
#define EFLA_HOST_DEVICE __host__ __device__
#else
#define EFLA_HOST_DEVICE
#endif

namespace efla {

inline constexpr float kL2NormEps = 1e-6f;         // added to a squared norm before its root
inline constexpr float kLambdaMin = 1e-12f;        // least squared key norm
inline constexpr float kLambdaMax = 3.0e38f;       // greatest: keeps 0 * |k|^2 a number
inline constexpr float kSeriesThreshold = 1e-30f;  // below it (1 - exp(-x)) / x is 1 to the last bit

EFLA_HOST_DEVICE inline float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

EFLA_HOST_DEVICE inline float Silu(float x) { return x / (1.0f + expf(-x)); }

EFLA_HOST_DEVICE inline float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// What a vector of this squared norm is multiplied by to be L2-normalised.
EFLA_HOST_DEVICE inline float L2NormScale(float norm_squared) {
  return 1.0f / sqrtf(norm_squared + kL2NormEps);
}

// What a vector of this mean square is multiplied by in RMSNorm, before the weight.
EFLA_HOST_DEVICE inline float RmsNormScale(float mean_square, float eps) {
  return 1.0f / sqrtf(mean_square + eps);
}

// scale (1 - exp(-x)) / x for x >= 0, with its limit `scale` at 0.
EFLA_HOST_DEVICE inline float OneMinusExpOver(float x, float scale) {
  return x < kSeriesThreshold ? scale : scale * (-expm1f(-x) / x);
}

// b of one head: from its logit, doubled where negative eigenvalues are allowed.
EFLA_HOST_DEVICE inline float WriteStrength(float b_logit, bool allow_neg_eigval) {
  const float b = Sigmoid(b_logit);
  return allow_neg_eigval ? 2.0f * b : b;
}

// log a of one head of a gated type; never positive.
EFLA_HOST_DEVICE inline float LogForget(float a_logit, float a_log, float dt_bias) {
  return -expf(a_log) * Softplus(a_logit + dt_bias);
}

struct MixScalars {
  float log_decay;  // <= 0
  float erase;
  float write;
};

// `key_norm_squared` is of the raw key (the DeltaNet types do not look at it), `b` of WriteStrength (1
// without a b projection), `log_a` of LogForget (only the gated types look at it).
EFLA_HOST_DEVICE inline MixScalars EflaScalars(ModelType type, float key_norm_squared, float b, float log_a) {
  // Written so that a NaN key stays one.
  const float lambda = key_norm_squared < kLambdaMin   ? kLambdaMin
                       : key_norm_squared > kLambdaMax ? kLambdaMax
                                                       : key_norm_squared;
  switch (type) {
    case ModelType::kEfla: {
      const float erase = OneMinusExpOver(b * lambda, b);
      return {0.0f, erase, erase};
    }
    case ModelType::kGatedEfla: {
      const float ab = expf(log_a) * b;
      const float log_decay = expm1f(log_a);  // -(1 - a)
      const float ab_lambda = ab * lambda;
      return {log_decay, OneMinusExpOver(ab_lambda, ab), OneMinusExpOver(ab_lambda - log_decay, b)};
    }
    case ModelType::kDeltaNet:
      return {0.0f, b, b};
    case ModelType::kGatedDeltaNet:
      return {log_a, b, b};
  }
  return {0.0f, 0.0f, 0.0f};
}

}  // namespace efla

#endif  // EFLA_KERNELS_EFLA_MATH_H_
