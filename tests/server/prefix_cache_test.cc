// The prefix cache by itself: what is found, what is kept, what goes.
#include "server/engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/create_device.h"
#include "model/state_pool.h"

namespace efla {
namespace {

using BlockHash = PrefixCache::BlockHash;

std::vector<TokenId> Tokens(int length, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens(static_cast<size_t>(length));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 1000);
  return tokens;
}

// The first `same` tokens of `tokens`, then others.
std::vector<TokenId> Branch(std::vector<TokenId> tokens, int same, uint32_t seed) {
  const std::vector<TokenId> others = Tokens(static_cast<int>(tokens.size()), seed);
  std::copy(others.begin() + same, others.end(), tokens.begin() + same);
  return tokens;
}

class PrefixCacheTest : public testing::Test {
 protected:
  void MakePool(int slots) {
    ModelConfig config;
    config.vocab_size = 16;
    config.hidden_size = 8;
    config.intermediate_size = 16;
    config.num_layers = 1;
    config.num_heads = 1;
    config.d_k = config.d_v = 4;
    pool_ = StatePool::Create(*device_, config, slots, /*poison=*/true).value();
  }
  ResidentStatePtr State() { return std::make_shared<const ResidentState>(*pool_, pool_->Acquire().value()); }
  // Keeps and publishes the state at `position` of the prompt; its slot.
  int32_t Keep(PrefixCache& cache, const std::vector<BlockHash>& blocks, int64_t position) {
    const BlockHash& block = blocks[static_cast<size_t>(position / kChunkTokens - 1)];
    ResidentStatePtr state = State();
    const int32_t slot = state->slot().slot;
    const uint64_t id = cache.Add(block, position, std::move(state));
    EXPECT_NE(id, 0u);
    cache.Publish(block, id);
    return slot;
  }
  int free() const { return pool_->counts().free; }

