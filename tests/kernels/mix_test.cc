// MixRecurrent and MixChunk: against the reference, against each other, and bit for bit against themselves.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/kernels/mix_fixture.h"

namespace efla {
namespace {

MixCase Case(const std::string& name, ModelType type, int heads, int d_k, int d_v) {
  MixCase result{name, {}};
  result.shape.type = type;
  result.shape.num_heads = heads;
  result.shape.d_k = d_k;
  result.shape.d_v = d_v;
  result.shape.conv_size = 4;
  return result;
}

std::vector<MixCase> Cases() {
  std::vector<MixCase> cases = {
      Case("Efla", ModelType::kEfla, 2, 64, 64),
      Case("GatedEfla", ModelType::kGatedEfla, 2, 64, 128),
      Case("DeltaNet", ModelType::kDeltaNet, 3, 64, 64),
      Case("GatedDeltaNet", ModelType::kGatedDeltaNet, 1, 128, 128),
  };
  const auto add = [&](const std::string& name, ModelType type, int heads, int d_k, int d_v, auto change) {
    MixCase added = Case(name, type, heads, d_k, d_v);
    change(added.shape);
    cases.push_back(added);
  };
  add("EflaNoConvIdentity", ModelType::kEfla, 2, 128, 128, [](MixLayer& layer) {
    layer.conv_size = 0;
    layer.qk_activation = QkActivation::kIdentity;
  });
  add("EflaGateNegElu", ModelType::kEfla, 2, 64, 64, [](MixLayer& layer) {
    layer.use_gate = layer.allow_neg_eigval = true;
    layer.qk_activation = QkActivation::kElu;
  });
  add("GatedEflaGateRelu", ModelType::kGatedEfla, 2, 64, 64, [](MixLayer& layer) {
    layer.use_gate = true;
    layer.qk_activation = QkActivation::kRelu;
  });
  add("GatedEflaNoBeta", ModelType::kGatedEfla, 2, 64, 64, [](MixLayer& layer) { layer.use_beta = false; });
  add("EflaNoBetaNoCoef", ModelType::kEfla, 1, 128, 128, [](MixLayer& layer) { layer.use_beta = false; });
  add("DeltaNetNeg", ModelType::kDeltaNet, 2, 64, 64, [](MixLayer& layer) { layer.allow_neg_eigval = true; });
  add("EflaConv2", ModelType::kEfla, 2, 64, 64, [](MixLayer& layer) { layer.conv_size = 2; });
  add("EflaConv1", ModelType::kEfla, 2, 64, 64, [](MixLayer& layer) { layer.conv_size = 1; });
  add("EflaWideValue", ModelType::kEfla, 1, 32, 256, [](MixLayer&) {});
  add("GatedDeltaNetOddHeads", ModelType::kGatedDeltaNet, 2, 24, 40, [](MixLayer&) {});
  add("EflaUnevenHeads", ModelType::kEfla, 3, 13, 21, [](MixLayer& layer) { layer.use_gate = true; });
  return cases;
}

class MixTest : public testing::TestWithParam<std::tuple<std::string, MixCase>> {
 protected:
  const std::string& kind() const { return std::get<0>(GetParam()); }
  const MixLayer& shape() const { return std::get<1>(GetParam()).shape; }
  TestRandom random_;
};

#define EFLA_MIX_BENCH(device, bench)                            \
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed()); \
  EFLA_CREATE_DEVICE_OR_SKIP(device, kind());                    \
  EFLA_PREPARE_OR_SKIP(device, MixBench::LimitsOf(shape()));     \
  MixBench bench(*device, random_, shape())

// Heads of this size have an amplification of about 10; a query nearly orthogonal to all keys has far more.
double OutputTolerance(const Device& device, const reference::MixState& state) {
  return Tolerance(device) * std::max(1.0, state.amplification / 30);
}

void ExpectStateNear(const MixBench& bench, std::span<const float> slot, const reference::MixState& expected,
                     double tolerance) {
  const reference::MixState state = bench.StateOf(slot);
  const std::vector<float> recurrent(state.recurrent.begin(), state.recurrent.end());
  EXPECT_LE(WorstError(recurrent, expected.recurrent), tolerance);
  for (size_t i = 0; i < state.conv.size(); ++i)
    ASSERT_EQ(state.conv[i], expected.conv[i]) << "conv state " << i;
}

TEST_P(MixTest, RecurrentFormMatchesTheReference) {
  EFLA_MIX_BENCH(device, bench);
  constexpr int kRows = 5, kSteps = 3;
  // Rows 0 and 1 update in place, row 2 reads the zero slot, rows 3 and 4 read one slot and write another.
  const std::vector<MixBench::Decode> slots = {{1, 1}, {2, 2}, {0, 3}, {4, 5}, {6, 7}};
  std::vector<reference::MixState> states;
  for (int slot = 1; slot <= 7; ++slot) bench.WriteSlot(slot, bench.RandomSlot());
  const std::vector<float> zero_slot = bench.ReadSlot(0), read_only = bench.ReadSlot(4);
  const std::vector<float> guarded = bench.ReadSlot(1);
  for (const auto& slot : slots) states.push_back(bench.StateOf(bench.ReadSlot(slot.read_slot)));
  std::vector<MixBench::Decode> now = slots;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<TokenInput> tokens = bench.AsStored(bench.RandomTokens(kRows));
    const auto out = bench.Run(tokens, now, {});
    for (int row = 0; row < kRows; ++row) {
      const reference::Vector expected = reference::MixToken(bench.reference(), ToDouble(tokens[row].proj),
                                                             ToDouble(tokens[row].coef), states[row]);
      SCOPED_TRACE(testing::Message() << "step " << step << " row " << row);
      EXPECT_LE(WorstError(out[row], expected), OutputTolerance(*device, states[row]));
      ExpectStateNear(bench, bench.ReadSlot(now[row].write_slot), states[row], 1e-4);
    }
    for (auto& slot : now) slot.read_slot = slot.write_slot;
  }
  EXPECT_TRUE(SameBits(bench.ReadSlot(0), zero_slot));
  EXPECT_TRUE(SameBits(bench.ReadSlot(4), read_only));
  EXPECT_TRUE(SameBits(bench.GuardsOf(bench.ReadSlot(1)), bench.GuardsOf(guarded)));
}

