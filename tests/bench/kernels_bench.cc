// Single operations of the CPU device against what the machine can do: the memory's read bandwidth for one
// row, oneDNN's float32 product for many. Run it alone on the machine:  kernels_bench [THREADS]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/create_device.h"
#include "kernels/device.h"

#ifdef EFLA_BENCH_ONEDNN
#include <dnnl.hpp>
#endif

namespace efla {
namespace {

constexpr double kSecondsPerCase = 0.5;

// The best of many runs, in seconds.
double Time(const std::function<void()>& work) {
  using Clock = std::chrono::steady_clock;
  work();
  std::vector<double> seconds;
  double total = 0;
  while (total < kSecondsPerCase || seconds.size() < 5) {
    const auto begin = Clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    total += seconds.back();
  }
  return *std::min_element(seconds.begin(), seconds.end());
}

// Seconds of work(0), ..., work(parts - 1) in turn: the sum of each part's best. Parts are short and each
// meets cold caches, as the rest has passed since; so the sum is what an undisturbed pass takes, even on a
// busy machine.
double TimeParts(size_t parts, const std::function<void(size_t)>& work) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> best(parts, 1e30);
  double total = 0;
  for (int pass = 0; pass < 5 || total < 4 * kSecondsPerCase; ++pass) {
    for (size_t part = 0; part < parts; ++part) {
      const auto begin = Clock::now();
      work(part);
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      best[part] = std::min(best[part], seconds);
      total += seconds;
    }
  }
  return std::accumulate(best.begin(), best.end(), 0.0);
}

// Bytes a second that `threads` threads read from a buffer far larger than the caches.
double ReadBandwidth(int threads) {
  constexpr size_t kParts = 64, kPartWords = size_t{1} << 20,
                   kWords = kParts * kPartWords;  // 512 MB, by 8 MB
  const MemoryBlock<uint64_t> buffer = AllocateBlock<uint64_t>(kWords);
  std::fill_n(buffer.get(), kWords, uint64_t{1});
  ThreadPool pool(threads);
  std::vector<uint64_t> sums(threads * 16);
  const double seconds = TimeParts(kParts, [&](size_t part) {
    constexpr int64_t kSlices = 32;
    pool.ParallelFor(kSlices, [&](int64_t slice, int thread) {
      const uint64_t* data = buffer.get() + part * kPartWords + slice * (kPartWords / kSlices);
      uint64_t lanes[32] = {};
      for (size_t i = 0; i < kPartWords / kSlices; i += 32) {
        for (size_t lane = 0; lane < 32; ++lane) lanes[lane] += data[i + lane];
      }
      sums[thread * 16] += std::accumulate(lanes, lanes + 32, uint64_t{0});
    });
  });
  EFLA_CHECK(std::accumulate(sums.begin(), sums.end(), uint64_t{0}) > 0);
  return kWords * sizeof(uint64_t) / seconds;
}

std::vector<float> Randoms(size_t count) {
  static std::mt19937 engine(1);
  std::vector<float> values(count);
  for (float& value : values) value = std::normal_distribution<float>()(engine);
  return values;
}

struct Model {
  const char* name;
  int64_t hidden, intermediate;
  int layers, heads, d_k, vocab;
};

// The products of a model's layers, on random bf16 weights.
class Layers {
 public:
  Layers(Device& device, const Model& model, int max_tokens, int layers)
      : device_(device),
        model_(model),
        x_(Randoms(max_tokens * model.hidden)),
        norm_(model.hidden, 1.0f),
        proj_(max_tokens * 3 * model.hidden),
        wide_(max_tokens * model.intermediate) {
    std::mt19937_64 engine(2);
    const auto load = [&](int64_t rows, int64_t cols, MatrixUse use) {
      std::vector<uint16_t> bits(rows * cols);
      for (uint16_t& element : bits) element = static_cast<uint16_t>(0x3A00 | (engine() & 0x80FF));
      const int64_t part = use == MatrixUse::kGateUp ? rows / 2 : rows;
      std::vector<HostMatrix> parts = {{bits.data(), DType::kBF16, part, cols}};
      if (use == MatrixUse::kGateUp) parts.push_back({bits.data() + part * cols, DType::kBF16, part, cols});
      DeviceStatus status;
      std::unique_ptr<Matrix> matrix = device.LoadMatrix(parts, use, status);
      EFLA_CHECK(status.ok());
      return matrix;
    };
    for (int i = 0; i < layers; ++i) {
      qkv_.push_back(load(3 * model.hidden, model.hidden, MatrixUse::kLinear));
      o_.push_back(load(model.hidden, model.hidden, MatrixUse::kLinear));
      gate_up_.push_back(load(2 * model.intermediate, model.hidden, MatrixUse::kGateUp));
      down_.push_back(load(model.hidden, model.intermediate, MatrixUse::kLinear));
    }
  }

