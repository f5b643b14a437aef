// What both forms of token mixing do around the recurrence: the short convolution with its activation before
// it, the head's RMSNorm and gate after it.
#if defined(EFLA_KERNELS_CPU_SHORT_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#undef EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#else
#define EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/vector_math-inl.h"
#include "kernels/efla_math.h"
#include "kernels/op_args.h"

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

// to[i] = activation(sum over j of taps[j * tap_stride + i] * input[j][i]), the newest input last. Without
// taps (num_taps 0) the activation alone, of input[0].
HWY_INLINE void ConvToken(const float* const* input, int num_taps, const float* taps, int64_t tap_stride,
                          size_t n, QkActivation activation, float* to) {
  ForEachVector(n, [&](auto d, size_t i) HWY_ATTR {
    auto sum = hn::LoadU(d, input[0] + i);
    if (num_taps > 0) sum = hn::Mul(sum, hn::LoadU(d, taps + i));
    for (int j = 1; j < num_taps; ++j) {
      sum = hn::MulAdd(hn::LoadU(d, taps + j * tap_stride + i), hn::LoadU(d, input[j] + i), sum);
    }
    hn::StoreU(Activate(d, activation, sum), d, to + i);
  });
}

// out = rms_norm(o; weight) * silu(gate); `gate` may be null.
HWY_INLINE void FinishHead(const float* o, const float* weight, float eps, const float* gate, size_t d_v,
                           float* out) {
  const float scale = RmsNormScale(Dot(o, o, d_v) / static_cast<float>(d_v), eps);
  ForEachVector(d_v, [&](auto d, size_t i) HWY_ATTR {
    auto value = hn::Mul(hn::Mul(hn::LoadU(d, o + i), hn::Set(d, scale)), hn::LoadU(d, weight + i));
    if (gate != nullptr) value = hn::Mul(value, VectorSilu(d, hn::LoadU(d, gate + i)));
    hn::StoreU(value, d, out + i);
  });
}

// L2-normalises q and scales it by d_k^-0.5; L2-normalises k for the types that do. Returns |k|^2 of the raw
// key.
HWY_INLINE float NormalizeQueryAndKey(const MixLayer& layer, float* q, float* k) {
  const size_t d_k = layer.d_k;
  ScaleVector(q, L2NormScale(Dot(q, q, d_k)) / sqrtf(static_cast<float>(d_k)), d_k);
  const float key_norm_squared = Dot(k, k, d_k);
  if (NormalizesKey(layer.type)) ScaleVector(k, L2NormScale(key_norm_squared), d_k);
  return key_norm_squared;
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
