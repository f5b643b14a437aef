// efla_bench: the engine's model path without RPC. Load time and memory, decode and prefill rates beside what
// the memory and the arithmetic of this device allow (measured in the same run), and whether a token costs
// the same late in a long context as early.
#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/buffer.h"
#include "kernels/create_device.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/utc_time.h"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kWarmUpSteps = 3;
constexpr int kCeilingPasses = 15;
constexpr int kDefaultContextSeconds = 12;  // what filling the default long context may take
constexpr int64_t kLongestDefaultContext = 100'000;

struct Options : BenchOptions {
  int max_batch_tokens = 512;
  std::vector<int> decode_batches = {1, 8, 32};
  std::vector<int> prefill_lengths = {512, 2048};
  std::vector<int64_t> context_lengths;
  int steps = 64;
  int repeats = 3;
};

double Median(const std::vector<double>& values) { return Quantile(values, 0.5); }

int UsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "efla_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status());
  return *std::move(value);
}

void Synchronize(Device& device) {
  if (DeviceStatus status = device.Synchronize(); !status.ok()) Fail(ToStatus(status));
}

// Bytes a second that `threads` threads read from a buffer of `bytes` bytes, over and over: median of the
// passes.
double HostReadBandwidth(size_t bytes, int threads) {
  const size_t words = bytes / sizeof(uint64_t) / static_cast<size_t>(threads);  // a thread
  std::vector<uint64_t> buffer(words * static_cast<size_t>(threads), 1);
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  const int sweeps = static_cast<int>(std::clamp<size_t>((size_t{256} << 20) / bytes, 1, 4096));
  double best = 0;
  for (int pass = 0; pass < kCeilingPasses; ++pass) {
    const auto begin = Clock::now();
    std::vector<std::jthread> readers;
    for (size_t t = 0; t < static_cast<size_t>(threads); ++t) {
      readers.emplace_back([&buffer, &sums, words, sweeps, t] {
        const uint64_t* from = buffer.data() + t * words;
        uint64_t sum = 0;
        for (int sweep = 0; sweep < sweeps; ++sweep) {
          for (size_t i = 0; i < words; ++i) sum += from[i];
          asm volatile("" : "+r"(sum) : : "memory");  // every sweep reads anew
        }
        sums[t] = sum;
      });
    }
    readers.clear();
    best =
        std::max(best, static_cast<double>(buffer.size() * sizeof(uint64_t)) * sweeps / SecondsSince(begin));
  }
  return best;
}

// Bytes read and written a second while the device copies within its memory: the best pass.
double DeviceCopyBandwidth(Device& device, size_t bytes) {
  const Buffer from = Buffer::Allocate(device, bytes), to = Buffer::Allocate(device, bytes);
  if (!from || !to) Fail(absl::ResourceExhaustedError("no device memory to measure the bandwidth with"));
  device.FillBytes(from.get(), 1, bytes);
  double best = 0;
  for (int pass = 0; pass < kCeilingPasses; ++pass) {
    Synchronize(device);
    const auto begin = Clock::now();
    for (int i = 0; i < 8; ++i) device.CopyOnDevice(to.get(), from.get(), bytes);
    Synchronize(device);
    best = std::max(best, 8.0 * 2.0 * static_cast<double>(bytes) / SecondsSince(begin));
  }
  return best;
}

