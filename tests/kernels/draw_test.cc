// Draws with lists of adjustments, masks and typical-p: exact distributions, bans, and rows that do not see
// each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/kernels/head_bench.h"

namespace efla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kDraws = 20000;

class DrawTest : public testing::TestWithParam<std::string> {
 protected:
  // A list of `count` tokens, each once: biases, scales and penalties of both signs, and one in `ban_every`
  // banned.
  std::vector<LogitAdjustment> RandomList(int count, int vocab_size, int ban_every) {
    std::set<TokenId> tokens;
    while (static_cast<int>(tokens.size()) < count) tokens.insert(random_.Integer(0, vocab_size - 1));
    std::vector<LogitAdjustment> list;
    for (const TokenId token : tokens) {
      list.push_back({.token = token,
                      .bias = random_.Integer(1, ban_every) == 1 ? -kInfinity : random_.Normal(2),
                      .scale = static_cast<float>(random_.Uniform(0.5, 3)),
                      .penalty = random_.Normal()});
    }
    std::shuffle(list.begin(), list.end(), random_.engine());
    return list;
  }
  std::vector<uint32_t> RandomMask(int vocab_size, double allowed) {
    std::vector<uint32_t> mask(MaskWords(vocab_size));
    for (int id = 0; id < vocab_size; ++id) {
      if (random_.Uniform(0, 1) < allowed) mask[id / 32] |= uint32_t{1} << (id % 32);
    }
    return mask;
  }
  TestRandom random_;
};

TEST_P(DrawTest, EachParameterAndAllTogetherFollowTheExactDistribution) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 1));
  const uint64_t seed = random_.engine()();
  const DrawLists none, list = {RandomList(60, kVocab, 5), {}}, mask = {{}, RandomMask(kVocab, 0.3)},
                        both = {RandomList(kVocab, kVocab, 8), RandomMask(kVocab, 0.6)};
  const struct {
    SampleRow row;
    const DrawLists* lists;
  } cases[] = {
      {{.typical_p = 0.3f, .seed = seed}, &none},
      {{.temperature = 1.5f, .typical_p = 0.9f, .seed = seed}, &none},
      {{.top_k = 20, .typical_p = 0.5f, .seed = seed}, &none},
      {{.typical_p = 0.6f, .top_p = 0.7f, .seed = seed}, &none},
      {{.temperature = 2, .typical_p = 0.8f, .min_p = 0.3f, .seed = seed}, &none},
      {{.typical_p = 1e-6f, .seed = seed}, &none},
      {{.seed = seed}, &list},
      {{.temperature = 0.7f, .seed = seed}, &list},
      {{.top_k = 7, .seed = seed}, &list},
      {{.top_p = 0.8f, .seed = seed}, &list},
      {{.seed = seed}, &mask},
      {{.top_k = 15, .seed = seed}, &mask},
      {{.top_k = kVocab - 1, .seed = seed}, &mask},  // more than the mask leaves
      {{.top_p = 0.5f, .seed = seed}, &mask},
      {{.min_p = 0.1f, .seed = seed}, &mask},
      {{.seed = seed}, &both},
      {{.temperature = 3, .top_k = 100, .typical_p = 0.9f, .top_p = 0.8f, .min_p = 0.05f, .seed = seed},
       &both},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    const auto& [row, lists] = cases[i];
    ExpectDrawnFrom(bench.CountDraws(0, row, kDraws, *lists),
                    ExactDistribution(bench.logits[0], row, *lists));
  }
}

TEST_P(DrawTest, GreedyTakesTheBestOfWhatIsAdjustedAndAllowed) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 20));
  for (int i = 0; i < 20; ++i) {
    const DrawLists lists = {RandomList(random_.Integer(1, kVocab), kVocab, 3), RandomMask(kVocab, 0.2)};
    const SampleRow row = {.temperature = 0,
                           .typical_p = 0.5f,
                           .num_top = 3,
                           .num_adjust = static_cast<int>(lists.adjustments.size()),
                           .mask = 0};
    const auto expected = ExactDistribution(bench.logits[i], row, lists);
    const StepOutput output = bench.Run({i}, {row}, lists);
    ASSERT_EQ(output.rows[0].token, expected.empty() ? -1 : expected.begin()->first) << i;
  }
}

