// States that outlive their calls: turns, forks, copies, and what a call that was cut leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/engine_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

bool Mentions(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

// A greedy call that goes on from where another ended, and feeds `prompt` after the token that waits.
GenerationRequest After(const FinalState& state, std::vector<TokenId> prompt, int64_t max_tokens) {
  GenerationRequest request = Greedy(std::move(prompt), max_tokens);
  request.start = state.state;
  if (!state.drawn.empty()) request.pending_token = state.drawn.back();
  return request;
}

std::vector<TokenId> Part(const std::vector<TokenId>& tokens, size_t begin, size_t end) {
  return {tokens.begin() + static_cast<int64_t>(begin), tokens.begin() + static_cast<int64_t>(end)};
}

// One sequence alone on a device of its own, its steps made by hand.
class ByHand {
 public:
  explicit ByHand(const std::string& checkpoint)
      : device_(CreateDevice({.kind = "cpu", .threads = 1}).value()),
        model_(Model::Load(EngineRig::Open(checkpoint), *device_,
                           {.max_tokens = 1024, .max_decode = 1, .max_samples = 1})
                   .value()),
        pool_(StatePool::Create(*device_, model_->config(), 1, /*poison=*/true).value()),
        slot_(pool_->Acquire().value()) {}

  // Both give the greedy token after what was fed.
  TokenOutput Prefill(const std::vector<TokenId>& tokens) {
    const Segment segment{.token_begin = 0,
                          .num_tokens = static_cast<int32_t>(tokens.size()),
                          .read_slot = std::exchange(read_slot_, slot_.slot),
                          .write_slot = slot_.slot};
    StepInput input;
    input.tokens = tokens;
    input.segments = std::span(&segment, 1);
    return Run(input);
  }
  TokenOutput Decode(TokenId token) {
    const int32_t read = std::exchange(read_slot_, slot_.slot);
    StepInput input;
    input.tokens = std::span(&token, 1);
    input.num_decode = 1;
    input.decode_read_slot = std::span(&read, 1);
    input.decode_write_slot = std::span(&slot_.slot, 1);
    return Run(input);
  }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> bytes(static_cast<size_t>(pool_->layout().state_bytes()));
    EXPECT_TRUE(pool_->CopyOut(slot_, bytes).ok());
    return bytes;
  }

 private:
  TokenOutput Run(StepInput input) {
    const SampleRow row{.token_row = static_cast<int32_t>(input.tokens.size()) - 1, .temperature = 0};
    input.samples = std::span(&row, 1);
    model_->Submit(input, *pool_);
    const SampleResult result = model_->Wait().value().rows[0];
    return {.token = result.token, .logprob = result.logprob, .top = {}};
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<StatePool> pool_;
  const SlotHandle slot_;
  int32_t read_slot_ = StatePool::kZeroSlot;
};

// ---- Exactness, for each model type ----

class EngineTurnsTest : public testing::TestWithParam<std::string> {
 protected:
  RigOptions Rig(int max_batch_tokens = 128) const {
    RigOptions options{.checkpoint = "tests/golden/" + GetParam(), .slots = 12};
    options.engine.max_batch_tokens = max_batch_tokens;
    return options;
  }
};

TEST_P(EngineTurnsTest, ACallSplitOverTurnsIsOneCall) {
  for (const int budget : {64, 512}) {
    EngineRig rig(Rig(budget));
    for (const int length : {1, 64, 150}) {
      const std::vector<TokenId> prompt = SomePrompt(length, 7);
      const Kept whole = rig.RunKept(Greedy(prompt, 12));
      ASSERT_TRUE(whole.state);
      EXPECT_EQ(whole.state->drawn, whole.result.ids());
      EXPECT_EQ(whole.state->prompt_tokens, length);
      for (const std::vector<int>& turns : std::vector<std::vector<int>>{{5, 7}, {1, 11}, {4, 1, 1, 6}}) {
        Bits bits;
        std::optional<FinalState> last;
        for (const int tokens : turns) {
          const Kept turn = rig.RunKept(last ? After(*last, {}, tokens) : Greedy(prompt, tokens));
          ASSERT_TRUE(turn.state) << turn.result.status;
          EXPECT_EQ(turn.state->prompt_tokens, last ? 0 : length);
          EXPECT_EQ(turn.state->drawn, turn.result.ids());
          const Bits drawn = BitsOf(turn.result);
          bits.drawn.insert(bits.drawn.end(), drawn.drawn.begin(), drawn.drawn.end());
          last = turn.state;
        }
        EXPECT_EQ(bits, BitsOf(whole.result)) << "prompt of " << length << ", budget " << budget;
        EXPECT_EQ(rig.BytesOf(*last->state), rig.BytesOf(*whole.state->state));
      }
    }
  }
}

// Each form as the contract says: the prompt chunkwise, drawn tokens recurrent, the pending one before the
// text that follows it.
TEST_P(EngineTurnsTest, TurnsAreTheStepsMadeByHand) {
  EngineRig rig(Rig());
  for (const int more : {1, 64, 70, 200}) {
    ByHand hand("tests/golden/" + GetParam());
    const std::vector<TokenId> prompt = SomePrompt(100, 3), text = SomePrompt(more, 4);
    std::vector<TokenOutput> expected{hand.Prefill(prompt)};
    for (int i = 1; i < 4; ++i) expected.push_back(hand.Decode(expected.back().token));
    const Kept first = rig.RunKept(Greedy(prompt, 4));
    Bits bits;
    AddBits(expected, bits.drawn);
    ASSERT_EQ(BitsOf(first.result), bits);
    EXPECT_EQ(rig.BytesOf(*first.state->state), hand.Bytes());

    hand.Decode(expected.back().token);
    expected.assign(1, hand.Prefill(text));
    for (int i = 1; i < 6; ++i) expected.push_back(hand.Decode(expected.back().token));
    const Kept second = rig.RunKept(After(*first.state, text, 6));
    bits = {};
    AddBits(expected, bits.drawn);
    EXPECT_EQ(BitsOf(second.result), bits) << "text of " << more;
    EXPECT_EQ(second.state->prompt_tokens, more);
    EXPECT_EQ(rig.BytesOf(*second.state->state), hand.Bytes());
    EXPECT_EQ(second.result.finished->usage.prompt_tokens, more);
  }
}

// Appending in pieces on the grid, with or without a step between them.
TEST_P(EngineTurnsTest, AppendingInPiecesOnTheGridIsAppendingAtOnce) {
  EngineRig rig(Rig());
  const std::vector<TokenId> prompt = SomePrompt(300, 9);
  const Kept whole = rig.RunKept(Greedy(prompt, 5));
  for (const std::vector<size_t>& cuts :
       std::vector<std::vector<size_t>>{{64}, {256}, {64, 128, 192, 256}, {128, 192}}) {
    size_t done = 0;
    std::optional<FinalState> last;
    for (const size_t cut : cuts) {
      GenerationRequest append = Greedy(Part(prompt, done, cut), 0);
      if (last) append.start = last->state;
      const Kept piece = rig.RunKept(append);
      ASSERT_TRUE(piece.state) << piece.result.status;
      EXPECT_TRUE(piece.state->drawn.empty());
      EXPECT_EQ(piece.state->prompt_tokens, static_cast<int64_t>(cut - done));
      last = piece.state;
      done = cut;
    }
    const Kept rest = rig.RunKept(After(*last, Part(prompt, done, prompt.size()), 5));
    EXPECT_EQ(BitsOf(rest.result), BitsOf(whole.result));
    EXPECT_EQ(rig.BytesOf(*rest.state->state), rig.BytesOf(*whole.state->state));
  }
}

TEST_P(EngineTurnsTest, ForksSeeOnlyWhatTheyStandOn) {
  EngineRig rig(Rig());
  const Kept trunk = rig.RunKept(Greedy(SomePrompt(150, 1), 3));
  const std::vector<std::byte> trunk_bytes = rig.BytesOf(*trunk.state->state);
  std::vector<GenerationRequest> branches;
  for (int i = 0; i < 4; ++i) {
    branches.push_back(After(*trunk.state, i == 3 ? std::vector<TokenId>{} : SomePrompt(20 + 70 * i, i), 8));
    if (i == 2) branches.back().sampling = {.temperature = 1.5f, .seed = 11};
  }
  std::vector<Bits> alone;
  for (const GenerationRequest& branch : branches) alone.push_back(BitsOf(rig.Run(branch)));

  rig.device.Hold();  // all in the same steps, beside a stranger
  const auto stranger_reader = Reader::Make();
  const auto stranger = rig.Submit(Greedy(SomePrompt(200, 5), 20), stranger_reader);
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int twice = 0; twice < 2; ++twice) {
    for (const GenerationRequest& branch : branches) {
      readers.push_back(Reader::Make());
      generations.push_back(rig.Submit(branch, readers.back()));
    }
  }
  rig.device.Open();
  for (size_t i = 0; i < readers.size(); ++i) {
    EXPECT_EQ(BitsOf(readers[i]->Wait()), alone[i % branches.size()]) << "branch " << i;
  }
  stranger_reader->Wait();
  EXPECT_EQ(rig.BytesOf(*trunk.state->state), trunk_bytes);
}

