#include "server/engine/call.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

// Whether what follows the prompt's first `prompt_tokens` tokens keeps the space of its first piece: unless
// it is the beginning of a text, with nothing but control tokens before it.
bool ContinuesText(const Tokenizer* tokenizer, const GenerationRequest& request, int64_t prompt_tokens) {
  if (tokenizer == nullptr || request.continues_text) return true;
  const auto is_text = [&](TokenId id) { return !tokenizer->is_control(id); };
  return (request.pending_token && is_text(*request.pending_token)) ||
         std::any_of(request.prompt.begin(), request.prompt.begin() + prompt_tokens, is_text);
}

// What is echoed is part of the output.
bool OutputContinuesText(const Tokenizer* tokenizer, const GenerationRequest& request) {
  return ContinuesText(tokenizer, request, std::ssize(request.prompt) - request.echo_tokens);
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
           std::span<const TokenId> eos_token_ids, int64_t vocab_size, Clock::time_point now)
    : base(std::move(request.start)),
      request_(std::move(request)),
      blocks_(std::move(blocks)),
      generation_(std::move(generation)),
      eos_token_ids_(eos_token_ids),
      stop_token_ids_(request_.stopping.stop_token_ids),
      text_(tokenizer, request_.stopping.stop, OutputContinuesText(tokenizer, request_),
            request_.include_stop, request_.skip_special_tokens),
      vocab_size_(vocab_size) {
  has_pending = request_.pending_token.has_value() || request_.first_draw.has_value();
  next_token_ = request_.pending_token.value_or(-1);
  prompt_tokens = static_cast<int64_t>(request_.prompt.size());
  prompt_done = request_.prompt_in_start;
  scores_prompt = request_.prompt_logprobs;
  priority = request_.priority;
  if (!blocks_.empty()) shared_beginning = blocks_.front().key[0] | 1;
  first_rows = wants_tokens() || request_.keep_state || !blocks_.empty() ? 1 : 0;
  if (!request_.first_draw_seeds.empty()) first_rows = static_cast<int>(request_.first_draw_seeds.size());
  submitted = now;
  expires = Expiry(request_, now);
  if (tokenizer != nullptr) {
    for (const std::string& stop : request_.stopping.stop) {
      if (const TokenId id = tokenizer->ControlId(stop); id >= 0) stop_token_ids_.push_back(id);
    }
  }
  std::sort(stop_token_ids_.begin(), stop_token_ids_.end());
  if (wants_tokens() && request_.constraint != nullptr) {
    const int64_t constraint_vocab_size = tokenizer != nullptr ? tokenizer->vocab_size() : vocab_size;
    constraint_ =
        std::make_shared<ConstraintProgress>(request_.constraint, eos_token_ids_, constraint_vocab_size,
                                             vocab_size, !ContinuesText(tokenizer, request_, prompt_tokens));
    constraint_->call = this;
    ready = false;
  }
  if (wants_tokens() && LogitAdjuster::IsNeeded(request_.sampling, request_.stopping)) {
    const bool eos_ends = constraint_ != nullptr || !request_.stopping.ignore_eos;
    adjuster_.emplace(request_.sampling, request_.stopping, request_.prompt,
                      eos_ends ? eos_token_ids_ : std::span<const TokenId>(), stop_token_ids_, vocab_size,
                      request_.prompt_ngrams);
  }
  if (scores_prompt) prompt_logprobs_.reserve(request_.prompt.size());
  HoldEcho();
}

void Call::HoldEcho() {
  echoed_left_ = request_.echo_tokens;
  for (auto id = request_.prompt.end() - request_.echo_tokens; id != request_.prompt.end(); ++id) {
    held_.push_back({.token = *id, .logprob = 0, .top = {}});
    const TextStream::Push pushed = text_.Echo(*id);
    echo_.text += pushed.text;
    echo_.tokens_released += pushed.tokens_released;
  }
}

void Call::PutEchoBefore(TextStream::Push& push) {
  push.text.insert(0, std::exchange(echo_.text, {}));
  push.tokens_released += std::exchange(echo_.tokens_released, 0);
}

int64_t Call::TakeEchoed(int64_t tokens) {
  const int64_t echoed = std::min(tokens, echoed_left_);
  echoed_left_ -= echoed;
  return echoed;
}

bool Call::IsEos(TokenId token) const {
  return (constraint_ != nullptr || !request_.stopping.ignore_eos) &&
         std::binary_search(eos_token_ids_.begin(), eos_token_ids_.end(), token);
}

bool Call::IsStopToken(TokenId token) const {
  return std::binary_search(stop_token_ids_.begin(), stop_token_ids_.end(), token);
}

