// The CPU device: float32 activations, weights as stored, every operation done when it returns.
#ifndef EFLA_KERNELS_CPU_CPU_DEVICE_H_
#define EFLA_KERNELS_CPU_CPU_DEVICE_H_

#include <memory>

#include "kernels/device.h"

namespace efla {

inline constexpr int kMaxCpuThreads = 1024;

// `threads`: 1 to kMaxCpuThreads, or 0 for one for each core that the process may use. The thread that calls
// the device is one of them.
std::unique_ptr<Device> CreateCpuDevice(int threads);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_CPU_DEVICE_H_
