#include "model/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace efla {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void ExpectRefused(const absl::Status& status, const std::string& name) {
  ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
  EXPECT_NE(std::string(status.message()).find(name), std::string::npos) << status;
}

constexpr int64_t kVocab = 10000;

TEST(SamplingParamsTest, BoundsAreInclusiveWhereTheySaySo) {
  EXPECT_TRUE(SamplingParams{}.Validate(kVocab).ok());
  EXPECT_TRUE((SamplingParams{.temperature = 0}.Validate(kVocab).ok()));
  EXPECT_TRUE(
      (SamplingParams{.temperature = 100, .top_k = 1, .typical_p = 1e-6f, .top_p = 1e-6f, .min_p = 0.999f}
           .Validate(kVocab)
           .ok()));
  for (const float sign : {-1.0f, 1.0f}) {
    SamplingParams params = {.repetition_penalty = sign < 0 ? 0.01f : 10.0f,
                             .presence_penalty = 2 * sign,
                             .frequency_penalty = 2 * sign,
                             .penalty_window = sign < 0 ? 1 : kMaxPenaltyWindow,
                             .no_repeat_ngram_size = kMaxNoRepeatNgram,
                             .logit_bias = {},
                             .allowed_token_ids = std::vector<TokenId>(kMaxListedIds, kVocab - 1),
                             .banned_token_ids = std::vector<TokenId>(kMaxListedIds, 0)};
    for (int id = 0; id < kMaxLogitBias; ++id) params.logit_bias.emplace_back(id, 100 * sign);
    EXPECT_TRUE(params.Validate(kVocab).ok()) << params.Validate(kVocab);
  }
}

TEST(SamplingParamsTest, RefusesWhatIsOutOfRange) {
  const auto refuses = [](const SamplingParams& params, const std::string& words) {
    ExpectRefused(params.Validate(kVocab), words);
  };
  for (float bad : {-0.1f, 100.5f, kNan, kInfinity, -kInfinity}) refuses({.temperature = bad}, "temperature");
  refuses({.top_k = -1}, "top_k is -1");
  for (float bad : {0.0f, -1.0f, 1.01f, kNan, kInfinity}) {
    refuses({.top_p = bad}, "top_p");
    refuses({.typical_p = bad}, "typical_p");
  }
  for (float bad : {-0.01f, 1.0f, kNan, kInfinity}) refuses({.min_p = bad}, "min_p");
  for (float bad : {0.0f, 1e-40f, 0.0099f, -1.0f, 10.01f, kNan, kInfinity}) {
    refuses({.repetition_penalty = bad}, "repetition_penalty");
  }
  for (float bad : {-2.01f, 2.01f, kNan, kInfinity, -kInfinity}) {
    refuses({.presence_penalty = bad}, "presence_penalty");
    refuses({.frequency_penalty = bad}, "frequency_penalty");
  }
  for (int bad : {0, -1, kMaxPenaltyWindow + 1}) refuses({.penalty_window = bad}, "penalty_window is");
  for (int bad : {-1, kMaxNoRepeatNgram + 1})
    refuses({.no_repeat_ngram_size = bad}, "no_repeat_ngram_size is");
  for (float bad : {-100.5f, 100.5f, kNan, kInfinity, -kInfinity}) {
    refuses({.logit_bias = {{3, bad}}}, "logit_bias of id 3 is");
  }
  refuses({.logit_bias = {{3, 1.0f}, {4, 1.0f}, {3, 2.0f}}}, "logit_bias has id 3 twice");
  refuses({.logit_bias = std::vector<std::pair<TokenId, float>>(kMaxLogitBias + 1)}, "logit_bias has 1025");
  for (TokenId bad : {-1, static_cast<int>(kVocab), std::numeric_limits<TokenId>::max(),
                      std::numeric_limits<TokenId>::min()}) {
    refuses({.logit_bias = {{bad, 1.0f}}}, "logit_bias has id " + std::to_string(bad));
    refuses({.allowed_token_ids = {5, bad}}, "allowed_token_ids[1] is " + std::to_string(bad));
    refuses({.banned_token_ids = {5, bad}}, "banned_token_ids[1] is " + std::to_string(bad));
  }
  refuses({.allowed_token_ids = std::vector<TokenId>(kMaxListedIds + 1)}, "allowed_token_ids has 4097");
  refuses({.banned_token_ids = std::vector<TokenId>(kMaxListedIds + 1)}, "banned_token_ids has 4097");
}

TEST(SamplingParamsTest, RefusesListsThatLeaveNothing) {
  ExpectRefused(
      SamplingParams{.allowed_token_ids = {4, 5, 4}, .banned_token_ids = {5, 6, 4}}.Validate(kVocab),
      "allowed_token_ids has 3 ids and banned_token_ids has all of them");
  EXPECT_TRUE(
      (SamplingParams{.allowed_token_ids = {4, 5, 7}, .banned_token_ids = {5, 6, 4}}.Validate(kVocab).ok()));
  ExpectRefused(SamplingParams{.banned_token_ids = {0, 1, 1, 2}}.Validate(3),
                "banned_token_ids has every token");
  EXPECT_TRUE((SamplingParams{.banned_token_ids = {0, 1, 1}}.Validate(3).ok()));
}

TEST(StopParamsTest, AcceptsTheLimits) {
  StopParams params;
  params.max_tokens = 0;
  params.stop.assign(kMaxStopStrings, std::string(kMaxStopBytes, 'x'));
  params.stop_token_ids.assign(kMaxStopTokenIds, 99);
  EXPECT_TRUE(params.Validate(100).ok());
  params.max_tokens = params.min_tokens = 7;
  EXPECT_TRUE(params.Validate(100).ok());
}

TEST(StopParamsTest, MinTokensIsAtMostMaxTokens) {
  StopParams params;
  params.max_tokens = 7;
  params.min_tokens = 8;
  ExpectRefused(params.Validate(100), "min_tokens is 8; it must be 0 to max_tokens, 7");
  params.min_tokens = -1;
  ExpectRefused(params.Validate(100), "min_tokens is -1");
}

TEST(StopParamsTest, RefusesWhatIsOutOfRange) {
  const auto max_tokens = [](int64_t value) {
    StopParams params;
    params.max_tokens = value;
    return params.Validate(100);
  };
  const auto stops = [](std::vector<std::string> value) {
    StopParams params;
    params.stop = std::move(value);
    return params.Validate(100);
  };
  const auto ids = [](std::vector<TokenId> value) {
    StopParams params;
    params.stop_token_ids = std::move(value);
    return params.Validate(100);
  };
  ExpectRefused(max_tokens(-1), "max_tokens is -1");
  ExpectRefused(stops({"a", ""}), "stop[1]");
  ExpectRefused(stops({std::string(kMaxStopBytes + 1, 'x')}), "1025");
  ExpectRefused(stops(std::vector<std::string>(kMaxStopStrings + 1, "x")), "65");
  ExpectRefused(stops({"ok\xE2\x82"}), "UTF-8 at byte 2");
  for (TokenId bad : {-1, 100, std::numeric_limits<TokenId>::max(), std::numeric_limits<TokenId>::min()}) {
    ExpectRefused(ids({1, bad}), "stop_token_ids[1]");
  }
  ExpectRefused(ids(std::vector<TokenId>(kMaxStopTokenIds + 1, 1)), "257");
}

}  // namespace
}  // namespace efla
