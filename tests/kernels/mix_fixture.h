// One layer's token mixing on a device, at fixed addresses, with a pool of slots.
#ifndef EFLA_TESTS_KERNELS_MIX_FIXTURE_H_
#define EFLA_TESTS_KERNELS_MIX_FIXTURE_H_

#include <algorithm>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/device_test.h"

namespace efla {

struct MixCase {
  std::string name;
  MixLayer shape;  // without pointers
  friend void PrintTo(const MixCase& test_case, std::ostream* out) { *out << test_case.name; }
};

// One row of a step: a decode row, or one token of a segment.
struct TokenInput {
  std::vector<float> proj, coef;
};

class MixBench {
 public:
  static constexpr int kMaxTokens = 700;
  static constexpr int kMaxDecode = 64;
  static constexpr int kSlots = 72;
  static constexpr int64_t kGuard = 64;  // floats around the layer's state that nobody may touch

  static Device::Limits LimitsOf(const MixLayer& shape) {
    return {.max_tokens = kMaxTokens,
            .max_decode = kMaxDecode,
            .max_samples = 1,
            .hidden_size = shape.v_channels(),
            .intermediate_size = shape.v_channels(),
            .vocab_size = 64,
            .mix = shape};
  }

  MixBench(Device& device, TestRandom& random, const MixLayer& shape, double proj_scale = 1.5)
      : device_(device),
        random_(random),
        proj_scale_(proj_scale),
        layer_(shape),
        q_conv_(random.Normals(shape.q_channels() * shape.conv_size, 0.5)),
        k_conv_(random.Normals(shape.q_channels() * shape.conv_size, 0.5)),
        v_conv_(random.Normals(shape.v_channels() * shape.conv_size, 0.5)),
        a_log_(random.Normals(shape.num_heads)),
        dt_bias_(random.Normals(shape.num_heads, 2)),
        o_norm_(random.Normals(shape.d_v)),
        conv_floats_(static_cast<int64_t>(std::max(shape.conv_size - 1, 0)) * shape.conv_channels()),
        recurrent_floats_(static_cast<int64_t>(shape.num_heads) * shape.d_k * shape.d_v),
        proj_(device, static_cast<size_t>(kMaxTokens) * shape.proj_columns()),
        coef_(device, static_cast<size_t>(kMaxTokens) * std::max(shape.coef_columns(), 1)),
        out_(device, static_cast<size_t>(kMaxTokens) * shape.v_channels()) {
    const auto padded = [](int64_t floats) { return (floats + 63) / 64 * 64; };
    state_.conv_offset = kGuard;
    state_.recurrent_offset = kGuard + padded(conv_floats_) + kGuard;
    state_.slot_stride = state_.recurrent_offset + padded(recurrent_floats_) + kGuard;
    pool_.emplace_back(device, static_cast<size_t>(kSlots * state_.slot_stride));
    const std::vector<float> zeros(static_cast<size_t>(state_.slot_stride), 0.0f);
    pool_[0].Write(zeros);
    state_.pool = pool_[0].get();
    if (shape.conv_size > 0) {
      layer_.q_conv = Upload(q_conv_);
      layer_.k_conv = Upload(k_conv_);
      layer_.v_conv = Upload(v_conv_);
    }
    if (IsGated(shape.type)) {
      layer_.a_log = Upload(a_log_);
      layer_.dt_bias = Upload(dt_bias_);
    }
    layer_.o_norm = Upload(o_norm_);
    layer_.norm_eps = 1e-5f;
    reference_ = {layer_,           ToDouble(q_conv_),  ToDouble(k_conv_), ToDouble(v_conv_),
                  ToDouble(a_log_), ToDouble(dt_bias_), ToDouble(o_norm_)};
  }

  const MixLayer& layer() const { return layer_; }
  const reference::Mix& reference() const { return reference_; }

  TokenInput RandomToken() {
    return {random_.Normals(layer_.proj_columns(), proj_scale_), random_.Normals(layer_.coef_columns(), 2)};
  }
  std::vector<TokenInput> RandomTokens(int count) {
    std::vector<TokenInput> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(RandomToken());
    return tokens;
  }

