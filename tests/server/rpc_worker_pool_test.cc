#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <string>
#include <vector>

#include "server/rpc/fair_lane.h"
#include "server/rpc/worker_pool.h"

namespace efla {
namespace {

TEST(WorkerPoolTest, LargeWorkDoesNotHoldUpSmallWork) {
  std::atomic<int> large_waited = 0;
  std::latch small_done(1);
  {
    WorkerPool pool(8, 1 << 20);
    for (int i = 0; i < WorkerPool::kLargeThreads + 1; ++i) {
      ASSERT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] {
        small_done.wait();
        ++large_waited;
      }));
    }
    ASSERT_TRUE(pool.TryPost(10, [&] { small_done.count_down(); }));
    small_done.wait();
    EXPECT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] { ++large_waited; }));
  }  // runs what is queued
  EXPECT_EQ(large_waited, WorkerPool::kLargeThreads + 2);
}

TEST(WorkerPoolTest, LargeWorkThatTakesLongDoesNotHoldUpOtherLargeWork) {
  std::latch other_done(1);
  WorkerPool pool(8, 1 << 20);
  ASSERT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] { other_done.wait(); }));
  ASSERT_TRUE(pool.TryPost(WorkerPool::kLargeBytes, [&] { other_done.count_down(); }));
  other_done.wait();
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

// A lane whose thread is busy until Release.
struct BusyLane {
  BusyLane(size_t max_jobs, size_t max_jobs_of_one) : lane(max_jobs, max_jobs_of_one) {
    EXPECT_TRUE(lane.TryPost("busy", this, [this] {
      running.count_down();
      go.wait();
    }));
    running.wait();
  }
  void Release() { go.count_down(); }

  std::latch running{1}, go{1};
  FairLane lane;
};

TEST(FairLaneTest, OwnersTakeTurns) {
  std::vector<std::string> ran;
  {
    BusyLane busy(16, 8);
    const std::vector<std::string> jobs = {"a1", "a2", "a3", "b1", "c1", "b2"};
    for (const std::string& job : jobs) {
      EXPECT_TRUE(busy.lane.TryPost(job.substr(0, 1), &job, [&ran, job] { ran.push_back(job); }));
    }
    busy.Release();
  }  // runs what waits
  EXPECT_EQ(ran, (std::vector<std::string>{"a1", "b1", "c1", "a2", "b2", "a3"}));
}

TEST(FairLaneTest, AnOwnerTakesPartOfThePlacesAndAllTogetherNoMoreThanThereAre) {
  int ran = 0;
  {
    BusyLane busy(4, 2);
    const int ids[6] = {};
    const auto post = [&](const char* owner, int id) {
      return busy.lane.TryPost(owner, &ids[id], [&] { ++ran; });
    };
    EXPECT_TRUE(post("a", 0));
    EXPECT_TRUE(post("a", 1));
    EXPECT_FALSE(post("a", 2)) << "the owner's part";
    EXPECT_TRUE(post("b", 3));
    EXPECT_TRUE(post("c", 4));
    EXPECT_FALSE(post("d", 5)) << "all of them";
    EXPECT_GE(busy.lane.RetryDelay(), std::chrono::milliseconds(100));
    EXPECT_TRUE(busy.lane.Withdraw("a", &ids[0]));
    EXPECT_TRUE(post("d", 5)) << "what is taken back makes room";
    busy.Release();
  }
  EXPECT_EQ(ran, 4);
}

TEST(FairLaneTest, WhatWaitsCanBeTakenBackAndWhatRunsCannot) {
  std::vector<std::string> ran;
  {
    BusyLane busy(16, 8);
    const std::vector<std::string> jobs = {"a1", "a2", "b1", "c1"};
    for (const std::string& job : jobs) {
      EXPECT_TRUE(busy.lane.TryPost(job.substr(0, 1), &job, [&ran, job] { ran.push_back(job); }));
    }
    EXPECT_FALSE(busy.lane.Withdraw("busy", &busy)) << "it runs";
    EXPECT_FALSE(busy.lane.Withdraw("b", &jobs[0])) << "it is another's";
    EXPECT_TRUE(busy.lane.Withdraw("a", &jobs[0]));
    EXPECT_TRUE(busy.lane.Withdraw("b", &jobs[2])) << "the owner's only one";
    EXPECT_FALSE(busy.lane.Withdraw("b", &jobs[2]));
    busy.Release();
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"a2", "c1"}));
}

}  // namespace
}  // namespace efla
