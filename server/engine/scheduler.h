// Which sequences run, and what each of them feeds into the next step.
//
// Pure: no device, no thread, no clock. Time is passed in, and the same calls give the same steps.
//
// The rules:
//  * Waiting sequences are admitted as long as there is a state slot and a place in the batch (max_running):
//    the one that has waited longest first, where a level of priority counts like kPriorityWorth of waiting.
//    Within a priority that is first come, first served, and nobody is overtaken by those that come more than
//    the levels between them later. A parked sequence keeps its slot and gives its place away; when its
//    reader has caught up it takes the next free place, before any waiting sequence.
//  * A step holds one token of every decoding sequence, the pending token of every sequence that begins with
//    one, and then pieces of prompts. The pieces share max(max_batch_tokens - tokens before them,
//    kChunkTokens) tokens: running streams bound what prompts may take, yet a prompt always advances. A step
//    never exceeds max(max_batch_tokens, max_running + kChunkTokens) tokens.
//  * A pending token goes into the first step after admission, alone: a step may not write a slot twice, so
//    the prompt begins with the step after it. Where there is no prompt, the sequence decodes from the start,
//    and the pending token is the first that it feeds.
//  * A prompt is cut only on multiples of kChunkTokens from its start, so its arithmetic does not depend on
//    how it was cut; its last piece may be ragged.
//  * A prompt alone takes all it can. Where several are under way, the oldest has half of the whole chunks
//    that fit (the odd chunk is its own every other step), and the others are dealt one chunk each in turn,
//    the longest unserved first, until nothing fits; what is left goes to the oldest. So among n prompts each
//    gets a chunk at least every 2 (n - 1) steps, and the oldest ends about as soon as if it were alone with
//    half the budget.
//  * A sequence that is not ready sits out: it decodes nothing, and at least the last piece of its prompt
//    waits.
//  * A prompt to be scored needs a sample row a token; its pieces shrink, on the grid, to the rows that are
//    left.
#ifndef EFLA_SERVER_ENGINE_SCHEDULER_H_
#define EFLA_SERVER_ENGINE_SCHEDULER_H_

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/generation.h"

namespace efla {

// What a level of Sequence::priority is worth, in time spent in the queue.
inline constexpr std::chrono::seconds kPriorityWorth{5};

// What the scheduler knows of a sequence. The owner embeds it, sets the first group before Enqueue and keeps
// the object alive and in place until the scheduler has let go of it (Remove, TakeExpired).
struct Sequence {
  bool has_pending = false;    // a token to be fed before the prompt
  int64_t prompt_tokens = 0;   // >= 1, or any number with a pending token
  bool scores_prompt = false;  // one sample row for every prompt token but the last
  // Sample rows on the last token of what it begins with, then one a step; 0: it draws nothing. More than
  // one, up to kChunkTokens, only where a prompt that is not scored is to be computed.
  int first_rows = 1;
  // False: what it draws with is not there yet. It takes part in no step that it would draw in; the owner may
  // change this between steps.
  bool ready = true;
  int priority = 0;  // kLowestPriority to kHighestPriority
  // Sequences of one group begin with the same tokens, which may have to be computed once only. 0: none.
  uint64_t shared_beginning = 0;
  Clock::time_point submitted;
  Clock::time_point expires =
      Clock::time_point::max();  // the earlier of its deadline and its time budget's end

  // kPending: its pending token goes into the next step, and a prompt follows.
  enum class Phase { kOutside, kWaiting, kPending, kPrefill, kDecode, kParked };
  Phase phase = Phase::kOutside;
  // Prompt tokens in this and earlier steps, or held by the state that it starts from: a multiple of
  // kChunkTokens before Enqueue, or with a pending token none or all. The owner may set it too, to a multiple
  // of kChunkTokens below prompt_tokens, between Admit and the next step: the tokens before it need not be
  // computed.
  int64_t prompt_done = 0;
  Clock::time_point parked_until =
      Clock::time_point::max();  // kParked and not caught up: when its reader's time is up
  uint64_t served_step = 0;      // the last step that held a piece of its prompt
  int64_t step_tokens = 0;       // of its prompt, in the step being planned
  // In the queue, and in the list of those that wait by their arrival.
  std::multimap<Clock::time_point, Sequence*>::iterator place;
  std::list<Sequence*>::iterator arrival;
};

// One step. Reused between steps, so that planning does not allocate.
struct StepPlan {
  struct Piece {
    Sequence* sequence;
    int64_t begin;  // first prompt token, a multiple of kChunkTokens
    int num_tokens;
    bool last() const { return begin + num_tokens == sequence->prompt_tokens; }
  };
  std::vector<Sequence*> decode;   // one token and one sample row each
  std::vector<Sequence*> pending;  // one token each, no sample row
  std::vector<Piece> prefill;      // oldest sequence first
  int prefill_tokens = 0;
  int sample_rows = 0;
  bool empty() const { return decode.empty() && pending.empty() && prefill.empty(); }
};

class Scheduler {
 public:
  struct Options {
    int max_batch_tokens = 512;           // a positive multiple of kChunkTokens
    int max_running = 32;                 // prefilling and decoding sequences
    int max_samples = 512;                // sample rows a step; at least max_running + kChunkTokens
    int max_queue = 256;                  // waiting sequences
    int64_t max_queued_tokens = 1 << 22;  // their prompt tokens together
  };

