// How a generation picks its tokens and when it ends.
#ifndef EFLA_MODEL_SAMPLING_H_
#define EFLA_MODEL_SAMPLING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace efla {

// Steps are applied in this order: temperature, top-k, top-p, min-p, draw. Random numbers are counter-based
// (seed, token index): a draw never depends on the rest of the batch.
struct SamplingParams {
  float temperature = 1.0f;  // [0, 100]; 0 is greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // (0, 1]; 1: off
  float min_p = 0.0f;        // [0, 1); relative to the most probable token; 0: off
  uint64_t seed = 0;
  // INVALID_ARGUMENT naming the field, the value and the bound; NaN never passes.
  absl::Status Validate() const;
};

struct StopParams {
  int64_t max_tokens = 256;             // >= 0; 0: only the prompt is computed
  std::vector<std::string> stop;        // at most kMaxStopStrings of at most kMaxStopBytes bytes, none empty
  std::vector<TokenId> stop_token_ids;  // at most kMaxStopTokenIds
  bool ignore_eos = false;
  absl::Status Validate(int64_t vocab_size) const;
};

inline constexpr int kMaxStopStrings = 64;
inline constexpr int kMaxStopBytes = 1024;
inline constexpr int kMaxStopTokenIds = 256;

}  // namespace efla

#endif  // EFLA_MODEL_SAMPLING_H_
