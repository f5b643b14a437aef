#include "server/rpc/event_messages.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace efla {
namespace {

std::string Bytes(const Tokenizer* tokenizer, TokenId id, bool at_start) {
  if (tokenizer == nullptr || id >= tokenizer->vocab_size()) return {};  // the vocabulary may be padded
  return std::string(tokenizer->PieceBytes(id, at_start));
}

void FillUsage(const ReplyContext& context, Usage usage, v1::Usage& message) {
  usage.prompt_tokens = context.prompt_tokens.value_or(usage.prompt_tokens);
  FillUsage(usage, message);
}

// Whether the token adds to a text, after which the next one's space is kept.
bool IsText(const ReplyContext& context, TokenId id) {
  return context.tokenizer == nullptr || id >= context.tokenizer->vocab_size() ||
         !context.tokenizer->is_control(id);
}

void FillLogprob(const TokenOutput& token, const Tokenizer* tokenizer, bool at_start,
                 v1::TokenLogprob& message) {
  message.set_token_id(static_cast<uint32_t>(token.token));
  message.set_logprob(token.logprob);
  message.set_bytes(Bytes(tokenizer, token.token, at_start));
  for (const auto& [id, logprob] : token.top) {
    v1::TokenLogprob::Alternative& alternative = *message.add_top();
    alternative.set_token_id(static_cast<uint32_t>(id));
    alternative.set_logprob(logprob);
    alternative.set_bytes(Bytes(tokenizer, id, at_start));
  }
}

// Delta, Finished, CompleteResponse and CompletedSample carry tokens in the same fields. The first `echoed`
// are the prompt's. All but a character's unfinished bytes of an echoed prompt come together, so that a
// text's first piece is among the first of these.
template <typename Message>
void AddTokens(const ReplyContext& context, const std::vector<TokenOutput>& tokens, int64_t echoed,
               Message& message) {
  bool at_start = context.echo_at_start && message.token_ids_size() == 0;
  for (const TokenOutput& token : tokens) {
    message.add_token_ids(static_cast<uint32_t>(token.token));
    if (!context.logprobs) continue;
    v1::TokenLogprob& entry = *message.add_logprobs();
    if (echoed-- > 0) {
      entry.set_token_id(static_cast<uint32_t>(token.token));
      entry.set_bytes(Bytes(context.tokenizer, token.token, at_start));
      at_start = at_start && !IsText(context, token.token);
    } else {
      FillLogprob(token, context.tokenizer, /*at_start=*/false, entry);
    }
  }
}

// Finished, CompleteResponse and CompletedSample say how it ended in the same fields.
template <typename Message>
void FillEnd(FinishedEvent& event, Message& message) {
  message.set_finish_reason(ToProto(event.reason));
  if (event.reason == FinishReason::kStopString) message.set_stop(std::move(event.matched_stop));
  if (event.matched_token >= 0) message.set_token_id(static_cast<uint32_t>(event.matched_token));
}

v1::CompletedSample& SampleOf(const ReplyContext& context, int branch, v1::CompleteResponse& message) {
  while (message.more_samples_size() < branch) {
    const uint64_t index = static_cast<uint64_t>(message.more_samples_size()) + 1;
    message.add_more_samples()->set_seed(context.seed + index);
  }
  return *message.mutable_more_samples(branch - 1);
}

void Fill(const ReplyContext& context, AcceptedEvent& event, v1::GenerateResponse& message) {
  v1::Accepted& accepted = *message.mutable_accepted();
  accepted.set_request_id(context.request_id);
  accepted.set_model(context.model);
  accepted.set_prompt_tokens(static_cast<uint64_t>(context.prompt_tokens.value_or(event.prompt_tokens)));
  accepted.set_seed(event.seed);
  accepted.set_queue_us(static_cast<uint64_t>(event.queue_us));
  accepted.set_session_revision(context.session_revision);
}

void Fill(const ReplyContext&, ProgressEvent& event, v1::GenerateResponse& message) {
  message.mutable_progress()->set_prompt_tokens_done(static_cast<uint64_t>(event.prompt_tokens_done));
  message.mutable_progress()->set_prompt_tokens_total(static_cast<uint64_t>(event.prompt_tokens_total));
}

void Fill(const ReplyContext& context, DeltaEvent& event, v1::GenerateResponse& message) {
  v1::Delta& delta = *message.mutable_delta();
  delta.set_text(std::move(event.text));
  delta.set_sample(static_cast<uint32_t>(event.branch));
  AddTokens(context, event.tokens, event.echoed, delta);
  FillUsage(context, event.usage, *delta.mutable_usage());
  FillTiming(event.timing, *delta.mutable_timing());
}

void Fill(const ReplyContext& context, FinishedEvent& event, v1::GenerateResponse& message) {
  v1::Finished& finished = *message.mutable_finished();
  finished.set_text(std::move(event.text));
  finished.set_sample(static_cast<uint32_t>(event.branch));
  AddTokens(context, event.tokens, event.echoed, finished);
  FillEnd(event, finished);
  FillUsage(context, event.usage, *finished.mutable_usage());
  FillTiming(event.timing, *finished.mutable_timing());
}

template <typename Sample, typename Part>
void AppendTokens(const ReplyContext& context, const Part& part, Sample& sample) {
  sample.mutable_text()->append(part.text);
  AddTokens(context, part.tokens, part.echoed, sample);
}

void Append(const ReplyContext&, AcceptedEvent&, v1::CompleteResponse&) {}

void Append(const ReplyContext&, ProgressEvent&, v1::CompleteResponse&) {}

void Append(const ReplyContext& context, DeltaEvent& event, v1::CompleteResponse& message) {
  if (event.branch == 0) return AppendTokens(context, event, message);
  AppendTokens(context, event, SampleOf(context, event.branch, message));
}

// The usage is of all samples; of the times, the total is that of the last to end and the others the first
// sample's.
void Append(const ReplyContext& context, FinishedEvent& event, v1::CompleteResponse& message) {
  message.set_request_id(context.request_id);
  message.set_model(context.model);
  message.set_seed(context.seed);
  const uint64_t drawn_by_others = message.usage().completion_tokens();
  FillUsage(context, event.usage, *message.mutable_usage());
  message.mutable_usage()->set_completion_tokens(drawn_by_others +
                                                 static_cast<uint64_t>(event.usage.completion_tokens));
  if (event.branch == 0) {
    FillTiming(event.timing, *message.mutable_timing());
    AppendTokens(context, event, message);
    FillEnd(event, message);
  } else {
    message.mutable_timing()->set_total_us(static_cast<uint64_t>(event.timing.total_us));
    v1::CompletedSample& sample = SampleOf(context, event.branch, message);
    AppendTokens(context, event, sample);
    FillEnd(event, sample);
  }
}

}  // namespace

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEos:
      return v1::FINISH_REASON_EOS;
    case FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case FinishReason::kMaxTokens:
      return v1::FINISH_REASON_MAX_TOKENS;
    case FinishReason::kConstraintComplete:
      return v1::FINISH_REASON_CONSTRAINT_COMPLETE;
    case FinishReason::kTimeBudget:
      return v1::FINISH_REASON_TIME_BUDGET;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

