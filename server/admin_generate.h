// A completion for the status page: JSON in, server-sent events out.
#ifndef EFLA_SERVER_ADMIN_GENERATE_H_
#define EFLA_SERVER_ADMIN_GENERATE_H_

#include <optional>
#include <string_view>

#include "server/admin_http.h"
#include "server/serving_state.h"

namespace efla {

// `body`: {"prompt": TEXT, "max_tokens": 1 to 4096, "temperature": 0 to 2, "seed": N}; all but the prompt may
// be left out, nothing else may be there. Events: {"text": TEXT} as text comes, then {"finish_reason": NAME,
// "prompt_tokens": N, "completion_tokens": N, "first_token_ms": T, "total_ms": T} or {"error": TEXT}. Blocks
// until the last. A refusal, before any event, is the reply.
std::optional<HttpReply> StreamCompletion(const ServingState& state, std::string_view body,
                                          const HttpStream& stream);

}  // namespace efla

#endif  // EFLA_SERVER_ADMIN_GENERATE_H_
