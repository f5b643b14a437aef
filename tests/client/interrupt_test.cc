#include "client/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "gtest/gtest.h"

namespace efla {
namespace {

// Signals are sent in processes of their own: in this one, threads of other tests would take them.
class InterruptDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(InterruptDeathTest, ASignalRequestsAStop) {
  for (int signal : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          Interrupt interrupt;
          if (interrupt.token().stop_requested()) exit(1);
          kill(getpid(), signal);
          std::mutex mutex;
          std::condition_variable_any stopped;
          std::unique_lock lock(mutex);
          stopped.wait_for(lock, interrupt.token(), std::chrono::seconds(30), [] { return false; });
          exit(interrupt.token().stop_requested() ? 0 : 2);
        },
        ::testing::ExitedWithCode(0), "");
  }
}

TEST_F(InterruptDeathTest, TheSecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        Interrupt interrupt;
        for (;;) {
          kill(getpid(), SIGINT);
          usleep(1000);
        }
      },
      ::testing::ExitedWithCode(130), "");
}

TEST_F(InterruptDeathTest, ARenewedTokenIsStoppedByTheNextSignal) {
  EXPECT_EXIT(
      {
        Interrupt interrupt;
        for (int turn = 0; turn < 3; ++turn) {
          const std::stop_token token = interrupt.Renew();
          if (token.stop_requested()) exit(1);
          kill(getpid(), SIGINT);
          std::mutex mutex;
          std::condition_variable_any stopped;
          std::unique_lock lock(mutex);
          stopped.wait_for(lock, token, std::chrono::seconds(30), [] { return false; });
          if (!token.stop_requested()) exit(2);
        }
        exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(InterruptDeathTest, ARenewedInterruptEndsWithSigterm) {
  EXPECT_EXIT(
      {
        Interrupt interrupt;
        interrupt.Renew();
        kill(getpid(), SIGTERM);
        for (;;) pause();
      },
      ::testing::ExitedWithCode(130), "");
}

TEST_F(InterruptDeathTest, WithNothingUnderWayASignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        Interrupt interrupt;
        interrupt.Renew();
        interrupt.EndAtOnce();
        kill(getpid(), SIGINT);
        for (;;) pause();
      },
      ::testing::ExitedWithCode(130), "");
}

TEST(InterruptTest, WithoutASignalItEndsUnstopped) {
  std::stop_token token;
  {
    Interrupt interrupt;
    token = interrupt.token();
  }
  EXPECT_FALSE(token.stop_requested());
}

}  // namespace
}  // namespace efla
