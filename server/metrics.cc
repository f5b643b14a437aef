#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <chrono>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "server/build_id.h"
#include "server/process_metrics.h"

namespace efla {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Labels;
using Buckets = Histogram::BucketBoundaries;

// Fine at the low end: a model of constant state emits a token every few milliseconds.
const Buckets kFirstTokenSeconds = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,
                                    .75,  1,    2.5, 5,   7.5, 10,  20,  40, 80,  160};
const Buckets kTokenSeconds = {.001, .002, .004, .006, .008, .01, .015, .02, .025, .03,
                               .04,  .05,  .075, .1,   .15,  .2,  .3,   .5,  1,    2.5};
const Buckets kPhaseSeconds = {.005, .01, .025, .05, .1,  .25, .5,  1,   2.5, 5,
                               10,   20,  30,   60,  120, 240, 480, 960, 1920};
const Buckets kTokens = {1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                         2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000};
const Buckets kRows = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
const Buckets kStepTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

constexpr std::array<const char*, kNumRpcMethods> kMethodNames = {
    "Generate", "Complete", "Score",         "GetModel", "Tokenize", "Detokenize", "RenderChat", "Create",
    "Get",      "List",     "Append",        "Fork",     "Mark",     "Rewind",     "Delete",     "Move",
    "Export",   "Import",   "GetServerInfo", "GetLoad",  "Drain",    "SetLogLevel"};
constexpr std::array<const char*, kNumRejections> kRejectionNames = {
    "invalid", "queue_full",   "unavailable",   "deadline", "cancelled",
    "auth",    "tenant_limit", "session_limit", "error"};
constexpr std::array<const char*, kNumAuthFailures> kAuthFailureNames = {"missing", "unknown", "expired",
                                                                         "role", "priority"};
constexpr std::array<const char*, 2> kReloadNames = {"failed", "ok"};
constexpr std::array<const char*, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

enum Phase { kDecode, kPrefill, kMixed };
constexpr std::array<const char*, 3> kPhaseNames = {"decode", "prefill", "mixed"};

constexpr std::array<const char*, 8> kOutcomeNames = {
    "stop", "length", "cancelled", "deadline", "rejected", "unavailable", "error", "unsatisfiable"};
using Outcome = EngineObserver::Outcome;

enum OutcomeClass { kOk, kClient, kServer };
constexpr std::array<const char*, 3> kOutcomeClassNames = {"ok", "client", "server"};

OutcomeClass ClassOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kStop:
    case Outcome::kLength:
      return kOk;
    case Outcome::kCancelled:
    case Outcome::kDeadline:
    case Outcome::kUnsatisfiable:
      return kClient;
    case Outcome::kRejected:
    case Outcome::kUnavailable:
    case Outcome::kError:
      return kServer;
  }
  return kServer;
}

Outcome OutcomeOf(Rejection rejection) {
  switch (rejection) {
    case Rejection::kInvalid:
    case Rejection::kQueueFull:
    case Rejection::kAuth:
    case Rejection::kLimit:
    case Rejection::kSessionLimit:
      return Outcome::kRejected;
    case Rejection::kError:
      return Outcome::kError;
    case Rejection::kUnavailable:
      return Outcome::kUnavailable;
    case Rejection::kDeadline:
      return Outcome::kDeadline;
    case Rejection::kCancelled:
      return Outcome::kCancelled;
  }
  return Outcome::kRejected;
}

// One series a value of a label.
template <size_t kSize, typename Make>
auto MakeArray(const std::array<const char*, kSize>& values, Make make) {
  std::array<decltype(&make("")), kSize> series;
  for (size_t i = 0; i < kSize; ++i) series[i] = &make(values[i]);
  return series;
}

// A counter that somebody else keeps: raised to what that one says at each scrape.
class Total {
 public:
  explicit Total(Counter& counter) : counter_(&counter) {}
  void RaiseTo(double total) {
    if (total > counter_->Value()) counter_->Increment(total - counter_->Value());
  }

 private:
  Counter* counter_;
};

