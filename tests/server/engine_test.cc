// The engine by its public interface, over a small model on the CPU.
#include "server/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/engine_rig.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;
using std::chrono::milliseconds;
using std::chrono::seconds;

bool Mentions(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

// ---- A generation's life ----

TEST(EngineTest, StreamsOneTokenADeltaWithUsageAndTiming) {
  EngineRig rig({});
  rig.device.Hold();
  const auto reader = Reader::Make();
  GenerationRequest request = Greedy(SomePrompt(10), 5);
  request.sampling.seed = 77;
  const auto generation = rig.Submit(request, reader);
  for (size_t step = 1; step < 5; ++step) {
    rig.device.LetStep();
    reader->AwaitTokens(step);  // each delta is read before the next token is drawn
  }
  rig.device.Open();
  const Result result = reader->Wait();
  ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_TRUE(result.accepted);
  EXPECT_EQ(result.accepted->prompt_tokens, 10);
  EXPECT_EQ(result.accepted->seed, 77u);
  ASSERT_EQ(result.deltas.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(result.deltas[i].tokens.size(), 1u);
    EXPECT_EQ(result.deltas[i].usage.completion_tokens, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(result.deltas[i].usage.prompt_tokens, 10);
    EXPECT_GE(result.deltas[i].timing.total_us, result.deltas[i].timing.first_token_us);
    EXPECT_LT(result.deltas[i].tokens[0].logprob, 0);
    EXPECT_TRUE(result.deltas[i].tokens[0].top.empty());
  }
  EXPECT_EQ(result.finished->reason, FinishReason::kMaxTokens);
  EXPECT_EQ(result.finished->tokens.size(), 1u);
  EXPECT_EQ(result.finished->usage.completion_tokens, 5);
  const Timing& timing = result.finished->timing;
  EXPECT_EQ(timing.first_token_us, timing.queue_us + timing.prefill_us);  // one piece: the same step
  EXPECT_GE(timing.total_us, timing.first_token_us);
  EXPECT_EQ(generation->usage().completion_tokens, 5);
  EXPECT_EQ(rig.counter.first_tokens, 1);
  EXPECT_EQ(rig.counter.gaps, 4);
  EXPECT_EQ(rig.counter.ended(Outcome::kLength), 1);
}

TEST(EngineTest, LastTokenIsNotFed) {
  EngineRig rig({});
  rig.Run(Greedy(SomePrompt(10), 3));
  EXPECT_EQ(rig.counter.steps, 3);  // the prompt, and two decode rows for the second and third token
  EXPECT_EQ(rig.counter.decode_rows, 2);
}

TEST(EngineTest, FirstPieceReadsTheZeroSlotAndLaterOnesTheirOwn) {
  EngineRig rig({});
  rig.Run(Greedy(SomePrompt(300), 1));
  const std::vector<TestDevice::StepShape> steps = rig.device.steps();
  ASSERT_EQ(steps.size(), 3u);  // 128 + 128 + 44
  for (const TestDevice::StepShape& step : steps) ASSERT_EQ(step.segments.size(), 1u);
  EXPECT_EQ(steps[0].segments[0].read_slot, StatePool::kZeroSlot);
  EXPECT_GE(steps[0].segments[0].write_slot, StatePool::kFirstSlot);
  EXPECT_EQ(steps[1].segments[0].read_slot, steps[0].segments[0].write_slot);
  EXPECT_EQ(steps[1].segments[0].write_slot, steps[0].segments[0].write_slot);
  EXPECT_EQ(steps[2].segments[0].num_tokens, 44);
  EXPECT_EQ(steps[0].num_samples, 0);
  EXPECT_EQ(steps[2].num_samples, 1);
}

TEST(EngineTest, MaxTokensZeroComputesThePromptOnly) {
  EngineRig rig({});
  const Result result = rig.Run(Greedy(SomePrompt(100), 0));
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kMaxTokens);
  EXPECT_TRUE(result.tokens.empty());
  EXPECT_TRUE(result.deltas.empty());
  EXPECT_EQ(result.finished->usage.prompt_tokens, 100);
  EXPECT_EQ(result.finished->usage.completion_tokens, 0);
  EXPECT_EQ(result.finished->timing.first_token_us, 0);
  EXPECT_EQ(rig.counter.prefill_tokens, 100);
  EXPECT_EQ(rig.counter.first_tokens, 0);
  EXPECT_EQ(rig.device.steps().back().num_samples, 0);
}

TEST(EngineTest, ProgressIsReportedOnlyWhenAsked) {
  EngineRig rig({});
  rig.device.Hold();
  GenerationRequest request = Greedy(SomePrompt(300), 1);
  request.progress = true;
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  rig.device.LetStep();
  rig.device.LetStep();
  rig.device.Open();
  const Result result = reader->Wait();
  ASSERT_FALSE(result.progress.empty());  // a slow reader sees the latest only
  EXPECT_EQ(result.progress.back().prompt_tokens_done, 300);
  EXPECT_EQ(result.progress.back().prompt_tokens_total, 300);
  for (size_t i = 1; i < result.progress.size(); ++i) {
    EXPECT_GT(result.progress[i].prompt_tokens_done, result.progress[i - 1].prompt_tokens_done);
  }
  request.progress = false;
  EXPECT_TRUE(rig.Run(request).progress.empty());
}

TEST(EngineTest, LogprobsAndAlternativesAreReportedAsAsked) {
  EngineRig rig({});
  GenerationRequest request = Greedy(SomePrompt(20), 4);
  request.logprobs = true;
  const Result none = rig.Run(request);
  request.top_logprobs = 5;
  const Result five = rig.Run(request);
  ASSERT_EQ(none.ids(), five.ids());
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(none.tokens[i].top.empty());
    ASSERT_EQ(five.tokens[i].top.size(), 5u);
    EXPECT_EQ(five.tokens[i].top[0].first, five.tokens[i].token);  // greedy draws the best
    EXPECT_EQ(five.tokens[i].top[0].second, five.tokens[i].logprob);
    EXPECT_EQ(none.tokens[i].logprob, five.tokens[i].logprob);
    for (size_t k = 1; k < 5; ++k) EXPECT_LE(five.tokens[i].top[k].second, five.tokens[i].top[k - 1].second);
  }
}