TEST_P(EngineTurnsTest, ACopyThroughTheHostGoesOnTheSame) {
  EngineRig rig(Rig());
  Kept first = rig.RunKept(Greedy(SomePrompt(130, 2), 4));
  const Bits expected = BitsOf(rig.Run(After(*first.state, SomePrompt(30, 3), 9)));
  const std::vector<std::byte> bytes = rig.BytesOf(*first.state->state);
  first.state->state = nullptr;
  // The freed slot is written over by somebody else before the state returns.
  rig.Run(Greedy(SomePrompt(300, 8), 3));
  first.state->state = rig.engine->CopyIn(bytes).value();
  EXPECT_EQ(rig.BytesOf(*first.state->state), bytes);
  EXPECT_EQ(BitsOf(rig.Run(After(*first.state, SomePrompt(30, 3), 9))), expected);
}

INSTANTIATE_TEST_SUITE_P(ModelTypes, EngineTurnsTest,
                         testing::Values("efla_basic", "gated_efla", "delta_net", "gated_deltanet",
                                         "efla_noconv"),
                         [](const testing::TestParamInfo<std::string>& param) { return param.param; });

// Copies go on while the engine works, and nobody's bits change.
TEST(EngineStateTest, CopiesOnOtherThreadsDisturbNobody) {
  EngineRig rig({.slots = 8});
  const Kept base = rig.RunKept(Greedy(SomePrompt(100, 1), 2));
  const std::vector<std::byte> bytes = rig.BytesOf(*base.state->state);
  const Bits continued = BitsOf(rig.Run(After(*base.state, SomePrompt(10), 6)));
  const Bits busy = BitsOf(rig.Run(Greedy(SomePrompt(90, 6), 60)));
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!done) {
        absl::StatusOr<ResidentStatePtr> copy = rig.engine->CopyIn(bytes);
        if (!copy.ok()) {
          EXPECT_EQ(copy.status().code(), absl::StatusCode::kResourceExhausted);
          continue;
        }
        EXPECT_EQ(rig.BytesOf(**copy), bytes);
        FinalState state = *base.state;
        state.state = *std::move(copy);
        EXPECT_EQ(BitsOf(rig.Run(After(state, SomePrompt(10), 6))), continued);
      }
    });
  }
  for (int round = 0; round < 10; ++round) EXPECT_EQ(BitsOf(rig.Run(Greedy(SomePrompt(90, 6), 60))), busy);
  done = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(EngineStateTest, DrawsDependOnSeedAndIndexInTheCall) {
  EngineRig rig({});
  const Kept base = rig.RunKept(Greedy(SomePrompt(40, 1), 3));
  GenerationRequest request = After(*base.state, {}, 12);
  request.sampling = {.temperature = 2, .seed = 5};
  const std::vector<TokenId> ids = rig.Run(request).ids();
  EXPECT_EQ(rig.Run(request).ids(), ids);
  request.sampling.seed = 6;
  EXPECT_NE(rig.Run(request).ids(), ids);
}

