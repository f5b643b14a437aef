// A context as a value: what has been read and written so far, without the numbers of the state itself.
#ifndef EFLA_SERVER_SESSIONS_CONTEXT_H_
#define EFLA_SERVER_SESSIONS_CONTEXT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/types.h"

namespace efla {

// The state covers tokens [0, fed_tokens). What has been appended or drawn beyond that waits to be fed: first
// the pending token (drawn, to be fed in the recurrent form), then the pending prompt (appended, to be fed in
// the chunkwise form, its grid beginning with its first token).
//
// A prompt is only ever fed up to the last point of its 64-token grid that leaves at least one token over. So
// there is always something to take logits from, appending in pieces and at once is one and the same
// computation, and a short append costs nothing until the next turn.
struct ContextTokens {
  static constexpr int64_t kMaxTail = 4096;

  int64_t fed_tokens = 0;
  std::optional<TokenId> pending_token;
  std::vector<TokenId> pending_prompt;  // at most 64
  // The last kMaxTail tokens of the whole context, the pending ones included, oldest first.
  std::vector<TokenId> tail;

  int64_t total_tokens() const {
    return fed_tokens + (pending_token ? 1 : 0) + static_cast<int64_t>(pending_prompt.size());
  }
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_CONTEXT_H_
