#include "server/sessions/turn_tokens.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace efla {
namespace {

// The tail up to the state's end.
std::vector<TokenId> FedTail(const ContextTokens& tokens) {
  const int64_t waiting = tokens.total_tokens() - tokens.fed_tokens;
  return {tokens.tail.begin(), tokens.tail.end() - std::min<int64_t>(waiting, std::ssize(tokens.tail))};
}

// `tail` goes up to the state's end; what waits is added.
ContextTokens Compose(int64_t fed_tokens, std::vector<TokenId> tail, WaitingTokens waiting) {
  ContextTokens tokens;
  tokens.fed_tokens = fed_tokens;
  if (waiting.pending_token) tail.push_back(*waiting.pending_token);
  tail.insert(tail.end(), waiting.pending_prompt.begin(), waiting.pending_prompt.end());
  if (std::ssize(tail) > ContextTokens::kMaxTail)
    tail.erase(tail.begin(), tail.end() - ContextTokens::kMaxTail);
  tokens.tail = std::move(tail);
  tokens.pending_token = waiting.pending_token;
  tokens.pending_prompt = std::move(waiting.pending_prompt);
  return tokens;
}

}  // namespace

Feed PlanFeed(const WaitingTokens& waiting, std::span<const TokenId> appended, bool generates) {
  Feed feed;
  feed.pending_token = waiting.pending_token;
  feed.prompt = waiting.pending_prompt;
  feed.prompt.insert(feed.prompt.end(), appended.begin(), appended.end());
  if (generates) return feed;
  const int64_t tokens = std::ssize(feed.prompt);
  const int64_t fed = tokens == 0 ? 0 : (tokens - 1) / kChunkTokens * kChunkTokens;
  feed.rest.assign(feed.prompt.begin() + fed, feed.prompt.end());
  feed.prompt.resize(fed);
  return feed;
}

WaitingTokens WaitingWithout(const Feed& feed) {
  EFLA_CHECK(feed.waits());
  return {.pending_token = feed.pending_token, .pending_prompt = feed.rest};
}

WaitingTokens WaitingAfter(const Feed& feed, std::span<const TokenId> drawn) {
  WaitingTokens waiting{.pending_token = std::nullopt, .pending_prompt = feed.rest};
  if (!drawn.empty()) waiting.pending_token = drawn.back();
  return waiting;
}

ContextTokens TokensAfter(const ContextTokens& before, const Feed& feed, std::span<const TokenId> drawn) {
  EFLA_CHECK(drawn.empty() || feed.rest.empty());
  std::vector<TokenId> tail = FedTail(before);
  int64_t fed_tokens = before.fed_tokens;
  const auto add = [&](std::span<const TokenId> tokens) {
    tail.insert(tail.end(), tokens.begin(), tokens.end());
    fed_tokens += std::ssize(tokens);
  };
  if (feed.pending_token) add({&*feed.pending_token, 1});
  add(feed.prompt);
  if (!drawn.empty()) add(drawn.first(drawn.size() - 1));
  return Compose(fed_tokens, std::move(tail), WaitingAfter(feed, drawn));
}

ContextTokens WithWaiting(const ContextTokens& base, const WaitingTokens& waiting) {
  return Compose(base.fed_tokens, FedTail(base), waiting);
}

WaitingTokens WaitingOf(const ContextTokens& tokens) {
  return {.pending_token = tokens.pending_token, .pending_prompt = tokens.pending_prompt};
}

}  // namespace efla
