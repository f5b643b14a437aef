// The letter box between a call's reactor and the engine: events in, events out, and the wish to stop.
#ifndef EFLA_SERVER_ENGINE_GENERATION_IMPL_H_
#define EFLA_SERVER_ENGINE_GENERATION_IMPL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "server/engine/generation.h"

namespace efla {

class Call;
class GenerationImpl;

// The engine as a generation sees it. Called from any thread, with the generation's lock held, and never
// after End has returned.
class GenerationOwner {
 public:
  virtual void OnCancel(GenerationImpl& generation) = 0;
  // The tokens that a lagging generation held have been taken.
  virtual void OnCaughtUp(GenerationImpl& generation) = 0;

 protected:
  ~GenerationOwner() = default;
};

class GenerationImpl final : public Generation {
 public:
  GenerationImpl(GenerationOwner& owner, int64_t prompt_tokens, int max_undelivered_tokens,
                 ReadyCallback ready);

  // Generation, any thread.
  std::optional<Event> TakeEvent() override;
  std::optional<absl::Status> TakeEnd() override;
  std::optional<FinalState> TakeFinalState() override;
  void Cancel() override;
  Usage usage() const override;

  // Engine thread. Events leave in the order accepted, progress, delta, finished; an event of a kind that
  // still waits is merged (deltas) or replaced (progress).
  void PushAccepted(const AcceptedEvent& event);
  void PushProgress(const ProgressEvent& event);
  // True when more tokens wait than may: the generation is now lagging, until its reader has caught up.
  bool PushDelta(DeltaEvent&& event);
  void PushFinished(FinishedEvent&& event);
  // The last push. The owner will not be called any more.
  void End(absl::Status status, std::optional<FinalState> final_state);
  void SetCachedTokens(int64_t tokens) { cached_tokens_.store(tokens, std::memory_order_relaxed); }
  void CountToken() { completion_tokens_.fetch_add(1, std::memory_order_relaxed); }

  // Any thread.
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  bool lagging() const { return lagging_.load(std::memory_order_acquire); }
  bool end_taken() const { return end_taken_.load(std::memory_order_acquire); }

  // The engine's side of the call, null before and after it; guarded by the engine's lock.
  Call* call = nullptr;

 private:
  friend class Delivery;

  const int64_t prompt_tokens_;
  const int max_undelivered_tokens_;
  std::atomic<int64_t> cached_tokens_{0};
  std::atomic<int64_t> completion_tokens_{0};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> lagging_{false};
  std::atomic<bool> end_taken_{false};

  // Delivery's: where the generation stands in its queue. kAgain: a reason to run came up while `ready` was
  // running.
  enum class Turn : uint8_t { kIdle, kQueued, kRunning, kAgain, kClosed };
  std::atomic<Turn> turn_{Turn::kIdle};
  ReadyCallback ready_;  // delivery thread only

  std::mutex mutex_;  // guards what follows; taken before the engine's lock, never after it
  GenerationOwner* owner_;
  std::optional<AcceptedEvent> accepted_;
  std::optional<ProgressEvent> progress_;
  std::optional<DeltaEvent> delta_;
  std::optional<FinishedEvent> finished_;
  std::optional<absl::Status> end_;
  std::optional<FinalState> final_state_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_GENERATION_IMPL_H_