// Random values of about 1/64, either sign, in any dtype.
std::vector<std::byte> RandomWeights(DType dtype, int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(count) * ByteSize(dtype));
  std::mt19937 random(1);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const uint32_t draw = static_cast<uint32_t>(random());
    if (dtype == DType::kF32) {
      const uint32_t value = (draw & 0x807fffffu) | 0x3c800000u;
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    } else {
      const uint32_t value = dtype == DType::kBF16 ? (draw & 0x807fu) | 0x3c80u : (draw & 0x83ffu) | 0x2400u;
      const auto half = static_cast<uint16_t>(value);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

struct GemmCeiling {
  int64_t tokens = 0, rows = 4096, cols = 2048;
  double flops_per_second = 0;
};

// The best rate of one large Device::Project, on a device of its own so that it leaves the model's recordings
// alone.
GemmCeiling MeasureGemm(const DeviceOptions& device_options, int max_tokens, DType dtype) {
  GemmCeiling gemm;
  gemm.tokens = max_tokens;
  const std::unique_ptr<Device> device = OrFail(CreateDevice(device_options));
  const std::vector<std::byte> host = RandomWeights(dtype, gemm.rows * gemm.cols);
  const HostMatrix part = {host.data(), dtype, gemm.rows, gemm.cols};
  DeviceStatus status;
  const std::unique_ptr<Matrix> weight = device->LoadMatrix({&part, 1}, MatrixUse::kLinear, status);
  if (!status.ok()) Fail(ToStatus(status));

  Device::Limits limits;
  limits.max_tokens = max_tokens;
  limits.max_decode = limits.max_samples = 1;
  limits.hidden_size = limits.intermediate_size = gemm.cols;
  limits.vocab_size = gemm.cols;
  limits.mix.num_heads = static_cast<int>(gemm.cols) / 128;
  limits.mix.d_k = limits.mix.d_v = 128;
  if (status = device->Prepare(limits); !status.ok()) Fail(ToStatus(status));

  const auto tokens = static_cast<size_t>(max_tokens), cols = static_cast<size_t>(gemm.cols);
  const Buffer x = Buffer::Allocate(*device, tokens * cols * sizeof(float));
  const Buffer norm = Buffer::Allocate(*device, cols * sizeof(float));
  const Buffer out =
      Buffer::Allocate(*device, tokens * static_cast<size_t>(gemm.rows) * device->activation_bytes());
  if (!x || !norm || !out) Fail(absl::ResourceExhaustedError("no device memory to measure the product with"));
  const std::vector<std::byte> values = RandomWeights(DType::kF32, max_tokens * gemm.cols);
  device->CopyToDevice(x.get(), values.data(), values.size());
  device->CopyToDevice(norm.get(), values.data(), cols * sizeof(float));
  Synchronize(*device);

  const std::vector<TokenId> ids(tokens, 0);
  const Segment segment = {0, max_tokens, StatePool::kZeroSlot, StatePool::kSinkSlot};
  StepInput input;
  input.tokens = ids;
  input.segments = {&segment, 1};
  for (int pass = 0; pass < kCeilingPasses; ++pass) {
    const auto begin = Clock::now();
    if (device->BeginStep(input)) {
      device->Project({.num_tokens = max_tokens,
                       .x = static_cast<const float*>(x.get()),
                       .norm = static_cast<const float*>(norm.get()),
                       .norm_eps = 1e-6f,
                       .weight = weight.get(),
                       .out = out.get()});
    }
    device->EndStep();
    Synchronize(*device);
    gemm.flops_per_second =
        std::max(gemm.flops_per_second,
                 2.0 * static_cast<double>(gemm.tokens * gemm.rows * gemm.cols) / SecondsSince(begin));
  }
  return gemm;
}

// The cost of a token, from the checkpoint's tensors.
struct ModelCost {
  int64_t step_bytes = 0;      // weights that every step reads: all but the embedding rows, the head included
  int64_t layer_elements = 0;  // of the matrices that every token passes
  int64_t head_elements = 0;   // of the matrix that every sampled row passes

  static ModelCost Of(const Checkpoint& checkpoint) {
    ModelCost cost;
    const std::string head =
        checkpoint.config().tie_word_embeddings ? "model.embeddings.weight" : "lm_head.weight";
    for (const TensorInfo& tensor : checkpoint.tensors()) {
      const int64_t elements = tensor.bytes() / static_cast<int64_t>(ByteSize(tensor.dtype));
      const bool is_head = tensor.name == head;
      if (tensor.name == "model.embeddings.weight" && !is_head) continue;
      cost.step_bytes += tensor.bytes();
      if (is_head) cost.head_elements = elements;
      if (!is_head && tensor.shape.size() == 2) cost.layer_elements += elements;
    }
    return cost;
  }
};

class Bench {
 public:
  Bench(Model& model, StatePool& states, const Options& options)
      : model_(model), states_(states), options_(options) {}

  // Step times in seconds of `slots` decoding together, one token each.
  std::vector<double> Decode(const std::vector<int32_t>& slots, int steps) {
    const size_t batch = slots.size();
    std::vector<TokenId> tokens = RandomTokens(batch);
    std::vector<SampleRow> samples(batch);
    for (size_t i = 0; i < batch; ++i)
      samples[i] = {.token_row = static_cast<int32_t>(i), .temperature = 0.0f};
    StepInput input;
    input.tokens = tokens;
    input.num_decode = static_cast<int>(batch);
    input.decode_read_slot = input.decode_write_slot = slots;
    input.samples = samples;
    std::vector<double> seconds;
    for (int step = -kWarmUpSteps; step < steps; ++step) {
      const auto begin = Clock::now();
      const StepOutput output = Run(input);
      if (step >= 0) seconds.push_back(SecondsSince(begin));
      for (size_t i = 0; i < batch; ++i) tokens[i] = output.rows[i].token;
    }
    return seconds;
  }

  // Seconds to compute a prompt of random tokens into `slot` and draw its next token.
  double Prefill(int64_t length, int32_t slot) {
    const std::vector<TokenId> prompt = RandomTokens(static_cast<size_t>(length));
    const auto max_tokens = static_cast<size_t>(options_.max_batch_tokens);
    const auto begin = Clock::now();
    for (size_t done = 0; done < prompt.size(); done += max_tokens) {
      const std::span<const TokenId> part =
          std::span(prompt).subspan(done, std::min(max_tokens, prompt.size() - done));
      const auto num_tokens = static_cast<int32_t>(part.size());
      const Segment segment = {0, num_tokens, done == 0 ? StatePool::kZeroSlot : slot, slot};
      const SampleRow last = {.token_row = num_tokens - 1, .temperature = 0.0f};
      StepInput input;
      input.tokens = part;
      input.segments = {&segment, 1};
      if (done + part.size() == prompt.size()) input.samples = {&last, 1};
      Run(input);
    }
    return SecondsSince(begin);
  }

  // Inter-token seconds at each context length, measured in turns so that drift hits all alike.
  std::vector<std::vector<double>> InterToken(const std::vector<int64_t>& lengths, int steps) {
    std::vector<SlotHandle> slots;
    for (int64_t length : lengths) {
      slots.push_back(OrFail(states_.Acquire()));
      Prefill(length, slots.back().slot);
    }
    std::vector<std::vector<double>> seconds(lengths.size());
    constexpr int kTurn = 8;
    for (int done = 0; done < steps; done += kTurn) {
      for (size_t i = 0; i < lengths.size(); ++i) {
        const std::vector<double> turn = Decode({slots[i].slot}, kTurn);
        seconds[i].insert(seconds[i].end(), turn.begin(), turn.end());
      }
    }
    for (SlotHandle slot : slots) states_.Release(slot);
    return seconds;
  }

  // Fresh slots, each holding a short prompt.
  std::vector<SlotHandle> Start(int count) {
    std::vector<SlotHandle> slots;
    for (int i = 0; i < count; ++i) {
      slots.push_back(OrFail(states_.Acquire()));
      Prefill(16, slots.back().slot);
    }
    return slots;
  }

 private:
  StepOutput Run(const StepInput& input) {
    model_.Submit(input, states_);
    return OrFail(model_.Wait());
  }
  std::vector<TokenId> RandomTokens(size_t count) {
    std::uniform_int_distribution<TokenId> token(3, static_cast<TokenId>(model_.config().vocab_size) - 1);
    std::vector<TokenId> tokens(count);
    for (TokenId& id : tokens) id = token(random_);
    return tokens;
  }

  Model& model_;
  StatePool& states_;
  const Options& options_;
  std::mt19937 random_{1};
};

DType ParseDType(const std::string& name) {
  if (name == "f32") return DType::kF32;
  return name == "f16" ? DType::kF16 : DType::kBF16;
}

int RunBench(const Options& options, const std::string& command) {
  const auto start = Clock::now();
  auto begin = Clock::now();
  const std::shared_ptr<const Checkpoint> checkpoint =
      options.preset.empty() ? OrFail(Checkpoint::Open(options.checkpoint))
                             : OrFail(Checkpoint::Random(OrFail(ModelConfig::Preset(options.preset)), 1,
                                                         ParseDType(options.dtype)));
  const double open_seconds = SecondsSince(begin);
  const int64_t rss_before_load = ProcessBytes("VmRSS:");

  const DeviceOptions device_options = {options.device, options.threads, options.ordinal};
  begin = Clock::now();
  const std::unique_ptr<Device> device = OrFail(CreateDevice(device_options));
  const int max_decode = *std::max_element(options.decode_batches.begin(), options.decode_batches.end());
  const int num_contexts =
      options.context_lengths.empty() ? 2 : static_cast<int>(options.context_lengths.size());
  const std::unique_ptr<Model> model =
      OrFail(Model::Load(checkpoint, *device,
                         {.max_tokens = std::max(options.max_batch_tokens, max_decode),
                          .max_decode = max_decode,
                          .max_samples = max_decode}));
  const double load_seconds = SecondsSince(begin);
  const int64_t rss_loaded = ProcessBytes("VmRSS:"), peak_loaded = ProcessBytes("VmHWM:");
  const std::unique_ptr<StatePool> states =
      OrFail(StatePool::Create(*device, model->config(), std::max(max_decode, num_contexts), false));

  const ModelCost cost = ModelCost::Of(*checkpoint);
  const int64_t state_bytes = states->layout().state_bytes();
  Json json;
  json["command"] = command;
  json["date"] = UtcTime();
  double load_average = 0;
  if (getloadavg(&load_average, 1) == 1) json["load_average_at_start"] = load_average;
  json["device"] = {{"kind", device->info().kind}, {"name", device->info().name}};
  json["model"] = {{"source", options.preset.empty() ? options.checkpoint : "preset " + options.preset},
                   {"type", ModelTypeName(model->config().type)},
                   {"parameters", model->config().parameter_count()},
                   {"weight_bytes", model->weight_bytes()},
                   {"step_weight_bytes", cost.step_bytes},
                   {"state_bytes", state_bytes}};
  absl::PrintF("device     %s: %s; load average at the start %.1f\n", device->info().kind,
               device->info().name, load_average);
  absl::PrintF(
      "model      %s, %.1f M parameters, weights %.1f MB on the device, %.1f MB read a step; state %.2f MB\n",
      json["model"]["source"].get<std::string>(),
      static_cast<double>(model->config().parameter_count()) / 1e6,
      static_cast<double>(model->weight_bytes()) / 1e6, static_cast<double>(cost.step_bytes) / 1e6,
      static_cast<double>(state_bytes) / 1e6);
  json["load"] = {{"open_seconds", open_seconds},
                  {"load_seconds", load_seconds},
                  {"rss_before_load_bytes", rss_before_load},
                  {"rss_bytes", rss_loaded},
                  {"peak_rss_bytes", peak_loaded}};
  absl::PrintF("load       open %.3f s, load %.3f s; resident %.1f MB, peak %.1f MB\n", open_seconds,
               load_seconds, static_cast<double>(rss_loaded) / 1e6, static_cast<double>(peak_loaded) / 1e6);

  // The two ceilings. On a CPU a small model's weights may stay in its caches: then the bandwidth at the size
  // of what a step reads is the one that bounds it, and the share of the large buffer's may pass 100 %.
  double bandwidth, bandwidth_at_size;
  if (device->info().kind == "cpu") {
    const int threads = options.threads > 0 ? options.threads : UsableCores();
    bandwidth = HostReadBandwidth(size_t{512} << 20, threads);
    bandwidth_at_size = HostReadBandwidth(static_cast<size_t>(cost.step_bytes), threads);
  } else {
    bandwidth = bandwidth_at_size = DeviceCopyBandwidth(*device, size_t{1} << 30);
  }
  const DType dtype = OrFail(checkpoint->Find("model.layers.0.attn.o_proj.weight")).dtype;
  const GemmCeiling gemm = MeasureGemm(device_options, options.max_batch_tokens, dtype);
  json["ceilings"] = {{"bandwidth_bytes_per_second", bandwidth},
                      {"bandwidth_at_step_size_bytes_per_second", bandwidth_at_size},
                      {"gemm_flops_per_second", gemm.flops_per_second},
                      {"gemm_shape", {gemm.tokens, gemm.rows, gemm.cols}}};
  absl::PrintF("ceilings   %s %.1f GB/s over a large buffer, %.1f GB/s over one of a step's size; ",
               device->info().kind == "cpu" ? "read" : "copy", bandwidth / 1e9, bandwidth_at_size / 1e9);
  absl::PrintF("Project of %d tokens [%d x %d] %.1f GFLOP/s\n", gemm.tokens, gemm.rows, gemm.cols,
               gemm.flops_per_second / 1e9);

  Bench bench(*model, *states, options);
  absl::PrintF("\n%-10s %10s %12s %12s %12s %14s\n", "decode", "tok/s", "median ms", "p99 ms", "floor share",
               "(large buffer)");
  json["decode"] = Json::array();
  for (int batch : options.decode_batches) {
    const std::vector<SlotHandle> handles = bench.Start(batch);
    std::vector<int32_t> slots;
    for (SlotHandle handle : handles) slots.push_back(handle.slot);
    const std::vector<double> seconds = bench.Decode(slots, options.steps);
    for (SlotHandle handle : handles) states->Release(handle);
    const double median = Median(seconds), p99 = Quantile(seconds, 0.99);
    const double floor_bytes = static_cast<double>(cost.step_bytes + 2 * batch * state_bytes);
    const double share = floor_bytes / bandwidth_at_size / median,
                 share_large = floor_bytes / bandwidth / median;
    json["decode"].push_back({{"batch", batch},
                              {"tokens_per_second", batch / median},
                              {"median_seconds", median},
                              {"p99_seconds", p99},
                              {"floor_bytes", floor_bytes},
                              {"floor_share", share},
                              {"floor_share_large_buffer", share_large}});
    absl::PrintF("%-10d %10.1f %12.3f %12.3f %11.1f%% %13.1f%%\n", batch, batch / median, median * 1e3,
                 p99 * 1e3, share * 100, share_large * 100);
  }

  absl::PrintF("\n%-10s %10s %12s %12s %12s\n", "prefill", "tok/s", "median ms", "GFLOP/s", "GEMM share");
  json["prefill"] = Json::array();
  double prefill_rate = 0;
  for (int length : options.prefill_lengths) {
    const SlotHandle slot = OrFail(states->Acquire());
    bench.Prefill(std::min(length, options.max_batch_tokens), slot.slot);  // warm-up
    std::vector<double> seconds;
    for (int i = 0; i < options.repeats; ++i) seconds.push_back(bench.Prefill(length, slot.slot));
    states->Release(slot);
    const double median = Median(seconds);
    const double flops =
        2.0 * (static_cast<double>(cost.layer_elements) * length + static_cast<double>(cost.head_elements));
    prefill_rate = std::max(prefill_rate, length / median);
    json["prefill"].push_back({{"tokens", length},
                               {"tokens_per_second", length / median},
                               {"median_seconds", median},
                               {"matrix_flops_per_second", flops / median},
                               {"gemm_share", flops / median / gemm.flops_per_second}});
    absl::PrintF("%-10d %10.1f %12.3f %12.1f %11.1f%%\n", length, length / median, median * 1e3,
                 flops / median / 1e9, flops / median / gemm.flops_per_second * 100);
  }

  std::vector<int64_t> contexts = options.context_lengths;
  if (contexts.empty()) {
    const auto reachable = static_cast<int64_t>(prefill_rate * kDefaultContextSeconds) / 1000 * 1000;
    contexts = {1000, std::clamp<int64_t>(reachable, 2000, kLongestDefaultContext)};
  }
  absl::PrintF("\n%-10s %12s %12s %12s\n", "context", "median ms", "p99 ms", "to first");
  json["context"] = Json::array();
  const std::vector<std::vector<double>> inter_token = bench.InterToken(contexts, options.steps);
  for (size_t i = 0; i < contexts.size(); ++i) {
    const double median = Median(inter_token[i]), p99 = Quantile(inter_token[i], 0.99);
    const double ratio = median / Median(inter_token[0]);
    json["context"].push_back({{"tokens", contexts[i]},
                               {"median_seconds", median},
                               {"p99_seconds", p99},
                               {"ratio_to_first", ratio}});
    absl::PrintF("%-10d %12.3f %12.3f %12.3f\n", contexts[i], median * 1e3, p99 * 1e3, ratio);
  }

  json["peak_rss_bytes"] = ProcessBytes("VmHWM:");
  json["total_seconds"] = SecondsSince(start);
  absl::PrintF("\ntotal      %.1f s\n", SecondsSince(start));
  if (!WriteJson(options.json_file, json)) Fail(absl::UnavailableError("cannot write " + options.json_file));
  return 0;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) {
  efla::Options options;
  CLI::App app{"Measures the engine's model path without RPC."};
  efla::AddModelOptions(app, options);
  app.add_option("--max-batch-tokens", options.max_batch_tokens, "Prompt tokens a step, a multiple of 64")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--decode-batches", options.decode_batches, "Sequences that decode together")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--prefill-lengths", options.prefill_lengths, "Prompt lengths, tokens")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  app.add_option("--context-lengths", options.context_lengths,
                 "Positions at which the inter-token latency is compared [1000 and what a few seconds of "
                 "prefill reach]")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "Decode steps a measurement")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--repeats", options.repeats, "Prompts a prefill measurement")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  efla::AddJsonOption(app, options);
  CLI11_PARSE(app, argc, argv);
  if (options.checkpoint.empty() && options.preset.empty()) {
    std::fprintf(stderr, "efla_bench: give --checkpoint DIR or --preset NAME; --help lists all flags\n");
    return 2;
  }
  if (options.max_batch_tokens % efla::kChunkTokens != 0) {
    std::fprintf(stderr, "efla_bench: --max-batch-tokens is %d; it must be a multiple of %d\n",
                 options.max_batch_tokens, efla::kChunkTokens);
    return 2;
  }
  std::string command = "efla_bench";  // without where it lies and where its results go
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json") {
      ++i;
    } else if (argument.rfind("--json=", 0) != 0) {
      command += " " + argument;
    }
  }
  return efla::RunBench(options, command);
}
