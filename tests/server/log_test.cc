#include "server/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>

#include "nlohmann/json.hpp"

namespace efla {
namespace {

using std::chrono::seconds;

// A pipe that holds a few pages, which nobody reads but the test.
class LogPipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    ASSERT_GT(fcntl(ends_[1], F_SETPIPE_SZ, 4 * 4096), 0);
    ASSERT_EQ(fcntl(ends_[0], F_SETFL, O_NONBLOCK), 0);
  }
  void TearDown() override {
    for (int end : ends_) close(end);
  }
  std::string ReadAll() {
    std::string text;
    char part[4096];
    for (ssize_t count; (count = read(ends_[0], part, sizeof(part))) > 0;)
      text.append(part, static_cast<size_t>(count));
    return text;
  }
  int ends_[2] = {};
};

TEST_F(LogPipeTest, ALogThatNobodyReadsHoldsUpNobodyAndSaysWhatIsLost) {
  constexpr int kLines = 1000;
  const Log log(LogLevel::kInfo, LogFormat::kJson, ends_[1]);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kLines; ++i) log.Info("event", "a sentence", {{"number", i}});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(5));

  std::string text = ReadAll();
  log.Info("event", "after a while", {{"number", kLines}});
  text += ReadAll();
  int lines = 0;
  int64_t lost = -1;
  for (size_t begin_of_line = 0; begin_of_line < text.size();) {
    const size_t end = text.find('\n', begin_of_line);
    ASSERT_NE(end, text.npos) << text.substr(begin_of_line);
    const auto line = nlohmann::json::parse(text.substr(begin_of_line, end - begin_of_line));
    if (line.at("event") == "log_dropped") {
      EXPECT_EQ(line.at("level"), "warning");
      EXPECT_EQ(lost, -1) << "once";
      lost = line.at("lines");
    } else {
      EXPECT_EQ(line.at("number"), lost < 0 ? lines : kLines);
      ++lines;
    }
    begin_of_line = end + 1;
  }
  EXPECT_GT(lost, 0);
  EXPECT_EQ(lines + lost, kLines + 1);
}

TEST_F(LogPipeTest, ALineThatDoesNotFitIsCutAndTheNextBeginsAnew) {
  const Log log(LogLevel::kInfo, LogFormat::kText, ends_[1]);
  log.Info("event", std::string(100'000, 'x'));
  EXPECT_EQ(ReadAll().find('\n'), std::string::npos);
  log.Info("event", "next");
  const std::string text = ReadAll();
  EXPECT_TRUE(text.starts_with('\n')) << text;
  EXPECT_NE(text.find("log_dropped"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("info event: next\n")) << text;
}

TEST_F(LogPipeTest, ABrokenPipeHoldsUpNobody) {
  const Log log(LogLevel::kInfo, LogFormat::kText, ends_[1]);
  close(ends_[0]);
  ends_[0] = -1;
  signal(SIGPIPE, SIG_IGN);
  log.Info("event", "to nobody");
}

}  // namespace
}  // namespace efla
