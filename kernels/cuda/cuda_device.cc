#include "kernels/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "kernels/check.h"
#include "kernels/cuda/cuda_matrix.h"
#include "kernels/cuda/cuda_status.h"

namespace efla::cuda {
namespace {

// Numbers of rows that decode steps are padded to; beyond the last, its multiples.
constexpr int kPaddedRows[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256};
// Chunks that inverse_ and scores_ hold beyond those of a step's tokens in one segment: many short prompts
// need more chunks than their tokens would fill.
constexpr int kSpareChunks = 256;
// Prompt rows from which on a step has two lanes; fewer keep the products too small for that.
constexpr int kTwoLaneRows = 4096;
// Shared memory that the fused norm may take for its rows, so that two blocks fit a multiprocessor.
constexpr int64_t kMaxFusedNormBytes = 96 * 1024;
constexpr int64_t kColumnMultiple = 8;  // elements of a 16-byte load

const CudaMatrix& Cuda(const Matrix* matrix) { return *static_cast<const CudaMatrix*>(matrix); }

int64_t GroupedRows(int64_t part_rows) {
  return (part_rows + kGateUpGroup - 1) / kGateUpGroup * (2 * kGateUpGroup);
}

const char* ByteOffset(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* ByteOffset(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// All of it: the GPU can copy it by itself.
bool IsPageLocked(const void* host, size_t bytes) {
  if (bytes == 0) return false;
  for (const void* byte :
       {host, static_cast<const void*>(ByteOffset(host, static_cast<int64_t>(bytes) - 1))}) {
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, byte) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (attributes.type != cudaMemoryTypeHost) return false;
  }
  return true;
}

}  // namespace

std::unique_ptr<CudaDevice> CudaDevice::Create(int ordinal, DeviceStatus& status) {
  int count = 0;
  status = CudaStatus("finding a GPU", cudaGetDeviceCount(&count));
  if (!status.ok()) return nullptr;
  if (ordinal < 0 || ordinal >= count) {
    status = {DeviceStatus::Code::kUnavailable,
              "GPU ordinal is " + std::to_string(ordinal) + "; this machine has " + std::to_string(count)};
    return nullptr;
  }
  cudaDeviceProp properties;
  status = CudaStatus("reading the GPU's properties", cudaGetDeviceProperties(&properties, ordinal));
  if (!status.ok()) return nullptr;
  constexpr int kMinMajor = 8, kHopperMajor = 9;
  if (properties.major < kMinMajor) {
    status = {DeviceStatus::Code::kUnavailable, std::string(properties.name) + " has compute capability " +
                                                    std::to_string(properties.major) + "." +
                                                    std::to_string(properties.minor) + "; the least is 8.0"};
    return nullptr;
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice);
  device->ordinal_ = ordinal;
  device->info_ = {.kind = "cuda",
                   .name = properties.name,
                   .memory_total_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
  device->context_.multiprocessors = properties.multiProcessorCount;
  device->Activate();
  device->context_.hopper = properties.major == kHopperMajor && properties.minor == 0 && HasHopperCode();
  device->context_.overlap = device->context_.hopper;
  status = CudaStatus("creating a stream",
                      cudaStreamCreateWithFlags(&device->context_.stream, cudaStreamNonBlocking));
  if (status.ok()) {
    status =
        CudaStatus("creating an event", cudaEventCreateWithFlags(&device->uploaded_, cudaEventDisableTiming));
  }
  if (status.ok()) {
    status = CudaStatus("creating a stream",
                        cudaStreamCreateWithFlags(&device->transfer_stream_, cudaStreamNonBlocking));
  }
  int least_priority = 0, greatest_priority = 0;
  if (status.ok()) {
    status = CudaStatus("stream priorities",
                        cudaDeviceGetStreamPriorityRange(&least_priority, &greatest_priority));
  }
  if (status.ok()) {
    status = CudaStatus("creating a stream",
                        cudaStreamCreateWithFlags(&device->second_lane_, cudaStreamNonBlocking));
  }
  if (status.ok()) {
    status = CudaStatus("creating a stream", cudaStreamCreateWithPriority(
                                                 &device->scans_, cudaStreamNonBlocking, greatest_priority));
  }
  for (cudaEvent_t* event : {&device->half_free_[0], &device->half_free_[1], &device->forked_,
                             &device->joined_, &device->lane_mixed_, &device->scan_ready_[0],
                             &device->scan_ready_[1], &device->scanned_[0], &device->scanned_[1]}) {
    if (status.ok()) {
      status = CudaStatus("creating an event", cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  if (status.ok()) status = CudaStatus("pinned memory", cudaMallocHost(&device->staging_, kStagingBytes));
  if (status.ok()) status = device->prefill_.Open();
  if (status.ok()) status = CudaStatus("a counter", device->unrepresentable_.Allocate(sizeof(int32_t)));
  // Every kernel of this module, or none: a GPU that the build has no code for is found here.
  if (status.ok()) {
    const cudaError_t error = LaunchFromFloat(device->context_, device->unrepresentable_.get<float>(), 1,
                                              device->unrepresentable_.get());
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      status = {DeviceStatus::Code::kUnavailable,
                std::string(properties.name) + ": this build has no code for compute capability " +
                    std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                    " (CMAKE_CUDA_ARCHITECTURES)"};
    } else {
      status = CudaStatus("launching a kernel", error);
    }
  }
  if (status.ok()) status = CudaStatus("running a kernel", cudaStreamSynchronize(device->context_.stream));
  return status.ok() ? std::move(device) : nullptr;
}

CudaDevice::~CudaDevice() {
  Activate();
  if (context_.stream != nullptr) cudaStreamSynchronize(context_.stream);
  DropRecordings();
  cudaFreeHost(results_);
  cudaFreeHost(top_);
  for (cudaStream_t stream : {second_lane_, scans_}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  for (cudaEvent_t event :
       {uploaded_, forked_, joined_, lane_mixed_, scan_ready_[0], scan_ready_[1], scanned_[0], scanned_[1]}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  for (cudaEvent_t event : half_free_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (transfer_stream_ != nullptr) cudaStreamDestroy(transfer_stream_);
  cudaFreeHost(staging_);
  if (context_.stream != nullptr) cudaStreamDestroy(context_.stream);
}

void CudaDevice::Note(const DeviceStatus& status) {
  if (error_.ok() && !status.ok()) error_ = status;
}

void CudaDevice::Note(const char* what, cudaError_t error) {
  if (error != cudaSuccess) Note(CudaStatus(what, error));
}

int64_t CudaDevice::free_memory_bytes() const {
  Activate();
  size_t free_bytes = 0, total_bytes = 0;
  return cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess ? static_cast<int64_t>(free_bytes) : 0;
}

void* CudaDevice::Allocate(size_t bytes) {
  Activate();
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, std::max<size_t>(bytes, 1));
  if (error == cudaSuccess) return memory;
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // running out of memory breaks nothing: forget it
  } else {
    Note("allocating GPU memory", error);
  }
  return nullptr;
}

void CudaDevice::Free(void* memory) {
  Activate();
  Note("freeing GPU memory", cudaFree(memory));
}

void CudaDevice::CopyToDevice(void* to, const void* from_host, size_t bytes) {
  Activate();
  Note("copying to the GPU", cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, context_.stream));
}

void CudaDevice::CopyToHost(void* to_host, const void* from, size_t bytes) {
  Activate();
  Note("copying from the GPU",
       cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, context_.stream));
}

DeviceStatus CudaDevice::ReadMemory(void* to_host, const void* from, size_t bytes) {
  return Transfer("reading GPU memory", to_host, from, bytes, cudaMemcpyDeviceToHost);
}

DeviceStatus CudaDevice::WriteMemory(void* to, const void* from_host, size_t bytes) {
  return Transfer("writing GPU memory", to, from_host, bytes, cudaMemcpyHostToDevice);
}

void* CudaDevice::AllocateHost(size_t bytes) {
  Activate();
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, std::max<size_t>(bytes, 1), cudaHostAllocPortable) == cudaSuccess) return memory;
  cudaGetLastError();  // the caller has other memory to take
  return nullptr;
}

void CudaDevice::FreeHost(void* memory) {
  Activate();
  cudaFreeHost(memory);
}

// On a stream of its own, so that the step's stream never waits: at once where the host's memory is
// page-locked, else through such memory in pieces: the GPU copies one half of it while the host copies the
// other.
DeviceStatus CudaDevice::Transfer(const char* what, void* to, const void* from, size_t bytes,
                                  cudaMemcpyKind kind) {
  const std::lock_guard lock(transfer_mutex_);
  Activate();
  if (IsPageLocked(kind == cudaMemcpyDeviceToHost ? to : from, bytes)) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, transfer_stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(transfer_stream_);
    return CudaStatus(what, error);
  }
  constexpr size_t kPieceBytes = kStagingBytes / 2;
  const size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  const auto piece_bytes = [&](size_t piece) { return std::min(kPieceBytes, bytes - piece * kPieceBytes); };
  const auto half = [&](size_t piece) { return static_cast<char*>(staging_) + piece % 2 * kPieceBytes; };
  const auto host_copies = [&](size_t piece) {
    if (kind == cudaMemcpyDeviceToHost) {
      std::memcpy(ByteOffset(to, piece * kPieceBytes), half(piece), piece_bytes(piece));
    } else {
      std::memcpy(half(piece), ByteOffset(from, piece * kPieceBytes), piece_bytes(piece));
    }
  };
  const auto gpu_copies = [&](size_t piece) {
    const bool reads = kind == cudaMemcpyDeviceToHost;
    cudaError_t error = cudaMemcpyAsync(reads ? half(piece) : ByteOffset(to, piece * kPieceBytes),
                                        reads ? ByteOffset(from, piece * kPieceBytes) : half(piece),
                                        piece_bytes(piece), kind, transfer_stream_);
    if (error == cudaSuccess) error = cudaEventRecord(half_free_[piece % 2], transfer_stream_);
    return error;
  };
  cudaError_t error = cudaSuccess;
  if (kind == cudaMemcpyDeviceToHost) {
    if (pieces > 0) error = gpu_copies(0);
    for (size_t piece = 0; piece < pieces && error == cudaSuccess; ++piece) {
      if (piece + 1 < pieces) error = gpu_copies(piece + 1);
      if (error == cudaSuccess) error = cudaEventSynchronize(half_free_[piece % 2]);
      if (error == cudaSuccess) host_copies(piece);
    }
  } else {
    for (size_t piece = 0; piece < pieces && error == cudaSuccess; ++piece) {
      if (piece >= 2) error = cudaEventSynchronize(half_free_[piece % 2]);
      if (error != cudaSuccess) break;
      host_copies(piece);
      error = gpu_copies(piece);
    }
    if (error == cudaSuccess) error = cudaStreamSynchronize(transfer_stream_);
  }
  return CudaStatus(what, error);
}

void CudaDevice::CopyOnDevice(void* to, const void* from, size_t bytes) {
  Activate();
  Note("copying on the GPU", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, context_.stream));
}

