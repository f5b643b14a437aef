// The prefix cache in the engine: a prompt that goes on from a kept state gives the bits of one that was
// computed from its beginning, and no slot is lost.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/server/engine_rig.h"

namespace efla {
namespace {

RigOptions Rig(int cache_slots, int slots = 12, int max_batch_tokens = 128,
               const std::string& checkpoint = "efla_basic") {
  RigOptions options{.checkpoint = "tests/golden/" + checkpoint, .slots = slots};
  options.engine.max_batch_tokens = max_batch_tokens;
  options.engine.prefix_cache_slots = cache_slots;
  return options;
}

// `length` tokens, the first `same` of them those of every other such prompt.
std::vector<TokenId> Sharing(int same, int length, uint32_t seed) {
  std::vector<TokenId> prompt = SomePrompt(length, seed), shared = SomePrompt(same, 77);
  std::copy(shared.begin(), shared.end(), prompt.begin());
  return prompt;
}

int64_t LastGridPoint(int length) { return (length - 1) / kChunkTokens * kChunkTokens; }

// ---- Exactness ----

class EnginePrefixCacheTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  RigOptions Options(int cache_slots) const {
    return Rig(cache_slots, 40, std::get<1>(GetParam()), std::get<0>(GetParam()));
  }
};

TEST_P(EnginePrefixCacheTest, AHitGivesTheBitsOfAColdRun) {
  EngineRig cold(Options(0)), warm(Options(4));
  for (const int length :
       {60, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 256, 257, 320, 383, 449, 512, 600}) {
    GenerationRequest request = Greedy(SomePrompt(length, static_cast<uint32_t>(length)), 6);
    request.logprobs = true;
    request.top_logprobs = 2;
    const Bits expected = BitsOf(cold.Run(request));
    const Result first = warm.Run(request);
    EXPECT_EQ(BitsOf(first), expected) << "saving, length " << length;
    EXPECT_EQ(first.finished->usage.cached_tokens, 0);
    const int64_t before = warm.counter.prefill_tokens;
    const Kept second = warm.RunKept(request);
    EXPECT_EQ(BitsOf(second.result), expected) << "hit, length " << length;
    EXPECT_EQ(second.result.finished->usage.cached_tokens, LastGridPoint(length));
    EXPECT_EQ(second.result.finished->usage.prompt_tokens, length);
    EXPECT_EQ(warm.counter.prefill_tokens - before, length - LastGridPoint(length));
    EXPECT_EQ(second.state->prompt_tokens, length);
    EXPECT_EQ(warm.BytesOf(*second.state->state), cold.BytesOf(*cold.RunKept(request).state->state));
  }
}

TEST_P(EnginePrefixCacheTest, PromptsThatPartShareTheirBeginning) {
  EngineRig cold(Options(0)), warm(Options(8));
  const std::vector<int64_t> cached = {0, 0, 192, 192, 448};
  const std::vector<GenerationRequest> requests = {
      Greedy(Sharing(200, 500, 1), 5), Greedy(Sharing(200, 300, 2), 5), Greedy(Sharing(200, 257, 3), 5),
      Greedy(Sharing(200, 201, 4), 5), Greedy(Sharing(200, 500, 1), 5)};
  for (size_t i = 0; i < requests.size(); ++i) {
    const Result result = warm.Run(requests[i]);
    EXPECT_EQ(BitsOf(result), BitsOf(cold.Run(requests[i]))) << i;
    EXPECT_EQ(result.finished->usage.cached_tokens, cached[i]) << i;
  }
  const EngineStats stats = warm.engine->stats();
  EXPECT_EQ(stats.prefix_cache_lookups, 5u);
  EXPECT_EQ(stats.prefix_cache_hits, 3u);
  EXPECT_EQ(stats.prefix_cache_hit_tokens, 192u + 192 + 448);
  EXPECT_EQ(stats.prefix_cache_slots, stats.slots.live);
  EXPECT_EQ(cold.engine->stats().prefix_cache_lookups, 0u);
}

// Many at once, in mixed steps: some save what others are about to find.
TEST_P(EnginePrefixCacheTest, CompanyDoesNotMatter) {
  std::vector<GenerationRequest> requests;
  for (uint32_t i = 0; i < 24; ++i) {
    requests.push_back(
        Greedy(Sharing(64 * (1 + static_cast<int>(i) % 4), 150 + 13 * static_cast<int>(i), i % 9), 4));
    if (i % 5 == 0) requests.back().prompt_logprobs = true;
  }
  std::vector<Bits> expected;
  {
    EngineRig cold(Options(0));
    for (const GenerationRequest& request : requests) expected.push_back(BitsOf(cold.Run(request)));
  }
  EngineRig warm(Options(12));
  for (int round = 0; round < 3; ++round) {
    warm.device.Hold();
    std::vector<std::shared_ptr<Reader>> readers;
    std::vector<std::shared_ptr<Generation>> generations;
    for (const GenerationRequest& request : requests) {
      readers.push_back(Reader::Make());
      generations.push_back(warm.Submit(request, readers.back()));
    }
    warm.device.Open();
    for (size_t i = 0; i < readers.size(); ++i) EXPECT_EQ(BitsOf(readers[i]->Wait()), expected[i]) << i;
  }
  EXPECT_GT(warm.engine->stats().prefix_cache_hits, 10u);
  EXPECT_LE(warm.engine->stats().prefix_cache_slots, 12);
}

INSTANTIATE_TEST_SUITE_P(ModelsAndBudgets, EnginePrefixCacheTest,
                         testing::Values(std::tuple("efla_basic", 64), std::tuple("efla_basic", 512),
                                         std::tuple("gated_efla", 128), std::tuple("delta_net", 128),
                                         std::tuple("gated_deltanet", 128)),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" + std::to_string(std::get<1>(param.param));
                         });

