// One very long sequence through one layer's token mixing, beside the same mathematics in double precision:
// does the state stay finite and bounded, and does its error grow with the length?
//
//   drift_bench [--device cuda] [--type efla] [--tokens 1000000] [--recurrent 1024] [--slice 16384]
//               [--report 1024,10240,102400] [--reference-heads 2] [--threads 0] [--seed 1]
//               [--max-state-error X] [--max-output-error X] [--json FILE]
//
// The tokens go through MixChunk in slices on the chunk grid, the last --recurrent of them (and what does not
// fill a chunk before these) one by one through MixRecurrent. The reference takes the inputs as the device
// holds them, rounded to its activation type, and is computed on the host for some of the heads, from the
// first to the last. At each point of --report, where the chunk form ends, and at the end of the sequence it
// prints a line; --json also writes an object a line. The exit status is 1 when something is not finite or an
// error is above its bound (default: the tolerances of kernels/README.md for the state, ten times that for an
// output). Links nothing but the kernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/counter_random.h"
#include "kernels/create_device.h"
#include "kernels/device.h"
#include "tests/bench/utc_time.h"
#include "tests/kernels/reference.h"

namespace efla {
namespace {

// One layer of the 340m preset.
constexpr int kNumHeads = 8, kHeadSize = 128, kConvSize = 4;
constexpr float kNormEps = 1e-6f;
constexpr int64_t kHistory = kConvSize - 1;  // rows that the convolution looks back
constexpr int64_t kOutputTokens = 64;        // whose outputs are compared, before each report
constexpr int32_t kZeroSlot = 0, kSlot = 1;  // of the pool
constexpr double kExactTolerance = 1e-4, kHalfTolerance = 2e-2;  // kernels/README.md

struct Named {
  const char* name;
  ModelType type;
};
constexpr Named kTypes[] = {{"efla", ModelType::kEfla},
                            {"gated_efla", ModelType::kGatedEfla},
                            {"delta_net", ModelType::kDeltaNet},
                            {"gated_deltanet", ModelType::kGatedDeltaNet}};

struct Options {
  std::string device = "cuda", type = "efla", json_file;
  int64_t tokens = 1'000'000, recurrent = 1024, slice = 16384;
  std::vector<int64_t> report = {1024, 10240, 102400};
  int reference_heads = 2;
  int threads = 0;
  uint64_t seed = 1;
  double max_state_error = 0, max_output_error = 0;  // 0: by the device's activation type
  std::string command;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "drift_bench: %s\n", what.c_str());
  std::exit(1);
}

void Check(const DeviceStatus& status) {
  if (!status.ok()) Fail(status.message);
}

Buffer AllocateOrFail(Device& device, size_t bytes) {
  Buffer buffer = Buffer::Allocate(device, bytes);
  if (!buffer) Fail("no memory for " + std::to_string(bytes) + " bytes on the device");
  return buffer;
}

// work(0), ..., work(count - 1) on up to `threads` threads.
void ParallelFor(int64_t count, int threads, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next = 0;
  const auto take_turns = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> helpers;
  for (int64_t t = 1; t < std::min<int64_t>(threads, count); ++t) helpers.emplace_back(take_turns);
  take_turns();
}

MixLayer LayerShape(ModelType type) {
  MixLayer layer;
  layer.type = type;
  layer.num_heads = kNumHeads;
  layer.d_k = layer.d_v = kHeadSize;
  layer.conv_size = kConvSize;
  layer.norm_eps = kNormEps;
  return layer;
}

// 0 for the first head, 1 for the last.
double HeadShare(int head) { return static_cast<double>(head) / (kNumHeads - 1); }

// Random inputs and parameters, every one a function of the seed and its place alone, so that no slice of the
// sequence needs another.
//
// A token is one of a vocabulary with Zipf's frequencies. Its row of the projection is the word's own row, so
// that keys come back, plus a part of its position; both have values of about one. The norm of a word's key
// is drawn for each head, 1/8 to 2 times the usual: EFLA's coefficient meets b |k|^2 from far below to far
// above one. Heads forget at different speeds: the logit of b falls, and dt of the gated types, from a usual
// value at the first head to one at the last that remembers for tens of thousands of tokens.
class Inputs {
 public:
  Inputs(const MixLayer& layer, uint64_t seed) : layer_(layer), seed_(seed) {
    const int64_t columns = layer.proj_columns();
    words_.resize(static_cast<size_t>(kWords * columns));
    for (int64_t word = 0; word < kWords; ++word) {
      Fill(Stream::kWord, word, kWordScale, Row(words_, word, columns));
      for (int head = 0; head < kNumHeads; ++head) {
        key_gains_.push_back(static_cast<float>(
            std::exp2(4 * CounterUniform(seed_ ^ kKeyGainKey, word * kNumHeads + head) - 3)));
      }
    }
  }