  std::unique_ptr<Device> device_ = CreateDevice({.kind = "cpu", .threads = 1}).value();
  std::unique_ptr<StatePool> pool_;
};

// ---- Hashes ----

TEST(PrefixHashTest, OneForEveryBlockThatLeavesAToken) {
  for (const auto& [length, blocks] :
       std::map<int, size_t>{{0, 0}, {1, 0}, {64, 0}, {65, 1}, {128, 1}, {129, 2}, {640, 9}}) {
    EXPECT_EQ(PrefixCache::Hash(Tokens(length), "").size(), blocks) << length;
  }
}

TEST(PrefixHashTest, ABlockStandsForEverythingBeforeIt) {
  const std::vector<TokenId> tokens = Tokens(400);
  const std::vector<BlockHash> blocks = PrefixCache::Hash(tokens, "tenant");
  ASSERT_EQ(blocks.size(), 6u);
  std::set<std::array<uint64_t, 2>> keys;
  for (const BlockHash& block : blocks) {
    keys.insert(block.key);
    EXPECT_NE(block.key, block.check);
  }
  EXPECT_EQ(keys.size(), 6u);
  for (const size_t at : {0u, 63u, 64u, 200u, 383u}) {
    std::vector<TokenId> changed = tokens;
    changed[at] ^= 1 << 9;
    const std::vector<BlockHash> others = PrefixCache::Hash(changed, "tenant");
    for (size_t i = 0; i < 6; ++i) EXPECT_EQ(others[i] == blocks[i], i < at / 64) << at << " " << i;
  }
  for (const char* salt : {"", "tenant ", "tenanu"}) EXPECT_NE(PrefixCache::Hash(tokens, salt)[0], blocks[0]);
  std::vector<TokenId> longer = tokens;
  longer.push_back(1);
  EXPECT_EQ(PrefixCache::Hash(longer, "tenant"), blocks);
}

// ---- Finding ----

TEST_F(PrefixCacheTest, MayCoverCountsWhatIsKeptAndWhatHasBeenAskedFor) {
  MakePool(4);
  PrefixCache cache(2);
  const std::vector<TokenId> tokens = Tokens(400);
  const std::vector<BlockHash> blocks = PrefixCache::Hash(tokens, "");
  EXPECT_EQ(cache.MayCover(blocks), 0);
  EXPECT_EQ(cache.MayCover({}), 0);
  Keep(cache, blocks, 128);
  EXPECT_EQ(cache.MayCover(blocks), 128);
  EXPECT_EQ(cache.MayCover(PrefixCache::Hash(tokens, "another salt")), 0);
  const auto branch = PrefixCache::Hash(Branch(tokens, 256, 7), "");
  cache.Look(branch, /*use=*/true);
  EXPECT_EQ(cache.MayCover(blocks), 256) << "the branch shares so much, and may leave its state";
  EXPECT_EQ(cache.MayCover(branch), 384);
  EXPECT_EQ(cache.stats().lookups, 1u) << "asking changes nothing";
  EXPECT_EQ(PrefixCache(0).MayCover(blocks), 0);
}

TEST_F(PrefixCacheTest, TheDeepestPublishedStateIsFound) {
  MakePool(8);
  PrefixCache cache(8);
  const std::vector<BlockHash> blocks = PrefixCache::Hash(Tokens(400), "");
  EXPECT_EQ(cache.Look(blocks, true).state, nullptr);
  const int32_t shallow = Keep(cache, blocks, 128);
  PrefixCache::Plan plan = cache.Look(blocks, true);
  EXPECT_EQ(plan.position, 128);
  EXPECT_EQ(plan.state->slot().slot, shallow);
  const uint64_t id = cache.Add(blocks[3], 256, State());
  EXPECT_EQ(cache.Look(blocks, true).position, 128) << "it has not proved good yet";
  cache.Publish(blocks[3], id);
  EXPECT_EQ(cache.Look(blocks, true).position, 256);
  EXPECT_EQ(cache.Look(PrefixCache::Hash(Tokens(256), ""), true).position, 128)
      << "a token must be left over";
  EXPECT_EQ(cache.Look(PrefixCache::Hash(Branch(Tokens(400), 200, 9), ""), true).position, 128);
  EXPECT_EQ(cache.Look(PrefixCache::Hash(Tokens(400), "other"), true).position, 0);
  EXPECT_EQ(cache.Look(blocks, false).state, nullptr);
  const PrefixCache::Stats stats = cache.stats();
  EXPECT_EQ(stats.lookups, 7u);  // the last one did not ask
  EXPECT_EQ(stats.hits, 5u);
  EXPECT_EQ(stats.hit_tokens, 128u + 128 + 256 + 128 + 128);
  EXPECT_EQ(stats.states, 2);
  EXPECT_TRUE(cache.CheckInvariants().ok());
}

TEST_F(PrefixCacheTest, EqualKeysOfDifferentPromptsAreToldApart) {
  MakePool(4);
  PrefixCache cache(4);
  const std::vector<BlockHash> blocks = PrefixCache::Hash(Tokens(100), "");
  std::vector<BlockHash> collision = blocks;
  collision[0].check[1] ^= 1;
  Keep(cache, blocks, 64);
  EXPECT_EQ(cache.Look(collision, true).state, nullptr);
  EXPECT_EQ(cache.Add(collision[0], 64, State()), 0u) << "the first keeps its place";
  EXPECT_EQ(free(), 3);
  EXPECT_EQ(cache.Look(blocks, true).position, 64);
  // The same key at another depth.
  std::vector<BlockHash> deeper(2, blocks[0]);
  deeper[0].key[0] ^= 1;
  EXPECT_EQ(cache.Look(deeper, true).state, nullptr);
}

// ---- What is kept ----

TEST_F(PrefixCacheTest, KeepsTheLastGridPointAndWherePromptsPart) {
  MakePool(8);
  PrefixCache cache(8);
  const auto look = [&](const std::vector<TokenId>& tokens) {
    return cache.Look(PrefixCache::Hash(tokens, ""), true);
  };
  using Saves = std::array<int64_t, 2>;
  EXPECT_EQ(look(Tokens(64)).saves, (Saves{0, 0})) << "no block that leaves a token";
  EXPECT_EQ(look(Tokens(65)).saves, (Saves{64, 0}));
  EXPECT_EQ(look(Tokens(400)).saves, (Saves{64, 384})) << "the shorter prompt's end is a branch point too";
  EXPECT_EQ(look(Branch(Tokens(400), 200, 9)).saves, (Saves{192, 384}));
  EXPECT_EQ(look(Tokens(400)).saves, (Saves{384, 0})) << "seen to the end";
  Keep(cache, PrefixCache::Hash(Tokens(400), ""), 384);
  EXPECT_EQ(look(Tokens(400)).saves, (Saves{0, 0})) << "there already";
  EXPECT_EQ(look(Tokens(700)).saves, (Saves{640, 0})) << "the state at 384 was the branch point";
  EXPECT_EQ(look(Branch(Tokens(700), 300, 3)).saves, (Saves{256, 640}));
  // A caller that takes nothing may still leave something.
  const PrefixCache::Plan plan = cache.Look(PrefixCache::Hash(Branch(Tokens(400), 330, 4), ""), false);
  EXPECT_EQ(plan.position, 0);
  EXPECT_EQ(plan.saves, (Saves{320, 384}));
}

TEST_F(PrefixCacheTest, UnprovedStatesAreDroppedAndProvedOnesStay) {
  MakePool(4);
  PrefixCache cache(4);
  const std::vector<BlockHash> blocks = PrefixCache::Hash(Tokens(300), "");
  const uint64_t first = cache.Add(blocks[0], 64, State());
  EXPECT_EQ(cache.Add(blocks[0], 64, State()), 0u) << "somebody else is at it";
  EXPECT_EQ(free(), 3);
  cache.Drop(blocks[0], first + 1);  // not its id
  EXPECT_EQ(cache.stats().states, 1);
  cache.Drop(blocks[0], first);
  EXPECT_EQ(free(), 4);
  const uint64_t second = cache.Add(blocks[0], 64, State());
  EXPECT_NE(second, first);
  cache.Publish(blocks[0], first);  // of an entry that is gone
  EXPECT_EQ(cache.Look(blocks, true).state, nullptr);
  cache.Publish(blocks[0], second);
  cache.Drop(blocks[0], second);
  EXPECT_EQ(cache.Look(blocks, true).position, 64);
  EXPECT_TRUE(cache.CheckInvariants().ok());
}

// ---- What goes ----

TEST_F(PrefixCacheTest, TheLeastValuableGoesAndWhatIsReadStays) {
  MakePool(8);
  PrefixCache cache(3);
  std::vector<std::vector<BlockHash>> prompts;
  for (uint32_t i = 0; i < 5; ++i) prompts.push_back(PrefixCache::Hash(Tokens(400, i), ""));
  Keep(cache, prompts[0], 384);  // long, never used
  Keep(cache, prompts[1], 64);   // short, used often
  Keep(cache, prompts[2], 128);  // neither
  for (int i = 0; i < 10; ++i) EXPECT_EQ(cache.Look(prompts[1], true).position, 64);
  const auto held = [&](size_t i) { return cache.Look(prompts[i], true).state != nullptr; };
  Keep(cache, prompts[3], 256);
  EXPECT_FALSE(held(2));
  EXPECT_TRUE(held(1));
  EXPECT_EQ(cache.stats().states, 3);
  EXPECT_EQ(free(), 5);

  const ResidentStatePtr reader = cache.Look(prompts[3], true).state;  // now the most valuable but one
  const ResidentStatePtr other = cache.Look(prompts[0], true).state;
  EXPECT_TRUE(cache.GiveBack());
  EXPECT_FALSE(held(1));
  EXPECT_FALSE(cache.GiveBack()) << "the others are being read";
  EXPECT_TRUE(held(0) && held(3));
  EXPECT_TRUE(cache.CheckInvariants().ok());
}

TEST_F(PrefixCacheTest, ValueFadesSoThatPastFamePasses) {
  MakePool(4);
  PrefixCache cache(2);
  const auto blocks = [](uint32_t seed) { return PrefixCache::Hash(Tokens(70, seed), ""); };
  Keep(cache, blocks(0), 64);
  for (int i = 0; i < 20; ++i) cache.Look(blocks(0), true);
  Keep(cache, blocks(1), 64);
  for (int i = 0; i < 3; ++i) cache.Look(blocks(1), true);
  Keep(cache, blocks(2), 64);  // in place of 1
  EXPECT_EQ(cache.Look(blocks(1), true).state, nullptr);
  for (int i = 0; i < 1000; ++i) cache.Look(blocks(3), true);
  cache.Look(blocks(2), true);
  Keep(cache, blocks(4), 64);  // in place of 0 at last
  EXPECT_EQ(cache.Look(blocks(0), true).state, nullptr);
  EXPECT_NE(cache.Look(blocks(2), true).state, nullptr);
}

TEST_F(PrefixCacheTest, WithoutCapacityNothingIsKept) {
  MakePool(2);
  PrefixCache cache(0);
  EXPECT_FALSE(cache.enabled());
  const std::vector<BlockHash> blocks = PrefixCache::Hash(Tokens(200), "");
  EXPECT_EQ(cache.Look(blocks, true).saves, (std::array<int64_t, 2>{0, 0}));
  EXPECT_EQ(cache.Add(blocks[0], 64, State()), 0u);
  EXPECT_FALSE(cache.GiveBack());
  EXPECT_EQ(free(), 2);
  EXPECT_EQ(cache.stats().lookups, 0u);
}

// ---- Anything, in any order ----

// Beside the cache's own invariants: what is found was kept for that very beginning, and the pool's books
// balance.
class Fuzz {
 public:
  Fuzz(StatePool& pool, PrefixCache& cache, uint32_t seed) : pool_(pool), cache_(cache), random_(seed) {}

