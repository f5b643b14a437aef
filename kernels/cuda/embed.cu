// Embedding lookup: x[t] = table[tokens[t]], float32.
//
// Shapes: tokens [num_tokens], table [vocab, hidden] in its own dtype, x [num_tokens, hidden].
// A block owns one token, a thread one element in kThreads. Bytes: hidden (table + 4) a token.
// First kernel of a step: it is never launched ahead of its predecessor, and only triggers its successor.
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ __launch_bounds__(kThreads) void EmbedKernel(const int32_t* tokens, const T* table,
                                                        int64_t hidden_size, float* x) {
  GridDependencyWait();
  GridDependencyTrigger();
  const int64_t token = tokens[blockIdx.x];
  const T* from = table + token * hidden_size;
  float* to = x + static_cast<int64_t>(blockIdx.x) * hidden_size;
  for (int64_t i = threadIdx.x; i < hidden_size; i += kThreads) to[i] = ToFloat(from[i]);
}

template <typename T>
cudaError_t LaunchTyped(const LaunchContext& context, const int32_t* tokens, int num_tokens,
                        const void* table, int64_t hidden_size, float* x) {
  LaunchContext ordered = context;
  ordered.overlap = false;
  return Launch(ordered, {.grid = dim3(num_tokens), .block = dim3(kThreads)}, EmbedKernel<T>, tokens,
                static_cast<const T*>(table), hidden_size, x);
}

}  // namespace

cudaError_t LaunchEmbed(const LaunchContext& context, const int32_t* tokens, int num_tokens,
                        const void* table, DType table_dtype, int64_t hidden_size, float* x) {
  switch (table_dtype) {
    case DType::kF32:
      return LaunchTyped<float>(context, tokens, num_tokens, table, hidden_size, x);
    case DType::kF16:
      return LaunchTyped<__half>(context, tokens, num_tokens, table, hidden_size, x);
    case DType::kBF16:
      return LaunchTyped<__nv_bfloat16>(context, tokens, num_tokens, table, hidden_size, x);
  }
  return cudaErrorInvalidValue;
}

}  // namespace efla::cuda