  // The parameters that kernels and reference share; they hold as floats and as doubles alike.
  reference::Mix Parameters() const {
    reference::Mix mix;
    mix.layer = layer_;
    const auto doubles = [this](Stream stream, int64_t count, float scale) {
      std::vector<float> values(static_cast<size_t>(count));
      Fill(stream, 0, scale, values);
      return reference::Vector(values.begin(), values.end());
    };
    mix.q_conv = doubles(Stream::kQueryConv, layer_.q_channels() * kConvSize, 1.0f);
    mix.k_conv = doubles(Stream::kKeyConv, layer_.q_channels() * kConvSize, 1.0f);
    mix.v_conv = doubles(Stream::kValueConv, layer_.v_channels() * kConvSize, 1.0f);
    mix.o_norm = doubles(Stream::kNorm, kHeadSize, 0.5f);
    for (double& weight : mix.o_norm) weight += 1.0;
    for (int head = 0; head < kNumHeads; ++head) {
      constexpr double kFastDt = 0.1, kSlowDt = 1e-5;
      const double dt = kFastDt * std::pow(kSlowDt / kFastDt, HeadShare(head));
      mix.a_log.push_back(0.0);
      mix.dt_bias.push_back(static_cast<float>(std::log(std::expm1(dt))));
    }
    return mix;
  }

  // The projection's rows of tokens [begin, begin + rows), before any rounding: [rows, proj_columns].
  void FillProj(int64_t begin, int64_t rows, int threads, float* proj) const {
    const int64_t columns = layer_.proj_columns();
    ForTokens(rows, threads, [&](int64_t t) {
      const std::span<float> row(proj + t * columns, static_cast<size_t>(columns));
      Fill(Stream::kPosition, begin + t, kPositionScale, row);
      const int64_t word = Word(begin + t);
      const float* of_word = words_.data() + word * columns;
      for (int64_t c = 0; c < columns; ++c) row[c] += of_word[c];
      for (int head = 0; head < kNumHeads; ++head) {
        const float gain = key_gains_[word * kNumHeads + head];
        float* key = row.data() + layer_.q_channels() + head * kHeadSize;
        for (int c = 0; c < kHeadSize; ++c) key[c] *= gain;
      }
    });
  }

  // Their coefficients' logits: [rows, coef_columns].
  void FillCoef(int64_t begin, int64_t rows, int threads, float* coef) const {
    constexpr float kLogitScale = 4.0f, kSlowestLogit = -6.0f;
    const int64_t columns = layer_.coef_columns();
    ForTokens(rows, threads, [&](int64_t t) {
      float* row = coef + t * columns;
      Fill(Stream::kCoef, begin + t, kLogitScale, {row, static_cast<size_t>(columns)});
      for (int head = 0; head < kNumHeads; ++head) {
        row[head] += kSlowestLogit * static_cast<float>(HeadShare(head));
      }
    });
  }

 private:
  static constexpr int64_t kWords = 1024;
  // Fill's values have a standard deviation of 0.41: those of a row get one of 1.
  static constexpr float kWordScale = 2.0f, kPositionScale = 1.4f;
  static constexpr uint64_t kKeyGainKey = 1ull << 62, kWordKey = 1ull << 63;  // apart from seed_ itself

  enum class Stream : uint64_t { kWord, kPosition, kCoef, kQueryConv, kKeyConv, kValueConv, kNorm };

  static std::span<float> Row(std::vector<float>& values, int64_t row, int64_t columns) {
    return std::span(values).subspan(static_cast<size_t>(row * columns), static_cast<size_t>(columns));
  }

  // Numbers in (-scale, scale), with a triangle as density.
  void Fill(Stream stream, int64_t row, float scale, std::span<float> values) const {
    constexpr size_t kWordsOfDraw = 4;
    for (size_t i = 0; i < values.size(); i += kWordsOfDraw) {
      const Philox4x32 random =
          Philox(seed_, static_cast<uint64_t>(row), static_cast<uint64_t>(stream) << 32 | i);
      for (size_t j = 0; j < std::min(kWordsOfDraw, values.size() - i); ++j) {
        const auto low = static_cast<int32_t>(random.word[j] & 0xffffu);
        const auto high = static_cast<int32_t>(random.word[j] >> 16);
        values[i + j] = static_cast<float>(high - low) * 0x1p-16f * scale;
      }
    }
  }

