#include "server/engine/branched_generation.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/types.h"
#include "tests/server/engine_rig.h"
#include "tests/server/fake_constraint.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;

// Everything one branched call gave.
struct Branched {
  std::optional<AcceptedEvent> accepted;
  std::vector<ProgressEvent> progress;
  std::vector<Result> branches;
  absl::Status status = absl::UnknownError("not ended");
};

// As Reader, for a call with branches.
class BranchReader : public std::enable_shared_from_this<BranchReader> {
 public:
  explicit BranchReader(size_t branches) { result_.branches.resize(branches); }
  ReadyCallback ready() {
    return [self = shared_from_this()](Generation& generation) { self->Take(generation); };
  }
  Branched Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60), [this] { return ended_; }))
        << "it never ended";
    return result_;
  }
  // It takes nothing from now on.
  void Pause() {
    const std::lock_guard lock(mutex_);
    paused_ = true;
  }
  // Until so many tokens have been read altogether.
  void AwaitTokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || tokens_ >= count; });
  }

 private:
  void Take(Generation& generation) {
    const std::lock_guard lock(mutex_);
    if (paused_) return;
    EXPECT_FALSE(ended_) << "ready was called after the end was taken";
    while (std::optional<Event> event = generation.TakeEvent()) {
      if (auto* accepted = std::get_if<AcceptedEvent>(&*event)) {
        EXPECT_FALSE(result_.accepted);
        result_.accepted = *accepted;
      } else if (auto* progress = std::get_if<ProgressEvent>(&*event)) {
        result_.progress.push_back(*progress);
      } else if (auto* delta = std::get_if<DeltaEvent>(&*event)) {
        Result& branch = result_.branches.at(static_cast<size_t>(delta->branch));
        EXPECT_FALSE(branch.finished);
        Add(branch, delta->text, delta->tokens);
        branch.deltas.push_back(std::move(*delta));
      } else if (auto* finished = std::get_if<FinishedEvent>(&*event)) {
        Result& branch = result_.branches.at(static_cast<size_t>(finished->branch));
        EXPECT_FALSE(branch.finished);
        Add(branch, finished->text, finished->tokens);
        branch.finished = std::move(*finished);
        branch.status = absl::OkStatus();
      }
      changed_.notify_all();
    }
    if (std::optional<absl::Status> end = generation.TakeEnd()) {
      result_.status = *std::move(end);
      ended_ = true;
      changed_.notify_all();
    }
  }
  void Add(Result& branch, const std::string& text, const std::vector<TokenOutput>& tokens) {
    branch.text += text;
    branch.tokens.insert(branch.tokens.end(), tokens.begin(), tokens.end());
    tokens_ += tokens.size();
  }

  std::mutex mutex_;  // guards what follows
  bool paused_ = false;
  std::condition_variable changed_;
  Branched result_;
  size_t tokens_ = 0;
  bool ended_ = false;
};

// An engine, and a thread a job for what a branched call posts.
class BranchRig : public EngineRig {
 public:
  using EngineRig::EngineRig;
  ~BranchRig() { JoinJobs(); }

  absl::StatusOr<std::shared_ptr<BranchedGeneration>> TrySubmit(GenerationRequest request,
                                                                std::vector<Branch> branches,
                                                                const std::shared_ptr<BranchReader>& reader) {
    auto post = [this](std::function<void()> job) {
      const std::lock_guard lock(jobs_mutex_);
      jobs_.emplace_back(std::move(job));
    };
    absl::StatusOr<std::shared_ptr<BranchedGeneration>> generation = BranchedGeneration::Submit(
        *engine, std::move(request), std::move(branches), post, &counter, reader->ready());
    // A refusal is its caller's to count.
    if (generation.ok()) ++submitted;
    // What came before Submit had returned is taken now, as a reactor does.
    if (generation.ok()) (*generation)->Deliver();
    return generation;
  }
  Branched Run(GenerationRequest request, std::vector<Branch> branches) {
    auto reader = std::make_shared<BranchReader>(branches.size());
    auto generation = TrySubmit(std::move(request), std::move(branches), reader);
    EXPECT_TRUE(generation.ok()) << generation.status();
    return reader->Wait();
  }
  Result RunAlone(GenerationRequest request) { return EngineRig::Run(std::move(request)); }
  void JoinJobs() {
    std::vector<std::thread> jobs;
    {
      const std::lock_guard lock(jobs_mutex_);
      jobs.swap(jobs_);
    }
    for (std::thread& job : jobs) job.join();
  }

