// The scalars of one token and head, from the layer's parameters and its row of projected coefficients.
#ifndef EFLA_KERNELS_CPU_COEFFICIENTS_H_
#define EFLA_KERNELS_CPU_COEFFICIENTS_H_

#include "kernels/efla_math.h"
#include "kernels/op_args.h"

namespace efla {

// `coef`: the token's columns b (with use_beta), then a (gated types), one for each head.
inline MixScalars TokenScalars(const MixLayer& layer, const float* coef, int head, float key_norm_squared) {
  float b = layer.allow_neg_eigval ? 2.0f : 1.0f;
  if (layer.use_beta) {
    b = WriteStrength(coef[head], layer.allow_neg_eigval);
    coef += layer.num_heads;
  }
  const float log_a =
      IsGated(layer.type) ? LogForget(coef[head], layer.a_log[head], layer.dt_bias[head]) : 0.0f;
  return EflaScalars(layer.type, key_norm_squared, b, log_a);
}

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_COEFFICIENTS_H_