void CudaDevice::FillBytes(void* memory, uint8_t value, size_t bytes) {
  Activate();
  Note("filling GPU memory", cudaMemsetAsync(memory, value, bytes, context_.stream));
}

void CudaDevice::WriteActivations(void* act, std::span<const float> values) {
  Activate();
  act_fixed_ = true;
  GpuMemory floats;
  Note("activations", floats.Allocate(values.size_bytes()));
  if (!error_.ok()) return;
  CopyToDevice(floats.get(), values.data(), values.size_bytes());
  Note("activations",
       LaunchFromFloat(context_, floats.get<float>(), static_cast<int64_t>(values.size()), act));
  Note("activations", cudaStreamSynchronize(context_.stream));
}

void CudaDevice::ReadActivations(std::span<float> values, const void* act) {
  Activate();
  GpuMemory floats;
  Note("activations", floats.Allocate(values.size_bytes()));
  if (!error_.ok()) return;
  Note("activations", LaunchToFloat(context_, act, static_cast<int64_t>(values.size()), floats.get<float>()));
  CopyToHost(values.data(), floats.get(), values.size_bytes());
  Note("activations", cudaStreamSynchronize(context_.stream));
}

std::unique_ptr<Matrix> CudaDevice::LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                               DeviceStatus& status) {
  Activate();
  EFLA_CHECK(!parts.empty());
  const int64_t cols = parts[0].cols;
  const DType dtype = parts[0].dtype;
  int64_t rows = 0;
  for (const HostMatrix& part : parts) {
    EFLA_CHECK(part.data != nullptr && part.rows > 0 && part.cols == cols && part.dtype == dtype);
    rows += part.rows;
  }
  const bool gate_up = use == MatrixUse::kGateUp, embedding = use == MatrixUse::kEmbedding;
  EFLA_CHECK(!gate_up || (parts.size() == 2 && parts[0].rows == parts[1].rows));
  if (cols <= 0 || (!embedding && cols % kColumnMultiple != 0)) {
    status = {DeviceStatus::Code::kInvalid, "a weight has rows of " + std::to_string(cols) +
                                                " elements; the CUDA device needs a multiple of " +
                                                std::to_string(kColumnMultiple)};
    return nullptr;
  }
  // A BF16 weight beyond F16's range makes the device a BF16 one, as long as nothing is kept in F16 yet.
  const bool may_choose = !embedding && !act_fixed_ && dtype == DType::kBF16;
  if (!embedding) act_fixed_ = true;
  const DType stored = embedding ? dtype : context_.act == ActType::kBF16 ? DType::kBF16 : DType::kF16;
  const int64_t stored_rows = gate_up ? GroupedRows(parts[0].rows) : rows;
  const size_t stored_bytes = static_cast<size_t>(stored_rows) * cols * ByteSize(stored);

  void* memory = nullptr;
  status = CudaStatus("a weight", cudaMalloc(&memory, stored_bytes));
  if (!status.ok()) return nullptr;
  auto matrix = std::make_unique<CudaMatrix>(rows, cols, stored_rows, stored, use, ordinal_, memory);
  if (gate_up) status = CudaStatus("a weight", cudaMemsetAsync(memory, 0, stored_bytes, context_.stream));
  if (status.ok()) {
    status =
        CudaStatus("a weight", cudaMemsetAsync(unrepresentable_.get(), 0, sizeof(int32_t), context_.stream));
  }
  int64_t row = 0;
  for (const HostMatrix& part : parts) {
    if (!status.ok()) return nullptr;
    const size_t part_bytes = static_cast<size_t>(part.rows) * cols * ByteSize(dtype);
    if (!gate_up && dtype == stored) {
      void* to = ByteOffset(memory, row * cols * static_cast<int64_t>(ByteSize(stored)));
      status = CudaStatus(
          "a weight", cudaMemcpyAsync(to, part.data, part_bytes, cudaMemcpyHostToDevice, context_.stream));
    } else {
      if (loading_bytes_ < part_bytes) {
        status = CudaStatus("a weight", cudaStreamSynchronize(context_.stream));
        loading_bytes_ = 0;
        if (status.ok()) status = CudaStatus("a weight", loading_.Allocate(part_bytes));
        if (status.ok()) loading_bytes_ = part_bytes;
      }
      if (status.ok()) {
        status = CudaStatus("a weight", cudaMemcpyAsync(loading_.get(), part.data, part_bytes,
                                                        cudaMemcpyHostToDevice, context_.stream));
      }
      const int64_t group = gate_up ? kGateUpGroup : 0, offset = gate_up ? (row > 0 ? kGateUpGroup : 0) : row;
      if (status.ok()) {
        status =
            CudaStatus("a weight", LaunchConvertRows(context_, loading_.get(), dtype, part.rows, cols, memory,
                                                     group, offset, unrepresentable_.get<int32_t>()));
      }
    }
    row += part.rows;
  }
  int32_t unrepresentable = 0;
  if (status.ok()) {
    status = CudaStatus("a weight", cudaMemcpyAsync(&unrepresentable, unrepresentable_.get(), sizeof(int32_t),
                                                    cudaMemcpyDeviceToHost, context_.stream));
  }
  if (status.ok()) status = CudaStatus("a weight", cudaStreamSynchronize(context_.stream));
  if (status.ok() && unrepresentable > 0 && may_choose) {
    matrix.reset();
    context_.act = ActType::kBF16;
    return LoadMatrix(parts, use, status);
  }
  if (status.ok() && unrepresentable > 0) {
    status = {DeviceStatus::Code::kInvalid,
              std::to_string(unrepresentable) +
                  " values of a weight are beyond 65504, the largest of the F16 that the "
                  "CUDA device keeps weights in"};
  }
  if (!status.ok()) return nullptr;
  return matrix;
}