 private:
  std::mutex jobs_mutex_;
  std::vector<std::thread> jobs_;
};

std::vector<Branch> Seeds(uint64_t first, int count) {
  std::vector<Branch> branches;
  for (int i = 0; i < count; ++i)
    branches.push_back({.seed = first + static_cast<uint64_t>(i), .continuation = {}});
  return branches;
}

GenerationRequest Sampled(std::vector<TokenId> prompt, int64_t max_tokens) {
  GenerationRequest request = Greedy(std::move(prompt), max_tokens);
  request.sampling.temperature = 1;
  request.logprobs = true;
  request.top_logprobs = 2;
  return request;
}

TEST(BranchedGenerationTest, EachSampleIsTheCallOfItsSeedBitForBit) {
  for (const int length : {1, 64, 65, 200, 321}) {
    SCOPED_TRACE(length);
    BranchRig rig(RigOptions{.slots = 16});
    const GenerationRequest request = Sampled(SomePrompt(length), 9);
    const Branched samples = rig.Run(request, Seeds(40, 5));
    ASSERT_TRUE(samples.status.ok()) << samples.status;
    EXPECT_EQ(samples.accepted->prompt_tokens, length);
    EXPECT_EQ(rig.counter.prefill_tokens, length) << "the prompt is computed once";
    EXPECT_EQ(rig.counter.all_ends(), 1) << "it is one request";
    EXPECT_EQ(rig.counter.completion_tokens, 45);
    for (int i = 0; i < 5; ++i) {
      GenerationRequest alone = request;
      alone.sampling.seed = 40 + static_cast<uint64_t>(i);
      const Result& sample = samples.branches[static_cast<size_t>(i)];
      EXPECT_EQ(BitsOf(sample), BitsOf(rig.RunAlone(alone))) << "sample " << i;
      EXPECT_EQ(sample.finished->usage.prompt_tokens, length);
      EXPECT_EQ(sample.finished->usage.completion_tokens, 9);
      EXPECT_GE(sample.finished->timing.first_token_us,
                sample.finished->timing.queue_us + sample.finished->timing.prefill_us);
    }
  }
}

TEST(BranchedGenerationTest, DrawsThatLookAtThePromptSeeAllOfIt) {
  BranchRig rig(RigOptions{.slots = 16});
  GenerationRequest request = Sampled(SomePrompt(300), 40);
  request.sampling.temperature = 0.2f;
  request.sampling.repetition_penalty = 5;
  request.sampling.no_repeat_ngram_size = 2;
  const Branched samples = rig.Run(request, Seeds(7, 3));
  for (int i = 0; i < 3; ++i) {
    request.sampling.seed = 7 + static_cast<uint64_t>(i);
    EXPECT_EQ(BitsOf(samples.branches[static_cast<size_t>(i)]), BitsOf(rig.RunAlone(request)))
        << "sample " << i;
  }
  GenerationRequest without = request;
  without.sampling.repetition_penalty = 1;
  without.sampling.no_repeat_ngram_size = 0;
  EXPECT_NE(BitsOf(rig.RunAlone(without)), BitsOf(rig.RunAlone(request))) << "the penalties show";
}

