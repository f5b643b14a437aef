// What the kernels of linear_narrow.cu and linear_wide.cu share: the order in which every output is summed,
// and how it is stored.
//
// cols is cut into blocks of kBlockCols and the blocks into kSlices runs. A run r_i is one ascending chain of
// matrix instructions from zero, 16 neighbouring columns each: m16n8k16 of mma.sync and m64nNk16 of wgmma
// give the same bits then, and so does either order of the operands (tests/kernels/products_test.cc). An
// output is (((r0 + r1) + r2) + r3) + (((r4 + r5) + r6) + r7) in float32. The order depends on cols alone.
#ifndef EFLA_KERNELS_CUDA_LINEAR_CUH_
#define EFLA_KERNELS_CUDA_LINEAR_CUH_

#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/efla_math.h"

namespace efla::cuda {

inline constexpr int kSlices = 8;
inline constexpr int kBlockCols = 64;
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

// For few rows, or a device without wgmma: every 16 rows read the weight again.
cudaError_t LaunchLinearNarrow(const LaunchContext& context, const LinearParams& params);
// For many rows, on compute capability 9.0 (LaunchContext::hopper).
cudaError_t LaunchLinearWide(const LaunchContext& context, const LinearParams& params);

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_LINEAR_CUH_