DeviceStatus CudaDevice::Prepare(const Limits& limits) {
  Activate();
  const MixLayer& mix = limits.mix;
  if (!HeadSizeSupported(mix.d_k, mix.d_v)) {
    return {DeviceStatus::Code::kInvalid,
            "heads of d_k " + std::to_string(mix.d_k) + " and d_v " + std::to_string(mix.d_v) +
                "; the CUDA device has 128 x 128, 64 x 64, 32 x 128 and 64 x 128"};
  }
  if (mix.conv_size > kMaxConvSize) {
    return {DeviceStatus::Code::kInvalid, "conv_size is " + std::to_string(mix.conv_size) +
                                              "; the CUDA device's limit is " + std::to_string(kMaxConvSize)};
  }
  if (limits.max_tokens < 1 || limits.max_tokens < limits.max_decode || limits.max_samples < 0) {
    return {DeviceStatus::Code::kInvalid, "max_tokens is " + std::to_string(limits.max_tokens) +
                                              "; it must be at least 1 and at least max_decode, " +
                                              std::to_string(limits.max_decode)};
  }
  Note("preparing", cudaStreamSynchronize(context_.stream));
  DropRecordings();
  limits_ = limits;
  loading_ = GpuMemory();
  loading_bytes_ = 0;
  const int64_t tokens = limits.max_tokens, samples = std::max(limits.max_samples, 1);
  const int64_t act_bytes = static_cast<int64_t>(kActBytes),
                float_bytes = static_cast<int64_t>(sizeof(float));
  DeviceStatus status =
      CudaStatus("the step's arrays", arrays_.Allocate(limits.max_tokens, std::max(limits.max_decode, 1),
                                                       static_cast<int>(samples), limits.vocab_size));
  const auto allocate = [&status](const char* what, GpuMemory& memory, int64_t bytes) {
    if (status.ok()) status = CudaStatus(what, memory.Allocate(static_cast<size_t>(bytes)));
  };
  allocate("normalised rows", normalized_, std::max(tokens, samples) * limits.hidden_size * act_bytes);
  allocate("gate and up", gate_up_, tokens * GroupedRows(limits.intermediate_size) * act_bytes);
  allocate("logits", logits_, samples * limits.vocab_size * float_bytes);
  reshaped_ = GpuMemory();
  if (!SampleFitsShared(static_cast<int>(limits.vocab_size))) {
    allocate("reshaped logits", reshaped_, samples * limits.vocab_size * float_bytes);
  }
  allocate("mixed values", mixed_, tokens * mix.v_channels() * float_bytes);
  chunk_capacity_ = static_cast<int>((tokens + kChunkTokens - 1) / kChunkTokens) + kSpareChunks;
  if (ChunkFormSupported(mix)) {
    const int64_t squares =
        int64_t{kMaxLanes} * chunk_capacity_ * mix.num_heads * kChunkTokens * kChunkTokens;
    allocate("chunk operands", prepared_inputs_, tokens * mix.conv_channels() * act_bytes);
    allocate("chunk inverses", inverse_, squares * act_bytes);
    allocate("chunk scores", scores_, squares * act_bytes);
  } else {
    allocate("token operands", prepared_inputs_, tokens * mix.conv_channels() * float_bytes);
    allocate("token scalars", scalars_, tokens * mix.num_heads * static_cast<int64_t>(sizeof(float4)));
  }
  cudaFreeHost(std::exchange(results_, nullptr));
  cudaFreeHost(std::exchange(top_, nullptr));
  if (status.ok()) {
    status = CudaStatus("results", cudaHostAlloc(reinterpret_cast<void**>(&results_),
                                                 samples * sizeof(SampleResult), cudaHostAllocMapped));
  }
  if (status.ok()) {
    status = CudaStatus("results",
                        cudaHostAlloc(reinterpret_cast<void**>(&top_),
                                      samples * kMaxTopLogprobs * sizeof(TokenLogprob), cudaHostAllocMapped));
  }
  if (status.ok()) status = TunePrefill(limits);
  prepared_ = status.ok();
  return status;
}

