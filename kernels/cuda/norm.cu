// y = rms_norm(x; norm) rounded to the act type, and coef = y coef_weight^T from y before rounding.
//
// Shapes: x [*, cols] float32, optionally gathered by row; y act [rows, cols]; coef float32 [rows,
// coef_columns]. A block owns kRows rows; a warp one eighth of each row in the norm, then every eighth
// coefficient column. The rows wait in shared memory in float32 between the two (rows without coefficients
// are read twice instead, from L1/L2). Bytes: cols (4 + 2) a row. The order of every sum is norm.cuh's,
// whatever the number of rows.
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

template <typename Act, int kRows>
__global__ __launch_bounds__(kNormThreads) void NormKernel(NormParams params) {
  EFLA_DYNAMIC_SHARED(shared);
  float* rows = reinterpret_cast<float*>(shared);  // [kRows, cols] when there are coefficients
  __shared__ float parts[kRows][kNormWarps];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x) * kRows;
  const int cols = params.cols;
  GridDependencyWait();
  GridDependencyTrigger();

  const float* x[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    // Rows beyond the end repeat the last one and are not written.
    const int64_t r = row_begin + row < params.num_rows ? row_begin + row : params.num_rows - 1;
    x[row] = params.x + (params.gather != nullptr ? static_cast<int64_t>(params.gather[r]) : r) * cols;
    const float part = PartialSumSquares(x[row], cols, warp, lane);
    if (lane == 0) parts[row][warp] = part;
  }
  __syncthreads();
  Act* y = static_cast<Act*>(params.y);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float scale = NormScale(parts[row], cols, params.eps);
    const bool store = row_begin + row < params.num_rows;
    for (int i = threadIdx.x; i < cols / 4; i += kNormThreads) {
      const float4 v = Normalized(x[row], params.norm, scale, i);
      if (store) {
        const uint2 packed = {PackPair<Act>(v.x, v.y), PackPair<Act>(v.z, v.w)};
        reinterpret_cast<uint2*>(y + (row_begin + row) * cols)[i] = packed;
      }
      if (params.coef_columns > 0) reinterpret_cast<float4*>(rows + static_cast<int64_t>(row) * cols)[i] = v;
    }
  }
  if (params.coef_columns == 0) return;
  __syncthreads();
  for (int column = warp; column < params.coef_columns; column += kNormWarps) {
    float sums[kRows];
    CoefDots<Act, kRows>(rows, cols,
                         static_cast<const Act*>(params.coef_weight) + static_cast<int64_t>(column) * cols,
                         cols, lane, sums);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (lane == 0 && row_begin + row < params.num_rows) {
        params.coef[(row_begin + row) * params.coef_columns + column] = sums[row];
      }
    }
  }
}

template <typename Act, int kRows>
cudaError_t LaunchRows(const LaunchContext& context, const NormParams& params) {
  LaunchShape shape;
  shape.grid = dim3((params.num_rows + kRows - 1) / kRows);
  shape.block = dim3(kNormThreads);
  if (params.coef_columns > 0) shape.shared_bytes = static_cast<size_t>(kRows) * params.cols * sizeof(float);
  return Launch(context, shape, NormKernel<Act, kRows>, params);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const NormParams& params) {
  // Several rows a block save reads of the coefficient weights, once there are blocks enough.
  constexpr int kManyRows = 4;
  constexpr int64_t kMaxRowsBytes = 160 * 1024;
  const bool many =
      params.coef_columns > 0 && params.num_rows >= 2 * kManyRows * context.multiprocessors &&
      static_cast<int64_t>(kManyRows) * params.cols * static_cast<int64_t>(sizeof(float)) <= kMaxRowsBytes;
  return many ? LaunchRows<Act, kManyRows>(context, params) : LaunchRows<Act, 1>(context, params);
}

}  // namespace

cudaError_t LaunchNorm(const LaunchContext& context, const NormParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
