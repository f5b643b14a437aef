#include "server/rpc/session_workers.h"

#include <utility>

namespace efla {

SessionWorkers::SessionWorkers(int threads, size_t max_jobs) : max_jobs_(max_jobs) {
  for (Lane* lane : {&begins_, &ends_}) {
    for (int i = 0; i < threads; ++i) lane->threads.emplace_back([lane] { Run(*lane); });
  }
}

SessionWorkers::~SessionWorkers() {
  // What begins may still post an end.
  for (Lane* lane : {&begins_, &ends_}) {
    {
      const std::scoped_lock lock(lane->mutex);
      lane->stopping = true;
    }
    lane->changed.notify_all();
    for (std::thread& thread : lane->threads) thread.join();
  }
}

bool SessionWorkers::TryPost(std::function<void()> job) {
  {
    const std::scoped_lock lock(begins_.mutex);
    if (begins_.jobs.size() >= max_jobs_) return false;
    begins_.jobs.push_back(std::move(job));
  }
  begins_.changed.notify_one();
  return true;
}

void SessionWorkers::PostEnd(std::function<void()> job) {
  {
    const std::scoped_lock lock(ends_.mutex);
    ends_.jobs.push_back(std::move(job));
  }
  ends_.changed.notify_one();
}

void SessionWorkers::Run(Lane& lane) {
  std::unique_lock lock(lane.mutex);
  while (true) {
    lane.changed.wait(lock, [&] { return lane.stopping || !lane.jobs.empty(); });
    if (lane.jobs.empty()) return;
    std::function<void()> job = std::move(lane.jobs.front());
    lane.jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace efla
