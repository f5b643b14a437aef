// Vector passes over one row of logits.
#ifndef EFLA_KERNELS_CPU_SOFTMAX_H_
#define EFLA_KERNELS_CPU_SOFTMAX_H_

#include <cstdint>

namespace efla {

struct LogitRange {
  float max;
  bool finite;  // no NaN, no infinity in the row
};
LogitRange FindLogitRange(const float* logits, int64_t count);

// Sum of exp(logits[i] - max), the sum in double.
double SumExponentials(const float* logits, int64_t count, float max);

// weights[i] = exp((logits[i] - max) / temperature).
void TemperatureWeights(const float* logits, int64_t count, float max, float temperature, float* weights);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_SOFTMAX_H_