// ---- What a turn takes and gives ----

TEST(EngineStateTest, PendingTokenIsFedOnceAndAlone) {
  EngineRig rig({});
  const Kept first = rig.RunKept(Greedy(SomePrompt(10), 3));
  const size_t before = rig.device.steps().size();
  GenerationRequest request = After(*first.state, SomePrompt(5), 2);
  request.progress = true;
  const Result result = rig.Run(request);
  const std::vector<TestDevice::StepShape> steps = rig.device.steps();
  ASSERT_EQ(steps.size(), before + 3);
  EXPECT_EQ(steps[before].num_decode, 1);
  EXPECT_EQ(steps[before].num_samples, 0);
  EXPECT_TRUE(steps[before].segments.empty());
  ASSERT_EQ(steps[before + 1].segments.size(), 1u);
  EXPECT_EQ(steps[before + 1].segments[0].read_slot, steps[before + 1].segments[0].write_slot);
  EXPECT_NE(steps[before + 1].segments[0].read_slot, first.state->state->slot().slot);
  EXPECT_EQ(steps[before + 2].num_decode, 1);
  EXPECT_EQ(result.finished->usage.prompt_tokens, 5);
  EXPECT_EQ(result.finished->usage.cached_tokens, 0);
  EXPECT_EQ(result.accepted->prompt_tokens, 5);
  ASSERT_EQ(result.progress.size(), 1u);
  EXPECT_EQ(result.progress[0].prompt_tokens_total, 5);
}

