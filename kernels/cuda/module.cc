// What the module exports; kernels/device.h documents it.
#include "kernels/cuda/cuda_device.h"

extern "C" {

__attribute__((visibility("default"))) int efla_cuda_module_version() { return efla::kDeviceAbiVersion; }

__attribute__((visibility("default"))) efla::Device* efla_create_cuda_device(int ordinal,
                                                                             efla::DeviceStatus* status) {
  return efla::cuda::CudaDevice::Create(ordinal, *status).release();
}

}  // extern "C"