// ---- Who may read and leave what ----

TEST(EnginePrefixCacheUseTest, SaltsAndWishesAreRespected) {
  EngineRig rig(Rig(8));
  GenerationRequest request = Greedy(SomePrompt(200), 3);
  request.prefix_cache_salt = "a";
  const auto cached = [&] { return rig.Run(request).finished->usage.cached_tokens; };
  EXPECT_EQ(cached(), 0);
  EXPECT_EQ(cached(), 192);
  request.prefix_cache_salt = "b";
  EXPECT_EQ(cached(), 0);
  request.prefix_cache_salt = "c";
  request.use_prefix_cache = false;
  EXPECT_EQ(cached(), 0);
  request.use_prefix_cache = true;
  EXPECT_EQ(cached(), 0) << "it left nothing either";
  EXPECT_EQ(cached(), 192);
  EXPECT_EQ(rig.engine->stats().prefix_cache_lookups, 5u);

  // A call that continues a state is not at a prompt's beginning.
  request.prefix_cache_salt = "a";
  const Kept start = rig.RunKept(Greedy(SomePrompt(10), 0));
  request.start = start.state->state;
  EXPECT_EQ(cached(), 0);
  EXPECT_EQ(rig.engine->stats().prefix_cache_lookups, 5u);
}

TEST(EnginePrefixCacheUseTest, ScoredPromptsComputeAllAndLeaveWhatTheyPass) {
  EngineRig rig(Rig(8));
  GenerationRequest request = Greedy(SomePrompt(200), 2);
  request.prompt_logprobs = true;
  const Bits expected = BitsOf(rig.Run(request));
  const Result again = rig.Run(request);
  EXPECT_EQ(again.finished->usage.cached_tokens, 0);
  EXPECT_EQ(again.finished->prompt_logprobs.size(), 199u);
  EXPECT_EQ(BitsOf(again), expected);
  request.prompt_logprobs = false;
  EXPECT_EQ(rig.Run(request).finished->usage.cached_tokens, 192);
  GenerationRequest score = Greedy(SomePrompt(200, 8), 0);  // draws nothing, and leaves a state all the same
  score.prompt_logprobs = true;
  rig.Run(score);
  EXPECT_EQ(rig.Run(Greedy(SomePrompt(200, 8), 1)).finished->usage.cached_tokens, 192);
}