DeviceStatus CudaDevice::TunePrefill(const Limits& limits) {
  if (!act_fixed_) return {};  // no weight yet: at the first product instead
  struct Shape {
    int64_t outputs, cols;
    PrefillOutput output;
  };
  const int64_t hidden = limits.hidden_size;
  for (const Shape& shape : {Shape{limits.mix.proj_columns(), hidden, PrefillOutput::kAct},
                             Shape{hidden, limits.mix.v_channels(), PrefillOutput::kAddFloat},
                             Shape{GroupedRows(limits.intermediate_size), hidden, PrefillOutput::kAct},
                             Shape{hidden, limits.intermediate_size, PrefillOutput::kAddFloat}}) {
    if (shape.outputs == 0 || shape.cols == 0) continue;
    const DeviceStatus status =
        prefill_.Tune(context_, shape.outputs, shape.cols, shape.output, limits.max_tokens);
    if (!status.ok()) return status;
  }
  return {};
}

DeviceStatus CudaDevice::Synchronize() {
  Activate();
  Note("waiting for the GPU", cudaStreamSynchronize(context_.stream));
  return std::exchange(error_, DeviceStatus());
}

StepOutput CudaDevice::output() const {
  const size_t rows = static_cast<size_t>(num_results_);
  return {.rows = {results_, rows}, .top = {top_, static_cast<size_t>(arrays_.num_top())}};
}