TEST_P(DrawTest, LogProbabilitiesStayTheModels) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 1));
  const std::vector<TokenId> order = Ranked(bench.logits[0]);
  DrawLists lists = {{{.token = order[0], .bias = -kInfinity}, {.token = order[2], .penalty = 50}}, {}};
  lists.masks.assign(MaskWords(kVocab), ~uint32_t{0});
  lists.masks[order[1] / 32] &= ~(uint32_t{1} << (order[1] % 32));
  const SampleRow drawing = {.temperature = 0, .num_top = 5, .num_adjust = 2, .mask = 0};
  const StepOutput output =
      bench.Run({0, 0}, {drawing, {.token_row = 1, .target = order[3], .num_top = 5}}, lists);
  EXPECT_EQ(output.rows[0].token, order[3]);
  EXPECT_EQ(output.rows[0].logprob, output.rows[1].logprob);
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(output.top[output.rows[0].top_begin + rank].token, order[rank]);
    EXPECT_EQ(output.top[output.rows[0].top_begin + rank].logprob,
              output.top[output.rows[1].top_begin + rank].logprob);
  }
}

TEST_P(DrawTest, ListsAndMasksThatChangeNothingDrawTheSameTokens) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 4));
  DrawLists lists;
  for (int id = 0; id < kVocab; id += 3) lists.adjustments.push_back({.token = id});
  lists.masks.assign(MaskWords(kVocab), ~uint32_t{0});
  std::vector<int> distribution_of;
  std::vector<SampleRow> plain, listed;
  for (int i = 0; i < kMaxTokens; ++i) {
    distribution_of.push_back(i % 4);
    plain.push_back({.token_row = i,
                     .temperature = i % 7 == 0 ? 0.0f : 1.3f,
                     .top_k = i % 3 == 0 ? 30 : 0,
                     .top_p = i % 5 == 0 ? 0.8f : 1.0f,
                     .min_p = i % 6 == 0 ? 0.02f : 0.0f,
                     .seed = random_.engine()(),
                     .num_top = i % 2});
    listed.push_back(plain.back());
    if (i % 2 == 0) listed.back().num_adjust = static_cast<int>(lists.adjustments.size());
    if (i % 2 == 1 || i % 4 == 0) listed.back().mask = 0;
  }
  const StepOutput view = bench.Run(distribution_of, plain);
  const std::vector<SampleResult> expected(view.rows.begin(), view.rows.end());
  const StepOutput output = bench.Run(distribution_of, listed, lists);
  for (int i = 0; i < kMaxTokens; ++i) {
    EXPECT_EQ(output.rows[i].token, expected[i].token) << i;
    EXPECT_EQ(output.rows[i].logprob, expected[i].logprob) << i;
  }
}

TEST_P(DrawTest, ARowDoesNotSeeItsNeighboursListsAndMasks) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 8));
  constexpr int kRows = 64;
  std::vector<int> distribution_of;
  std::vector<SampleRow> samples;
  std::vector<DrawLists> own(kRows);
  DrawLists all;
  for (int i = 0; i < kRows; ++i) {
    distribution_of.push_back(random_.Integer(0, 7));
    samples.push_back({.token_row = i,
                       .temperature = i % 9 == 0 ? 0.0f : 1.4f,
                       .top_k = i % 5 == 0 ? 25 : 0,
                       .typical_p = i % 4 == 0 ? 0.7f : 1.0f,
                       .top_p = i % 6 == 0 ? 0.9f : 1.0f,
                       .seed = random_.engine()()});
    if (i % 3 != 0) {
      own[i].adjustments = RandomList(random_.Integer(1, 200), kVocab, 6);
      samples[i].adjust_begin = static_cast<int>(all.adjustments.size());
      samples[i].num_adjust = static_cast<int>(own[i].adjustments.size());
      all.adjustments.insert(all.adjustments.end(), own[i].adjustments.begin(), own[i].adjustments.end());
    }
    if (i % 2 == 0) {
      own[i].masks = RandomMask(kVocab, 0.5);
      samples[i].mask = static_cast<int>(all.masks.size() / own[i].masks.size());
      all.masks.insert(all.masks.end(), own[i].masks.begin(), own[i].masks.end());
    }
  }
  const StepOutput view = bench.Run(distribution_of, samples, all);
  const std::vector<SampleResult> batch(view.rows.begin(), view.rows.end());
  for (int i = 0; i < kRows; ++i) {
    SampleRow alone = samples[i];
    alone.token_row = alone.adjust_begin = 0;
    if (alone.mask >= 0) alone.mask = 0;
    const StepOutput output = bench.Run({distribution_of[i]}, {alone}, own[i]);
    EXPECT_EQ(output.rows[0].token, batch[i].token) << i;
    EXPECT_EQ(output.rows[0].logprob, batch[i].logprob) << i;
  }
}