double Seconds(int64_t microseconds) { return static_cast<double>(microseconds) * 1e-6; }

}  // namespace

const char* RpcMethodName(RpcMethod method) { return kMethodNames[static_cast<size_t>(method)]; }

// References into the registry, each made with value 0 at the start.
struct Metrics::Series {
  explicit Series(const std::string& model) : labels{{"model", model}} {}

  Labels With(Labels more) const {
    more.insert(labels.begin(), labels.end());
    return more;
  }
  Counter& MakeCounter(const std::string& name, const std::string& help, const Labels& more = {}) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(With(more));
  }
  Gauge& MakeGauge(const std::string& name, const std::string& help, const Labels& more = {}) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(With(more));
  }
  Histogram& MakeHistogram(const std::string& name, const std::string& help, const Buckets& buckets,
                           const Labels& more = {}) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(With(more), buckets);
  }
  Total MakeTotal(const std::string& name, const std::string& help, const Labels& more = {}) {
    return Total(MakeCounter(name, help, more));
  }
  template <size_t kSize>
  std::array<Total, kSize> MakeTotals(const std::string& name, const std::string& help,
                                      const std::string& label,
                                      const std::array<const char*, kSize>& values) {
    return std::apply(
        [&](auto... value) {
          return std::array<Total, kSize>{MakeTotal(name, help, {{label, value}})...};
        },
        values);
  }
  void SetSessions(const SessionManager::Stats& stats) {
    sessions.Set(stats.sessions);
    turns.Set(stats.turns);
    const int tiers[] = {stats.contexts_device, stats.contexts_host, stats.contexts_stored};
    for (size_t i = 0; i < contexts.size(); ++i) contexts[i]->Set(tiers[i]);
    host_bytes.Set(static_cast<double>(stats.host_bytes));
    dirty.Set(stats.dirty);
    const uint64_t lifted[] = {stats.lifts_host, stats.lifts_disk, stats.lifts_shared};
    for (size_t i = 0; i < lifts.size(); ++i) lifts[i].RaiseTo(static_cast<double>(lifted[i]));
    sinks.RaiseTo(static_cast<double>(stats.sinks));
    takeovers.RaiseTo(static_cast<double>(stats.takeovers));
    stored_bytes.RaiseTo(static_cast<double>(stats.stored_bytes));
    store_errors.RaiseTo(static_cast<double>(stats.store_errors));
  }
  const Labels labels;
  prometheus::Registry registry{prometheus::Registry::InsertBehavior::Merge};
  std::mutex scrape_mutex;  // gauges are set and read by one scrape at a time

  // Scheduler and state pool.
  Gauge& waiting = MakeGauge("efla_requests_waiting", "Requests that wait for their first step.");
  Gauge& running = MakeGauge("efla_requests_running", "Requests in the batch.");
  Gauge& parked = MakeGauge("efla_requests_parked", "Running requests that wait for their reader.");
  Gauge& queued_tokens = MakeGauge("efla_queue_prompt_tokens", "Prompt tokens of the requests that wait.");
  Gauge& queue_age = MakeGauge("efla_queue_age_seconds", "Age of the oldest request that waits.");
  Gauge& usage_ratio = MakeGauge("efla_state_pool_usage_ratio", "State slots in use, 0 to 1.");
  std::array<Gauge*, 4> slots =
      MakeArray(std::array{"total", "live", "shared", "free"}, [&](const char* kind) -> Gauge& {
        return MakeGauge("efla_state_slots", "State slots; total is the sum of the others.",
                         {{"kind", kind}});
      });
  std::array<Gauge*, 2> pool_bytes =
      MakeArray(std::array{"used", "capacity"}, [&](const char* kind) -> Gauge& {
        return MakeGauge("efla_state_pool_bytes", "Device memory of the state pool.",
                         {{"kind", kind}, {"tier", "device"}});
      });
  Gauge& last_step =
      MakeGauge("efla_engine_last_step_timestamp_seconds", "When the last step ended, since 1970.");
  Gauge& ready = MakeGauge("efla_ready", "1 when new requests are welcome.");
  Gauge& draining = MakeGauge("efla_draining", "1 from the first SIGTERM.");
  Gauge& slot_bytes = MakeGauge("efla_state_slot_bytes", "Device memory of one state slot.");
  Gauge& startup_seconds = MakeGauge("efla_startup_seconds", "From the start until the model was loaded.");
  Gauge& scrape_seconds =
      MakeGauge("efla_metrics_scrape_seconds", "How long the scrape before this one took to write down.");

  // Sessions.
  Gauge& sessions = MakeGauge("efla_sessions", "Sessions that this server knows.");
  Gauge& turns = MakeGauge("efla_session_turns_active", "Turns under way.");
  std::array<Gauge*, 3> contexts =
      MakeArray(std::array{"device", "host", "stored"}, [&](const char* tier) -> Gauge& {
        return MakeGauge("efla_session_contexts",
                         "Contexts (heads, kept turns, marks) by the highest tier that holds them.",
                         {{"tier", tier}});
      });
  Gauge& host_bytes = MakeGauge("efla_session_host_bytes", "Host memory of sessions' states.");
  Gauge& dirty =
      MakeGauge("efla_session_dirty_revisions", "Revisions that no store has yet, where there is one.");
  std::array<Total, 3> lifts =
      MakeTotals("efla_session_lifts_total", "States lifted to the device, by where they were.", "from",
                 std::array{"host", "disk", "shared"});
  Total sinks = MakeTotal("efla_session_sinks_total", "States put to rest in a lower tier.");
  Total takeovers = MakeTotal("efla_session_takeovers_total", "Sessions claimed from another server.");
  Total stored_bytes = MakeTotal("efla_session_stored_bytes_total", "Bytes written to stores.");
  Total store_errors = MakeTotal("efla_session_store_errors_total", "Failed calls of stores.");

  // Prefix cache.
  Total cache_lookups = MakeTotal("efla_prefix_cache_lookups_total", "Prompts that asked the prefix cache.");
  Total cache_hits = MakeTotal("efla_prefix_cache_hits_total", "Prompts that found a beginning there.");
  Total cache_tokens = MakeTotal("efla_prefix_cache_hit_tokens_total", "Prompt tokens taken from there.");
  Gauge& cache_slots = MakeGauge("efla_prefix_cache_slots", "State slots that the prefix cache holds.");

  // Steps.
  Histogram& decode_rows =
      MakeHistogram("efla_batch_size", "Sequences in a step, by phase.", kRows, {{"phase", "decode"}});
  Histogram& step_tokens = MakeHistogram("efla_step_tokens", "Tokens in a step.", kStepTokens);
  std::array<Histogram*, 3> step_seconds = MakeArray(kPhaseNames, [&](const char* phase) -> Histogram& {
    return MakeHistogram("efla_step_seconds", "Time of a step, by what it held.", kTokenSeconds,
                         {{"phase", phase}});
  });
  std::array<Counter*, 3> busy_seconds = MakeArray(kPhaseNames, [&](const char* phase) -> Counter& {
    return MakeCounter("efla_engine_busy_seconds_total", "Time with a step on the device, by what it held.",
                       {{"phase", phase}});
  });
  Counter& host_seconds =
      MakeCounter("efla_engine_host_seconds_total", "Time of the engine's own work between steps.");

  // Requests.
  std::array<Counter*, kOutcomeNames.size()> requests =
      MakeArray(kOutcomeNames, [&](const char* outcome) -> Counter& {
        return MakeCounter("efla_requests_total", "Requests that ended, each once.", {{"outcome", outcome}});
      });
  std::array<Counter*, kNumRejections> rejected =
      MakeArray(kRejectionNames, [&](const char* reason) -> Counter& {
        return MakeCounter("efla_requests_rejected_total", "Requests refused before they ran.",
                           {{"reason", reason}});
      });
  std::array<Histogram*, 3> duration =
      MakeArray(kOutcomeClassNames, [&](const char* outcome_class) -> Histogram& {
        return MakeHistogram("efla_request_duration_seconds", "Whole requests.", kPhaseSeconds,
                             {{"outcome_class", outcome_class}});
      });
  Histogram& first_token = MakeHistogram("efla_time_to_first_token_seconds",
                                         "From the submission to the first token.", kFirstTokenSeconds);
  Histogram& token_gap =
      MakeHistogram("efla_inter_token_latency_seconds", "Between two tokens of a stream.", kTokenSeconds);
  Histogram& per_token =
      MakeHistogram("efla_time_per_output_token_seconds",
                    "Per request: time after the first token, by the tokens after it.", kTokenSeconds);
  Histogram& queue = MakeHistogram("efla_request_queue_seconds", "Until the first step.", kPhaseSeconds);
  Histogram& prefill = MakeHistogram("efla_request_prefill_seconds",
                                     "From there until the prompt was computed.", kPhaseSeconds);
  Histogram& decode =
      MakeHistogram("efla_request_decode_seconds", "From there until the end.", kPhaseSeconds);
  Counter& prompt_tokens = MakeCounter("efla_prompt_tokens_total", "Prompt tokens computed, as they are.");
  Counter& generation_tokens = MakeCounter("efla_generation_tokens_total", "Tokens drawn, as they are.");
  Histogram& request_prompt =
      MakeHistogram("efla_request_prompt_tokens", "Prompt tokens of a request.", kTokens);
  Histogram& request_generation =
      MakeHistogram("efla_request_generation_tokens", "Tokens drawn by a request.", kTokens);

  // Access.
  std::array<Counter*, kNumAuthFailures> auth_failures =
      MakeArray(kAuthFailureNames, [&](const char* reason) -> Counter& {
        return MakeCounter("efla_auth_failures_total", "Calls whose credential did not do.",
                           {{"reason", reason}});
      });
  std::array<Counter*, 2> auth_reloads = MakeArray(kReloadNames, [&](const char* result) -> Counter& {
    return MakeCounter("efla_auth_reloads_total", "Readings of a changed auth file.", {{"result", result}});
  });
  std::array<Counter*, 2> tls_reloads = MakeArray(kReloadNames, [&](const char* result) -> Counter& {
    return MakeCounter("efla_tls_reloads_total", "Readings of changed certificates.", {{"result", result}});
  });
  void SetTenant(const TenantUse::Stats& stats) {
    const auto with = [&](Labels more = {}) {
      more["tenant"] = stats.tenant;
      return more;
    };
    MakeTotal("efla_tenant_calls_total", "Calls let in.", with()).RaiseTo(static_cast<double>(stats.calls));
    MakeTotal("efla_tenant_tokens_total", "Tokens counted against the tenant's rate: of prompts, and drawn.",
              with())
        .RaiseTo(static_cast<double>(stats.tokens));
    for (int i = 0; i < kNumTenantLimits; ++i) {
      const char* limit = TenantLimitName(static_cast<TenantLimit>(i));
      MakeTotal("efla_tenant_refusals_total", "Calls refused by a limit of the tenant.",
                with({{"limit", limit}}))
          .RaiseTo(static_cast<double>(stats.refused[i]));
    }
    MakeGauge("efla_tenant_requests_running", "Calls under way that use the engine.", with())
        .Set(stats.running);
    MakeGauge("efla_tenant_requests_waiting", "Of these, those that wait for their first step.", with())
        .Set(stats.queued);
  }
  std::function<std::vector<TenantUse::Stats>()> tenants;  // guarded by scrape_mutex

  // Calls.
  std::array<Counter*, kNumRpcMethods> calls_started =
      MakeArray(kMethodNames, [&](const char* method) -> Counter& {
        return MakeCounter("efla_grpc_calls_started_total", "Calls begun.", {{"method", method}});
      });
  std::array<std::array<Counter*, kCodeNames.size()>, kNumRpcMethods> calls_handled;
  std::array<Histogram*, kNumRpcMethods> call_seconds =
      MakeArray(kMethodNames, [&](const char* method) -> Histogram& {
        return MakeHistogram("efla_grpc_call_seconds", "Whole calls, by any status.", kPhaseSeconds,
                             {{"method", method}});
      });
  std::array<Gauge*, kNumRpcMethods> streams = MakeArray(kMethodNames, [&](const char* method) -> Gauge& {
    return MakeGauge("efla_grpc_streams_active", "Calls open now.", {{"method", method}});
  });
};

