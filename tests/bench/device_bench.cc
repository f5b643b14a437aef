// Every operation of a device on its own, at the shapes of a model: time, bytes or FLOPs, and the share of
// what the device reached in the same run at its best: a large copy (bytes read and written), a large
// product.
//
//   device_bench [--device cuda] [--model 340m] [--decode 1,8,32,128,256] [--prefill 2048,8192] [--seconds
//   0.2]
//
// One JSON object a line. An operation is timed inside whole steps, from Embed to Head, so that a device that
// replays its steps does so here; it runs once for each of several layers, whose weights and states together
// exceed the caches, and the time of a step without it is taken off. Links nothing but the kernels.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/create_device.h"
#include "kernels/device.h"

namespace efla {
namespace {

struct Shape {
  const char* name;
  int hidden, num_heads, head_size, intermediate, vocab;
  int layers;  // that an operation rotates through
};
constexpr Shape kShapes[] = {
    {"demo", 256, 2, 128, 768, 4096, 4},
    {"340m", 1024, 8, 128, 2816, 32000, 24},
    {"1.3b", 2048, 16, 128, 5632, 32000, 12},
};

constexpr int kConvSize = 4;
constexpr float kEps = 1e-6f;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "device_bench: %s\n", what.c_str());
  std::exit(1);
}

void Check(const DeviceStatus& status) {
  if (!status.ok()) Fail(status.message);
}

std::vector<int> ParseList(const std::string& text) {
  std::vector<int> values;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) {
    const int value = std::atoi(item.c_str());
    if (value < 1) Fail("\"" + item + "\" in \"" + text + "\" is not a positive number");
    values.push_back(value);
  }
  return values;
}

// One step's work: `operation` once for each layer, and what that moves and computes in one layer.
struct Work {
  std::string name;
  int num_decode = 0, num_prefill = 0, num_samples = 0;
  int repeats = 1;  // operations a step
  double bytes = 0, flops = 0;
  std::function<void(int layer)> operation;
};

class DeviceBench {
 public:
  DeviceBench(Device& device, const Shape& shape, int max_decode, int max_tokens, double seconds)
      : device_(device), shape_(shape), max_tokens_(std::max(max_tokens, max_decode)), seconds_(seconds) {
    mix_.num_heads = shape.num_heads;
    mix_.d_k = mix_.d_v = shape.head_size;
    mix_.conv_size = kConvSize;
    mix_.norm_eps = kEps;
    const int64_t hidden = shape.hidden, vocab = shape.vocab, intermediate = shape.intermediate;
    embedding_ = Load({{vocab, hidden}}, MatrixUse::kEmbedding);
    head_ = Load({{vocab, hidden}}, MatrixUse::kLinear);
    for (int layer = 0; layer < shape.layers; ++layer) {
      project_.push_back(Load({{mix_.proj_columns(), hidden}}, MatrixUse::kLinear));
      coef_weight_.push_back(Load({{mix_.coef_columns(), hidden}}, MatrixUse::kLinear));
      out_.push_back(Load({{hidden, mix_.v_channels()}}, MatrixUse::kLinear));
      gate_up_.push_back(Load({{intermediate, hidden}, {intermediate, hidden}}, MatrixUse::kGateUp));
      down_.push_back(Load({{hidden, intermediate}}, MatrixUse::kLinear));
    }
    norm_ = Floats(hidden);
    o_norm_ = Floats(shape.head_size);
    q_conv_ = Floats(static_cast<int64_t>(mix_.q_channels()) * kConvSize);
    k_conv_ = Floats(static_cast<int64_t>(mix_.q_channels()) * kConvSize);
    v_conv_ = Floats(static_cast<int64_t>(mix_.v_channels()) * kConvSize);
    mix_.o_norm = static_cast<const float*>(o_norm_.get());
    mix_.q_conv = static_cast<const float*>(q_conv_.get());
    mix_.k_conv = static_cast<const float*>(k_conv_.get());
    mix_.v_conv = static_cast<const float*>(v_conv_.get());
    x_ = Floats(max_tokens_ * hidden);
    coef_ = Floats(static_cast<int64_t>(max_tokens_) * mix_.coef_columns());
    projected_ = Acts(static_cast<int64_t>(max_tokens_) * mix_.proj_columns());
    mixed_ = Acts(static_cast<int64_t>(max_tokens_) * mix_.v_channels());
    wide_ = Acts(max_tokens_ * intermediate);

    const int64_t recurrent = static_cast<int64_t>(mix_.num_heads) * mix_.d_k * mix_.d_v;
    const int64_t window = static_cast<int64_t>(kConvSize - 1) * mix_.conv_channels();
    state_.slot_stride = shape.layers * (recurrent + window);
    layer_floats_ = recurrent + window;
    window_offset_ = recurrent;
    const size_t pool_bytes = static_cast<size_t>((max_decode + 2) * state_.slot_stride) * sizeof(float);
    pool_ = Buffer::Allocate(device, pool_bytes);
    if (!pool_) Fail("no memory for " + std::to_string(pool_bytes) + " bytes of states");
    device.FillBytes(pool_.get(), 0, pool_bytes);
    state_.pool = static_cast<float*>(pool_.get());

    MixLayer shapes = mix_;
    shapes.q_conv = shapes.k_conv = shapes.v_conv = shapes.o_norm = nullptr;
    Check(device.Prepare({.max_tokens = max_tokens_,
                          .max_decode = max_decode,
                          .max_samples = max_decode,
                          .hidden_size = hidden,
                          .intermediate_size = intermediate,
                          .vocab_size = vocab,
                          .mix = shapes}));
    Check(device.Synchronize());
  }

