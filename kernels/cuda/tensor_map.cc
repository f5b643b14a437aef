#include "kernels/cuda/tensor_map.h"

namespace efla::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function; the module is not linked to the driver, so that it opens on machines without one.
Encode FindEncode() {
  constexpr unsigned kSinceCuda12 = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSinceCuda12, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

cudaError_t MakeTensorMap(const void* matrix, ActType act, int64_t rows, int64_t cols, int box_rows,
                          CUtensorMap& map) {
  static const Encode encode = FindEncode();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  constexpr int kRank = 2;
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[kRank - 1] = {static_cast<cuuint64_t>(cols) * 2};
  const cuuint32_t box[kRank] = {kTileCols, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[kRank] = {1, 1};
  const CUresult result = encode(
      &map, act == ActType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
      const_cast<void*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace efla::cuda