  void Step() {
    // A small world of prompts, so that they share beginnings.
    std::vector<TokenId> tokens = Tokens(600, static_cast<uint32_t>(random_() % 3));
    if (random_() % 2 == 0) tokens = Branch(tokens, static_cast<int>(random_() % 600), random_() % 5);
    tokens.resize(1 + random_() % 600);
    const std::string salt(random_() % 2, 's');
    const std::vector<BlockHash> blocks = PrefixCache::Hash(tokens, salt);
    switch (random_() % 8) {
      case 0:
        cache_.GiveBack();
        break;
      case 1:
        if (!reading_.empty())
          reading_.erase(reading_.begin() + static_cast<int64_t>(random_() % reading_.size()));
        break;
      case 2:
      case 3:
        if (!pending_.empty()) {
          const Pending pending = pending_.back();  // the newest; older ones may have been given back
          pending_.pop_back();
          if (random_() % 3 == 0) {
            cache_.Drop(pending.block, pending.id);
          } else {
            cache_.Publish(pending.block, pending.id);
          }
        }
        break;
      default:
        Prompt(blocks);
    }
  }
  const std::map<int32_t, BlockHash>& slots() const { return slots_; }

 private:
  struct Pending {
    BlockHash block;
    uint64_t id;
  };

  void Prompt(const std::vector<BlockHash>& blocks) {
    const PrefixCache::Plan plan = cache_.Look(blocks, random_() % 4 != 0);
    if (plan.state != nullptr) {
      ASSERT_TRUE(pool_.IsLive(plan.state->slot()));
      const BlockHash& block = blocks[static_cast<size_t>(plan.position / kChunkTokens - 1)];
      EXPECT_EQ(slots_.at(plan.state->slot().slot), block) << "somebody else's state";
      if (reading_.size() < 3) reading_.push_back(plan.state);
    }
    for (const int64_t position : plan.saves) {
      if (position == 0) continue;
      EXPECT_GT(position, plan.position);
      absl::StatusOr<SlotHandle> slot = pool_.Acquire();
      while (!slot.ok() && cache_.GiveBack()) slot = pool_.Acquire();
      if (!slot.ok()) continue;
      const BlockHash& block = blocks[static_cast<size_t>(position / kChunkTokens - 1)];
      auto state = std::make_shared<const ResidentState>(pool_, *slot);
      if (const uint64_t id = cache_.Add(block, position, std::move(state)); id != 0) {
        slots_[slot->slot] = block;
        pending_.push_back({block, id});
      }
    }
  }

