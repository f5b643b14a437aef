// The engine's side of one call: what it has computed and drawn, its text, and when it ends.
#ifndef EFLA_SERVER_ENGINE_CALL_H_
#define EFLA_SERVER_ENGINE_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/op_args.h"
#include "model/state_pool.h"
#include "model/text_stream.h"
#include "model/tokenizer.h"
#include "server/engine/engine.h"
#include "server/engine/generation_impl.h"
#include "server/engine/scheduler.h"

namespace efla {

// Threads: the part that is a Sequence and `end` before the call runs are guarded by the engine's lock;
// everything else belongs to the engine thread.
class Call : public Sequence {
 public:
  // How a call ends: a status of its own when it fails, or a reason when it ends well. A reason without an
  // event flushes the text that is still held.
  struct End {
    absl::Status status;
    EngineObserver::Outcome outcome = EngineObserver::Outcome::kError;
    std::optional<FinishReason> reason;
  };

  // `eos_token_ids` is sorted and outlives the call; `tokenizer` may be null.
  Call(GenerationRequest request, std::shared_ptr<GenerationImpl> generation, const Tokenizer* tokenizer,
       std::span<const TokenId> eos_token_ids, Clock::time_point now);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const GenerationRequest& request() const { return request_; }
  const std::shared_ptr<GenerationImpl>& generation() const { return generation_; }

  // The row that draws the next token from the logits of the step's token `token_row`.
  SampleRow DrawRow(int token_row) const;
  // The row that scores the prompt's token `position` from the logits of the token before it.
  SampleRow ScoreRow(int token_row, int64_t position) const;

  // The call's first token is about to enter a step.
  void Begin(Clock::time_point now);
  // Its prompt has been computed up to prompt_done; its scores have been added.
  void AddPromptPiece(Clock::time_point now);
  void AddScore(const SampleResult& result, std::span<const TokenLogprob> top);
  // One drawn token: adds it to the text, hands over what that releases, or sets `end`. False when the reader
  // lags.
  bool AddToken(const SampleResult& result, std::span<const TokenLogprob> top, Clock::time_point now);
  // Whether there are new events for the reader since the last time.
  bool TakeHasNews() { return std::exchange(has_news_, false); }
  // The token to feed next: the one drawn last.
  TokenId next_token() const { return next_token_; }
  // Seconds between the last two tokens; none before the second.
  std::optional<double> token_gap_seconds() const { return token_gap_seconds_; }

  // Sends the events of `end` and ends the generation.
  void Finish(Clock::time_point now);

  Usage usage() const { return {prompt_tokens, completion_tokens_}; }
  Timing TimingAt(Clock::time_point now) const;

  SlotHandle slot;         // slot.slot < 0: none
  size_t index = 0;        // in the engine's list
  std::optional<End> end;  // set: the call leaves before the next step

 private:
  void EndWell(FinishReason reason, EngineObserver::Outcome outcome) {
    end = End{absl::OkStatus(), outcome, reason};
  }
  bool IsEos(TokenId token) const;
  bool IsStopToken(TokenId token) const;
  TokenOutput MakeOutput(const SampleResult& result, std::span<const TokenLogprob> top) const;
  int64_t MicrosSinceSubmit(Clock::time_point now) const;

  const GenerationRequest request_;
  const std::shared_ptr<GenerationImpl> generation_;
  const std::span<const TokenId> eos_token_ids_;
  std::vector<TokenId> stop_token_ids_;  // sorted; stop strings that spell a control token included
  TextStream text_;

  bool has_news_ = false;
  int64_t completion_tokens_ = 0;
  TokenId next_token_ = -1;
  std::vector<TokenOutput> held_;  // drawn, their text not released yet
  std::vector<TokenOutput> prompt_logprobs_;
  FinishedEvent finished_;  // gathers what the last token released and matched
  int64_t queue_us_ = 0, prefill_us_ = 0, first_token_us_ = 0;
  Clock::time_point last_token_;
  std::optional<double> token_gap_seconds_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_CALL_H_
