// efla load: measures a server under load.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/load_run.h"
#include "client/load_stats.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDefaultConcurrency = 8;
constexpr uint64_t kDefaultRequests = 64;
constexpr uint64_t kMostConcurrent = 100'000, kMostRequests = 1'000'000'000;
constexpr double kLeastRate = 0.001, kMostRate = 1e6;
constexpr uint64_t kWarmupSeed = 0x9e3779b97f4a7c15;  // mixed in, so that no warm-up prompt comes again

struct LoadFlags {
  ServerFlags server;
  std::optional<int> concurrency;
  std::optional<double> rate, duration;
  std::optional<uint64_t> requests;
  std::string prompt_lengths = "32";
  uint32_t max_tokens = 64;
  float temperature = 0;
  uint64_t seed = 1, warmup = 1;
  bool json = false, quiet = false, progress = false;
};

CLI::Validator PromptLengths() {
  return CLI::Validator(
      [](std::string& mix) { return std::string(PromptMix::Parse(mix).status().message()); },
      "TOKENS:WEIGHT,...");
}

absl::StatusOr<LoadPlan> MakePlan(const LoadFlags& flags, const v1::Model& model) {
  absl::StatusOr<PromptMix> mix = PromptMix::Parse(flags.prompt_lengths);
  if (!mix.ok()) return mix.status();
  LoadPlan plan;
  plan.prompts = *std::move(mix);
  if (flags.rate) {
    plan.requests_per_second = *flags.rate;
  } else {
    plan.concurrency = flags.concurrency.value_or(kDefaultConcurrency);
  }
  plan.requests = flags.requests.value_or(flags.duration ? 0 : kDefaultRequests);
  plan.duration_seconds = flags.duration.value_or(0);
  plan.vocab_size = model.vocab_size();
  plan.excluded_ids.assign(model.eos_token_ids().begin(), model.eos_token_ids().end());
  plan.excluded_ids.push_back(model.bos_token_id());
  plan.max_tokens = flags.max_tokens;
  plan.temperature = flags.temperature;
  plan.seed = flags.seed;
  plan.timeout = flags.server.timeout();
  if (plan.vocab_size <= plan.excluded_ids.size()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the model's vocabulary of %d leaves no ids for prompts", plan.vocab_size));
  }
  if (plan.prompts.longest() > model.limits().max_prompt_tokens()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a prompt length of --prompt-lengths is %d; the limit is %d", plan.prompts.longest(),
                        model.limits().max_prompt_tokens()));
  }
  return plan;
}

absl::Status WarmUp(Client& client, const LoadPlan& plan, uint64_t requests, const Interrupt& interrupt) {
  if (requests == 0) return absl::OkStatus();
  LoadPlan warmup = plan;
  warmup.requests_per_second = 0;
  warmup.concurrency = plan.concurrency > 0 ? plan.concurrency : kDefaultConcurrency;
  warmup.requests = requests;
  warmup.duration_seconds = 0;
  warmup.seed = plan.seed ^ kWarmupSeed;
  for (const RequestRecord& record : RunLoad(client.generation(), warmup, interrupt.token(), nullptr)) {
    if (!record.error.empty()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("a warm-up request failed: %s: %s", record.error, record.error_message));
    }
  }
  return absl::OkStatus();
}

void PrintProgress(const LoadProgress& progress, bool rewrite) {
  std::fprintf(stderr, "%s%6.0f s  %lu sent, %lu ended, %lu failed, %.1f messages/s%s",
               rewrite ? "\r\033[K" : "", progress.seconds, progress.sent, progress.ended, progress.failed,
               progress.chunks / progress.seconds, rewrite ? "" : "\n");
}