// Compares samples with calls of their own: bits, text, and how each ended. Their number of each reason.
std::map<FinishReason, int> ExpectSamplesAsAlone(BranchRig& rig, const GenerationRequest& request,
                                                 uint64_t first_seed, int count) {
  const Branched samples = rig.Run(request, Seeds(first_seed, count));
  EXPECT_TRUE(samples.status.ok()) << samples.status;
  std::map<FinishReason, int> reasons;
  for (int i = 0; samples.status.ok() && i < count; ++i) {
    SCOPED_TRACE(i);
    GenerationRequest alone = request;
    alone.sampling.seed = first_seed + static_cast<uint64_t>(i);
    const Result expected = rig.RunAlone(alone);
    const Result& sample = samples.branches[static_cast<size_t>(i)];
    EXPECT_EQ(BitsOf(sample), BitsOf(expected));
    EXPECT_EQ(sample.text, expected.text);
    EXPECT_EQ(sample.finished->reason, expected.finished->reason);
    EXPECT_EQ(sample.finished->matched_token, expected.finished->matched_token);
    EXPECT_EQ(sample.finished->matched_stop, expected.finished->matched_stop);
    EXPECT_EQ(sample.finished->usage.completion_tokens, expected.finished->usage.completion_tokens);
    ++reasons[sample.finished->reason];
  }
  return reasons;
}

TEST(BranchedGenerationTest, AFirstDrawMayBeTheLast) {
  BranchRig rig(RigOptions{.tokenizer = true, .slots = 16});
  GenerationRequest request = Sampled(SomePrompt(70), 1);
  EXPECT_EQ(ExpectSamplesAsAlone(rig, request, 3, 5)[FinishReason::kMaxTokens], 5);
  // Half of the ids end the call, so that some samples end with their first draw and some later.
  request.stopping.max_tokens = 30;
  request.stopping.ignore_eos = true;
  for (TokenId id = 0; id < rig.model->config().vocab_size; id += 2) {
    if (request.stopping.stop_token_ids.size() < 64) request.stopping.stop_token_ids.push_back(id);
  }
  std::map<FinishReason, int> reasons = ExpectSamplesAsAlone(rig, request, 100, 24);
  EXPECT_GT(reasons[FinishReason::kStopToken], 0);
  request.stopping.min_tokens = 3;
  ExpectSamplesAsAlone(rig, request, 100, 8);
  request = Sampled(SomePrompt(70), 20);
  request.stopping.stop = {"e", "a"};
  reasons = ExpectSamplesAsAlone(rig, request, 5, 12);
  EXPECT_GT(reasons[FinishReason::kStopString], 0);
}

TEST(BranchedGenerationTest, AConstraintHoldsFromTheFirstDrawOn) {
  BranchRig rig(RigOptions{.slots = 16});
  GenerationRequest request = Sampled(SomePrompt(100), 20);
  request.constraint = std::make_shared<FakeConstraint>(
      std::vector<std::vector<TokenId>>{{5, 6, 7, 8}, {9, 10}, {11, 12, 13}}, std::set<size_t>{1});
  std::map<FinishReason, int> reasons = ExpectSamplesAsAlone(rig, request, 1, 16);
  EXPECT_GT(reasons[FinishReason::kConstraintComplete], 0);
  for (const int64_t max_tokens : {1, 2}) {
    request.stopping.max_tokens = max_tokens;
    EXPECT_GT(ExpectSamplesAsAlone(rig, request, 1, 6)[FinishReason::kMaxTokens], 0);
  }
  // One that a first draw completes.
  request.stopping.max_tokens = 20;
  request.constraint = std::make_shared<FakeConstraint>(std::vector<std::vector<TokenId>>{{5, 6, 7, 8}});
  EXPECT_EQ(ExpectSamplesAsAlone(rig, request, 1, 6)[FinishReason::kConstraintComplete], 6);
}

TEST(BranchedGenerationTest, SamplesWithNothingToDrawFailAsTheCallAloneDoes) {
  BranchRig rig(RigOptions{.slots = 8});
  GenerationRequest request = Sampled({5, 7, 5}, 5);
  request.sampling.allowed_token_ids = {7};
  request.sampling.no_repeat_ngram_size = 2;  // after the 5 at the end no 7 may follow
  request.stopping.ignore_eos = true;
  const Result alone = rig.RunAlone(request);
  ASSERT_FALSE(alone.status.ok());
  EXPECT_EQ(rig.Run(request, Seeds(1, 3)).status, alone.status);
}

