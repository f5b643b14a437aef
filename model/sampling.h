// How a generation picks its tokens and when it ends.
#ifndef EFLA_MODEL_SAMPLING_H_
#define EFLA_MODEL_SAMPLING_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace efla {

inline constexpr int kMaxPenaltyWindow = 4096;
inline constexpr int kMaxNoRepeatNgram = 64;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxListedIds = 4096;  // allowed, and banned
inline constexpr int kMaxStopStrings = 64;
inline constexpr int kMaxStopBytes = 1024;
inline constexpr int kMaxStopTokenIds = 256;

// Steps are applied in this order: logit_bias, banned and allowed ids, repetition penalty, frequency and
// presence penalty, no_repeat_ngram_size and min_tokens, the constraint's mask, temperature, top-k,
// typical-p, top-p, min-p, draw. Random numbers are counter-based (seed, token index): a draw never depends
// on the rest of the batch.
//
// "Output" is what this call has drawn, "prompt" what it was given; what a session held before is neither.
struct SamplingParams {
  float temperature = 1.0f;  // [0, 100]; 0 is greedy
  int32_t top_k = 0;         // 0: off
  float typical_p = 1.0f;    // (0, 1]; 1: off
  float top_p = 1.0f;        // (0, 1]; 1: off
  float min_p = 0.0f;        // [0, 1); relative to the most probable token; 0: off
  uint64_t seed = 0;
  float repetition_penalty = 1.0f;  // [0.01, 10]; of tokens in prompt and output; 1: off
  float presence_penalty = 0.0f;    // [-2, 2]; of tokens in the output
  float frequency_penalty = 0.0f;   // [-2, 2]; for each time in the output
  // The three penalties look at the last so many tokens of prompt and output together, or of the output; 1 to
  // kMaxPenaltyWindow.
  int32_t penalty_window = 1024;
  int32_t no_repeat_ngram_size = 0;  // 0 to kMaxNoRepeatNgram; of prompt and output; 0: off
  std::vector<std::pair<TokenId, float>> logit_bias =
      {};  // [-100, 100] each, no id twice; at most kMaxLogitBias
  std::vector<TokenId> allowed_token_ids =
      {};  // nothing else is drawn but end tokens; empty: all; kMaxListedIds
  std::vector<TokenId> banned_token_ids = {};  // never drawn, wins over allowed_token_ids; kMaxListedIds

  // INVALID_ARGUMENT naming the field, the value and the bound; NaN never passes.
  absl::Status Validate(int64_t vocab_size) const;
  // Whether draws look at what has been drawn before them.
  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

struct StopParams {
  int64_t max_tokens = 256;            // >= 0; 0: only the prompt is computed
  std::vector<std::string> stop = {};  // at most kMaxStopStrings of at most kMaxStopBytes bytes, none empty
  std::vector<TokenId> stop_token_ids = {};  // at most kMaxStopTokenIds
  bool ignore_eos = false;
  // 0 to max_tokens. So many tokens are drawn before any that ends the generation: end tokens and stop ids
  // are banned until then, and stop strings are looked for in the text of the tokens after them.
  int64_t min_tokens = 0;
  absl::Status Validate(int64_t vocab_size) const;
};

}  // namespace efla

#endif  // EFLA_MODEL_SAMPLING_H_
