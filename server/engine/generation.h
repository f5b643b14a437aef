// One call in flight: what was asked, the events it has produced, and how it ended.
#ifndef EFLA_SERVER_ENGINE_GENERATION_H_
#define EFLA_SERVER_ENGINE_GENERATION_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "kernels/types.h"
#include "model/constraint/constraint.h"
#include "model/sampling.h"
#include "server/engine/resident_state.h"

namespace efla {

using Clock = std::chrono::steady_clock;
inline double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Places in the queue that are kept for requests which come later (Engine::Reserve), given back when the last
// reference goes. Must not outlive the engine.
class QueuePlaces {
 public:
  virtual ~QueuePlaces() = default;
  // Whether a state may be kept for the requests to start from: states that wait for their requests to run
  // have a share of the pool only, or none would be left to run in.
  virtual bool may_keep_state() const = 0;
};
using QueuePlacesPtr = std::shared_ptr<QueuePlaces>;

class NgramIndex;

inline constexpr int kLowestPriority = -8, kHighestPriority = 8;

struct TokenOutput {
  TokenId token = 0;
  float logprob = 0;                           // natural log, the model's own distribution
  std::vector<std::pair<TokenId, float>> top;  // best first
};

// What the engine is asked to do. Everything in it has been validated against the model by
// Engine::Submit's checks; the prompt holds ids only.
struct GenerationRequest {
  std::string request_id;  // for logs; the engine makes its own key
  // What the call continues; null: nothing, the zero state.
  ResidentStatePtr start;
  // Drawn by an earlier call on `start` and not fed yet: fed first, in the recurrent form. Needs `start`.
  std::optional<TokenId> pending_token;
  // Taken as it is, in the chunkwise form; its chunk grid begins with its first token. May be empty only with
  // a pending token, whose logits then give the first draw, or with `first_draw`.
  std::vector<TokenId> prompt;
  // Of the prompt's first tokens, as many `start` holds already: a multiple of kChunkTokens below the
  // prompt's length, or all of them with `first_draw`.
  int64_t prompt_in_start = 0;
  // With no_repeat_ngram_size: the index of the whole text before the output, which calls may share and whose
  // first tokens `prompt` may leave out. Null: that text is `prompt`.
  std::shared_ptr<const NgramIndex> prompt_ngrams;
  // Given: the call draws its first token once for each of these seeds, all from the logits of the prompt's
  // last token, and nothing after that (kMaxTokens); FinalState::first_draws has them. At most kChunkTokens.
  // With keep_state, max_tokens above 0 and a prompt that is not scored.
  std::vector<uint64_t> first_draw_seeds;
  // What such a call, with the same sampling, stopping and constraint, drew from `start`: taken as this
  // call's first token. The prompt needs no tokens then, and what it has lies in `start`; no pending token.
  std::optional<TokenOutput> first_draw;
  bool continues_text = false;  // `start` holds text: the output keeps the space of its first piece
  bool keep_state = false;      // Generation::TakeFinalState gives the state at the end
  // Where `start` is null: states of the prompt's beginning may be taken from and kept in the prefix cache.
  // Requests see only what was kept under their own salt.
  bool use_prefix_cache = true;
  std::string prefix_cache_salt;
  SamplingParams sampling;
  StopParams stopping;
  // What the output must be; null: anything. End tokens are allowed just where it is whole, whatever
  // ignore_eos says, and end the call then.
  std::shared_ptr<const Constraint> constraint;
  bool include_stop = false;        // keep a matched stop string in the text
  bool skip_special_tokens = true;  // control tokens add nothing to the text
  bool logprobs = false;            // report each drawn token's log-probability
  int top_logprobs = 0;             // and that many alternatives, drawn or scored: 0 to kMaxTopLogprobs
  bool prompt_logprobs = false;     // score the prompt: PromptLogprobs in the Finished event
  bool progress = false;            // Progress events while the prompt is computed
  // The prompt's last so many tokens come first in the output, without log-probabilities. Stop strings are
  // not looked for in them.
  int64_t echo_tokens = 0;
  // One of several that make up one call (BranchedGeneration): the observer is not told of its end.
  bool is_part = false;
  // Takes one of these places, so that the queue's bounds do not refuse it; nor does a drain.
  QueuePlacesPtr places;
  // When the call came, where that was before the submission: times and the time budget run from there.
  std::optional<Clock::time_point> arrived;
  int priority = 0;                                      // in the queue: see scheduler.h
  std::optional<Clock::time_point> deadline;             // passed: DEADLINE_EXCEEDED
  std::optional<std::chrono::microseconds> time_budget;  // passed: a normal end with the text so far
};

// kConstraintComplete: the output is whole and the constraint lets nothing follow.
enum class FinishReason { kEos, kStopString, kStopToken, kMaxTokens, kTimeBudget, kConstraintComplete };

struct Usage {
  int64_t prompt_tokens = 0;      // of the request; a pending token does not count
  int64_t cached_tokens = 0;      // of these, taken from the prefix cache
  int64_t completion_tokens = 0;  // drawn tokens, an end token included
};

// Microseconds from the submission, on a monotonic clock; 0 for what has not happened yet.
struct Timing {
  int64_t queue_us = 0;        // until the first step that held a token of it
  int64_t prefill_us = 0;      // from there until the prompt was computed
  int64_t first_token_us = 0;  // from the submission until the first drawn token
  int64_t total_us = 0;        // from the submission until this event
};

struct AcceptedEvent {  // once, when the first of its tokens enters a step, or before an end that comes
                        // sooner
  int64_t prompt_tokens = 0;
  uint64_t seed = 0;
  int64_t queue_us = 0;
};
struct ProgressEvent {
  int64_t prompt_tokens_done = 0, prompt_tokens_total = 0;
};
struct DeltaEvent {  // several tokens where the reader is slower than the engine
  std::string text;
  std::vector<TokenOutput> tokens;  // the tokens whose text this delta completes
  int64_t echoed = 0;               // the first so many of them are the prompt's
  Usage usage;
  Timing timing;
  int branch = 0;  // of a BranchedGeneration
};
struct FinishedEvent {  // last; not sent when the call ends in an error
  FinishReason reason = FinishReason::kMaxTokens;
  std::string text;                 // released by the end: what was held for a stop string or a character
  std::vector<TokenOutput> tokens;  // likewise
  int64_t echoed = 0;               // the first so many of them are the prompt's
  std::string matched_stop;         // kStopString
  TokenId matched_token = -1;       // kStopToken, kEos
  // Entry i scores prompt[prompt_in_start + i + 1], up to the last, or fewer when the time budget ended the
  // call before that.
  std::vector<TokenOutput> prompt_logprobs;
  Usage usage;
  Timing timing;
  int branch = 0;  // of a BranchedGeneration
};
using Event = std::variant<AcceptedEvent, ProgressEvent, DeltaEvent, FinishedEvent>;

// Where a call with keep_state ended.
struct FinalState {
  // Covers `start`, the pending token, the first prompt_tokens of the prompt, and all of `drawn` but the
  // last. Null when nothing was computed.
  ResidentStatePtr state;
  int64_t prompt_tokens = 0;
  std::vector<TokenId> drawn;            // the last one has not been fed: it is the next call's pending token
  std::vector<TokenOutput> first_draws;  // of GenerationRequest::first_draw_seeds, in their order; none fed
};

// Shared by the call's reactor and the engine thread.
class Generation {
 public:
  virtual ~Generation() = default;

