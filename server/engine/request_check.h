// What a request has to be like before it is queued, whatever else waits.
#ifndef EFLA_SERVER_ENGINE_REQUEST_CHECK_H_
#define EFLA_SERVER_ENGINE_REQUEST_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "model/state_pool.h"
#include "server/engine/engine.h"
#include "server/engine/generation.h"

namespace efla {

// INVALID_ARGUMENT naming the field, the value and the bound. `has_text`: there is a tokenizer. `pool`: where
// a state to start from has to lie.
absl::Status CheckRequest(const GenerationRequest& request, const EngineOptions& options, int64_t vocab_size,
                          bool has_text, const StatePool& pool);

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_REQUEST_CHECK_H_
