// A head whose rows have freely chosen logits: x = sqrt(H) e_j is a fixed point of RMSNorm, so the logits of
// row j are column j of the head times sqrt(H). And the exact distributions that draws are to follow.
#ifndef EFLA_TESTS_KERNELS_HEAD_BENCH_H_
#define EFLA_TESTS_KERNELS_HEAD_BENCH_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "tests/kernels/device_test.h"

namespace efla {

inline constexpr int kHidden = 256;
inline constexpr float kRootHidden = 16;
inline constexpr int kVocab = 331;
inline constexpr int kMaxTokens = 200;

// StepInput::adjustments and masks.
struct DrawLists {
  std::vector<LogitAdjustment> adjustments;
  std::vector<uint32_t> masks;
};

class HeadBench {
 public:
  static Device::Limits LimitsOf(int vocab_size = kVocab) {
    MixLayer mix;
    mix.num_heads = 1;
    mix.d_k = mix.d_v = 64;
    return {.max_tokens = kMaxTokens,
            .max_decode = kMaxTokens,
            .max_samples = kMaxTokens,
            .hidden_size = kHidden,
            .intermediate_size = kHidden,
            .vocab_size = vocab_size,
            .mix = mix};
  }

  // distributions[j] are the logits of distribution j, one for each token; 16-bit weights round them.
  HeadBench(Device& device, std::vector<std::vector<float>> distributions)
      : vocab_size(static_cast<int>(distributions[0].size())),
        device_(device),
        x_(device, kMaxTokens * kHidden),
        norm_(device, std::vector<float>(kHidden, 1.0f)) {
    std::vector<float> head(static_cast<size_t>(vocab_size) * kHidden, 0.0f);
    for (size_t j = 0; j < distributions.size(); ++j) {
      for (int id = 0; id < vocab_size; ++id) head[id * kHidden + j] = distributions[j][id] / kRootHidden;
    }
    weight_ = Bf16Weight(head, vocab_size, kHidden);
    for (size_t j = 0; j < distributions.size(); ++j) {
      for (int id = 0; id < vocab_size; ++id) {
        distributions[j][id] = static_cast<float>(weight_.values[id * kHidden + j]) * kRootHidden;
      }
    }
    logits = std::move(distributions);
    DeviceStatus status;
    head_ = device.LoadMatrix({&weight_.host, 1}, MatrixUse::kLinear, status);
    EXPECT_TRUE(status.ok()) << status.message;
  }

  // Token i of the step follows distribution distribution_of[i]; -1 makes its row NaN, -2 infinite.
  StepOutput Run(const std::vector<int>& distribution_of, const std::vector<SampleRow>& samples,
                 const DrawLists& lists = {}) {
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
    input.adjustments = lists.adjustments;
    input.masks = lists.masks;
    RunStep(device_, input,
            [&] { device_.Head({.x = x_.get(), .norm = norm_.get(), .norm_eps = 0, .head = head_.get()}); });
    return device_.output();
  }

  // Many draws of one distribution under `row`, at positions 0, 1, 2, ...; each row has list and mask of
  // `lists`.
  std::vector<int> CountDraws(int distribution, SampleRow row, int draws, const DrawLists& lists = {}) {
    std::vector<int> counts(vocab_size, 0);
    row.num_adjust = static_cast<int>(lists.adjustments.size());
    row.mask = lists.masks.empty() ? -1 : 0;
    const std::vector<int> distribution_of(kMaxTokens, distribution);
    for (int begin = 0; begin < draws; begin += kMaxTokens) {
      std::vector<SampleRow> samples(kMaxTokens, row);
      for (int i = 0; i < kMaxTokens; ++i) {
        samples[i].token_row = i;
        samples[i].position = begin + i;
      }
      for (const SampleResult& result : Run(distribution_of, samples, lists).rows) ++counts[result.token];
    }
    return counts;
  }

  const int vocab_size;
  std::vector<std::vector<float>> logits;  // as the device has them