TEST(EngineStateTest, EmptyPromptDrawsFromThePendingTokensLogits) {
  EngineRig rig({});
  const Kept first = rig.RunKept(Greedy(SomePrompt(10), 3));
  const size_t before = rig.device.steps().size();
  GenerationRequest request = After(*first.state, {}, 1);
  request.prompt_logprobs = true;  // of which there are none
  const Result result = rig.Run(request);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(rig.device.steps().size(), before + 1);
  EXPECT_EQ(result.tokens.size(), 1u);
  EXPECT_TRUE(result.finished->prompt_logprobs.empty());
  EXPECT_EQ(result.finished->timing.first_token_us,
            result.finished->timing.queue_us + result.finished->timing.prefill_us);
}

TEST(EngineStateTest, PendingTokenAloneMayBeAllThatIsFed) {
  EngineRig rig({});
  const Kept first = rig.RunKept(Greedy(SomePrompt(10), 3));
  const Kept longer = rig.RunKept(Greedy(SomePrompt(10), 4));
  const Kept fed = rig.RunKept(After(*first.state, {}, 0));
  ASSERT_TRUE(fed.state) << fed.result.status;
  EXPECT_TRUE(fed.state->drawn.empty());
  EXPECT_EQ(fed.state->prompt_tokens, 0);
  EXPECT_EQ(fed.result.finished->reason, FinishReason::kMaxTokens);
  EXPECT_EQ(rig.BytesOf(*fed.state->state), rig.BytesOf(*longer.state->state));
  const Result forgotten = rig.Run(After(*first.state, {}, 0));  // the same without keeping it
  EXPECT_TRUE(forgotten.status.ok()) << forgotten.status;
}

TEST(EngineStateTest, StateOfAPromptIsTheStateBeforeTheFirstDraw) {
  EngineRig rig({});
  const Kept only = rig.RunKept(Greedy(SomePrompt(100), 0));
  const Kept one = rig.RunKept(Greedy(SomePrompt(100), 1));
  EXPECT_EQ(only.state->prompt_tokens, 100);
  EXPECT_TRUE(only.state->drawn.empty());
  EXPECT_EQ(one.state->drawn.size(), 1u);
  EXPECT_EQ(rig.BytesOf(*only.state->state), rig.BytesOf(*one.state->state));
}

TEST(EngineStateTest, PromptScoresGoOnFromAState) {
  EngineRig rig({});
  const std::vector<TokenId> prompt = SomePrompt(200, 4);
  GenerationRequest whole = Greedy(prompt, 2);
  whole.prompt_logprobs = true;
  const Bits expected = BitsOf(rig.Run(whole));
  const Kept first = rig.RunKept(Greedy(Part(prompt, 0, 128), 0));
  GenerationRequest rest = After(*first.state, Part(prompt, 128, 200), 2);
  rest.prompt_logprobs = true;
  const Bits bits = BitsOf(rig.Run(rest));
  EXPECT_EQ(bits.drawn, expected.drawn);
  ASSERT_EQ(bits.scored.size(), 71u);
  EXPECT_TRUE(std::equal(bits.scored.begin(), bits.scored.end(), expected.scored.end() - 71));
}

TEST(EngineStateTest, StopTokensAreAmongWhatWasDrawn) {
  EngineRig rig({});
  GenerationRequest request = Greedy(SomePrompt(30, 5), 12);
  request.stopping.stop_token_ids = {rig.Run(request).ids()[3]};
  const Kept kept = rig.RunKept(request);
  EXPECT_EQ(kept.result.finished->reason, FinishReason::kStopToken);
  EXPECT_EQ(kept.state->drawn, kept.result.ids());
}

