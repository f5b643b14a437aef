// Threads for work that is too long for gRPC's callbacks or for the engine's delivery: tokenising, large
// replies.
#ifndef EFLA_SERVER_RPC_WORKER_POOL_H_
#define EFLA_SERVER_RPC_WORKER_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace efla {

// Two lanes by the size of what is worked on, so that a megabyte of text never holds up short requests: one
// thread for short work, two for large, of which one job may take seconds. Any thread.
class WorkerPool {
 public:
  static constexpr size_t kLargeBytes = 64 << 10;  // from here on, the lane for large work
  static constexpr int kSmallThreads = 1, kLargeThreads = 2;

  // Each lane queues at most `max_jobs` jobs, which work on at most `max_bytes` together.
  WorkerPool(size_t max_jobs, size_t max_bytes);
  ~WorkerPool();  // runs what is queued, then joins

  // False, and nothing done, when the lane is full.
  [[nodiscard]] bool TryPost(size_t bytes, std::function<void()> job);
  // For work that must happen (the end of a call that was admitted): never refused.
  void Post(size_t bytes, std::function<void()> job);

 private:
  struct Job {
    size_t bytes;
    std::function<void()> run;
  };
  struct Lane {
    std::mutex mutex;  // guards jobs, bytes and stopping
    std::condition_variable changed;
    std::deque<Job> jobs;
    size_t bytes = 0;  // of the jobs
    bool stopping = false;
    std::vector<std::thread> threads;
  };
  Lane& LaneFor(size_t bytes) { return bytes < kLargeBytes ? small_ : large_; }
  static void Run(Lane& lane);

  const size_t max_jobs_, max_bytes_;
  Lane small_, large_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_WORKER_POOL_H_
