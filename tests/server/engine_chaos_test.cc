// Thousands of generations opened, continued, streamed, cancelled, expired and abandoned at random from
// several threads, with states kept beyond their calls, copied to the host and back, and a prefix cache. What
// must hold: each gets exactly one end, of a kind that it may have; nothing stays in the pool but what the
// cache holds; what ends well is right, and so is what is continued.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/engine_rig.h"

namespace efla {
namespace {

constexpr uint32_t kSeed = 20240601;
constexpr int kThreads = 4;
constexpr int kOperationsAThread = 500;
constexpr int kPrompts = 12;
constexpr int kMaxTokens = 24;

using Outcome = EngineObserver::Outcome;

struct Tally {
  std::atomic<int> ok{0}, cancelled{0}, deadline{0}, slow{0}, refused{0}, unavailable{0}, abandoned{0},
      continued{0};
};

class Worker {
 public:
  Worker(EngineRig& rig, const std::vector<std::vector<TokenId>>& stories, uint32_t seed, Tally& tally)
      : rig_(rig), stories_(stories), random_(seed), tally_(tally) {}

  void Run() {
    for (int i = 0; i < kOperationsAThread; ++i) {
      Act();
      if (calls_.size() >= 12) Await(random_() % calls_.size());
    }
    while (!calls_.empty()) Await(calls_.size() - 1);
  }

 private:
  struct Call {
    std::shared_ptr<Reader> reader;
    std::shared_ptr<Generation> generation;
    int prompt = 0;
    size_t drawn_before = 0;  // tokens of the story that an earlier call drew
    bool may_be_cancelled = false, may_expire = false, paused = false, has_budget = false;
    bool continues = false, keeps = false;
  };

  void Act() {
    switch (random_() % 8) {
      case 0:
        Abandon();
        break;
      case 1:
      case 2:
        if (!calls_.empty()) {
          Call& call = calls_[random_() % calls_.size()];
          call.may_be_cancelled = true;
          call.generation->Cancel();
          break;
        }
        [[fallthrough]];
      default:
        Open();
    }
  }

  // What a call for a prompt left when it had enough or was cut.
  struct Left {
    int prompt = 0;
    FinalState state;
  };

  GenerationRequest Continue(Call& call) {
    const Left left = *std::exchange(left_, std::nullopt);
    ++tally_.continued;
    call.continues = true;
    call.prompt = left.prompt;
    call.drawn_before = left.state.drawn.size();
    const std::vector<TokenId> prompt = SomePrompt(1 + left.prompt * 17, left.prompt);
    GenerationRequest request = Greedy({prompt.begin() + left.state.prompt_tokens, prompt.end()},
                                       kMaxTokens - static_cast<int64_t>(call.drawn_before));
    request.start = random_() % 2 == 0 ? left.state.state : ThroughTheHost(left.state.state);
    if (call.drawn_before > 0) request.pending_token = left.state.drawn.back();
    return request;
  }
  ResidentStatePtr ThroughTheHost(const ResidentStatePtr& state) {
    absl::StatusOr<ResidentStatePtr> copy = rig_.engine->CopyIn(rig_.BytesOf(*state));
    return copy.ok() ? *std::move(copy) : state;  // no slot is free
  }
  void Keep(const Call& call, FinalState state) {
    ASSERT_NE(state.state, nullptr);
    const std::vector<TokenId>& story = stories_[call.prompt];
    const auto from = story.begin() + static_cast<int64_t>(call.drawn_before);
    ASSERT_LE(call.drawn_before + state.drawn.size(), story.size());
    EXPECT_TRUE(std::equal(state.drawn.begin(), state.drawn.end(), from));
    if (!call.continues && state.drawn.size() < story.size()) left_ = Left{call.prompt, std::move(state)};
  }

  GenerationRequest Request(int prompt) {
    GenerationRequest request = Greedy(SomePrompt(1 + prompt * 17, prompt), 1 + random_() % kMaxTokens);
    request.progress = random_() % 3 == 0;
    request.prompt_logprobs = random_() % 6 == 0;
    return request;
  }