TEST_P(MixTest, ChunkFormMatchesTheReference) {
  EFLA_MIX_BENCH(device, bench);
  const std::vector<int> lengths = {1, 2, 7, 63, 64, 65, 130};
  std::vector<Segment> segments;
  std::vector<reference::MixState> states;
  int begin = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int slot = static_cast<int>(i) + 1;
    bench.WriteSlot(slot, bench.RandomSlot());
    // From the zero slot, in place, and from a slot that stays as it is, in turn.
    const int read_slot = i % 3 == 0 ? 0 : i % 3 == 1 ? slot : slot + 20;
    if (i % 3 == 2) bench.WriteSlot(read_slot, bench.RandomSlot());
    segments.push_back({begin, lengths[i], read_slot, slot});
    states.push_back(bench.StateOf(bench.ReadSlot(read_slot)));
    begin += lengths[i];
  }
  const std::vector<float> read_only = bench.ReadSlot(23), guarded = bench.ReadSlot(2);
  const std::vector<TokenInput> tokens = bench.AsStored(bench.RandomTokens(begin));
  const auto out = bench.Run(tokens, {}, segments);
  for (size_t i = 0; i < segments.size(); ++i) {
    for (int t = 0; t < segments[i].num_tokens; ++t) {
      const size_t row = segments[i].token_begin + t;
      const reference::Vector expected = reference::MixToken(bench.reference(), ToDouble(tokens[row].proj),
                                                             ToDouble(tokens[row].coef), states[i]);
      ASSERT_LE(WorstError(out[row], expected), OutputTolerance(*device, states[i]))
          << "segment " << i << " token " << t;
    }
    SCOPED_TRACE(testing::Message() << "segment " << i);
    ExpectStateNear(bench, bench.ReadSlot(segments[i].write_slot), states[i], Tolerance(*device));
  }
  for (const float value : bench.ReadSlot(0)) ASSERT_EQ(value, 0);
  EXPECT_TRUE(SameBits(bench.ReadSlot(23), read_only));
  EXPECT_TRUE(SameBits(bench.GuardsOf(bench.ReadSlot(2)), bench.GuardsOf(guarded)));
}

TEST_P(MixTest, ChunkThenRecurrentEqualsRecurrentAlone) {
  EFLA_MIX_BENCH(device, bench);
  constexpr int kPrompt = 100, kGenerated = 20;
  const std::vector<TokenInput> tokens = bench.RandomTokens(kPrompt + kGenerated);
  bench.Run({tokens.begin(), tokens.begin() + kPrompt}, {}, {{0, kPrompt, 0, 1}});
  for (int t = 0; t < kPrompt + kGenerated; ++t) {
    const auto recurrent = bench.Run({tokens[t]}, {{t == 0 ? 0 : 2, 2}}, {});
    if (t < kPrompt) continue;
    const auto mixed = bench.Run({tokens[t]}, {{1, 1}}, {});
    ASSERT_LE(WorstError(mixed[0], ToDouble(recurrent[0])), Tolerance(*device)) << "token " << t;
  }
  const reference::MixState expected = bench.StateOf(bench.ReadSlot(2));
  ExpectStateNear(bench, bench.ReadSlot(1), expected, Tolerance(*device));
}

