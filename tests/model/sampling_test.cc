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

TEST(SamplingParamsTest, BoundsAreInclusiveWhereTheySaySo) {
  EXPECT_TRUE(SamplingParams{}.Validate().ok());
  EXPECT_TRUE((SamplingParams{.temperature = 0}.Validate().ok()));
  EXPECT_TRUE(
      (SamplingParams{.temperature = 100, .top_k = 1, .top_p = 1e-6f, .min_p = 0.999f}.Validate().ok()));
}

TEST(SamplingParamsTest, RefusesWhatIsOutOfRange) {
  for (float bad : {-0.1f, 100.5f, kNan, kInfinity, -kInfinity}) {
    ExpectRefused(SamplingParams{.temperature = bad}.Validate(), "temperature");
  }
  ExpectRefused(SamplingParams{.top_k = -1}.Validate(), "top_k is -1");
  for (float bad : {0.0f, -1.0f, 1.01f, kNan, kInfinity}) {
    ExpectRefused(SamplingParams{.top_p = bad}.Validate(), "top_p");
  }
  for (float bad : {-0.01f, 1.0f, kNan, kInfinity})
    ExpectRefused(SamplingParams{.min_p = bad}.Validate(), "min_p");
}

TEST(StopParamsTest, AcceptsTheLimits) {
  StopParams params;
  params.max_tokens = 0;
  params.stop.assign(kMaxStopStrings, std::string(kMaxStopBytes, 'x'));
  params.stop_token_ids.assign(kMaxStopTokenIds, 99);
  EXPECT_TRUE(params.Validate(100).ok());
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