TEST(EngineTest, SeedDecidesTheDraw) {
  EngineRig rig({});
  GenerationRequest request = Greedy(SomePrompt(20), 20);
  request.sampling.temperature = 2;
  request.sampling.seed = 1;
  const std::vector<TokenId> one = rig.Run(request).ids();
  EXPECT_EQ(rig.Run(request).ids(), one);
  request.sampling.seed = 2;
  EXPECT_NE(rig.Run(request).ids(), one);
}

// ---- Ends ----

// The tokens that the model draws after this prompt, all different from their predecessors where a test needs
// it.
struct Story {
  explicit Story(EngineRig& rig, int length = 12) : prompt(SomePrompt(30, 5)) {
    ids = rig.Run(Greedy(prompt, length)).ids();
  }
  // The first position whose token has not been drawn before it.
  size_t FirstNew(size_t from) const {
    for (size_t i = from; i < ids.size(); ++i) {
      if (std::find(ids.begin(), ids.begin() + i, ids[i]) == ids.begin() + i) return i;
    }
    ADD_FAILURE() << "the model repeats itself";
    return 0;
  }
  std::vector<TokenId> prompt, ids;
};

TEST(EngineTest, StopTokenEndsAndIsReported) {
  EngineRig rig({});
  const Story story(rig);
  const size_t at = story.FirstNew(2);
  GenerationRequest request = Greedy(story.prompt, 12);
  request.stopping.stop_token_ids = {319, story.ids[at], 0};
  const Result result = rig.Run(request);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kStopToken);
  EXPECT_EQ(result.finished->matched_token, story.ids[at]);
  EXPECT_EQ(result.finished->usage.completion_tokens, static_cast<int64_t>(at) + 1);
  EXPECT_EQ(result.ids(), std::vector<TokenId>(story.ids.begin(), story.ids.begin() + at + 1));
  EXPECT_EQ(rig.counter.ended(Outcome::kStop), 1);
}

TEST(EngineTest, EndTokenAsTheFirstTokenEndsAZeroTokenTurn) {
  RigOptions options;
  TokenId first;
  {
    EngineRig rig(options);
    first = Story(rig).ids[0];
  }
  options.engine.eos_token_ids = {first};
  EngineRig rig(options);
  GenerationRequest request = Greedy(SomePrompt(30, 5), 10);
  request.stopping.ignore_eos = false;
  for (int turn = 0; turn < 2; ++turn) {
    const Result result = rig.Run(request);
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.finished->reason, FinishReason::kEos);
    EXPECT_EQ(result.finished->matched_token, first);
    EXPECT_EQ(result.finished->usage.completion_tokens, 1);
    EXPECT_EQ(result.ids(), std::vector<TokenId>{first});
    EXPECT_TRUE(result.deltas.empty());
  }
  request.stopping.ignore_eos = true;
  EXPECT_EQ(rig.Run(request).tokens.size(), 10u);
}

TEST(EngineTest, EndTokenOnTheLastAllowedTokenIsAnEndToken) {
  RigOptions options;
  size_t at;
  std::vector<TokenId> prompt;
  {
    EngineRig rig(options);
    const Story story(rig);
    at = story.FirstNew(3);
    prompt = story.prompt;
    options.engine.eos_token_ids = {story.ids[at]};
  }
  EngineRig rig(options);
  GenerationRequest request = Greedy(prompt, static_cast<int64_t>(at) + 1);
  request.stopping.ignore_eos = false;
  EXPECT_EQ(rig.Run(request).finished->reason, FinishReason::kEos);
  request.stopping.max_tokens = static_cast<int64_t>(at);
  EXPECT_EQ(rig.Run(request).finished->reason, FinishReason::kMaxTokens);
}