TEST_P(MixTest, ADecodeRowAloneHasTheBitsItHasInABatch) {
  EFLA_MIX_BENCH(device, bench);
  for (const int rows : {2, 9, 33}) {
    const std::vector<TokenInput> tokens = bench.RandomTokens(rows);
    std::vector<std::vector<float>> before;
    std::vector<MixBench::Decode> slots;
    for (int row = 0; row < rows; ++row) {
      before.push_back(bench.RandomSlot());
      bench.WriteSlot(row + 1, before.back());
      slots.push_back({row + 1, row + 1});
    }
    const auto batch = bench.Run(tokens, slots, {});
    std::vector<std::vector<float>> after;
    for (int row = 0; row < rows; ++row) after.push_back(bench.ReadSlot(row + 1));
    for (int row = 0; row < rows; ++row) {
      // In place again, then from one slot to another.
      bench.WriteSlot(40, before[row]);
      const auto moved = bench.Run({tokens[row]}, {{40, 41}}, {});
      ASSERT_TRUE(SameBits(bench.ReadSlot(40), before[row]));
      const auto alone = bench.Run({tokens[row]}, {{40, 40}}, {});
      ASSERT_TRUE(SameBits(alone[0], batch[row])) << row << " of " << rows;
      ASSERT_TRUE(SameBits(moved[0], batch[row])) << row << " of " << rows;
      ASSERT_TRUE(SameBits(bench.ReadSlot(40), after[row])) << row << " of " << rows;
      const reference::MixState one = bench.StateOf(bench.ReadSlot(41)), other = bench.StateOf(after[row]);
      ASSERT_TRUE(one.recurrent == other.recurrent && one.conv == other.conv) << row << " of " << rows;
    }
  }
}

TEST_P(MixTest, APromptCutOnTheGridHasTheBitsOfTheWhole) {
  EFLA_MIX_BENCH(device, bench);
  constexpr int kLength = 330;
  const std::vector<TokenInput> tokens = bench.RandomTokens(kLength);
  const std::vector<float> start = bench.RandomSlot();
  bench.WriteSlot(1, start);
  bench.WriteSlot(2, start);
  const auto whole = bench.Run(tokens, {}, {{0, kLength, 1, 2}});
  const std::vector<float> expected = bench.ReadSlot(2);
  const std::vector<std::vector<int>> cuts = {{64}, {320}, {64, 128, 192, 256, 320}, {128, 192}, {256}};
  for (const std::vector<int>& cut : cuts) {
    std::vector<int> ends = cut;
    ends.push_back(kLength);
    int begin = 0, read_slot = 1;
    bench.WriteSlot(3, start);
    for (const int end : ends) {
      // Some pieces share their step with decode rows and with another prompt.
      const int others = begin == 0 ? 0 : 3;
      std::vector<TokenInput> step_tokens = bench.RandomTokens(others);
      std::vector<MixBench::Decode> decode;
      for (int i = 0; i < others; ++i) decode.push_back({0, 10 + i});
      step_tokens.insert(step_tokens.end(), tokens.begin() + begin, tokens.begin() + end);
      std::vector<Segment> segments = {{others, end - begin, read_slot, 3}};
      if (others > 0) {
        const std::vector<TokenInput> other = bench.RandomTokens(70);
        segments.push_back({static_cast<int>(step_tokens.size()), 70, 0, 20});
        step_tokens.insert(step_tokens.end(), other.begin(), other.end());
      }
      const auto out = bench.Run(step_tokens, decode, segments);
      for (int t = begin; t < end; ++t) {
        ASSERT_TRUE(SameBits(out[others + t - begin], whole[t]))
            << "token " << t << ", piece " << begin << "-" << end;
      }
      begin = end;
      read_slot = 3;
    }
    ASSERT_TRUE(SameBits(bench.ReadSlot(3), expected)) << "cut first at " << cut[0];
  }
  EXPECT_TRUE(SameBits(bench.ReadSlot(1), start));
}

INSTANTIATE_TEST_SUITE_P(Devices, MixTest,
                         testing::Combine(testing::ValuesIn(TestedDevices()), testing::ValuesIn(Cases())),
                         [](const auto& tested) {
                           return std::get<0>(tested.param) + std::get<1>(tested.param).name;
                         });

}  // namespace
}  // namespace efla
