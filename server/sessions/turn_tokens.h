// What a turn feeds, and what its context's tokens are afterwards: arithmetic on tokens alone.
#ifndef EFLA_SERVER_SESSIONS_TURN_TOKENS_H_
#define EFLA_SERVER_SESSIONS_TURN_TOKENS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/types.h"
#include "server/sessions/context.h"

namespace efla {

// The tokens of a context that its state does not cover: ContextTokens' pending fields.
struct WaitingTokens {
  std::optional<TokenId> pending_token;
  std::vector<TokenId> pending_prompt;  // at most kChunkTokens

  int64_t size() const { return (pending_token ? 1 : 0) + static_cast<int64_t>(pending_prompt.size()); }
  friend bool operator==(const WaitingTokens&, const WaitingTokens&) = default;
};

// What one turn feeds: the pending token in the recurrent form, then the prompt in the chunkwise form, whose
// grid begins with the prompt's first token. `rest` waits on.
struct Feed {
  std::optional<TokenId> pending_token;
  std::vector<TokenId> prompt;
  std::vector<TokenId> rest;  // at most kChunkTokens

  // Nothing needs to be computed: all of it may wait.
  bool waits() const { return prompt.empty(); }
};

// For `appended` after `waiting`. To generate, everything is fed. Else the prompt ends at the last point of
// its grid that leaves a token over, and waits whole where there is no such point.
Feed PlanFeed(const WaitingTokens& waiting, std::span<const TokenId> appended, bool generates);

// What waits after a turn that fed nothing. REQUIRES: feed.waits().
WaitingTokens WaitingWithout(const Feed& feed);
// What waits after a turn that fed all of `feed` and then drew `drawn`.
WaitingTokens WaitingAfter(const Feed& feed, std::span<const TokenId> drawn);

// The tokens after that turn. `before` is a context that `feed` was planned for; its waiting tokens need not
// be the same as long as its state is.
ContextTokens TokensAfter(const ContextTokens& before, const Feed& feed, std::span<const TokenId> drawn);

// The tokens of a context that has the state of `base` and other tokens waiting, which begin with those of
// `base`.
ContextTokens WithWaiting(const ContextTokens& base, const WaitingTokens& waiting);

WaitingTokens WaitingOf(const ContextTokens& tokens);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_TURN_TOKENS_H_