TEST(EngineTest, ConfigEndTokensCount) {
  const std::shared_ptr<const Checkpoint> checkpoint = EngineRig::Open("tests/golden/efla_basic");
  EngineRig rig(checkpoint, {});
  ASSERT_EQ(checkpoint->config().eos_token_ids, std::vector<TokenId>{2});
  // Hot sampling draws the end token sooner or later; the stream ends with it and not before.
  GenerationRequest request = Greedy(SomePrompt(4), 20'000);
  request.sampling.temperature = 100;
  request.stopping.ignore_eos = false;
  const Result result = rig.Run(request);
  EXPECT_EQ(result.finished->reason, FinishReason::kEos);
  const std::vector<TokenId> ids = result.ids();
  EXPECT_EQ(std::find(ids.begin(), ids.end(), 2), ids.end() - 1);
}

TEST(EngineTest, TimeBudgetEndsNormallyWithTheTokensSoFar) {
  ManualClock clock;
  RigOptions options;
  options.engine.now = clock.function();
  EngineRig rig(options);
  const std::vector<TokenId> story = Story(rig).ids;
  rig.device.Hold();
  GenerationRequest request = Greedy(SomePrompt(30, 5), 12);
  request.time_budget = seconds(5);
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  rig.device.LetStep();
  rig.device.LetStep();
  rig.device.AwaitStep();
  clock.Advance(seconds(5));  // while the third step is under way: its token still counts
  rig.device.Open();
  const Result result = reader->Wait();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kTimeBudget);
  EXPECT_EQ(result.ids(), std::vector<TokenId>(story.begin(), story.begin() + 3));
  EXPECT_EQ(result.finished->timing.total_us, 5'000'000);
}

TEST(EngineTest, ATimeBudgetThatPassesInTheQueueIsAWholeAnswerToo) {
  ManualClock clock;
  RigOptions options;
  options.engine.now = clock.function();
  EngineRig rig(options);
  rig.device.Hold();
  const auto other = Reader::Make();
  const auto running = rig.Submit(Greedy(SomePrompt(30, 5), 4), other);
  rig.device.AwaitStep();
  GenerationRequest request = Greedy(SomePrompt(5), 12);
  request.time_budget = seconds(5);
  request.sampling.seed = 7;
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  clock.Advance(seconds(5));
  rig.device.Open();
  const Result result = reader->Wait();
  ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_TRUE(result.accepted.has_value());
  EXPECT_EQ(result.accepted->prompt_tokens, 5);
  EXPECT_EQ(result.accepted->seed, 7u);
  EXPECT_EQ(result.accepted->queue_us, 0) << "no step has seen it";
  EXPECT_EQ(result.finished->reason, FinishReason::kTimeBudget);
  EXPECT_TRUE(result.ids().empty());
  EXPECT_TRUE(other->Wait().status.ok());
}

// ---- Text ----

class EngineTextTest : public testing::Test {
 protected:
  EngineTextTest()
      : rig({.checkpoint = "model/demo", .tokenizer = true, .engine = {.now = clock.function()}}),
        prompt(rig.tokenizer->Encode("Once upon a time there was", false).value()) {
    prompt.insert(prompt.begin(), rig.tokenizer->bos_id());
    plain = rig.Run(Greedy(prompt, 40));
  }
  Result Stop(std::vector<std::string> stops, bool include = false) {
    GenerationRequest request = Greedy(prompt, 40);
    request.stopping.stop = std::move(stops);
    request.include_stop = include;
    return rig.Run(request);
  }
  std::string PieceOf(TokenId id) const { return std::string(rig.tokenizer->PieceBytes(id, false)); }

  ManualClock clock;
  EngineRig rig;
  std::vector<TokenId> prompt;
  Result plain;  // the greedy continuation without a stop
};

TEST_F(EngineTextTest, DeltasJoinToTheWholeTextAndKeepTheFirstSpace) {
  ASSERT_EQ(plain.tokens.size(), 40u);
  std::string expected;
  for (const TokenId id : plain.ids()) expected += PieceOf(id);
  EXPECT_EQ(plain.text, expected);
  EXPECT_EQ(plain.text[0], ' ');
  const Result start = rig.Run(Greedy({rig.tokenizer->bos_id()}, 8));
  EXPECT_EQ(start.text, rig.tokenizer->Decode(start.ids()));  // the beginning of a text: no dummy space
}

TEST_F(EngineTextTest, StopStringAcrossTokensCutsTheTextAtTheByte) {
  // The last byte of one token and the first two of the next, where that is unique.
  std::string before;
  int tried = 0;
  const std::vector<TokenId> ids = plain.ids();
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    before += PieceOf(ids[i]);
    const std::string next = PieceOf(ids[i + 1]);
    if (next.size() < 2) continue;
    const std::string stop = before.substr(before.size() - 1) + next.substr(0, 2);
    if (plain.text.find(stop) != before.size() - 1) continue;
    ++tried;
    const Result result = Stop({"never in a story", stop});
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.finished->reason, FinishReason::kStopString);
    EXPECT_EQ(result.finished->matched_stop, stop);
    EXPECT_EQ(result.text, before.substr(0, before.size() - 1));
    EXPECT_EQ(result.finished->usage.completion_tokens, static_cast<int64_t>(i) + 2);
    EXPECT_EQ(result.ids(), std::vector<TokenId>(ids.begin(), ids.begin() + i + 2));
    EXPECT_EQ(Stop({stop}, /*include=*/true).text, before + next.substr(0, 2));
    if (tried == 3) break;
  }
  EXPECT_GT(tried, 0);
}

TEST_F(EngineTextTest, TokensLeaveWithTheTextThatTheyComplete) {
  // A stop that begins like the text and then differs holds text back; at the end all is there.
  const std::string stop = plain.text.substr(10, 12) + "#";
  const Result result = Stop({stop});
  EXPECT_EQ(result.text, plain.text);
  EXPECT_EQ(result.ids(), plain.ids());
  EXPECT_EQ(result.finished->reason, FinishReason::kMaxTokens);
  for (const DeltaEvent& delta : result.deltas) {
    std::string bytes;
    for (const TokenOutput& token : delta.tokens) bytes += PieceOf(token.token);
    EXPECT_LE(bytes.size(), delta.text.size() + 12);
  }
}

