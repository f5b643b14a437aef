#include "client/load_run.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace efla {
namespace {

class LoadRunTest : public ::testing::Test {
 protected:
  LoadRunTest() {
    plan_.prompts = *PromptMix::Parse("4");
    plan_.vocab_size = 100;
    plan_.excluded_ids = {1, 2};
    plan_.max_tokens = 3;
  }

  // Answers each request with its three tokens, and keeps count.
  void AnswerAll() {
    server_.generation.generate = [this](grpc::ServerContext&, const v1::GenerateRequest& request,
                                         FakeGeneration::Writer& writer) {
      int now = ++running_;
      int seen = most_running_;
      while (now > seen && !most_running_.compare_exchange_weak(seen, now)) {
      }
      {
        std::lock_guard lock(mutex_);
        requests_.insert(request.SerializeAsString());
        last_ = request;
      }
      for (uint32_t i = 0; i < request.stopping().max_tokens(); ++i) writer.Write(DeltaEvent("", i));
      --running_;
      writer.Write(FinishedEvent(request.token_ids().ids_size(), request.stopping().max_tokens()));
      return grpc::Status::OK;
    };
  }

  std::vector<RequestRecord> Run(std::stop_token stop = {}) {
    return RunLoad(client_.generation(), plan_, stop, nullptr);
  }

  FakeServer server_;
  Client client_{ClientOptions{.target = server_.target()}};
  LoadPlan plan_;
  std::atomic<int> running_ = 0, most_running_ = 0;
  std::mutex mutex_;
  std::set<std::string> requests_;  // guarded by mutex_
  v1::GenerateRequest last_;        // guarded by mutex_
};

TEST_F(LoadRunTest, ClosedLoopSendsAllAndNeverMoreAtOnce) {
  AnswerAll();
  plan_.concurrency = 4;
  plan_.requests = 50;
  std::vector<RequestRecord> records = Run();
  ASSERT_EQ(records.size(), 50u);
  for (const RequestRecord& record : records) {
    EXPECT_EQ(record.error, "") << record.error_message;
    EXPECT_EQ(record.input_tokens, 4u);
    EXPECT_EQ(record.output_tokens, 3u);
    EXPECT_EQ(record.chunks.size(), 3u);
    EXPECT_TRUE(std::is_sorted(record.chunks.begin(), record.chunks.end()));
    EXPECT_LE(record.sent, record.chunks.front());
    EXPECT_LE(record.chunks.back(), record.ended);
  }
  EXPECT_LE(most_running_, 4);
  EXPECT_EQ(requests_.size(), 50u) << "every prompt is another";
  EXPECT_TRUE(last_.stopping().ignore_eos());
}

TEST_F(LoadRunTest, TheSameSeedSendsTheSameRequests) {
  AnswerAll();
  plan_.concurrency = 1;
  plan_.requests = 5;
  Run();
  Run();
  EXPECT_EQ(requests_.size(), 5u);
  plan_.seed = 2;
  Run();
  EXPECT_EQ(requests_.size(), 10u);
}

TEST_F(LoadRunTest, OpenLoopSendsWhenDue) {
  AnswerAll();
  plan_.requests_per_second = 500;
  plan_.requests = 40;
  std::vector<RequestRecord> records = Run();
  ASSERT_EQ(records.size(), 40u);
  for (const RequestRecord& record : records) EXPECT_GE(record.sent, record.due);
}

TEST_F(LoadRunTest, ADurationEndsTheSending) {
  AnswerAll();
  plan_.requests_per_second = 1000;
  plan_.duration_seconds = 0.05;
  std::vector<RequestRecord> records = Run();
  EXPECT_GT(records.size(), 0u);
  for (const RequestRecord& record : records) EXPECT_LT(record.due, 0.05);
}

TEST_F(LoadRunTest, RefusalsAreRecordedByCode) {
  server_.generation.generate = [](grpc::ServerContext&, const v1::GenerateRequest&,
                                   FakeGeneration::Writer&) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full");
  };
  plan_.concurrency = 2;
  plan_.requests = 6;
  std::vector<RequestRecord> records = Run();
  ASSERT_EQ(records.size(), 6u);
  for (const RequestRecord& record : records) {
    EXPECT_EQ(record.error, "RESOURCE_EXHAUSTED");
    EXPECT_EQ(record.error_message, "full");
  }
}

TEST_F(LoadRunTest, AStopCancelsWhatIsInFlight) {
  std::stop_source stop;
  std::atomic<int> started = 0;
  server_.generation.generate = [&](grpc::ServerContext& context, const v1::GenerateRequest&,
                                    FakeGeneration::Writer&) {
    if (++started == 3) stop.request_stop();
    while (!context.IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return grpc::Status::CANCELLED;
  };
  plan_.concurrency = 3;
  plan_.requests = 1000;
  std::vector<RequestRecord> records = Run(stop.get_token());
  ASSERT_EQ(records.size(), 3u);
  for (const RequestRecord& record : records) EXPECT_EQ(record.error, "CANCELLED");
}

TEST_F(LoadRunTest, ATimeoutIsEachRequestsDeadline) {
  server_.generation.generate = [](grpc::ServerContext& context, const v1::GenerateRequest&,
                                   FakeGeneration::Writer&) {
    while (!context.IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return grpc::Status::CANCELLED;
  };
  plan_.concurrency = 1;
  plan_.requests = 1;
  plan_.timeout = std::chrono::milliseconds(20);
  std::vector<RequestRecord> records = Run();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].error, "DEADLINE_EXCEEDED");
}

}  // namespace
}  // namespace efla