Metrics::Metrics(const std::string& model_name, const ServingState& state)
    : state_(state), series_(std::make_unique<Series>(model_name)) {
  for (size_t method = 0; method < kMethodNames.size(); ++method) {
    for (size_t code = 0; code < kCodeNames.size(); ++code) {
      series_->calls_handled[method][code] =
          &series_->MakeCounter("efla_grpc_calls_handled_total", "Calls ended, by status.",
                                {{"method", kMethodNames[method]}, {"code", kCodeNames[code]}});
    }
  }
  series_
      ->MakeGauge("efla_build_info", "1; the build.",
                  {{"version", EFLA_VERSION}, {"build", BuildId()}, {"compiler", __VERSION__}})
      .Set(1);
}

Metrics::~Metrics() = default;

void Metrics::DescribeModel(const ServedModel& model) {
  series_->slot_bytes.Set(static_cast<double>(model.slot_bytes));
  series_->startup_seconds.Set(std::chrono::duration<double>(Clock::now() - start_).count());
  series_
      ->MakeGauge("efla_model_info", "1; the served model.",
                  {{"type", std::string(ModelTypeName(model.config->type))},
                   {"device", model.device},
                   {"dtype", model.weight_dtype}})
      .Set(1);
}

void Metrics::OnCallStarted(RpcMethod method) {
  series_->calls_started[static_cast<size_t>(method)]->Increment();
  series_->streams[static_cast<size_t>(method)]->Increment();
}