  void Open() {
    Call call;
    call.prompt = static_cast<int>(random_() % kPrompts);
    call.paused = random_() % 6 == 0;
    call.reader = Reader::Make(call.paused);
    GenerationRequest request = Request(call.prompt);
    if (left_ && random_() % 2 == 0) request = Continue(call);
    // A state that nobody has taken yet holds a slot: one a worker, so that there are always some left.
    const auto keeps = [](const Call& other) { return other.keeps; };
    request.keep_state = !left_ && random_() % 2 == 0 && std::none_of(calls_.begin(), calls_.end(), keeps);
    call.keeps = request.keep_state;
    if (random_() % 5 == 0) {
      call.may_expire = true;
      request.deadline = Clock::now() + std::chrono::microseconds(random_() % 20'000);
    } else if (random_() % 5 == 0) {
      call.has_budget = true;
      request.time_budget = std::chrono::microseconds(1 + random_() % 20'000);
    }
    absl::StatusOr<std::shared_ptr<Generation>> generation = rig_.TrySubmit(request, call.reader->ready());
    if (!generation.ok()) {
      EXPECT_TRUE(generation.status().code() == absl::StatusCode::kResourceExhausted ||
                  (call.may_expire && generation.status().code() == absl::StatusCode::kDeadlineExceeded))
          << generation.status();
      ++tally_.refused;
      if (!calls_.empty()) Await(0);
      return;
    }
    call.generation = *std::move(generation);
    calls_.push_back(std::move(call));
  }

  // A reactor that vanishes: it cancels, or not, and looks no more.
  void Abandon() {
    absl::StatusOr<std::shared_ptr<Generation>> generation =
        rig_.TrySubmit(Request(static_cast<int>(random_() % kPrompts)), [](Generation&) {});
    if (!generation.ok()) return;
    ++tally_.abandoned;
    if (random_() % 2 == 0) (*generation)->Cancel();
  }

  void Await(size_t index) {
    Call call = std::move(calls_[index]);
    calls_.erase(calls_.begin() + static_cast<int64_t>(index));
    if (call.paused) {
      call.reader->Resume();
      rig_.engine->Deliver(call.generation);
    }
    const Result result = call.reader->Wait();
    // Whatever was delivered is the beginning of what the model says.
    const std::vector<TokenId> ids = result.ids();
    const std::vector<TokenId>& story = stories_[call.prompt];
    ASSERT_LE(call.drawn_before + ids.size(), story.size());
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), story.begin() + static_cast<int64_t>(call.drawn_before)))
        << "prompt " << call.prompt << " from " << call.drawn_before;
    std::optional<FinalState> final_state = call.generation->TakeFinalState();
    EXPECT_TRUE(call.keeps || !final_state);
    if (final_state) Keep(call, *std::move(final_state));
    switch (result.status.code()) {
      case absl::StatusCode::kOk:
        ++tally_.ok;
        EXPECT_EQ(result.finished->usage.completion_tokens, static_cast<int64_t>(ids.size()));
        EXPECT_TRUE(result.finished->reason == FinishReason::kMaxTokens ||
                    (call.has_budget && result.finished->reason == FinishReason::kTimeBudget));
        break;
      case absl::StatusCode::kCancelled:
        ++tally_.cancelled;
        EXPECT_TRUE(call.may_be_cancelled);
        break;
      case absl::StatusCode::kDeadlineExceeded:
        ++tally_.deadline;
        EXPECT_TRUE(call.may_expire);
        break;
      case absl::StatusCode::kResourceExhausted:
        ++tally_.slow;  // any reader may be, for a moment, on a busy machine
        break;
      case absl::StatusCode::kUnavailable:
        ++tally_.unavailable;
        break;
      default:
        ADD_FAILURE() << result.status;
    }
  }

