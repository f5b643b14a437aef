// The demonstration model, text to text, against the float64 answers that lie beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "model/tokenizer.h"
#include "tests/model/model_rig.h"

namespace efla {
namespace {

constexpr int kMaxTokens = 512;  // a multiple of the grid

class DemoTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (absl::Status status = DeviceAvailable(GetParam()); !status.ok()) GTEST_SKIP() << status.ToString();
    const std::string directory = SourcePath("model/demo");
    absl::StatusOr<std::unique_ptr<ModelRig>> rig = ModelRig::Open(
        directory, {.device = GetParam(),
                    .limits = {.max_tokens = kMaxTokens, .max_decode = 8, .max_samples = kMaxTokens}});
    ASSERT_TRUE(rig.ok()) << rig.status();
    rig_ = *std::move(rig);
    absl::StatusOr<std::unique_ptr<const Tokenizer>> tokenizer =
        Tokenizer::Open(directory + "/tokenizer.model");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    expected_ = ReadJson(directory + "/expected.json");
  }

  std::vector<TokenId> EncodeWithBos(const std::string& text) {
    std::vector<TokenId> ids = {rig_->model().config().bos_token_id};
    const std::vector<TokenId> encoded = tokenizer_->Encode(text, /*parse_special=*/false).value();
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    return ids;
  }

  bool on_cpu() const { return GetParam() == "cpu"; }

  std::unique_ptr<ModelRig> rig_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  nlohmann::json expected_;
};

TEST_P(DemoTest, EvaluationTextHasTheReferencePerplexity) {
  std::ifstream file(SourcePath("model/demo/eval.txt"), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const nlohmann::json& eval = expected_.at("eval");
  ASSERT_EQ(text.size(), eval.at("bytes").get<size_t>());
  const std::vector<TokenId> tokens = EncodeWithBos(text);
  ASSERT_EQ(tokens.size() - 1, eval.at("tokens_scored").get<size_t>());

  const SlotHandle slot = rig_->Acquire();
  std::vector<double> logprobs;
  for (size_t begin = 0; begin + 1 < tokens.size(); begin += kMaxTokens) {
    const size_t count = std::min<size_t>(kMaxTokens, tokens.size() - 1 - begin);
    Step step;
    step.Prefill(std::span(tokens).subspan(begin, count), begin == 0 ? StatePool::kZeroSlot : slot.slot,
                 slot.slot);
    for (size_t i = 0; i < count; ++i) step.Score(static_cast<int>(i), tokens[begin + i + 1]);
    for (const SampleResult& row : rig_->Run(step).rows) {
      ASSERT_EQ(row.finite, 1);
      logprobs.push_back(row.logprob);
    }
  }
  ASSERT_EQ(logprobs.size() + 1, tokens.size());

  const auto reference = eval.at("first_256_logprobs").get<std::vector<double>>();
  double worst = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    if (on_cpu() || reference[i] > std::log(1e-3))
      worst = std::max(worst, std::abs(logprobs[i] - reference[i]));
  }
  EXPECT_LE(worst, on_cpu() ? 1e-3 : 3e-2);

  double sum = 0;
  for (double logprob : logprobs) sum += logprob;
  const double perplexity = std::exp(-sum / static_cast<double>(logprobs.size()));
  const double expected = eval.at("perplexity").get<double>();
  EXPECT_NEAR(perplexity, expected, expected * (on_cpu() ? 5e-4 : 3e-3));
  RecordProperty("perplexity", std::to_string(perplexity));
  RecordProperty("worst_logprob_error", std::to_string(worst));
}

TEST_P(DemoTest, PromptsContinueAsTheReferenceDoes) {
  const double margin_tolerance = on_cpu() ? 1e-3 : 6e-2, logprob_tolerance = on_cpu() ? 1e-3 : 3e-2;
  ASSERT_EQ(expected_.at("prompts").size(), 6u);
  for (const nlohmann::json& prompt : expected_.at("prompts")) {
    const std::string text = prompt.at("text").get<std::string>();
    SCOPED_TRACE(text);
    const auto ids = prompt.at("ids").get<std::vector<TokenId>>();
    ASSERT_EQ(EncodeWithBos(text), ids);
    const auto greedy_ids = prompt.at("greedy_ids").get<std::vector<TokenId>>();
    const auto logprobs = prompt.at("greedy_logprobs").get<std::vector<double>>();
    const auto margins = prompt.at("greedy_margins").get<std::vector<double>>();

    const SlotHandle slot = rig_->Acquire();
    Step first;
    first.Prefill(ids, StatePool::kZeroSlot, slot.slot);
    first.Greedy(static_cast<int>(ids.size()) - 1, /*num_top=*/5);
    StepResult result = rig_->Run(first);
    ASSERT_EQ(result.top.size(), 5u);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(result.top[i].logprob, prompt.at("top5")[i].at(1).get<double>(), logprob_tolerance);
    }
    for (size_t i = 0; i < greedy_ids.size();
         ++i) {  // along the reference's choices: a tie may break either way
      if (margins[i] > margin_tolerance) {
        ASSERT_EQ(result.rows[0].token, greedy_ids[i]) << "token " << i;
      }
      if (result.rows[0].token == greedy_ids[i]) {
        EXPECT_NEAR(result.rows[0].logprob, logprobs[i], logprob_tolerance) << "token " << i;
      }
      Step step;
      step.Greedy(step.Decode(greedy_ids[i], slot.slot, slot.slot));
      result = rig_->Run(step);
    }
    rig_->states().Release(slot);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DemoTest, ::testing::Values("cpu", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace efla
