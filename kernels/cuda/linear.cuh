// What the kernels of linear_narrow.cu and linear_tiled.cu share: the order in which every output is summed,
// and how it is stored.
//
// cols is cut into blocks of 32 and the blocks into kSlices runs. A run is summed by matrix instructions in
// ascending order from zero, 16 columns at a time; within a block, lane t of a quad takes columns 8t to 8t +
// 7 in one 16-byte load: the first four for the block's first matrix instruction, the others for its second.
// An output is ((p0 + p1) + p2) + p3 in float32, where p_i = run 2i + run 2i + 1. The order depends on cols
// alone.
#ifndef EFLA_KERNELS_CUDA_LINEAR_CUH_
#define EFLA_KERNELS_CUDA_LINEAR_CUH_

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/efla_math.h"

namespace efla::cuda {

inline constexpr int kSlices = 8;
inline constexpr int kBlockCols = 32;
inline constexpr int kVectorCols = 8;  // of a 16-byte load
inline constexpr int kTileN = 8;       // weight rows of a matrix instruction
inline constexpr int kTileM = 16;      // rows of a matrix instruction

__host__ __device__ inline int SliceBegin(int blocks, int slice) { return blocks * slice / kSlices; }

template <typename Act>
__device__ inline void StoreOutput(const LinearParams& params, int64_t row, int64_t output, float sum) {
  if (output >= params.out_columns) return;
  const int64_t index = row * params.out_columns + output;
  switch (params.output) {
    case LinearOutput::kAct:
    case LinearOutput::kGatedSilu:  // `sum` is silu(gate) up, `output` its column
      static_cast<Act*>(params.out)[index] = FromFloat<Act>(sum);
      break;
    case LinearOutput::kFloat:
      static_cast<float*>(params.out)[index] = sum;
      break;
    case LinearOutput::kAddFloat:
      static_cast<float*>(params.out)[index] += sum;
      break;
  }
}

// kCount neighbours, 2 or 4, from an `output` that is a multiple of kCount: one access where the row's length
// allows it.
template <typename Act, int kCount>
__device__ inline void StoreOutputs(const LinearParams& params, int64_t row, int64_t output,
                                    const float (&sums)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  if (params.out_columns % kCount != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) StoreOutput<Act>(params, row, output + i, sums[i]);
    return;
  }
  if (output >= params.out_columns) return;
  const int64_t index = row * params.out_columns + output;
  if (params.output == LinearOutput::kAct || params.output == LinearOutput::kGatedSilu) {
    Act* to = static_cast<Act*>(params.out) + index;
    if constexpr (kCount == 2) {
      *reinterpret_cast<uint32_t*>(to) = PackPair<Act>(sums[0], sums[1]);
    } else {
      *reinterpret_cast<uint2*>(to) = {PackPair<Act>(sums[0], sums[1]), PackPair<Act>(sums[2], sums[3])};
    }
    return;
  }
  float* to = static_cast<float*>(params.out) + index;
  const bool add = params.output == LinearOutput::kAddFloat;
  if constexpr (kCount == 2) {
    float2 old = {};
    if (add) old = *reinterpret_cast<const float2*>(to);
    *reinterpret_cast<float2*>(to) =
        add ? float2{old.x + sums[0], old.y + sums[1]} : float2{sums[0], sums[1]};
  } else {
    float4 old = {};
    if (add) old = *reinterpret_cast<const float4*>(to);
    *reinterpret_cast<float4*>(to) =
        add ? float4{old.x + sums[0], old.y + sums[1], old.z + sums[2], old.w + sums[3]}
            : float4{sums[0], sums[1], sums[2], sums[3]};
  }
}

// Up to kTileM rows.
cudaError_t LaunchLinearNarrow(const LaunchContext& context, const LinearParams& params);
// Any number of rows.
cudaError_t LaunchLinearTiled(const LaunchContext& context, const LinearParams& params);

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_LINEAR_CUH_
