#include "kernels/cpu/cpu_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/embedding.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/matrix.h"
#include "kernels/cpu/mix.h"
#include "kernels/cpu/sample.h"
#include "kernels/cpu/step.h"
#include "kernels/cpu/thread_pool.h"

namespace efla {
namespace {

// Logits of at most this many rows are held at once; a step with more is sampled in turns.
constexpr int kLogitRows = 64;
constexpr size_t kScratchPad = 64;  // floats: keeps threads out of each other's cache lines

size_t RoundUp(size_t count, size_t multiple) { return (count + multiple - 1) / multiple * multiple; }

DeviceStatus NoMemory(const std::string& what, size_t bytes) {
  return {DeviceStatus::Code::kOutOfMemory, what + " needs " + std::to_string(bytes) + " bytes; " +
                                                std::to_string(FreeMemoryBytes()) + " are free"};
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int threads) : pool_(threads > 0 ? threads : AvailableCores()) {
    info_.kind = "cpu";
    info_.name = CpuName() + ", " + std::to_string(pool_.num_threads()) +
                 (pool_.num_threads() == 1 ? " thread, " : " threads, ") + VectorTargetName();
    info_.memory_total_bytes = TotalMemoryBytes();
  }

  const DeviceInfo& info() const override { return info_; }
  size_t activation_bytes() const override { return sizeof(float); }
  int64_t free_memory_bytes() const override { return FreeMemoryBytes(); }

  void* Allocate(size_t bytes) override { return AllocateMemory(bytes); }
  void Free(void* memory) override { std::free(memory); }
  void CopyToDevice(void* to, const void* from_host, size_t bytes) override { Copy(to, from_host, bytes); }
  void CopyToHost(void* to_host, const void* from, size_t bytes) override { Copy(to_host, from, bytes); }
  void CopyOnDevice(void* to, const void* from, size_t bytes) override { Copy(to, from, bytes); }
  void FillBytes(void* memory, uint8_t value, size_t bytes) override {
    if (bytes > 0) std::memset(memory, value, bytes);
  }
  DeviceStatus ReadMemory(void* to_host, const void* from, size_t bytes) override {
    Copy(to_host, from, bytes);
    return {};
  }
  DeviceStatus WriteMemory(void* to, const void* from_host, size_t bytes) override {
    Copy(to, from_host, bytes);
    return {};
  }
  void WriteActivations(void* act, std::span<const float> values) override {
    Copy(act, values.data(), values.size_bytes());
  }
  void ReadActivations(std::span<float> values, const void* act) override {
    Copy(values.data(), act, values.size_bytes());
  }

  std::unique_ptr<Matrix> LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                     DeviceStatus& status) override;
  DeviceStatus Prepare(const Limits& limits) override;

  DeviceStatus Synchronize() override { return {}; }
  StepOutput output() const override { return {results_, top_}; }
  DeviceStatus ReadLogits(std::span<float> logits) override;

 private:
  static void Copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }
  static const PackedMatrix& Packed(const Matrix* matrix) {
    return static_cast<const PackedMatrix&>(*matrix);
  }

  bool DoBeginStep(const StepInput& input) override;
  void DoEmbed(const EmbedArgs& args) override;
  void DoProject(const ProjectArgs& args) override;
  void DoMixRecurrent(const MixArgs& args) override {
    MixRecurrentRows(step_input_, args, Workspace(args), pool_);
  }
  void DoMixChunk(const MixArgs& args) override {
    MixChunkSegments(step_input_, args, Workspace(args), pool_);
  }
  void DoAddLinear(const AddLinearArgs& args) override;
  void DoGatedMlp(const GatedMlpArgs& args) override;
  void DoHead(const HeadArgs& args) override;
  void DoEndStep() override {}

  MixWorkspace Workspace(const MixArgs& args);
  DrawShape ShapeOf(const SampleRow& row) const;

  DeviceInfo info_;
  ThreadPool pool_;

  // Made by Prepare.
  Limits limits_;
  PackedRows rows_;
  MemoryBlock<float> taps_;
  MemoryBlock<float> mix_scratch_;
  size_t mix_scratch_stride_ = 0;
  MemoryBlock<float> logits_;           // [kLogitRows or max_samples, vocab]
  MemoryBlock<float> sample_weights_;   // [threads, vocab]
  MemoryBlock<TokenId> sample_order_;   // [threads, vocab]
  MemoryBlock<float> sample_reshaped_;  // [threads, vocab]

  // Of the current step.
  Step step_input_;
  std::vector<int32_t> sample_token_rows_;
  std::vector<SampleResult> results_;
  std::vector<TokenLogprob> top_;
  int64_t num_logit_rows_ = 0;  // rows that logits_ holds of the last step; 0 when it kept none
};