  int64_t Word(int64_t token) const {
    const double power = std::pow(kWords, CounterUniform(seed_ ^ kWordKey, static_cast<uint64_t>(token)));
    return std::min(static_cast<int64_t>(power), kWords) - 1;
  }

  static void ForTokens(int64_t count, int threads, const std::function<void(int64_t)>& work) {
    constexpr int64_t kRun = 64;
    ParallelFor((count + kRun - 1) / kRun, threads, [&](int64_t run) {
      for (int64_t t = run * kRun; t < std::min(count, (run + 1) * kRun); ++t) work(t);
    });
  }

  MixLayer layer_;
  uint64_t seed_;
  std::vector<float> words_;      // [kWords, proj_columns]
  std::vector<float> key_gains_;  // [kWords, kNumHeads]
};

// One head in double precision, kPieceTokens tokens at a time. The state's columns need nothing of each
// other, so that a piece is prepared token by token and then advanced block of columns by block of columns,
// each on any thread:
//
//   p = S^T k, r = S^T q,  u = write v - decay erase p,  S <- decay S + k u^T,  o = decay r + (k.q) u
class HeadReference {
 public:
  static constexpr int64_t kPieceTokens = 1024;
  static constexpr int kColumns = 8;  // of a block: its state stays in the fastest cache
  static constexpr int kBlocks = kHeadSize / kColumns;

  HeadReference(const reference::Mix& mix, int head)
      : mix_(mix),
        head_(head),
        state_(kHeadSize * kHeadSize, 0.0),
        q_(kPieceTokens * kHeadSize),
        k_(kPieceTokens * kHeadSize),
        v_(kPieceTokens * kHeadSize),
        o_(kPieceTokens * kHeadSize),
        scalars_(kPieceTokens) {}

  int head() const { return head_; }

  // `proj` and `coef`: the rows of token t of the piece; those of the kHistory tokens before it lie in front.
  void PrepareToken(int64_t t, const float* proj, const float* coef) {
    const MixLayer& layer = mix_.layer;
    double* q = &q_[t * kHeadSize];
    double* k = &k_[t * kHeadSize];
    Convolve(proj, head_ * kHeadSize, mix_.q_conv, q);
    Convolve(proj, layer.q_channels() + head_ * kHeadSize, mix_.k_conv, k);
    Convolve(proj, 2 * layer.q_channels() + head_ * kHeadSize, mix_.v_conv, &v_[t * kHeadSize]);
    const double query_scale = L2Scale(SumSquares(q)) / std::sqrt(static_cast<double>(kHeadSize));
    for (int i = 0; i < kHeadSize; ++i) q[i] *= query_scale;
    const double squared = SumSquares(k);
    if (NormalizesKey(layer.type)) {
      for (int i = 0; i < kHeadSize; ++i) k[i] *= L2Scale(squared);
    }
    double log_a = 0;
    if (IsGated(layer.type)) {
      const double x = coef[kNumHeads + head_] + mix_.dt_bias[head_];
      log_a = -std::exp(mix_.a_log[head_]) * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
    }
    const reference::Scalars scalars =
        reference::CoefficientsOf(layer.type, squared, reference::Sigmoid(coef[head_]), log_a);
    double kq = 0;
    for (int i = 0; i < kHeadSize; ++i) kq += k[i] * q[i];
    scalars_[t] = {scalars.decay, scalars.decay * scalars.erase, scalars.write, kq};
  }

  // Takes the first `count` tokens of the piece into columns [block * kColumns, (block + 1) * kColumns).
  void AdvanceBlock(int block, int64_t count) {
    double* state = &state_[block * kHeadSize * kColumns];
    for (int64_t t = 0; t < count; ++t) {
      const double* k = &k_[t * kHeadSize];
      const double* q = &q_[t * kHeadSize];
      double p[kColumns] = {}, r[kColumns] = {}, u[kColumns];
      for (int i = 0; i < kHeadSize; ++i) {
        for (int c = 0; c < kColumns; ++c) p[c] += k[i] * state[i * kColumns + c];
        for (int c = 0; c < kColumns; ++c) r[c] += q[i] * state[i * kColumns + c];
      }
      const TokenScalars& scalars = scalars_[t];
      const double* v = &v_[t * kHeadSize + block * kColumns];
      double* o = &o_[t * kHeadSize + block * kColumns];
      for (int c = 0; c < kColumns; ++c) {
        u[c] = scalars.write * v[c] - scalars.decay_erase * p[c];
        o[c] = scalars.decay * r[c] + scalars.kq * u[c];
      }
      for (int i = 0; i < kHeadSize; ++i) {
        for (int c = 0; c < kColumns; ++c) {
          state[i * kColumns + c] = scalars.decay * state[i * kColumns + c] + k[i] * u[c];
        }
      }
    }
  }

