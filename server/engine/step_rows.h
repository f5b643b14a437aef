// One step's rows: what the calls of a plan feed into the device, and what each of them gets out of it.
#ifndef EFLA_SERVER_ENGINE_STEP_ROWS_H_
#define EFLA_SERVER_ENGINE_STEP_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/op_args.h"
#include "model/state_pool.h"
#include "server/engine/call.h"
#include "server/engine/engine.h"
#include "server/engine/generation_impl.h"
#include "server/engine/pending_masks.h"
#include "server/engine/prefix_cache.h"
#include "server/engine/resident_state.h"
#include "server/engine/scheduler.h"

namespace efla {

// What a step's results mean for its calls.
struct StepEffects {
  std::vector<Call*> ended;                           // Call::end is set
  std::vector<Call*> lagging;                         // their readers hold too much that they have not taken
  std::vector<std::shared_ptr<GenerationImpl>> news;  // have events for their readers
};

// Build, input, Finish, TakeResults, and again: one object for all steps, so that none allocates. Engine
// thread only.
class StepRows {
 public:
  // All outlive it; `observer` may be null.
  StepRows(StatePool& pool, PrefixCache& cache, PendingMasks& masks, EngineObserver* observer)
      : pool_(pool), cache_(cache), masks_(masks), observer_(observer) {}

  // Lays the plan's tokens, segments and sample rows out; the plan stays as it is until TakeResults has
  // returned. `may_save`: the prefix cache gets the states that it wants, as long as there are slots for
  // what goes on from them. Appends the generations of the calls that begin to `news`.
  void Build(const StepPlan& plan, bool may_save, Clock::time_point now,
             std::vector<std::shared_ptr<GenerationImpl>>& news);
  // What has been built, valid until the next Build.
  StepInput input() const;
  int decode_rows() const { return static_cast<int>(write_slots_.size()); }
  int sample_rows() const { return static_cast<int>(samples_.size()); }

  // The device has computed the step, or failed: nothing reads what it read any more.
  void Finish() { read_states_.clear(); }
  // Hands each call what came of its rows, posts the masks of what has been drawn, publishes the states that
  // have proved good. Appends to `effects`.
  void TakeResults(const StepOutput& output, Clock::time_point now, StepEffects& effects);
  // Between steps: a call that was let in with a first draw begins. Appends to `effects`.
  void TakeFirstDraw(Call& call, Clock::time_point now, StepEffects& effects);

 private:
  // What a prompt has in this step, cut where states are to be saved; a piece's parts in order.
  struct PromptPart {
    size_t piece;  // of the plan's prefill
    int round;     // which of the piece's parts
    int64_t begin;
    int num_tokens;
    int32_t read_slot, write_slot;
    int first_row = 0;    // of its tokens in the step
    int32_t segment = 0;  // its index there
  };

  void AddRecurrentRow(Call& call, Clock::time_point now, std::vector<std::shared_ptr<GenerationImpl>>& news);
  bool SaveState(Call& call, int64_t position);
  void CutPiece(size_t piece_index, bool may_save);
  void LayOutPrompts();
  std::span<const TokenLogprob> TopOf(const StepOutput& output, size_t row) const {
    return output.top.subspan(output.rows[row].top_begin, samples_[row].num_top);
  }
  void TakePromptEnd(Call& call, const StepOutput& output, size_t row, Clock::time_point now,
                     StepEffects& effects);
  void TakeDraw(Call& call, const StepOutput& output, size_t row, Clock::time_point now,
                StepEffects& effects);
  void SeeToDraw(Call& call, Clock::time_point now);

  StatePool& pool_;
  PrefixCache& cache_;
  PendingMasks& masks_;
  EngineObserver* const observer_;

  const StepPlan* plan_ = nullptr;
  std::vector<TokenId> tokens_;
  std::vector<int32_t> read_slots_, write_slots_;  // of the recurrent rows
  std::vector<PromptPart> parts_;
  std::vector<PromptPart*> part_order_;
  std::vector<Segment> segments_;
  std::vector<SampleRow> samples_;
  std::vector<ResidentStatePtr> read_states_;  // read by the step, and no call's base any more
  DrawLists draw_lists_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_STEP_ROWS_H_