void FillUsage(const Usage& usage, v1::Usage& message) {
  message.set_prompt_tokens(static_cast<uint64_t>(usage.prompt_tokens));
  message.set_cached_tokens(static_cast<uint64_t>(std::min(usage.cached_tokens, usage.prompt_tokens)));
  message.set_completion_tokens(static_cast<uint64_t>(usage.completion_tokens));
}

void FillTiming(const Timing& timing, v1::Timing& message) {
  message.set_queue_us(static_cast<uint64_t>(timing.queue_us));
  message.set_prefill_us(static_cast<uint64_t>(timing.prefill_us));
  message.set_first_token_us(static_cast<uint64_t>(timing.first_token_us));
  message.set_total_us(static_cast<uint64_t>(timing.total_us));
}

void FillResponse(const ReplyContext& context, Event& event, v1::GenerateResponse& message) {
  message.Clear();
  std::visit([&](auto& one) { Fill(context, one, message); }, event);
}

void AppendMessage(const v1::GenerateResponse& message, v1::CompleteResponse& recorded) {
  const auto add = [&](const auto& part) {
    recorded.mutable_text()->append(part.text());
    recorded.mutable_token_ids()->MergeFrom(part.token_ids());
    recorded.mutable_logprobs()->MergeFrom(part.logprobs());
    *recorded.mutable_usage() = part.usage();
    *recorded.mutable_timing() = part.timing();
  };
  if (message.has_delta()) add(message.delta());
  if (message.has_finished()) {
    const v1::Finished& finished = message.finished();
    add(finished);
    recorded.set_finish_reason(finished.finish_reason());
    if (finished.has_stop()) recorded.set_stop(finished.stop());
    if (finished.has_token_id()) recorded.set_token_id(finished.token_id());
  }
}

void AppendEvent(const ReplyContext& context, Event& event, v1::CompleteResponse& message) {
  std::visit([&](auto& one) { Append(context, one, message); }, event);
}

void FillScore(const ReplyContext& context, std::span<const TokenId> prompt, const FinishedEvent& finished,
               v1::ScoreResponse& message) {
  message.set_request_id(context.request_id);
  message.set_model(context.model);
  message.mutable_token_ids()->Reserve(static_cast<int>(prompt.size()));
  message.mutable_logprobs()->Reserve(static_cast<int>(prompt.size()));
  double sum = 0;
  bool at_start = true;  // until the first token that has text
  for (size_t i = 0; i < prompt.size(); ++i) {
    message.add_token_ids(static_cast<uint32_t>(prompt[i]));
    v1::TokenLogprob& entry = *message.add_logprobs();
    if (i == 0) {
      entry.set_token_id(static_cast<uint32_t>(prompt[i]));
      entry.set_bytes(Bytes(context.tokenizer, prompt[i], at_start));
    } else {
      FillLogprob(finished.prompt_logprobs.at(i - 1), context.tokenizer, at_start, entry);
      sum += finished.prompt_logprobs[i - 1].logprob;
    }
    if (IsText(context, prompt[i])) at_start = false;
  }
  message.set_sum_logprob(sum);
  FillUsage(context, finished.usage, *message.mutable_usage());
  FillTiming(finished.timing, *message.mutable_timing());
}

void FillScore(const ReplyContext& context, std::span<const TokenId> continuation,
               const FinishedEvent& finished, int top_logprobs, v1::ContinuationScore& message) {
  const std::span<const TokenOutput> scores = std::span(finished.prompt_logprobs).last(continuation.size());
  double sum = 0;
  bool is_greedy = true;
  uint64_t text_bytes = 0;
  for (const TokenOutput& score : scores) {
    is_greedy = is_greedy && score.top.front().first == score.token;
    sum += score.logprob;
    message.add_token_ids(static_cast<uint32_t>(score.token));
    v1::TokenLogprob& entry = *message.add_logprobs();
    FillLogprob(score, context.tokenizer, /*at_start=*/false, entry);
    text_bytes += entry.bytes().size();
    while (entry.top_size() > top_logprobs) entry.mutable_top()->RemoveLast();
  }
  message.set_sum_logprob(sum);
  message.set_is_greedy(is_greedy);
  message.set_text_bytes(text_bytes);
}

}  // namespace efla