  // Any thread. The next event, neighbouring deltas merged into one; nullopt when there is none now.
  virtual std::optional<Event> TakeEvent() = 0;
  // Any thread. How the call ended, once it has ended and every event has been taken; nullopt before. OK
  // after a FinishedEvent. Errors: CANCELLED, DEADLINE_EXCEEDED, INTERNAL (non-finite logits, device),
  // UNAVAILABLE (shutdown), FAILED_PRECONDITION (bans and constraint left no token to draw),
  // RESOURCE_EXHAUSTED (the reader was too slow for too long).
  virtual std::optional<absl::Status> TakeEnd() = 0;
  // Any thread, once, when a FinishedEvent has been taken or the call has ended otherwise, cancelled or
  // expired calls included. Nullopt without keep_state, and for calls whose state is of no use: never begun,
  // non-finite logits, a device error.
  virtual std::optional<FinalState> TakeFinalState() = 0;
  // Any thread, any number of times. The engine drops the sequence before its next step.
  virtual void Cancel() = 0;
  // Any thread. Tokens drawn so far, for the accounting of aborted calls.
  virtual Usage usage() const = 0;
};

// Called on the delivery thread whenever a generation has events or its end to be taken; never twice at once
// for one generation, never after it has returned from a call in which TakeEnd gave a value: the callback,
// with all it holds, is destroyed then. May call into gRPC, must not block.
using ReadyCallback = std::function<void(Generation&)>;

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_GENERATION_H_
