#include "server/engine/call.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

// The output keeps the space of its first piece unless it is the beginning of a text: nothing but control
// tokens before it.
bool ContinuesText(const Tokenizer* tokenizer, const GenerationRequest& request) {
  if (tokenizer == nullptr || request.continues_text) return true;
  const auto is_text = [&](TokenId id) { return !tokenizer->is_control(id); };
  return (request.pending_token && is_text(*request.pending_token)) ||
         std::any_of(request.prompt.begin(), request.prompt.end(), is_text);
}

Clock::time_point Expiry(const GenerationRequest& request, Clock::time_point submitted) {
  Clock::time_point expires = request.deadline.value_or(Clock::time_point::max());
  if (request.time_budget && *request.time_budget < Clock::time_point::max() - submitted) {
    expires = std::min(expires, submitted + *request.time_budget);
  }
  return expires;
}

}  // namespace

Call::Call(GenerationRequest request, std::vector<PrefixCache::BlockHash> blocks,
           std::shared_ptr<GenerationImpl> generation, const Tokenizer* tokenizer,
           std::span<const TokenId> eos_token_ids, Clock::time_point now)
    : base(std::move(request.start)),
      request_(std::move(request)),
      blocks_(std::move(blocks)),
      generation_(std::move(generation)),
      eos_token_ids_(eos_token_ids),
      stop_token_ids_(request_.stopping.stop_token_ids),
      text_(tokenizer, request_.stopping.stop, ContinuesText(tokenizer, request_), request_.include_stop,
            request_.skip_special_tokens) {
  has_pending = request_.pending_token.has_value();
  next_token_ = request_.pending_token.value_or(-1);
  prompt_tokens = static_cast<int64_t>(request_.prompt.size());
  scores_prompt = request_.prompt_logprobs;
  draws = wants_tokens() || request_.keep_state || !blocks_.empty();
  submitted = now;
  expires = Expiry(request_, now);
  if (tokenizer != nullptr) {
    for (const std::string& stop : request_.stopping.stop) {
      if (const TokenId id = tokenizer->ControlId(stop); id >= 0) stop_token_ids_.push_back(id);
    }
  }
  std::sort(stop_token_ids_.begin(), stop_token_ids_.end());
  if (scores_prompt) prompt_logprobs_.reserve(request_.prompt.size());
}

bool Call::IsEos(TokenId token) const {
  return !request_.stopping.ignore_eos &&
         std::binary_search(eos_token_ids_.begin(), eos_token_ids_.end(), token);
}

bool Call::IsStopToken(TokenId token) const {
  return std::binary_search(stop_token_ids_.begin(), stop_token_ids_.end(), token);
}

SampleRow Call::DrawRow(int token_row) const {
  if (!wants_tokens()) return {.token_row = token_row, .target = 0};
  const SamplingParams& sampling = request_.sampling;
  return {.token_row = token_row,
          .temperature = sampling.temperature,
          .top_k = sampling.top_k,
          .top_p = sampling.top_p,
          .min_p = sampling.min_p,
          .seed = sampling.seed,
          .position = static_cast<uint64_t>(completion_tokens_),
          .num_top = request_.logprobs ? request_.top_logprobs : 0};
}

SampleRow Call::ScoreRow(int token_row, int64_t position) const {
  return {.token_row = token_row, .target = request_.prompt[position], .num_top = request_.top_logprobs};
}

int64_t Call::MicrosSinceSubmit(Clock::time_point now) const {
  return std::chrono::duration_cast<std::chrono::microseconds>(now - submitted).count();
}

Timing Call::TimingAt(Clock::time_point now) const {
  return {.queue_us = queue_us_,
          .prefill_us = prefill_us_,
          .first_token_us = first_token_us_,
          .total_us = MicrosSinceSubmit(now)};
}

void Call::SkipCached(int64_t tokens) {
  prompt_done = tokens;
  cached_tokens_ = tokens;
  generation_->SetCachedTokens(tokens);
}

void Call::Begin(Clock::time_point now) {
  begun_ = true;
  queue_us_ = MicrosSinceSubmit(now);
  generation_->PushAccepted(
      {.prompt_tokens = prompt_tokens, .seed = request_.sampling.seed, .queue_us = queue_us_});
}