  StatePool& pool_;
  PrefixCache& cache_;
  std::mt19937 random_;
  std::vector<ResidentStatePtr> reading_;
  std::vector<Pending> pending_;
  std::map<int32_t, BlockHash> slots_;  // what was last kept in a slot
};

TEST_F(PrefixCacheTest, RandomLivesKeepTheBooks) {
  for (const auto& [slots, capacity] : std::vector<std::pair<int, int>>{{10, 6}, {4, 6}, {30, 20}}) {
    MakePool(slots);
    {
      PrefixCache cache(capacity);
      Fuzz fuzz(*pool_, cache, 42u + static_cast<uint32_t>(slots));
      for (int i = 0; i < 5000; ++i) {
        fuzz.Step();
        ASSERT_TRUE(cache.CheckInvariants().ok()) << cache.CheckInvariants();
        ASSERT_TRUE(pool_->CheckInvariants().ok());
        ASSERT_LE(cache.stats().states, capacity);
        ASSERT_LE(pool_->counts().live, capacity + 3) << "states nobody has";
      }
      EXPECT_GT(cache.stats().hits, 100u);
    }
    EXPECT_EQ(free(), slots);
  }
}

TEST_F(PrefixCacheTest, AnyThreadMayComeAtAnyTime) {
  MakePool(16);
  {
    PrefixCache cache(8);
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (uint32_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937 random(thread);
        for (int i = 0; i < 1000; ++i) {
          const std::vector<BlockHash> blocks = PrefixCache::Hash(Tokens(300, random() % 4), "");
          const PrefixCache::Plan plan = cache.Look(blocks, true);
          if (plan.state != nullptr) wrong += pool_->IsLive(plan.state->slot()) ? 0 : 1;
          if (const absl::StatusOr<SlotHandle> slot = pool_->Acquire(); slot.ok()) {
            const size_t block = random() % blocks.size();
            const uint64_t id = cache.Add(blocks[block], static_cast<int64_t>(block + 1) * kChunkTokens,
                                          std::make_shared<const ResidentState>(*pool_, *slot));
            if (id != 0 && random() % 2 == 0) cache.Publish(blocks[block], id);
            if (id != 0 && random() % 2 == 0) cache.Drop(blocks[block], id);
          }
          if (random() % 3 == 0) cache.GiveBack();
          wrong += cache.CheckInvariants().ok() ? 0 : 1;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(cache.stats().hits, 0u);
  }
  EXPECT_EQ(free(), 16);
}

}  // namespace
}  // namespace efla
