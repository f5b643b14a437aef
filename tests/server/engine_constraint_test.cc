// Constrained calls on the engine: masks that come ahead of the step or late, ends, and neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/engine_rig.h"
#include "tests/server/fake_constraint.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;
using std::chrono::seconds;

constexpr TokenId kEos = 2;  // of the checkpoint

std::vector<std::vector<TokenId>> SomePositions(int length, int width = 5) {
  std::vector<std::vector<TokenId>> positions;
  for (int i = 0; i < length; ++i) {
    positions.emplace_back();
    for (int k = 0; k < width; ++k) positions.back().push_back((17 * i + 41 * k) % 300 + 10);
  }
  return positions;
}

GenerationRequest Constrained(std::shared_ptr<const Constraint> constraint, int64_t max_tokens = 100,
                              int prompt_tokens = 20) {
  GenerationRequest request = Greedy(SomePrompt(prompt_tokens), max_tokens);
  request.sampling.temperature = 1;
  request.sampling.seed = 4;
  request.constraint = std::move(constraint);
  return request;
}

// Biased so that the end token is drawn wherever it may be.
GenerationRequest WantsToEnd(GenerationRequest request) {
  request.sampling.logit_bias.emplace_back(kEos, 100.0f);
  return request;
}

TEST(EngineConstraintTest, EveryTokenIsAllowedAndTheLastOneEndsTheCall) {
  EngineRig rig({});
  const auto positions = SomePositions(12);
  const Result result = rig.Run(Constrained(std::make_shared<FakeConstraint>(positions)));
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kConstraintComplete);
  EXPECT_EQ(result.finished->usage.completion_tokens, 12);
  const std::vector<TokenId> ids = result.ids();
  ASSERT_EQ(ids.size(), positions.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_NE(std::find(positions[i].begin(), positions[i].end(), ids[i]), positions[i].end()) << i;
  }
  EXPECT_EQ(rig.counter.ended(Outcome::kStop), 1);
}

TEST(EngineConstraintTest, TheEndTokenIsAllowedJustWhereTheOutputIsWhole) {
  for (const bool ignore_eos : {false, true}) {
    EngineRig rig({});
    GenerationRequest request =
        WantsToEnd(Constrained(std::make_shared<FakeConstraint>(SomePositions(12), std::set<size_t>{5, 8})));
    request.stopping.ignore_eos = ignore_eos;
    const Result result = rig.Run(request);
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.finished->reason, FinishReason::kEos);
    EXPECT_EQ(result.ids().size(), 6u);
    EXPECT_EQ(result.ids().back(), kEos);
    request.stopping.min_tokens = 6;
    EXPECT_EQ(rig.Run(request).ids().size(), 9u);
  }
}

TEST(EngineConstraintTest, AnEmptyOutputEndsWithTheEndToken) {
  EngineRig rig({});
  const Result result = rig.Run(Constrained(std::make_shared<FakeConstraint>(SomePositions(0))));
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.ids(), std::vector<TokenId>{kEos});
  EXPECT_EQ(result.finished->reason, FinishReason::kEos);
}

TEST(EngineConstraintTest, MaxTokensCutsAndACompleteOutputIsSaidToBe) {
  EngineRig rig({});
  const auto constraint = std::make_shared<FakeConstraint>(SomePositions(5));
  for (const int max_tokens : {1, 4, 5, 6}) {
    const Result result = rig.Run(Constrained(constraint, max_tokens));
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.finished->reason,
              max_tokens >= 5 ? FinishReason::kConstraintComplete : FinishReason::kMaxTokens);
    EXPECT_EQ(result.ids().size(), std::min<size_t>(max_tokens, 5));
  }
  EXPECT_EQ(rig.Run(Constrained(constraint, 0)).finished->reason, FinishReason::kMaxTokens);
}

TEST(EngineConstraintTest, TextIsWholeAtTheConstraintsEnd) {
  EngineRig rig({.checkpoint = "model/demo", .tokenizer = true});
  std::vector<std::vector<TokenId>> positions;
  const std::string text = "Once upon a time \xE2\x82\xAC";
  const std::vector<TokenId> ids = rig.tokenizer->EncodeContinuation(text, false).value();
  for (const TokenId id : ids) positions.push_back({id});
  GenerationRequest request = Constrained(std::make_shared<FakeConstraint>(positions));
  request.stopping.stop = {text + "!"};  // holds all of it back
  const Result result = rig.Run(request);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.finished->reason, FinishReason::kConstraintComplete);
  EXPECT_EQ(result.ids(), ids);
  EXPECT_EQ(result.text, text);
}

TEST(EngineConstraintTest, ALateMaskHoldsUpNobodyElse) {
  Gate gate;
  EngineRig rig({.slots = 6});
  const GenerationRequest constrained =
      Constrained(std::make_shared<FakeConstraint>(SomePositions(12), std::set<size_t>{}, &gate));
  const Result expected = rig.Run(constrained);
  const Result plain = rig.Run(Greedy(SomePrompt(30, 3), 200));
  gate.Close();
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(constrained, reader);
  gate.AwaitOneInside();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(rig.Run(Greedy(SomePrompt(30, 3), 200)).ids(), plain.ids());
  EXPECT_FALSE(reader->ended());
  // Nothing is computed for a call that waits.
  const int64_t steps = rig.counter.steps;
  rig.engine->Wake();
  EXPECT_EQ(rig.engine->stats().running, 1);
  EXPECT_EQ(rig.counter.steps, steps);
  gate.Open();
  EXPECT_EQ(reader->Wait().ids(), expected.ids());
}