SampleRow Call::DrawRow(int token_row, DrawLists& lists) const {
  if (!wants_tokens()) return {.token_row = token_row, .target = 0};
  const SamplingParams& sampling = request_.sampling;
  SampleRow row = {.token_row = token_row,
                   .temperature = sampling.temperature,
                   .top_k = sampling.top_k,
                   .typical_p = sampling.typical_p,
                   .top_p = sampling.top_p,
                   .min_p = sampling.min_p,
                   .seed = sampling.seed,
                   .position = static_cast<uint64_t>(completion_tokens_),
                   .num_top = request_.logprobs ? request_.top_logprobs : 0};
  if (adjuster_ && !adjuster_->adjustments().empty()) {
    const std::span<const LogitAdjustment> list = adjuster_->adjustments();
    row.adjust_begin = static_cast<int32_t>(lists.adjustments.size());
    row.num_adjust = static_cast<int32_t>(list.size());
    lists.adjustments.insert(lists.adjustments.end(), list.begin(), list.end());
  }
  const bool bans = adjuster_ && adjuster_->bans();
  if (bans || constraint_ != nullptr) {
    const size_t words = static_cast<size_t>(MaskWords(vocab_size_)), begin = lists.masks.size();
    row.mask = static_cast<int32_t>(begin / words);
    lists.masks.resize(begin + words, ~uint32_t{0});
    const std::span<uint32_t> mask = std::span(lists.masks).subspan(begin);
    if (constraint_ != nullptr) std::copy_n(constraint_->mask().begin(), words, mask.begin());
    if (bans) adjuster_->Ban(mask);
  }
  return row;
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
    end =
        End{absl::InternalError(absl::StrFormat("the logits that score prompt token %d are not finite",
                                                request_.prompt_in_start + std::ssize(prompt_logprobs_) + 1)),
            EngineObserver::Outcome::kError, std::nullopt};
    return;
  }
  prompt_logprobs_.push_back(MakeOutput(result, top));
}

void Call::TakeMask() {
  if (!constraint_->accepted()) {
    end = End{absl::InternalError(absl::StrFormat(
                  "the constraint refuses token %d, which its mask had allowed", next_token_)),
              EngineObserver::Outcome::kError, std::nullopt};
  } else if (constraint_->must_end()) {
    EndWell(FinishReason::kConstraintComplete, EngineObserver::Outcome::kStop);
  } else if (completion_tokens_ >= request_.stopping.max_tokens) {
    EndWell(FinishReason::kMaxTokens, EngineObserver::Outcome::kLength);
  }
  ready = !end;
}

// Every token was banned.
void Call::EndUndrawn() {
  std::string by;
  const auto name = [&by](bool given, const char* what) {
    if (given) by += (by.empty() ? "" : ", ") + std::string(what);
  };
  name(!request_.sampling.allowed_token_ids.empty(), "allowed_token_ids");
  name(!request_.sampling.banned_token_ids.empty(), "banned_token_ids");
  name(request_.sampling.no_repeat_ngram_size > 0, "no_repeat_ngram_size");
  name(completion_tokens_ < request_.stopping.min_tokens, "min_tokens");
  name(constraint_ != nullptr, "the constraint");
  end = End{
      absl::FailedPreconditionError(absl::StrFormat("nothing is left to draw as token %d of the output: %s "
                                                    "ban every token",
                                                    completion_tokens_, by)),
      EngineObserver::Outcome::kUnsatisfiable, std::nullopt};
}

bool Call::CheckDraw(const SampleResult& result) {
  if (!result.finite) {
    end =
        End{absl::InternalError(absl::StrFormat("the logits of token %d are not finite", completion_tokens_)),
            EngineObserver::Outcome::kError, std::nullopt};
  } else if (result.token < 0) {
    EndUndrawn();
  }
  return !end;
}

void Call::AddFirstDraw(const SampleResult& result, std::span<const TokenLogprob> top) {
  if (end || !CheckDraw(result)) return;
  first_draws_.push_back(MakeOutput(result, top));
  if (first_draws_.size() == request_.first_draw_seeds.size()) {
    EndWell(FinishReason::kMaxTokens, EngineObserver::Outcome::kLength);
  }
}

bool Call::TakeFirstDraw(Clock::time_point now) {
  Begin(now);
  return AddOutput(*std::exchange(request_.first_draw, std::nullopt), now);
}

bool Call::AddToken(const SampleResult& result, std::span<const TokenLogprob> top, Clock::time_point now) {
  if (end || !CheckDraw(result)) return true;
  return AddOutput(MakeOutput(result, top), now);
}

