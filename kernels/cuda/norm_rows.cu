// What norm.cu computes, for many rows: y = rms_norm(x; norm) rounded to the act type, and coef = y
// coef_weight^T from y before rounding.
//
// Shapes: x float32 [rows, cols], y act [rows, cols], coef float32 [rows, coef_columns]. A warp owns a row
// and keeps it in its registers, lane l the 8-element vectors l, l + 32, ...; every sum is a chain over a
// lane's elements and then WarpSum, whatever the number of rows. Bytes: cols (4 + 2) a row; the coefficients'
// weights come from L1.
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/efla_math.h"

namespace efla::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kVector = 8;
constexpr int kMaxCols = 2048;

template <typename Act, int kVectors>
__global__ __launch_bounds__(kWarps* kWarpLanes) void NormRowsKernel(NormParams params) {
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  const int cols = params.cols, vectors = cols / kVector;
  GridDependencyWait();
  GridDependencyTrigger();
  if (row >= params.num_rows) return;
  const float4* x = reinterpret_cast<const float4*>(params.x + row * cols);
  float values[kVectors][kVector];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * kWarpLanes + lane;
    const bool valid = vector < vectors;
    const float4 low = valid ? x[2 * vector] : float4{}, high = valid ? x[2 * vector + 1] : float4{};
    values[i][0] = low.x, values[i][1] = low.y, values[i][2] = low.z, values[i][3] = low.w;
    values[i][4] = high.x, values[i][5] = high.y, values[i][6] = high.z, values[i][7] = high.w;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum = fmaf(values[i][c], values[i][c], sum);
  }
  const float scale = RmsNormScale(WarpSum(sum) / static_cast<float>(cols), params.eps);
  uint4* y = reinterpret_cast<uint4*>(static_cast<Act*>(params.y) + row * cols);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * kWarpLanes + lane;
    if (vector >= vectors) continue;
    const float4 low = reinterpret_cast<const float4*>(params.norm)[2 * vector];
    const float4 high = reinterpret_cast<const float4*>(params.norm)[2 * vector + 1];
    const float norm[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < kVector; ++c) values[i][c] = values[i][c] * scale * norm[c];
    y[vector] = {PackPair<Act>(values[i][0], values[i][1]), PackPair<Act>(values[i][2], values[i][3]),
                 PackPair<Act>(values[i][4], values[i][5]), PackPair<Act>(values[i][6], values[i][7])};
  }
  for (int column = 0; column < params.coef_columns; ++column) {
    const uint4* weight = reinterpret_cast<const uint4*>(static_cast<const Act*>(params.coef_weight) +
                                                         static_cast<int64_t>(column) * cols);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * kWarpLanes + lane;
      if (vector >= vectors) continue;
      float w[kVector];
      Unpack8<Act>(weight[vector], w);
#pragma unroll
      for (int c = 0; c < kVector; ++c) dot = fmaf(values[i][c], w[c], dot);
    }
    dot = WarpSum(dot);
    if (lane == 0) params.coef[row * params.coef_columns + column] = dot;
  }
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const NormParams& params) {
  constexpr int kFewVectors = 4, kManyVectors = kMaxCols / (kVector * kWarpLanes);
  const LaunchShape shape = {.grid = dim3((params.num_rows + kWarps - 1) / kWarps),
                             .block = dim3(kWarps * kWarpLanes)};
  return params.cols <= kFewVectors * kVector * kWarpLanes
             ? Launch(context, shape, NormRowsKernel<Act, kFewVectors>, params)
             : Launch(context, shape, NormRowsKernel<Act, kManyVectors>, params);
}

}  // namespace

cudaError_t LaunchNormRows(const LaunchContext& context, const NormParams& params) {
  if (params.cols > kMaxCols || params.gather != nullptr) return LaunchNorm(context, params);
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