TEST_F(EngineTextTest, StopThatIsHeldAtTheEndIsFlushed) {
  const std::string stop = plain.text.substr(plain.text.size() - 3) + "#";
  const Result result = Stop({stop});
  EXPECT_EQ(result.text, plain.text);
  EXPECT_FALSE(result.finished->text.empty());
}

// A small random model with the demo's tokenizer, drawn from nearly evenly: it says everything sooner or
// later.
TEST(EngineTest, StopStringThatSpellsAControlTokenIsAStopToken) {
  ModelConfig config;
  config.vocab_size = 4096;
  config.hidden_size = 64;
  config.intermediate_size = 256;
  config.num_layers = 1;
  config.num_heads = 1;
  config.d_k = config.d_v = 64;
  EngineRig rig(Checkpoint::Random(config, /*seed=*/3, DType::kF32).value(), {.tokenizer = true});
  const TokenId eos = rig.tokenizer->eos_id();
  GenerationRequest request = Greedy({rig.tokenizer->bos_id()}, 1 << 20);
  request.sampling.temperature = 100;
  request.sampling.seed = 8;
  request.stopping.stop = {"</s>"};  // with ignore_eos, the string alone must do it
  const Result result = rig.Run(request);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kStopToken);
  EXPECT_EQ(result.finished->matched_token, eos);
  std::vector<TokenId> ids = result.ids();
  EXPECT_GT(ids.size(), 10u);
  EXPECT_EQ(std::find(ids.begin(), ids.end(), eos), ids.end() - 1);
  ids.pop_back();
  EXPECT_EQ(result.text, rig.tokenizer->Decode(ids));  // whole characters only, whatever bytes were drawn

  request.stopping.ignore_eos = false;
  const Result ended = rig.Run(request);
  EXPECT_EQ(ended.finished->reason, FinishReason::kEos);
  EXPECT_EQ(ended.text, result.text);

  request.stopping.stop.clear();
  request.skip_special_tokens = false;
  const Result special = rig.Run(request);
  EXPECT_TRUE(special.text.size() > 4 && special.text.substr(special.text.size() - 4) == "</s>");

  request.stopping.ignore_eos = true;
  request.skip_special_tokens = true;
  request.stopping.stop_token_ids = {eos};
  EXPECT_EQ(rig.Run(request).text, result.text);
}

TEST_F(EngineTextTest, TextSoFarIsFlushedWhenTheTimeBudgetEnds) {
  rig.device.Hold();
  GenerationRequest request = Greedy(prompt, 40);
  request.time_budget = seconds(30);
  request.stopping.stop = {plain.text.substr(0, 3) + "#"};  // holds back the first token's text
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  rig.device.AwaitStep();
  clock.Advance(seconds(30));
  rig.device.Open();
  const Result result = reader->Wait();
  EXPECT_EQ(result.finished->reason, FinishReason::kTimeBudget);
  ASSERT_EQ(result.tokens.size(), 1u);
  EXPECT_EQ(result.text, PieceOf(result.tokens[0].token));
}

// ---- Admission, queue, drain ----

TEST(EngineTest, BadRequestsAreRefusedByName) {
  RigOptions options;
  options.engine.max_prompt_tokens = 100;
  options.engine.max_new_tokens = 50;
  EngineRig rig(options);
  const struct {
    const char* mention;
    std::function<void(GenerationRequest&)> spoil;
  } cases[] = {
      {"prompt is empty", [](GenerationRequest& r) { r.prompt.clear(); }},
      {"the prompt has 101 tokens; the limit is 100",
       [](GenerationRequest& r) { r.prompt = SomePrompt(101); }},
      {"token 1 of the prompt is 320; ids are 0 to 319", [](GenerationRequest& r) { r.prompt[1] = 320; }},
      {"token 0 of the prompt is -1", [](GenerationRequest& r) { r.prompt[0] = -1; }},
      {"temperature", [](GenerationRequest& r) { r.sampling.temperature = std::nanf(""); }},
      {"top_p", [](GenerationRequest& r) { r.sampling.top_p = 0; }},
      {"max_tokens is 51; the limit is 50", [](GenerationRequest& r) { r.stopping.max_tokens = 51; }},
      {"max_tokens", [](GenerationRequest& r) { r.stopping.max_tokens = -1; }},
      {"320", [](GenerationRequest& r) { r.stopping.stop_token_ids = {320}; }},
      {"-1", [](GenerationRequest& r) { r.stopping.stop_token_ids = {-1}; }},
      {"tokenizer", [](GenerationRequest& r) { r.stopping.stop = {"end"}; }},
      {"top_logprobs is 21; it must be 0 to 20",
       [](GenerationRequest& r) {
         r.logprobs = true;
         r.top_logprobs = 21;
       }},
      {"no log-probabilities are asked for", [](GenerationRequest& r) { r.top_logprobs = 1; }},
      {"time_budget is 0", [](GenerationRequest& r) { r.time_budget = std::chrono::microseconds(0); }},
  };
  for (const auto& bad : cases) {
    GenerationRequest request = Greedy(SomePrompt(3), 2);
    bad.spoil(request);
    const absl::Status status = rig.Refusal(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.mention;
    EXPECT_TRUE(Mentions(status, bad.mention)) << status << " should mention: " << bad.mention;
  }
  EXPECT_EQ(rig.counter.ended(Outcome::kRejected), static_cast<int>(std::size(cases)));
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(3), 2)).status.ok());
}

