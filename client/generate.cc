// efla generate: streams a continuation to the terminal.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/generation_flags.h"
#include "client/session_flags.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateFlags {
  ServerFlags server;
  PromptFlags prompt;
  GenerationFlags generation;
  ChangeFlags change;
  std::optional<std::string> session, on_cancel;
  std::optional<uint32_t> logprobs;
  bool create = false, json = false, stats = false;
};

absl::StatusOr<v1::GenerateRequest> MakeRequest(const GenerateFlags& flags) {
  v1::GenerateRequest request;
  const bool has_prompt = flags.prompt.text || flags.prompt.file || flags.prompt.token_ids;
  if (has_prompt || !flags.session) {
    absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
    if (!prompt.ok()) return prompt.status();
    SetPrompt(*std::move(prompt), request);
  } else if (flags.create) {
    request.set_text("");  // a session that is made now begins with the model's first token
  }
  flags.generation.Fill(request);
  request.set_request_id(flags.change.request_id);
  if (flags.session) {
    v1::SessionTurn& session = *request.mutable_session();
    session.set_session_id(*flags.session);
    session.set_create_if_missing(flags.create);
    if (flags.change.expected_revision) session.set_expected_revision(*flags.change.expected_revision);
    if (flags.on_cancel == "keep") session.set_on_cancel(v1::ON_CANCEL_KEEP);
    session.set_durability(flags.change.Durability());
  }
  if (flags.logprobs) {
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(*flags.logprobs);
  }
  return request;
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
                   {"completion_tokens", finished.usage().completion_tokens()},
                   {"cached_tokens", finished.usage().cached_tokens()}};
  const v1::Timing& timing = finished.timing();
  json["timing"] = {{"queue_us", timing.queue_us()},
                    {"prefill_us", timing.prefill_us()},
                    {"first_token_us", timing.first_token_us()},
                    {"total_us", timing.total_us()}};
  json["model"] = accepted.model();
  json["seed"] = accepted.seed();
  json["request_id"] = accepted.request_id();
  if (finished.has_session()) {
    const v1::SessionAfterTurn& session = finished.session();
    json["session"] = {{"session_id", session.session_id()},
                       {"revision", session.revision()},
                       {"durable_revision", session.durable_revision()},
                       {"tokens", session.tokens()},
                       {"tier", TierName(session.tier())},
                       {"committed", session.committed()},
                       {"replayed", accepted.replayed()},
                       {"expires_unix_ms", session.expires_unix_ms()}};
  }
  return json;
}

std::string StatsLine(const v1::Finished& finished, const v1::Accepted& accepted) {
  const std::optional<double> rate = TokensPerSecond(finished);
  return absl::StrFormat(
      "%d prompt and %d completion tokens; first token after %.1f ms%s; seed %d; ended by %s\n",
      finished.usage().prompt_tokens(), finished.usage().completion_tokens(),
      finished.timing().first_token_us() / 1e3, rate ? absl::StrFormat(", then %.1f tokens/s", *rate) : "",
      accepted.seed(), ReasonName(finished.finish_reason()));
}

int RunGenerate(const GenerateFlags& flags) {
  const absl::StatusOr<v1::GenerateRequest> request = MakeRequest(flags);
  if (!request.ok()) return ExitStatus(request.status());

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
  absl::Status status = client->Generate(*request, options, on_event);
  if (!written.ok()) return ExitStatus(written, interrupt);
  if (!at_line_start) write("\n");
  if (status.ok() && flags.stats) std::fputs(StatsLine(finished, accepted).c_str(), stderr);
  if (status.ok() && finished.has_session() && !IsAsDurable(flags.change.Durability(), finished.session())) {
    return kExitFailure;
  }
  return CallExitStatus(status, interrupt);
}

}  // namespace

Command AddGenerate(CLI::App& program) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* app = program.add_subcommand("generate", "Stream a continuation of a prompt");
  AddServerFlags(*app, flags->server);
  AddPromptFlags(*app, flags->prompt);
  AddGenerationFlags(*app, flags->generation);
  CLI::Option* session = app->add_option("--session", flags->session,
                                         "Continue this session with the prompt, which may be left out then");
  app->add_flag("--create", flags->create, "Make the session when there is none")->needs(session);
  AddChangeFlags(*app, flags->change, session);
  app->add_option("--on-cancel", flags->on_cancel,
                  "What becomes of a turn that is cancelled: rollback, or keep what there is")
      ->check(CLI::IsMember({"rollback", "keep"}))
      ->needs(session);
  CLI::Option* json = app->add_flag("--json", flags->json, "One JSON object a line");
  app->add_option("--logprobs", flags->logprobs,
                  "Log-probability of each token, and of so many alternatives (0: none); needs --json")
      ->check(WholeNumber(0, kMaxUint32))
      ->needs(json);
  app->add_flag("--stats", flags->stats, "Counts and times on standard error at the end");
  return {app, [flags] { return RunGenerate(*flags); }};
}

}  // namespace efla