DeviceStatus CudaDevice::ReadLogits(std::span<float> logits) {
  Activate();
  const int64_t held = num_results_ * limits_.vocab_size;
  if (held == 0 || static_cast<int64_t>(logits.size()) != held) {
    return {DeviceStatus::Code::kInvalid, "logits of " + std::to_string(logits.size()) +
                                              " floats asked for; " + std::to_string(held) + " are kept"};
  }
  CopyToHost(logits.data(), logits_.get(), logits.size_bytes());
  return Synchronize();
}

// --- Steps ---

void CudaDevice::DropRecordings() {
  for (auto& [size, recording] : recordings_) {
    if (recording.graph != nullptr) cudaGraphExecDestroy(recording.graph);
  }
  recordings_.clear();
}

int CudaDevice::PaddedRows(int rows, int most) const {
  if (rows == 0) return 0;
  const int largest = *std::prev(std::end(kPaddedRows));
  const int padded = rows > largest ? (rows + largest - 1) / largest * largest
                                    : *std::lower_bound(std::begin(kPaddedRows), std::end(kPaddedRows), rows);
  return std::min(padded, most);
}

bool CudaDevice::DoBeginStep(const StepInput& input) {
  Activate();
  EFLA_CHECK(prepared_ && static_cast<int>(input.tokens.size()) <= limits_.max_tokens);
  EFLA_CHECK(input.num_decode <= limits_.max_decode);
  EFLA_CHECK(static_cast<int>(input.samples.size()) <= limits_.max_samples);
  const size_t max_lists = static_cast<size_t>(std::max(limits_.max_decode, 1));
  EFLA_CHECK(input.adjustments.size() <= max_lists * kMaxAdjustments);
  EFLA_CHECK(input.masks.size() <= max_lists * static_cast<size_t>(MaskWords(limits_.vocab_size)));
  num_tokens_ = static_cast<int>(input.tokens.size());
  num_decode_ = input.num_decode;
  num_samples_ = num_results_ = static_cast<int>(input.samples.size());
  num_operations_ = 0;
  began_with_embed_ = ended_with_head_ = false;
  mode_ = StepMode::kLaunch;
  recording_ = nullptr;
  if (input.segments.empty()) {
    const int padded_decode = PaddedRows(num_decode_, limits_.max_decode);
    const int padded_samples = PaddedRows(num_samples_, limits_.max_samples);
    recording_ = &recordings_[{padded_decode, padded_samples}];
    if (recording_->warm) {
      mode_ = recording_->graph != nullptr ? StepMode::kReplay : StepMode::kRecord;
      num_tokens_ = num_decode_ = padded_decode;
      num_samples_ = padded_samples;
    }
  }
  // The staging memory is free once the last step's copy of it has run.
  Note("waiting for the last step's arrays", cudaEventSynchronize(uploaded_));
  PlanLanes(input);
  const auto boundary = std::find_if(segments_.begin(), segments_.end(), [&](const Segment& segment) {
    return lanes_.size() > 1 && segment.token_begin == lanes_[1].row_begin;
  });
  arrays_.Fill(input, segments_, num_decode_, num_samples_, chunk_capacity_,
               static_cast<int>(boundary - segments_.begin()), passes_);
  size_t pass = 0;
  for (Lane& lane : lanes_) {
    lane.pass_begin = static_cast<int>(pass);
    while (pass < passes_.size() &&
           segments_[passes_[pass].segment_begin].token_begin < lane.row_begin + lane.num_rows) {
      ++pass;
    }
    lane.pass_end = static_cast<int>(pass);
  }
  Note("a step's arrays", arrays_.Upload(context_.stream));
  Note("a step's arrays", cudaEventRecord(uploaded_, context_.stream));
  if (mode_ == StepMode::kReplay) {
    Note("replaying a step", cudaGraphLaunch(recording_->graph, context_.stream));
    return false;
  }
  if (mode_ == StepMode::kRecord) {
    Note("recording a step", cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeRelaxed));
  }
  Fork();
  return true;
}