  // Row-major [d_k, d_v].
  reference::Vector State() const {
    reference::Vector rows(state_.size());
    for (size_t at = 0; at < state_.size(); ++at) {
      const size_t block = at / (kHeadSize * kColumns), row = at / kColumns % kHeadSize;
      rows[row * kHeadSize + block * kColumns + at % kColumns] = state_[at];
    }
    return rows;
  }

  // The layer's output of token t of the piece, after the output norm.
  reference::Vector Output(int64_t t) const {
    const auto begin = o_.begin() + t * kHeadSize;
    return reference::RmsNorm({begin, begin + kHeadSize}, mix_.o_norm,
                              static_cast<double>(mix_.layer.norm_eps));
  }

 private:
  struct TokenScalars {
    double decay, decay_erase, write, kq;
  };

  static double SumSquares(const double* values) {
    double sum = 0;
    for (int i = 0; i < kHeadSize; ++i) sum += values[i] * values[i];
    return sum;
  }
  static double L2Scale(double squared) { return 1 / std::sqrt(squared + 1e-6); }

  // silu(conv) of the head's channels that begin at column `channel`.
  void Convolve(const float* proj, int channel, const reference::Vector& taps, double* to) const {
    const int64_t columns = mix_.layer.proj_columns();
    const double* weight = &taps[static_cast<size_t>(head_) * kHeadSize * kConvSize];
    for (int c = 0; c < kHeadSize; ++c) {
      double sum = 0;
      for (int j = 0; j < kConvSize; ++j) {
        sum += weight[c * kConvSize + j] * proj[(j - kHistory) * columns + channel + c];
      }
      to[c] = reference::Silu(sum);
    }
  }