  EngineRig& rig_;
  const std::vector<std::vector<TokenId>>& stories_;
  std::mt19937 random_;
  Tally& tally_;
  std::vector<Call> calls_;
  std::optional<Left> left_;  // one at most, so that slots are left
};

TEST(EngineChaosTest, RandomLivesLeaveNothingBehind) {
  std::printf("seed %u\n", kSeed);
  std::vector<std::vector<TokenId>> stories;
  {
    EngineRig calm({});
    for (int prompt = 0; prompt < kPrompts; ++prompt) {
      stories.push_back(calm.Run(Greedy(SomePrompt(1 + prompt * 17, prompt), kMaxTokens)).ids());
    }
  }
  constexpr int kSlots = 10;
  RigOptions options{.slots = kSlots};
  options.engine.prefix_cache_slots = 3;
  options.engine.max_queue = 24;
  options.engine.max_running = 5;
  options.engine.max_undelivered_tokens = 6;
  options.engine.slow_reader_timeout = std::chrono::milliseconds(20);
  EngineRig rig(options);

  Tally tally;
  std::vector<std::thread> threads;
  std::atomic<bool> done{false};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { Worker(rig, stories, kSeed + static_cast<uint32_t>(i), tally).Run(); });
  }
  std::thread watcher([&] {
    while (!done) {
      const EngineStats stats = rig.engine->stats();
      EXPECT_LE(stats.running, 5);
      EXPECT_LE(stats.waiting, 24);
      EXPECT_LE(stats.parked + stats.running, kSlots);
      EXPECT_LE(stats.prefix_cache_slots, 3);
      EXPECT_EQ(stats.slots.live + stats.slots.free, kSlots);
      EXPECT_EQ(stats.slots.shared, 0);
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  rig.engine->Drain(std::chrono::seconds(60));
  done = true;
  watcher.join();

  const EngineStats stats = rig.engine->stats();
  EXPECT_EQ(stats.slots.free + stats.prefix_cache_slots, kSlots);
  EXPECT_EQ(stats.running + stats.waiting + stats.parked, 0);
  EXPECT_EQ(stats.queued_prompt_tokens, 0);
  EXPECT_EQ(rig.counter.all_ends(), rig.submitted);
  EXPECT_EQ(rig.counter.ended(Outcome::kError), 0);
  std::printf(
      "%d ok, %d cancelled, %d expired, %d too slow, %d refused, %d abandoned, %d continued; %ld steps\n",
      tally.ok.load(), tally.cancelled.load(), tally.deadline.load(), tally.slow.load(), tally.refused.load(),
      tally.abandoned.load(), tally.continued.load(), static_cast<long>(rig.counter.steps.load()));
  // The mixture must be one: a run that is all of a kind tests little.
  EXPECT_GT(tally.ok, 100);
  EXPECT_GT(tally.cancelled, 50);
  EXPECT_GT(tally.deadline, 5);
  EXPECT_GT(tally.continued, 20);
  EXPECT_GT(stats.prefix_cache_hits, 10u);
  EXPECT_EQ(tally.unavailable, 0);
}

// The engine goes away under load: everything ends, nothing is lost.
TEST(EngineChaosTest, EngineStopsUnderLoad) {
  for (uint32_t round = 0; round < 20; ++round) {
    EngineRig rig({.slots = 4});
    std::mt19937 random(kSeed + round);
    std::vector<std::shared_ptr<Reader>> readers;
    std::vector<std::shared_ptr<Generation>> generations;
    for (int i = 0; i < 10; ++i) {
      readers.push_back(Reader::Make());
      generations.push_back(
          rig.Submit(Greedy(SomePrompt(1 + static_cast<int>(random() % 200), random()), 1 + random() % 50),
                     readers.back()));
    }
    std::thread canceller([&] {
      for (size_t i = 0; i < generations.size(); i += 2) generations[i]->Cancel();
    });
    readers[random() % readers.size()]->AwaitTokens(random() % 10);
    rig.engine.reset();
    canceller.join();
    for (const auto& reader : readers) EXPECT_TRUE(reader->ended());
  }
}

}  // namespace
}  // namespace efla