 private:
  Device& device_;
  FloatArray x_, norm_;
  TestWeight weight_;
  std::unique_ptr<Matrix> head_;
};

// Tokens by rank: highest logit first, the lower id among equals.
template <typename Logits>
std::vector<TokenId> Ranked(const Logits& logits) {
  std::vector<TokenId> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<TokenId>(i);
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  return order;
}

// What the documented steps keep, and with which probability. `lists`: of this row alone.
inline std::map<TokenId, double> ExactDistribution(const std::vector<float>& logits, const SampleRow& row,
                                                   const DrawLists& lists = {}) {
  reference::Vector z = ToDouble(logits);
  for (const LogitAdjustment& change : lists.adjustments) {
    double& logit = z[change.token];
    logit += static_cast<double>(change.bias);
    const double scale = static_cast<double>(change.scale);
    logit = (logit > 0 ? logit / scale : logit * scale) - static_cast<double>(change.penalty);
  }
  std::vector<TokenId> kept;
  for (const TokenId id : Ranked(z)) {
    const bool masked = !lists.masks.empty() && (lists.masks[id / 32] >> (id % 32) & 1) == 0;
    if (std::isfinite(z[id]) && !masked) kept.push_back(id);
  }
  if (kept.empty()) return {};
  if (row.temperature == 0) return {{kept[0], 1.0}};
  const double best = z[kept[0]];
  const auto weight = [&](TokenId id) {
    return std::exp((z[id] - best) / static_cast<double>(row.temperature));
  };
  const auto total_of = [&] {
    double total = 0;
    for (const TokenId id : kept) total += weight(id);
    return total;
  };
  if (row.top_k > 0) kept.resize(std::min<size_t>(row.top_k, kept.size()));
  if (row.typical_p < 1) {
    const double total = total_of();
    double entropy = 0;
    for (const TokenId id : kept) entropy -= weight(id) / total * std::log(weight(id) / total);
    const auto off = [&](TokenId id) { return std::abs(-std::log(weight(id) / total) - entropy); };
    std::vector<TokenId> nearest = kept;
    std::stable_sort(nearest.begin(), nearest.end(), [&](TokenId a, TokenId b) { return off(a) < off(b); });
    double sum = 0, reach = 0;
    for (const TokenId id : nearest) {
      reach = off(id);
      sum += weight(id) / total;
      if (sum >= static_cast<double>(row.typical_p)) break;
    }
    constexpr double kEqual = 1e-9;
    std::erase_if(kept, [&](TokenId id) { return off(id) > reach + kEqual; });
  }
  if (row.top_p < 1) {
    const double total = total_of();
    double sum = 0;
    size_t i = 0;
    while (i < kept.size() && (i == 0 || sum < static_cast<double>(row.top_p) * total))
      sum += weight(kept[i++]);
    kept.resize(i);
  }
  const double least = static_cast<double>(row.min_p) * weight(kept[0]);
  std::erase_if(kept, [&](TokenId id) { return weight(id) < least; });
  std::map<TokenId, double> result;
  const double total = total_of();
  for (const TokenId id : kept) result[id] = weight(id) / total;
  return result;
}

// Chi-squared of counts against the distribution, rare tokens pooled; six standard deviations of slack.
inline void ExpectDrawnFrom(const std::vector<int>& counts, const std::map<TokenId, double>& distribution) {
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

inline std::vector<std::vector<float>> RandomDistributions(TestRandom& random, int count,
                                                           int vocab_size = kVocab) {
  std::vector<std::vector<float>> distributions;
  for (int i = 0; i < count; ++i) distributions.push_back(random.Normals(vocab_size, 2));
  return distributions;
}

#define EFLA_HEAD_BENCH(device, bench, ...)                      \
  SCOPED_TRACE(testing::Message() << "seed " << random_.seed()); \
  EFLA_CREATE_DEVICE_OR_SKIP(device, GetParam());                \
  EFLA_PREPARE_OR_SKIP(device, HeadBench::LimitsOf());           \
  HeadBench bench(*device, __VA_ARGS__)

}  // namespace efla

#endif  // EFLA_TESTS_KERNELS_HEAD_BENCH_H_
