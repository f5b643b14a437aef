// One way to launch a kernel: grid, block, shared memory, and the two Hopper attributes in use.
#ifndef EFLA_KERNELS_CUDA_LAUNCH_CUH_
#define EFLA_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <utility>

#include "kernels/cuda/launchers.h"

namespace efla::cuda {

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic
  int cluster = 1;          // blocks of a cluster, along x
};

// Dynamic shared memory that every block may have: of the 48 KiB that need no permission, half is left to the
// kernel's static arrays.
inline constexpr size_t kDefaultSharedBytes = 24 * 1024;

template <typename... Params, typename... Args>
cudaError_t Launch(const LaunchContext& context, const LaunchShape& shape, void (*kernel)(Params...),
                   Args&&... args) {
  if (shape.shared_bytes > kDefaultSharedBytes) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = context.stream;
  config.attrs = attributes;
  if (context.overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_LAUNCH_CUH_