TEST(EnginePrefixCacheUseTest, PromptsWithoutADrawLeaveStatesToo) {
  EngineRig rig(Rig(8));
  EXPECT_TRUE(rig.Run(Greedy(SomePrompt(200), 0)).tokens.empty());
  const Kept kept = rig.RunKept(Greedy(SomePrompt(200), 0));
  EXPECT_EQ(kept.result.finished->usage.cached_tokens, 192);
  EXPECT_EQ(kept.state->prompt_tokens, 200);
}

TEST(EnginePrefixCacheUseTest, UsageIsToldWhileTheCallRuns) {
  EngineRig rig(Rig(8));
  rig.Run(Greedy(SomePrompt(200), 1));
  rig.device.Hold();
  GenerationRequest request = Greedy(SomePrompt(200), 4);
  request.progress = true;
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(request, reader);
  rig.device.LetStep();
  EXPECT_EQ(generation->usage().cached_tokens, 192);
  rig.device.Open();
  const Result result = reader->Wait();
  ASSERT_EQ(result.progress.size(), 1u);
  EXPECT_EQ(result.progress[0].prompt_tokens_done, 200);
  EXPECT_EQ(result.deltas[0].usage.cached_tokens, 192);
}

TEST(EnginePrefixCacheUseTest, OnlyWhatProvedGoodIsPublished) {
  EngineRig rig(Rig(8));
  GenerationRequest request = Greedy(SomePrompt(200), 4);
  request.prompt[0] = 300;
  rig.device.SpoilSequence(300, /*decode_step=*/-1);  // before its second piece
  EXPECT_EQ(rig.Run(request).status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(rig.engine->stats().prefix_cache_slots, 0);
  rig.device.SpoilSequence(-1, 0);  // nobody
  const Result healthy = rig.Run(request);
  ASSERT_TRUE(healthy.status.ok()) << healthy.status;
  EXPECT_EQ(healthy.finished->usage.cached_tokens, 0);

  GenerationRequest long_one = Greedy(SomePrompt(500, 3), 4);
  rig.device.Hold();
  const auto reader = Reader::Make();
  const auto generation = rig.Submit(long_one, reader);
  for (int i = 0; i < 3; ++i) rig.device.LetStep();  // 128, 256, 384; then up to 448 and, in another slot, on
  rig.device.AwaitStep();
  generation->Cancel();
  rig.device.Open();
  EXPECT_EQ(reader->Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(rig.Run(long_one).finished->usage.cached_tokens, 0);
  EXPECT_EQ(rig.Run(long_one).finished->usage.cached_tokens, 448);
}

// ---- Slots ----

TEST(EnginePrefixCacheUseTest, WaitingRequestsComeBeforeKeptStates) {
  EngineRig rig(Rig(/*cache_slots=*/10, /*slots=*/4));
  for (uint32_t i = 0; i < 6; ++i) rig.Run(Greedy(SomePrompt(200, i), 1));
  EXPECT_EQ(rig.engine->stats().prefix_cache_slots, 3);  // one was always the call's own
  EXPECT_EQ(rig.engine->stats().slots.free, 1);
  rig.device.Hold();
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (int i = 0; i < 6; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(rig.Submit(Greedy(SomePrompt(10, i), 40), readers.back()));
  }
  rig.device.LetStep();
  rig.device.LetStep();
  EXPECT_EQ(rig.engine->stats().running, 4);
  EXPECT_EQ(rig.engine->stats().waiting, 2);
  EXPECT_EQ(rig.engine->stats().prefix_cache_slots, 0);
  rig.device.Open();
  for (const auto& reader : readers) EXPECT_TRUE(reader->Wait().status.ok());
}

TEST(EnginePrefixCacheUseTest, RestoredStatesComeBeforeKeptOnes) {
  EngineRig rig(Rig(/*cache_slots=*/10, /*slots=*/3));
  for (uint32_t i = 0; i < 4; ++i) rig.Run(Greedy(SomePrompt(200, i), 1));
  const std::vector<std::byte> bytes(static_cast<size_t>(rig.pool->layout().state_bytes()));
  std::vector<ResidentStatePtr> states;
  for (int i = 0; i < 3; ++i) {
    absl::StatusOr<ResidentStatePtr> state = rig.engine->CopyIn(bytes);
    ASSERT_TRUE(state.ok()) << state.status();
    states.push_back(*std::move(state));
  }
  EXPECT_EQ(rig.engine->stats().prefix_cache_slots, 0);
  EXPECT_EQ(rig.engine->CopyIn(bytes).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(EnginePrefixCacheUseTest, SavingNeedsNoSlotThatOthersWaitFor) {
  EngineRig rig(Rig(/*cache_slots=*/10, /*slots=*/1));
  const Bits expected = BitsOf(rig.Run(Greedy(SomePrompt(300), 3)));
  EXPECT_EQ(BitsOf(rig.Run(Greedy(SomePrompt(300), 3))), expected);
  EXPECT_EQ(rig.engine->stats().prefix_cache_slots, 0);
}

// Prompts with few beginnings, cancelled at any time: every slot is free or the cache's in the end, and
// nobody gets somebody else's state.
TEST(EnginePrefixCacheUseTest, StormOfCancellationsLeavesTheBooksBalanced) {
  constexpr int kPrompts = 10, kTokens = 6;
  const auto prompt = [](int i) { return Sharing(64 * (i % 3 + 1), 100 + 40 * i, static_cast<uint32_t>(i)); };
  std::vector<std::vector<TokenId>> stories;
  {
    EngineRig calm(Rig(0));
    for (int i = 0; i < kPrompts; ++i) stories.push_back(calm.Run(Greedy(prompt(i), kTokens)).ids());
  }
  for (const int slots : {4, 18}) {  // requests wait most of the time, or never
    EngineRig rig(Rig(/*cache_slots=*/5, slots, /*max_batch_tokens=*/64));
    std::vector<std::thread> threads;
    for (uint32_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937 random(thread * 31 + 5);
        for (int round = 0; round < 60; ++round) {
          std::vector<std::shared_ptr<Reader>> readers;
          std::vector<std::shared_ptr<Generation>> generations;
          std::vector<int> which;
          for (int i = 0; i < 4; ++i) {
            which.push_back(static_cast<int>(random() % kPrompts));
            readers.push_back(Reader::Make());
            GenerationRequest request = Greedy(prompt(which.back()), kTokens);
            request.keep_state = random() % 4 == 0;
            generations.push_back(rig.Submit(std::move(request), readers.back()));
          }
          for (int i = 0; i < 4; ++i) {
            if (random() % 2 == 0) continue;
            for (uint32_t spin = random() % 200; spin > 0; --spin) std::this_thread::yield();
            generations[static_cast<size_t>(i)]->Cancel();
          }
          for (size_t i = 0; i < 4; ++i) {
            const Result result = readers[i]->Wait();
            const std::vector<TokenId> ids = result.ids();
            const std::vector<TokenId>& story = stories[static_cast<size_t>(which[i])];
            ASSERT_LE(ids.size(), story.size());
            EXPECT_TRUE(std::equal(ids.begin(), ids.end(), story.begin())) << "prompt " << which[i];
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const EngineStats stats = rig.engine->stats();
    EXPECT_EQ(stats.slots.free + stats.prefix_cache_slots, slots);
    EXPECT_LE(stats.prefix_cache_slots, 5);
    if (slots == 18) {
      EXPECT_GT(stats.prefix_cache_hits, 10u);
    }
    EXPECT_TRUE(rig.pool->CheckInvariants(true).ok());
  }
}

}  // namespace
}  // namespace efla
