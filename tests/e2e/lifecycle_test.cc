// From the ready line to the exit status: health, reflection, metrics, draining.
#include <signal.h>

#include <future>

#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr int kServing = 1, kNotServing = 2;
constexpr char kGeneration[] = "efla.v1.Generation";
constexpr uint32_t kEndless = 1'000'000;  // tokens: more than any test waits for

class LifecycleTest : public ::testing::Test {
 protected:
  void StartServer(const std::vector<std::string>& flags = {}) {
    server_ = ServerProcess::Start(GoldenDir("efla_basic"), flags);
    ASSERT_NE(server_, nullptr);
    channel_ = server_->NewChannel();
    stub_ = v1::Generation::NewStub(channel_);
  }
  int HttpStatus(const std::string& path) { return HttpGet(server_->admin_address(), path).status; }
  // Watches the named service; the caller reads statuses from it.
  std::unique_ptr<RawCall> Watch(const std::string& service) {
    auto watch = std::make_unique<RawCall>(server_->NewChannel(), "/grpc.health.v1.Health/Watch");
    watch->Write(std::string("\x0a") + static_cast<char>(service.size()) + service);
    watch->WritesDone();
    return watch;
  }
  static uint64_t Next(RawCall& watch) { return VarintField(watch.Read().value_or(""), 1).value_or(0); }
  static v1::GenerateRequest Endless() { return GreedyRequest(std::vector<uint32_t>{5, 6, 7}, kEndless); }

  std::unique_ptr<ServerProcess> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> stub_;
};

TEST_F(LifecycleTest, TheReadyLineIsTheOnlyOutputAndTrue) {
  StartServer({"--model-name", "first"});
  EXPECT_EQ(server_->process().out(), "efla_server ready grpc=" + server_->grpc_address() +
                                          " admin=" + server_->admin_address() +
                                          " device=" + server_->device() + " model=first\n");
  EXPECT_EQ(server_->device(), TestDevice());
  EXPECT_EQ(server_->grpc_address().rfind("127.0.0.1:", 0), 0u);
  EXPECT_NE(server_->grpc_address(), "127.0.0.1:0");
  EXPECT_NE(server_->grpc_address(), server_->admin_address());
}

TEST_F(LifecycleTest, HealthAndProbesTellThatItServes) {
  StartServer();
  EXPECT_EQ(HealthOf(channel_, ""), kServing);
  EXPECT_EQ(HealthOf(channel_, kGeneration), kServing);
  EXPECT_EQ(HealthOf(channel_, "no.such.Service"), -static_cast<int>(grpc::StatusCode::NOT_FOUND));
  EXPECT_EQ(HttpStatus("/livez"), 200);
  EXPECT_EQ(HttpStatus("/readyz"), 200);
  EXPECT_EQ(HttpStatus("/no-such-page"), 404);
}

