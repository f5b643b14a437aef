// Head: logits, log-probabilities, draws.
#include <gtest/gtest.h>

#include <set>

#include "tests/kernels/head_bench.h"

namespace efla {
namespace {

class HeadTest : public testing::TestWithParam<std::string> {
 protected:
  TestRandom random_;
};

TEST_P(HeadTest, LogitsAndLogProbabilitiesAreThoseOfTheHead) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 5));
  const std::vector<int> rows = {4, 0, 2};
  const std::vector<SampleRow> samples = {{.token_row = 2, .temperature = 0, .num_top = 7},
                                          {.token_row = 0, .target = kVocab - 1, .num_top = kMaxTopLogprobs},
                                          {.token_row = 1, .target = 0},
                                          {.token_row = 0, .temperature = 1.5f, .seed = 3}};
  const StepOutput output = bench.Run(rows, samples);
  ASSERT_EQ(output.rows.size(), samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "sample " << i);
    const std::vector<float>& logits = bench.logits[rows[samples[i].token_row]];
    const reference::Vector logprobs = reference::LogSoftmax(ToDouble(logits));
    const SampleResult& result = output.rows[i];
    EXPECT_EQ(result.finite, 1);
    if (samples[i].target >= 0) {
      EXPECT_EQ(result.token, samples[i].target);
    }
    if (samples[i].temperature == 0) {
      EXPECT_EQ(result.token, Ranked(logits)[0]);
    }
    EXPECT_NEAR(static_cast<double>(result.logprob), logprobs[result.token], 2e-5);
    const std::vector<TokenId> order = Ranked(logits);
    for (int rank = 0; rank < samples[i].num_top; ++rank) {
      const TokenLogprob& top = output.top[result.top_begin + rank];
      EXPECT_EQ(top.token, order[rank]) << "rank " << rank;
      EXPECT_NEAR(static_cast<double>(top.logprob), logprobs[order[rank]], 2e-5) << "rank " << rank;
    }
  }
  std::vector<float> logits(samples.size() * kVocab);
  const DeviceStatus status = device->ReadLogits(logits);
  ASSERT_TRUE(status.ok()) << status.message;
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::span<const float> row(logits.data() + i * kVocab, kVocab);
    EXPECT_LE(WorstError(row, ToDouble(bench.logits[rows[samples[i].token_row]])), 1e-5);
  }
}

TEST_P(HeadTest, AmongEqualLogitsTheLowestIdGoesFirst) {
  std::vector<float> ties(kVocab, -3.0f), flat(kVocab, 0.5f);
  for (const int id : {300, 17, 200, 18}) ties[id] = 4;
  for (const int id : {5, 330}) ties[id] = 2;
  EFLA_HEAD_BENCH(device, bench, {ties, flat});
  const StepOutput output = bench.Run({0, 1}, {{.token_row = 0, .temperature = 0, .num_top = 8},
                                               {.token_row = 1, .temperature = 0, .num_top = 3}});
  EXPECT_EQ(output.rows[0].token, 17);
  EXPECT_EQ(output.rows[1].token, 0);
  const TokenId expected[] = {17, 18, 200, 300, 5, 330, 0, 1};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(output.top[output.rows[0].top_begin + i].token, expected[i]) << i;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(output.top[output.rows[1].top_begin + i].token, i);
  // top_k and top_p take the lower ids of a tie.
  std::set<TokenId> drawn;
  const auto note = [&](SampleRow row) {
    drawn.clear();
    const std::vector<int> counts = bench.CountDraws(0, row, 2000);
    for (int id = 0; id < kVocab; ++id) {
      if (counts[id] > 0) drawn.insert(id);
    }
  };
  note({.top_k = 2});
  EXPECT_EQ(drawn, (std::set<TokenId>{17, 18}));
  note({.top_p = 0.4f});  // each of the four holds just under a quarter
  EXPECT_EQ(drawn, (std::set<TokenId>{17, 18}));
  note({.min_p = 1});
  EXPECT_EQ(drawn, (std::set<TokenId>{17, 18, 200, 300}));
}

TEST_P(HeadTest, DrawsFollowTheDocumentedDistribution) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 1));
  const uint64_t seed = random_.engine()();
  const std::vector<SampleRow> rows = {
      {.seed = seed},
      {.temperature = 0.5f, .seed = seed},
      {.temperature = 3, .seed = seed},
      {.top_k = 1, .seed = seed},
      {.top_k = 10, .seed = seed},
      {.top_k = 2 * kVocab, .seed = seed},
      {.top_p = 0.8f, .seed = seed},
      {.top_p = 0, .seed = seed},
      {.temperature = 5, .top_p = 0.99f, .seed = seed},
      {.min_p = 0.1f, .seed = seed},
      {.temperature = 2, .top_k = 40, .top_p = 0.7f, .min_p = 0.2f, .seed = seed},
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    ExpectDrawnFrom(bench.CountDraws(0, rows[i], 20000), ExactDistribution(bench.logits[0], rows[i]));
  }
}

