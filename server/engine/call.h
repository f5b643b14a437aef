// The engine's side of one call: what it has computed and drawn, its text, and when it ends.
#ifndef EFLA_SERVER_ENGINE_CALL_H_
#define EFLA_SERVER_ENGINE_CALL_H_

#include <array>
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
#include "server/engine/logit_adjuster.h"
#include "server/engine/mask_workers.h"
#include "server/engine/prefix_cache.h"
#include "server/engine/resident_state.h"
#include "server/engine/scheduler.h"

namespace efla {

// What the draws of a step refer to, StepInput::adjustments and masks.
struct DrawLists {
  std::vector<LogitAdjustment> adjustments;
  std::vector<uint32_t> masks;
  void clear() {
    adjustments.clear();
    masks.clear();
  }
};

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

  // A state of the prompt's beginning that the prefix cache holds for this call, not published yet.
  struct Save {
    int64_t position;
    uint64_t id;
  };

  // `blocks`: of the prompt, for the prefix cache; empty: does without it. `eos_token_ids` is sorted and
  // outlives the call; `tokenizer` may be null.
  Call(GenerationRequest request, std::vector<PrefixCache::BlockHash> blocks,
       std::shared_ptr<GenerationImpl> generation, const Tokenizer* tokenizer,
       std::span<const TokenId> eos_token_ids, int64_t vocab_size, Clock::time_point now);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const GenerationRequest& request() const { return request_; }
  const std::shared_ptr<GenerationImpl>& generation() const { return generation_; }

  // False: only the prompt is to be computed. A row on its last token, if there is one, shows that the state
  // is good.
  bool wants_tokens() const { return request_.stopping.max_tokens > 0; }
  const std::vector<PrefixCache::BlockHash>& blocks() const { return blocks_; }
  const PrefixCache::BlockHash& block_before(int64_t position) const {
    return blocks_[static_cast<size_t>(position / kChunkTokens - 1)];
  }

  // The row that draws the next token from the logits of the step's token `token_row`, or looks at them only.
  // What it draws with goes to `lists`.
  SampleRow DrawRow(int token_row, DrawLists& lists) const;
  // The row that scores the prompt's token `position` from the logits of the token before it.
  SampleRow ScoreRow(int token_row, int64_t position) const;

  // The prompt begins with `tokens` tokens whose state the prefix cache had.
  void SkipCached(int64_t tokens);
  // The call's first token is about to enter a step.
  void Begin(Clock::time_point now);
  bool begun() const { return begun_; }
  // Its prompt has been computed up to prompt_done; its scores have been added. Ends the call when nothing is
  // to be drawn.
  void AddPromptPiece(Clock::time_point now);
  // The logits of the prompt's last token, where nothing is drawn from them.
  void AddCheck(const SampleResult& result);
  void AddScore(const SampleResult& result, std::span<const TokenLogprob> top);
  // One drawn token: adds it to the text, hands over what that releases, or sets `end`. False when the reader
  // lags.
  bool AddToken(const SampleResult& result, std::span<const TokenLogprob> top, Clock::time_point now);
  // One token of first_draw_seeds, in their order; the last ends the call.
  void AddFirstDraw(const SampleResult& result, std::span<const TokenLogprob> top);
  // The call is let in and begins with its first_draw, which is added as AddToken would.
  bool TakeFirstDraw(Clock::time_point now);
  // Null: no constraint. Otherwise the mask of the next token, which is not `ready` until it has been
  // computed.
  const std::shared_ptr<ConstraintProgress>& constraint() const { return constraint_; }
  // The mask is there, or the constraint has ended: `ready`, or `end`.
  void TakeMask();
  // Whether there are new events for the reader since the last time.
  bool TakeHasNews() { return std::exchange(has_news_, false); }
  // The token to feed next in the recurrent form: the one drawn last, or the pending one at first.
  TokenId next_token() const { return next_token_; }
  // Whether a token has been drawn: what it began with has been computed.
  bool has_drawn() const { return completion_tokens_ > 0; }
  // Seconds between the last two tokens; none before the second.
  std::optional<double> token_gap_seconds() const { return token_gap_seconds_; }