void Metrics::OnCallEnded(RpcMethod method, int code, double seconds) {
  series_->call_seconds[static_cast<size_t>(method)]->Observe(seconds);
  series_->calls_handled[static_cast<size_t>(method)].at(static_cast<size_t>(code))->Increment();
  series_->streams[static_cast<size_t>(method)]->Decrement();
}

void Metrics::OnRefused(Rejection rejection, bool reached_engine, double seconds) {
  series_->rejected[static_cast<size_t>(rejection)]->Increment();
  if (reached_engine) return;
  const Outcome outcome = OutcomeOf(rejection);
  series_->requests[static_cast<size_t>(outcome)]->Increment();
  const bool by_client = rejection == Rejection::kInvalid || rejection == Rejection::kAuth;
  series_->duration[by_client ? kClient : ClassOf(outcome)]->Observe(seconds);
}

void Metrics::OnAuthFailure(AuthFailure failure) {
  series_->auth_failures[static_cast<size_t>(failure)]->Increment();
}

void Metrics::OnAuthReload(bool ok) { series_->auth_reloads[ok ? 1 : 0]->Increment(); }
void Metrics::OnTlsReload(bool ok) { series_->tls_reloads[ok ? 1 : 0]->Increment(); }

void Metrics::SetCertificateEnds(std::chrono::system_clock::time_point server,
                                 std::chrono::system_clock::time_point client_ca) {
  const auto set = [&](const char* usage, std::chrono::system_clock::time_point end) {
    if (end == std::chrono::system_clock::time_point::max()) return;
    series_
        ->MakeGauge("efla_tls_cert_not_after_timestamp_seconds", "When the certificate ends, since 1970.",
                    {{"usage", usage}})
        .Set(std::chrono::duration<double>(end.time_since_epoch()).count());
  };
  set("server", server);
  set("client_ca", client_ca);
}

