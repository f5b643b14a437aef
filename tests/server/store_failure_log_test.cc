#include "server/store_failure_log.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace efla {
namespace {

using std::chrono::seconds;

class StoreFailureLogTest : public ::testing::Test {
 protected:
  // The lines that it makes.
  std::string Write(const std::string& store, const char* operation, const absl::Status& status,
                    const std::string& session = "chat-1") {
    testing::internal::CaptureStderr();
    failures_.Write({store, operation, "session", session, status});
    return testing::internal::GetCapturedStderr();
  }
  const Log log_{LogLevel::kInfo, LogFormat::kJson};
  StoreFailureLog::Clock::time_point now_{};
  StoreFailureLog failures_{log_, [this] { return now_; }};
};

TEST_F(StoreFailureLogTest, ALineNamesStoreOperationSessionAndError) {
  const std::string line =
      Write("disk", "PutRecord", absl::ResourceExhaustedError("no space left"), "chat-7");
  for (const char* part : {"session_store_failed", "\"disk\"", "\"PutRecord\"", "\"session\":\"chat-7\"",
                           "RESOURCE_EXHAUSTED", "no space left", "\"suppressed\":0"}) {
    EXPECT_NE(line.find(part), std::string::npos) << part << " in " << line;
  }
}

TEST_F(StoreFailureLogTest, OfASnapshotItNamesTheSessionToo) {
  testing::internal::CaptureStderr();
  failures_.Write(
      {"disk", "PutSnapshot", "snapshot", "0a1b", absl::ResourceExhaustedError("full"), "chat-7"});
  const std::string line = testing::internal::GetCapturedStderr();
  for (const char* part : {"\"snapshot\":\"0a1b\"", "\"session\":\"chat-7\"", "\"suppressed\":0"}) {
    EXPECT_NE(line.find(part), std::string::npos) << part << " in " << line;
  }
}

TEST_F(StoreFailureLogTest, OneLineOfAKindInAWhileAndTheNextTellsHowManyWereLeftOut) {
  const absl::Status refused = absl::UnavailableError("refused"), full = absl::ResourceExhaustedError("full");
  EXPECT_NE(Write("redis", "PutRecord", refused), "");
  for (int i = 0; i < 1000; ++i) failures_.Write({"redis", "PutRecord", "session", "s", refused});
  EXPECT_EQ(Write("redis", "PutRecord", refused), "");
  // Other kinds have lines of their own.
  EXPECT_NE(Write("redis", "PutRecord", full), "");
  EXPECT_NE(Write("redis", "PutSnapshot", refused), "");
  EXPECT_NE(Write("disk", "PutRecord", refused), "");
  now_ += StoreFailureLog::kInterval - seconds(1);
  EXPECT_EQ(Write("redis", "PutRecord", refused), "");
  now_ += seconds(1);
  const std::string next = Write("redis", "PutRecord", refused);
  EXPECT_NE(next.find("\"suppressed\":1002"), std::string::npos) << next;
  now_ += StoreFailureLog::kInterval;
  const std::string last = Write("redis", "PutRecord", refused);
  EXPECT_NE(last.find("\"suppressed\":0"), std::string::npos) << last;
}

}  // namespace
}  // namespace efla
