// A weight on the GPU.
#ifndef EFLA_KERNELS_CUDA_CUDA_MATRIX_H_
#define EFLA_KERNELS_CUDA_CUDA_MATRIX_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launchers.h"
#include "kernels/device.h"

namespace efla::cuda {

// Row-major [stored_rows, cols] in the device's act type (an embedding: in its own dtype). kGateUp rows are
// interleaved by kGateUpGroup and padded with zero rows to whole groups.
class CudaMatrix final : public Matrix {
 public:
  // Takes over `memory`, which cudaMalloc gave.
  CudaMatrix(int64_t rows, int64_t cols, int64_t stored_rows, DType dtype, MatrixUse use, int ordinal,
             void* memory)
      : Matrix(rows, cols),
        stored_rows_(stored_rows),
        dtype_(dtype),
        use_(use),
        ordinal_(ordinal),
        memory_(memory) {}
  CudaMatrix(const CudaMatrix&) = delete;
  CudaMatrix& operator=(const CudaMatrix&) = delete;
  ~CudaMatrix() override {
    cudaSetDevice(ordinal_);
    cudaFree(memory_);
  }

  const void* get() const { return memory_; }
  int64_t stored_rows() const { return stored_rows_; }
  DType dtype() const { return dtype_; }
  MatrixUse use() const { return use_; }

 private:
  int64_t stored_rows_;
  DType dtype_;
  MatrixUse use_;
  int ordinal_;
  void* memory_;
};

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_CUDA_MATRIX_H_
