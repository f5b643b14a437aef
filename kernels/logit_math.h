// What a LogitAdjustment does, one definition for host and device.
#ifndef EFLA_KERNELS_LOGIT_MATH_H_
#define EFLA_KERNELS_LOGIT_MATH_H_

#include <float.h>
#include <math.h>

#include "kernels/efla_math.h"
#include "kernels/op_args.h"

namespace efla {

// Of a finite logit: -infinity where the adjustment bans the token, else finite, whatever overflows on the
// way.
EFLA_HOST_DEVICE inline float AdjustedLogit(float logit, const LogitAdjustment& adjustment) {
  if (isinf(adjustment.bias)) return adjustment.bias;
  const float biased = fminf(fmaxf(logit + adjustment.bias, -FLT_MAX), FLT_MAX);
  const float scaled = biased > 0.0f ? biased / adjustment.scale : biased * adjustment.scale;
  return fminf(fmaxf(scaled - adjustment.penalty, -FLT_MAX), FLT_MAX);
}

}  // namespace efla

#endif  // EFLA_KERNELS_LOGIT_MATH_H_
