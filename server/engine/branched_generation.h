// Several continuations of one prompt, as one generation: samples of a prompt, or texts to be scored after
// it.
#ifndef EFLA_SERVER_ENGINE_BRANCHED_GENERATION_H_
#define EFLA_SERVER_ENGINE_BRANCHED_GENERATION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/generation.h"

namespace efla {

struct Branch {
  uint64_t seed = 0;
  std::vector<TokenId> continuation;  // what follows the prompt, in the chunkwise form like it
};

// The prompt is computed once, by a call (the stem) that keeps its state, and the branches are calls that
// start from that state. Samples: the stem computes all of the prompt and draws the first token of each.
// Continuations: it goes up to the prompt's last grid point only, and each branch computes the rest of the
// prompt with its continuation, since they share a chunk. So each branch gives the bits that a call of its
// own with the whole prompt gives. The prompt is computed by each branch for itself where there is no grid
// point before its continuation, or where the pool has no room for a state that waits
// (QueuePlaces::may_keep_state).
//
// Events: one AcceptedEvent; progress over the whole prompt; deltas and a FinishedEvent of each branch, which
// name it. Usage and timing in them are those that the branch would have as a call of its own, but for the
// prompt's time, which passed once. A branch that fails fails all.
class BranchedGeneration final : public Generation, public std::enable_shared_from_this<BranchedGeneration> {
 public:
  // Has a job run on a thread that may take its time; the job must run.
  using Post = std::function<void(std::function<void()>)>;

  // Admits all branches (at least one) to the queue, or none; errors as of Engine::Submit. `request` is what
  // they have in common: its prompt, and all else but the seed. `observer`, which may be null, is told of one
  // end. `ready` is as of Engine::Submit, but may be called on a thread of `post` as well, when no part of
  // the call is in the engine.
  static absl::StatusOr<std::shared_ptr<BranchedGeneration>> Submit(Engine& engine, GenerationRequest request,
                                                                    std::vector<Branch> branches, Post post,
                                                                    EngineObserver* observer,
                                                                    ReadyCallback ready);

  // Of the tokens that the largest job of `post` works on, in bytes.
  static size_t JobBytes(const GenerationRequest& request, const std::vector<Branch>& branches);

  // Generation, any thread.
  std::optional<Event> TakeEvent() override;
  std::optional<absl::Status> TakeEnd() override;
  std::optional<FinalState> TakeFinalState() override { return std::nullopt; }
  void Cancel() override;
  Usage usage() const override;  // of all branches; the prompt, which they have in common, counts once

  // Any thread. As Engine::Deliver.
  void Deliver();

 private:
  struct Part {
    std::shared_ptr<Generation> generation;
    bool ended = false;
    std::optional<FinishReason> reason;
  };
  // kStem: the common part of the prompt is being computed. kSubmitting: a job hands in the branches.
  enum class Phase { kStem, kSubmitting, kBranches, kEnded };
  // What is found with mutex_ held and done without it: it calls others.
  struct Ending {
    EngineObserver::Outcome outcome;
    Usage usage;
    Timing timing;
  };
  struct Todo {
    bool submits_branches = false;
    std::optional<Ending> end;
  };

  BranchedGeneration(Engine& engine, GenerationRequest request, std::vector<Branch> branches, Post post,
                     EngineObserver* observer, ReadyCallback ready);
  absl::Status Start();
  GenerationRequest StemRequest() const;
  // The callback of the parts.
  ReadyCallback PartReady();
  void Ready();
  // What `body` gives, run with mutex_ held; then does what it has found to be done.
  template <typename Body>
  auto Locked(Body body);
  void Do(Todo todo);
  // Once, on any thread, in Phase::kSubmitting.
  void SubmitBranches();
  // What the branches' requests are, but for the continuation and the seed.
  GenerationRequest CommonRequest();

  // With mutex_ held.
  std::optional<Event> NextEvent();
  // Takes what the stem has for the reader, the newest progress only, and its end.
  void AdvanceStem();
  std::optional<Event> TakeFromBranches();
  void EndStem(const absl::Status& status);
  void TakeEnds();
  bool Fix(int branch, Event& event);
  void FixCounts(Usage& usage, Timing& timing) const;
  void Fail(const absl::Status& status);
  void End(const absl::Status& status);
  Usage UsageSoFar() const;

  Engine& engine_;
  GenerationRequest request_;  // until the branches are submitted
  const int64_t prompt_tokens_;
  const int64_t all_prompt_tokens_;  // the continuations included
  const uint64_t seed_;
  const Clock::time_point arrived_;
  const Post post_;
  EngineObserver* const observer_;
  ReadyCallback ready_;

  mutable std::mutex mutex_;  // guards what follows; taken before the locks of the parts and of the engine
  Phase phase_ = Phase::kSubmitting;
  Todo todo_;
  std::vector<Branch> branches_;  // until they are submitted
  QueuePlacesPtr places_;         // likewise
  bool draws_in_stem_ = false;
  int64_t stem_tokens_ = 0;
  int64_t left_out_ = 0;  // of the prompt's first tokens, those that the branches' requests do not hold
  std::shared_ptr<Generation> stem_;
  std::optional<AcceptedEvent> stem_accepted_;  // for the reader, before the branches' events
  std::optional<ProgressEvent> stem_progress_;
  std::optional<FinishedEvent> stem_finished_;
  std::optional<Timing> first_timing_;    // of the first event of a branch whose prompt was computed
  ResidentStatePtr base_;                 // the stem's state, until the branches are submitted
  std::vector<TokenOutput> first_draws_;  // its draws, of each branch; likewise
  std::vector<Part> parts_;
  size_t next_part_ = 0;  // to be asked for an event
  bool accepted_ = false;
  bool cancelled_ = false;
  bool end_taken_ = false;
  absl::Status failure_;
  std::optional<absl::Status> end_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_BRANCHED_GENERATION_H_