  // Bytes a second of a large copy, read and written ones counted.
  double MeasureCopy() {
    size_t bytes = size_t{1} << 30;
    Buffer from, to;
    for (; !to && bytes >= (size_t{1} << 24); bytes /= 2) {
      from = Buffer::Allocate(device_, bytes);
      to = Buffer::Allocate(device_, bytes);
    }
    if (!from || !to) Fail("no memory for a copy");
    device_.FillBytes(from.get(), 0x3c, from.bytes());
    const double seconds = TimeRuns([&] { device_.CopyOnDevice(to.get(), from.get(), from.bytes()); });
    return 2.0 * static_cast<double>(from.bytes()) / seconds;
  }

  void RunDecode(int rows, double copy_rate) {
    const double act = static_cast<double>(device_.activation_bytes());
    const double n = rows, hidden = shape_.hidden, projected = mix_.proj_columns(),
                 values = mix_.v_channels();
    const double intermediate = shape_.intermediate, vocab = shape_.vocab;
    const double weight_bytes = 2;  // of an element
    const double state_floats = static_cast<double>(mix_.num_heads) * mix_.d_k * mix_.d_v;
    const double window_floats = static_cast<double>(kConvSize - 1) * mix_.conv_channels();
    const std::vector<Work> works = {
        Product("Project", rows, 0, hidden * projected * weight_bytes + n * (4 * hidden + act * projected),
                2 * n * hidden * projected, [this, rows](int layer) { Project(layer, rows); }),
        Product("MixRecurrent", rows, 0,
                n * (8 * (state_floats + window_floats) + act * (projected + values)), 8 * n * state_floats,
                [this](int layer) { device_.MixRecurrent(Mix(layer)); }),
        Product("AddLinear o", rows, 0, hidden * values * weight_bytes + n * (8 * hidden + act * values),
                2 * n * hidden * values, [this, rows](int layer) { AddLinear(layer, rows, mixed_, out_); }),
        Product("GatedMlp", rows, 0,
                2 * hidden * intermediate * weight_bytes + n * (4 * hidden + act * intermediate),
                4 * n * hidden * intermediate, [this, rows](int layer) { GatedMlp(layer, rows); }),
        Product("AddLinear down", rows, 0,
                hidden * intermediate * weight_bytes + n * (8 * hidden + act * intermediate),
                2 * n * hidden * intermediate,
                [this, rows](int layer) { AddLinear(layer, rows, wide_, down_); }),
    };
    for (const Work& work : works) Report(work, copy_rate, 0);
    // The head is in every step that samples; its time is that of a step with samples over one without.
    Work head = {.name = "Head and greedy draw",
                 .num_decode = rows,
                 .num_samples = rows,
                 .repeats = 1,
                 .operation = nullptr};
    head.bytes = hidden * vocab * weight_bytes + n * (4 * hidden + 8 * vocab);
    head.flops = 2 * n * hidden * vocab;
    Report(head, copy_rate, 0);
  }