// vLLM's benchmark names, so that plots of its results take these too; the fields after "errors" are our own.
std::string ReportJson(const LoadReport& report, const LoadPlan& plan, const v1::Model& model) {
  Json json;
  json["backend"] = "efla";
  json["model_id"] = model.name();
  json["num_prompts"] = report.completed + report.failed;
  json["request_rate"] = plan.requests_per_second > 0 ? Json(plan.requests_per_second) : Json("inf");
  json["max_concurrency"] = plan.concurrency > 0 ? Json(plan.concurrency) : Json();
  json["duration"] = report.duration_seconds;
  json["completed"] = report.completed;
  json["failed"] = report.failed;
  json["total_input_tokens"] = report.input_tokens;
  json["total_output_tokens"] = report.output_tokens;
  json["request_throughput"] = report.request_throughput;
  json["output_throughput"] = report.output_throughput;
  json["total_token_throughput"] = report.total_token_throughput;
  const std::pair<const char*, const Summary*> summaries[] = {
      {"ttft", &report.ttft}, {"tpot", &report.tpot}, {"itl", &report.itl}, {"e2el", &report.e2el}};
  for (const auto& [name, summary] : summaries) {
    const std::pair<const char*, double> values[] = {{"mean", summary->mean},  {"median", summary->p50},
                                                     {"std", summary->stddev}, {"p50", summary->p50},
                                                     {"p95", summary->p95},    {"p99", summary->p99}};
    for (const auto& [statistic, value] : values) {
      json[absl::StrFormat("%s_%s_ms", statistic, name)] = summary->count > 0 ? Json(value) : Json();
    }
  }
  json["errors"] = Json::object();
  for (const auto& [code, count] : report.errors) json["errors"][code] = count;
  json["mean_concurrency"] = report.mean_concurrency;
  json["tokens_per_message"] = report.tokens_per_chunk;
  json["max_send_lag_ms"] = report.max_send_lag_ms;
  json["device"] = model.device();
  json["max_tokens"] = plan.max_tokens;
  return json.dump() + "\n";
}

std::string ReportText(const LoadReport& report, const LoadFlags& flags, const LoadPlan& plan,
                       const v1::Model& model, const std::string& target) {
  std::string loop = plan.concurrency > 0
                         ? absl::StrFormat("closed loop, %d in flight", plan.concurrency)
                         : absl::StrFormat("open loop, %.4g requests/s (Poisson)", plan.requests_per_second);
  std::string text = absl::StrFormat("%s on %s at %s: %s; prompts %s, %d tokens drawn\n", model.name(),
                                     model.device(), target, loop, flags.prompt_lengths, plan.max_tokens);
  text += absl::StrFormat("requests    %d completed, %d failed in %.2f s\n", report.completed, report.failed,
                          report.duration_seconds);
  for (const auto& [code, count] : report.errors) {
    text += absl::StrFormat("  %d x %s: %s\n", count, code, report.error_examples.at(code));
  }
  text += absl::StrFormat("throughput  %.2f requests/s, %.1f output tokens/s, %.1f total tokens/s\n",
                          report.request_throughput, report.output_throughput, report.total_token_throughput);
  text += absl::StrFormat("streams     %.1f in flight on average, %.2f tokens a message",
                          report.mean_concurrency, report.tokens_per_chunk);
  if (plan.concurrency == 0) text += absl::StrFormat(", sent at most %.1f ms late", report.max_send_lag_ms);
  text += "\n";
  text += absl::StrFormat("%-12s%10s%10s%10s%10s%10s\n", "ms", "mean", "p50", "p95", "p99", "max");
  const std::pair<const char*, const Summary*> rows[] = {
      {"TTFT", &report.ttft}, {"TPOT", &report.tpot}, {"ITL", &report.itl}, {"end to end", &report.e2el}};
  for (const auto& [name, row] : rows) {
    if (row->count == 0) continue;
    text += absl::StrFormat("%-12s%10.2f%10.2f%10.2f%10.2f%10.2f\n", name, row->mean, row->p50, row->p95,
                            row->p99, row->max);
  }
  return text;
}