void Metrics::SetTenants(std::function<std::vector<TenantUse::Stats>()> tenants) {
  const std::scoped_lock lock(series_->scrape_mutex);
  series_->tenants = std::move(tenants);
}

void Metrics::OnStep(const Step& step) {
  const Phase phase = step.prefill_tokens == 0 ? kDecode : step.decode_rows == 0 ? kPrefill : kMixed;
  if (step.decode_rows > 0) series_->decode_rows.Observe(step.decode_rows);
  series_->step_tokens.Observe(step.decode_rows + step.prefill_tokens);
  series_->step_seconds[phase]->Observe(step.seconds);
  series_->busy_seconds[phase]->Increment(step.seconds);
  series_->host_seconds.Increment(step.host_seconds);
  series_->prompt_tokens.Increment(step.prefill_tokens);
}

void Metrics::OnFirstToken(double seconds_since_submit) {
  series_->first_token.Observe(seconds_since_submit);
  series_->generation_tokens.Increment();
}

void Metrics::OnTokenGap(double seconds) {
  series_->token_gap.Observe(seconds);
  series_->generation_tokens.Increment();
}

void Metrics::OnEnd(Outcome outcome, const Usage& usage, const Timing& timing) {
  Series& s = *series_;
  s.requests[static_cast<size_t>(outcome)]->Increment();
  s.duration[ClassOf(outcome)]->Observe(Seconds(timing.total_us));
  const bool ran = timing.queue_us > 0 || timing.prefill_us > 0;
  if (!ran) return;
  s.queue.Observe(Seconds(timing.queue_us));
  s.request_prompt.Observe(static_cast<double>(usage.prompt_tokens));
  s.request_generation.Observe(static_cast<double>(usage.completion_tokens));
  if (timing.prefill_us > 0) {
    s.prefill.Observe(Seconds(timing.prefill_us));
    s.decode.Observe(Seconds(timing.total_us - timing.queue_us - timing.prefill_us));
  }
  if (timing.first_token_us > 0 && usage.completion_tokens > 1) {
    s.per_token.Observe(Seconds(timing.total_us - timing.first_token_us) /
                        static_cast<double>(usage.completion_tokens - 1));
  }
}

