// The products of prefill, by cublasLt.
#ifndef EFLA_KERNELS_CUDA_PREFILL_LINEAR_H_
#define EFLA_KERNELS_CUDA_PREFILL_LINEAR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "kernels/cuda/launchers.h"
#include "kernels/device.h"

namespace efla::cuda {

enum class PrefillOutput : uint8_t {
  kAct,       // act [rows, outputs], written
  kAddFloat,  // float32 [rows, outputs], added to
};

// out = y weight^T for the rows of prompts. The bits of an output row depend on its row of y alone: no
// algorithm splits the sum over cols among blocks, and of the algorithms for different row counts only those
// are used that gave the bits of one reference on this device, checked when a shape is first met. Not
// thread-safe.
class PrefillLinear {
 public:
  PrefillLinear();
  ~PrefillLinear();

  DeviceStatus Open();

  // Chooses and checks the algorithms for a weight's shape, on random data, unless it has been done.
  // `max_rows` is the most that Run will be asked for. Waits for the stream; takes some tens of milliseconds.
  DeviceStatus Tune(const LaunchContext& context, int64_t outputs, int64_t cols, PrefillOutput output,
                    int max_rows);

  // y act [num_rows, cols], weight act [outputs, cols]. The shape has been tuned.
  DeviceStatus Run(const LaunchContext& context, const void* y, int num_rows, const void* weight,
                   int64_t outputs, int64_t cols, PrefillOutput output, void* out);

 private:
  struct Plan;
  struct Handle;
  std::unique_ptr<Handle> handle_;
  std::map<std::tuple<int64_t, int64_t, PrefillOutput>, std::unique_ptr<Plan>> plans_;
};

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_PREFILL_LINEAR_H_