TEST(EngineTest, BadOptionsAreRefusedByName) {
  EngineRig rig({});
  const auto start = [&](const EngineOptions& options) {
    return Engine::Start(*rig.model, *rig.pool, nullptr, options, nullptr).status();
  };
  EXPECT_TRUE(Mentions(start({.max_batch_tokens = 100}), "max_batch_tokens is 100"));
  EXPECT_TRUE(Mentions(start({.max_running = 0}), "max_running is 0"));
  EXPECT_TRUE(Mentions(start({.max_queue = 0}), "max_queue is 0"));
  EXPECT_TRUE(Mentions(start({.prefix_cache_slots = -1}), "prefix_cache_slots is -1"));
  EXPECT_TRUE(Mentions(start({.max_batch_tokens = 256}), "the model was loaded with max_tokens 128"));
}

TEST(EngineTest, FullPoolQueuesTheNextRequestUntilASlotIsFree) {
  EngineRig rig({.slots = 3});
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 4; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5, i), i == 0 ? 4 : 8), readers.back()));
  }
  rig.device.LetStep();  // held some of them
  rig.device.LetStep();  // by now all slots are taken
  EngineStats stats = rig.engine->stats();
  EXPECT_EQ(stats.running, 3);
  EXPECT_EQ(stats.waiting, 1);
  EXPECT_EQ(stats.queued_prompt_tokens, 5);
  EXPECT_EQ(stats.slots.free, 0);
  EXPECT_EQ(stats.slots.total, 3);
  EXPECT_FALSE(readers[3]->ended());
  rig.device.Open();
  for (int i = 0; i < 4; ++i) {
    const Result result = readers[i]->Wait();
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.tokens.size(), i == 0 ? 4u : 8u);
  }
  stats = rig.engine->stats();
  EXPECT_EQ(stats.running + stats.waiting + stats.parked, 0);
  EXPECT_EQ(stats.slots.free, 3);
}

TEST(EngineTest, FullQueueRefusesAndTakesAgainWhenOneWaitingIsCancelled) {
  RigOptions options{.slots = 1};
  options.engine.max_queue = 2;
  EngineRig rig(options);
  rig.device.Hold();
  const auto first = Reader::Make();
  const auto running = rig.Submit(Greedy(SomePrompt(5), 3), first);
  rig.device.AwaitStep();
  std::vector<std::shared_ptr<Reader>> readers{Reader::Make(), Reader::Make(), Reader::Make()};
  const auto waiting = rig.Submit(Greedy(SomePrompt(5), 3), readers[0]);
  const auto other = rig.Submit(Greedy(SomePrompt(5), 3), readers[1]);
  const absl::Status status = rig.Refusal(Greedy(SomePrompt(5), 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Mentions(status, "the limit is 2")) << status;
  waiting->Cancel();  // frees its place at once: the engine thread is still in its step
  EXPECT_EQ(rig.engine->stats().waiting, 1);
  const auto third = rig.Submit(Greedy(SomePrompt(5), 3), readers[2]);
  rig.device.Open();
  EXPECT_EQ(readers[0]->Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(readers[1]->Wait().status.ok());
  EXPECT_TRUE(readers[2]->Wait().status.ok());
  EXPECT_TRUE(first->Wait().status.ok());
}

TEST(EngineTest, QueueIsBoundedInTokens) {
  RigOptions options{.slots = 1};
  options.engine.max_queued_tokens = 100;
  EngineRig rig(options);
  rig.device.Hold();
  const auto reader = Reader::Make(), waiter = Reader::Make();
  const auto running = rig.Submit(Greedy(SomePrompt(5), 1), reader);
  rig.device.AwaitStep();
  const auto waiting = rig.Submit(Greedy(SomePrompt(60), 1), waiter);
  EXPECT_EQ(rig.Refusal(Greedy(SomePrompt(41), 1)).code(), absl::StatusCode::kResourceExhausted);
  rig.device.Open();
  EXPECT_TRUE(waiter->Wait().status.ok());
}

TEST(EngineTest, RequestsAreServedInTheirOrder) {
  EngineRig rig({.slots = 1});
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 5; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5, i), 1), readers.back()));
    if (i == 0) rig.device.AwaitStep();
  }
  for (int i = 0; i < 4; ++i) {
    rig.device.LetStep();
    EXPECT_TRUE(readers[i]->Wait().status.ok());
    EXPECT_FALSE(readers[i + 1]->ended());
  }
  rig.device.Open();
  EXPECT_TRUE(readers[4]->Wait().status.ok());
}

TEST(EngineTest, IdleEngineTakesNoSteps) {
  EngineRig rig({});
  rig.Run(Greedy(SomePrompt(5), 3));
  const uint64_t steps = rig.engine->stats().steps;
  rig.engine->Wake();
  rig.Run(Greedy(SomePrompt(5), 1));
  EXPECT_EQ(rig.engine->stats().steps, steps + 1);
}

