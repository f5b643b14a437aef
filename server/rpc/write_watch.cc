#include "server/rpc/write_watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/check.h"

namespace efla {

void WriteWatch::Call::Began() {
  int64_t nothing = kNothing;
  since_.compare_exchange_strong(nothing, Clock::now().time_since_epoch().count(), std::memory_order_release,
                                 std::memory_order_relaxed);
}

WriteWatch::WriteWatch(std::chrono::milliseconds patience)
    : patience_(std::max(patience, std::chrono::milliseconds(1))), thread_([this] { Run(); }) {}

WriteWatch::~WriteWatch() {
  {
    const std::scoped_lock lock(mutex_);
    EFLA_CHECK(calls_.empty());
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

WriteWatch::Place WriteWatch::Enter(std::function<void()> cancel) {
  const std::scoped_lock lock(mutex_);
  calls_.emplace_back(std::move(cancel));
  return std::prev(calls_.end());
}

void WriteWatch::Leave(Place place) {
  const std::scoped_lock lock(mutex_);
  calls_.erase(place);
}

WriteWatch::Call* WriteWatch::FindLate(Clock::time_point now) {
  for (Call& call : calls_) {
    const int64_t since = call.since_.load(std::memory_order_acquire);
    if (since == Call::kNothing || call.was_cut()) continue;
    if (now - Clock::time_point(Clock::duration(since)) >= patience_) return &call;
  }
  return nullptr;
}

void WriteWatch::Run() {
  constexpr std::chrono::milliseconds kShortestRound{1};
  const std::chrono::milliseconds round = std::max(patience_ / 4, kShortestRound);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, round, [this] { return stopping_; })) {
    const Clock::time_point now = Clock::now();
    // One at a time: `cancel` may take the call, or others, from the list.
    while (Call* const late = FindLate(now)) {
      late->cut_.store(true, std::memory_order_release);
      const std::function<void()> cancel = late->cancel_;
      cancel();
    }
  }
}

}  // namespace efla
