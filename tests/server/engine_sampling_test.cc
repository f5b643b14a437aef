// Sampling parameters on the running engine: histories, bans, ends, and that each request gets its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/server/engine_rig.h"

namespace efla {
namespace {

constexpr TokenId kEos = 2;  // of the checkpoint
constexpr TokenId kVocab = 320;

GenerationRequest Sampled(std::vector<TokenId> prompt, int64_t max_tokens, uint64_t seed = 1) {
  GenerationRequest request = Greedy(std::move(prompt), max_tokens);
  request.sampling.temperature = 1;
  request.sampling.seed = seed;
  return request;
}

bool Mentions(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

TEST(EngineSamplingTest, EachOfManyStreamsDrawsTheTokenThatItIsBiasedTo) {
  EngineRig rig({.slots = 64});
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 64; ++i) {
    readers.push_back(Reader::Make());
    GenerationRequest request = Sampled(SomePrompt(1 + i % 7, i), 50, i);
    request.sampling.logit_bias = {{4 * i + 5, 100.0f}};
    if (i % 4 == 1) request.sampling.temperature = 0;
    if (i % 4 == 2) request.sampling.typical_p = 0.5f;
    if (i % 4 == 3) request.sampling.banned_token_ids = {4};
    generations.push_back(rig.Submit(request, readers.back()));
  }
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(readers[i]->Wait().ids(), std::vector<TokenId>(50, 4 * i + 5)) << i;
  }
}

TEST(EngineSamplingTest, PresenceAndFrequencyDoNotCountThePrompt) {
  EngineRig rig({});
  const TokenId favourite = rig.Run(Greedy(SomePrompt(30), 1)).ids()[0];
  std::vector<TokenId> prompt(200, favourite);
  GenerationRequest request = Sampled(prompt, 1);
  const Bits plain = BitsOf(rig.Run(request));
  request.sampling.presence_penalty = request.sampling.frequency_penalty = 2;
  EXPECT_EQ(BitsOf(rig.Run(request)), plain);
  // The repetition penalty does count it, within its window.
  request.sampling = {.temperature = 0, .repetition_penalty = 10, .logit_bias = {{favourite, 30.0f}}};
  EXPECT_NE(rig.Run(request).ids()[0], favourite);
  for (int i = 0; i < 5; ++i) request.prompt.push_back(favourite == 9 ? 10 : 9);
  request.sampling.penalty_window = 5;
  EXPECT_EQ(rig.Run(request).ids()[0], favourite);
}

// Log-probabilities differ from logits by a constant that presence and frequency do not see: each greedy
// token is the best of the reported ones after the penalties.
TEST(EngineSamplingTest, PenaltiesFollowTheOutput) {
  EngineRig rig({});
  for (const auto& [presence, frequency, window] :
       {std::tuple(0.9f, 0.0f, 1000), std::tuple(0.0f, 0.4f, 1000), std::tuple(0.3f, 0.2f, 4),
        std::tuple(-0.2f, -0.05f, 1000)}) {
    GenerationRequest request = Greedy(SomePrompt(40, 2), 60);
    request.sampling.presence_penalty = presence;
    request.sampling.frequency_penalty = frequency;
    request.sampling.penalty_window = window;
    request.logprobs = true;
    request.top_logprobs = kMaxTopLogprobs;
    const Result result = rig.Run(request);
    ASSERT_TRUE(result.status.ok()) << result.status;
    const std::vector<TokenId> ids = result.ids();
    int decided = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      std::map<TokenId, int> times;
      for (size_t k = i - std::min<size_t>(i, window); k < i; ++k) ++times[ids[k]];
      float best = -std::numeric_limits<float>::infinity(), drawn = best;
      for (const auto& [id, logprob] : result.tokens[i].top) {
        const float adjusted =
            logprob - (times[id] > 0 ? presence + frequency * static_cast<float>(times[id]) : 0);
        best = std::max(best, adjusted);
        if (id == ids[i]) drawn = adjusted;
      }
      if (best < result.tokens[i].top.back().second) continue;  // one that is not reported may be better
      EXPECT_NEAR(drawn, best, 1e-4f) << "token " << i;
      ++decided;
    }
    EXPECT_GT(decided, 40);
  }
}