TEST_F(LifecycleTest, ReflectionListsTheServices) {
  StartServer();
  RawCall call(channel_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo");
  ASSERT_TRUE(call.Write("\x3a\x01*"));  // list_services = 7
  const std::string services = call.Read().value_or("");
  for (const char* name : {kGeneration, "efla.v1.Models", "grpc.health.v1.Health"}) {
    EXPECT_NE(services.find(name), std::string::npos) << name;
  }
  ASSERT_TRUE(call.Write(std::string("\x22\x12") + kGeneration));  // file_containing_symbol = 4
  EXPECT_NE(call.Read().value_or("").find("GenerateRequest"), std::string::npos);
}

TEST_F(LifecycleTest, MetricsAgreeWithTheCallsMade) {
  StartServer({"--prefix-cache-slots", "0"});  // every prompt token is computed
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Generate(*stub_, GreedyRequest(std::vector<uint32_t>(70, 5), 10)).status.ok());
  }
  v1::ScoreRequest score;
  score.mutable_token_ids()->mutable_ids()->Add(5);
  score.mutable_token_ids()->mutable_ids()->Add(6);
  v1::ScoreResponse scored;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->Score(&context, score, &scored).ok());
  BackgroundStream cancelled(channel_, Endless());
  ASSERT_TRUE(cancelled.WaitForEvents(3));
  const Metrics during = Metrics::Read(server_->admin_address());
  EXPECT_EQ(during.Sum("efla_requests_running"), 1);
  EXPECT_EQ(
      during.Sum("efla_state_slots", {"kind=\"total\""}) - during.Sum("efla_state_slots", {"kind=\"free\""}),
      1);
  cancelled.Cancel();
  EXPECT_EQ(cancelled.Join().error_code(), grpc::StatusCode::CANCELLED);
  ExpectIdle(server_->admin_address());

  const Metrics metrics = Metrics::Read(server_->admin_address());
  const std::pair<const char*, const char*> kFamilies[] = {
      {"efla_requests_total", "counter"},
      {"efla_requests_waiting", "gauge"},
      {"efla_requests_running", "gauge"},
      {"efla_queue_age_seconds", "gauge"},
      {"efla_state_slots", "gauge"},
      {"efla_state_pool_usage_ratio", "gauge"},
      {"efla_prompt_tokens_total", "counter"},
      {"efla_generation_tokens_total", "counter"},
      {"efla_time_to_first_token_seconds", "histogram"},
      {"efla_inter_token_latency_seconds", "histogram"},
      {"efla_step_seconds", "histogram"},
  };
  for (const auto& [family, type] : kFamilies) EXPECT_EQ(metrics.TypeOf(family), type) << family;
  EXPECT_EQ(metrics.NumSeries("efla_requests_waiting"), 1) << "routers read one series and never sum";
  EXPECT_EQ(metrics.Sum("efla_requests_total"), 5);
  EXPECT_EQ(metrics.Sum("efla_requests_total", {"outcome=\"cancelled\""}), 1);
  EXPECT_EQ(metrics.Sum("efla_requests_total", {"outcome=\"length\""}), 4);
  EXPECT_EQ(metrics.Sum("efla_prompt_tokens_total"), 3 * 70 + 2 + 3);
  const double drawn = metrics.Sum("efla_generation_tokens_total");
  EXPECT_GT(drawn, 3 * 10);
  EXPECT_EQ(metrics.Sum("efla_time_to_first_token_seconds_count"), 4);
  // One gap fewer than tokens in each of the four streams; the cancelled one may have drawn one more unseen.
  EXPECT_NEAR(metrics.Sum("efla_inter_token_latency_seconds_count"), drawn - 4, 2);
  EXPECT_GT(metrics.Sum("efla_step_seconds_count"), 30);
  EXPECT_EQ(metrics.Sum("efla_step_seconds_bucket", {"le=\"+Inf\""}), metrics.Sum("efla_step_seconds_count"));
}

TEST_F(LifecycleTest, SigtermTellsBalancersThenClosesThePortAndLetsStreamsFinish) {
  StartServer({"--drain-delay", "3"});
  const auto watch = Watch(kGeneration);
  ASSERT_EQ(Next(*watch), kServing);
  v1::GenerateRequest request = Endless();
  request.set_time_budget_ms(6000);  // a normal end, some time after the signal
  BackgroundStream running(channel_, request);
  ASSERT_TRUE(running.WaitForEvents(3));

  server_->process().Signal(SIGTERM);
  EXPECT_EQ(Next(*watch), kNotServing) << "pushed, not asked for";
  EXPECT_EQ(HttpStatus("/livez"), 200);
  EXPECT_EQ(HttpStatus("/readyz"), 503);
  EXPECT_EQ(HttpStatus("/lbz"), 404);
  EXPECT_EQ(HealthOf(channel_, kGeneration), kNotServing);
  EXPECT_EQ(Metrics::Read(server_->admin_address()).Sum("efla_draining"), 1);
  // Whoever has not been told yet is served as ever.
  const Reply late = Generate(*stub_, GreedyRequest(std::vector<uint32_t>{5}, 1));
  EXPECT_TRUE(late.status.ok()) << ToString(late.status);

  Reply refused = late;
  ASSERT_TRUE(Eventually([&] {
    refused = Generate(*stub_, GreedyRequest(std::vector<uint32_t>{5}, 1));
    // gRPC cancels the call that reaches it just as the port closes; client/README.md tells clients so.
    return !refused.status.ok() && refused.status.error_code() != grpc::StatusCode::CANCELLED;
  }));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE) << ToString(refused.status);
  EXPECT_TRUE(refused.events.empty());
  const size_t events_then = running.num_events();
  EXPECT_EQ(HttpStatus("/livez"), 200);
  const grpc::Status end = running.Join();
  EXPECT_TRUE(end.ok()) << ToString(end);
  EXPECT_GT(running.num_events(), events_then) << "the stream went on after the port had closed";
  EXPECT_EQ(server_->WaitForExit(), 0);
}

