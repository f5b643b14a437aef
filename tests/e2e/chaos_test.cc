// Thousands of calls opened, streamed, cancelled and expired at random. Afterwards the server is as it was.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr int kConnections = 64;
constexpr int64_t kMaxGrowthBytes = int64_t{64} << 20;  // of resident memory, after the warm-up

int EnvironmentInt(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

class ChaosTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (GoldenCase& golden : GoldenCases("efla_basic")) {
      if (golden.tokens.size() <= 130) cases_.push_back(std::move(golden));
    }
    // Freed slots are filled with NaN: a slot that is used after its end, or not cleared, shows.
    server_ = ServerProcess::Start(
        GoldenDir("efla_basic"),
        {"--debug-poison", "--state-slots", "48", "--max-running", "32", "--log-level", "warning"});
    ASSERT_NE(server_, nullptr);
  }

  // `num_calls` calls over kConnections connections, one thread each.
  void RunCalls(int num_calls, uint32_t seed) {
    std::atomic<int> next = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < kConnections; ++i) {
      threads.emplace_back([&, i] {
        std::mt19937 random(seed + i);
        auto channel = server_->NewChannel();
        while (next++ < num_calls) {
          if (random() % 50 == 0) channel = server_->NewChannel();  // the old connection closes
          OneCall(channel, random);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void OneCall(const std::shared_ptr<grpc::Channel>& channel, std::mt19937& random) {
    const GoldenCase& golden = cases_[random() % cases_.size()];
    const auto stub = v1::Generation::NewStub(channel);
    const uint32_t max_tokens = random() % 13;
    v1::GenerateRequest request = GreedyRequest(golden.tokens, max_tokens);
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    switch (random() % 8) {
      case 0:  // expires: before it starts, queued, in prefill or while it streams
        SetTimeout(context, milliseconds(random() % 30));
        Stream(*stub, context, request, golden, /*cancel_after=*/-1);
        break;
      case 1:  // cancelled before anything comes
        context.TryCancel();
        Stream(*stub, context, request, golden, -1);
        break;
      case 2:
      case 3:  // cancelled on the way, or left with events unread
        request.mutable_stopping()->set_max_tokens(20'000);
        Stream(*stub, context, request, golden, static_cast<int>(random() % 6));
        break;
      case 4: {
        v1::ScoreRequest score;
        *score.mutable_token_ids() = request.token_ids();
        v1::ScoreResponse response;
        const grpc::Status status = stub->Score(&context, score, &response);
        EXPECT_TRUE(status.ok()) << ToString(status);
        for (size_t i = 1; i < golden.tokens.size() && status.ok(); ++i) {
          ASSERT_NEAR(response.logprobs(static_cast<int>(i)).logprob(), *golden.prompt_logprobs[i], 6e-2);
        }
        break;
      }
      case 5: {
        v1::CompleteResponse response;
        const grpc::Status status = stub->Complete(&context, request, &response);
        EXPECT_TRUE(status.ok()) << ToString(status);
        Check({response.token_ids().begin(), response.token_ids().end()}, golden, max_tokens);
        break;
      }
      case 6: {
        request.mutable_token_ids()->add_ids(~0u);
        v1::CompleteResponse response;
        EXPECT_EQ(stub->Complete(&context, request, &response).error_code(),
                  grpc::StatusCode::INVALID_ARGUMENT);
        break;
      }
      default:
        Stream(*stub, context, request, golden, -1);
        ++num_whole_;
    }
  }

  // `cancel_after` events; -1: reads to the end.
  void Stream(v1::Generation::Stub& stub, grpc::ClientContext& context, const v1::GenerateRequest& request,
              const GoldenCase& golden, int cancel_after) {
    const auto start = std::chrono::steady_clock::now();
    const auto reader = stub.Generate(&context, request);
    std::vector<uint32_t> ids;
    v1::GenerateResponse event;
    for (int events = 0; (cancel_after < 0 || events < cancel_after) && reader->Read(&event); ++events) {
      const auto& more = event.has_delta() ? event.delta().token_ids() : event.finished().token_ids();
      ids.insert(ids.end(), more.begin(), more.end());
    }
    if (cancel_after >= 0) context.TryCancel();
    const grpc::Status status = reader->Finish();
    const grpc::StatusCode code = status.error_code();
    EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED ||
                code == grpc::StatusCode::DEADLINE_EXCEEDED)
        << ToString(status);
    EXPECT_LT(std::chrono::steady_clock::now() - start, kCallTimeout) << "a call hung";
    if (status.ok()) {
      Check(ids, golden, request.stopping().max_tokens());
    } else {
      if (ids.size() > golden.greedy.size()) ids.resize(golden.greedy.size());
      ExpectGreedy(ids, golden.greedy, golden.greedy_margins, "an unfinished call");
    }
  }

  void Check(std::vector<uint32_t> ids, const GoldenCase& golden, size_t max_tokens) {
    EXPECT_EQ(ids.size(), max_tokens);
    if (ids.size() > golden.greedy.size()) ids.resize(golden.greedy.size());
    ExpectGreedy(ids, golden.greedy, golden.greedy_margins, "a call among others");
  }

  std::vector<GoldenCase> cases_;
  std::unique_ptr<ServerProcess> server_;
  std::atomic<int> num_whole_ = 0;
};

TEST_F(ChaosTest, NothingHangsLeaksOrMixes) {
  const int num_calls = EnvironmentInt("EFLA_CHAOS_CALLS", EFLA_CHAOS_CALLS);
  const uint32_t seed = EnvironmentInt("EFLA_CHAOS_SEED", static_cast<int>(std::random_device()() >> 1));
  std::printf("%d calls; repeat with EFLA_CHAOS_SEED=%u\n", num_calls, seed);
  RunCalls(num_calls / 10, seed);
  ExpectIdle(server_->admin_address());
  const int64_t resident_before = server_->process().resident_bytes();
  RunCalls(num_calls - num_calls / 10, seed + kConnections);
  ExpectIdle(server_->admin_address());
  EXPECT_GT(num_whole_, num_calls / 20);

  const int64_t growth = server_->process().resident_bytes() - resident_before;
  std::printf("resident memory: %.1f MiB, grown by %.1f MiB\n",
              static_cast<double>(resident_before) / (1 << 20), static_cast<double>(growth) / (1 << 20));
  if (!Sanitized()) {
    EXPECT_LT(growth, kMaxGrowthBytes);
  }

  const auto stub = v1::Generation::NewStub(server_->NewChannel());
  for (const GoldenCase& golden : GoldenCases("efla_basic")) {
    const Reply reply = Generate(*stub, GreedyRequest(golden.tokens, 24));
    ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
    ExpectGreedy(reply.token_ids, golden.greedy, golden.greedy_margins, "a good call afterwards");
  }
  EXPECT_EQ(server_->Terminate(), 0);
}

}  // namespace
}  // namespace efla::e2e
