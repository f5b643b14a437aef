// Chooses and opens a device.
#ifndef EFLA_KERNELS_CREATE_DEVICE_H_
#define EFLA_KERNELS_CREATE_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace efla {

struct DeviceOptions {
  std::string kind =
      "auto";       // "cpu", "cuda", or "auto": cuda where its module opens and a GPU answers, else cpu
  int threads = 0;  // CPU worker threads; 0: one for each core the process may use
  int ordinal = 0;  // which GPU
};

// NOT_FOUND when the build has no CUDA module, UNAVAILABLE when there is no driver or GPU, INVALID_ARGUMENT
// for an unknown kind.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options);

// kOutOfMemory -> RESOURCE_EXHAUSTED, kUnavailable -> UNAVAILABLE, kInvalid -> INVALID_ARGUMENT, else
// INTERNAL.
absl::Status ToStatus(const DeviceStatus& status);

}  // namespace efla

#endif  // EFLA_KERNELS_CREATE_DEVICE_H_