void CudaDevice::PlanLanes(const StepInput& input) {
  segments_.assign(input.segments.begin(), input.segments.end());
  lanes_.clear();
  const int prompt_rows = num_prefill();
  if (prompt_rows == 0) return;
  const int first = num_decode_, end = num_tokens_;
  if (prompt_rows < kTwoLaneRows || !context_.hopper) {
    lanes_.push_back({.context = context_, .row_begin = first, .num_rows = prompt_rows});
    return;
  }
  // The cut: through the segment that holds the middle, on its chunk grid, or at its end.
  const int middle = first + prompt_rows / 2;
  size_t index = 0;
  while (segments_[index].token_begin + segments_[index].num_tokens <= middle) ++index;
  const Segment segment = segments_[index];
  const int before = (middle - segment.token_begin) / kChunkTokens * kChunkTokens;
  const int cut = segment.token_begin + before;
  if (before > 0) {
    segments_[index].num_tokens = before;
    segments_.insert(segments_.begin() + static_cast<std::ptrdiff_t>(index) + 1,
                     {.token_begin = cut,
                      .num_tokens = segment.num_tokens - before,
                      .read_slot = segment.write_slot,
                      .write_slot = segment.write_slot});
    for (size_t i = index + 2; i < segments_.size(); ++i) {
      if (segments_[i].follows >= static_cast<int32_t>(index)) ++segments_[i].follows;
    }
    segments_[index + 1].follows = static_cast<int32_t>(index);
  }
  const auto second = std::find_if(segments_.begin(), segments_.end(),
                                   [&](const Segment& other) { return other.token_begin == cut; });
  const auto first_of_second = static_cast<int32_t>(second - segments_.begin());
  const bool continues = std::any_of(second, segments_.end(), [&](const Segment& other) {
    return other.follows >= 0 && other.follows < first_of_second;
  });
  EFLA_CHECK(cut > first);  // half of so many rows are more than a chunk
  // Without programmatic launches: they follow the stream's last kernel, not the events between the lanes.
  LaunchContext first_context = context_;
  first_context.overlap = false;
  LaunchContext second_context = first_context;
  second_context.stream = second_lane_;
  second_context.lane = 1;
  lanes_.push_back({.context = first_context, .row_begin = first, .num_rows = cut - first});
  lanes_.push_back(
      {.context = second_context, .row_begin = cut, .num_rows = end - cut, .continues = continues});
}

void CudaDevice::Order(cudaStream_t before, cudaEvent_t event, cudaStream_t after) {
  Note("ordering streams", cudaEventRecord(event, before));
  Note("ordering streams", cudaStreamWaitEvent(after, event, 0));
}

void CudaDevice::Fork() {
  if (lanes_.size() > 1) Order(context_.stream, forked_, second_lane_);
}

void CudaDevice::Join() {
  if (lanes_.size() > 1) Order(second_lane_, joined_, context_.stream);
}

void CudaDevice::DoEndStep() {
  Activate();
  const StepMode mode = std::exchange(mode_, StepMode::kIdle);
  if (mode != StepMode::kReplay) Join();
  const bool whole = began_with_embed_ && ended_with_head_;
  if (mode == StepMode::kLaunch && recording_ != nullptr) recording_->warm = whole && error_.ok();
  if (mode != StepMode::kRecord) return;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Note("recording a step", cudaStreamEndCapture(context_.stream, &graph));
  if (graph != nullptr && error_.ok()) Note("recording a step", cudaGraphInstantiate(&executable, graph, 0));
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (executable == nullptr) return;
  Note("running a step", cudaGraphLaunch(executable, context_.stream));
  if (whole && error_.ok()) {
    recording_->graph = executable;
  } else {
    Note("running a step", cudaStreamSynchronize(context_.stream));
    cudaGraphExecDestroy(executable);
    recording_->warm = false;
  }
}

void CudaDevice::DoEmbed(const EmbedArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  began_with_embed_ = num_operations_++ == 0;
  const CudaMatrix& table = Cuda(args.table);
  Note("embedding", LaunchEmbed(context_, arrays_.tokens(), num_tokens_, table.get(), table.dtype(),
                                table.cols(), args.x));
  Fork();
}

void CudaDevice::PrefillProduct(const Lane& lane, const void* y, const CudaMatrix& weight,
                                PrefillOutput output, void* out) {
  // Shapes that Prepare has met are tuned already.
  DeviceStatus status =
      prefill_.Tune(context_, weight.stored_rows(), weight.cols(), output, limits_.max_tokens);
  if (status.ok()) {
    status = prefill_.Run(lane.context, y, lane.num_rows, weight.get(), weight.stored_rows(), weight.cols(),
                          output, out);
  }
  Note(status);
}

void CudaDevice::NormDecodeRows(const char* what, NormParams params) {
  params.num_rows = num_decode_;
  if (num_decode_ > 0) Note(what, LaunchNorm(context_, params));
}

void CudaDevice::NormLane(const char* what, const Lane& lane, NormParams params) {
  params.num_rows = lane.num_rows;
  params.x += static_cast<int64_t>(lane.row_begin) * params.cols;
  params.y = ByteOffset(params.y, static_cast<int64_t>(lane.row_begin) * params.cols * kActBytes);
  if (params.coef != nullptr) params.coef += static_cast<int64_t>(lane.row_begin) * params.coef_columns;
  Note(what, LaunchNormRows(lane.context, params));
}