std::unique_ptr<Matrix> CpuDevice::LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                              DeviceStatus& status) {
  status = {};
  if (use == MatrixUse::kEmbedding) {
    EFLA_CHECK(parts.size() == 1 && parts[0].data != nullptr);
    return std::make_unique<RowMatrix>(parts[0]);
  }
  std::unique_ptr<Matrix> matrix = PackedMatrix::Pack(parts, use, pool_);
  if (matrix == nullptr) {
    size_t bytes = 0;
    for (const HostMatrix& part : parts) bytes += part.rows * part.cols * ByteSize(part.dtype);
    status = NoMemory("a weight of width " + std::to_string(parts[0].cols), bytes);
  }
  return matrix;
}

DeviceStatus CpuDevice::Prepare(const Limits& limits) {
  EFLA_CHECK(limits.max_tokens > 0 && limits.max_decode >= 0 && limits.max_samples >= 0);
  EFLA_CHECK(limits.hidden_size > 0 && limits.intermediate_size > 0 && limits.vocab_size > 0);
  if (limits.mix.conv_size > kMaxConvSize) {
    return {DeviceStatus::Code::kInvalid, "conv_size is " + std::to_string(limits.mix.conv_size) +
                                              "; the CPU device takes at most " +
                                              std::to_string(kMaxConvSize)};
  }
  limits_ = limits;
  const size_t threads = pool_.num_threads(), vocab = limits.vocab_size;
  const int64_t widest =
      std::max({limits.hidden_size, limits.intermediate_size, static_cast<int64_t>(limits.mix.v_channels())});
  const int64_t max_rows = std::max(limits.max_tokens, std::min(limits.max_samples, kLogitRows));
  const size_t logit_floats = std::min(limits.max_samples, kLogitRows) * vocab;
  mix_scratch_stride_ =
      RoundUp(std::max(RecurrentScratchFloats(limits.mix), ChunkScratchFloats(limits.mix)), 16) + kScratchPad;
  const size_t tap_floats = static_cast<size_t>(limits.mix.conv_size) * limits.mix.conv_channels();
  taps_ = AllocateBlock<float>(tap_floats);
  mix_scratch_ = AllocateBlock<float>(threads * mix_scratch_stride_);
  logits_ = AllocateBlock<float>(logit_floats);
  sample_weights_ = AllocateBlock<float>(threads * vocab);
  sample_order_ = AllocateBlock<TokenId>(threads * vocab);
  sample_reshaped_ = AllocateBlock<float>(threads * vocab);
  const bool reserved = rows_.Reserve(max_rows, widest);
  if (!reserved || taps_ == nullptr || mix_scratch_ == nullptr || logits_ == nullptr ||
      sample_weights_ == nullptr || sample_order_ == nullptr || sample_reshaped_ == nullptr) {
    return NoMemory("the CPU device's workspace",
                    sizeof(float) * (max_rows * widest + tap_floats + logit_floats +
                                     threads * (mix_scratch_stride_ + 3 * vocab)));
  }
  std::fill_n(mix_scratch_.get(), threads * mix_scratch_stride_, 0.0f);
  results_.reserve(limits.max_samples);
  top_.reserve(static_cast<size_t>(limits.max_samples) * kMaxTopLogprobs);
  return {};
}

bool CpuDevice::DoBeginStep(const StepInput& input) {
  EFLA_CHECK(static_cast<int>(input.tokens.size()) <= limits_.max_tokens);
  EFLA_CHECK(input.num_decode <= limits_.max_decode);
  EFLA_CHECK(static_cast<int>(input.samples.size()) <= limits_.max_samples);
  const size_t max_lists = static_cast<size_t>(std::max(limits_.max_decode, 1));
  EFLA_CHECK(input.adjustments.size() <= max_lists * kMaxAdjustments);
  EFLA_CHECK(input.masks.size() <= max_lists * static_cast<size_t>(MaskWords(limits_.vocab_size)));
  step_input_.tokens.assign(input.tokens.begin(), input.tokens.end());
  step_input_.decode_read_slot.assign(input.decode_read_slot.begin(), input.decode_read_slot.end());
  step_input_.decode_write_slot.assign(input.decode_write_slot.begin(), input.decode_write_slot.end());
  step_input_.segments.assign(input.segments.begin(), input.segments.end());
  step_input_.samples.assign(input.samples.begin(), input.samples.end());
  step_input_.adjustments.assign(input.adjustments.begin(), input.adjustments.end());
  step_input_.masks.assign(input.masks.begin(), input.masks.end());
  results_.clear();
  top_.clear();
  num_logit_rows_ = 0;
  return true;
}

void CpuDevice::DoEmbed(const EmbedArgs& args) {
  EmbedTokens(static_cast<const RowMatrix&>(*args.table), step_input_.tokens, args.x, pool_);
}