  void RunPrefill(int tokens, double copy_rate, double product_rate) {
    const double act = static_cast<double>(device_.activation_bytes());
    const double n = tokens, hidden = shape_.hidden, projected = mix_.proj_columns(),
                 values = mix_.v_channels();
    const double intermediate = shape_.intermediate;
    // The chunk form's products a token and head: 8 C d + 6 d^2 with C = 64 tokens a chunk.
    const double d = shape_.head_size;
    const double chunk_flops = n * mix_.num_heads * (8.0 * kChunkTokens * d + 6 * d * d);
    const std::vector<Work> works = {
        Product("Project", 0, tokens, hidden * projected * 2 + n * (4 * hidden + act * projected),
                2 * n * hidden * projected, [this, tokens](int layer) { Project(layer, tokens); }),
        Product("MixChunk", 0, tokens, n * act * (projected + values), chunk_flops,
                [this](int layer) { device_.MixChunk(Mix(layer)); }),
        Product("AddLinear o", 0, tokens, hidden * values * 2 + n * (8 * hidden + act * values),
                2 * n * hidden * values,
                [this, tokens](int layer) { AddLinear(layer, tokens, mixed_, out_); }),
        Product("GatedMlp", 0, tokens, 4 * hidden * intermediate + n * (4 * hidden + act * intermediate),
                4 * n * hidden * intermediate, [this, tokens](int layer) { GatedMlp(layer, tokens); }),
        Product("AddLinear down", 0, tokens,
                2 * hidden * intermediate + n * (8 * hidden + act * intermediate),
                2 * n * hidden * intermediate,
                [this, tokens](int layer) { AddLinear(layer, tokens, wide_, down_); }),
    };
    for (const Work& work : works) Report(work, copy_rate, product_rate);
  }

  // FLOPs a second of the largest product that the shapes of this run allow: gate and up of the whole step.
  double MeasureProduct() {
    const Work work = Product("GatedMlp", 0, max_tokens_, 0,
                              4.0 * max_tokens_ * shape_.hidden * static_cast<double>(shape_.intermediate),
                              [this](int layer) { GatedMlp(layer, max_tokens_); });
    return work.flops / TimeOperation(work);
  }

 private:
  struct Part {
    int64_t rows, cols;
  };

  // Values of about 1 / sqrt(cols), as BF16. All matrices share the numbers; none is zero.
  std::unique_ptr<Matrix> Load(std::vector<Part> parts, MatrixUse use) {
    int64_t most = 0;
    for (const Part& part : parts) most = std::max(most, part.rows * part.cols);
    while (static_cast<int64_t>(random_bits_.size()) < most) {
      const uint64_t word = engine_();
      for (int i = 0; i < 4; ++i) {
        const auto bits = static_cast<uint16_t>(word >> (16 * i));
        random_bits_.push_back(static_cast<uint16_t>((bits & 0x807fu) | 0x3d00u));  // +-[2^-5, 2^-4)
      }
    }
    std::vector<HostMatrix> hosts;
    for (const Part& part : parts) hosts.push_back({random_bits_.data(), DType::kBF16, part.rows, part.cols});
    DeviceStatus status;
    std::unique_ptr<Matrix> matrix = device_.LoadMatrix(hosts, use, status);
    Check(status);
    return matrix;
  }

