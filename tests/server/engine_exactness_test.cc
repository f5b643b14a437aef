// The product's claim: a request's tokens and log-probabilities are a function of the request alone.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/engine_rig.h"
#include "tests/server/fake_constraint.h"

namespace efla {
namespace {

// ---- Against the float64 reference ----

class EngineGoldenTest : public testing::TestWithParam<std::string> {};

// All cases of a checkpoint at once, so that they are prefilled and decoded in mixed steps.
TEST_P(EngineGoldenTest, GreedyContinuationAndPromptScoresEqualTheReference) {
  const std::string directory = "tests/golden/" + GetParam();
  std::ifstream file(SourcePath(directory + "/expected.json"));
  const nlohmann::json cases = nlohmann::json::parse(file)["cases"];
  ASSERT_FALSE(cases.empty());
  EngineRig rig({.checkpoint = directory, .slots = static_cast<int>(cases.size())});
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> greedy_readers, score_readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (const nlohmann::json& golden : cases) {
    const auto prompt = golden["tokens"].get<std::vector<TokenId>>();
    greedy_readers.push_back(Reader::Make());
    generations.push_back(
        rig.Submit(Greedy(prompt, static_cast<int64_t>(golden["greedy"].size())), greedy_readers.back()));
    GenerationRequest score = Greedy(prompt, 0);
    score.prompt_logprobs = true;
    score_readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(score, score_readers.back()));
  }
  rig.device.Open();

