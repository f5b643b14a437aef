// The 16-bit activation types and the small arithmetic that every kernel shares.
#ifndef EFLA_KERNELS_CUDA_ACT_CUH_
#define EFLA_KERNELS_CUDA_ACT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/launchers.h"

namespace efla::cuda {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kMaxHalf = 65504.0f;

__device__ inline float ToFloat(__half value) { return __half2float(value); }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float ToFloat(float value) { return value; }

// Rounds to nearest even. Finite values beyond float16's range become its largest; NaN stays NaN.
template <typename Act>
__device__ Act FromFloat(float value);
template <>
__device__ inline __half FromFloat<__half>(float value) {
  return __float2half_rn(value > kMaxHalf ? kMaxHalf : value < -kMaxHalf ? -kMaxHalf : value);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline float FromFloat<float>(float value) {
  return value;
}

// Two neighbours as one 32-bit word, the first in the low half.
template <typename Act>
__device__ inline uint32_t PackPair(float first, float second) {
  union {
    Act act[2];
    uint32_t word;
  } pair;
  pair.act[0] = FromFloat<Act>(first);
  pair.act[1] = FromFloat<Act>(second);
  return pair.word;
}

template <typename Act>
__device__ inline void UnpackPair(uint32_t word, float& first, float& second) {
  union {
    uint32_t word;
    Act act[2];
  } pair;
  pair.word = word;
  first = ToFloat(pair.act[0]);
  second = ToFloat(pair.act[1]);
}

// The eight elements of a 16-byte load.
template <typename Act>
__device__ inline void Unpack8(const uint4& words, float (&values)[8]) {
  UnpackPair<Act>(words.x, values[0], values[1]);
  UnpackPair<Act>(words.y, values[2], values[3]);
  UnpackPair<Act>(words.z, values[4], values[5]);
  UnpackPair<Act>(words.w, values[6], values[7]);
}

// The sum over a warp, the same bits in every lane.
__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_ACT_CUH_