TEST_P(DrawTest, EachRowDrawsTheTokenThatItIsBiasedTo) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 3));
  std::vector<int> distribution_of;
  std::vector<SampleRow> samples;
  DrawLists lists;
  for (int i = 0; i < kMaxTokens; ++i) {
    distribution_of.push_back(i % 3);
    samples.push_back({.token_row = i, .seed = random_.engine()(), .adjust_begin = i, .num_adjust = 1});
    lists.adjustments.push_back({.token = (7 * i + 3) % kVocab, .bias = 100});
  }
  const StepOutput output = bench.Run(distribution_of, samples, lists);
  for (int i = 0; i < kMaxTokens; ++i) EXPECT_EQ(output.rows[i].token, (7 * i + 3) % kVocab);
}

TEST_P(DrawTest, WhereEverythingIsBannedNothingIsDrawn) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 1));
  DrawLists lists;
  for (int id = 0; id < kVocab; ++id) lists.adjustments.push_back({.token = id, .bias = -kInfinity});
  lists.masks.assign(MaskWords(kVocab), 0);  // of row 1
  lists.masks.resize(2 * MaskWords(kVocab), ~uint32_t{0});
  const std::vector<SampleRow> samples = {
      {.token_row = 0, .num_top = 2, .num_adjust = kVocab},
      {.token_row = 0, .temperature = 0, .num_top = 2, .mask = 0},
      {.token_row = 0, .typical_p = 0.5f, .num_top = 2, .num_adjust = kVocab, .mask = 1},
      {.token_row = 0, .seed = 5, .num_top = 2},
      {.token_row = 1, .num_adjust = kVocab}};
  const StepOutput output = bench.Run({0, -1}, samples, lists);
  for (int row = 0; row < 3; ++row) {
    EXPECT_EQ(output.rows[row].token, -1) << row;
    EXPECT_EQ(output.rows[row].finite, 1) << row;
    EXPECT_EQ(output.rows[row].logprob, -kInfinity) << row;
    EXPECT_EQ(output.top[output.rows[row].top_begin].token, Ranked(bench.logits[0])[0]) << row;
  }
  EXPECT_GE(output.rows[3].token, 0);
  EXPECT_EQ(output.rows[4].finite, 0);
}

TEST_P(DrawTest, WhatOverflowsIsNotBannedAndNotANumber) {
  std::vector<float> logits(kVocab, 1e30f);
  logits[4] = -1e30f;
  logits[9] = 0;
  EFLA_HEAD_BENCH(device, bench, {logits});
  DrawLists lists;
  for (int id = 0; id < kVocab; ++id) {
    if (id != 9) lists.adjustments.push_back({.token = id, .scale = id == 4 ? 1e30f : 1e-30f});
  }
  const SampleRow row = {.temperature = 0, .num_adjust = kVocab - 1};
  EXPECT_EQ(bench.Run({0}, {row}, lists).rows[0].token, 0);  // all but 4 and 9 are at the greatest number
  lists.adjustments = {{.token = 4, .scale = 1e30f}};
  for (int id = 0; id < kVocab; ++id) {
    if (id != 4) lists.adjustments.push_back({.token = id, .bias = -kInfinity});
  }
  EXPECT_EQ(bench.Run({0}, {{.seed = 1, .num_adjust = kVocab}}, lists).rows[0].token, 4);
}

// More than a block's shared memory holds.
TEST_P(DrawTest, ALargeVocabularyIsDrawnFromTheSameWay) {
  constexpr int kLargeVocab = 60001;
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed());
  EFLA_CREATE_DEVICE_OR_SKIP(device, GetParam());
  EFLA_PREPARE_OR_SKIP(device, HeadBench::LimitsOf(kLargeVocab));
  HeadBench bench(*device, RandomDistributions(random_, 2, kLargeVocab));
  const DrawLists lists = {RandomList(5000, kLargeVocab, 4), RandomMask(kLargeVocab, 0.001)};
  const SampleRow row = {.temperature = 0.8f,
                         .typical_p = 0.9f,
                         .seed = 11,
                         .num_top = 1,
                         .num_adjust = static_cast<int>(lists.adjustments.size()),
                         .mask = 0};
  ExpectDrawnFrom(bench.CountDraws(0, row, 600, lists), ExactDistribution(bench.logits[0], row, lists));
  // The row's own logits are untouched.
  const StepOutput output = bench.Run({0}, {row}, lists);
  EXPECT_EQ(output.top[0].token, Ranked(bench.logits[0])[0]);
  std::vector<float> logits(kLargeVocab);
  ASSERT_TRUE(device->ReadLogits(logits).ok());
  EXPECT_LE(WorstError(logits, ToDouble(bench.logits[0])), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Devices, DrawTest, testing::ValuesIn(TestedDevices()),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace efla