TEST(EngineStateTest, TextGoesOnOverTurns) {
  EngineRig rig({.checkpoint = "model/demo", .tokenizer = true});
  std::vector<TokenId> prompt = rig.tokenizer->Encode("Once upon a time there was", false).value();
  prompt.insert(prompt.begin(), rig.tokenizer->bos_id());
  const std::string text = rig.Run(Greedy(prompt, 30)).text;
  const Kept first = rig.RunKept(Greedy(prompt, 12));
  const Kept second = rig.RunKept(After(*first.state, {}, 18));
  EXPECT_EQ(first.result.text + second.result.text, text);

  // After control tokens alone it is the state that says whether there has been text.
  const Kept start = rig.RunKept(Greedy({rig.tokenizer->bos_id()}, 0));
  GenerationRequest control = Greedy({rig.tokenizer->bos_id()}, 8);
  control.start = start.state->state;
  const std::string fresh = rig.Run(control).text;
  control.continues_text = true;
  const std::string going_on = rig.Run(control).text;
  EXPECT_EQ(going_on, " " + fresh);
}

TEST(EngineStateTest, StateIsGivenOnceAndOnlyWhenAskedFor) {
  EngineRig rig({});
  const auto reader = Reader::Make();
  GenerationRequest request = Greedy(SomePrompt(10), 3);
  const auto plain = rig.Submit(request, reader);
  reader->Wait();
  EXPECT_FALSE(plain->TakeFinalState());
  EXPECT_EQ(rig.pool->counts().free, rig.pool->counts().total);
  request.keep_state = true;
  const auto keeper = Reader::Make();
  const auto keeping = rig.Submit(request, keeper);
  keeper->Wait();
  EXPECT_EQ(rig.pool->counts().live, 1);
  EXPECT_TRUE(keeping->TakeFinalState());  // and is let go of at once
  EXPECT_FALSE(keeping->TakeFinalState());
  EXPECT_EQ(rig.pool->counts().live, 0);
}

TEST(EngineStateTest, StateNobodyTakesGoesWithItsGeneration) {
  EngineRig rig({});
  GenerationRequest request = Greedy(SomePrompt(10), 3);
  request.keep_state = true;
  const auto reader = Reader::Make();
  auto generation = rig.Submit(request, reader);
  reader->Wait();
  EXPECT_EQ(rig.pool->counts().live, 1);
  rig.engine.reset();  // the state may outlive the engine too
  EXPECT_EQ(rig.pool->counts().live, 1);
  generation = nullptr;
  EXPECT_EQ(rig.pool->counts().live, 0);
}

TEST(EngineStateTest, BadStartsAreRefusedByName) {
  EngineRig rig({}), other({});
  const Kept kept = rig.RunKept(Greedy(SomePrompt(10), 3));
  const Kept foreign = other.RunKept(Greedy(SomePrompt(10), 3));
  const auto refuse = [&](GenerationRequest request, const std::string& mention) {
    const absl::Status status = rig.Refusal(std::move(request));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << mention;
    EXPECT_TRUE(Mentions(status, mention)) << status << " should mention: " << mention;
  };
  GenerationRequest request = Greedy(SomePrompt(10), 3);
  request.pending_token = 5;
  refuse(request, "pending token 5 is given without the state");
  request.start = kept.state->state;
  for (const TokenId token : {-1, 320}) {
    request.pending_token = token;
    refuse(request, "the pending token is " + std::to_string(token) + "; ids are 0 to 319");
  }
  request.pending_token.reset();
  request.prompt.clear();
  refuse(request, "the prompt is empty");
  refuse(After(*foreign.state, SomePrompt(5), 3), "another pool");
  std::vector<std::byte> bytes(static_cast<size_t>(rig.pool->layout().state_bytes()));
  EXPECT_TRUE(Mentions(rig.engine->CopyOut(*foreign.state->state, bytes), "another pool"));
  const absl::Status small = rig.engine->CopyOut(*kept.state->state, std::span(bytes).first(7));
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(small, "7 bytes are given")) << small;
  bytes.push_back({});
  const absl::Status large = rig.engine->CopyIn(bytes).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(large, std::to_string(bytes.size() - 1))) << large;
  EXPECT_TRUE(rig.Run(After(*kept.state, SomePrompt(5), 3)).status.ok());
}

// ---- Calls that were cut ----