  constexpr double kTolerance = 1e-3;
  for (size_t i = 0; i < cases.size(); ++i) {
    const nlohmann::json& golden = cases[i];
    SCOPED_TRACE("prompt of " + std::to_string(golden["tokens"].size()));
    const Result greedy = greedy_readers[i]->Wait();
    ASSERT_TRUE(greedy.status.ok()) << greedy.status;
    const auto expected = golden["greedy"].get<std::vector<TokenId>>();
    const auto margins = golden["greedy_margins"].get<std::vector<double>>();
    ASSERT_EQ(greedy.tokens.size(), expected.size());
    for (size_t t = 0; t < expected.size() && margins[t] > kTolerance; ++t) {
      EXPECT_EQ(greedy.tokens[t].token, expected[t]) << "token " << t;
    }
    const Result score = score_readers[i]->Wait();
    ASSERT_TRUE(score.status.ok()) << score.status;
    const std::vector<TokenOutput>& logprobs = score.finished->prompt_logprobs;
    const auto tokens = golden["tokens"].get<std::vector<TokenId>>();
    ASSERT_EQ(logprobs.size(), tokens.size() - 1);
    for (size_t t = 0; t < logprobs.size(); ++t) {
      EXPECT_EQ(logprobs[t].token, tokens[t + 1]);
      EXPECT_NEAR(logprobs[t].logprob, golden["prompt_logprobs"][t + 1].get<double>(), kTolerance)
          << "token " << t + 1;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, EngineGoldenTest,
                         testing::Values("delta_net", "efla_basic", "efla_expand", "efla_gate_neg",
                                         "efla_head64", "efla_noconv", "efla_stiff", "efla_tied_sharded",
                                         "efla_weak", "gated_deltanet", "gated_efla"),
                         [](const testing::TestParamInfo<std::string>& param) { return param.param; });

// ---- Against itself ----

// The requests whose results may not depend on anything else.
std::vector<GenerationRequest> Subjects() {
  std::vector<GenerationRequest> requests;
  requests.push_back(Greedy(SomePrompt(1, 1), 30));
  requests.push_back(Greedy(SomePrompt(64, 2), 30));
  requests.push_back(Greedy(SomePrompt(300, 3), 30));
  requests.back().prompt_logprobs = true;
  requests.push_back(Greedy(SomePrompt(129, 4), 30));
  requests.back().sampling = {.temperature = 1.3f, .top_k = 50, .top_p = 0.95f, .min_p = 0.01f, .seed = 99};
  requests.back().logprobs = true;
  requests.back().top_logprobs = 3;
  requests.push_back(Greedy(SomePrompt(200, 5), 30));
  requests.back().sampling = {.temperature = 1.1f,
                              .seed = 7,
                              .repetition_penalty = 1.3f,
                              .presence_penalty = 0.5f,
                              .frequency_penalty = 0.2f,
                              .penalty_window = 50,
                              .no_repeat_ngram_size = 2,
                              .logit_bias = {{9, 2.0f}, {300, -3.0f}},
                              .banned_token_ids = {8, 11}};
  requests.back().logprobs = true;
  requests.push_back(Greedy(SomePrompt(70, 6), 30));
  requests.back().sampling = {.temperature = 1.2f, .typical_p = 0.8f, .seed = 8};
  std::vector<std::vector<TokenId>> positions;
  for (TokenId i = 0; i < 25; ++i) positions.push_back({10 + i, 50 + i, 90 + i, 200 + i});
  requests.back().constraint = std::make_shared<FakeConstraint>(positions);
  return requests;
}

GenerationRequest RandomRequest(std::mt19937& random) {
  GenerationRequest request =
      Greedy(SomePrompt(1 + static_cast<int>(random() % 400), random()), 1 + static_cast<int>(random() % 40));
  request.sampling.temperature = static_cast<float>(random() % 3);
  request.sampling.seed = random();
  request.sampling.top_k = static_cast<int32_t>(random() % 4 * 10);
  if (random() % 3 == 0) request.sampling.repetition_penalty = 1.4f;
  if (random() % 3 == 0) request.sampling.banned_token_ids = {static_cast<TokenId>(random() % 320)};
  request.prompt_logprobs = random() % 4 == 0;
  request.progress = random() % 2 == 0;
  return request;
}

RigOptions Rig(int max_batch_tokens, int slots = 40) {
  RigOptions options{.slots = slots};
  options.engine.max_batch_tokens = max_batch_tokens;
  return options;
}

std::vector<Bits> Alone(const RigOptions& options) {
  EngineRig rig(options);
  std::vector<Bits> bits;
  for (const GenerationRequest& request : Subjects()) bits.push_back(BitsOf(rig.Run(request)));
  return bits;
}

class EngineExactnessTest : public testing::TestWithParam<int> {};

TEST_P(EngineExactnessTest, ResultsDoNotDependOnTheStepBudget) {
  EXPECT_EQ(Alone(Rig(GetParam())), Alone(Rig(1024)));
}

TEST_P(EngineExactnessTest, ResultsDoNotDependOnTheCompany) {
  const std::vector<GenerationRequest> subjects = Subjects();
  const std::vector<Bits> alone = Alone(Rig(1024));
  EngineRig rig(Rig(GetParam()));
  std::mt19937 random(5);
  for (int round = 0; round < 2; ++round) {
    rig.device.Hold();
    std::vector<std::shared_ptr<Reader>> others, readers(subjects.size());
    std::vector<std::shared_ptr<Generation>> generations, other_generations;
    const auto add_others = [&](int count) {
      for (int i = 0; i < count; ++i) {
        others.push_back(Reader::Make());
        other_generations.push_back(rig.Submit(RandomRequest(random), others.back()));
      }
    };
    for (size_t i = 0; i < subjects.size(); ++i) {
      add_others(8);
      readers[i] = Reader::Make();
      generations.push_back(rig.Submit(subjects[i], readers[i]));
      rig.device.LetStep();  // so that they come in at different steps
    }
    for (size_t i = 0; i < others.size(); i += 5) other_generations[i]->Cancel();
    rig.device.Open();
    for (size_t i = 0; i < subjects.size(); ++i)
      EXPECT_EQ(BitsOf(readers[i]->Wait()), alone[i]) << "subject " << i;
    for (const auto& other : others) other->Wait();
  }
}

// A slot is as good as new whatever was in it.
TEST_P(EngineExactnessTest, ResultsDoNotDependOnTheSlotsPast) {
  const std::vector<Bits> alone = Alone(Rig(1024));
  EngineRig rig(Rig(GetParam(), /*slots=*/1));
  std::mt19937 random(6);
  for (size_t i = 0; i < alone.size(); ++i) {
    rig.Run(RandomRequest(random));
    EXPECT_EQ(BitsOf(rig.Run(Subjects()[i])), alone[i]) << "subject " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(MaxBatchTokens, EngineExactnessTest, testing::Values(64, 128, 512));

// Slow and absent readers change when a token is drawn, not which.
TEST(EngineParkingTest, ResultsDoNotDependOnTheReaderOrParking) {
  const std::vector<Bits> alone = Alone(Rig(1024));
  RigOptions options = Rig(128, 4);
  options.engine.max_undelivered_tokens = 3;
  options.engine.max_running = 3;
  EngineRig rig(options);
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (const GenerationRequest& request : Subjects()) {
    readers.push_back(Reader::Make(/*paused=*/true));
    generations.push_back(rig.Submit(request, readers.back()));
  }
  while (rig.engine->stats().parked < 4) std::this_thread::yield();
  for (size_t i = 0; i < readers.size(); ++i) {
    readers[i]->Resume();
    rig.engine->Deliver(generations[i]);
  }
  for (size_t i = 0; i < readers.size(); ++i)
    EXPECT_EQ(BitsOf(readers[i]->Wait()), alone[i]) << "subject " << i;
}

}  // namespace
}  // namespace efla
