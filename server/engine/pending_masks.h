// The masks that constrained calls wait for, from the time when they are posted until the engine takes them.
#ifndef EFLA_SERVER_ENGINE_PENDING_MASKS_H_
#define EFLA_SERVER_ENGINE_PENDING_MASKS_H_

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "server/engine/generation.h"
#include "server/engine/mask_workers.h"

namespace efla {

// Engine thread, but for what the workers do by themselves.
class PendingMasks {
 public:
  // `mutex`: the engine's. `on_done` is called by a worker, with it held, for each mask that has come.
  PendingMasks(std::mutex& mutex, std::function<void()> on_done);

  // Without the mutex held.
  void Post(std::shared_ptr<ConstraintProgress> progress);
  // A step has taken so long, from its submission to its results: Await may take a small part of that.
  void NoteStep(Clock::duration took);

  // With the mutex held by `lock`; `wake` is notified after on_done. Waits for all masks, once after each
  // step and not for long: most take less time than what the engine has done since their tokens were drawn.
  void Await(std::unique_lock<std::mutex>& lock, std::condition_variable& wake);
  // With the mutex held. Calls `visit` with each ConstraintProgress that has come since the last time.
  template <typename Visit>
  void TakeDone(const Visit& visit) {
    taken_.swap(done_);
    posted_ -= taken_.size();
    for (const std::shared_ptr<ConstraintProgress>& progress : taken_) visit(*progress);
    taken_.clear();
  }

 private:
  std::mutex& mutex_;
  const std::function<void()> on_done_;
  size_t posted_ = 0;        // and not taken, of calls that still run, or have left since
  Clock::duration grace_{};  // how long the next Await may wait
  std::vector<std::shared_ptr<ConstraintProgress>> taken_;  // TakeDone's
  std::vector<std::shared_ptr<ConstraintProgress>> done_;   // guarded by mutex_
  MaskWorkers workers_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_PENDING_MASKS_H_