  // Sets `end`: its client has given it up.
  void EndCancelled();
  // Likewise: the scheduler has let go of it at `now`, for its deadline, its time budget or its slow reader.
  void EndExpired(Clock::time_point now, const EngineOptions& options);

  // Whether its slot is to outlive it.
  bool keeps_slot() const {
    return request_.keep_state && computed && end->outcome != EngineObserver::Outcome::kError &&
           end->outcome != EngineObserver::Outcome::kUnsatisfiable;
  }
  // Sends the events of `end` and ends the generation. `state`: what its slot has become, if it keeps it.
  void Finish(Clock::time_point now, ResidentStatePtr state);

  Usage usage() const {
    return {.prompt_tokens = prompt_tokens,
            .cached_tokens = cached_tokens_,
            .completion_tokens = completion_tokens_};
  }
  Timing TimingAt(Clock::time_point now) const;

  // The slot that its next token reads.
  int32_t read_slot() const {
    if (base != nullptr) return base->slot().slot;
    return computed ? slot.slot : StatePool::kZeroSlot;
  }

  SlotHandle slot;                       // written by each of its steps; slot.slot < 0: none
  ResidentStatePtr base;                 // what the next step reads in place of `slot`
  bool computed = false;                 // a step has written `slot`, or one that it had before
  std::array<int64_t, 2> save_points{};  // where the prefix cache wants its prompt's states; 0: none
  std::vector<Save> saves;               // at most two
  size_t index = 0;                      // in the engine's list
  std::optional<End> end;                // set: the call leaves before the next step

 private:
  void EndWell(FinishReason reason, EngineObserver::Outcome outcome) {
    end = End{absl::OkStatus(), outcome, reason};
  }
  void HoldEcho();
  // The echoed text that has not been sent yet, in front of `push`.
  void PutEchoBefore(TextStream::Push& push);
  // Of the next `tokens` tokens that leave, how many are echoed ones.
  int64_t TakeEchoed(int64_t tokens);
  void EndUndrawn();
  bool IsEos(TokenId token) const;
  bool IsStopToken(TokenId token) const;
  // False, and `end` is set: the row had nothing to draw from.
  bool CheckDraw(const SampleResult& result);
  bool AddOutput(TokenOutput output, Clock::time_point now);
  TokenOutput MakeOutput(const SampleResult& result, std::span<const TokenLogprob> top) const;
  int64_t MicrosSinceSubmit(Clock::time_point now) const;

  GenerationRequest request_;  // constant once constructed, but for first_draw
  const std::vector<PrefixCache::BlockHash> blocks_;
  const std::shared_ptr<GenerationImpl> generation_;
  const std::span<const TokenId> eos_token_ids_;
  std::vector<TokenId> stop_token_ids_;  // sorted; stop strings that spell a control token included
  TextStream text_;
  const int64_t vocab_size_;
  std::optional<LogitAdjuster> adjuster_;
  std::shared_ptr<ConstraintProgress> constraint_;

  bool begun_ = false;
  bool has_news_ = false;
  bool text_ended_ = false;  // finished_ has the text's end
  int64_t cached_tokens_ = 0;
  int64_t completion_tokens_ = 0;
  std::vector<TokenId> drawn_;            // with keep_state
  std::vector<TokenOutput> first_draws_;  // of first_draw_seeds
  TokenId next_token_ = -1;
  std::vector<TokenOutput> held_;  // echoed and drawn, their text not released yet
  TextStream::Push echo_;          // the prompt's text that the output begins with, until it is sent
  int64_t echoed_left_ = 0;        // of its tokens, those in held_
  std::vector<TokenOutput> prompt_logprobs_;
  FinishedEvent finished_;  // gathers what the last token released and matched
  int64_t queue_us_ = 0, prefill_us_ = 0, first_token_us_ = 0;
  Clock::time_point last_token_;
  std::optional<double> token_gap_seconds_;
};

// All sequences of the engine's scheduler are calls.
inline Call& AsCall(Sequence* sequence) { return static_cast<Call&>(*sequence); }

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_CALL_H_
