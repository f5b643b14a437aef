#include "kernels/cpu/softmax.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/softmax.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h.
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

// Below exp(kLeastExponent) float32 has nothing but zero.
constexpr float kLeastExponent = -104.0f;

LogitRange FindRange(const float* logits, int64_t count) {
  const FloatTag d;
  constexpr int64_t kWidth = kLanes;
  float max = logits[0], poison = 0;  // poison: 0, or NaN once a logit times 0 is NaN
  int64_t i = 0;
  if (count >= kWidth) {
    auto best = hn::LoadU(d, logits);
    auto poisons = hn::Zero(d);
    for (; i + kWidth <= count; i += kWidth) {
      const auto x = hn::LoadU(d, logits + i);
      best = hn::Max(best, x);
      poisons = hn::MulAdd(x, hn::Zero(d), poisons);
    }
    max = hn::GetLane(hn::MaxOfLanes(d, best));
    poison = hn::GetLane(hn::SumOfLanes(d, poisons));
  }
  for (; i < count; ++i) {
    max = std::max(max, logits[i]);
    poison += logits[i] * 0.0f;
  }
  return {max, poison == 0.0f};
}

double SumExp(const float* logits, int64_t count, float max) {
  const FloatTag d;
  constexpr int64_t kWidth = kLanes, kBlock = 64 * kWidth;
  HWY_ALIGN float lanes[kLanes];
  double total = 0;
  int64_t i = 0;
  while (i + kWidth <= count) {
    // At most 64 terms a lane in float32, then double.
    const int64_t end = std::min(i + kBlock, count);
    auto sum = hn::Zero(d);
    for (; i + kWidth <= end; i += kWidth) {
      const auto x = hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, max));
      sum = hn::Add(sum, hn::Exp(d, hn::Max(x, hn::Set(d, kLeastExponent))));
    }
    hn::Store(sum, d, lanes);
    for (const float lane : lanes) total += static_cast<double>(lane);
  }
  const OneTag one;
  for (; i < count; ++i) {
    total += static_cast<double>(
        hn::GetLane(hn::Exp(one, hn::Set(one, std::max(logits[i] - max, kLeastExponent)))));
  }
  return total;
}

void Weights(const float* logits, int64_t count, float max, float temperature, float* weights) {
  ForEachVector(count, [&](auto d, size_t i) HWY_ATTR {
    const auto x = hn::Div(hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, max)), hn::Set(d, temperature));
    hn::StoreU(hn::Exp(d, hn::Max(x, hn::Set(d, kLeastExponent))), d, weights + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla {
namespace {
HWY_EXPORT(FindRange);
HWY_EXPORT(SumExp);
HWY_EXPORT(Weights);
}  // namespace

LogitRange FindLogitRange(const float* logits, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(FindRange)(logits, count);
}

double SumExponentials(const float* logits, int64_t count, float max) {
  return HWY_DYNAMIC_DISPATCH(SumExp)(logits, count, max);
}

void TemperatureWeights(const float* logits, int64_t count, float max, float temperature, float* weights) {
  HWY_DYNAMIC_DISPATCH(Weights)(logits, count, max, temperature, weights);
}

}  // namespace efla
#endif  // HWY_ONCE
