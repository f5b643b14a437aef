#include "server/engine/request_check.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

// What its prompt goes on from.
absl::Status CheckStart(const GenerationRequest& request, int64_t vocab_size, const StatePool& pool) {
  if (request.pending_token && request.start == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "pending token %d is given without the state that it follows", *request.pending_token));
  }
  if (request.pending_token && (*request.pending_token < 0 || *request.pending_token >= vocab_size)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the pending token is %d; ids are 0 to %d", *request.pending_token, vocab_size - 1));
  }
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const int64_t in_start = request.prompt_in_start;
  if (request.first_draw) {
    if (request.start == nullptr || request.pending_token || in_start != prompt_tokens ||
        request.stopping.max_tokens <= 0 || request.prompt_logprobs) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "token %d is given as the first draw; it needs the state that it was drawn from, which holds all "
          "of the prompt's %d tokens (not %d), no pending token, max_tokens above 0 and no scores",
          request.first_draw->token, prompt_tokens, in_start));
    }
  } else if (in_start != 0 && (request.start == nullptr || request.pending_token || in_start < 0 ||
                               in_start % kChunkTokens != 0 || in_start >= prompt_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("prompt_in_start is %d of %d tokens; it must be a multiple of %d below them, and "
                        "needs a state to start from and no pending token",
                        in_start, prompt_tokens, kChunkTokens));
  }
  if (request.start == nullptr) return absl::OkStatus();
  const SlotHandle slot = request.start->slot();
  if (!request.start->IsIn(pool)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state to start from lies in slot %d of another pool", slot.slot));
  }
  if (!pool.IsLive(slot)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state to start from was in slot %d, which has been freed", slot.slot));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRequest(const GenerationRequest& request, const EngineOptions& options, int64_t vocab_size,
                          bool has_text, const StatePool& pool) {
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  if (absl::Status status = CheckStart(request, vocab_size, pool); !status.ok()) return status;
  if (prompt_tokens == 0 && !request.pending_token && !request.first_draw) {
    return absl::InvalidArgumentError("the prompt is empty; it needs at least 1 token");
  }
  if (const size_t seeds = request.first_draw_seeds.size(); seeds > 0) {
    if (seeds > kChunkTokens || prompt_tokens == 0 || request.first_draw || !request.keep_state ||
        request.stopping.max_tokens <= 0 || request.prompt_logprobs) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "first draws are asked for with %d seeds; at most %d are possible, with a prompt, keep_state, "
          "max_tokens above 0 and no scores",
          seeds, kChunkTokens));
    }
  }
  if (request.echo_tokens < 0 || request.echo_tokens > prompt_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "echo_tokens is %d; it must be 0 to the prompt's %d tokens", request.echo_tokens, prompt_tokens));
  }
  if (prompt_tokens > options.max_prompt_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("the prompt has %d tokens; the limit is %d",
                                                      prompt_tokens, options.max_prompt_tokens));
  }
  for (int64_t i = 0; i < prompt_tokens; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrFormat("token %d of the prompt is %d; ids are 0 to %d", i,
                                                        request.prompt[i], vocab_size - 1));
    }
  }
  if (absl::Status status = request.sampling.Validate(vocab_size); !status.ok()) return status;
  if (absl::Status status = request.stopping.Validate(vocab_size); !status.ok()) return status;
  if (request.stopping.max_tokens > options.max_new_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("max_tokens is %d; the limit is %d",
                                                      request.stopping.max_tokens, options.max_new_tokens));
  }
  if (!has_text && !request.stopping.stop.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d stop strings are given, but the model has no tokenizer and so no text; use stop_token_ids",
        request.stopping.stop.size()));
  }
  const int64_t most_top = std::min<int64_t>(kMaxTopLogprobs, vocab_size);
  if (request.top_logprobs < 0 || request.top_logprobs > most_top) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %d; it must be 0 to %d", request.top_logprobs, most_top));
  }
  if (request.top_logprobs > 0 && !request.logprobs && !request.prompt_logprobs) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %d, but no log-probabilities are asked for", request.top_logprobs));
  }
  if (request.time_budget && request.time_budget->count() <= 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("time_budget is %d us; it must be above 0", request.time_budget->count()));
  }
  return absl::OkStatus();
}

}  // namespace efla
