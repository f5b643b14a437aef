// More work than the server takes, and clients that do not read or go away.
#include <signal.h>

#include <utility>

#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr uint32_t kEndless = 1'000'000;  // tokens: more than any test waits for
const std::vector<uint32_t> kPrompt = {5, 6, 7};

double Gauge(const ServerProcess& server, const std::string& name) {
  return Metrics::Read(server.admin_address()).Sum(name);
}

TEST(OverloadTest, AFullQueueRefusesBeforeHeadersAndTheCallMayBeRetried) {
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"), {"--max-running", "1", "--max-queue", "1"});
  ASSERT_NE(server, nullptr);
  BackgroundStream running(server->NewChannel(), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));
  BackgroundStream waiting(server->NewChannel(), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") == 1; }));

  const auto stub = v1::Generation::NewStub(server->NewChannel());
  const auto start = std::chrono::steady_clock::now();
  const Reply refused = Generate(*stub, GreedyRequest(kPrompt, 3));
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(2));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << ToString(refused.status);
  EXPECT_NE(refused.status.error_message().find("1"), std::string::npos) << "the message names the limit";
  const std::optional<double> retry_delay = RetryDelaySeconds(refused.status);
  ASSERT_TRUE(retry_delay) << ToString(refused.status);
  EXPECT_GT(*retry_delay, 0);
  EXPECT_LE(*retry_delay, 60);
  EXPECT_TRUE(refused.events.empty());
  EXPECT_EQ(waiting.num_events(), 0u) << "one runs, one waits";

  // gRPC retries a call only as long as it has seen no headers: a retried call that succeeds proves that a
  // refusal carries none.
  const std::string retry = R"({"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5,
      "initialBackoff": "0.2s", "maxBackoff": "1s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]})";
  const double refused_before =
      Metrics::Read(server->admin_address()).Sum("efla_requests_total", {"outcome=\"rejected\""});
  BackgroundStream retried(server->NewChannel(retry), GreedyRequest(kPrompt, 3));
  ASSERT_TRUE(Eventually([&] {
    return Metrics::Read(server->admin_address()).Sum("efla_requests_total", {"outcome=\"rejected\""}) >
           refused_before;
  }));
  running.Cancel();
  EXPECT_TRUE(waiting.WaitForEvents(1)) << "the waiting call takes the free place";
  waiting.Cancel();
  const grpc::Status end = retried.Join();
  EXPECT_TRUE(end.ok()) << ToString(end);
  ExpectIdle(server->admin_address());
}

TEST(OverloadTest, AClientThatGoesAwayFreesItsSlot) {
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"), {"--state-slots", "2", "--max-running", "1"});
  ASSERT_NE(server, nullptr);
  for (int i = 0; i < 5; ++i) {
    // The client program dies with its connection; nothing tells the server but the closed socket.
    ChildProcess client({ProgramPath("efla"), "generate", "--target", server->grpc_address(), "--token-ids",
                         "5,6,7", "--max-tokens", std::to_string(kEndless), "--ignore-eos", "--json"});
    ASSERT_TRUE(Eventually([&] { return client.out().size() > 200; })) << client.err();
    EXPECT_EQ(Gauge(*server, "efla_requests_running"), 1);
    client.Signal(SIGKILL);
    ExpectIdle(server->admin_address());
  }
  const Reply reply = Generate(*v1::Generation::NewStub(server->NewChannel()), GreedyRequest(kPrompt, 3));
  EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
}

TEST(OverloadTest, AWaitingCallThatIsCancelledOrExpiresLeavesTheQueue) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), {"--max-running", "1"});
  ASSERT_NE(server, nullptr);
  BackgroundStream running(server->NewChannel(), GreedyRequest(kPrompt, kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));
  BackgroundStream cancelled(server->NewChannel(), GreedyRequest(kPrompt, 3));
  BackgroundStream expiring(server->NewChannel(), GreedyRequest(kPrompt, 3), milliseconds(400));
  ASSERT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") > 0; }));
  cancelled.Cancel();
  EXPECT_EQ(cancelled.Join().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(expiring.Join().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return Gauge(*server, "efla_requests_waiting") == 0; }));
  EXPECT_EQ(Gauge(*server, "efla_requests_running"), 1);
  running.Cancel();
  ExpectIdle(server->admin_address());
}

TEST(OverloadTest, ASlowReaderThatCatchesUpLosesNothing) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"));
  ASSERT_NE(server, nullptr);
  constexpr uint32_t kTokens = 10'000;  // with their alternatives about 3 MB: more than all buffers hold
  v1::GenerateRequest request = GreedyRequest(kPrompt, kTokens);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(5);
  request.mutable_output()->set_logprobs(true);
  request.mutable_output()->set_top_logprobs(20);
  const auto stub = v1::Generation::NewStub(server->NewSmallWindowChannel());

  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  // The server parks the stream once its send buffers are full, and then steps no more.
  double steps = 0;
  ASSERT_TRUE(Eventually([&] {
    const double before = std::exchange(steps, Gauge(*server, "efla_step_seconds_count"));
    return Gauge(*server, "efla_requests_parked") == 1 && steps == before;
  })) << steps
      << " steps";
  EXPECT_LT(steps, kTokens) << "a stream that nobody reads is not computed to its end";
  const Reply other = Generate(*v1::Generation::NewStub(server->NewChannel()), GreedyRequest(kPrompt, 20));
  EXPECT_TRUE(other.status.ok()) << "others are served meanwhile: " << ToString(other.status);

  std::vector<uint32_t> slow;
  while (reader->Read(&event)) {
    const auto& ids = event.has_delta() ? event.delta().token_ids() : event.finished().token_ids();
    slow.insert(slow.end(), ids.begin(), ids.end());
  }
  const grpc::Status end = reader->Finish();
  EXPECT_TRUE(end.ok()) << ToString(end);
  EXPECT_EQ(slow.size(), kTokens);
  EXPECT_EQ(slow, Generate(*stub, request).token_ids) << "parking changes no token";
}

TEST(OverloadTest, ASlowReaderIsEndedAfterItsTime) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"), {"--slow-reader-timeout", "0.2"});
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewSmallWindowChannel());
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  v1::GenerateRequest request = GreedyRequest(kPrompt, kEndless);
  request.mutable_output()->set_logprobs(true);
  request.mutable_output()->set_top_logprobs(20);
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  ExpectIdle(server->admin_address());
  while (reader->Read(&event)) EXPECT_FALSE(event.has_finished());
  const grpc::Status end = reader->Finish();
  EXPECT_EQ(end.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << ToString(end);
}

}  // namespace
}  // namespace efla::e2e
