// A tenant's limits, with a clock of the test's own; and trace contexts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/tenant_use.h"
#include "server/trace_context.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Clock::time_point kStart{seconds(1000)};

TEST(TokenBucketTest, LetsABurstThroughAndThenTheRate) {
  TokenBucket bucket;
  bucket.Set(/*per_second=*/2, /*capacity=*/3, kStart);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(bucket.Wait(1, kStart).count(), 0) << i;
    bucket.Take(1, kStart);
  }
  EXPECT_DOUBLE_EQ(bucket.Wait(1, kStart).count(), 0.5);
  EXPECT_DOUBLE_EQ(bucket.Wait(1, kStart + milliseconds(200)).count(), 0.3);
  EXPECT_EQ(bucket.Wait(1, kStart + milliseconds(500)).count(), 0);
  EXPECT_DOUBLE_EQ(bucket.Wait(4, kStart + seconds(60)).count(), 0)
      << "more than it holds needs it full only";
}

TEST(TokenBucketTest, ADebtIsWaitedOff) {
  TokenBucket bucket;
  bucket.Set(10, 10, kStart);
  bucket.Take(30, kStart);
  EXPECT_DOUBLE_EQ(bucket.Wait(1, kStart).count(), 2.1);
  bucket.Take(-30, kStart);
  EXPECT_EQ(bucket.Wait(10, kStart).count(), 0);
}

TEST(TokenBucketTest, ANewRateKeepsWhatIsInIt) {
  TokenBucket bucket;
  EXPECT_EQ(bucket.Wait(1e9, kStart).count(), 0) << "no limit";
  bucket.Set(1, 10, kStart);
  bucket.Take(8, kStart);
  bucket.Set(1, 5, kStart);
  EXPECT_DOUBLE_EQ(bucket.Wait(5, kStart).count(), 3);
  bucket.Set(0, 0, kStart);
  EXPECT_EQ(bucket.Wait(5, kStart).count(), 0);
}

TEST(TenantUseTest, RequestRateIsRefusedWithTheRealWait) {
  TenantUse use("acme");
  use.SetLimits({.requests_per_second = 4}, kStart);
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(use.AdmitCall(kStart)) << i;
  const auto refusal = use.AdmitCall(kStart);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->limit, TenantLimit::kRequests);
  EXPECT_NE(refusal->message.find("4"), std::string::npos) << refusal->message;
  EXPECT_TRUE(use.AdmitCall(kStart + milliseconds(240)));
  EXPECT_GE(refusal->retry, milliseconds(250));
  EXPECT_LE(refusal->retry, milliseconds(252));
  EXPECT_FALSE(use.AdmitCall(kStart + refusal->retry)) << "whoever waits so long is let in";
  const TenantUse::Stats stats = use.stats();
  EXPECT_EQ(stats.tenant, "acme");
  EXPECT_EQ(stats.calls, 5u);
  EXPECT_EQ(stats.refused[static_cast<int>(TenantLimit::kRequests)], 2u);
}

TEST(TenantUseTest, TokensAreThoseOfPromptsAndDrawnOnes) {
  TenantUse use("acme");
  use.SetLimits({.tokens_per_minute = 600}, kStart);
  EXPECT_FALSE(use.Queue(500, kStart));
  use.LeaveQueue();
  use.Draw(160, kStart);  // 60 more than there were
  const auto refusal = use.Queue(100, kStart);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->limit, TenantLimit::kTokens);
  EXPECT_GE(refusal->retry, seconds(16));  // 160 tokens at 10 a second
  EXPECT_LE(refusal->retry, seconds(16) + milliseconds(2));
  EXPECT_FALSE(use.Queue(100, kStart + seconds(17)));
  use.LeaveQueue();
  use.Refund(100, kStart + seconds(17));
  EXPECT_FALSE(use.Queue(100, kStart + seconds(17))) << "given back, it can be had again";
  use.LeaveQueue();
  // A prompt longer than a minute's worth passes when the bucket is full.
  EXPECT_TRUE(use.Queue(10'000, kStart + seconds(18)));
  EXPECT_FALSE(use.Queue(10'000, kStart + seconds(200)));
  EXPECT_EQ(use.stats().queued, 1);
}

TEST(TenantUseTest, ConcurrentAndQueuedCallsAreCounted) {
  TenantUse use("acme");
  use.SetLimits({.max_concurrent = 2, .max_queued = 1}, kStart);
  EXPECT_FALSE(use.BeginWork(kStart));
  EXPECT_FALSE(use.BeginWork(kStart));
  const auto refusal = use.BeginWork(kStart);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->limit, TenantLimit::kConcurrent);
  EXPECT_NE(refusal->message.find("the limit is 2"), std::string::npos) << refusal->message;
  EXPECT_GT(refusal->retry, milliseconds(0));

  EXPECT_FALSE(use.Queue(1, kStart));
  ASSERT_TRUE(use.Queue(1, kStart));
  use.LeaveQueue();
  EXPECT_FALSE(use.Queue(1, kStart));
  use.LeaveQueue();
  use.EndWork(seconds(8));
  EXPECT_FALSE(use.BeginWork(kStart));
  // Two are under way, and they take 8 s each.
  EXPECT_NEAR(static_cast<double>(use.BeginWork(kStart)->retry.count()), 4000, 2);
}

TEST(TenantUseTest, ChangedLimitsHoldAtOnce) {
  TenantUse use("acme");
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(use.AdmitCall(kStart));
  use.SetLimits({.requests_per_second = 1, .burst = 2}, kStart);
  EXPECT_FALSE(use.AdmitCall(kStart));
  EXPECT_FALSE(use.AdmitCall(kStart));
  EXPECT_TRUE(use.AdmitCall(kStart));
  use.SetLimits({}, kStart);
  EXPECT_FALSE(use.AdmitCall(kStart));
}

TEST(TraceContextTest, TakesValidOnesOnly) {
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  EXPECT_EQ(TraceIdOf("00-" + trace + "-00f067aa0ba902b7-01"), trace);
  EXPECT_EQ(TraceIdOf("00-" + trace + "-00f067aa0ba902b7-00"), trace);
  EXPECT_EQ(TraceIdOf("cc-" + trace + "-00f067aa0ba902b7-01"), trace) << "a later version";
  EXPECT_EQ(TraceIdOf("cc-" + trace + "-00f067aa0ba902b7-01-more"), trace);
  const std::vector<std::string> bads = {"",
                                         "x",
                                         "00-" + trace + "-00f067aa0ba902b7-01-more",
                                         "ff-" + trace + "-00f067aa0ba902b7-01",
                                         "00-" + trace + "-0000000000000000-01",
                                         "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                                         "00-" + trace + "-00f067aa0ba902b7-0g",
                                         "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
                                         "00_" + trace + "-00f067aa0ba902b7-01",
                                         "00-" + trace + "-00f067aa0ba902b7",
                                         "cc-" + trace + "-00f067aa0ba902b7-01more",
                                         "0g-" + trace + "-00f067aa0ba902b7-01",
                                         "00-" + trace.substr(1) + "g-00f067aa0ba902b7-01"};
  for (const std::string& bad : bads) {
    EXPECT_EQ(TraceIdOf(bad), "") << bad;
  }
}

}  // namespace
}  // namespace efla
