// RMSNorm of one row and the float32 products behind it, in the order that every kernel which needs them
// keeps: the bits are the same whether a kernel of its own or the product's prologue computes them.
#ifndef EFLA_KERNELS_CUDA_NORM_CUH_
#define EFLA_KERNELS_CUDA_NORM_CUH_

#include "kernels/cuda/act.cuh"
#include "kernels/efla_math.h"

namespace efla::cuda {

inline constexpr int kNormWarps = 8;
inline constexpr int kNormThreads = kNormWarps * kWarpLanes;

// This warp's part of a row's sum of squares: the part-th of kNormWarps runs of 4-element vectors.
__device__ inline float PartialSumSquares(const float* x, int cols, int part, int lane) {
  const int vectors = cols / 4;
  const int end = static_cast<int>(static_cast<int64_t>(vectors) * (part + 1) / kNormWarps);
  float sum = 0.0f;
  for (int i = static_cast<int>(static_cast<int64_t>(vectors) * part / kNormWarps) + lane; i < end;
       i += kWarpLanes) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    sum = fmaf(v.w, v.w, sum);
  }
  return WarpSum(sum);
}

__device__ inline float NormScale(const float* parts, int cols, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kNormWarps; ++part) sum += parts[part];
  return RmsNormScale(sum / static_cast<float>(cols), eps);
}

// Four neighbours of the normalised row.
__device__ inline float4 Normalized(const float* x, const float* norm, float scale, int vector) {
  const float4 v = reinterpret_cast<const float4*>(x)[vector];
  const float4 w = reinterpret_cast<const float4*>(norm)[vector];
  return {v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w};
}

// A coefficient column's products with kRows normalised rows (float32 in shared memory, `stride` floats
// apart), by one warp: lane l takes the 8-element vectors l, l + 32, ... Every lane gets the sums.
template <typename Act, int kRows>
__device__ inline void CoefDots(const float* y, int stride, const Act* weight, int cols, int lane,
                                float (&sums)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) sums[row] = 0.0f;
  for (int i = lane; i < cols / 8; i += kWarpLanes) {
    float w[8];
    Unpack8<Act>(reinterpret_cast<const uint4*>(weight)[i], w);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float4 low = reinterpret_cast<const float4*>(y + static_cast<int64_t>(row) * stride)[2 * i];
      const float4 high = reinterpret_cast<const float4*>(y + static_cast<int64_t>(row) * stride)[2 * i + 1];
      float sum = sums[row];
      sum = fmaf(low.x, w[0], sum);
      sum = fmaf(low.y, w[1], sum);
      sum = fmaf(low.z, w[2], sum);
      sum = fmaf(low.w, w[3], sum);
      sum = fmaf(high.x, w[4], sum);
      sum = fmaf(high.y, w[5], sum);
      sum = fmaf(high.z, w[6], sum);
      sums[row] = fmaf(high.w, w[7], sum);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) sums[row] = WarpSum(sums[row]);
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_NORM_CUH_
