// The products' entry, and the elementwise kernels beside products that another library computes: silu(gate)
// up, and the comparison of rows that tells which of its algorithms may be used.
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/efla_math.h"

namespace efla::cuda {
namespace {

constexpr int kElementThreads = 256;

// A thread owns one group: 8 gates, 8 ups, 8 results. Bytes: 6 a result.
template <typename Act>
__global__ __launch_bounds__(kElementThreads) void GatedSiluKernel(const Act* gate_up, int64_t groups_per_row,
                                                                   int64_t columns, Act* out) {
  GridDependencyWait();
  GridDependencyTrigger();
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (group >= groups_per_row) return;
  const uint4* from =
      reinterpret_cast<const uint4*>(gate_up + (row * groups_per_row + group) * (2 * kGateUpGroup));
  float gate[kGateUpGroup], up[kGateUpGroup];
  Unpack8<Act>(from[0], gate);
  Unpack8<Act>(from[1], up);
  const int64_t column = group * kGateUpGroup;
  Act* to = out + row * columns + column;
#pragma unroll
  for (int i = 0; i < kGateUpGroup; ++i) gate[i] = Silu(gate[i]) * up[i];
  if (columns % kGateUpGroup == 0) {
    *reinterpret_cast<uint4*>(to) = {PackPair<Act>(gate[0], gate[1]), PackPair<Act>(gate[2], gate[3]),
                                     PackPair<Act>(gate[4], gate[5]), PackPair<Act>(gate[6], gate[7])};
    return;
  }
  for (int i = 0; i < kGateUpGroup && column + i < columns; ++i) to[i] = FromFloat<Act>(gate[i]);
}

__global__ __launch_bounds__(kElementThreads) void CompareRowsKernel(const uint32_t* rows, int64_t row_words,
                                                                     const uint32_t* expected,
                                                                     int expected_rows, int32_t* mismatches) {
  const uint32_t* row = rows + static_cast<int64_t>(blockIdx.x) * row_words;
  expected += static_cast<int64_t>(blockIdx.x % expected_rows) * row_words;
  int32_t different = 0;
  for (int64_t i = threadIdx.x; i < row_words; i += kElementThreads) different += row[i] != expected[i];
  if (different > 0) atomicAdd(mismatches, different);
}

constexpr int kMaxGridY = 65535;

template <typename Act>
cudaError_t LaunchGatedSiluTyped(const LaunchContext& context, const void* gate_up, int num_rows,
                                 int64_t columns, void* out) {
  const int64_t groups = (columns + kGateUpGroup - 1) / kGateUpGroup;
  for (int row = 0; row < num_rows; row += kMaxGridY) {
    const int rows = num_rows - row < kMaxGridY ? num_rows - row : kMaxGridY;
    const LaunchShape shape = {.grid = dim3((groups + kElementThreads - 1) / kElementThreads, rows),
                               .block = dim3(kElementThreads)};
    const cudaError_t error = Launch(context, shape, GatedSiluKernel<Act>,
                                     static_cast<const Act*>(gate_up) + row * groups * (2 * kGateUpGroup),
                                     groups, columns, static_cast<Act*>(out) + row * columns);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchLinear(const LaunchContext& context, const LinearParams& params) {
  return params.num_rows > kTileM && context.hopper ? LaunchLinearWide(context, params)
                                                    : LaunchLinearNarrow(context, params);
}

cudaError_t LaunchGatedSilu(const LaunchContext& context, const void* gate_up, int num_rows, int64_t columns,
                            void* out) {
  return context.act == ActType::kF16
             ? LaunchGatedSiluTyped<__half>(context, gate_up, num_rows, columns, out)
             : LaunchGatedSiluTyped<__nv_bfloat16>(context, gate_up, num_rows, columns, out);
}

cudaError_t LaunchCompareRows(const LaunchContext& context, const void* rows, int num_rows, int64_t row_words,
                              const void* expected, int expected_rows, int32_t* mismatches) {
  LaunchContext ordered = context;
  ordered.overlap = false;
  return Launch(ordered, {.grid = dim3(num_rows), .block = dim3(kElementThreads)}, CompareRowsKernel,
                static_cast<const uint32_t*>(rows), row_words, static_cast<const uint32_t*>(expected),
                expected_rows, mismatches);
}

}  // namespace efla::cuda