void CudaDevice::DoProject(const ProjectArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = false;
  const CudaMatrix& weight = Cuda(args.weight);
  const CudaMatrix* coef_weight = args.coef_weight != nullptr ? &Cuda(args.coef_weight) : nullptr;
  const int cols = static_cast<int>(weight.cols());
  EFLA_CHECK(cols <= limits_.hidden_size);
  LinearParams linear = {.y = normalized_.get(),
                         .weight = weight.get(),
                         .num_rows = num_decode_,
                         .outputs = weight.stored_rows(),
                         .cols = cols,
                         .output = LinearOutput::kAct,
                         .out = args.out,
                         .out_columns = weight.rows()};
  const int64_t fused_bytes = static_cast<int64_t>(num_decode_) * cols * static_cast<int64_t>(sizeof(float));
  if (num_prefill() == 0 && num_decode_ <= kMaxFusedNormRows && fused_bytes <= kMaxFusedNormBytes) {
    linear.y = nullptr;
    linear.x = args.x;
    linear.norm = args.norm;
    linear.eps = args.norm_eps;
    if (coef_weight != nullptr) {
      linear.coef_weight = coef_weight->get();
      linear.coef_columns = static_cast<int>(coef_weight->rows());
      linear.coef = args.coef_out;
    }
    Note("projection", LaunchLinear(context_, linear));
    return;
  }
  NormParams norm = {.x = args.x,
                     .norm = args.norm,
                     .eps = args.norm_eps,
                     .num_rows = num_tokens_,
                     .cols = cols,
                     .y = normalized_.get()};
  if (coef_weight != nullptr) {
    norm.coef_weight = coef_weight->get();
    norm.coef_columns = static_cast<int>(coef_weight->rows());
    norm.coef = args.coef_out;
  }
  NormDecodeRows("projection norm", norm);
  if (num_decode_ > 0) Note("projection", LaunchLinear(context_, linear));
  for (const Lane& lane : lanes_) {
    NormLane("projection norm", lane, norm);
    PrefillProduct(
        lane, ByteOffset(normalized_.get(), static_cast<int64_t>(lane.row_begin) * cols * kActBytes), weight,
        PrefillOutput::kAct, ByteOffset(args.out, lane.row_begin * weight.rows() * kActBytes));
  }
}

void CudaDevice::DoMixRecurrent(const MixArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = false;
  const RecurrentParams params = {.mix = {.layer = *args.layer,
                                          .proj = args.proj,
                                          .coef = args.coef,
                                          .state = args.state,
                                          .out = args.out},
                                  .num_rows = num_decode_,
                                  .active_rows = arrays_.num_decode(),
                                  .read_slot = arrays_.read_slot(),
                                  .write_slot = arrays_.write_slot()};
  Note("recurrence", LaunchRecurrent(context_, params));
}

void CudaDevice::DoMixChunk(const MixArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = false;
  const MixLayer& layer = *args.layer;
  const bool tensor_form = ChunkFormSupported(layer);
  EFLA_CHECK(tensor_form == ChunkFormSupported(limits_.mix));
  EFLA_CHECK(layer.conv_channels() <= limits_.mix.conv_channels() &&
             layer.num_heads <= limits_.mix.num_heads);
  for (const Lane& lane : lanes_) MixLane(lane, args, tensor_form);
}

void CudaDevice::MixLane(const Lane& lane, const MixArgs& args, bool tensor_form) {
  const MixLayer& layer = *args.layer;
  const LaunchContext& context = lane.context;
  const int index = context.lane;
  const bool beside = lanes_.size() > 1;  // another lane
  LaunchContext scan_context = context;
  if (beside) scan_context.stream = scans_;
  if (lane.continues) Note("ordering lanes", cudaStreamWaitEvent(context.stream, lane_mixed_, 0));
  const int64_t squares =
      static_cast<int64_t>(index) * chunk_capacity_ * layer.num_heads * kChunkTokens * kChunkTokens;
  for (int i = lane.pass_begin; i < lane.pass_end; ++i) {
    const StepArrays::Pass& pass = passes_[i];
    const ChunkParams params = {
        .mix = {.layer = layer, .proj = args.proj, .coef = args.coef, .state = args.state, .out = args.out},
        .segments = arrays_.segments(),
        .segment_begin = pass.segment_begin,
        .num_segments = pass.num_segments,
        .chunks = arrays_.chunks(),
        .chunk_begin = pass.chunk_begin,
        .num_chunks = pass.num_chunks,
        .first_chunk = arrays_.first_chunk(),
        .prepared = prepared_inputs_.get(),
        .scalars = scalars_.get<float4>(),
        .inverse = ByteOffset(inverse_.get(), squares * kActBytes),
        .scores = ByteOffset(scores_.get(), squares * kActBytes),
        .mixed = mixed_.get<float>()};
    if (tensor_form) {
      Note("chunk operands", LaunchChunkPrepare(context, params));
      Note("chunk inverses", LaunchChunkInverse(context, params));
    } else {
      Note("token operands", LaunchTokenPrepare(context, params));
    }
    if (beside) Order(context.stream, scan_ready_[index], scans_);
    if (tensor_form) {
      Note("chunk recurrence", LaunchChunkScan(scan_context, params));
    } else {
      Note("token recurrence", LaunchTokenScan(scan_context, params));
    }
    if (beside) Order(scans_, scanned_[index], context.stream);
    Note("chunk output", LaunchChunkFinish(context, params));
  }
  if (beside && index == 0) Note("ordering lanes", cudaEventRecord(lane_mixed_, context.stream));
}

