#include "server/metrics.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/build_id.h"

namespace efla {
namespace {

class MetricsTest : public testing::Test {
 protected:
  bool Has(std::string line) {
    std::string page(1, '\n');
    page += metrics_.Scrape();
    line += '\n';
    return page.find('\n' + line) != std::string::npos;
  }

  ServingState state_;
  Metrics metrics_{"demo", state_};
};

TEST_F(MetricsTest, EverySeriesIsThereFromTheStart) {
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="stop"} 0)"));
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="error"} 0)"));
  EXPECT_TRUE(Has(R"(efla_requests_rejected_total{model="demo",reason="queue_full"} 0)"));
  EXPECT_TRUE(Has(R"(efla_grpc_calls_handled_total{code="UNAVAILABLE",method="Score",model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_inter_token_latency_seconds_count{model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_ready{model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_sessions{model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_session_contexts{model="demo",tier="host"} 0)"));
  EXPECT_TRUE(Has(R"(efla_session_lifts_total{from="disk",model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_prefix_cache_hits_total{model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_grpc_calls_handled_total{code="ABORTED",method="Append",model="demo"} 0)"));
  EXPECT_NE(metrics_.Scrape().find("\nprocess_resident_memory_bytes "), std::string::npos);
}

TEST_F(MetricsTest, TheBuildIsToldByItsId) {
  EXPECT_NE(metrics_.Scrape().find("\nefla_build_info{build=\"" + BuildId() + "\",compiler="),
            std::string::npos);
}

TEST_F(MetricsTest, AnEndIsCountedOnceWithItsPhases) {
  metrics_.OnEnd(EngineObserver::Outcome::kLength, {.prompt_tokens = 100, .completion_tokens = 11},
                 {.queue_us = 1000, .prefill_us = 20'000, .first_token_us = 30'000, .total_us = 130'000});
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="length"} 1)"));
  EXPECT_TRUE(Has(R"(efla_request_prompt_tokens_sum{model="demo"} 100)"));
  EXPECT_TRUE(Has(R"(efla_request_generation_tokens_sum{model="demo"} 11)"));
  EXPECT_TRUE(Has(R"(efla_request_duration_seconds_count{model="demo",outcome_class="ok"} 1)"));
  // 100 ms over the ten tokens after the first.
  EXPECT_TRUE(Has(R"(efla_time_per_output_token_seconds_bucket{model="demo",le="0.008"} 0)"));
  EXPECT_TRUE(Has(R"(efla_time_per_output_token_seconds_bucket{model="demo",le="0.015"} 1)"));
}

TEST_F(MetricsTest, TokensAreCountedAsTheyAreMade) {
  metrics_.OnStep({.decode_rows = 0, .prefill_tokens = 64, .sample_rows = 1, .seconds = 1});
  metrics_.OnFirstToken(1);
  metrics_.OnTokenGap(0.5);
  metrics_.OnTokenGap(0.5);
  EXPECT_TRUE(Has(R"(efla_prompt_tokens_total{model="demo"} 64)"));
  EXPECT_TRUE(Has(R"(efla_generation_tokens_total{model="demo"} 3)"));
}

TEST_F(MetricsTest, ARefusalIsCountedOnce) {
  metrics_.OnRefused(Rejection::kInvalid, /*reached_engine=*/false, 0.001);
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="rejected"} 1)"));
  metrics_.OnRefused(Rejection::kQueueFull, /*reached_engine=*/true, 0.001);
  metrics_.OnEnd(EngineObserver::Outcome::kRejected, {}, {});
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="rejected"} 2)"));
  EXPECT_TRUE(Has(R"(efla_requests_rejected_total{model="demo",reason="invalid"} 1)"));
  EXPECT_TRUE(Has(R"(efla_requests_rejected_total{model="demo",reason="queue_full"} 1)"));
}