// Continues what was left of a call for `prompt`, and compares with the call that was not cut.
void ExpectGoesOn(EngineRig& rig, const std::vector<TokenId>& prompt, const FinalState& left,
                  const std::vector<TokenId>& story) {
  ASSERT_NE(left.state, nullptr);
  std::vector<TokenId> ids = left.drawn;
  ASSERT_LT(ids.size(), story.size());
  ASSERT_TRUE(ids.empty() || left.prompt_tokens == static_cast<int64_t>(prompt.size()));
  const int64_t rest = static_cast<int64_t>(story.size() - ids.size());
  const Result result =
      rig.Run(After(left, Part(prompt, static_cast<size_t>(left.prompt_tokens), prompt.size()), rest));
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (const TokenId id : result.ids()) ids.push_back(id);
  EXPECT_EQ(ids, story);
}

TEST(EngineStateTest, CancelledCallsLeaveWhatTheyHadComputed) {
  EngineRig rig({.slots = 6});
  const std::vector<TokenId> prompt = SomePrompt(300, 2);
  const std::vector<TokenId> story = rig.Run(Greedy(prompt, 30)).ids();
  for (const int steps : {1, 2, 3, 7}) {  // 128, 256, 300 tokens of the prompt; then one token a step
    rig.device.Hold();
    GenerationRequest request = Greedy(prompt, 30);
    request.keep_state = true;
    const auto reader = Reader::Make();
    const auto generation = rig.Submit(request, reader);
    for (int i = 1; i < steps; ++i) rig.device.LetStep();
    rig.device.AwaitStep();
    generation->Cancel();
    EXPECT_FALSE(generation->TakeFinalState()) << "it has not ended yet";
    rig.device.Open();
    EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
    const std::optional<FinalState> left = generation->TakeFinalState();
    ASSERT_TRUE(left);
    EXPECT_EQ(left->prompt_tokens, std::min(128 * steps, 300));
    EXPECT_EQ(left->drawn.size(), static_cast<size_t>(std::max(0, steps - 2)));
    ExpectGoesOn(rig, prompt, *left, story);
  }
}

TEST(EngineStateTest, ExpiredCallsLeaveWhatTheyHadComputed) {
  ManualClock clock;
  RigOptions options;
  options.engine.now = clock.function();
  EngineRig rig(options);
  const std::vector<TokenId> prompt = SomePrompt(200, 2);
  const std::vector<TokenId> story = rig.Run(Greedy(prompt, 30)).ids();
  for (const bool budget : {false, true}) {
    rig.device.Hold();
    GenerationRequest request = Greedy(prompt, 30);
    request.keep_state = true;
    if (budget) {
      request.time_budget = seconds(5);
    } else {
      request.deadline = clock.now() + seconds(5);
    }
    const auto reader = Reader::Make();
    const auto generation = rig.Submit(request, reader);
    rig.device.LetStep();
    rig.device.AwaitStep();
    clock.Advance(seconds(5));
    rig.device.Open();
    EXPECT_EQ(reader->Wait().status.code(),
              budget ? absl::StatusCode::kOk : absl::StatusCode::kDeadlineExceeded);
    const std::optional<FinalState> left = generation->TakeFinalState();
    ASSERT_TRUE(left);
    ExpectGoesOn(rig, prompt, *left, story);
  }
}

TEST(EngineStateTest, ParkedCallsLeaveAlsoWhatNobodyHasRead) {
  RigOptions options;
  options.engine.max_undelivered_tokens = 4;
  EngineRig rig(options);
  const std::vector<TokenId> prompt = SomePrompt(20, 2);
  const std::vector<TokenId> story = rig.Run(Greedy(prompt, 30)).ids();
  GenerationRequest request = Greedy(prompt, 30);
  request.keep_state = true;
  const auto reader = Reader::Make(/*paused=*/true);
  const auto generation = rig.Submit(request, reader);
  while (rig.engine->stats().parked == 0) std::this_thread::yield();
  generation->Cancel();
  while (rig.counter.all_ends() < 2) std::this_thread::yield();
  reader->Resume();
  rig.engine->Deliver(generation);
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
  const std::optional<FinalState> left = generation->TakeFinalState();
  ASSERT_TRUE(left);
  EXPECT_EQ(left->drawn.size(), 5u);
  ExpectGoesOn(rig, prompt, *left, story);
}

