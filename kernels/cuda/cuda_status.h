// CUDA errors as DeviceStatus.
#ifndef EFLA_KERNELS_CUDA_CUDA_STATUS_H_
#define EFLA_KERNELS_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "kernels/device.h"

namespace efla::cuda {

inline DeviceStatus CudaStatus(const char* what, cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return {};
    case cudaErrorMemoryAllocation:
      cudaGetLastError();  // running out of memory breaks nothing: forget it
      return {DeviceStatus::Code::kOutOfMemory, std::string(what) + ": the GPU has not enough free memory"};
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorSystemDriverMismatch:
      return {DeviceStatus::Code::kUnavailable, std::string(what) + ": " + cudaGetErrorString(error)};
    default:
      return {DeviceStatus::Code::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
  }
}

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_CUDA_STATUS_H_