std::string Metrics::Scrape() {
  Series& s = *series_;
  const std::scoped_lock lock(s.scrape_mutex);
  const Clock::time_point begin = Clock::now();
  s.ready.Set(state_.ready());
  s.draining.Set(state_.leaving());
  if (s.tenants) {
    for (const TenantUse::Stats& stats : s.tenants()) s.SetTenant(stats);
  }
  if (const ServedModel* model = state_.model()) {
    const EngineStats stats = model->engine->stats();
    s.waiting.Set(stats.waiting);
    s.running.Set(stats.running);
    s.parked.Set(stats.parked);
    s.queued_tokens.Set(static_cast<double>(stats.queued_prompt_tokens));
    s.queue_age.Set(stats.oldest_wait_seconds);
    const int used = stats.slots.live + stats.slots.shared;
    s.usage_ratio.Set(stats.slots.total > 0 ? static_cast<double>(used) / stats.slots.total : 0);
    const int counts[] = {stats.slots.total, stats.slots.live, stats.slots.shared, stats.slots.free};
    for (size_t i = 0; i < s.slots.size(); ++i) s.slots[i]->Set(counts[i]);
    s.pool_bytes[0]->Set(static_cast<double>(used) * static_cast<double>(model->slot_bytes));
    s.pool_bytes[1]->Set(static_cast<double>(stats.slots.total) * static_cast<double>(model->slot_bytes));
    const auto now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch());
    if (stats.steps > 0) s.last_step.Set(now.count() - stats.seconds_since_step);
    s.cache_lookups.RaiseTo(static_cast<double>(stats.prefix_cache_lookups));
    s.cache_hits.RaiseTo(static_cast<double>(stats.prefix_cache_hits));
    s.cache_tokens.RaiseTo(static_cast<double>(stats.prefix_cache_hit_tokens));
    s.cache_slots.Set(stats.prefix_cache_slots);
    if (model->sessions != nullptr) s.SetSessions(model->sessions->stats());
  }
  std::vector<prometheus::MetricFamily> families = s.registry.Collect();
  for (prometheus::MetricFamily& family : CollectProcessMetrics()) families.push_back(std::move(family));
  std::string text = prometheus::TextSerializer().Serialize(families);
  s.scrape_seconds.Set(std::chrono::duration<double>(Clock::now() - begin).count());
  return text;
}

}  // namespace efla