  explicit Scheduler(const Options& options);

  // Puts a sequence into the queue. RESOURCE_EXHAUSTED, naming the bound, when it does not fit. A
  // prompt longer than max_queued_tokens still fits into an empty queue.
  absl::Status Enqueue(Sequence& sequence);
  // The same whatever the bounds, for one that Reserve has kept a place for; Release gives the place back.
  void EnqueueReserved(Sequence& sequence);
  // Counts `sequences` with `tokens` prompt tokens altogether as waiting, until Release. RESOURCE_EXHAUSTED,
  // naming the bound, when the queue has not so many places left.
  absl::Status Reserve(int sequences, int64_t tokens);
  void Release(int sequences, int64_t tokens);

  // How many waiting sequences Admit would admit if there were slots enough.
  int admissible() const;
  // Gives free places in the batch to caught-up and then to waiting sequences, the latter while `free_slots`
  // last. Appends the newly admitted to `admitted`; each of them needs a slot before the next step.
  void Admit(int free_slots, std::vector<Sequence*>& admitted);

  // Plans the next step and counts its prompt tokens as done.
  void Next(StepPlan& plan);

  // kDecode only. The sequence leaves the batch until CatchUp, or expires at `until`.
  void Park(Sequence& sequence, Clock::time_point until);
  // kParked only. Its reader has caught up: it returns to the batch with the next Admit that has a place.
  void CatchUp(Sequence& sequence);

  // Lets go of a sequence in any phase.
  void Remove(Sequence& sequence);
  // Lets go of every sequence that `now` has passed, and appends it to `expired`.
  void TakeExpired(Clock::time_point now, std::vector<Sequence*>& expired);
  // No sequence expires before this; max() when none ever does.
  Clock::time_point next_expiry() const { return next_expiry_; }

  int waiting() const { return static_cast<int>(waiting_.size()); }
  int reserved() const { return reserved_; }  // places kept by Reserve
  int running() const { return static_cast<int>(running_.size()); }
  int parked() const { return static_cast<int>(parked_.size()); }
  int64_t queued_tokens() const { return queued_tokens_ + reserved_tokens_; }
  const Sequence* oldest_waiting() const { return arrivals_.empty() ? nullptr : arrivals_.front(); }
  // Of the prompt tokens that wait, those that are certain to be computed before `sequence`, which is not in
  // the queue yet, can be: of sequences that share their beginning, the longest prompt only. Looks at the
  // first few thousand.
  int64_t TokensAhead(const Sequence& sequence) const;

 private:
  // RESOURCE_EXHAUSTED unless so many more fit into the queue.
  absl::Status CheckRoom(int sequences, int64_t tokens) const;
  void Insert(Sequence& sequence);
  // Adds up to `limit` more tokens of the prompt to the step, as the grid and the sample rows allow.
  void Take(Sequence& sequence, int64_t limit);

  const Options options_;
  std::multimap<Clock::time_point, Sequence*> waiting_;  // the queue, by QueueTime
  std::list<Sequence*> arrivals_;                        // the same, by arrival
  std::vector<Sequence*> running_;  // in the order of admission; returned ones at the end
  std::vector<Sequence*> parked_;
  int64_t queued_tokens_ = 0;
  int reserved_ = 0;  // places kept, and the prompt tokens that will take them
  int64_t reserved_tokens_ = 0;
  Clock::time_point next_expiry_ = Clock::time_point::max();
  uint64_t step_ = 0;
  bool odd_chunk_to_oldest_ = true;

  // Of the step being planned.
  int64_t tokens_left_ = 0;
  int64_t rows_left_ = 0;
  std::vector<Sequence*> prompts_;  // prefilling sequences, oldest first
  std::vector<Sequence*> others_;   // all but the oldest, the longest unserved first
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_SCHEDULER_H_