  std::vector<float> RandomFloats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(engine_() >> 40) * 0x1p-23f - 1.0f;
    return values;
  }

  Buffer Floats(int64_t count) {
    const std::vector<float> values = RandomFloats(count);
    Buffer buffer = Buffer::Allocate(device_, values.size() * sizeof(float));
    if (!buffer) Fail("no memory");
    device_.CopyToDevice(buffer.get(), values.data(), values.size() * sizeof(float));
    Check(device_.Synchronize());
    return buffer;
  }

  Buffer Acts(int64_t count) {
    Buffer buffer = Buffer::Allocate(device_, static_cast<size_t>(count) * device_.activation_bytes());
    if (!buffer) Fail("no memory");
    device_.WriteActivations(buffer.get(), RandomFloats(count));
    Check(device_.Synchronize());
    return buffer;
  }

  static Work Product(const char* name, int num_decode, int num_prefill, double bytes, double flops,
                      std::function<void(int)> operation) {
    return {.name = name,
            .num_decode = num_decode,
            .num_prefill = num_prefill,
            .repeats = 0,
            .bytes = bytes,
            .flops = flops,
            .operation = std::move(operation)};
  }

  MixArgs Mix(int layer) const {
    MixArgs args = {.layer = &mix_,
                    .proj = projected_.get(),
                    .coef = static_cast<const float*>(coef_.get()),
                    .state = state_,
                    .out = mixed_.get()};
    args.state.recurrent_offset = layer * layer_floats_;
    args.state.conv_offset = layer * layer_floats_ + window_offset_;
    return args;
  }

  // The output goes to its own buffer, but x and the inputs of the recurrence are left as they were made.
  void Project(int layer, int tokens) {
    device_.Project({.num_tokens = tokens,
                     .x = static_cast<const float*>(x_.get()),
                     .norm = static_cast<const float*>(norm_.get()),
                     .norm_eps = kEps,
                     .weight = project_[layer].get(),
                     .out = projected_.get(),
                     .coef_weight = coef_weight_[layer].get(),
                     .coef_out = static_cast<float*>(coef_.get())});
  }

  void AddLinear(int layer, int tokens, const Buffer& in,
                 const std::vector<std::unique_ptr<Matrix>>& weights) {
    device_.AddLinear({.num_tokens = tokens,
                       .in = in.get(),
                       .weight = weights[layer].get(),
                       .x = static_cast<float*>(x_.get())});
  }

  void GatedMlp(int layer, int tokens) {
    device_.GatedMlp({.num_tokens = tokens,
                      .x = static_cast<const float*>(x_.get()),
                      .norm = static_cast<const float*>(norm_.get()),
                      .norm_eps = kEps,
                      .gate_up = gate_up_[layer].get(),
                      .out = wide_.get()});
  }

  // One step from Embed to Head around `work`; without it where `bare`.
  void RunStep(const Work& work, bool bare) {
    const int tokens = work.num_decode + work.num_prefill;
    std::vector<TokenId> ids(static_cast<size_t>(tokens));
    for (int i = 0; i < tokens; ++i) ids[i] = i % shape_.vocab;
    std::vector<int32_t> slots(static_cast<size_t>(work.num_decode));
    for (int i = 0; i < work.num_decode; ++i) slots[i] = i + 2;
    std::vector<Segment> segments;
    if (work.num_prefill > 0) {
      segments.push_back(
          {.token_begin = work.num_decode, .num_tokens = work.num_prefill, .read_slot = 0, .write_slot = 1});
    }
    std::vector<SampleRow> samples;
    if (!bare) {
      for (int i = 0; i < work.num_samples; ++i) samples.push_back({.token_row = i, .temperature = 0});
    }
    const StepInput input = {.tokens = ids,
                             .num_decode = work.num_decode,
                             .decode_read_slot = slots,
                             .decode_write_slot = slots,
                             .segments = segments,
                             .samples = samples};
    if (device_.BeginStep(input)) {
      device_.Embed({.table = embedding_.get(), .x = static_cast<float*>(x_.get())});
      if (!bare && work.operation) {
        for (int layer = 0; layer < shape_.layers; ++layer) work.operation(layer);
      }
      device_.Head({.x = static_cast<const float*>(x_.get()),
                    .norm = static_cast<const float*>(norm_.get()),
                    .norm_eps = kEps,
                    .head = head_.get()});
    }
    device_.EndStep();
  }

  // A recorded step would replay the last work's operations: each work and its bare step need their own
  // recordings.
  void DropRecordings() {
    MixLayer shapes = mix_;
    shapes.q_conv = shapes.k_conv = shapes.v_conv = shapes.o_norm = nullptr;
    const int max_decode = static_cast<int>(pool_.bytes() / sizeof(float) / state_.slot_stride) - 2;
    Check(device_.Prepare({.max_tokens = max_tokens_,
                           .max_decode = max_decode,
                           .max_samples = max_decode,
                           .hidden_size = shape_.hidden,
                           .intermediate_size = shape_.intermediate,
                           .vocab_size = shape_.vocab,
                           .mix = shapes}));
  }

  // Seconds of one call of `run`: the median of batches that are enqueued together and waited for once.
  double TimeRuns(const std::function<void()>& run) {
    using Clock = std::chrono::steady_clock;
    constexpr int kWarmUps = 4, kBatches = 7;
    for (int i = 0; i < kWarmUps; ++i) run();
    Check(device_.Synchronize());
    const auto time_batch = [&](int count) {
      const auto begin = Clock::now();
      for (int i = 0; i < count; ++i) run();
      Check(device_.Synchronize());
      return std::chrono::duration<double>(Clock::now() - begin).count() / count;
    };
    const double once = time_batch(2);
    const int count = std::clamp(static_cast<int>(seconds_ / kBatches / std::max(once, 1e-9)), 1, 1000);
    std::vector<double> seconds;
    for (int i = 0; i < kBatches; ++i) seconds.push_back(time_batch(count));
    std::nth_element(seconds.begin(), seconds.begin() + kBatches / 2, seconds.end());
    return seconds[kBatches / 2];
  }

  // Seconds of one operation: of a step with all of them less one without, over their number.
  double TimeOperation(const Work& work) {
    DropRecordings();
    const double bare = TimeRuns([&] { RunStep(work, true); });
    DropRecordings();
    const double whole = TimeRuns([&] { RunStep(work, false); });
    return (whole - bare) / (work.repeats > 0 ? work.repeats : shape_.layers);
  }

  void Report(const Work& work, double copy_rate, double product_rate) {
    const double seconds = TimeOperation(work);
    const double byte_floor = work.bytes / copy_rate;
    const double flop_floor = product_rate > 0 ? work.flops / product_rate : 0;
    std::printf(
        "{\"model\": \"%s\", \"op\": \"%s\", \"decode_rows\": %d, \"prefill_tokens\": %d, \"us\": %.2f, "
        "\"mbytes\": %.3f, \"gflop\": %.3f, \"gbytes_per_s\": %.0f, \"tflop_per_s\": %.1f, \"floor_us\": "
        "%.2f, "
        "\"bound_by\": \"%s\", \"share_of_ceiling\": %.3f}\n",
        shape_.name, work.name.c_str(), work.num_decode, work.num_prefill, seconds * 1e6, work.bytes * 1e-6,
        work.flops * 1e-9, work.bytes / seconds * 1e-9, work.flops / seconds * 1e-12,
        std::max(byte_floor, flop_floor) * 1e6, byte_floor >= flop_floor ? "bytes" : "flops",
        std::max(byte_floor, flop_floor) / seconds);
    std::fflush(stdout);
  }

  Device& device_;
  const Shape& shape_;
  int max_tokens_;
  double seconds_;
  std::mt19937_64 engine_{1};
  std::vector<uint16_t> random_bits_;
  MixLayer mix_;
  StateView state_;
  int64_t layer_floats_ = 0, window_offset_ = 0;
  std::unique_ptr<Matrix> embedding_, head_;
  std::vector<std::unique_ptr<Matrix>> project_, coef_weight_, out_, gate_up_, down_;
  Buffer norm_, o_norm_, q_conv_, k_conv_, v_conv_, x_, coef_, projected_, mixed_, wide_, pool_;
};