  // The inputs as the device holds them (16-bit activations round), for the reference.
  std::vector<TokenInput> AsStored(std::vector<TokenInput> tokens) {
    WriteInputs(tokens);
    const std::vector<float> stored = proj_.Read(tokens.size() * layer_.proj_columns());
    for (size_t t = 0; t < tokens.size(); ++t) {
      std::copy_n(stored.begin() + static_cast<ptrdiff_t>(t) * layer_.proj_columns(), layer_.proj_columns(),
                  tokens[t].proj.begin());
    }
    return tokens;
  }

  struct Decode {
    int32_t read_slot, write_slot;
  };

  // Runs one step over all tokens: the decode rows first, then the segments. Returns a row of outputs a
  // token.
  std::vector<std::vector<float>> Run(const std::vector<TokenInput>& tokens,
                                      const std::vector<Decode>& decode,
                                      const std::vector<Segment>& segments) {
    WriteInputs(tokens);
    out_.Poison();
    std::vector<int32_t> read, write;
    for (const Decode& row : decode) {
      read.push_back(row.read_slot);
      write.push_back(row.write_slot);
    }
    const std::vector<TokenId> ids(tokens.size(), 0);
    RunStep(
        device_,
        {.tokens = ids,
         .num_decode = static_cast<int>(decode.size()),
         .decode_read_slot = read,
         .decode_write_slot = write,
         .segments = segments,
         .samples = {}},
        [&] {
          const MixArgs args = {
              .layer = &layer_, .proj = proj_.get(), .coef = coef_.get(), .state = state_, .out = out_.get()};
          device_.MixRecurrent(args);
          device_.MixChunk(args);
        });
    const std::vector<float> all = out_.Read(tokens.size() * layer_.v_channels());
    std::vector<std::vector<float>> rows;
    for (size_t t = 0; t < tokens.size(); ++t) {
      rows.emplace_back(all.begin() + static_cast<ptrdiff_t>(t) * layer_.v_channels(),
                        all.begin() + static_cast<ptrdiff_t>(t + 1) * layer_.v_channels());
    }
    return rows;
  }

  // A slot whole, guards included.
  std::vector<float> ReadSlot(int slot) const {
    return pool_[0].Read(static_cast<size_t>(slot * state_.slot_stride),
                         static_cast<size_t>(state_.slot_stride));
  }
  void WriteSlot(int slot, std::span<const float> floats) {
    pool_[0].Write(floats, static_cast<size_t>(slot * state_.slot_stride));
  }
  std::vector<float> RandomSlot() {
    std::vector<float> floats = random_.Normals(static_cast<size_t>(state_.slot_stride));
    return floats;
  }
  reference::MixState StateOf(std::span<const float> slot) const {
    return {ToDouble(slot.subspan(state_.recurrent_offset, recurrent_floats_)),
            ToDouble(slot.subspan(state_.conv_offset, conv_floats_))};
  }
  // Everything of the slot but the layer's state.
  std::vector<float> GuardsOf(std::span<const float> slot) const {
    std::vector<float> guards(slot.begin(), slot.begin() + state_.conv_offset);
    guards.insert(guards.end(), slot.begin() + state_.conv_offset + conv_floats_,
                  slot.begin() + state_.recurrent_offset);
    guards.insert(guards.end(), slot.begin() + state_.recurrent_offset + recurrent_floats_, slot.end());
    return guards;
  }

 private:
  const float* Upload(const std::vector<float>& values) {
    parameters_.emplace_back(device_, values);
    return parameters_.back().get();
  }
  void WriteInputs(const std::vector<TokenInput>& tokens) {
    std::vector<float> proj, coef;
    for (const TokenInput& token : tokens) {
      proj.insert(proj.end(), token.proj.begin(), token.proj.end());
      coef.insert(coef.end(), token.coef.begin(), token.coef.end());
    }
    proj_.Write(proj);
    coef_.Write(coef);
  }

  Device& device_;
  TestRandom& random_;
  double proj_scale_;
  MixLayer layer_;
  std::vector<float> q_conv_, k_conv_, v_conv_, a_log_, dt_bias_, o_norm_;
  int64_t conv_floats_, recurrent_floats_;
  StateView state_;
  reference::Mix reference_;
  std::vector<FloatArray> pool_, parameters_;
  ActArray proj_;
  FloatArray coef_;
  ActArray out_;
};

}  // namespace efla

#endif  // EFLA_TESTS_KERNELS_MIX_FIXTURE_H_