void CpuDevice::DoProject(const ProjectArgs& args) {
  const PackedMatrix& weight = Packed(args.weight);
  rows_.Pack({.x = args.x, .stride = weight.cols(), .norm = args.norm, .norm_eps = args.norm_eps},
             args.num_tokens, weight.cols(), pool_);
  Product products[2] = {
      {.weight = &weight, .out = static_cast<float*>(args.out), .out_stride = weight.rows()}, {}};
  size_t count = 1;
  if (args.coef_weight != nullptr) {
    products[count++] = {
        .weight = &Packed(args.coef_weight), .out = args.coef_out, .out_stride = args.coef_weight->rows()};
  }
  MatMul(rows_, {products, count}, pool_);
}

void CpuDevice::DoAddLinear(const AddLinearArgs& args) {
  const PackedMatrix& weight = Packed(args.weight);
  rows_.Pack({.x = static_cast<const float*>(args.in), .stride = weight.cols()}, args.num_tokens,
             weight.cols(), pool_);
  const Product product = {
      .weight = &weight, .use = ProductUse::kAdd, .out = args.x, .out_stride = weight.rows()};
  MatMul(rows_, {&product, 1}, pool_);
}

void CpuDevice::DoGatedMlp(const GatedMlpArgs& args) {
  const PackedMatrix& weight = Packed(args.gate_up);
  rows_.Pack({.x = args.x, .stride = weight.cols(), .norm = args.norm, .norm_eps = args.norm_eps},
             args.num_tokens, weight.cols(), pool_);
  const Product product = {.weight = &weight,
                           .use = ProductUse::kSiluTimes,
                           .out = static_cast<float*>(args.out),
                           .out_stride = weight.rows() / 2};
  MatMul(rows_, {&product, 1}, pool_);
}

MixWorkspace CpuDevice::Workspace(const MixArgs& args) {
  const MixLayer& layer = *args.layer;
  EFLA_CHECK(layer.num_heads == limits_.mix.num_heads && layer.d_k == limits_.mix.d_k);
  EFLA_CHECK(layer.d_v == limits_.mix.d_v && layer.conv_size == limits_.mix.conv_size);
  return {.taps = taps_.get(), .scratch = mix_scratch_.get(), .scratch_stride = mix_scratch_stride_};
}

DrawShape CpuDevice::ShapeOf(const SampleRow& row) const {
  const int64_t words = MaskWords(limits_.vocab_size);
  const std::span<const LogitAdjustment> adjustments = step_input_.adjustments;
  return {.adjustments = adjustments.subspan(row.adjust_begin, row.num_adjust),
          .mask = row.mask < 0 ? nullptr : step_input_.masks.data() + row.mask * words};
}

void CpuDevice::DoHead(const HeadArgs& args) {
  const PackedMatrix& head = Packed(args.head);
  EFLA_CHECK(head.rows() == limits_.vocab_size);
  const std::vector<SampleRow>& samples = step_input_.samples;
  const int64_t vocab = head.rows();
  results_.resize(samples.size());
  sample_token_rows_.resize(samples.size());
  int32_t top_count = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    sample_token_rows_[i] = samples[i].token_row;
    results_[i].top_begin = top_count;
    top_count += samples[i].num_top;
  }
  top_.resize(top_count);
  for (size_t begin = 0; begin < samples.size(); begin += kLogitRows) {
    const int64_t count = std::min<int64_t>(kLogitRows, samples.size() - begin);
    rows_.Pack({.x = args.x,
                .stride = head.cols(),
                .row_index = sample_token_rows_.data() + begin,
                .norm = args.norm,
                .norm_eps = args.norm_eps},
               count, head.cols(), pool_);
    const Product product = {.weight = &head, .out = logits_.get(), .out_stride = vocab};
    MatMul(rows_, {&product, 1}, pool_);
    pool_.ParallelFor(count, [&](int64_t i, int thread) {
      SampleResult& result = results_[begin + i];
      const int32_t top_begin = result.top_begin;
      result = SampleToken(samples[begin + i], ShapeOf(samples[begin + i]), logits_.get() + i * vocab, vocab,
                           {sample_weights_.get() + thread * vocab, sample_order_.get() + thread * vocab,
                            sample_reshaped_.get() + thread * vocab},
                           top_.data() + top_begin);
      result.top_begin = top_begin;
    });
  }
  if (samples.size() <= kLogitRows) num_logit_rows_ = static_cast<int64_t>(samples.size());
}

DeviceStatus CpuDevice::ReadLogits(std::span<float> logits) {
  const int64_t held = num_logit_rows_ * limits_.vocab_size;
  if (held == 0 || static_cast<int64_t>(logits.size()) != held) {
    return {DeviceStatus::Code::kInvalid,
            "logits of " + std::to_string(logits.size()) + " floats asked for; " + std::to_string(held) +
                " are kept (of steps with at most " + std::to_string(kLogitRows) + " sample rows)"};
  }
  std::copy_n(logits_.get(), held, logits.data());
  return {};
}

}  // namespace

std::unique_ptr<Device> CreateCpuDevice(int threads) {
  EFLA_CHECK(threads >= 0 && threads <= kMaxCpuThreads);
  return std::make_unique<CpuDevice>(threads);
}

}  // namespace efla