  const reference::Mix& mix_;
  int head_;
  std::vector<double> state_;          // [kBlocks, d_k, kColumns]
  std::vector<double> q_, k_, v_, o_;  // [kPieceTokens, kHeadSize]
  std::vector<TokenScalars> scalars_;  // [kPieceTokens]
};

template <typename Values>
double Norm(const Values& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

// |values - exact| / |exact|
double RelativeError(std::span<const float> values, std::span<const double> exact) {
  reference::Vector difference(exact.begin(), exact.end());
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= values[i];
  return Norm(difference) / Norm(exact);
}

// The greater one; NaN where either is.
double Worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

struct HeadReport {
  int head;
  double state_norm, reference_norm, state_error, output_error;
};

struct Report {
  int64_t tokens = 0;
  const char* form = nullptr;    // of the last token
  double norm = 0, max_abs = 0;  // of the whole layer's state; norm is Frobenius'
  double greatest_norm = 0;      // at the end of any slice so far
  int64_t not_finite = 0;        // of the state and of the compared outputs
  std::vector<HeadReport> heads;
  double state_error = 0, output_error = 0;  // the worst of the heads
};

class DriftBench {
 public:
  DriftBench(Device& device, const MixLayer& shape, const Options& options, int threads)
      : device_(device),
        options_(options),
        threads_(threads),
        slice_(std::min(options.slice, options.tokens)),
        inputs_(shape, options.seed),
        parameters_(inputs_.Parameters()),
        layer_(shape) {
    Check(device.Prepare({.max_tokens = static_cast<int>(slice_),
                          .max_decode = 1,
                          .max_samples = 1,
                          .hidden_size = shape.v_channels(),
                          .intermediate_size = shape.v_channels(),
                          .vocab_size = 64,
                          .mix = shape}));
    layer_.q_conv = Upload(parameters_.q_conv);
    layer_.k_conv = Upload(parameters_.k_conv);
    layer_.v_conv = Upload(parameters_.v_conv);
    layer_.a_log = Upload(parameters_.a_log);
    layer_.dt_bias = Upload(parameters_.dt_bias);
    layer_.o_norm = Upload(parameters_.o_norm);

    const size_t act = device.activation_bytes();
    proj_bytes_ = static_cast<size_t>(shape.proj_columns()) * act;
    coef_bytes_ = static_cast<size_t>(shape.coef_columns()) * sizeof(float);
    out_bytes_ = static_cast<size_t>(shape.v_channels()) * act;
    const auto rows = static_cast<size_t>(slice_);
    proj_ = AllocateOrFail(device, rows * proj_bytes_);
    coef_ = AllocateOrFail(device, rows * coef_bytes_);
    out_ = AllocateOrFail(device, rows * out_bytes_);
    token_proj_ = AllocateOrFail(device, proj_bytes_);
    token_coef_ = AllocateOrFail(device, coef_bytes_);
    token_out_ = AllocateOrFail(device, out_bytes_);

    const int64_t recurrent_floats = static_cast<int64_t>(kNumHeads) * kHeadSize * kHeadSize;
    state_.conv_offset = recurrent_floats;
    state_.slot_stride = recurrent_floats + kHistory * shape.conv_channels();
    pool_ = AllocateOrFail(device, static_cast<size_t>(2 * state_.slot_stride) * sizeof(float));
    device.FillBytes(pool_.get(), 0, pool_.bytes());
    state_.pool = static_cast<float*>(pool_.get());

    host_proj_.assign(static_cast<size_t>((kHistory + slice_) * shape.proj_columns()), 0.0f);
    host_coef_.resize(rows * static_cast<size_t>(shape.coef_columns()));
    host_state_.resize(static_cast<size_t>(recurrent_floats));
    for (int i = 0; i < options.reference_heads; ++i) {
      const int steps = std::max(options.reference_heads - 1, 1);
      references_.emplace_back(parameters_, i * (kNumHeads - 1) / steps);
    }
  }

  // Streams the whole sequence and calls `use` with each report.
  void Run(const std::function<void(const Report&)>& use) {
    const int64_t chunk_tokens =
        std::max<int64_t>(options_.tokens - options_.recurrent, 0) / kChunkTokens * kChunkTokens;
    std::set<int64_t> stops = {chunk_tokens, options_.tokens};
    for (const int64_t tokens : options_.report) {
      if (tokens < chunk_tokens) stops.insert(tokens);
    }
    int64_t done = 0;
    for (const int64_t stop : stops) {
      if (stop == 0) continue;
      const bool chunk_form = stop <= chunk_tokens;
      int64_t count = 0;
      for (; done < stop; done += count) {
        count = std::min(slice_, stop - done);
        LoadSlice(done, count);
        if (chunk_form) {
          RunChunk(done == 0, static_cast<int32_t>(count));
        } else {
          RunRecurrent(done == 0, count);
        }
        AdvanceReferences(count);
        device_.CopyToHost(host_state_.data(), state_.pool + kSlot * state_.slot_stride,
                           host_state_.size() * sizeof(float));
        Check(device_.Synchronize());
        greatest_norm_ =
            Worse(Norm(std::vector<double>(host_state_.begin(), host_state_.end())), greatest_norm_);
      }
      use(ReportOf(done, chunk_form ? "chunk" : "recurrent", count));
    }
  }

 private:
  const float* Upload(const reference::Vector& values) {
    const std::vector<float> floats(values.begin(), values.end());
    const size_t bytes = floats.size() * sizeof(float);
    uploads_.push_back(AllocateOrFail(device_, bytes));
    device_.CopyToDevice(uploads_.back().get(), floats.data(), bytes);
    Check(device_.Synchronize());
    return static_cast<const float*>(uploads_.back().get());
  }

  // Makes the inputs of the next `count` tokens, and takes them back as the device has rounded them. The last
  // rows of the slice before go in front of them.
  void LoadSlice(int64_t begin, int64_t count) {
    const int64_t columns = layer_.proj_columns();
    if (slice_tokens_ > 0) {
      std::copy_n(host_proj_.begin() + slice_tokens_ * columns, kHistory * columns, host_proj_.begin());
    }
    slice_tokens_ = count;
    float* proj = host_proj_.data() + kHistory * columns;
    inputs_.FillProj(begin, count, threads_, proj);
    inputs_.FillCoef(begin, count, threads_, host_coef_.data());
    const std::span<float> values(proj, static_cast<size_t>(count * columns));
    device_.WriteActivations(proj_.get(), values);
    device_.ReadActivations(values, proj_.get());
    device_.CopyToDevice(coef_.get(), host_coef_.data(), static_cast<size_t>(count) * coef_bytes_);
    Check(device_.Synchronize());
  }

  MixArgs Args(const Buffer& proj, const Buffer& coef, const Buffer& out) const {
    return {.layer = &layer_,
            .proj = proj.get(),
            .coef = static_cast<const float*>(coef.get()),
            .state = state_,
            .out = out.get()};
  }

  void RunChunk(bool first, int32_t count) {
    const std::vector<TokenId> ids(static_cast<size_t>(count), 0);
    const Segment segment = {0, count, first ? kZeroSlot : kSlot, kSlot};
    StepInput input;
    input.tokens = ids;
    input.segments = {&segment, 1};
    if (device_.BeginStep(input)) device_.MixChunk(Args(proj_, coef_, out_));
    device_.EndStep();
  }

  // A step's operations keep their addresses, so each token's rows are brought to one place.
  void RunRecurrent(bool first, int64_t count) {
    const auto row = [](const Buffer& buffer, int64_t t, size_t bytes) {
      return static_cast<std::byte*>(buffer.get()) + static_cast<size_t>(t) * bytes;
    };
    const TokenId id = 0;
    const int32_t write_slot = kSlot;
    for (int64_t t = 0; t < count; ++t) {
      const int32_t read_slot = first && t == 0 ? kZeroSlot : kSlot;
      device_.CopyOnDevice(token_proj_.get(), row(proj_, t, proj_bytes_), proj_bytes_);
      device_.CopyOnDevice(token_coef_.get(), row(coef_, t, coef_bytes_), coef_bytes_);
      StepInput input;
      input.tokens = {&id, 1};
      input.num_decode = 1;
      input.decode_read_slot = {&read_slot, 1};
      input.decode_write_slot = {&write_slot, 1};
      if (device_.BeginStep(input)) device_.MixRecurrent(Args(token_proj_, token_coef_, token_out_));
      device_.EndStep();
      device_.CopyOnDevice(row(out_, t, out_bytes_), token_out_.get(), out_bytes_);
    }
  }

  void AdvanceReferences(int64_t count) {
    constexpr int64_t kPiece = HeadReference::kPieceTokens, kRun = 64;
    const auto num_heads = static_cast<int64_t>(references_.size());
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t size = std::min(kPiece, count - begin), runs = (size + kRun - 1) / kRun;
      ParallelFor(num_heads * runs, threads_, [&](int64_t index) {
        const int64_t first = index % runs * kRun;
        for (int64_t t = first; t < std::min(first + kRun, size); ++t) {
          references_[index / runs].PrepareToken(
              t, host_proj_.data() + (kHistory + begin + t) * layer_.proj_columns(),
              host_coef_.data() + (begin + t) * layer_.coef_columns());
        }
      });
      ParallelFor(num_heads * HeadReference::kBlocks, threads_, [&](int64_t index) {
        references_[index / HeadReference::kBlocks].AdvanceBlock(
            static_cast<int>(index % HeadReference::kBlocks), size);
      });
      piece_tokens_ = size;
    }
  }

  // After a slice of `count` tokens that ends at token `tokens`.
  Report ReportOf(int64_t tokens, const char* form, int64_t count) {
    Report report;
    report.tokens = tokens;
    report.form = form;
    report.greatest_norm = greatest_norm_;
    report.norm = Norm(host_state_);
    for (const float value : host_state_) {
      if (!std::isfinite(value)) ++report.not_finite;
      report.max_abs = Worse(std::abs(static_cast<double>(value)), report.max_abs);
    }
    const int64_t compared = std::min({kOutputTokens, count, piece_tokens_});
    const int64_t channels = layer_.v_channels();
    std::vector<float> out(static_cast<size_t>(compared * channels));
    device_.ReadActivations(
        out, static_cast<std::byte*>(out_.get()) + static_cast<size_t>(count - compared) * out_bytes_);
    Check(device_.Synchronize());
    for (const float value : out) report.not_finite += std::isfinite(value) ? 0 : 1;
    for (const HeadReference& exact : references_) {
      const reference::Vector exact_state = exact.State();
      const std::span<const float> state =
          std::span(host_state_).subspan(exact.head() * exact_state.size(), exact_state.size());
      HeadReport head = {.head = exact.head(),
                         .state_norm = Norm(state),
                         .reference_norm = Norm(exact_state),
                         .state_error = RelativeError(state, exact_state),
                         .output_error = 0};
      for (int64_t t = 0; t < compared; ++t) {
        const std::span<const float> row =
            std::span(out).subspan(static_cast<size_t>(t * channels + exact.head() * kHeadSize), kHeadSize);
        head.output_error =
            Worse(RelativeError(row, exact.Output(piece_tokens_ - compared + t)), head.output_error);
      }
      report.state_error = Worse(head.state_error, report.state_error);
      report.output_error = Worse(head.output_error, report.output_error);
      report.heads.push_back(head);
    }
    return report;
  }

  Device& device_;
  const Options& options_;
  int threads_;
  int64_t slice_;
  Inputs inputs_;
  reference::Mix parameters_;
  MixLayer layer_;  // pointing into uploads_
  std::vector<Buffer> uploads_;
  size_t proj_bytes_, coef_bytes_, out_bytes_;  // of a token's row on the device
  Buffer proj_, coef_, out_;                    // [slice_, columns]
  Buffer token_proj_, token_coef_, token_out_;  // one row each
  Buffer pool_;
  StateView state_;
  std::vector<float> host_proj_;   // [kHistory + slice_, proj_columns]
  std::vector<float> host_coef_;   // [slice_, coef_columns]
  std::vector<float> host_state_;  // [kNumHeads, d_k, d_v]
  std::vector<HeadReference> references_;
  int64_t slice_tokens_ = 0;  // rows of host_proj_ in use, the history in front not counted
  int64_t piece_tokens_ = 0;  // of the references' last piece
  double greatest_norm_ = 0;
};

// JSON has no NaN and no infinity.
std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

std::string JsonLine(const Report& report) {
  std::string line = "{\"tokens\": " + std::to_string(report.tokens) + ", \"form\": \"" + report.form +
                     "\", \"state_norm\": " + JsonNumber(report.norm) +
                     ", \"greatest_state_norm\": " + JsonNumber(report.greatest_norm) +
                     ", \"state_max\": " + JsonNumber(report.max_abs) +
                     ", \"not_finite\": " + std::to_string(report.not_finite) +
                     ", \"state_error\": " + JsonNumber(report.state_error) +
                     ", \"output_error\": " + JsonNumber(report.output_error) + ", \"heads\": [";
  for (const HeadReport& head : report.heads) {
    line += (&head == report.heads.data() ? "" : ", ");
    line += "{\"head\": " + std::to_string(head.head) + ", \"state_norm\": " + JsonNumber(head.state_norm) +
            ", \"reference_norm\": " + JsonNumber(head.reference_norm) +
            ", \"state_error\": " + JsonNumber(head.state_error) +
            ", \"output_error\": " + JsonNumber(head.output_error) + "}";
  }
  return line + "]}";
}

int64_t ParseCount(const std::string& name, const std::string& text, int64_t least, int64_t most) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < least || value > most) {
    Fail(name + " is \"" + text + "\"; it must be a whole number from " + std::to_string(least) + " to " +
         std::to_string(most));
  }
  return value;
}