TEST_P(HeadTest, ADrawDependsOnSeedPositionAndLogitsAlone) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 8));
  std::vector<int> distribution_of;
  std::vector<SampleRow> samples;
  for (int i = 0; i < kMaxTokens; ++i) {
    distribution_of.push_back(random_.Integer(0, 7));
    samples.push_back({.token_row = i,
                       .target = i % 5 == 0 ? random_.Integer(0, kVocab - 1) : -1,
                       .temperature = i % 7 == 0 ? 0.0f : 1.2f,
                       .top_k = i % 3 == 0 ? 30 : 0,
                       .top_p = i % 4 == 0 ? 0.9f : 1.0f,
                       .seed = random_.engine()(),
                       .position = random_.engine()() % 100000,
                       .num_top = i % 3});
  }
  const StepOutput view = bench.Run(distribution_of, samples);
  const std::vector<SampleResult> batch(view.rows.begin(), view.rows.end());
  const std::vector<TokenLogprob> batch_top(view.top.begin(), view.top.end());
  std::set<TokenId> tokens;
  for (int i = 0; i < kMaxTokens; i += 3) {
    SampleRow alone = samples[i];
    alone.token_row = 0;
    const StepOutput output = bench.Run({distribution_of[i]}, {alone});
    EXPECT_EQ(output.rows[0].token, batch[i].token) << i;
    EXPECT_EQ(output.rows[0].logprob, batch[i].logprob) << i;
    for (int rank = 0; rank < alone.num_top; ++rank) {
      EXPECT_EQ(output.top[rank].token, batch_top[batch[i].top_begin + rank].token);
      EXPECT_EQ(output.top[rank].logprob, batch_top[batch[i].top_begin + rank].logprob);
    }
    tokens.insert(batch[i].token);
  }
  EXPECT_GT(tokens.size(), 10u);
}

TEST_P(HeadTest, ARowThatIsNotFiniteIsReportedAndTouchesNoOther) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 3));
  const std::vector<SampleRow> samples = {{.token_row = 0, .seed = 1, .num_top = 2},
                                          {.token_row = 1, .seed = 1, .num_top = 2},
                                          {.token_row = 2, .seed = 1, .num_top = 2},
                                          {.token_row = 3, .target = 5}};
  const StepOutput clean_view = bench.Run({0, 1, 2, 0}, samples);
  const std::vector<SampleResult> clean(clean_view.rows.begin(), clean_view.rows.end());
  const StepOutput output = bench.Run({0, -1, 2, -2}, samples);
  EXPECT_EQ(output.rows[1].finite, 0);
  EXPECT_EQ(output.rows[3].finite, 0);
  for (const int row : {0, 2}) {
    EXPECT_EQ(output.rows[row].finite, 1);
    EXPECT_EQ(output.rows[row].token, clean[row].token);
    EXPECT_EQ(output.rows[row].logprob, clean[row].logprob);
  }
}

TEST_P(HeadTest, ExtremeLogitsStayExact) {
  std::vector<float> peaked(kVocab, -30000.0f), huge(kVocab, 0.0f);
  peaked[7] = 30000;
  huge[3] = 1e30f;
  EFLA_HEAD_BENCH(device, bench, {peaked, huge});
  for (const float temperature : {0.0f, 1e-6f, 1.0f, 1e6f}) {
    const StepOutput output =
        bench.Run({0, 1}, {{.token_row = 0, .temperature = temperature, .seed = 9, .num_top = 2},
                           {.token_row = 1, .temperature = temperature, .seed = 9}});
    EXPECT_EQ(output.rows[0].finite, 1);
    EXPECT_EQ(output.rows[0].logprob,
              output.rows[0].token == 7 ? 0.0f : bench.logits[0][0] - bench.logits[0][7]);
    if (temperature <= 1) {
      EXPECT_EQ(output.rows[0].token, 7);
    }
    EXPECT_EQ(output.rows[1].token, 3);
    EXPECT_EQ(output.top[0].token, 7);
    EXPECT_EQ(output.top[0].logprob, 0);
    EXPECT_EQ(output.top[1].token, 0);
  }
}

TEST_P(HeadTest, ReadLogitsRefusesTheWrongSize) {
  EFLA_HEAD_BENCH(device, bench, RandomDistributions(random_, 1));
  bench.Run({0, 0}, {{.token_row = 0}, {.token_row = 1}});
  std::vector<float> logits(kVocab);
  EXPECT_EQ(device->ReadLogits(logits).code, DeviceStatus::Code::kInvalid);
}

INSTANTIATE_TEST_SUITE_P(Devices, HeadTest, testing::ValuesIn(TestedDevices()),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace efla
