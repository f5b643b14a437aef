// From the engine's events to messages.
#ifndef EFLA_SERVER_RPC_EVENT_MESSAGES_H_
#define EFLA_SERVER_RPC_EVENT_MESSAGES_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "efla/v1/generation.pb.h"
#include "model/tokenizer.h"
#include "server/engine/generation.h"

namespace efla {

// What events do not carry.
struct ReplyContext {
  std::string request_id;
  std::string model;
  const Tokenizer* tokenizer = nullptr;  // null: tokens have no bytes
  bool logprobs = false;
  uint64_t seed = 0;
  // Of a session's turn: the tokens that the request added, not those that waited to be computed with them;
  // and the revision that it began with.
  std::optional<int64_t> prompt_tokens = {};
  uint64_t session_revision = 0;
  bool echo_at_start = true;  // an echoed prompt begins a text: its first piece loses its space
};

// One event as the stream's next message; text is moved out of the event.
void FillResponse(const ReplyContext& context, Event& event, v1::GenerateResponse& message);

// Adds a stream's message to what is recorded of the stream: text, tokens, usage, how it ended.
void AppendMessage(const v1::GenerateResponse& message, v1::CompleteResponse& recorded);

// Adds an event to a reply that holds the whole answer.
void AppendEvent(const ReplyContext& context, Event& event, v1::CompleteResponse& message);

// `finished` is that of a request with prompt_logprobs for `prompt`.
void FillScore(const ReplyContext& context, std::span<const TokenId> prompt, const FinishedEvent& finished,
               v1::ScoreResponse& message);

// `finished` is that of a request with prompt_logprobs, and at least one of top_logprobs, whose prompt ends
// with `continuation`. `top_logprobs`: how many alternatives are wanted.
void FillScore(const ReplyContext& context, std::span<const TokenId> continuation,
               const FinishedEvent& finished, int top_logprobs, v1::ContinuationScore& message);

void FillUsage(const Usage& usage, v1::Usage& message);
void FillTiming(const Timing& timing, v1::Timing& message);

// As in messages: "FINISH_REASON_EOS".
v1::FinishReason ToProto(FinishReason reason);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_EVENT_MESSAGES_H_