double ParseBound(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value > 0)) Fail(name + " is \"" + text + "\"; it must be positive");
  return value;
}

Options Parse(int argc, char** argv) {
  constexpr int64_t kMost = int64_t{1} << 40, kMostSlice = 1 << 20, kMostThreads = 1024;
  Options options;
  options.command = "drift_bench";
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) Fail(name + " needs a value");
    const std::string value = argv[i + 1];
    if (name != "--json") options.command += " " + name + " " + value;
    if (name == "--device") {
      options.device = value;
    } else if (name == "--type") {
      options.type = value;
    } else if (name == "--tokens") {
      options.tokens = ParseCount(name, value, 1, kMost);
    } else if (name == "--recurrent") {
      options.recurrent = ParseCount(name, value, 0, kMost);
    } else if (name == "--slice") {
      options.slice = ParseCount(name, value, kChunkTokens, kMostSlice);
      if (options.slice % kChunkTokens != 0) {
        Fail("--slice is " + value + "; it must be a multiple of " + std::to_string(kChunkTokens));
      }
    } else if (name == "--report") {
      options.report.clear();
      std::stringstream list(value);
      for (std::string item; std::getline(list, item, ',');) {
        options.report.push_back(ParseCount(name, item, kChunkTokens, kMost));
        if (options.report.back() % kChunkTokens != 0) {
          Fail("--report has " + item + "; its points must be multiples of " + std::to_string(kChunkTokens));
        }
      }
    } else if (name == "--reference-heads") {
      options.reference_heads = static_cast<int>(ParseCount(name, value, 1, kNumHeads));
    } else if (name == "--threads") {
      options.threads = static_cast<int>(ParseCount(name, value, 0, kMostThreads));
    } else if (name == "--seed") {
      options.seed = static_cast<uint64_t>(ParseCount(name, value, 0, kMost));
    } else if (name == "--max-state-error") {
      options.max_state_error = ParseBound(name, value);
    } else if (name == "--max-output-error") {
      options.max_output_error = ParseBound(name, value);
    } else if (name == "--json") {
      options.json_file = value;
    } else {
      Fail("unknown option " + name +
           "; the options are --device, --type, --tokens, --recurrent, --slice, --report, --reference-heads, "
           "--threads, --seed, --max-state-error, --max-output-error, --json");
    }
  }
  return options;
}

