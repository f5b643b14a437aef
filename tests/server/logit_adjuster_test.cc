// The adjuster against a plain recomputation from the whole history.
#include "server/engine/logit_adjuster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <tuple>
#include <vector>

namespace efla {
namespace {

constexpr int64_t kVocab = 50;
constexpr int64_t kLongest = 200;

using Ids = std::vector<TokenId>;

struct History {
  SamplingParams sampling;
  StopParams stopping;
  Ids prompt, end_ids, stop_ids;
};

// What the next draw does to a token: bias, scale, penalty; tokens with nothing are left out.
using Changes = std::map<TokenId, std::tuple<float, float, float>>;

Changes ExpectedChanges(const History& history, const Ids& output) {
  const SamplingParams& sampling = history.sampling;
  const auto last = [&](const Ids& ids) {
    const size_t count = std::min<size_t>(ids.size(), sampling.penalty_window);
    return Ids(ids.end() - static_cast<std::ptrdiff_t>(count), ids.end());
  };
  Ids all = history.prompt;
  all.insert(all.end(), output.begin(), output.end());
  const Ids in_both = last(all), in_output = last(output);
  Changes changes;
  for (TokenId id = 0; id < kVocab; ++id) {
    float bias = 0, scale = 1, penalty = 0;
    for (const auto& [biased, value] : sampling.logit_bias) bias += biased == id ? value : 0;
    if (std::count(in_both.begin(), in_both.end(), id) > 0) scale = sampling.repetition_penalty;
    if (const auto times = std::count(in_output.begin(), in_output.end(), id); times > 0) {
      penalty = sampling.presence_penalty + sampling.frequency_penalty * static_cast<float>(times);
    }
    if (bias != 0 || scale != 1 || penalty != 0) changes[id] = {bias, scale, penalty};
  }
  return changes;
}

std::set<TokenId> ExpectedBans(const History& history, const Ids& output) {
  const SamplingParams& sampling = history.sampling;
  std::set<TokenId> bans(sampling.banned_token_ids.begin(), sampling.banned_token_ids.end());
  const auto has = [](const Ids& ids, TokenId id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  for (TokenId id = 0; id < kVocab; ++id) {
    const bool allowed = has(sampling.allowed_token_ids, id) || has(history.end_ids, id);
    if (!sampling.allowed_token_ids.empty() && !allowed) bans.insert(id);
    const bool ends = has(history.end_ids, id) || has(history.stop_ids, id);
    if (ends && static_cast<int64_t>(output.size()) < history.stopping.min_tokens) bans.insert(id);
  }
  Ids text = history.prompt;
  text.insert(text.end(), output.begin(), output.end());
  const size_t n = sampling.no_repeat_ngram_size;
  for (TokenId id = 0; n > 0 && id < kVocab; ++id) {
    Ids next = text;
    next.push_back(id);
    if (next.size() < n) continue;
    const Ids ngram(next.end() - static_cast<std::ptrdiff_t>(n), next.end());
    if (std::search(text.begin(), text.end(), ngram.begin(), ngram.end()) != text.end()) bans.insert(id);
  }
  return bans;
}

void ExpectLikeRecomputed(const LogitAdjuster& adjuster, const History& history, const Ids& output) {
  Changes changes;
  std::set<TokenId> listed;
  for (const LogitAdjustment& entry : adjuster.adjustments()) {
    EXPECT_TRUE(listed.insert(entry.token).second) << "token " << entry.token << " is listed twice";
    if (entry.bias == 0 && entry.scale == 1 && entry.penalty == 0) continue;
    changes[entry.token] = {entry.bias, entry.scale, entry.penalty};
  }
  EXPECT_EQ(changes, ExpectedChanges(history, output));
  std::vector<uint32_t> mask(MaskWords(kVocab), ~uint32_t{0});
  adjuster.Ban(mask);
  std::set<TokenId> bans;
  for (TokenId id = 0; id < kVocab; ++id) {
    if ((mask[id / 32] >> (id % 32) & 1) == 0) bans.insert(id);
  }
  EXPECT_EQ(bans, ExpectedBans(history, output));
  if (!adjuster.bans()) {
    EXPECT_TRUE(bans.empty());
  }
}

TEST(LogitAdjusterTest, RandomHistoriesGiveWhatRecomputingGives) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  const auto ids = [&](int most, int vocab) {
    Ids some(static_cast<size_t>(below(most + 1)));
    for (TokenId& id : some) id = below(vocab);
    return some;
  };
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const int vocab = 2 + below(kVocab - 1);  // a small one repeats itself
    History history;
    history.prompt = ids(60, vocab);
    history.end_ids = ids(2, kVocab);
    history.stop_ids = ids(3, kVocab);
    SamplingParams& sampling = history.sampling;
    const float penalties[] = {0, 0, 0.5f, -1};
    sampling.repetition_penalty = below(2) == 0 ? 1.0f : 1.3f;
    sampling.presence_penalty = penalties[below(4)];
    sampling.frequency_penalty = penalties[below(4)];
    sampling.penalty_window = 1 + below(below(2) == 0 ? 8 : 100);
    sampling.no_repeat_ngram_size = below(2) == 0 ? 0 : 1 + below(4);
    for (TokenId id = 0; id < kVocab; ++id) {
      if (below(10) == 0) sampling.logit_bias.emplace_back(id, static_cast<float>(below(7) - 3));
    }
    if (below(3) == 0) sampling.allowed_token_ids = ids(20, kVocab);
    if (below(3) == 0) sampling.banned_token_ids = ids(20, kVocab);
    history.stopping.min_tokens = below(2) == 0 ? 0 : below(30);
    LogitAdjuster adjuster(sampling, history.stopping, history.prompt, history.end_ids, history.stop_ids,
                           kVocab);
    Ids output;
    const int length = below(kLongest);
    ExpectLikeRecomputed(adjuster, history, output);
    for (int i = 0; i < length; ++i) {
      output.push_back(below(vocab));
      adjuster.AddToken(output.back());
      if (i < 40 || below(8) == 0) ExpectLikeRecomputed(adjuster, history, output);
      if (HasFailure()) return;
    }
  }
}

TEST(LogitAdjusterTest, IsNeededForWhatItDoesAlone) {
  EXPECT_FALSE(LogitAdjuster::IsNeeded({.temperature = 2, .top_k = 3, .typical_p = 0.5f}, {}));
  EXPECT_FALSE(LogitAdjuster::IsNeeded({.penalty_window = 7}, {.stop = {"x"}, .stop_token_ids = {1}}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.repetition_penalty = 1.1f}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.presence_penalty = 0.1f}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.frequency_penalty = -0.1f}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.no_repeat_ngram_size = 1}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.logit_bias = {{1, 1.0f}}}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.allowed_token_ids = {1}}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({.banned_token_ids = {1}}, {}));
  EXPECT_TRUE(LogitAdjuster::IsNeeded({}, {.min_tokens = 1}));
}

