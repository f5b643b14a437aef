// Conversions outside the steps: weights as they are loaded, activations for tests. A thread owns one element
// in a grid-wide stride; a row of a matrix goes to row (r / group) * 2 group + offset + r % group, or offset
// + r.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"

namespace efla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

unsigned NumBlocks(int64_t count) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
}

template <typename From, typename To>
__global__ __launch_bounds__(kThreads) void ConvertRowsKernel(const From* from, int64_t rows, int64_t cols,
                                                              To* to, int64_t group, int64_t offset,
                                                              int32_t* unrepresentable) {
  const int64_t count = rows * cols, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    const int64_t row = i / cols, column = i % cols;
    const float value = ToFloat(from[i]);
    const int64_t to_row = group > 0 ? row / group * (2 * group) + offset + row % group : offset + row;
    to[to_row * cols + column] = FromFloat<To>(value);
    if (std::is_same_v<To, __half> && isfinite(value) && fabsf(value) > kMaxHalf)
      atomicAdd(unrepresentable, 1);
  }
}

template <typename From, typename To>
__global__ __launch_bounds__(kThreads) void ConvertKernel(const From* from, int64_t count, To* to) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    to[i] = FromFloat<To>(ToFloat(from[i]));
  }
}

// No conversion kernel waits for a predecessor that it could have overtaken.
LaunchContext Ordered(const LaunchContext& context) {
  LaunchContext ordered = context;
  ordered.overlap = false;
  return ordered;
}

template <typename To>
cudaError_t LaunchRowsTo(const LaunchContext& context, const void* from, DType from_dtype, int64_t rows,
                         int64_t cols, void* to, int64_t group, int64_t offset, int32_t* unrepresentable) {
  const LaunchShape shape = {.grid = dim3(NumBlocks(rows * cols)), .block = dim3(kThreads)};
  To* typed = static_cast<To*>(to);
  switch (from_dtype) {
    case DType::kF32:
      return Launch(Ordered(context), shape, ConvertRowsKernel<float, To>, static_cast<const float*>(from),
                    rows, cols, typed, group, offset, unrepresentable);
    case DType::kF16:
      return Launch(Ordered(context), shape, ConvertRowsKernel<__half, To>, static_cast<const __half*>(from),
                    rows, cols, typed, group, offset, unrepresentable);
    case DType::kBF16:
      return Launch(Ordered(context), shape, ConvertRowsKernel<__nv_bfloat16, To>,
                    static_cast<const __nv_bfloat16*>(from), rows, cols, typed, group, offset,
                    unrepresentable);
  }
  return cudaErrorInvalidValue;
}

template <typename From, typename To>
cudaError_t LaunchConvert(const LaunchContext& context, const void* from, int64_t count, void* to) {
  if (count == 0) return cudaSuccess;
  const LaunchShape shape = {.grid = dim3(NumBlocks(count)), .block = dim3(kThreads)};
  return Launch(Ordered(context), shape, ConvertKernel<From, To>, static_cast<const From*>(from), count,
                static_cast<To*>(to));
}

}  // namespace

cudaError_t LaunchConvertRows(const LaunchContext& context, const void* from, DType from_dtype, int64_t rows,
                              int64_t cols, void* to, int64_t to_row_group, int64_t to_row_offset,
                              int32_t* unrepresentable) {
  return context.act == ActType::kF16
             ? LaunchRowsTo<__half>(context, from, from_dtype, rows, cols, to, to_row_group, to_row_offset,
                                    unrepresentable)
             : LaunchRowsTo<__nv_bfloat16>(context, from, from_dtype, rows, cols, to, to_row_group,
                                           to_row_offset, unrepresentable);
}

cudaError_t LaunchToFloat(const LaunchContext& context, const void* act, int64_t count, float* values) {
  return context.act == ActType::kF16 ? LaunchConvert<__half, float>(context, act, count, values)
                                      : LaunchConvert<__nv_bfloat16, float>(context, act, count, values);
}

cudaError_t LaunchFromFloat(const LaunchContext& context, const float* values, int64_t count, void* act) {
  return context.act == ActType::kF16 ? LaunchConvert<float, __half>(context, values, count, act)
                                      : LaunchConvert<float, __nv_bfloat16>(context, values, count, act);
}

}  // namespace efla::cuda
