#include <gtest/gtest.h>

#include <atomic>
#include <latch>

#include "server/rpc/worker_pool.h"

namespace efla {
namespace {

TEST(WorkerPoolTest, LargeWorkDoesNotHoldUpSmallWork) {
  WorkerPool pool(8, 1 << 20);
  std::latch small_done(1);
  std::atomic<bool> large_waited = false;
  ASSERT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] {
    small_done.wait();
    large_waited = true;
  }));
  ASSERT_TRUE(pool.TryPost(10, [&] { small_done.count_down(); }));
  small_done.wait();
  std::latch end(1);
  pool.Post(WorkerPool::kLargeBytes, [&] { end.count_down(); });
  end.wait();
  EXPECT_TRUE(large_waited);
}

TEST(WorkerPoolTest, RefusesWhatIsBeyondItsCapacityButNotWhatMustHappen) {
  std::atomic<int> ran = 0;
  {
    WorkerPool pool(2, 2 * WorkerPool::kLargeBytes);
    std::latch running(1), go(1);
    ASSERT_TRUE(pool.TryPost(1, [&] {
      running.count_down();
      go.wait();
    }));
    running.wait();
    EXPECT_TRUE(pool.TryPost(1, [&] { ++ran; }));
    EXPECT_TRUE(pool.TryPost(1, [&] { ++ran; }));
    EXPECT_FALSE(pool.TryPost(1, [&] { ++ran; }));
    EXPECT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] { ++ran; }));
    EXPECT_FALSE(pool.TryPost(3 * WorkerPool::kLargeBytes, [&] { ++ran; }));
    pool.Post(1, [&] { ++ran; });
    go.count_down();
  }  // runs what is queued
  EXPECT_EQ(ran, 4);
}

}  // namespace
}  // namespace efla