int RunLoadCommand(const LoadFlags& flags) {
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::StatusOr<v1::Model> model = client->GetModel(v1::GetModelRequest(), options);
  if (!model.ok()) return CallExitStatus(model.status(), interrupt);
  absl::StatusOr<LoadPlan> plan = MakePlan(flags, *model);
  if (!plan.ok()) return ExitStatus(plan.status(), interrupt);
  absl::Status warm = WarmUp(*client, *plan, flags.warmup, interrupt);
  if (!warm.ok()) return ExitStatus(warm, interrupt);

  const bool terminal = isatty(STDERR_FILENO) != 0;
  bool progress_shown = false;
  std::function<void(const LoadProgress&)> on_progress;
  if (!flags.quiet && (terminal || flags.progress)) {
    constexpr double kQuietSeconds = 2;
    on_progress = [&](const LoadProgress& progress) {
      if (progress.seconds < kQuietSeconds) return;
      PrintProgress(progress, terminal);
      progress_shown = true;
    };
  }
  std::vector<RequestRecord> records = RunLoad(client->generation(), *plan, interrupt.token(), on_progress);
  if (terminal && progress_shown) std::fputs("\r\033[K", stderr);

  if (interrupt.token().stop_requested()) {  // what the interrupt cut short has not failed
    const std::string cancelled = absl::StatusCodeToString(absl::StatusCode::kCancelled);
    std::erase_if(records, [&](const RequestRecord& record) { return record.error == cancelled; });
  }
  LoadReport report = MakeReport(records);
  absl::Status written = WriteOut(flags.json ? ReportJson(report, *plan, *model)
                                             : ReportText(report, flags, *plan, *model, client->target()));
  if (!written.ok()) return ExitStatus(written, interrupt);
  if (report.failed > 0) {
    const auto& [code, message] = *report.error_examples.begin();
    return ExitStatus(absl::UnavailableError(absl::StrFormat("%d of %d requests failed; one of them: %s: %s",
                                                             report.failed, records.size(), code, message)),
                      interrupt);
  }
  return ExitStatus(absl::OkStatus(), interrupt);
}

}  // namespace

Command AddLoad(CLI::App& program) {
  auto flags = std::make_shared<LoadFlags>();
  CLI::App* app = program.add_subcommand("load", "Measure a server under load of random token-id prompts");
  AddServerFlags(*app, flags->server);
  CLI::Option* concurrency = app->add_option("--concurrency", flags->concurrency,
                                             "Closed loop: requests in flight (8 when left out)")
                                 ->check(WholeNumber(1, kMostConcurrent));
  app->add_option("--rate", flags->rate, "Open loop: requests a second, Poisson arrivals")
      ->check(Number(kLeastRate, kMostRate))
      ->excludes(concurrency);
  app->add_option("--requests", flags->requests,
                  "Requests to send (64 when neither this nor --duration is given)")
      ->check(WholeNumber(1, kMostRequests));
  app->add_option("--duration", flags->duration,
                  "Seconds to go on sending; what is in flight then is waited for")
      ->check(Number(kShortestSeconds, kLongestSeconds));
  app->add_option("--prompt-lengths", flags->prompt_lengths, "Mix of TOKENS:WEIGHT, as in 32:0.5,512:0.5")
      ->check(PromptLengths())
      ->capture_default_str();
  app->add_option("--max-tokens", flags->max_tokens,
                  "Tokens each request draws; end-of-text tokens are ignored")
      ->check(WholeNumber(1, kMaxUint32))
      ->capture_default_str();
  app->add_option("--temperature", flags->temperature, "0 is greedy")->capture_default_str();
  app->add_option("--seed", flags->seed, "Of prompts, arrivals and draws")
      ->check(WholeNumber(0, kMaxUint64))
      ->capture_default_str();
  app->add_option("--warmup", flags->warmup, "Requests sent before, not counted")
      ->check(WholeNumber(0, kMostRequests))
      ->capture_default_str();
  app->add_flag("--json", flags->json, "One JSON object, with the field names of vLLM's benchmark");
  CLI::Option* quiet = app->add_flag("--quiet", flags->quiet, "No progress line");
  app->add_flag("--progress", flags->progress, "Progress lines even where standard error is no terminal")
      ->excludes(quiet);
  return {app, [flags] { return RunLoadCommand(*flags); }};
}

}  // namespace efla