TEST(LogitAdjusterTest, PresenceAndFrequencyDoNotCountThePrompt) {
  const SamplingParams sampling = {.presence_penalty = 1, .frequency_penalty = 1};
  const Ids prompt(100, 7);
  LogitAdjuster adjuster(sampling, {}, prompt, {}, {}, kVocab);
  EXPECT_TRUE(adjuster.adjustments().empty());
  adjuster.AddToken(7);
  ASSERT_EQ(adjuster.adjustments().size(), 1u);
  EXPECT_EQ(adjuster.adjustments()[0].penalty, 2);
}

TEST(LogitAdjusterTest, ItsListsFitTheDevices) {
  EXPECT_LE(kMaxPenaltyWindow + kMaxLogitBias, kMaxAdjustments);
}

// Several outputs of one prompt, whose index they share and of which they get no more than a window looks at.
// With base 0, n-grams that end alike have equal hashes.
TEST(LogitAdjusterTest, SharersOfAnIndexDrawAsThoseThatHoldThePrompt) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  constexpr int kSharers = 3;
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const int vocab = 2 + below(below(2) == 0 ? 5 : kVocab - 1);
    History history;
    history.prompt.resize(static_cast<size_t>(below(80)));
    for (TokenId& id : history.prompt) id = below(vocab);
    SamplingParams& sampling = history.sampling;
    sampling.no_repeat_ngram_size = 1 + below(6);
    sampling.repetition_penalty = below(2) == 0 ? 1.0f : 1.3f;
    sampling.presence_penalty = below(2) == 0 ? 0.0f : 0.5f;
    sampling.penalty_window = 1 + below(100);
    const size_t looked_at =
        sampling.repetition_penalty == 1.0f
            ? 0
            : std::min(history.prompt.size(), static_cast<size_t>(sampling.penalty_window));
    const auto index =
        below(2) == 0
            ? std::make_shared<const NgramIndex>(sampling.no_repeat_ngram_size, history.prompt)
            : std::make_shared<const NgramIndex>(sampling.no_repeat_ngram_size, history.prompt, /*base=*/0);
    std::vector<std::unique_ptr<LogitAdjuster>> sharers;
    for (int i = 0; i < kSharers; ++i) {
      sharers.push_back(std::make_unique<LogitAdjuster>(sampling, history.stopping,
                                                        std::span(history.prompt).last(looked_at), Ids(),
                                                        Ids(), kVocab, index));
    }
    EXPECT_EQ(index.use_count(), 1 + kSharers);
    std::vector<Ids> outputs(kSharers);
    const int length = below(60);
    for (int i = 0; i <= length; ++i) {
      for (size_t sharer = 0; sharer < kSharers; ++sharer) {
        SCOPED_TRACE(testing::Message() << "sharer " << sharer << ", token " << i);
        ExpectLikeRecomputed(*sharers[sharer], history, outputs[sharer]);
        if (HasFailure()) return;
        outputs[sharer].push_back(below(vocab));
        sharers[sharer]->AddToken(outputs[sharer].back());
      }
    }
  }
}