  double parameters() const {
    return static_cast<double>(qkv_.size()) *
           static_cast<double>(4 * model_.hidden * model_.hidden + 3 * model_.hidden * model_.intermediate);
  }

  void Run(int tokens) {
    for (size_t i = 0; i < qkv_.size(); ++i) RunLayer(tokens, i);
  }

  void RunLayer(int tokens, size_t i) {
    Project(tokens, i);
    device_.AddLinear({.num_tokens = tokens, .in = proj_.data(), .weight = o_[i].get(), .x = x_.data()});
    device_.GatedMlp({.num_tokens = tokens,
                      .x = x_.data(),
                      .norm = norm_.data(),
                      .norm_eps = 1e-6f,
                      .gate_up = gate_up_[i].get(),
                      .out = wide_.data()});
    device_.AddLinear({.num_tokens = tokens, .in = wide_.data(), .weight = down_[i].get(), .x = x_.data()});
    for (int64_t k = 0; k < tokens * model_.hidden; ++k) x_[k] = std::clamp(x_[k], -10.0f, 10.0f);
  }

  void Project(int tokens, size_t layer) {
    device_.Project({.num_tokens = tokens,
                     .x = x_.data(),
                     .norm = norm_.data(),
                     .norm_eps = 1e-6f,
                     .weight = qkv_[layer].get(),
                     .out = proj_.data(),
                     .coef_weight = nullptr,
                     .coef_out = nullptr});
  }

 private:
  Device& device_;
  Model model_;
  std::vector<float> x_, norm_, proj_, wide_;
  std::vector<std::unique_ptr<Matrix>> qkv_, o_, gate_up_, down_;
};

std::unique_ptr<Device> OpenDevice(int threads, const Model& model, int max_tokens) {
  std::unique_ptr<Device> device = *CreateDevice({.kind = "cpu", .threads = threads});
  Device::Limits limits = {.max_tokens = max_tokens,
                           .max_decode = max_tokens,
                           .max_samples = 1,
                           .hidden_size = model.hidden,
                           .intermediate_size = model.intermediate,
                           .vocab_size = model.vocab,
                           .mix = {}};
  limits.mix.num_heads = model.heads;
  limits.mix.d_k = limits.mix.d_v = model.d_k;
  limits.mix.conv_size = 4;
  EFLA_CHECK(device->Prepare(limits).ok());
  return device;
}

// A step of `tokens` decode rows, or of one segment, that stays open while `work` runs.
void InStep(Device& device, int tokens, bool decode, const std::function<void()>& work) {
  const std::vector<TokenId> ids(tokens, 0);
  std::vector<int32_t> slots(decode ? tokens : 0);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i) + 1;
  std::vector<Segment> segments;
  if (!decode) segments.push_back({0, tokens, 0, 1});
  device.BeginStep({.tokens = ids,
                    .num_decode = static_cast<int>(slots.size()),
                    .decode_read_slot = slots,
                    .decode_write_slot = slots,
                    .segments = segments,
                    .samples = {}});
  work();
  device.EndStep();
}

#ifdef EFLA_BENCH_ONEDNN
// Seconds of [tokens x cols] x [cols x rows] in float32 with weights packed as oneDNN likes them.
double OneDnnSeconds(int64_t tokens, int64_t cols, int64_t rows) {
  using dnnl::memory;
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc source({tokens, cols}, memory::data_type::f32, memory::format_tag::ab);
  const memory::desc weight({cols, rows}, memory::data_type::f32, memory::format_tag::any);
  const memory::desc result({tokens, rows}, memory::data_type::f32, memory::format_tag::ab);
  const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(source, weight, result), engine);
  memory source_memory(source, engine), weight_memory(description.weights_desc(), engine),
      result_memory(result, engine);
  std::fill_n(static_cast<float*>(source_memory.get_data_handle()), tokens * cols, 1.0f);
  std::fill_n(static_cast<char*>(weight_memory.get_data_handle()), description.weights_desc().get_size(), 0);
  dnnl::matmul product(description);
  return Time([&] {
    product.execute(
        stream,
        {{DNNL_ARG_SRC, source_memory}, {DNNL_ARG_WEIGHTS, weight_memory}, {DNNL_ARG_DST, result_memory}});
    stream.wait();
  });
}
#endif

void BenchOneRow(int threads, const Model& model, int layers, double bandwidth) {
  const std::unique_ptr<Device> device = OpenDevice(threads, model, 1);
  Layers products(*device, model, 1, layers);
  InStep(*device, 1, true, [&] {
    const double seconds = TimeParts(layers, [&](size_t layer) { products.RunLayer(1, layer); });
    const double bytes = products.parameters() * 2;
    std::printf("1 row, %-5s %2d layers, %6.1f MB bf16: %8.1f us a layer, %6.1f GB/s, %3.0f %% of memory\n",
                model.name, layers, bytes / 1e6, seconds / layers * 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / bandwidth);
  });
}

