#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "server/rpc/session_messages.h"
#include "server/rpc/session_workers.h"
#include "server/rpc/status.h"
#include "server/rpc/transfer_limit.h"
#include "server/rpc/write_watch.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

google::rpc::ErrorInfo InfoOf(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.ErrorInfo");
  if (payload) info.ParseFromString(std::string(*payload));
  return info;
}

bool HasRetry(const absl::Status& status) {
  return status.GetPayload("type.googleapis.com/google.rpc.RetryInfo").has_value();
}

TEST(SessionErrorTest, ReasonAndMetadataComeBack) {
  const absl::Status status = WithSessionError(absl::AbortedError("busy"), "SESSION_BUSY",
                                               {{"revision", "7"}, {"address", "host:1=x"}});
  const auto error = GetSessionError(status);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->reason, "SESSION_BUSY");
  EXPECT_EQ(error->metadata,
            (std::map<std::string, std::string>{{"revision", "7"}, {"address", "host:1=x"}}));
  EXPECT_FALSE(GetSessionError(absl::AbortedError("x")));
  EXPECT_TRUE(GetSessionError(WithSessionError(absl::AbortedError("x"), "ALONE"))->metadata.empty());
}

TEST(SessionMessagesTest, AReasonBecomesErrorInfo) {
  const absl::Status busy =
      WithSessionDetails(WithSessionError(absl::AbortedError("busy"), "SESSION_BUSY", {{"revision", "7"}}));
  EXPECT_EQ(InfoOf(busy).reason(), "SESSION_BUSY");
  EXPECT_EQ(InfoOf(busy).domain(), "efla");
  EXPECT_EQ(InfoOf(busy).metadata().at("revision"), "7");
  EXPECT_FALSE(GetSessionError(busy));
  EXPECT_FALSE(HasRetry(busy));
  const absl::Status elsewhere = WithSessionDetails(WithSessionError(
      absl::UnavailableError("elsewhere"), "SESSION_ELSEWHERE", {{"address", "10.0.0.1:50051"}}));
  EXPECT_EQ(InfoOf(elsewhere).metadata().at("address"), "10.0.0.1:50051");
  EXPECT_TRUE(HasRetry(elsewhere));
}

TEST(SessionMessagesTest, WithoutAReasonTheCodeSaysIt) {
  const std::map<absl::StatusCode, std::string> kReasons = {
      {absl::StatusCode::kNotFound, "SESSION_NOT_FOUND"},
      {absl::StatusCode::kAlreadyExists, "SESSION_EXISTS"},
      {absl::StatusCode::kFailedPrecondition, "SNAPSHOT_MISMATCH"},
      {absl::StatusCode::kDataLoss, "SNAPSHOT_DAMAGED"},
      {absl::StatusCode::kOutOfRange, "REVISION_NOT_KEPT"},
      {absl::StatusCode::kInvalidArgument, ""}};
  for (const auto& [code, reason] : kReasons) {
    EXPECT_EQ(InfoOf(WithSessionDetails(absl::Status(code, "x"))).reason(), reason);
  }
  const absl::Status other = WithReason(absl::FailedPreconditionError("x"), "NO_STORE");
  EXPECT_EQ(InfoOf(WithSessionDetails(other)).reason(), "NO_STORE");
  EXPECT_TRUE(WithSessionDetails(absl::OkStatus()).ok());
}

TEST(SessionMessagesTest, RecordsComeBackAsWhatTheyWere) {
  v1::CompleteResponse generation;
  generation.set_text("once");
  generation.add_token_ids(5);
  const auto decoded = DecodeGenerationRecord(EncodeRecord(generation));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->text(), "once");
  v1::AppendResponse append;
  append.set_appended_tokens(3);
  EXPECT_EQ(DecodeAppendRecord(EncodeRecord(append))->appended_tokens(), 3u);

  EXPECT_EQ(InfoOf(DecodeAppendRecord(EncodeRecord(generation)).status()).reason(), "REQUEST_ID_REUSED");
  EXPECT_EQ(InfoOf(DecodeGenerationRecord(EncodeRecord(append)).status()).reason(), "REQUEST_ID_REUSED");
  EXPECT_FALSE(DecodeGenerationRecord("").ok());
}

TEST(SessionMessagesTest, RecordsAreBounded) {
  v1::CompleteResponse generation;
  generation.set_text(std::string(kMaxRecordBytes - 100, 'x'));
  EXPECT_TRUE(DecodeGenerationRecord(EncodeRecord(generation)).ok());
  generation.set_text(std::string(kMaxRecordBytes, 'x'));
  const std::string record = EncodeRecord(generation);
  EXPECT_LT(record.size(), 10u);
  const absl::Status status = DecodeGenerationRecord(record).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(InfoOf(status).reason(), "RESULT_NOT_KEPT");
}