TEST(EngineTest, DrainServesWhatWasAdmittedAndRefusesTheRest) {
  EngineRig rig({.slots = 1});
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 3; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5), 20), readers.back()));
  }
  rig.engine->Drain(seconds(60));
  EXPECT_TRUE(rig.engine->stats().draining);
  EXPECT_EQ(rig.engine->stats().running, 0);
  for (const auto& reader : readers) EXPECT_TRUE(reader->Wait().status.ok());
  EXPECT_EQ(rig.Refusal(Greedy(SomePrompt(5), 1)).code(), absl::StatusCode::kUnavailable);
  rig.engine->Drain(seconds(60));  // at once
}

TEST(EngineTest, DrainEndsTheRestWhenItsTimeIsUp) {
  EngineRig rig({.slots = 1});
  const auto running = Reader::Make(), waiting = Reader::Make();
  const auto one = rig.Submit(Greedy(SomePrompt(5), 1 << 20), running);
  const auto two = rig.Submit(Greedy(SomePrompt(5), 1 << 20), waiting);
  running->AwaitTokens(1);
  rig.engine->Drain(milliseconds(1));
  EXPECT_EQ(running->Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting->Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(rig.engine->stats().slots.free, 1);
  EXPECT_EQ(rig.counter.ended(Outcome::kUnavailable), 2);
}

TEST(EngineTest, DestructorEndsWhatIsLeftAndGenerationsOutliveTheEngine) {
  EngineRig rig({.slots = 2});
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 5; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5, i), 1 << 20), readers.back()));
  }
  readers[0]->AwaitTokens(3);
  rig.engine.reset();
  for (const auto& reader : readers) {
    EXPECT_TRUE(reader->ended());
    EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kUnavailable);
  }
  generations[0]->Cancel();
  EXPECT_FALSE(generations[0]->TakeEvent());
  EXPECT_GE(generations[0]->usage().completion_tokens, 3);
}

// ---- Cancellation and deadlines ----

TEST(EngineTest, DeadlineThatHasPassedIsRefused) {
  ManualClock clock;
  RigOptions options;
  options.engine.now = clock.function();
  EngineRig rig(options);
  GenerationRequest request = Greedy(SomePrompt(5), 1);
  request.deadline = clock.now();
  EXPECT_EQ(rig.Refusal(request).code(), absl::StatusCode::kDeadlineExceeded);
  request.deadline = clock.now() + milliseconds(1);
  EXPECT_TRUE(rig.Run(request).status.ok());
}

TEST(EngineTest, DeadlinePassesInTheQueue) {
  ManualClock clock;
  RigOptions options{.slots = 1};
  options.engine.now = clock.function();
  EngineRig rig(options);
  rig.device.Hold();
  const auto first = Reader::Make(), second = Reader::Make(), third = Reader::Make();
  const auto running = rig.Submit(Greedy(SomePrompt(5), 4), first);
  rig.device.AwaitStep();
  GenerationRequest request = Greedy(SomePrompt(5), 4);
  request.deadline = clock.now() + seconds(10);
  const auto waiting = rig.Submit(request, second);
  request.deadline = clock.now() + seconds(1000);
  const auto patient = rig.Submit(request, third);
  clock.Advance(seconds(10));
  rig.device.LetStep();
  const Result result = second->Wait();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(result.accepted);
  EXPECT_EQ(waiting->usage().completion_tokens, 0);
  rig.device.Open();
  EXPECT_TRUE(first->Wait().status.ok());
  EXPECT_TRUE(third->Wait().status.ok());
  EXPECT_EQ(rig.counter.ended(Outcome::kDeadline), 1);
}

TEST(EngineTest, DeadlinePassesWhileDecoding) {
  ManualClock clock;
  RigOptions options{.slots = 1};
  options.engine.now = clock.function();
  EngineRig rig(options);
  rig.device.Hold();
  GenerationRequest request = Greedy(SomePrompt(5), 1000);
  request.deadline = clock.now() + seconds(10);
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  rig.device.LetStep();
  rig.device.LetStep();
  clock.Advance(seconds(10));
  rig.device.LetStep(/*and_await_next=*/false);
  const Result result = reader->Wait();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Mentions(result.status, "after 3 of 1000 tokens")) << result.status;
  EXPECT_EQ(result.tokens.size(), 3u);  // what was drawn in time is delivered
  EXPECT_EQ(rig.engine->stats().slots.free, 1);
}