TEST(LogitAdjusterTest, ARepeatIsBannedOnceWhereverItWasHeld) {
  NgramIndex index(std::make_shared<const NgramIndex>(2, Ids{1, 2, 1}), /*tokens=*/8);
  const auto repeats = [&] {
    std::multiset<TokenId> banned;
    index.ForEachRepeat([&](TokenId id) { banned.insert(id); });
    return banned;
  };
  EXPECT_EQ(repeats(), std::multiset<TokenId>({2}));
  for (const TokenId token : {2, 1, 3, 1, 3, 1}) index.Add(token);
  EXPECT_EQ(repeats(), std::multiset<TokenId>({2, 3}));
}

TEST(LogitAdjusterTest, EachSharerHoldsWhatItDraws) {
  std::mt19937 random(1);
  Ids prompt(60'000);
  for (TokenId& id : prompt) id = static_cast<TokenId>(random() % 30'000);
  for (const int n : {1, 3, kMaxNoRepeatNgram}) {
    SCOPED_TRACE(n);
    const auto of_prompt = std::make_shared<const NgramIndex>(n, prompt);
    const auto of_few = std::make_shared<const NgramIndex>(n, std::span(prompt).first(100));
    EXPECT_GT(of_prompt->bytes(), prompt.size() * sizeof(TokenId));
    constexpr int64_t kDrawn = 256;
    NgramIndex after_prompt(of_prompt, kDrawn), after_few(of_few, kDrawn);
    EXPECT_LT(after_prompt.bytes(), 128u * kDrawn);
    for (int i = 0; i < 1'000; ++i) {
      const auto token = static_cast<TokenId>(30'000 + i);
      after_prompt.Add(token);
      after_few.Add(token);
    }
    EXPECT_EQ(after_prompt.bytes(), after_few.bytes()) << "the prompt's length shows in what follows it";
    EXPECT_GT(after_prompt.bytes(), 1'000 * sizeof(TokenId));
  }
}

TEST(LogitAdjusterTest, NoTwoIndexesHashAlike) {
  EXPECT_NE(NgramIndex::RandomBase(), NgramIndex::RandomBase());
}

// A prompt whose every token has been followed by every other.
TEST(LogitAdjusterTest, LongRepetitivePromptsAreIndexedInTime) {
  Ids prompt;
  for (int i = 0; i < 300000; ++i) prompt.push_back(i % 2 == 0 ? 0 : i % 49 + 1);
  const SamplingParams sampling = {.no_repeat_ngram_size = 2};
  LogitAdjuster adjuster(sampling, {}, prompt, {}, {}, kVocab);
  std::vector<uint32_t> mask(MaskWords(kVocab), ~uint32_t{0});
  adjuster.AddToken(0);
  adjuster.Ban(mask);
  EXPECT_EQ(mask[0] & 0x3ffffffe, 0u);
}

}  // namespace
}  // namespace efla
