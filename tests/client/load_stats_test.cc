#include "client/load_stats.h"

#include <algorithm>
#include <map>

#include "gtest/gtest.h"

namespace efla {
namespace {

TEST(PercentileTest, InterpolatesBetweenRanks) {
  const std::vector<double> five = {1, 2, 3, 4, 10};  // the answers are numpy.percentile's
  EXPECT_DOUBLE_EQ(Percentile(five, 0), 1);
  EXPECT_DOUBLE_EQ(Percentile(five, 50), 3);
  EXPECT_DOUBLE_EQ(Percentile(five, 90), 7.6);
  EXPECT_DOUBLE_EQ(Percentile(five, 99), 9.76);
  EXPECT_DOUBLE_EQ(Percentile(five, 100), 10);
  EXPECT_DOUBLE_EQ(Percentile({1, 2}, 50), 1.5);
  EXPECT_DOUBLE_EQ(Percentile({7}, 99), 7);
}

TEST(SummarizeTest, SortsForItself) {
  Summary summary = Summarize({4, 1, 3, 2});
  EXPECT_EQ(summary.count, 4u);
  EXPECT_DOUBLE_EQ(summary.mean, 2.5);
  EXPECT_DOUBLE_EQ(summary.p50, 2.5);
  EXPECT_DOUBLE_EQ(summary.max, 4);
  EXPECT_NEAR(summary.stddev, 1.118034, 1e-6);
}

TEST(SummarizeTest, NothingIsAllZero) {
  Summary summary = Summarize({});
  EXPECT_EQ(summary.count, 0u);
  EXPECT_EQ(summary.p99, 0);
}

TEST(PromptMixTest, DrawsByWeight) {
  absl::StatusOr<PromptMix> mix = PromptMix::Parse("32:3,512:1");
  ASSERT_TRUE(mix.ok()) << mix.status();
  EXPECT_EQ(mix->longest(), 512u);
  std::mt19937_64 random(1);
  std::map<uint32_t, int> drawn;
  for (int i = 0; i < 8000; ++i) ++drawn[mix->Draw(random)];
  EXPECT_EQ(drawn.size(), 2u);
  EXPECT_NEAR(drawn[32], 6000, 200);  // five standard deviations
}

TEST(PromptMixTest, AWeightMayBeLeftOut) {
  std::mt19937_64 random(1);
  EXPECT_EQ(PromptMix::Parse("64")->Draw(random), 64u);
}

TEST(PromptMixTest, RefusesWhatIsNoMix) {
  for (const char* bad :
       {"", "x", "32:", "32:x", "0", "-1", "32:0", "32:-1", "32:nan", "32:inf", "32,", "32:1:1"}) {
    EXPECT_EQ(PromptMix::Parse(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(RandomTokenIdsTest, StaysInTheVocabularyAndLeavesOutTheExcluded) {
  std::mt19937_64 random(1);
  std::vector<uint32_t> ids = RandomTokenIds(1000, 5, {1, 2}, random);
  EXPECT_EQ(ids.size(), 1000u);
  for (uint32_t id : {0, 3, 4}) EXPECT_NE(std::count(ids.begin(), ids.end(), id), 0) << id;
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 0) + std::count(ids.begin(), ids.end(), 3) +
                std::count(ids.begin(), ids.end(), 4),
            1000);
}

// Two requests of three tokens that overlap for a second, and one that was refused.
std::vector<RequestRecord> ThreeRecords() {
  RequestRecord first;
  first.due = first.sent = 1.0;
  first.chunks = {1.5, 1.7, 2.0};
  first.ended = 2.0;
  first.input_tokens = 10;
  first.output_tokens = 3;
  RequestRecord second = first;
  second.due = 1.0;
  second.sent = 1.01;
  second.chunks = {2.0, 3.0};  // the last message held two tokens
  second.ended = 3.0;
  RequestRecord refused;
  refused.due = refused.sent = 1.0;
  refused.ended = 1.1;
  refused.error = "RESOURCE_EXHAUSTED";
  refused.error_message = "full";
  return {first, second, refused};
}

TEST(MakeReportTest, ThroughputIsOverTheWholeRun) {
  LoadReport report = MakeReport(ThreeRecords());
  EXPECT_DOUBLE_EQ(report.duration_seconds, 2.0);
  EXPECT_EQ(report.completed, 2u);
  EXPECT_EQ(report.failed, 1u);
  EXPECT_EQ(report.errors.at("RESOURCE_EXHAUSTED"), 1u);
  EXPECT_EQ(report.error_examples.at("RESOURCE_EXHAUSTED"), "full");
  EXPECT_DOUBLE_EQ(report.request_throughput, 1.0);
  EXPECT_DOUBLE_EQ(report.output_throughput, 3.0);
  EXPECT_DOUBLE_EQ(report.total_token_throughput, 13.0);
  EXPECT_NEAR(report.mean_concurrency, 1.55, 1e-9);
  EXPECT_DOUBLE_EQ(report.tokens_per_chunk, 6.0 / 5);
  EXPECT_NEAR(report.max_send_lag_ms, 10, 1e-6);
}

TEST(MakeReportTest, LatenciesFollowTheirFormulas) {
  LoadReport report = MakeReport(ThreeRecords());
  EXPECT_EQ(report.ttft.count, 2u);
  EXPECT_NEAR(report.ttft.mean, (500 + 1000) / 2.0, 1e-6);
  EXPECT_EQ(report.itl.count, 3u);
  EXPECT_NEAR(report.itl.mean, (200 + 300 + 1000) / 3.0, 1e-6);
  EXPECT_NEAR(report.tpot.mean, (500 / 2.0 + 1000 / 2.0) / 2, 1e-6);
  EXPECT_NEAR(report.e2el.max, 2000, 1e-6);
}

TEST(MakeReportTest, NoTimePerTokenForOneToken) {
  RequestRecord record;
  record.chunks = {0.5};
  record.ended = 0.5;
  record.output_tokens = 1;
  LoadReport report = MakeReport({record});
  EXPECT_EQ(report.ttft.count, 1u);
  EXPECT_EQ(report.tpot.count, 0u);
  EXPECT_EQ(report.itl.count, 0u);
}

TEST(MakeReportTest, NoRecordsIsAnEmptyReport) { EXPECT_EQ(MakeReport({}).completed, 0u); }

}  // namespace
}  // namespace efla