TEST(SessionMessagesTest, ATurnThatChangedNothingIsNotCommitted) {
  SessionInfo session;
  session.session_id = "s";
  session.revision = 4;
  session.tier = SessionTier::kHost;
  v1::SessionAfterTurn after;
  FillAfterTurn(session, /*before=*/3, after);
  EXPECT_TRUE(after.committed());
  EXPECT_EQ(after.tier(), v1::TIER_HOST);
  FillAfterTurn(session, /*before=*/4, after);
  EXPECT_FALSE(after.committed());
}

TEST(SessionWorkersTest, EndsDoNotWaitBehindWhatBegins) {
  SessionWorkers workers(2, 2);
  std::latch ended(1), begun(2);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(workers.TryPost([&] {
      begun.count_down();
      ended.wait();
    }));
  }
  begun.wait();  // both threads of the lane are taken
  EXPECT_TRUE(workers.TryPost([] {}));
  EXPECT_TRUE(workers.TryPost([] {}));
  EXPECT_FALSE(workers.TryPost([] {})) << "two wait already";
  workers.PostEnd([&] { ended.count_down(); });
}

TEST(SessionWorkersTest, WhatIsQueuedRunsBeforeTheEnd) {
  std::atomic<int> ran = 0;
  {
    SessionWorkers workers(1, 100);
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(workers.TryPost([&] {
        ++ran;
        workers.PostEnd([&] { ++ran; });
      }));
    }
  }
  EXPECT_EQ(ran, 100);
}

TEST(TransferLimitTest, WhatStandsStillGivesWay) {
  using std::chrono::seconds;
  const TransferLimit::Clock::time_point start{};
  TransferLimit limit(2, seconds(30));
  int cancelled = 0;
  const auto slow = limit.Enter([&] { ++cancelled; }, start);
  const auto quick = limit.Enter([&] { FAIL() << "it moves"; }, start);
  ASSERT_TRUE(slow && quick);
  EXPECT_FALSE(limit.Enter([] {}, start + seconds(29)));
  EXPECT_EQ(cancelled, 0);
  limit.Moved(*quick, start + seconds(29));
  EXPECT_FALSE(limit.Enter([] {}, start + seconds(31))) << "its place is free when it has left";
  EXPECT_EQ(cancelled, 1);
  EXPECT_FALSE(limit.Enter([] {}, start + seconds(32)));
  EXPECT_EQ(cancelled, 1) << "once";
  limit.Leave(*slow);
  const auto next = limit.Enter([] {}, start + seconds(33));
  EXPECT_TRUE(next);
}

TEST(TransferLimitTest, ACancelMayLeaveAtOnce) {
  TransferLimit limit(1, std::chrono::milliseconds(0));
  std::optional<TransferLimit::Place> place;
  place = limit.Enter([&] { limit.Leave(*place); });
  ASSERT_TRUE(place);
  EXPECT_FALSE(limit.Enter([] {}));
  EXPECT_TRUE(limit.Enter([] {}));
}

TEST(WriteWatchTest, AWriteThatWaitsForTooLongCancelsItsCallOnce) {
  WriteWatch watch(std::chrono::milliseconds(50));
  std::atomic<int> cancelled = 0;
  std::latch late(1);
  const WriteWatch::Place idle = watch.Enter([] { ADD_FAILURE() << "it writes nothing"; });
  const WriteWatch::Place done = watch.Enter([] { ADD_FAILURE() << "its write has gone"; });
  const WriteWatch::Place stuck = watch.Enter([&] {
    if (++cancelled == 1) late.count_down();
  });
  done->Began();
  done->Ended();
  const auto begin = std::chrono::steady_clock::now();
  stuck->Began();
  late.wait();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, watch.patience());
  stuck->Began();  // of no effect: something waits already
  std::this_thread::sleep_for(3 * watch.patience());
  EXPECT_EQ(cancelled, 1);
  EXPECT_TRUE(stuck->was_cut());
  EXPECT_FALSE(idle->was_cut() || done->was_cut());
  for (const WriteWatch::Place place : {idle, done, stuck}) watch.Leave(place);
}

TEST(WriteWatchTest, ACancelMayLeaveAtOnce) {
  WriteWatch watch(std::chrono::milliseconds(10));
  WriteWatch::Place place;
  std::latch left(1);
  place = watch.Enter([&] {
    watch.Leave(place);
    left.count_down();
  });
  place->Began();
  left.wait();
}

}  // namespace
}  // namespace efla
