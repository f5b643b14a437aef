// Flags of how to generate, and the words and figures of how it ended.
#ifndef EFLA_CLIENT_GENERATION_FLAGS_H_
#define EFLA_CLIENT_GENERATION_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "efla/v1/generation.pb.h"

namespace efla {

struct GenerationFlags {
  std::optional<uint32_t> max_tokens, top_k;
  std::optional<float> temperature, top_p, min_p, typical_p;
  std::optional<float> repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<uint32_t> penalty_window, no_repeat_ngram;
  uint32_t min_tokens = 0;
  std::vector<std::string> logit_bias;  // ID=VALUE each
  std::vector<uint32_t> allow_ids, ban_ids;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;

  void Fill(v1::GenerateRequest& request) const;
};
void AddGenerationFlags(CLI::App& app, GenerationFlags& flags);

// "max_tokens" of FINISH_REASON_MAX_TOKENS.
std::string ReasonName(v1::FinishReason reason);
// Of the tokens after the first; nothing where there are none.
std::optional<double> TokensPerSecond(const v1::Finished& finished);

}  // namespace efla

#endif  // EFLA_CLIENT_GENERATION_FLAGS_H_
