#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "server/sessions/turn_tokens.h"

namespace efla {
namespace {

std::vector<TokenId> Ids(int count, TokenId first = 0) {
  std::vector<TokenId> ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

TEST(TurnTokensTest, AShortAppendWaits) {
  for (const int count : {0, 1, 63, 64}) {
    const Feed feed = PlanFeed({}, Ids(count), /*generates=*/false);
    EXPECT_TRUE(feed.waits()) << count;
    EXPECT_EQ(WaitingWithout(feed).pending_prompt, Ids(count));
  }
}

TEST(TurnTokensTest, ALongAppendIsFedToTheLastGridPointThatLeavesATokenOver) {
  for (const auto& [count, fed] : {std::pair{65, 64}, {128, 64}, {129, 128}, {192, 128}, {1000, 960}}) {
    const Feed feed = PlanFeed({}, Ids(count), false);
    EXPECT_EQ(std::ssize(feed.prompt), fed) << count;
    EXPECT_EQ(feed.rest, Ids(count - fed, fed));
  }
}

TEST(TurnTokensTest, ToGenerateEverythingIsFed) {
  const Feed feed = PlanFeed({.pending_token = 7, .pending_prompt = {1, 2}}, Ids(3, 10), true);
  EXPECT_EQ(feed.pending_token, 7);
  EXPECT_EQ(feed.prompt, (std::vector<TokenId>{1, 2, 10, 11, 12}));
  EXPECT_TRUE(feed.rest.empty());
}

TEST(TurnTokensTest, APendingTokenWaitsWithAShortAppend) {
  const Feed feed = PlanFeed({.pending_token = 7, .pending_prompt = {1}}, Ids(63), false);
  ASSERT_TRUE(feed.waits());
  EXPECT_EQ(WaitingWithout(feed).pending_token, 7);
  EXPECT_EQ(WaitingWithout(feed).size(), 65);
  const Feed longer = PlanFeed(WaitingWithout(feed), {{5}}, false);
  EXPECT_EQ(longer.pending_token, 7);
  EXPECT_EQ(std::ssize(longer.prompt), 64);
  EXPECT_EQ(WaitingAfter(longer, {}), (WaitingTokens{.pending_token = std::nullopt, .pending_prompt = {5}}));
}

// Whatever is done, the tail is the end of the whole context, and pieces are fed as the whole would be.
TEST(TurnTokensTest, TheTailIsTheContextsEnd) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<TokenId> whole;
    ContextTokens base;  // of the state
    WaitingTokens waiting;
    for (int turn = 0; turn < 30; ++turn) {
      const std::vector<TokenId> appended =
          Ids(static_cast<int>(random() % 4 == 0 ? random() % 2000 : random() % 70),
              static_cast<TokenId>(random() % 999));
      const bool generates = random() % 2 == 0;
      const Feed feed = PlanFeed(waiting, appended, generates);
      whole.insert(whole.end(), appended.begin(), appended.end());
      if (!generates && feed.waits()) {
        waiting = WaitingWithout(feed);
      } else {
        if (generates && feed.prompt.empty() && !feed.pending_token) continue;
        const std::vector<TokenId> drawn =
            generates ? Ids(1 + static_cast<int>(random() % 50), 5000) : Ids(0);
        whole.insert(whole.end(), drawn.begin(), drawn.end());
        base = TokensAfter(base, feed, drawn);
        waiting = WaitingOf(base);
        EXPECT_EQ(waiting, WaitingAfter(feed, drawn));
      }
      const ContextTokens tokens = WithWaiting(base, waiting);
      ASSERT_EQ(tokens.total_tokens(), std::ssize(whole));
      const int64_t kept = std::min<int64_t>(std::ssize(whole), ContextTokens::kMaxTail);
      ASSERT_EQ(tokens.tail, std::vector<TokenId>(whole.end() - kept, whole.end()));
      ASSERT_LE(std::ssize(tokens.pending_prompt), kChunkTokens);
    }
  }
}

TEST(TurnTokensTest, PiecesAreFedAsTheWholeWouldBe) {
  std::mt19937 random(4);
  for (int round = 0; round < 50; ++round) {
    std::vector<TokenId> fed, whole;
    WaitingTokens waiting;
    for (int piece = 0; piece < 10; ++piece) {
      const std::vector<TokenId> appended =
          Ids(static_cast<int>(random() % 200), static_cast<TokenId>(random() % 999));
      whole.insert(whole.end(), appended.begin(), appended.end());
      const Feed feed = PlanFeed(waiting, appended, false);
      fed.insert(fed.end(), feed.prompt.begin(), feed.prompt.end());
      ASSERT_EQ(fed.size() % kChunkTokens, 0u);
      waiting = WaitingAfter(feed, {});
    }
    ASSERT_EQ(fed, PlanFeed({}, whole, false).prompt);
    ASSERT_EQ(waiting.pending_prompt, PlanFeed({}, whole, false).rest);
  }
}

}  // namespace
}  // namespace efla