int Main(int argc, char** argv) {
  std::string kind = "cuda", model = "340m";
  std::vector<int> decode = {1, 8, 32, 128, 256}, prefill = {2048, 8192};
  double seconds = 0.2;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) Fail(name + " needs a value");
    const std::string value = argv[i + 1];
    if (name == "--device") {
      kind = value;
    } else if (name == "--model") {
      model = value;
    } else if (name == "--decode") {
      decode = ParseList(value);
    } else if (name == "--prefill") {
      prefill = ParseList(value);
    } else if (name == "--seconds") {
      seconds = std::atof(value.c_str());
      if (!(seconds > 0)) Fail("--seconds is " + value + "; it must be positive");
    } else {
      Fail("unknown option " + name + "; the options are --device, --model, --decode, --prefill, --seconds");
    }
  }
  const Shape* shape = nullptr;
  for (const Shape& candidate : kShapes) {
    if (model == candidate.name) shape = &candidate;
  }
  if (shape == nullptr) Fail("--model is " + model + "; the choices are demo, 340m, 1.3b");
  absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice({.kind = kind});
  if (!device.ok()) Fail(std::string(device.status().message()));

  const int max_decode = *std::max_element(decode.begin(), decode.end());
  DeviceBench bench(**device, *shape, max_decode, *std::max_element(prefill.begin(), prefill.end()), seconds);
  const double copy_rate = bench.MeasureCopy(), product_rate = bench.MeasureProduct();
  std::printf("{\"device\": \"%s\", \"copy_gbytes_per_s\": %.0f, \"product_tflop_per_s\": %.1f}\n",
              (*device)->info().name.c_str(), copy_rate * 1e-9, product_rate * 1e-12);
  for (const int rows : decode) bench.RunDecode(rows, copy_rate);
  for (const int tokens : prefill) bench.RunPrefill(tokens, copy_rate, product_rate);
  return 0;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) { return efla::Main(argc, argv); }