TEST(EngineStateTest, ShutDownCallsLeaveWhatTheyHadComputed) {
  EngineRig rig({.slots = 2});
  GenerationRequest request = Greedy(SomePrompt(20, 2), 1 << 20);
  request.keep_state = true;
  const auto reader = Reader::Make(), waiter = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  reader->AwaitTokens(3);
  rig.device.Hold();
  rig.device.AwaitStep();
  const auto waiting = rig.Submit(request, waiter);
  std::thread drain([&] { rig.engine->Drain(milliseconds(0)); });
  while (!rig.engine->stats().draining) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(20));  // until the drain's time is up
  rig.device.Open();
  drain.join();
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiter->Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(waiting->TakeFinalState());
  const std::optional<FinalState> left = generation->TakeFinalState();
  ASSERT_TRUE(left);
  EXPECT_EQ(static_cast<int64_t>(left->drawn.size()), generation->usage().completion_tokens);
  EXPECT_EQ(rig.BytesOf(*left->state).size(), static_cast<size_t>(rig.pool->layout().state_bytes()));
}

TEST(EngineStateTest, NothingIsLeftOfCallsThatNeverBeganOrFailed) {
  EngineRig rig({.slots = 1});
  rig.device.Hold();
  const auto reader = Reader::Make(), waiter = Reader::Make();
  GenerationRequest request = Greedy(SomePrompt(200), 30);
  request.keep_state = true;
  request.prompt[0] = 300;
  rig.device.SpoilSequence(300, /*decode_step=*/2);
  const auto spoilt = rig.Submit(request, reader);
  rig.device.AwaitStep();
  const auto waiting = rig.Submit(request, waiter);
  waiting->Cancel();
  rig.device.Open();
  EXPECT_EQ(waiter->Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(waiting->TakeFinalState());
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(spoilt->TakeFinalState());
  EXPECT_EQ(rig.pool->counts().free, 1);

  // An append whose state is not finite fails by itself, not at the next turn.
  rig.device.SpoilSequence(300, /*decode_step=*/-1);
  request.stopping.max_tokens = 0;
  const Kept append = rig.RunKept(request);
  EXPECT_EQ(append.result.status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Mentions(append.result.status, "the prompt's last token")) << append.result.status;
  EXPECT_FALSE(append.state);

  rig.device.FailAfter(1);
  const Kept failed = rig.RunKept(Greedy(SomePrompt(20), 30));
  EXPECT_EQ(failed.result.status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(failed.state);
}

// ---- Slots ----

TEST(EngineStateTest, StateLetGoOfElsewhereLetsAWaitingRequestIn) {
  EngineRig rig({.slots = 2});
  std::vector<ResidentStatePtr> held;
  for (int i = 0; i < 2; ++i) held.push_back(rig.RunKept(Greedy(SomePrompt(10, i), 1)).state->state);
  EXPECT_EQ(rig.engine->CopyIn(std::vector<std::byte>(static_cast<size_t>(rig.pool->layout().state_bytes())))
                .status()
                .code(),
            absl::StatusCode::kResourceExhausted);
  for (ResidentStatePtr& state : held) {
    const auto reader = Reader::Make();
    const auto generation = rig.Submit(Greedy(SomePrompt(5), 2), reader);
    if (&state == &held[0]) {
      std::this_thread::sleep_for(milliseconds(20));
      EXPECT_FALSE(reader->ended());
      EXPECT_EQ(rig.engine->stats().waiting, 1);
    }
    std::thread([&] { state = nullptr; }).join();  // nothing else wakes the engine
    EXPECT_TRUE(reader->Wait().status.ok());
  }
}

TEST(EngineStateTest, SlotShortageIsToldUntilThereAreSlots) {
  EngineRig rig({.slots = 3});
  std::vector<ResidentStatePtr> held;
  for (int i = 0; i < 3; ++i) held.push_back(rig.RunKept(Greedy(SomePrompt(10, i), 1)).state->state);
  std::mutex mutex;
  std::condition_variable told;
  int wanted = 0;
  rig.engine->SetSlotShortageCallback([&](int slots) {
    const std::lock_guard lock(mutex);
    wanted = std::max(wanted, slots);
    told.notify_all();
  });
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 2; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(5, i), 2), readers.back()));
  }
  {
    std::unique_lock lock(mutex);
    told.wait(lock, [&] { return wanted == 2; });
  }
  held.clear();
  rig.device.Open();
  for (const auto& reader : readers) EXPECT_TRUE(reader->Wait().status.ok());
  EXPECT_EQ(wanted, 2);
}

}  // namespace
}  // namespace efla