int Main(int argc, char** argv) {
  Options options = Parse(argc, argv);
  const Named* type = nullptr;
  for (const Named& candidate : kTypes) {
    if (options.type == candidate.name) type = &candidate;
  }
  if (type == nullptr) {
    Fail("--type is " + options.type + "; the choices are efla, gated_efla, delta_net, gated_deltanet");
  }
  absl::StatusOr<std::unique_ptr<Device>> device =
      CreateDevice({.kind = options.device, .threads = options.threads});
  if (!device.ok()) Fail(std::string(device.status().message()));
  const double tolerance = (*device)->activation_bytes() == sizeof(float) ? kExactTolerance : kHalfTolerance;
  if (options.max_state_error == 0) options.max_state_error = tolerance;
  if (options.max_output_error == 0) options.max_output_error = 10 * tolerance;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int threads = options.threads > 0 ? options.threads : cores;

  std::FILE* json = nullptr;
  if (!options.json_file.empty()) {
    json = std::fopen(options.json_file.c_str(), "w");
    if (json == nullptr) Fail("cannot write " + options.json_file);
  }
  const auto write_json = [&](const std::string& line) {
    if (json == nullptr) return;
    if (std::fprintf(json, "%s\n", line.c_str()) < 0 || std::fflush(json) != 0) {
      Fail("cannot write " + options.json_file);
    }
  };
  const std::string device_name = (*device)->info().name;
  write_json("{\"command\": \"" + options.command + "\", \"date\": \"" + UtcTime() + "\", \"device\": \"" +
             device_name + "\", \"type\": \"" + type->name + "\", \"num_heads\": " +
             std::to_string(kNumHeads) + ", \"head_size\": " + std::to_string(kHeadSize) +
             ", \"conv_size\": " + std::to_string(kConvSize) + ", \"seed\": " + std::to_string(options.seed) +
             ", \"max_state_error\": " + JsonNumber(options.max_state_error) +
             ", \"max_output_error\": " + JsonNumber(options.max_output_error) + "}");
  std::printf("%s, %s, %d heads of %d x %d; errors are relative to float64, the worst of %d heads\n",
              device_name.c_str(), type->name, kNumHeads, kHeadSize, kHeadSize, options.reference_heads);
  std::printf("%10s  %-9s  %10s  %12s  %10s  %10s  %11s  %12s\n", "tokens", "form", "|S|", "greatest |S|",
              "max entry", "not finite", "state error", "output error");

  DriftBench bench(**device, LayerShape(type->type), options, threads);
  std::vector<std::string> failures;
  bench.Run([&](const Report& report) {
    std::printf("%10lld  %-9s  %10.4g  %12.4g  %10.4g  %10lld  %11.3g  %12.3g\n",
                static_cast<long long>(report.tokens), report.form, report.norm, report.greatest_norm,
                report.max_abs, static_cast<long long>(report.not_finite), report.state_error,
                report.output_error);
    std::fflush(stdout);
    write_json(JsonLine(report));
    const std::string place = " at token " + std::to_string(report.tokens);
    const auto bound = [&](const char* what, double error, double most) {
      if (!(error <= most)) {
        failures.push_back(std::string("the ") + what + " error is " + JsonNumber(error) + place +
                           "; the bound is " + JsonNumber(most));
      }
    };
    if (report.not_finite > 0) {
      failures.push_back(std::to_string(report.not_finite) + " values are not finite" + place);
    }
    bound("state", report.state_error, options.max_state_error);
    bound("output", report.output_error, options.max_output_error);
  });
  if (json != nullptr && std::fclose(json) != 0) Fail("cannot write " + options.json_file);
  for (const std::string& failure : failures) std::fprintf(stderr, "drift_bench: %s\n", failure.c_str());
  return failures.empty() ? 0 : 1;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) { return efla::Main(argc, argv); }
