// Tensor maps: what the copy engine of a multiprocessor has to know of a matrix.
#ifndef EFLA_KERNELS_CUDA_TENSOR_MAP_H_
#define EFLA_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launchers.h"

namespace efla::cuda {

inline constexpr int kTileCols = 64;  // of a box: 128 bytes, the swizzle's width

// Boxes of `box_rows` (at most 256) x kTileCols of a row-major act [rows, cols] in device memory, in the
// 128-byte swizzle (ptx.cuh). `cols` is a multiple of 8 and `matrix` 16-byte aligned. Any thread; no work on
// the device.
cudaError_t MakeTensorMap(const void* matrix, ActType act, int64_t rows, int64_t cols, int box_rows,
                          CUtensorMap& map);

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_TENSOR_MAP_H_