void BenchRows(int threads, const Model& model, int tokens) {
  const std::unique_ptr<Device> device = OpenDevice(threads, model, tokens);
  Layers products(*device, model, tokens, 1);
  const double qkv_flops = 2.0 * tokens * model.hidden * 3 * model.hidden;
  const double all_flops = 2.0 * tokens * products.parameters();
  InStep(*device, tokens, true, [&] {
    const double qkv = Time([&] { products.Project(tokens, 0); });
    const double all = Time([&] { products.Run(tokens); });
    std::printf("%3d rows, %-5s: q|k|v product %7.1f GFLOP/s, layer's products %7.1f GFLOP/s", tokens,
                model.name, qkv_flops / qkv / 1e9, all_flops / all / 1e9);
  });
#ifdef EFLA_BENCH_ONEDNN
  const double peer = qkv_flops / OneDnnSeconds(tokens, model.hidden, 3 * model.hidden) / 1e9;
  std::printf(", oneDNN f32 q|k|v %7.1f GFLOP/s\n", peer);
#else
  std::printf(" (built without oneDNN)\n");
#endif
}

void BenchMix(int threads, const Model& model, ModelType type, int tokens, bool decode) {
  const std::unique_ptr<Device> device = OpenDevice(threads, model, tokens);
  MixLayer layer;
  layer.type = type;
  layer.num_heads = model.heads;
  layer.d_k = layer.d_v = model.d_k;
  layer.conv_size = 4;
  layer.norm_eps = 1e-6f;
  const std::vector<float> taps = Randoms(layer.q_channels() * 4), ones(layer.d_v, 1.0f),
                           zeros(layer.num_heads, 0.0f);
  layer.q_conv = layer.k_conv = layer.v_conv = taps.data();
  layer.o_norm = ones.data();
  layer.a_log = layer.dt_bias = zeros.data();
  const std::vector<float> proj = Randoms(static_cast<size_t>(tokens) * layer.proj_columns());
  const std::vector<float> coef = Randoms(static_cast<size_t>(tokens) * layer.coef_columns());
  std::vector<float> out(static_cast<size_t>(tokens) * layer.v_channels());
  StateView state;
  state.conv_offset = static_cast<int64_t>(layer.num_heads) * layer.d_k * layer.d_v;
  state.slot_stride = state.conv_offset + 3 * static_cast<int64_t>(layer.conv_channels());
  std::vector<float> pool(static_cast<size_t>(state.slot_stride) * (tokens + 1), 0.0f);
  state.pool = pool.data();
  const MixArgs args = {
      .layer = &layer, .proj = proj.data(), .coef = coef.data(), .state = state, .out = out.data()};
  InStep(*device, tokens, decode, [&] {
    const double timing = Time([&] { decode ? device->MixRecurrent(args) : device->MixChunk(args); });
    std::printf("%s, %-5s %s: %4d tokens, %9.1f us, %10.0f tokens/s a layer",
                decode ? "recurrent" : "chunk    ", model.name, IsGated(type) ? "gated" : "plain", tokens,
                timing * 1e6, tokens / timing);
    if (decode) {
      std::printf(", state traffic %5.1f GB/s\n",
                  2.0 * 4 * tokens * static_cast<double>(state.conv_offset) / timing / 1e9);
    } else {
      const double d = layer.d_k, chunk = kChunkTokens;
      const double flops = 2.0 * tokens * layer.num_heads * (3 * d * d + 4 * chunk / 2 * d);
      std::printf(", %5.1f GFLOP/s\n", flops / timing / 1e9);
    }
  });
}

int Main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  const Model demo = {"demo", 256, 768, 10, 2, 128, 4096};
  const Model large = {"340m", 1024, 2816, 24, 8, 128, 32000};
  std::printf("%s\n", OpenDevice(threads, demo, 1)->info().name.c_str());
  const double bandwidth = ReadBandwidth(threads);
  std::printf("memory, read by %d threads: %.1f GB/s\n", threads, bandwidth / 1e9);
  BenchOneRow(threads, demo, demo.layers, bandwidth);
  BenchOneRow(threads, large, 1, bandwidth);
  BenchOneRow(threads, large, 12, bandwidth);
  for (const int tokens : {4, 16, 64, 512}) BenchRows(threads, large, tokens);
  for (const int tokens : {64, 512}) BenchRows(threads, demo, tokens);
  for (const ModelType type : {ModelType::kEfla, ModelType::kGatedEfla}) {
    for (const Model& model : {demo, large}) {
      BenchMix(threads, model, type, 512, false);
      BenchMix(threads, model, type, 1, true);
      BenchMix(threads, model, type, 64, true);
    }
  }
  return 0;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) { return efla::Main(argc, argv); }
