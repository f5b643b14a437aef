#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace efla {
namespace {

TEST(ThreadPoolTest, EveryIndexRunsOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t count : {0, 1, 2, 7, 100, 40000, 100001}) {
      std::vector<std::atomic<int>> runs(count);
      pool.ParallelFor(count, [&](int64_t index, int thread) {
        ASSERT_TRUE(thread >= 0 && thread < threads);
        runs[index].fetch_add(1);
      });
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(runs[i].load(), 1) << i << " of " << count;
    }
  }
}

TEST(ThreadPoolTest, ManyShortLoopsAndWakesFromSleep) {
  ThreadPool pool(4);
  std::vector<int64_t> sums(64);
  for (int loop = 0; loop < 20000; ++loop) {
    pool.ParallelFor(64, [&](int64_t index, int) { sums[index] += index; });
    if (loop % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(sums[i], 20000 * i);
}

TEST(ThreadPoolTest, ThreadsOfOneLoopRunAtTheSameTime) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  pool.ParallelFor(2, [&](int64_t, int) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

}  // namespace
}  // namespace efla
