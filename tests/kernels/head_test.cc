// Head: logits, log-probabilities, draws. Row j of these tests has its logits chosen freely: x = sqrt(H) e_j
// is a fixed point of RMSNorm, so the logits are column j of the head times sqrt(H).
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/kernels/device_test.h"

namespace efla {
namespace {

constexpr int kHidden = 256;
constexpr float kRootHidden = 16;
constexpr int kVocab = 331;
constexpr int kMaxTokens = 200;

class HeadTest : public testing::TestWithParam<std::string> {
 protected:
  TestRandom random_;
};

class HeadBench {
 public:
  static Device::Limits LimitsOf() {
    MixLayer mix;
    mix.num_heads = 1;
    mix.d_k = mix.d_v = 64;
    return {.max_tokens = kMaxTokens,
            .max_decode = kMaxTokens,
            .max_samples = kMaxTokens,
            .hidden_size = kHidden,
            .intermediate_size = kHidden,
            .vocab_size = kVocab,
            .mix = mix};
  }

  // distributions[j] are the logits of distribution j, kVocab each; 16-bit weights round them.
  HeadBench(Device& device, std::vector<std::vector<float>> distributions)
      : device_(device), x_(device, kMaxTokens * kHidden), norm_(device, std::vector<float>(kHidden, 1.0f)) {
    std::vector<float> head(kVocab * kHidden, 0.0f);
    for (size_t j = 0; j < distributions.size(); ++j) {
      for (int id = 0; id < kVocab; ++id) head[id * kHidden + j] = distributions[j][id] / kRootHidden;
    }
    weight_ = Bf16Weight(head, kVocab, kHidden);
    for (size_t j = 0; j < distributions.size(); ++j) {
      for (int id = 0; id < kVocab; ++id) {
        distributions[j][id] = static_cast<float>(weight_.values[id * kHidden + j]) * kRootHidden;
      }
    }
    logits = std::move(distributions);
    DeviceStatus status;
    head_ = device.LoadMatrix({&weight_.host, 1}, MatrixUse::kLinear, status);
    EXPECT_TRUE(status.ok()) << status.message;
  }

  // Token i of the step follows distribution distribution_of[i]; -1 makes its row NaN, -2 infinite.
  StepOutput Run(const std::vector<int>& distribution_of, const std::vector<SampleRow>& samples) {
    std::vector<float> x(distribution_of.size() * kHidden, 0.0f);
    for (size_t i = 0; i < distribution_of.size(); ++i) {
      if (distribution_of[i] >= 0) {
        x[i * kHidden + distribution_of[i]] = kRootHidden;
      } else {
        x[i * kHidden] = distribution_of[i] == -1 ? std::nanf("") : std::numeric_limits<float>::infinity();
      }
    }
    x_.Write(x);
    const DecodeRows rows(static_cast<int>(distribution_of.size()));
    StepInput input = rows.input;
    input.samples = samples;
    RunStep(device_, input,
            [&] { device_.Head({.x = x_.get(), .norm = norm_.get(), .norm_eps = 0, .head = head_.get()}); });
    return device_.output();
  }

  // Many draws of one distribution under `row`, at positions 0, 1, 2, ...
  std::vector<int> CountDraws(int distribution, SampleRow row, int draws) {
    std::vector<int> counts(kVocab, 0);
    const std::vector<int> distribution_of(kMaxTokens, distribution);
    for (int begin = 0; begin < draws; begin += kMaxTokens) {
      std::vector<SampleRow> samples(kMaxTokens, row);
      for (int i = 0; i < kMaxTokens; ++i) {
        samples[i].token_row = i;
        samples[i].position = begin + i;
      }
      for (const SampleResult& result : Run(distribution_of, samples).rows) ++counts[result.token];
    }
    return counts;
  }

  std::vector<std::vector<float>> logits;  // as the device has them

 private:
  Device& device_;
  FloatArray x_, norm_;
  TestWeight weight_;
  std::unique_ptr<Matrix> head_;
};

// Tokens by rank: highest logit first, the lower id among equals.
std::vector<TokenId> Ranked(const std::vector<float>& logits) {
  std::vector<TokenId> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<TokenId>(i);
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  return order;
}

// What the documented steps keep, and with which probability.
std::map<TokenId, double> ExactDistribution(const std::vector<float>& logits, const SampleRow& row) {
  const std::vector<TokenId> order = Ranked(logits);
  const double max = static_cast<double>(logits[order[0]]);
  const auto weight = [&](TokenId id) {
    return std::exp((static_cast<double>(logits[id]) - max) / static_cast<double>(row.temperature));
  };
  size_t kept = row.top_k > 0 ? std::min<size_t>(row.top_k, order.size()) : order.size();
  if (row.top_p < 1) {
    double total = 0, sum = 0;
    for (size_t i = 0; i < kept; ++i) total += weight(order[i]);
    size_t i = 0;
    while (i < kept && (i == 0 || sum < static_cast<double>(row.top_p) * total)) sum += weight(order[i++]);
    kept = i;
  }
  std::map<TokenId, double> result;
  double total = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (weight(order[i]) >= static_cast<double>(row.min_p)) total += result[order[i]] = weight(order[i]);
  }
  for (auto& [id, probability] : result) probability /= total;
  return result;
}

// Chi-squared of counts against the distribution, rare tokens pooled; six standard deviations of slack.
void ExpectDrawnFrom(const std::vector<int>& counts, const std::map<TokenId, double>& distribution) {
  double draws = 0;
  for (const int count : counts) draws += count;
  double chi_squared = 0, rare_expected = 0, rare_count = 0;
  int bins = 0;
  const auto add = [&](double count, double expected) {
    chi_squared += (count - expected) * (count - expected) / expected;
    ++bins;
  };
  for (size_t id = 0; id < counts.size(); ++id) {
    const auto entry = distribution.find(static_cast<TokenId>(id));
    if (entry == distribution.end()) {
      ASSERT_EQ(counts[id], 0) << "token " << id << " is cut but was drawn";
    } else if (entry->second * draws < 10) {
      rare_expected += entry->second * draws;
      rare_count += counts[id];
    } else {
      add(counts[id], entry->second * draws);
    }
  }
  if (rare_expected > 1) add(rare_count, rare_expected);
  const double freedom = std::max(bins - 1, 1);
  EXPECT_LT(chi_squared, freedom + 6 * std::sqrt(2 * freedom) + 6) << bins << " bins";
}

#define EFLA_HEAD_BENCH(device, bench, ...)                      \
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed()); \
  EFLA_CREATE_DEVICE_OR_SKIP(device, GetParam());                \
  EFLA_PREPARE_OR_SKIP(device, HeadBench::LimitsOf());           \
  HeadBench bench(*device, __VA_ARGS__)

std::vector<std::vector<float>> RandomDistributions(TestRandom& random, int count) {
  std::vector<std::vector<float>> distributions;
  for (int i = 0; i < count; ++i) distributions.push_back(random.Normals(kVocab, 2));
  return distributions;
}

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
