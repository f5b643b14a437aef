#include "server/engine/pending_masks.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace efla {
namespace {

constexpr int kThreads = 2;
// A step waits for masks that are under way, if it has something else to do, for so small a part of the last
// step's time: most come in time for it, and streams without a constraint hardly notice.
constexpr int kGraceDivisor = 32;
constexpr std::chrono::microseconds kMostGrace{500};

}  // namespace

PendingMasks::PendingMasks(std::mutex& mutex, std::function<void()> on_done)
    : mutex_(mutex),
      on_done_(std::move(on_done)),
      workers_(kThreads, [this](std::shared_ptr<ConstraintProgress> progress) {
        const std::lock_guard lock(mutex_);
        done_.push_back(std::move(progress));
        on_done_();
      }) {}

void PendingMasks::Post(std::shared_ptr<ConstraintProgress> progress) {
  ++posted_;
  workers_.Post(std::move(progress));
}

void PendingMasks::NoteStep(Clock::duration took) {
  grace_ = std::min<Clock::duration>(took / kGraceDivisor, kMostGrace);
}

void PendingMasks::Await(std::unique_lock<std::mutex>& lock, std::condition_variable& wake) {
  const Clock::duration grace = std::exchange(grace_, Clock::duration::zero());
  if (posted_ == done_.size() || grace <= Clock::duration::zero()) return;
  wake.wait_for(lock, grace, [this] { return posted_ == done_.size(); });
}

}  // namespace efla