void Call::AddPromptPiece(Clock::time_point now) {
  if (request_.progress) {
    has_news_ = true;
    generation_->PushProgress({.prompt_tokens_done = prompt_done, .prompt_tokens_total = prompt_tokens});
  }
  if (prompt_done < prompt_tokens) return;
  prefill_us_ = MicrosSinceSubmit(now) - queue_us_;
  if (!wants_tokens()) EndWell(FinishReason::kMaxTokens, EngineObserver::Outcome::kLength);
}

void Call::AddCheck(const SampleResult& result) {
  if (end || result.finite) return;
  end = End{absl::InternalError("the logits of the prompt's last token are not finite"),
            EngineObserver::Outcome::kError, std::nullopt};
}

TokenOutput Call::MakeOutput(const SampleResult& result, std::span<const TokenLogprob> top) const {
  TokenOutput output{.token = result.token, .logprob = result.logprob, .top = {}};
  output.top.reserve(top.size());
  for (const TokenLogprob& alternative : top) output.top.emplace_back(alternative.token, alternative.logprob);
  return output;
}

void Call::AddScore(const SampleResult& result, std::span<const TokenLogprob> top) {
  if (end) return;
  if (!result.finite) {
    end = End{absl::InternalError(absl::StrFormat("the logits that score prompt token %d are not finite",
                                                  prompt_logprobs_.size() + 1)),
              EngineObserver::Outcome::kError, std::nullopt};
    return;
  }
  prompt_logprobs_.push_back(MakeOutput(result, top));
}

bool Call::AddToken(const SampleResult& result, std::span<const TokenLogprob> top, Clock::time_point now) {
  if (end) return true;
  if (!result.finite) {
    end =
        End{absl::InternalError(absl::StrFormat("the logits of token %d are not finite", completion_tokens_)),
            EngineObserver::Outcome::kError, std::nullopt};
    return true;
  }
  if (completion_tokens_ == 0) {
    first_token_us_ = MicrosSinceSubmit(now);
  } else {
    token_gap_seconds_ = std::chrono::duration<double>(now - last_token_).count();
  }
  last_token_ = now;
  ++completion_tokens_;
  generation_->CountToken();
  next_token_ = result.token;
  if (request_.keep_state) drawn_.push_back(result.token);
  held_.push_back(MakeOutput(result, top));

  const bool eos = IsEos(result.token);
  const bool stop_token = !eos && IsStopToken(result.token);
  TextStream::Push pushed{};
  if (!(eos || stop_token) || !request_.skip_special_tokens) pushed = text_.Add(result.token);
  if (eos || stop_token) {
    finished_.matched_token = result.token;
    EndWell(eos ? FinishReason::kEos : FinishReason::kStopToken, EngineObserver::Outcome::kStop);
  } else if (pushed.stopped) {
    finished_.matched_stop = request_.stopping.stop[pushed.stop_index];
    EndWell(FinishReason::kStopString, EngineObserver::Outcome::kStop);
  } else if (completion_tokens_ >= request_.stopping.max_tokens) {
    EndWell(FinishReason::kMaxTokens, EngineObserver::Outcome::kLength);
  }
  if (end) {
    finished_.text = std::move(pushed.text);
    if (!pushed.stopped) finished_.text += text_.Finish().text;
    return true;
  }
  if (pushed.tokens_released == 0 && pushed.text.empty()) return true;
  DeltaEvent delta{.text = std::move(pushed.text), .tokens = {}, .usage = usage(), .timing = TimingAt(now)};
  const auto released = held_.begin() + pushed.tokens_released;
  delta.tokens.assign(std::make_move_iterator(held_.begin()), std::make_move_iterator(released));
  held_.erase(held_.begin(), released);
  has_news_ = true;
  return !generation_->PushDelta(std::move(delta));
}

void Call::Finish(Clock::time_point now, ResidentStatePtr state) {
  if (end->reason) {
    if (*end->reason == FinishReason::kTimeBudget) finished_.text = text_.Finish().text;
    finished_.reason = *end->reason;
    finished_.tokens = std::move(held_);
    finished_.prompt_logprobs = std::move(prompt_logprobs_);
    finished_.usage = usage();
    finished_.timing = TimingAt(now);
    generation_->PushFinished(std::move(finished_));
  }
  std::optional<FinalState> final_state;
  if (state != nullptr) {
    final_state =
        FinalState{.state = std::move(state), .prompt_tokens = prompt_done, .drawn = std::move(drawn_)};
  }
  generation_->End(end->status, std::move(final_state));
}

}  // namespace efla
