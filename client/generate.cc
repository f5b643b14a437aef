// efla generate: streams a continuation to the terminal.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/command.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateFlags {
  ServerFlags server;
  PromptFlags prompt;
  std::optional<uint32_t> max_tokens, top_k, logprobs;
  std::optional<float> temperature, top_p, min_p;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false, json = false, stats = false;
};

v1::GenerateRequest MakeRequest(const GenerateFlags& flags, Prompt prompt) {
  v1::GenerateRequest request;
  SetPrompt(std::move(prompt), request);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  if (flags.temperature) sampling.set_temperature(*flags.temperature);
  if (flags.top_k) sampling.set_top_k(*flags.top_k);
  if (flags.top_p) sampling.set_top_p(*flags.top_p);
  if (flags.min_p) sampling.set_min_p(*flags.min_p);
  if (flags.seed) sampling.set_seed(*flags.seed);
  v1::StopParams& stopping = *request.mutable_stopping();
  if (flags.max_tokens) stopping.set_max_tokens(*flags.max_tokens);
  stopping.mutable_stop()->Assign(flags.stop.begin(), flags.stop.end());
  stopping.mutable_stop_token_ids()->Assign(flags.stop_token_ids.begin(), flags.stop_token_ids.end());
  stopping.set_ignore_eos(flags.ignore_eos);
  if (flags.logprobs) {
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(*flags.logprobs);
  }
  return request;
}

// "max_tokens" of FINISH_REASON_MAX_TOKENS.
std::string ReasonName(v1::FinishReason reason) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::FinishReason_Name(reason), "FINISH_REASON_"));
}

// `Part` is Delta or Finished.
template <typename Part>
Json TokensJson(const Part& part, const std::optional<uint32_t>& logprobs) {
  Json json;
  json["token_ids"] = Json::array();
  for (uint32_t id : part.token_ids()) json["token_ids"].push_back(id);
  json["text"] = part.text();
  if (!logprobs) return json;
  json["logprobs"] = Json::array();
  for (const v1::TokenLogprob& token : part.logprobs()) {
    json["logprobs"].push_back(token.has_logprob() ? Json(token.logprob()) : Json());
  }
  if (*logprobs == 0) return json;
  json["top_logprobs"] = Json::array();  // one list a token, best first
  for (const v1::TokenLogprob& token : part.logprobs()) {
    Json alternatives = Json::array();
    for (const auto& other : token.top()) {
      alternatives.push_back({{"token_id", other.token_id()}, {"logprob", other.logprob()}});
    }
    json["top_logprobs"].push_back(std::move(alternatives));
  }
  return json;
}

Json FinishedJson(const v1::Finished& finished, const v1::Accepted& accepted,
                  const std::optional<uint32_t>& logprobs) {
  Json json = TokensJson(finished, logprobs);
  json["finish_reason"] = ReasonName(finished.finish_reason());
  if (finished.has_stop()) json["stop"] = finished.stop();
  if (finished.has_token_id()) json["stop_token_id"] = finished.token_id();
  json["usage"] = {{"prompt_tokens", finished.usage().prompt_tokens()},
                   {"completion_tokens", finished.usage().completion_tokens()}};
  const v1::Timing& timing = finished.timing();
  json["timing"] = {{"queue_us", timing.queue_us()},
                    {"prefill_us", timing.prefill_us()},
                    {"first_token_us", timing.first_token_us()},
                    {"total_us", timing.total_us()}};
  json["model"] = accepted.model();
  json["seed"] = accepted.seed();
  json["request_id"] = accepted.request_id();
  return json;
}

std::string StatsLine(const v1::Finished& finished, const v1::Accepted& accepted) {
  constexpr double kMicrosPerSecond = 1e6;
  const v1::Timing& timing = finished.timing();
  uint64_t tokens = finished.usage().completion_tokens();
  double decode_seconds = (timing.total_us() - timing.first_token_us()) / kMicrosPerSecond;
  std::string rate = tokens > 1 && decode_seconds > 0
                         ? absl::StrFormat(", then %.1f tokens/s", (tokens - 1) / decode_seconds)
                         : "";
  return absl::StrFormat(
      "%d prompt and %d completion tokens; first token after %.1f ms%s; seed %d; ended by %s\n",
      finished.usage().prompt_tokens(), tokens, timing.first_token_us() / 1e3, rate, accepted.seed(),
      ReasonName(finished.finish_reason()));
}

int RunGenerate(const GenerateFlags& flags) {
  absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
  if (!prompt.ok()) return ExitStatus(prompt.status());

  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);

  v1::Accepted accepted;
  v1::Finished finished;
  absl::Status written;
  bool at_line_start = true;  // of the terminal, in text mode
  auto write = [&](const std::string& text) {
    if (text.empty()) return;
    at_line_start = text.back() == '\n';
    written = WriteOut(text);
  };
  auto on_event = [&](const v1::GenerateResponse& event) {
    if (event.has_accepted()) accepted = event.accepted();
    if (event.has_delta()) {
      write(flags.json ? TokensJson(event.delta(), flags.logprobs).dump() + "\n" : event.delta().text());
    }
    if (event.has_finished()) {
      finished = event.finished();
      write(flags.json ? FinishedJson(finished, accepted, flags.logprobs).dump() + "\n" : finished.text());
    }
    return written.ok();
  };
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::Status status = client->Generate(MakeRequest(flags, *std::move(prompt)), options, on_event);
  if (!written.ok()) return ExitStatus(written, interrupt);
  if (!at_line_start) write("\n");
  if (status.ok() && flags.stats) std::fputs(StatsLine(finished, accepted).c_str(), stderr);
  return CallExitStatus(status, interrupt);
}

}  // namespace

Command AddGenerate(CLI::App& program) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* app = program.add_subcommand("generate", "Stream a continuation of a prompt");
  AddServerFlags(*app, flags->server);
  AddPromptFlags(*app, flags->prompt);
  app->add_option("--max-tokens", flags->max_tokens, "Tokens drawn at most")
      ->check(WholeNumber(0, kMaxUint32));
  app->add_option("--temperature", flags->temperature, "0 is greedy");
  app->add_option("--top-k", flags->top_k, "Draw from the k most probable tokens; 0 is off")
      ->check(WholeNumber(0, kMaxUint32));
  app->add_option("--top-p", flags->top_p,
                  "Draw from the most probable tokens that reach this probability; 1 is off");
  app->add_option("--min-p", flags->min_p,
                  "Drop tokens less probable than this times the most probable; 0 is off");
  app->add_option("--seed", flags->seed, "The same seed and request give the same tokens")
      ->check(WholeNumber(0, kMaxUint64));
  app->add_option("--stop", flags->stop, "Text that ends the continuation; may be repeated")
      ->check(Utf8())
      ->allow_extra_args(false);
  app->add_option("--stop-token-id", flags->stop_token_ids,
                  "Token id that ends the continuation; may be repeated")
      ->check(WholeNumber(0, kMaxUint32))
      ->allow_extra_args(false);
  app->add_flag("--ignore-eos", flags->ignore_eos, "Go on after an end-of-text token");
  CLI::Option* json = app->add_flag("--json", flags->json, "One JSON object a line");
  app->add_option("--logprobs", flags->logprobs,
                  "Log-probability of each token, and of so many alternatives (0: none); needs --json")
      ->check(WholeNumber(0, kMaxUint32))
      ->needs(json);
  app->add_flag("--stats", flags->stats, "Counts and times on standard error at the end");
  return {app, [flags] { return RunGenerate(*flags); }};
}

}  // namespace efla