TEST(BranchedGenerationTest, TheMostSamplesRunBesideAFullBatch) {
  BranchRig rig(
      RigOptions{.slots = 72, .engine = {.max_batch_tokens = 64, .max_running = 8, .max_queue = 100}});
  std::vector<std::shared_ptr<BranchReader>> readers;
  std::vector<std::shared_ptr<BranchedGeneration>> calls;
  for (int i = 0; i < 4; ++i) {
    readers.push_back(std::make_shared<BranchReader>(i == 3 ? 64 : 2));
    auto call = rig.TrySubmit(Sampled(SomePrompt(130, static_cast<uint32_t>(i)), 12),
                              Seeds(9, i == 3 ? 64 : 2), readers.back());
    ASSERT_TRUE(call.ok()) << call.status();
    calls.push_back(*call);
  }
  for (const auto& reader : readers) {
    const Branched samples = reader->Wait();
    EXPECT_TRUE(samples.status.ok()) << samples.status;
    for (const Result& sample : samples.branches) EXPECT_EQ(sample.tokens.size(), 12u);
  }
  EXPECT_EQ(rig.counter.prefill_tokens, 4 * 130);
}

TEST(BranchedGenerationTest, FirstDrawsThatCannotBeAreRefused) {
  BranchRig rig(RigOptions{.slots = 4});
  GenerationRequest draws = Sampled(SomePrompt(10), 5);
  draws.first_draw_seeds.assign(2, 1);
  const auto submit = [&rig](const GenerationRequest& request) {
    ++rig.submitted;  // a refusal is told to the observer, too
    return rig.engine->Submit(request, [](Generation&) {}).status();
  };
  EXPECT_EQ(submit(draws).code(), absl::StatusCode::kInvalidArgument) << "no keep_state";
  draws.keep_state = true;
  draws.first_draw_seeds.assign(kChunkTokens + 1, 1);
  const absl::Status many = submit(draws);
  EXPECT_NE(many.message().find("at most 64"), absl::string_view::npos) << many;
  GenerationRequest drawn = Sampled(SomePrompt(10), 5);
  drawn.first_draw = TokenOutput{.token = 3, .logprob = 0, .top = {}};
  const absl::Status without = submit(drawn);
  EXPECT_NE(without.message().find("token 3 is given as the first draw"), absl::string_view::npos) << without;
}

TEST(BranchedGenerationTest, ContinuationsAreScoredAsTheWholeIs) {
  for (const int length : {1, 64, 130}) {
    SCOPED_TRACE(length);
    BranchRig rig(RigOptions{.slots = 8});
    GenerationRequest request = Greedy(SomePrompt(length), 0);
    request.prompt_logprobs = true;
    request.top_logprobs = 3;
    request.use_prefix_cache = false;
    std::vector<Branch> branches;
    for (const int size : {1, 5, 70, 2}) {
      branches.push_back({.seed = 0, .continuation = SomePrompt(size, static_cast<uint32_t>(size))});
    }
    const Branched scores = rig.Run(request, branches);
    ASSERT_TRUE(scores.status.ok()) << scores.status;
    for (size_t i = 0; i < branches.size(); ++i) {
      const std::vector<TokenId>& continuation = branches[i].continuation;
      GenerationRequest whole = request;
      whole.prompt.insert(whole.prompt.end(), continuation.begin(), continuation.end());
      Bits expected = BitsOf(rig.RunAlone(whole)), got = BitsOf(scores.branches[i]);
      const size_t entries = continuation.size() * 4;  // a score and its alternatives
      ASSERT_GE(got.scored.size(), entries);
      EXPECT_EQ(std::vector(got.scored.end() - static_cast<ptrdiff_t>(entries), got.scored.end()),
                std::vector(expected.scored.end() - static_cast<ptrdiff_t>(entries), expected.scored.end()))
          << "continuation " << i;
      EXPECT_EQ(scores.branches[i].finished->usage.prompt_tokens, std::ssize(whole.prompt));
    }
  }
}