TEST_F(MetricsTest, RefusalsAreToldApartByWhoseFaultTheyAre) {
  metrics_.OnRefused(Rejection::kError, /*reached_engine=*/false, 0.001);
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="error"} 1)"));
  EXPECT_TRUE(Has(R"(efla_request_duration_seconds_count{model="demo",outcome_class="server"} 1)"));
  metrics_.OnRefused(Rejection::kAuth, /*reached_engine=*/false, 0.001);
  EXPECT_TRUE(Has(R"(efla_request_duration_seconds_count{model="demo",outcome_class="client"} 1)"));
  metrics_.OnRefused(Rejection::kSessionLimit, /*reached_engine=*/false, 0.001);
  metrics_.OnRefused(Rejection::kLimit, /*reached_engine=*/false, 0.001);
  EXPECT_TRUE(Has(R"(efla_requests_total{model="demo",outcome="rejected"} 3)"));
  for (const char* reason : {"error", "auth", "session_limit", "tenant_limit"}) {
    EXPECT_TRUE(Has("efla_requests_rejected_total{model=\"demo\",reason=\"" + std::string(reason) + "\"} 1"))
        << reason;
  }
  EXPECT_TRUE(Has(R"(efla_requests_rejected_total{model="demo",reason="invalid"} 0)"));
  EXPECT_TRUE(Has(R"(efla_requests_rejected_total{model="demo",reason="queue_full"} 0)"));
}

TEST_F(MetricsTest, TenantsAreReadAtEachScrape) {
  TenantUse use("acme");
  metrics_.SetTenants([&] { return std::vector<TenantUse::Stats>{use.stats()}; });
  EXPECT_TRUE(Has(R"(efla_tenant_calls_total{model="demo",tenant="acme"} 0)"));
  const Clock::time_point now{};
  use.SetLimits({.max_concurrent = 1}, now);
  EXPECT_FALSE(use.AdmitCall(now));
  EXPECT_FALSE(use.BeginWork(now));
  EXPECT_FALSE(use.Queue(20, now));
  use.Draw(5, now);
  EXPECT_TRUE(use.BeginWork(now));
  EXPECT_TRUE(Has(R"(efla_tenant_calls_total{model="demo",tenant="acme"} 1)"));
  EXPECT_TRUE(Has(R"(efla_tenant_tokens_total{model="demo",tenant="acme"} 25)"));
  EXPECT_TRUE(Has(R"(efla_tenant_requests_running{model="demo",tenant="acme"} 1)"));
  EXPECT_TRUE(Has(R"(efla_tenant_requests_waiting{model="demo",tenant="acme"} 1)"));
  EXPECT_TRUE(Has(R"(efla_tenant_refusals_total{limit="concurrent",model="demo",tenant="acme"} 1)"));
  EXPECT_TRUE(Has(R"(efla_tenant_refusals_total{limit="tokens",model="demo",tenant="acme"} 0)"));
  metrics_.SetTenants(nullptr);
  EXPECT_TRUE(Has(R"(efla_tenant_calls_total{model="demo",tenant="acme"} 1)")) << "what was counted stays";
}

TEST_F(MetricsTest, StepsAreToldApartByWhatTheyHold) {
  metrics_.OnStep(
      {.decode_rows = 3, .prefill_tokens = 0, .sample_rows = 3, .seconds = 0.5, .host_seconds = 0.25});
  metrics_.OnStep({.decode_rows = 0, .prefill_tokens = 64, .sample_rows = 1, .seconds = 1});
  metrics_.OnStep({.decode_rows = 3, .prefill_tokens = 64, .sample_rows = 4, .seconds = 2});
  EXPECT_TRUE(Has(R"(efla_engine_busy_seconds_total{model="demo",phase="decode"} 0.5)"));
  EXPECT_TRUE(Has(R"(efla_engine_busy_seconds_total{model="demo",phase="prefill"} 1)"));
  EXPECT_TRUE(Has(R"(efla_engine_busy_seconds_total{model="demo",phase="mixed"} 2)"));
  EXPECT_TRUE(Has(R"(efla_batch_size_count{model="demo",phase="decode"} 2)"));
}

TEST_F(MetricsTest, OpenCallsGoUpAndDown) {
  metrics_.OnCallStarted(RpcMethod::kGenerate);
  EXPECT_TRUE(Has(R"(efla_grpc_streams_active{method="Generate",model="demo"} 1)"));
  metrics_.OnCallEnded(RpcMethod::kGenerate, 1, 0.25);
  EXPECT_TRUE(Has(R"(efla_grpc_streams_active{method="Generate",model="demo"} 0)"));
  EXPECT_TRUE(Has(R"(efla_grpc_calls_handled_total{code="CANCELLED",method="Generate",model="demo"} 1)"));
  EXPECT_TRUE(Has(R"(efla_grpc_call_seconds_sum{method="Generate",model="demo"} 0.25)"));
}

}  // namespace
}  // namespace efla
