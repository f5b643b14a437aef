// Vector loops and functions that several operations share, compiled once for each instruction set.
#if defined(EFLA_KERNELS_CPU_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_VECTOR_MATH_INL_H_
#undef EFLA_KERNELS_CPU_VECTOR_MATH_INL_H_
#else
#define EFLA_KERNELS_CPU_VECTOR_MATH_INL_H_
#endif

#include <cstddef>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/types.h"

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 512 bits, so that arrays of vectors have a known size.
using FloatTag = hn::CappedTag<float, 16>;
using HalfTag = hn::CappedTag<float, 8>;
using OneTag = hn::CappedTag<float, 1>;
inline constexpr size_t kLanes = hn::MaxLanes(FloatTag());

// 32 vector registers (AVX-512) or 16.
inline constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3;

// body(tag, i) over [0, n) in whole vectors, then half vectors, then single floats.
template <class Body>
HWY_INLINE void ForEachVector(size_t n, const Body& body) {
  const FloatTag d;
  const HalfTag half;
  const OneTag one;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(d, i);
  if constexpr (kLanes > 8) {
    for (; i + 8 <= n; i += 8) body(half, i);
  }
  for (; i < n; ++i) body(one, i);
}

// Sum of a[i] b[i], in an order that n alone fixes.
HWY_INLINE float Dot(const float* a, const float* b, size_t n) {
  const FloatTag d;
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  size_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, a + i + kLanes), hn::LoadU(d, b + i + kLanes), sum1);
    sum2 = hn::MulAdd(hn::LoadU(d, a + i + 2 * kLanes), hn::LoadU(d, b + i + 2 * kLanes), sum2);
    sum3 = hn::MulAdd(hn::LoadU(d, a + i + 3 * kLanes), hn::LoadU(d, b + i + 3 * kLanes), sum3);
  }
  for (; i + kLanes <= n; i += kLanes) sum0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum0);
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// x / (1 + exp(-x)). The bound keeps the exponential finite; below it the result is 0 to 36 digits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V VectorSilu(D d, V x) {
  const V exponential = hn::Exp(d, hn::Neg(hn::Max(x, hn::Set(d, -87.0f))));
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), exponential));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Activate(D d, QkActivation activation, V x) {
  const V zero = hn::Zero(d);
  switch (activation) {
    case QkActivation::kSilu:
      return VectorSilu(d, x);
    case QkActivation::kRelu:
      return hn::IfThenElse(hn::Lt(x, zero), zero, x);  // keeps NaN
    case QkActivation::kElu: {                          // elu(x) + 1
      const V negative = hn::Exp(d, hn::Max(x, hn::Set(d, -104.0f)));
      return hn::IfThenElse(hn::Lt(x, zero), negative, hn::Add(x, hn::Set(d, 1.0f)));
    }
    case QkActivation::kIdentity:
      return x;
  }
  return x;
}

// x *= scale.
HWY_INLINE void ScaleVector(float* x, float scale, size_t n) {
  ForEachVector(n, [&](auto d, size_t i)
                       HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, scale)), d, x + i); });
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
