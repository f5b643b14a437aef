#include "server/rpc/fair_lane.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace efla {

FairLane::FairLane(size_t max_jobs, size_t max_jobs_of_one)
    : max_jobs_(max_jobs), max_jobs_of_one_(max_jobs_of_one), thread_([this] { Run(); }) {}

FairLane::~FairLane() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool FairLane::TryPost(const std::string& owner, const void* id, std::function<void()> job) {
  {
    const std::scoped_lock lock(mutex_);
    if (num_jobs_ >= max_jobs_) return false;
    const auto found = jobs_.find(owner);
    if (found != jobs_.end() && found->second.size() >= max_jobs_of_one_) return false;
    if (found == jobs_.end()) turns_.push_back(owner);
    jobs_[owner].push_back({id, std::move(job)});
    ++num_jobs_;
  }
  changed_.notify_one();
  return true;
}

bool FairLane::Withdraw(const std::string& owner, const void* id) {
  std::function<void()> withdrawn;  // goes when the lane is free again
  const std::scoped_lock lock(mutex_);
  const auto found = jobs_.find(owner);
  if (found == jobs_.end()) return false;
  std::deque<Job>& jobs = found->second;
  const auto job = std::find_if(jobs.begin(), jobs.end(), [&](const Job& waits) { return waits.id == id; });
  if (job == jobs.end()) return false;
  withdrawn = std::move(job->run);
  jobs.erase(job);
  --num_jobs_;
  if (jobs.empty()) {
    jobs_.erase(found);
    turns_.erase(std::find(turns_.begin(), turns_.end(), owner));
  }
  return true;
}

std::chrono::milliseconds FairLane::RetryDelay() const {
  constexpr std::chrono::milliseconds kShortest{100}, kLongest{10'000};
  const std::scoped_lock lock(mutex_);
  const double seconds = mean_seconds_ * static_cast<double>(std::max<size_t>(turns_.size(), 1));
  return std::clamp(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)), kShortest, kLongest);
}

void FairLane::Run() {
  constexpr double kWeightOfNew = 0.2;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !turns_.empty(); });
    if (turns_.empty()) return;
    std::string owner = std::move(turns_.front());
    turns_.pop_front();
    const auto found = jobs_.find(owner);
    std::function<void()> job = std::move(found->second.front().run);
    found->second.pop_front();
    --num_jobs_;
    if (found->second.empty()) {
      jobs_.erase(found);
    } else {
      turns_.push_back(std::move(owner));
    }
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    job();
    job = nullptr;
    const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - begin;
    lock.lock();
    mean_seconds_ += kWeightOfNew * (lasted.count() - mean_seconds_);
  }
}

}  // namespace efla