TEST(BranchedGenerationTest, WithoutRoomForAWaitingStateEachComputesThePrompt) {
  BranchRig rig(RigOptions{.slots = 1});
  const GenerationRequest request = Sampled(SomePrompt(200), 6);
  const Branched samples = rig.Run(request, Seeds(1, 3));
  ASSERT_TRUE(samples.status.ok()) << samples.status;
  EXPECT_EQ(rig.counter.prefill_tokens, 3 * 200);
  GenerationRequest alone = request;
  alone.sampling.seed = 3;
  EXPECT_EQ(BitsOf(samples.branches[2]), BitsOf(rig.RunAlone(alone)));
}

TEST(BranchedGenerationTest, ManyCallsOnFewSlotsAllEnd) {
  BranchRig rig(
      RigOptions{.slots = 5, .engine = {.max_batch_tokens = 128, .max_running = 8, .max_queue = 400}});
  std::vector<std::shared_ptr<BranchReader>> readers;
  std::vector<std::shared_ptr<BranchedGeneration>> calls;
  for (int i = 0; i < 30; ++i) {
    readers.push_back(std::make_shared<BranchReader>(6));
    auto call = rig.TrySubmit(Sampled(SomePrompt(100 + 17 * i, static_cast<uint32_t>(i)), 3), Seeds(1, 6),
                              readers.back());
    ASSERT_TRUE(call.ok()) << call.status();
    calls.push_back(*call);
  }
  for (const auto& reader : readers) {
    const Branched samples = reader->Wait();
    EXPECT_TRUE(samples.status.ok()) << samples.status;
    for (const Result& sample : samples.branches) EXPECT_EQ(sample.tokens.size(), 3u);
  }
}