TEST(EngineSamplingTest, NoNgramOccursTwice) {
  EngineRig rig({});
  for (const int n : {1, 2, 3}) {
    GenerationRequest request = Greedy(SomePrompt(40, 4), 150);
    request.sampling.no_repeat_ngram_size = n;
    const Result result = rig.Run(request);
    ASSERT_TRUE(result.status.ok()) << result.status;
    std::vector<TokenId> text = request.prompt, ids = result.ids();
    std::set<std::vector<TokenId>> seen;
    for (size_t i = n; i <= text.size(); ++i)
      seen.insert(std::vector<TokenId>(text.begin() + i - n, text.begin() + i));
    for (const TokenId id : ids) {
      text.push_back(id);
      EXPECT_TRUE(seen.insert(std::vector<TokenId>(text.end() - n, text.end())).second) << "n " << n;
    }
  }
}

TEST(EngineSamplingTest, AllowedAndBannedIdsBoundTheDraw) {
  EngineRig rig({});
  GenerationRequest request = Sampled(SomePrompt(20), 300);
  request.sampling.temperature = 50;  // nearly uniform
  request.sampling.allowed_token_ids = {10, 11, 12, 13, 319};
  request.sampling.banned_token_ids = {12, 100};
  std::vector<TokenId> ids = rig.Run(request).ids();
  EXPECT_EQ(std::set<TokenId>(ids.begin(), ids.end()), (std::set<TokenId>{10, 11, 13, 319}));
  EXPECT_EQ(ids.size(), 300u);
  // An end token is allowed as well where it ends the call.
  request.stopping.ignore_eos = false;
  const Result ended = rig.Run(request);
  EXPECT_EQ(ended.finished->reason, FinishReason::kEos);
  EXPECT_LT(ended.ids().size(), 300u);
  request.sampling.banned_token_ids.push_back(kEos);
  EXPECT_EQ(rig.Run(request).finished->reason, FinishReason::kMaxTokens);
}

TEST(EngineSamplingTest, MinTokensCountsDrawnTokensAndBansWhatEnds) {
  EngineRig rig({});
  GenerationRequest request = Sampled(SomePrompt(1000), 80);
  request.stopping.ignore_eos = false;
  request.stopping.min_tokens = 50;
  request.stopping.stop_token_ids = {319};
  request.sampling.logit_bias = {{kEos, 100.0f}, {319, 90.0f}};
  const Result by_eos = rig.Run(request);
  EXPECT_EQ(by_eos.finished->reason, FinishReason::kEos);
  EXPECT_EQ(by_eos.finished->usage.completion_tokens, 51);
  request.sampling.logit_bias = {{319, 90.0f}};
  const Result by_stop = rig.Run(request);
  EXPECT_EQ(by_stop.finished->reason, FinishReason::kStopToken);
  EXPECT_EQ(by_stop.finished->usage.completion_tokens, 51);
}

TEST(EngineSamplingTest, IgnoreEosSuppressesNothing) {
  EngineRig rig({});
  for (const TokenId wanted : {kEos, kVocab - 1}) {
    GenerationRequest request = Sampled(SomePrompt(10), 20);  // ignores end tokens
    request.stopping.min_tokens = 10;
    request.sampling.logit_bias = {{wanted, 100.0f}};
    EXPECT_EQ(rig.Run(request).ids(), std::vector<TokenId>(20, wanted));
  }
}

