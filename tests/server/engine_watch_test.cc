#include "server/engine_watch.h"

#include <gtest/gtest.h>

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Health = EngineWatch::Health;

class EngineWatchTest : public ::testing::Test {
 protected:
  EngineWatchTest() { stats_.running = 1; }

  Health After(Clock::duration time) {
    now_ += time;
    return watch_.Look(stats_, now_);
  }
  Health AfterAStep(Clock::duration time) {
    ++stats_.steps;
    return After(time);
  }

  Clock::time_point now_{};
  EngineStats stats_;
  EngineWatch watch_{now_};
};

TEST_F(EngineWatchTest, StepsKeepItHealthy) {
  for (int i = 0; i < 10; ++i) EXPECT_EQ(AfterAStep(seconds(59)), Health::kHealthy);
  EXPECT_EQ(AfterAStep(seconds(1000)), Health::kHealthy) << "however rare they are";
  EXPECT_FALSE(watch_.ends());
}

TEST_F(EngineWatchTest, NoStepForAMinuteIsAStall) {
  EXPECT_EQ(AfterAStep(seconds(1)), Health::kHealthy);
  EXPECT_EQ(After(seconds(60)), Health::kHealthy);
  EXPECT_EQ(After(milliseconds(1)), Health::kStalled);
  EXPECT_FALSE(watch_.ends()) << "it says so first";
  EXPECT_EQ(After(milliseconds(9'999)), Health::kStalled);
  EXPECT_FALSE(watch_.ends());
  EXPECT_EQ(After(milliseconds(1)), Health::kStalled);
  EXPECT_TRUE(watch_.ends()) << "more than ten seconds after it was last healthy";
}

TEST_F(EngineWatchTest, AStepEndsAStall) {
  EXPECT_EQ(After(seconds(61)), Health::kStalled);
  EXPECT_EQ(AfterAStep(seconds(1)), Health::kHealthy);
  EXPECT_FALSE(watch_.ends());
  EXPECT_EQ(After(seconds(60)), Health::kHealthy) << "the minute begins anew";
  EXPECT_EQ(After(milliseconds(200)), Health::kStalled);
}

TEST_F(EngineWatchTest, NothingToStepIsNoStall) {
  stats_.running = 0;
  EXPECT_EQ(After(seconds(3600)), Health::kHealthy);
  stats_.running = stats_.parked = 3;
  EXPECT_EQ(After(seconds(3600)), Health::kHealthy);
  stats_.parked = 2;
  EXPECT_EQ(After(seconds(60)), Health::kHealthy) << "from when there was something to do";
  EXPECT_EQ(After(seconds(1)), Health::kStalled);
}

TEST_F(EngineWatchTest, RequestsThatOnlyWaitAreNoStall) {
  stats_.running = 0;
  stats_.waiting = 5;
  EXPECT_EQ(After(seconds(3600)), Health::kHealthy);
}

TEST_F(EngineWatchTest, AFailedDeviceEndsAfterTheGrace) {
  EXPECT_EQ(AfterAStep(seconds(1)), Health::kHealthy);
  stats_.healthy = false;
  stats_.running = 0;
  EXPECT_EQ(After(milliseconds(200)), Health::kDeviceFailed);
  EXPECT_FALSE(watch_.ends());
  EXPECT_EQ(After(milliseconds(9'800)), Health::kDeviceFailed);
  EXPECT_FALSE(watch_.ends());
  EXPECT_EQ(After(milliseconds(1)), Health::kDeviceFailed);
  EXPECT_TRUE(watch_.ends());
}

}  // namespace
}  // namespace efla
