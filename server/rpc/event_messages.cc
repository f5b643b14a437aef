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

void FillUsage(const ReplyContext& context, const Usage& usage, v1::Usage& message) {
  const int64_t prompt_tokens = context.prompt_tokens.value_or(usage.prompt_tokens);
  message.set_prompt_tokens(static_cast<uint64_t>(prompt_tokens));
  message.set_cached_tokens(static_cast<uint64_t>(std::min(usage.cached_tokens, prompt_tokens)));
  message.set_completion_tokens(static_cast<uint64_t>(usage.completion_tokens));
}

void FillTiming(const Timing& timing, v1::Timing& message) {
  message.set_queue_us(static_cast<uint64_t>(timing.queue_us));
  message.set_prefill_us(static_cast<uint64_t>(timing.prefill_us));
  message.set_first_token_us(static_cast<uint64_t>(timing.first_token_us));
  message.set_total_us(static_cast<uint64_t>(timing.total_us));
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

// Delta, Finished and CompleteResponse carry tokens in the same fields.
template <typename Message>
void AddTokens(const ReplyContext& context, const std::vector<TokenOutput>& tokens, Message& message) {
  for (const TokenOutput& token : tokens) {
    message.add_token_ids(static_cast<uint32_t>(token.token));
    if (context.logprobs) {
      FillLogprob(token, context.tokenizer, /*at_start=*/false, *message.add_logprobs());
    }
  }
}

// Finished and CompleteResponse say how it ended in the same fields.
template <typename Message>
void FillEnd(const ReplyContext& context, FinishedEvent& event, Message& message) {
  message.set_finish_reason(ToProto(event.reason));
  if (event.reason == FinishReason::kStopString) message.set_stop(std::move(event.matched_stop));
  if (event.matched_token >= 0) message.set_token_id(static_cast<uint32_t>(event.matched_token));
  FillUsage(context, event.usage, *message.mutable_usage());
  FillTiming(event.timing, *message.mutable_timing());
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
  AddTokens(context, event.tokens, delta);
  FillUsage(context, event.usage, *delta.mutable_usage());
  FillTiming(event.timing, *delta.mutable_timing());
}

void Fill(const ReplyContext& context, FinishedEvent& event, v1::GenerateResponse& message) {
  v1::Finished& finished = *message.mutable_finished();
  finished.set_text(std::move(event.text));
  AddTokens(context, event.tokens, finished);
  FillEnd(context, event, finished);
}

void Append(const ReplyContext&, AcceptedEvent&, v1::CompleteResponse&) {}

void Append(const ReplyContext&, ProgressEvent&, v1::CompleteResponse&) {}

void Append(const ReplyContext& context, DeltaEvent& event, v1::CompleteResponse& message) {
  message.mutable_text()->append(event.text);
  AddTokens(context, event.tokens, message);
}

void Append(const ReplyContext& context, FinishedEvent& event, v1::CompleteResponse& message) {
  message.set_request_id(context.request_id);
  message.set_model(context.model);
  message.set_seed(context.seed);
  message.mutable_text()->append(event.text);
  AddTokens(context, event.tokens, message);
  FillEnd(context, event, message);
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
    case FinishReason::kTimeBudget:
      return v1::FINISH_REASON_TIME_BUDGET;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
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
    const bool is_text = context.tokenizer == nullptr || prompt[i] >= context.tokenizer->vocab_size() ||
                         !context.tokenizer->is_control(prompt[i]);
    if (is_text) at_start = false;
  }
  message.set_sum_logprob(sum);
  FillUsage(context, finished.usage, *message.mutable_usage());
  FillTiming(finished.timing, *message.mutable_timing());
}

}  // namespace efla