TEST_F(LifecycleTest, HealthIsAnExitStatusForScripts) {
  StartServer({"--drain-delay", "5"});
  const auto health = [this](const std::vector<std::string>& flags) {
    std::vector<std::string> command = {ProgramPath("efla"), "health", "--target", server_->grpc_address()};
    command.insert(command.end(), flags.begin(), flags.end());
    return RunProgram(command);
  };
  EXPECT_EQ(health({}).exit_status, 0);
  EXPECT_EQ(health({}).out, "serving\n");
  EXPECT_EQ(health({"--service", ""}).exit_status, 0);
  const ProgramResult unknown = health({"--service", "no.such.Service"});
  EXPECT_EQ(unknown.exit_status, 1);
  EXPECT_NE(unknown.err.find("no.such.Service"), std::string::npos) << unknown.err;
  server_->process().Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] { return HttpStatus("/readyz") == 503; }));
  EXPECT_EQ(health({}).exit_status, 1);
  EXPECT_NE(health({}).err.find("not serving"), std::string::npos);
  EXPECT_EQ(health({"--service", ""}).exit_status, 0) << "the process lives";
  server_->process().Signal(SIGTERM);  // the delay is not waited for
  EXPECT_TRUE(server_->WaitForExit(seconds(5)).has_value());
}

TEST_F(LifecycleTest, AnIdleServerEndsAtOnce) {
  StartServer();
  ASSERT_TRUE(Generate(*stub_, GreedyRequest(std::vector<uint32_t>{5}, 1)).status.ok());
  EXPECT_EQ(server_->Terminate(seconds(3)), 0);
}

TEST_F(LifecycleTest, ASecondSigtermEndsRunningStreamsAtOnce) {
  StartServer();
  const auto watch = Watch(kGeneration);
  ASSERT_EQ(Next(*watch), kServing);
  BackgroundStream running(channel_, Endless());
  ASSERT_TRUE(running.WaitForEvents(3));
  server_->process().Signal(SIGTERM);
  ASSERT_EQ(Next(*watch), kNotServing);
  EXPECT_TRUE(server_->Terminate(seconds(10)).has_value());
  const grpc::Status end = running.Join();
  EXPECT_TRUE(end.error_code() == grpc::StatusCode::UNAVAILABLE ||
              end.error_code() == grpc::StatusCode::CANCELLED)
      << ToString(end);
}

TEST_F(LifecycleTest, ASecondSigtermEndsADrainThatCannotWriteItsSessions) {
  const TempDir folder;
  StartServer(
      {"--session-dir", folder.path() / "sessions", "--session-dir-bytes", "1", "--drain-timeout", "60"});
  v1::GenerateRequest turn = GreedyRequest(std::vector<uint32_t>{5}, 1);
  turn.mutable_session()->set_session_id("stuck");
  turn.mutable_session()->set_create_if_missing(true);
  ASSERT_TRUE(Generate(*stub_, turn).status.ok());
  server_->process().Signal(SIGTERM);
  EXPECT_FALSE(server_->WaitForExit(seconds(3)).has_value()) << "it tries to write for a minute";
  EXPECT_EQ(server_->Terminate(seconds(10)), 1);
}

TEST_F(LifecycleTest, TheDrainTimeoutEndsWhatStillRuns) {
  StartServer({"--drain-timeout", "0.3"});
  BackgroundStream running(channel_, Endless());
  ASSERT_TRUE(running.WaitForEvents(3));
  EXPECT_EQ(server_->Terminate(seconds(10)), 0);
  const grpc::Status end = running.Join();
  EXPECT_EQ(end.error_code(), grpc::StatusCode::UNAVAILABLE) << ToString(end);
}

}  // namespace
}  // namespace efla::e2e
