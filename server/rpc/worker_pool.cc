#include "server/rpc/worker_pool.h"

#include <utility>

namespace efla {

WorkerPool::WorkerPool(size_t max_jobs, size_t max_bytes) : max_jobs_(max_jobs), max_bytes_(max_bytes) {
  for (int i = 0; i < kSmallThreads; ++i) small_.threads.emplace_back([this] { Run(small_); });
  for (int i = 0; i < kLargeThreads; ++i) large_.threads.emplace_back([this] { Run(large_); });
}

WorkerPool::~WorkerPool() {
  for (Lane* lane : {&small_, &large_}) {
    {
      const std::scoped_lock lock(lane->mutex);
      lane->stopping = true;
    }
    lane->changed.notify_all();
    for (std::thread& thread : lane->threads) thread.join();
  }
}

bool WorkerPool::TryPost(size_t bytes, std::function<void()> job) {
  Lane& lane = LaneFor(bytes);
  {
    const std::scoped_lock lock(lane.mutex);
    if (lane.jobs.size() >= max_jobs_ || lane.bytes + bytes > max_bytes_) return false;
    lane.jobs.push_back({bytes, std::move(job)});
    lane.bytes += bytes;
  }
  lane.changed.notify_one();
  return true;
}

void WorkerPool::Post(size_t bytes, std::function<void()> job) {
  Lane& lane = LaneFor(bytes);
  {
    const std::scoped_lock lock(lane.mutex);
    lane.jobs.push_back({bytes, std::move(job)});
    lane.bytes += bytes;
  }
  lane.changed.notify_one();
}

void WorkerPool::Run(Lane& lane) {
  std::unique_lock lock(lane.mutex);
  while (true) {
    lane.changed.wait(lock, [&] { return lane.stopping || !lane.jobs.empty(); });
    if (lane.jobs.empty()) return;
    Job job = std::move(lane.jobs.front());
    lane.jobs.pop_front();
    lane.bytes -= job.bytes;
    lock.unlock();
    job.run();
    job.run = nullptr;
    lock.lock();
  }
}

}  // namespace efla