TEST(EngineSamplingTest, MinTokensSuspendsStopStrings) {
  EngineRig rig({.checkpoint = "model/demo", .tokenizer = true});
  std::vector<TokenId> prompt = rig.tokenizer->Encode("Once upon a time", false).value();
  prompt.insert(prompt.begin(), rig.tokenizer->bos_id());
  GenerationRequest request = Greedy(prompt, 60);
  const std::string whole = rig.Run(request).text;
  request.stopping.max_tokens = 15;
  const size_t suspended = rig.Run(request).text.size();
  ASSERT_NE(whole.substr(0, suspended).find('e'), std::string::npos);
  const size_t stop = whole.find('e', suspended);
  ASSERT_NE(stop, std::string::npos);
  request.stopping.max_tokens = 60;
  request.stopping.min_tokens = 15;
  request.stopping.stop = {"e"};
  const Result result = rig.Run(request);
  EXPECT_EQ(result.finished->reason, FinishReason::kStopString);
  EXPECT_EQ(result.text, whole.substr(0, stop));
}

TEST(EngineSamplingTest, LogprobsAreDefinedWhateverIsCutAndBanned) {
  EngineRig rig({});
  GenerationRequest request = Sampled(SomePrompt(10), 30);
  request.sampling.top_p = 0.1f;
  for (TokenId id = 0; id < 200; ++id) request.sampling.banned_token_ids.push_back(id);
  request.logprobs = true;
  for (const int top : {0, kMaxTopLogprobs}) {
    request.top_logprobs = top;
    const Result result = rig.Run(request);
    ASSERT_TRUE(result.status.ok()) << result.status;
    for (const TokenOutput& token : result.tokens) {
      EXPECT_GE(token.token, 200);
      EXPECT_TRUE(std::isfinite(token.logprob));
      ASSERT_EQ(token.top.size(), static_cast<size_t>(top));
      for (const auto& [id, logprob] : token.top) EXPECT_TRUE(id >= 0 && std::isfinite(logprob));
    }
  }
}

TEST(EngineSamplingTest, NothingLeftToDrawEndsThatCallWithWhatBannedIt) {
  EngineRig rig({});
  const GenerationRequest neighbour = Greedy(SomePrompt(50, 9), 60);
  const Bits expected = BitsOf(rig.Run(neighbour));
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(neighbour, reader);
  GenerationRequest request = Sampled({20, 21}, 10);
  request.sampling.allowed_token_ids = {30, 31};
  request.sampling.no_repeat_ngram_size = 1;
  const Result result = rig.Run(request);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kFailedPrecondition) << result.status;
  EXPECT_TRUE(Mentions(result.status, "token 2 of the output: allowed_token_ids, no_repeat_ngram_size"))
      << result.status;
  EXPECT_EQ(BitsOf(reader->Wait()), expected);
}

TEST(EngineSamplingTest, IdsOutsideTheVocabularyAreRefusedInEveryField) {
  EngineRig rig({});
  for (const TokenId bad :
       {-1, kVocab, std::numeric_limits<TokenId>::max(), std::numeric_limits<TokenId>::min()}) {
    GenerationRequest request = Greedy({5}, 1);
    request.sampling.logit_bias = {{bad, 1.0f}};
    EXPECT_TRUE(Mentions(rig.Refusal(request), "logit_bias has id"));
    request = Greedy({5}, 1);
    request.sampling.allowed_token_ids = {bad};
    EXPECT_TRUE(Mentions(rig.Refusal(request), "allowed_token_ids[0] is"));
    request = Greedy({5}, 1);
    request.sampling.banned_token_ids = {bad};
    EXPECT_TRUE(Mentions(rig.Refusal(request), "banned_token_ids[0] is"));
    request = Greedy({5}, 1);
    request.stopping.stop_token_ids = {bad};
    EXPECT_TRUE(Mentions(rig.Refusal(request), "stop_token_ids[0] is"));
    EXPECT_TRUE(Mentions(rig.Refusal(Greedy({bad}, 1)), "ids are 0 to 319"));
  }
}

}  // namespace
}  // namespace efla