TEST(EngineConstraintTest, ThePromptIsComputedWhileTheFirstMaskIsMade) {
  Gate gate;
  EngineRig rig({});
  const auto constraint = std::make_shared<FakeConstraint>(SomePositions(4), std::set<size_t>{}, &gate);
  const Result expected = rig.Run(Constrained(constraint, 100, 400));
  gate.Close();
  rig.counter.prefill_tokens = 0;
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(Constrained(constraint, 100, 400), reader);
  gate.AwaitOneInside();
  while (rig.counter.prefill_tokens < 384) std::this_thread::yield();  // all but the last, ragged piece
  EXPECT_FALSE(reader->ended());
  EXPECT_EQ(rig.counter.prefill_tokens, 384);
  gate.Open();
  EXPECT_EQ(reader->Wait().ids(), expected.ids());
  EXPECT_EQ(rig.counter.prefill_tokens, 400);
}

TEST(EngineConstraintTest, CallsThatWaitForAMaskCanBeCancelledAndExpire) {
  Gate gate;
  ManualClock clock;
  RigOptions options;
  options.engine.now = clock.function();
  EngineRig rig(options);
  gate.Close();
  const auto constraint = std::make_shared<FakeConstraint>(SomePositions(4), std::set<size_t>{}, &gate);
  const auto cancelled = Reader::Make(), expired = Reader::Make();
  const auto first = rig.Submit(Constrained(constraint), cancelled);
  GenerationRequest with_deadline = Constrained(constraint);
  with_deadline.deadline = clock.now() + seconds(5);
  const auto second = rig.Submit(with_deadline, expired);
  gate.AwaitOneInside();
  first->Cancel();
  EXPECT_EQ(cancelled->Wait().status.code(), absl::StatusCode::kCancelled);
  clock.Advance(seconds(6));
  rig.engine->Wake();
  EXPECT_EQ(expired->Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(rig.pool->counts().free, rig.pool->counts().total);
  // Their workers are still busy, and others find the engine as it was.
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(10), 5)).status.ok());
  gate.Open();
  EXPECT_TRUE(rig.Run(Constrained(constraint)).status.ok());
}

TEST(EngineConstraintTest, WhatIsLeftWithoutATokenFailsAlone) {
  EngineRig rig({});
  const GenerationRequest neighbour = Greedy(SomePrompt(50, 9), 60);
  const Bits expected = BitsOf(rig.Run(neighbour));
  const auto constraint = std::make_shared<FakeConstraint>(SomePositions(6, 2));
  GenerationRequest request = Constrained(constraint);
  request.sampling.banned_token_ids = SomePositions(4, 2)[3];  // all that the fourth position may be
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(neighbour, reader);
  const Result result = rig.Run(request);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kFailedPrecondition) << result.status;
  EXPECT_NE(std::string(result.status.message()).find("token 3 of the output"), std::string::npos)
      << result.status;
  EXPECT_NE(std::string(result.status.message()).find("banned_token_ids, the constraint"), std::string::npos)
      << result.status;
  EXPECT_EQ(result.tokens.size(), 3u);
  EXPECT_EQ(BitsOf(reader->Wait()), expected);
  EXPECT_EQ(rig.counter.ended(Outcome::kUnsatisfiable), 1);
}

TEST(EngineConstraintTest, ATokenThatTheConstraintRefusesAfterAllIsAnInternalError) {
  EngineRig rig({});
  auto constraint = std::make_shared<FakeConstraint>(SomePositions(6));
  constraint->refuses_all = true;
  EXPECT_EQ(rig.Run(Constrained(constraint)).status.code(), absl::StatusCode::kInternal);
}

TEST(EngineConstraintTest, EachTurnBeginsAnew) {
  EngineRig rig({});
  const auto constraint = std::make_shared<FakeConstraint>(SomePositions(5));
  Kept first = rig.RunKept(Constrained(constraint));
  ASSERT_TRUE(first.result.status.ok() && first.state) << first.result.status;
  GenerationRequest next = Constrained(constraint);
  next.start = first.state->state;
  next.pending_token = first.state->drawn.back();
  for (const bool with_prompt : {true, false}) {
    if (!with_prompt) next.prompt.clear();
    const Result second = rig.Run(next);
    ASSERT_TRUE(second.status.ok()) << second.status;
    EXPECT_EQ(second.ids().size(), 5u);
    EXPECT_EQ(second.finished->reason, FinishReason::kConstraintComplete);
  }
}

TEST(EngineConstraintTest, ManyBesidePlainStreamsGiveEachWhatItGetsAlone) {
  EngineRig rig({.slots = 48});
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 48; ++i) {
    if (i % 3 == 0) {
      requests.push_back(Greedy(SomePrompt(10 + i, i), 40));
      continue;
    }
    requests.push_back(
        Constrained(std::make_shared<FakeConstraint>(SomePositions(10 + i), std::set<size_t>{7}), 30));
    requests.back().prompt = SomePrompt(70, i);
    requests.back().sampling.seed = i;
    if (i % 3 == 1) requests.back().sampling.repetition_penalty = 1.5f;
  }
  std::vector<Bits> alone;
  for (const GenerationRequest& request : requests) alone.push_back(BitsOf(rig.Run(request)));
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (const GenerationRequest& request : requests) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(request, readers.back()));
  }
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(BitsOf(readers[i]->Wait()), alone[i]) << i;
}

TEST(EngineConstraintTest, AShutdownDoesNotWaitForMasksThatNobodyNeeds) {
  Gate gate;
  const auto reader = Reader::Make();
  {
    EngineRig rig({});
    gate.Close();
    const auto generation = rig.Submit(
        Constrained(std::make_shared<FakeConstraint>(SomePositions(5), std::set<size_t>{}, &gate)), reader);
    gate.AwaitOneInside();
    rig.engine->Drain(std::chrono::milliseconds(0));
    EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kUnavailable);
    gate.Open();
  }
}

}  // namespace
}  // namespace efla