TEST(EngineTest, IdleEngineWakesForADeadline) {
  RigOptions options{.slots = 1};
  options.engine.max_undelivered_tokens = 1;
  EngineRig rig(options);
  GenerationRequest request = Greedy(SomePrompt(5), 100);
  request.deadline = Clock::now() + milliseconds(100);
  const auto reader = Reader::Make(/*paused=*/true);
  const auto generation = rig.Submit(request, reader);
  while (rig.counter.all_ends() == 0) std::this_thread::yield();  // nothing but the deadline wakes the engine
  EXPECT_GE(Clock::now(), *request.deadline);
  reader->Resume();
  rig.engine->Deliver(generation);
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(EngineTest, CancelInTheQueueInPrefillAndInDecode) {
  EngineRig rig({.slots = 2});
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers{Reader::Make(), Reader::Make(), Reader::Make(),
                                               Reader::Make()};
  const auto decoding = rig.Submit(Greedy(SomePrompt(5), 1000), readers[0]);
  rig.device.LetStep();
  const auto prefilling = rig.Submit(Greedy(SomePrompt(1000), 10), readers[1]);
  const auto queued = rig.Submit(Greedy(SomePrompt(5), 10), readers[2]);
  rig.device.LetStep();  // the prompt's first piece is in the next one
  EXPECT_EQ(rig.engine->stats().slots.free, 0);
  queued->Cancel();
  EXPECT_EQ(rig.engine->stats().waiting, 0);
  rig.device.LetStep();
  EXPECT_EQ(readers[2]->Wait().status.code(), absl::StatusCode::kCancelled);

  prefilling->Cancel();
  rig.device.LetStep();  // the step at the gate still held it; the one after must not
  EXPECT_EQ(rig.engine->stats().slots.free, 1);
  const Result cut = readers[1]->Wait();
  EXPECT_EQ(cut.status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(cut.accepted);
  EXPECT_TRUE(cut.tokens.empty());
  EXPECT_LT(rig.counter.prefill_tokens, 1000);

  decoding->Cancel();
  decoding->Cancel();
  rig.device.LetStep(/*and_await_next=*/false);
  const Result stopped = readers[0]->Wait();
  EXPECT_EQ(stopped.status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(stopped.tokens.size(), static_cast<size_t>(decoding->usage().completion_tokens));
  EXPECT_EQ(rig.engine->stats().slots.free, 2);
  EXPECT_EQ(rig.counter.ended(Outcome::kCancelled), 3);
  rig.device.Open();
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(5), 10)).status.ok());
}

TEST(EngineTest, ThousandStreamsCancelledAtRandomStepsLeaveNothingBehind) {
  EngineRig rig({.slots = 8});
  const Result before = rig.Run(Greedy(SomePrompt(70), 5));
  std::mt19937 random(11);
  for (int round = 0; round < 125; ++round) {
    std::vector<std::shared_ptr<Reader>> readers;
    std::vector<std::shared_ptr<Generation>> generations;
    for (int i = 0; i < 8; ++i) {
      readers.push_back(Reader::Make());
      generations.push_back(rig.Submit(
          Greedy(SomePrompt(1 + static_cast<int>(random() % 150), random()), 1 << 20), readers.back()));
    }
    for (int i = 0; i < 8; ++i) {
      readers[i]->AwaitTokens(random() % 3);
      generations[i]->Cancel();
    }
    for (const auto& reader : readers) EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
  }
  const EngineStats stats = rig.engine->stats();
  EXPECT_EQ(stats.slots.free, 8);
  EXPECT_EQ(stats.running + stats.waiting + stats.parked, 0);
  EXPECT_EQ(rig.counter.ended(Outcome::kCancelled), 1000);
  const Result after = rig.Run(Greedy(SomePrompt(70), 5));
  EXPECT_EQ(after.ids(), before.ids());
}

TEST(EngineTest, VanishedReaderIsNoTrouble) {
  EngineRig rig({.slots = 1});
  // Nobody keeps the generation, and its callback takes nothing.
  rig.TrySubmit(Greedy(SomePrompt(5), 3), [](Generation&) {}).IgnoreError();
  rig.TrySubmit(Greedy(SomePrompt(5), 3), nullptr).IgnoreError();
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(5), 3)).status.ok());
}

TEST(EngineTest, CallbackIsDroppedOnceTheEndIsTaken) {
  EngineRig rig({});
  auto reader = Reader::Make();
  const auto generation = rig.Submit(Greedy(SomePrompt(5), 3), reader);
  reader->Wait();
  rig.engine->Deliver(generation);
  rig.Run(Greedy(SomePrompt(5), 1));  // its callbacks come after that delivery
  EXPECT_EQ(reader.use_count(), 1);
}

// ---- Slow readers ----

TEST(EngineTest, ReaderThatNeverReadsIsParkedThenEnded) {
  ManualClock clock;
  RigOptions options{.slots = 2};
  options.engine.now = clock.function();
  options.engine.max_undelivered_tokens = 8;
  options.engine.slow_reader_timeout = seconds(30);
  EngineRig rig(options);
  const auto slow = Reader::Make(/*paused=*/true);
  const auto generation = rig.Submit(Greedy(SomePrompt(5), 1000), slow);
  while (rig.engine->stats().parked == 0) std::this_thread::yield();
  EXPECT_EQ(rig.engine->stats().running, 0);
  EXPECT_EQ(rig.engine->stats().slots.free, 1);
  EXPECT_EQ(generation->usage().completion_tokens, 9);          // one more than may wait
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(5), 20)).status.ok());  // others go on
  EXPECT_EQ(generation->usage().completion_tokens, 9);

  clock.Advance(seconds(30));
  rig.engine->Wake();
  while (rig.counter.ended(Outcome::kCancelled) == 0) std::this_thread::yield();
  slow->Resume();
  rig.engine->Deliver(generation);
  const Result result = slow->Wait();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Mentions(result.status, "more than 8 tokens")) << result.status;
  EXPECT_EQ(result.tokens.size(), 9u);  // what was made can still be read
  EXPECT_EQ(result.deltas.size(), 1u);  // merged
  EXPECT_EQ(rig.engine->stats().slots.free, 2);
}

