// A fixed team of threads for short parallel loops, a few microseconds each.
#ifndef EFLA_KERNELS_CPU_THREAD_POOL_H_
#define EFLA_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace efla {

// One thread at a time calls ParallelFor; it takes part as thread 0. Workers spin shortly between loops, then
// sleep. Which thread runs which index is left to chance, so a body may write only what belongs to its index
// or to its thread.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // >= 1, the caller included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(index, thread) for each index in [0, count), thread in [0, num_threads); returns when all are done.
  template <typename Body>
  void ParallelFor(int64_t count, const Body& body) {
    Run(count, {[](const void* context, int64_t index, int thread) {
                  (*static_cast<const Body*>(context))(index, thread);
                },
                &body});
  }

 private:
  struct Loop {
    void (*body)(const void* context, int64_t index, int thread) = nullptr;
    const void* context = nullptr;
    int64_t count = 0;
    int64_t grain = 1;  // indices a claim takes
    uint32_t claims = 0;
  };

  void Run(int64_t count, Loop loop);
  void Work(int thread);
  // Takes one claim of the current loop and runs it; false when none is left.
  bool RunOneClaim(int thread);

  // The current loop: written by the caller while no claim is left or running, read by whoever holds a claim.
  Loop loop_;
  // Low 16 bits: claims left of the current loop; high 16 bits: counts loops, so that sleepers see a new one.
  alignas(64) std::atomic<uint32_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};  // claims done of the current loop
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_THREAD_POOL_H_
