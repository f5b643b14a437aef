// Broken contracts end the process with the condition's text, before any kernel sees them.
#include <gtest/gtest.h>

#include "tests/kernels/device_test.h"

namespace efla {
namespace {

StepInput Prompts(std::span<const TokenId> tokens, std::span<const Segment> segments) {
  return {.tokens = tokens,
          .num_decode = 0,
          .decode_read_slot = {},
          .decode_write_slot = {},
          .segments = segments,
          .samples = {}};
}

class DeviceChecksDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    std::string reason;
    device_ = TryCreateDevice("cpu", reason);
    ASSERT_NE(device_, nullptr) << reason;
    MixLayer mix;
    mix.num_heads = 1;
    mix.d_k = mix.d_v = 8;
    ASSERT_TRUE(device_
                    ->Prepare({.max_tokens = 8,
                               .max_decode = 4,
                               .max_samples = 2,
                               .hidden_size = 8,
                               .intermediate_size = 8,
                               .vocab_size = 16,
                               .mix = mix})
                    .ok());
  }
  std::unique_ptr<Device> device_;
  std::vector<TokenId> tokens_ = {1, 2, 3};
};

TEST_F(DeviceChecksDeathTest, SegmentsMustCoverTheTokensInOrder) {
  const std::vector<Segment> gap = {{0, 1, 0, 1}, {2, 1, 0, 2}}, overrun = {{0, 4, 0, 1}},
                             empty = {{0, 0, 0, 1}};
  for (const auto& segments : {gap, overrun, empty}) {
    EXPECT_DEATH(device_->BeginStep(Prompts(tokens_, segments)), "broken contract: .*segment");
  }
  EXPECT_DEATH(device_->BeginStep(Prompts(tokens_, {})), "broken contract: next_token == num_tokens");
}

TEST_F(DeviceChecksDeathTest, SlotZeroIsNeverWritten) {
  const std::vector<Segment> segments = {{0, 3, 0, 0}};
  EXPECT_DEATH(device_->BeginStep(Prompts(tokens_, segments)), "write_slot > 0");
}

TEST_F(DeviceChecksDeathTest, TokensMustBeInTheTable) {
  const TestWeight table = Bf16Weight(std::vector<float>(3 * 8, 1.0f), 3, 8);
  DeviceStatus status;
  const std::unique_ptr<Matrix> matrix = device_->LoadMatrix({&table.host, 1}, MatrixUse::kEmbedding, status);
  std::vector<float> x(3 * 8);
  const std::vector<Segment> segments = {{0, 3, 0, 1}};
  device_->BeginStep(Prompts(tokens_, segments));
  EXPECT_DEATH(device_->Embed({.table = matrix.get(), .x = x.data()}), "max_token < args.table->rows");
}

TEST_F(DeviceChecksDeathTest, ListsAndMasksMustBeThere) {
  const std::vector<Segment> segments = {{0, 3, 0, 1}};
  const std::vector<LogitAdjustment> list = {{.token = 1}};
  const std::vector<uint32_t> mask = {1};
  const auto begin = [&](SampleRow row, std::span<const LogitAdjustment> adjustments,
                         std::span<const uint32_t> masks) {
    StepInput input = Prompts(tokens_, segments);
    input.samples = {&row, 1};
    input.adjustments = adjustments;
    input.masks = masks;
    device_->BeginStep(input);
  };
  EXPECT_DEATH(begin({.num_adjust = 2}, list, {}), "input.adjustments.size");
  EXPECT_DEATH(begin({.adjust_begin = 1, .num_adjust = 1}, list, {}), "input.adjustments.size");
  EXPECT_DEATH(begin({.num_adjust = kMaxAdjustments + 1}, list, {}), "kMaxAdjustments");
  EXPECT_DEATH(begin({.mask = 0}, {}, {}), "input.masks.empty");
  EXPECT_DEATH(begin({.target = 1, .mask = 0}, {}, mask), "row.target < 0");
  EXPECT_DEATH(begin({.typical_p = 0}, {}, {}), "typical_p > 0");
  for (const LogitAdjustment& bad :
       {LogitAdjustment{.token = -1}, LogitAdjustment{.bias = std::nanf("")}, LogitAdjustment{.scale = 0},
        LogitAdjustment{.bias = std::numeric_limits<float>::infinity()},
        LogitAdjustment{.penalty = std::nanf("")}}) {
    EXPECT_DEATH(begin({.num_adjust = 1}, {&bad, 1}, {}), "adjustment.");
  }
}

TEST_F(DeviceChecksDeathTest, OperationsBelongToAStep) {
  EXPECT_DEATH(device_->EndStep(), "step_.open");
  EXPECT_DEATH(device_->AddLinear({.num_tokens = 1}), "step_.open");
}

TEST_F(DeviceChecksDeathTest, StepsKeepThePreparedLimits) {
  const std::vector<TokenId> many(9, 0);
  const std::vector<Segment> segments = {{0, 9, 0, 1}};
  EXPECT_DEATH(device_->BeginStep(Prompts(many, segments)), "max_tokens");
}

TEST(PrepareTest, RefusesAConvolutionThatTheCpuDoesNotTake) {
  std::string reason;
  const std::unique_ptr<Device> device = TryCreateDevice("cpu", reason);
  MixLayer mix;
  mix.num_heads = mix.d_k = mix.d_v = 1;
  mix.conv_size = 65;
  const DeviceStatus status = device->Prepare({.max_tokens = 1,
                                               .max_decode = 1,
                                               .max_samples = 1,
                                               .hidden_size = 1,
                                               .intermediate_size = 1,
                                               .vocab_size = 1,
                                               .mix = mix});
  EXPECT_EQ(status.code, DeviceStatus::Code::kInvalid);
  EXPECT_NE(status.message.find("conv_size is 65"), std::string::npos) << status.message;
}

}  // namespace
}  // namespace efla