TEST(EngineTest, ParkedReaderThatCatchesUpGoesOnWithoutAGap) {
  RigOptions options{.slots = 1};
  options.engine.max_undelivered_tokens = 4;
  EngineRig rig(options);
  const std::vector<TokenId> expected = rig.Run(Greedy(SomePrompt(5), 50)).ids();
  const auto slow = Reader::Make(/*paused=*/true);
  const auto generation = rig.Submit(Greedy(SomePrompt(5), 50), slow);
  while (rig.engine->stats().parked == 0) std::this_thread::yield();
  const auto waiter = Reader::Make();
  const auto waiting = rig.Submit(Greedy(SomePrompt(5), 1), waiter);  // the slot is still the parked one's
  EXPECT_FALSE(waiter->ended());
  slow->Resume();
  rig.engine->Deliver(generation);
  const Result result = slow->Wait();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.ids(), expected);
  EXPECT_GE(result.deltas.front().tokens.size(), 5u);
  EXPECT_TRUE(waiter->Wait().status.ok());
}

TEST(EngineTest, ParkedGenerationCanBeCancelled) {
  RigOptions options{.slots = 1};
  options.engine.max_undelivered_tokens = 2;
  EngineRig rig(options);
  const auto slow = Reader::Make(/*paused=*/true);
  const auto generation = rig.Submit(Greedy(SomePrompt(5), 50), slow);
  while (rig.engine->stats().parked == 0) std::this_thread::yield();
  generation->Cancel();
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(5), 2)).status.ok());
  slow->Resume();
  rig.engine->Deliver(generation);
  EXPECT_EQ(slow->Wait().status.code(), absl::StatusCode::kCancelled);
}

// ---- Faults ----

TEST(EngineTest, NonFiniteLogitsEndThatCallAndTouchNobodyElse) {
  const auto neighbours = [](bool spoil, Result& victim) {
    EngineRig rig({.slots = 4});
    if (spoil) rig.device.SpoilSequence(/*first=*/300, /*decode_step=*/3);
    rig.device.Hold();
    std::vector<std::shared_ptr<Reader>> readers;
    std::vector<std::shared_ptr<Generation>> generations;
    for (int i = 0; i < 4; ++i) {
      GenerationRequest request = Greedy(SomePrompt(40, i), 20);
      if (i == 1) request.prompt[0] = 300;
      readers.push_back(Reader::Make());
      generations.push_back(rig.Submit(request, readers.back()));
    }
    rig.device.Open();
    victim = readers[1]->Wait();
    std::vector<Result> results;
    for (const int i : {0, 2, 3}) results.push_back(readers[i]->Wait());
    EXPECT_EQ(rig.counter.ended(Outcome::kError), spoil ? 1 : 0);
    EXPECT_EQ(rig.engine->stats().slots.free, 4);
    EXPECT_TRUE(rig.engine->stats().healthy);
    // The spoilt slot is as good as new to the next who gets it.
    const auto reuse = [&] {
      std::vector<std::vector<TokenId>> ids;
      for (int i = 0; i < 4; ++i) ids.push_back(rig.Run(Greedy(SomePrompt(10), 5)).ids());
      return ids;
    };
    const std::vector<std::vector<TokenId>> ids = reuse();
    for (const std::vector<TokenId>& one : ids) EXPECT_EQ(one, ids[0]);
    return results;
  };
  Result victim, healthy;
  const std::vector<Result> spoilt = neighbours(true, victim), clean = neighbours(false, healthy);
  EXPECT_TRUE(healthy.status.ok());
  EXPECT_EQ(victim.status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Mentions(victim.status, "the logits of token 4 are not finite")) << victim.status;
  ASSERT_EQ(victim.tokens.size(), 4u);  // the good ones before it are delivered
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(victim.tokens[i].token, healthy.tokens[i].token);
  for (size_t k = 0; k < spoilt.size(); ++k) {
    ASSERT_TRUE(spoilt[k].status.ok());
    ASSERT_EQ(spoilt[k].ids(), clean[k].ids());
    for (size_t i = 0; i < spoilt[k].tokens.size(); ++i) {
      EXPECT_EQ(spoilt[k].tokens[i].logprob, clean[k].tokens[i].logprob);
    }
  }
}

TEST(EngineTest, NonFinitePromptScoreEndsTheCall) {
  EngineRig rig({});
  rig.device.SpoilSequence(/*first=*/300, /*decode_step=*/-1);
  GenerationRequest request = Greedy(SomePrompt(200), 4);
  request.prompt[0] = 300;
  request.prompt_logprobs = true;
  const Result result = rig.Run(request);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Mentions(result.status, "prompt token 129")) << result.status;
  EXPECT_TRUE(result.tokens.empty());
  EXPECT_EQ(rig.engine->stats().slots.free, 4);
}

TEST(EngineTest, DeviceErrorFailsEveryCallAndRefusesNewOnes) {
  EngineRig rig({.slots = 2});
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 4; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5, i), 1 << 20), readers.back()));
  }
  EXPECT_TRUE(rig.engine->stats().healthy);
  rig.device.FailAfter(3);
  rig.device.Open();
  for (const auto& reader : readers) {
    const Result result = reader->Wait();
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(Mentions(result.status, "a fault made by the test")) << result.status;
  }
  EXPECT_FALSE(rig.engine->stats().healthy);
  EXPECT_EQ(rig.engine->stats().slots.free, 2);
  EXPECT_EQ(rig.counter.ended(Outcome::kError), 4);
  EXPECT_EQ(rig.Refusal(Greedy(SomePrompt(5), 1)).code(), absl::StatusCode::kUnavailable);
  rig.engine->Drain(seconds(60));
}

}  // namespace
}  // namespace efla