bool Call::AddOutput(TokenOutput output, Clock::time_point now) {
  const TokenId token = output.token;
  if (completion_tokens_ == 0) {
    first_token_us_ = MicrosSinceSubmit(now);
  } else {
    token_gap_seconds_ = std::chrono::duration<double>(now - last_token_).count();
  }
  last_token_ = now;
  ++completion_tokens_;
  generation_->CountToken();
  next_token_ = token;
  if (request_.keep_state) drawn_.push_back(token);
  if (adjuster_) adjuster_->AddToken(token);
  held_.push_back(std::move(output));

  const bool eos = IsEos(token);
  const bool stop_token = !eos && IsStopToken(token);
  TextStream::Push pushed{};
  if (!(eos || stop_token) || !request_.skip_special_tokens) {
    const bool may_stop = completion_tokens_ > request_.stopping.min_tokens;
    pushed = may_stop ? text_.Add(token) : text_.Echo(token);
  }
  PutEchoBefore(pushed);
  if (eos || stop_token) {
    finished_.matched_token = token;
    EndWell(eos ? FinishReason::kEos : FinishReason::kStopToken, EngineObserver::Outcome::kStop);
  } else if (pushed.stopped) {
    finished_.matched_stop = request_.stopping.stop[pushed.stop_index];
    EndWell(FinishReason::kStopString, EngineObserver::Outcome::kStop);
  } else if (completion_tokens_ >= request_.stopping.max_tokens && constraint_ == nullptr) {
    EndWell(FinishReason::kMaxTokens, EngineObserver::Outcome::kLength);
  }
  if (end) {
    text_ended_ = true;
    finished_.text = std::move(pushed.text);
    if (!pushed.stopped) finished_.text += text_.Finish().text;
    return true;
  }
  if (pushed.tokens_released == 0 && pushed.text.empty()) return true;
  DeltaEvent delta{.text = std::move(pushed.text), .tokens = {}, .usage = usage(), .timing = TimingAt(now)};
  const auto released = held_.begin() + pushed.tokens_released;
  delta.tokens.assign(std::make_move_iterator(held_.begin()), std::make_move_iterator(released));
  held_.erase(held_.begin(), released);
  delta.echoed = TakeEchoed(pushed.tokens_released);
  has_news_ = true;
  return !generation_->PushDelta(std::move(delta));
}

void Call::EndCancelled() {
  end =
      End{absl::CancelledError("the call was cancelled"), EngineObserver::Outcome::kCancelled, std::nullopt};
}

void Call::EndExpired(Clock::time_point now, const EngineOptions& options) {
  if (request_.deadline && *request_.deadline <= now) {
    end = End{absl::DeadlineExceededError(absl::StrFormat("the deadline passed after %d of %d tokens",
                                                          completion_tokens_, request_.stopping.max_tokens)),
              EngineObserver::Outcome::kDeadline, std::nullopt};
  } else if (expires <= now) {
    end = End{absl::OkStatus(), EngineObserver::Outcome::kLength, FinishReason::kTimeBudget};
  } else {
    end = End{absl::ResourceExhaustedError(
                  absl::StrFormat("more than %d tokens waited to be read for longer than %d ms",
                                  options.max_undelivered_tokens, options.slow_reader_timeout.count())),
              EngineObserver::Outcome::kCancelled, std::nullopt};
  }
}

void Call::Finish(Clock::time_point now, ResidentStatePtr state) {
  if (end->reason) {
    if (!begun_) {  // a time budget may pass while it waits
      generation_->PushAccepted(
          {.prompt_tokens = prompt_tokens, .seed = request_.sampling.seed, .queue_us = 0});
    }
    if (!text_ended_) {
      TextStream::Push rest = text_.Finish();
      PutEchoBefore(rest);
      finished_.text = std::move(rest.text);
    }
    finished_.reason = *end->reason;
    finished_.echoed = TakeEchoed(std::ssize(held_));
    finished_.tokens = std::move(held_);
    finished_.prompt_logprobs = std::move(prompt_logprobs_);
    finished_.usage = usage();
    finished_.timing = TimingAt(now);
    generation_->PushFinished(std::move(finished_));
  }
  std::optional<FinalState> final_state;
  if (state != nullptr) {
    final_state = FinalState{.state = std::move(state),
                             .prompt_tokens = prompt_done,
                             .drawn = std::move(drawn_),
                             .first_draws = std::move(first_draws_)};
  }
  generation_->End(end->status, std::move(final_state));
}

}  // namespace efla