TEST(BranchedGenerationTest, AllFitIntoTheQueueOrNone) {
  BranchRig rig(
      RigOptions{.slots = 4, .engine = {.max_batch_tokens = 128, .max_running = 4, .max_queue = 6}});
  const GenerationRequest request = Sampled(SomePrompt(100), 2);
  auto reader = std::make_shared<BranchReader>(7);
  const absl::Status refused = rig.TrySubmit(request, Seeds(1, 7), reader).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_NE(refused.message().find("the limit is 6"), absl::string_view::npos) << refused;
  EXPECT_EQ(rig.engine->stats().waiting, 0) << "nothing is left of it";
  EXPECT_EQ(rig.engine->stats().queued_prompt_tokens, 0);
  EXPECT_TRUE(rig.Run(request, Seeds(1, 6)).status.ok());

  // Places that are kept count as waiting.
  const absl::StatusOr<QueuePlacesPtr> places = rig.engine->Reserve(5, 500);
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_EQ(rig.engine->stats().waiting, 5);
  EXPECT_EQ(rig.engine->stats().queued_prompt_tokens, 500);
  EXPECT_EQ(rig.TrySubmit(request, Seeds(1, 2), reader).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(BranchedGenerationTest, TheWholesEndTellsHowLongItsPromptTook) {
  BranchRig rig(RigOptions{.slots = 8});
  int ends = 0;
  for (const int prompt : {3, 100}) {  // without and with a part that all branches share
    EXPECT_TRUE(rig.Run(Sampled(SomePrompt(prompt), 5), Seeds(1, 3)).status.ok());
    EXPECT_EQ(rig.counter.timed_prompts, ++ends) << prompt;
  }
}

TEST(BranchedGenerationTest, ACancelEndsAllWhereverTheyAre) {
  BranchRig rig(
      RigOptions{.slots = 8, .engine = {.max_batch_tokens = 64, .max_running = 8, .max_queue = 64}});
  // In the prompt, which takes hundreds of steps.
  auto reader = std::make_shared<BranchReader>(4);
  auto call = rig.TrySubmit(Sampled(SomePrompt(20'000), 5), Seeds(1, 4), reader);
  ASSERT_TRUE(call.ok()) << call.status();
  (*call)->Cancel();
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
  // While the branches draw.
  reader = std::make_shared<BranchReader>(4);
  call = rig.TrySubmit(Sampled(SomePrompt(100), 1'000'000), Seeds(1, 4), reader);
  ASSERT_TRUE(call.ok()) << call.status();
  reader->AwaitTokens(20);
  (*call)->Cancel();
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(rig.counter.ended(Outcome::kCancelled), 2);
}

TEST(BranchedGenerationTest, ADeadlineEndsAll) {
  BranchRig rig(RigOptions{.slots = 8});
  GenerationRequest request = Sampled(SomePrompt(100), 1'000'000);
  request.deadline = Clock::now() + std::chrono::milliseconds(300);
  EXPECT_EQ(rig.Run(request, Seeds(1, 3)).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(rig.counter.ended(Outcome::kDeadline), 1);
}

TEST(BranchedGenerationTest, ATimeBudgetEndsAllWellFromTheArrivalOn) {
  BranchRig rig(RigOptions{.slots = 8});
  GenerationRequest request = Sampled(SomePrompt(100), 1'000'000);
  request.time_budget = std::chrono::milliseconds(500);
  const Branched samples = rig.Run(request, Seeds(1, 3));
  ASSERT_TRUE(samples.status.ok()) << samples.status;
  for (const Result& sample : samples.branches) {
    EXPECT_EQ(sample.finished->reason, FinishReason::kTimeBudget);
    EXPECT_GT(sample.tokens.size(), 0u);
  }
  // In the prompt: nothing is drawn, and yet each sample has its end.
  request.prompt = SomePrompt(200'000);
  request.time_budget = std::chrono::milliseconds(20);
  const Branched none = rig.Run(request, Seeds(1, 3));
  ASSERT_TRUE(none.status.ok()) << none.status;
  for (const Result& sample : none.branches) {
    EXPECT_EQ(sample.finished->reason, FinishReason::kTimeBudget);
    EXPECT_TRUE(sample.tokens.empty());
  }
}

TEST(BranchedGenerationTest, AReaderThatStopsReadingEndsTheCall) {
  RigOptions options{.slots = 8};
  options.engine.max_undelivered_tokens = 8;
  options.engine.slow_reader_timeout = std::chrono::milliseconds(100);
  BranchRig rig(options);
  auto reader = std::make_shared<BranchReader>(2);
  auto call = rig.TrySubmit(Sampled(SomePrompt(10), 1'000'000), Seeds(1, 2), reader);
  ASSERT_TRUE(call.ok()) << call.status();
  reader->AwaitTokens(1);
  reader->Pause();
  // It reads again when it is too late.
  const auto await = [&](auto condition) {
    for (int i = 0; i < 3000 && !condition(rig.engine->stats()); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  await([](const EngineStats& stats) { return stats.parked > 0; });
  await([](const EngineStats& stats) { return stats.parked == 0 && stats.running == 0; });
  std::optional<absl::Status> end;
  while (!end) {
    while ((*call)->TakeEvent()) {
    }
    end = (*call)->TakeEnd();
  }
  EXPECT_EQ(end->code(), absl::StatusCode::kResourceExhausted) << *end;
}

TEST(BranchedGenerationTest, ADrainWaitsForBranchesThatAreNotSubmittedYet) {
  BranchRig rig(RigOptions{.slots = 8});
  auto reader = std::make_shared<BranchReader>(4);
  auto call = rig.TrySubmit(Sampled(SomePrompt(5'000), 5), Seeds(1, 4), reader);
  ASSERT_TRUE(call.ok()) << call.status();
  rig.engine->Drain(std::chrono::seconds(60));
  const Branched samples = reader->Wait();
  EXPECT_TRUE(samples.status.ok()) << samples.status;
  for (const Result& sample : samples.branches) EXPECT_EQ(sample.tokens.size(), 5u);
}

// What the prompt's call holds, its state and the branches' places, waits for no reader.
TEST(BranchedGenerationTest, BranchesRunThoughNobodyReads) {
  BranchRig rig(RigOptions{.slots = 8});
  auto reader = std::make_shared<BranchReader>(4);
  reader->Pause();
  auto call = rig.TrySubmit(Sampled(SomePrompt(200), 5), Seeds(1, 4), reader);
  ASSERT_TRUE(call.ok()) << call.status();
  std::future<void> drained =
      std::async(std::launch::async, [&] { rig.engine->Drain(std::chrono::seconds(60)); });
  EXPECT_EQ(drained.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(rig.engine->stats().waiting, 0);
  bool accepted = false;
  size_t tokens = 0, finished = 0;
  std::optional<absl::Status> end;
  while (!end) {
    while (std::optional<Event> event = (*call)->TakeEvent()) {
      EXPECT_EQ(std::holds_alternative<AcceptedEvent>(*event), !std::exchange(accepted, true));
      if (auto* delta = std::get_if<DeltaEvent>(&*event)) tokens += delta->tokens.size();
      if (auto* last = std::get_if<FinishedEvent>(&*event)) {
        tokens += last->tokens.size();
        ++finished;
      }
    }
    end = (*call)->TakeEnd();
  }
  EXPECT_TRUE(end->ok()) << *end;
  EXPECT_EQ(finished, 4u);
  EXPECT_EQ(tokens, 20u);
}

TEST(BranchedGenerationTest, ThePromptsProgressIsThatOfTheWhole) {
  BranchRig rig(RigOptions{.slots = 8});
  GenerationRequest request = Sampled(SomePrompt(1'000), 2);
  request.progress = true;
  const Branched samples = rig.Run(request, Seeds(1, 3));
  ASSERT_FALSE(samples.progress.empty());
  for (const ProgressEvent& progress : samples.progress) EXPECT_EQ(progress.prompt_tokens_total, 1'000);
  EXPECT_EQ(samples.progress.back().prompt_tokens_done, 1'000);
}

TEST(BranchedGenerationTest, AnEchoComesFirstInEachSample) {
  BranchRig rig(RigOptions{.tokenizer = true, .slots = 8});
  GenerationRequest request = Sampled(SomePrompt(150), 4);
  request.echo_tokens = 150;
  const Branched samples = rig.Run(request, Seeds(1, 2));
  ASSERT_TRUE(samples.status.ok()) << samples.status;
  for (int i = 0; i < 2; ++i) {
    const Result& sample = samples.branches[static_cast<size_t>(i)];
    request.sampling.seed = 1 + static_cast<uint64_t>(i);
    const Result alone = rig.RunAlone(request);
    EXPECT_EQ(BitsOf(sample), BitsOf(alone));
    EXPECT_EQ(sample.text, alone.text);
    ASSERT_EQ(sample.tokens.size(), 154u);
    const std::vector<TokenId> ids = sample.ids();
    EXPECT_EQ(std::vector(ids.begin(), ids.begin() + 150), request.prompt);
    EXPECT_EQ(sample.text, rig.tokenizer->Decode(ids));
  }
}

// Passes everything on, and remembers what it was asked to run.
class SubmitRecorder final : public Engine {
 public:
  struct Submitted {
    int64_t prompt_tokens;
    const NgramIndex* ngrams;
    bool is_stem;
  };
  explicit SubmitRecorder(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  std::vector<Submitted> submitted() const {
    const std::lock_guard lock(mutex_);
    return submitted_;
  }

  absl::StatusOr<std::shared_ptr<Generation>> Submit(GenerationRequest request,
                                                     ReadyCallback ready) override {
    {
      const std::lock_guard lock(mutex_);
      submitted_.push_back({.prompt_tokens = std::ssize(request.prompt),
                            .ngrams = request.prompt_ngrams.get(),
                            .is_stem = request.keep_state});
    }
    return engine_->Submit(std::move(request), std::move(ready));
  }
  absl::StatusOr<QueuePlacesPtr> Reserve(int requests, int64_t prompt_tokens) override {
    return engine_->Reserve(requests, prompt_tokens);
  }
  void Deliver(const std::shared_ptr<Generation>& generation) override { engine_->Deliver(generation); }
  void Drain(std::chrono::milliseconds timeout) override { engine_->Drain(timeout); }
  EngineStats stats() const override { return engine_->stats(); }
  bool HoldsText(std::span<const TokenId> ids) const override { return engine_->HoldsText(ids); }
  void Wake() override { engine_->Wake(); }
  absl::Status CopyOut(const ResidentState& state, std::span<std::byte> to) override {
    return engine_->CopyOut(state, to);
  }
  absl::StatusOr<ResidentStatePtr> CopyIn(std::span<const std::byte> from) override {
    return engine_->CopyIn(from);
  }
  void SetSlotShortageCallback(std::function<void(int wanted)> callback) override {
    engine_->SetSlotShortageCallback(std::move(callback));
  }

 private:
  const std::unique_ptr<Engine> engine_;
  mutable std::mutex mutex_;
  std::vector<Submitted> submitted_;
};

TEST(BranchedGenerationTest, SamplesShareThePromptsIndexAndHoldNoMoreOfItThanTheyLookAt) {
  constexpr int64_t kPrompt = 1'000;
  struct Case {
    float repetition_penalty;
    int64_t echo_tokens, most_held;
    bool scores;  // which keeps the stem from drawing
  };
  for (const Case& c :
       {Case{1, 0, 0, false}, Case{5, 0, 70 + kChunkTokens, false}, Case{1, 100, 100 + kChunkTokens, false},
        Case{5, 100, 100 + kChunkTokens, true}, Case{1, 0, kChunkTokens, true}}) {
    SCOPED_TRACE(testing::Message() << "repetition_penalty " << c.repetition_penalty << ", echo "
                                    << c.echo_tokens << ", scores " << c.scores);
    BranchRig rig(RigOptions{.tokenizer = true, .slots = 16});
    auto owned = std::make_unique<SubmitRecorder>(std::move(rig.engine));
    const SubmitRecorder& recorder = *owned;
    rig.engine = std::move(owned);
    GenerationRequest request = Sampled(SomePrompt(kPrompt), 30);
    request.sampling.temperature = 0.2f;
    request.sampling.no_repeat_ngram_size = 2;
    request.sampling.repetition_penalty = c.repetition_penalty;
    request.sampling.penalty_window = 70;
    request.echo_tokens = c.echo_tokens;
    GenerationRequest branched = request;
    branched.prompt_logprobs = c.scores;
    const Branched samples = rig.Run(branched, Seeds(7, 4));
    ASSERT_TRUE(samples.status.ok()) << samples.status;

    const std::vector<SubmitRecorder::Submitted> submitted = recorder.submitted();
    ASSERT_EQ(submitted.size(), 5u);
    for (const SubmitRecorder::Submitted& part : submitted) {
      EXPECT_NE(part.ngrams, nullptr);
      EXPECT_EQ(part.ngrams, submitted.front().ngrams);
      if (!part.is_stem) {
        EXPECT_LE(part.prompt_tokens, c.most_held);
      }
    }
    for (size_t i = 0; i < 4; ++i) {
      SCOPED_TRACE(i);
      request.sampling.seed = 7 + i;
      const Result& sample = samples.branches[i];
      const Result alone = rig.RunAlone(request);
      EXPECT_EQ(sample.ids(), alone.ids());
      EXPECT_EQ(sample.text, alone.text);
      EXPECT_EQ(sample.finished->usage.prompt_tokens, kPrompt);
      if (!c.scores) {
        EXPECT_EQ(BitsOf(sample), BitsOf(alone));
      }
    }
  }
}

TEST(BranchedGenerationTest, AJobsSizeIsThatOfWhatTheBranchesHold) {
  GenerationRequest request = Sampled(SomePrompt(5'000), 10);
  const std::vector<Branch> samples = Seeds(1, 64);
  EXPECT_EQ(BranchedGeneration::JobBytes(request, samples), 0u);
  request.sampling.no_repeat_ngram_size = 3;
  EXPECT_EQ(BranchedGeneration::JobBytes(request, samples), 0u);
  request.sampling.repetition_penalty = 2;
  request.sampling.penalty_window = 100;
  EXPECT_EQ(BranchedGeneration::JobBytes(request, samples), 64 * 100 * sizeof(TokenId));
  request.echo_tokens = 4'000;
  EXPECT_EQ(BranchedGeneration::JobBytes(request, samples), 64 * 4'000 * sizeof(TokenId));
  // Continuations have an index each.
  const std::vector<Branch> continuations(2, {.seed = 0, .continuation = SomePrompt(7)});
  EXPECT_EQ(BranchedGeneration::JobBytes(request, continuations), 2 * 5'007 * sizeof(TokenId));
}

}  // namespace
}  // namespace efla