void CudaDevice::DoAddLinear(const AddLinearArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = false;
  const CudaMatrix& weight = Cuda(args.weight);
  if (num_decode_ > 0) {
    const LinearParams linear = {.y = args.in,
                                 .weight = weight.get(),
                                 .num_rows = num_decode_,
                                 .outputs = weight.stored_rows(),
                                 .cols = static_cast<int>(weight.cols()),
                                 .output = LinearOutput::kAddFloat,
                                 .out = args.x,
                                 .out_columns = weight.rows()};
    Note("residual product", LaunchLinear(context_, linear));
  }
  for (const Lane& lane : lanes_) {
    PrefillProduct(lane, ByteOffset(args.in, lane.row_begin * weight.cols() * kActBytes), weight,
                   PrefillOutput::kAddFloat, args.x + lane.row_begin * weight.rows());
  }
}

void CudaDevice::DoGatedMlp(const GatedMlpArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = false;
  const CudaMatrix& weight = Cuda(args.gate_up);
  const int64_t columns = weight.rows() / 2;
  const int cols = static_cast<int>(weight.cols());
  EFLA_CHECK(weight.use() == MatrixUse::kGateUp && cols <= limits_.hidden_size);
  LinearParams linear = {.y = normalized_.get(),
                         .weight = weight.get(),
                         .num_rows = num_decode_,
                         .outputs = weight.stored_rows(),
                         .cols = cols,
                         .output = LinearOutput::kGatedSilu,
                         .out = args.out,
                         .out_columns = columns};
  if (num_prefill() == 0 && num_decode_ <= kMaxFusedNormRows &&
      static_cast<int64_t>(num_decode_) * cols * static_cast<int64_t>(sizeof(float)) <= kMaxFusedNormBytes) {
    linear.y = nullptr;
    linear.x = args.x;
    linear.norm = args.norm;
    linear.eps = args.norm_eps;
    Note("gate and up", LaunchLinear(context_, linear));
    return;
  }
  const NormParams norm = {.x = args.x,
                           .norm = args.norm,
                           .eps = args.norm_eps,
                           .num_rows = num_tokens_,
                           .cols = cols,
                           .y = normalized_.get()};
  NormDecodeRows("feed-forward norm", norm);
  if (num_decode_ > 0) Note("gate and up", LaunchLinear(context_, linear));
  for (const Lane& lane : lanes_) {
    EFLA_CHECK(weight.stored_rows() <= GroupedRows(limits_.intermediate_size));
    NormLane("feed-forward norm", lane, norm);
    void* gate_up =
        ByteOffset(gate_up_.get(), (lane.row_begin - num_decode_) * weight.stored_rows() * kActBytes);
    PrefillProduct(lane,
                   ByteOffset(normalized_.get(), static_cast<int64_t>(lane.row_begin) * cols * kActBytes),
                   weight, PrefillOutput::kAct, gate_up);
    Note("gate and up", LaunchGatedSilu(lane.context, gate_up, lane.num_rows, columns,
                                        ByteOffset(args.out, lane.row_begin * columns * kActBytes)));
  }
}

void CudaDevice::DoHead(const HeadArgs& args) {
  if (mode_ == StepMode::kReplay) return;
  Activate();
  ++num_operations_;
  ended_with_head_ = true;
  Join();
  if (num_samples_ == 0) return;
  const CudaMatrix& head = Cuda(args.head);
  EFLA_CHECK(head.cols() <= limits_.hidden_size && head.rows() == limits_.vocab_size);
  Note("head norm", LaunchNorm(context_, {.x = args.x,
                                          .gather = arrays_.sample_token_row(),
                                          .norm = args.norm,
                                          .eps = args.norm_eps,
                                          .num_rows = num_samples_,
                                          .cols = static_cast<int>(head.cols()),
                                          .y = normalized_.get()}));
  Note("head", LaunchLinear(context_, {.y = normalized_.get(),
                                       .weight = head.get(),
                                       .num_rows = num_samples_,
                                       .outputs = head.stored_rows(),
                                       .cols = static_cast<int>(head.cols()),
                                       .output = LinearOutput::kFloat,
                                       .out = logits_.get(),
                                       .out_columns = head.rows()}));
  Note("sampling", LaunchSample(context_, {.logits = logits_.get<float>(),
                                           .num_rows = num_samples_,
                                           .active_rows = arrays_.num_samples(),
                                           .vocab_size = static_cast<int>(head.rows()),
                                           .rows = arrays_.samples(),
                                           .adjustments = arrays_.adjustments(),
                                           .masks = arrays_.masks(),
                                           .reshaped = reshaped_.get<float>(),
                                           .results = results_,
                                           .top_begin = arrays_.top_begin(),
                                           .top = top_}));
}

}  // namespace efla::cuda
