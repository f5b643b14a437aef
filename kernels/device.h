// The seam between the model and the machine: one device, one stream of work, a closed set of operations.
//
// Plain C++ on purpose (no Abseil): the CUDA device lives in a module that is opened at run time, so that one
// server program runs with and without CUDA. create_device.h turns its errors into absl::Status.
//
// Threads: one thread at a time drives a Device (the engine's), but for ReadMemory and WriteMemory.
// Operations only enqueue; a device error that they meet is kept and reported by the next Synchronize.
//
// Exactness: the bits of a token's results depend on the token's own sequence and on nothing else in the
// step: not on the number of rows, their order, or where a prompt was cut on the chunk grid.
#ifndef EFLA_KERNELS_DEVICE_H_
#define EFLA_KERNELS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/op_args.h"
#include "kernels/types.h"

namespace efla {

// The CUDA module (libefla_cuda.so) exports, with C linkage,
//   int efla_cuda_module_version();                                           must return kDeviceAbiVersion
//   efla::Device* efla_create_cuda_device(int ordinal, efla::DeviceStatus*);  null, and a status, on failure
// Raise the version with every change of this header, op_args.h or types.h.
inline constexpr int kDeviceAbiVersion = 3;

struct DeviceStatus {
  enum class Code { kOk, kOutOfMemory, kUnavailable, kInvalid, kInternal };
  Code code = Code::kOk;
  std::string message;
  bool ok() const { return code == Code::kOk; }
};

// A weight as it lies in a checkpoint: row-major [rows, cols], rows are outputs.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0, cols = 0;
};

enum class MatrixUse {
  kLinear,
  kGateUp,     // exactly two parts of one shape, gate then up; the device may interleave them
  kEmbedding,  // read by row; may keep reading HostMatrix::data, which must outlive the matrix
};

// A weight on the device, in the device's own layout.
class Matrix {
 public:
  virtual ~Matrix() = default;
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

 protected:
  Matrix(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {}

 private:
  int64_t rows_, cols_;
};

struct DeviceInfo {
  std::string kind;  // "cpu" or "cuda"
  std::string name;  // "NVIDIA H200", "AMD EPYC ..., 2 threads, AVX3_ZEN4"
  int64_t memory_total_bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;
  virtual size_t activation_bytes() const = 0;  // size of one act element
  virtual int64_t free_memory_bytes() const = 0;

  // Device memory, 256-byte aligned, contents undefined; null when it cannot be had.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  // Ordered with the operations. The host side may be reused once Synchronize has returned.
  virtual void CopyToDevice(void* to, const void* from_host, size_t bytes) = 0;
  virtual void CopyToHost(void* to_host, const void* from, size_t bytes) = 0;
  virtual void CopyOnDevice(void* to, const void* from, size_t bytes) = 0;
  virtual void FillBytes(void* memory, uint8_t value, size_t bytes) = 0;
  // Copies that any thread may make at any time. They block until they are done, are not ordered with the
  // operations and do not hold them up. No operation that is enqueued or running may write what is read here,
  // nor touch what is written.
  virtual DeviceStatus ReadMemory(void* to_host, const void* from, size_t bytes) = 0;
  virtual DeviceStatus WriteMemory(void* to, const void* from_host, size_t bytes) = 0;
  // Host memory that these two copy without a detour (page-locked), 64-byte aligned; any thread. Null: there
  // is none, or none that would be better than any other. To be freed before the device is gone.
  virtual void* AllocateHost(size_t /*bytes*/) { return nullptr; }
  virtual void FreeHost(void* /*memory*/) {}
  // Activations as float32, for tests and debugging.
  virtual void WriteActivations(void* act, std::span<const float> values) = 0;
  virtual void ReadActivations(std::span<float> values, const void* act) = 0;

  // Stacks the parts by rows into one matrix. All parts have one dtype and one width.
  virtual std::unique_ptr<Matrix> LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                             DeviceStatus& status) = 0;

  // Called once before the first step: the sizes that workspaces and graphs are made for.
  struct Limits {
    int max_tokens = 0;   // tokens a step
    int max_decode = 0;   // decode rows a step
    int max_samples = 0;  // sample rows a step
    int64_t hidden_size = 0, intermediate_size = 0, vocab_size = 0;
    MixLayer mix;  // shapes only; its pointers are null
  };
  virtual DeviceStatus Prepare(const Limits& limits) = 0;

  // A step: BeginStep takes the input (copied before it returns), the operations follow in the model's order,
  // EndStep submits. BeginStep returns false when the whole step is replayed from a recording, and the
  // caller then skips the operations. Operations are recorded by address: between steps of one model, their
  // arguments must not change but for what StepInput carries.
  bool BeginStep(const StepInput& input);
  void Embed(const EmbedArgs& args);
  void Project(const ProjectArgs& args);
  void MixRecurrent(const MixArgs& args);  // the decode rows; nothing when there are none
  void MixChunk(const MixArgs& args);      // the segments; nothing when there are none
  void AddLinear(const AddLinearArgs& args);
  void GatedMlp(const GatedMlpArgs& args);
  void Head(const HeadArgs& args);
  void EndStep();

  // Waits for everything enqueued; the first error since the last call. An error other than kOutOfMemory from
  // a CUDA device is final: the process must be restarted.
  virtual DeviceStatus Synchronize() = 0;
  // The last step's results; call after Synchronize.
  virtual StepOutput output() const = 0;
  // The logits of the last step's sample rows, copied to the host: [rows, vocab]. For tests; may be slow.
  virtual DeviceStatus ReadLogits(std::span<float> logits) = 0;

 private:
  virtual bool DoBeginStep(const StepInput& input) = 0;
  virtual void DoEmbed(const EmbedArgs& args) = 0;
  virtual void DoProject(const ProjectArgs& args) = 0;
  virtual void DoMixRecurrent(const MixArgs& args) = 0;
  virtual void DoMixChunk(const MixArgs& args) = 0;
  virtual void DoAddLinear(const AddLinearArgs& args) = 0;
  virtual void DoGatedMlp(const GatedMlpArgs& args) = 0;
  virtual void DoHead(const HeadArgs& args) = 0;
  virtual void DoEndStep() = 0;

  // What BeginStep was told, for the checks of the operations that follow.
  struct StepShape {
    bool open = false;
    int num_tokens = 0, num_decode = 0, num_segments = 0, num_samples = 0;
    TokenId max_token = 0;                  // greatest token id
    TokenId max_target = -1;                // greatest SampleRow::target, or token of a list
    int64_t num_masks = 0, mask_words = 0;  // masks that rows refer to, up to the last; words of all given
  };
  StepShape step_;
};

}  // namespace efla

#endif  // EFLA_KERNELS_DEVICE_H_
