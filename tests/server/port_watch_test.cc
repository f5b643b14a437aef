#include "server/port_watch.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "server/descriptors.h"
#include "tests/server/redis_server.h"

namespace efla {
namespace {

using Health = PortWatch::Health;
using std::chrono::milliseconds;

// Looks at a port of this machine, at times of the test's own: a second of the watch takes no second.
class PortWatchTest : public ::testing::Test {
 protected:
  // What it says after `time` in which nobody answers.
  Health After(milliseconds time) {
    Health health = Health::kUnknown;
    for (milliseconds passed{0}; passed < time; passed += kStep) {
      now_ += kStep;
      health = watch_.Look(now_);
    }
    return health;
  }
  // Begins the next probe, takes its connection and says `words`, then closes it. Looks until the answer is
  // seen.
  void Answer(const std::string& words) {
    After(PortWatch::kInterval);
    const int fd = accept(port_.fd(), nullptr, nullptr);
    ASSERT_GE(fd, 0);
    char byte = 0;
    EXPECT_EQ(recv(fd, &byte, 1, 0), 0) << "it says nothing and closes its side";
    EXPECT_EQ(send(fd, words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
    close(fd);
    std::this_thread::sleep_for(milliseconds(1));  // the kernel's loopback
    After(kStep);
  }
  static constexpr milliseconds kStep{200};
  // All probes that it takes to call a port deaf, each to its end and the interval between them.
  static constexpr milliseconds kLong =
      PortWatch::kMostFailures * (PortWatch::kPatience + PortWatch::kInterval) + milliseconds(400);

  FreePort port_{64};
  PortWatch watch_{ListenAddress{"127.0.0.1", port_.port()}};
  PortWatch::Clock::time_point now_ = PortWatch::Clock::now();
};

TEST_F(PortWatchTest, AFirstByteOrAnEndIsAnAnswer) {
  EXPECT_EQ(After(kStep), Health::kUnknown);
  for (const char* words : {"SETTINGS", ""}) {
    Answer(words);
    EXPECT_EQ(After(kStep), Health::kListening) << words;
    EXPECT_EQ(watch_.failures(), 0);
    EXPECT_EQ(watch_.why(), "");
  }
}

TEST_F(PortWatchTest, APortWhoseConnectionsNobodyTakesIsDeafAfterSomeProbes) {
  Answer("");
  ASSERT_EQ(After(PortWatch::kInterval), Health::kListening);
  EXPECT_EQ(After(PortWatch::kPatience), Health::kListening);
  EXPECT_EQ(watch_.failures(), 1);
  EXPECT_NE(watch_.why().find("no answer in 3 s"), std::string::npos) << watch_.why();
  EXPECT_EQ(After(kLong), Health::kDeaf);
}

TEST_F(PortWatchTest, AnAnswerInBetweenBeginsTheCountAnew) {
  Answer("");
  ASSERT_EQ(After(PortWatch::kInterval + PortWatch::kPatience), Health::kListening);
  ASSERT_EQ(watch_.failures(), 1);
  close(accept(port_.fd(), nullptr, nullptr));  // the failed probe, still in the queue
  Answer("late");
  EXPECT_EQ(watch_.failures(), 0);
}

TEST_F(PortWatchTest, AnAnswerSeenLateCounts) {
  Answer("");
  ASSERT_EQ(After(PortWatch::kInterval), Health::kListening);  // a probe has begun
  const int fd = accept(port_.fd(), nullptr, nullptr);
  close(fd);
  std::this_thread::sleep_for(milliseconds(1));
  now_ += std::chrono::hours(1);  // this process was stopped
  EXPECT_EQ(watch_.Look(now_), Health::kListening);
  EXPECT_EQ(watch_.failures(), 0);
}

TEST_F(PortWatchTest, APortThatNeverAnsweredIsNotCalledDeaf) { EXPECT_EQ(After(kLong), Health::kUnknown); }

TEST_F(PortWatchTest, ANameThatIsNoneIsUnknown) {
  PortWatch watch(ListenAddress{"no such host", 1});
  EXPECT_EQ(watch.Look(now_), Health::kUnknown);
  EXPECT_NE(watch.why(), "");
}

// The soft limit of this process while it lives.
class LowLimit {
 public:
  explicit LowLimit(rlim_t limit) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit low = before_;
    low.rlim_cur = limit;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  }
  ~LowLimit() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(PortWatchTest, WithoutDescriptorsProbesFailAndTheReserveHelps) {
  Answer("");
  DescriptorReserve reserve(4);
  ASSERT_EQ(reserve.size(), 4);
  const LowLimit limit(64);
  std::vector<int> taken;
  for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  ASSERT_FALSE(taken.empty());
  EXPECT_EQ(After(PortWatch::kInterval), Health::kListening);
  EXPECT_EQ(watch_.failures(), 1);
  EXPECT_NE(watch_.why().find("Too many open files"), std::string::npos) << watch_.why();
  reserve.Release();
  EXPECT_EQ(reserve.size(), 0);
  EXPECT_EQ(DescriptorReserve(64).size(), 4) << "as many as there are";
  Answer("");
  EXPECT_EQ(watch_.failures(), 0);
  for (const int fd : taken) close(fd);
}

TEST(DescriptorLimitTest, TheSoftLimitBecomesTheHardOne) {
  const LowLimit low(100);
  const absl::StatusOr<int64_t> raised = RaiseDescriptorLimit();
  ASSERT_TRUE(raised.ok()) << raised.status();
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_GT(*raised, 100);
  EXPECT_EQ(*raised, static_cast<int64_t>(limit.rlim_max));
  EXPECT_EQ(limit.rlim_cur, limit.rlim_max);
}

}  // namespace
}  // namespace efla
