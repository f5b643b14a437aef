// efla generate: streams a continuation to the terminal.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/chat_file.h"
#include "client/command.h"
#include "client/constraint_flags.h"
#include "client/generation_flags.h"
#include "client/resume.h"
#include "client/session_flags.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxSamples = 64;  // the server's limit

struct GenerateFlags {
  ServerFlags server;
  PromptFlags prompt;
  GenerationFlags generation;
  ConstraintFlags constraint;
  ChangeFlags change;
  std::optional<std::string> session, on_cancel;
  std::optional<std::string> chat_file, system, user;
  std::optional<uint32_t> logprobs, samples;
  bool echo = false;
  bool create = false, json = false, stats = false;
};

// The conversation that the flags give; nothing where they give none.
absl::StatusOr<std::optional<v1::Chat>> ChatOf(const GenerateFlags& flags) {
  if (flags.chat_file) {
    absl::StatusOr<v1::Chat> chat = ReadChat(*flags.chat_file);
    if (!chat.ok()) return chat.status();
    return *std::move(chat);
  }
  if (!flags.system && !flags.user) return std::nullopt;
  v1::Chat chat;
  const auto add = [&](const char* role, const std::optional<std::string>& content) {
    if (!content) return;
    chat.add_messages()->set_role(role);
    chat.mutable_messages()->rbegin()->set_content(*content);
  };
  add("system", flags.system);
  add("user", flags.user);
  return chat;
}

absl::StatusOr<v1::GenerateRequest> MakeRequest(const GenerateFlags& flags) {
  v1::GenerateRequest request;
  absl::StatusOr<std::optional<v1::Chat>> chat = ChatOf(flags);
  if (!chat.ok()) return chat.status();
  if (*chat) {
    *request.mutable_chat() = **std::move(chat);
  } else if (flags.prompt.given()) {
    absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
    if (!prompt.ok()) return prompt.status();
    SetPrompt(*std::move(prompt), request);
  } else if (flags.create) {
    request.set_text("");  // a session that is made now begins with the model's first token
  }
  flags.generation.Fill(request);
  if (absl::Status status = flags.constraint.Fill(request); !status.ok()) return status;
  if (flags.samples) request.set_samples(*flags.samples);
  request.mutable_output()->set_echo(flags.echo);
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

// `Part` is Delta or Finished. With several samples, each line says of which it is.
template <typename Part>
Json TokensJson(const Part& part, const GenerateFlags& flags) {
  const std::optional<uint32_t>& logprobs = flags.logprobs;
  Json json;
  if (flags.samples.value_or(1) > 1) json["sample"] = part.sample();
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

Json FinishedJson(const v1::Finished& finished, const v1::Accepted& accepted, const GenerateFlags& flags) {
  Json json = TokensJson(finished, flags);
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
  json["seed"] = accepted.seed() + finished.sample();
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
      accepted.seed() + finished.sample(), ReasonName(finished.finish_reason()));
}

// Several samples' texts as they come, for a terminal: one after the other, each under a line that names it.
class SamplesText {
 public:
  SamplesText(uint32_t samples, std::function<void(const std::string&)> write)
      : waiting_(samples), ended_(samples), write_(std::move(write)) {}

  void Begin(uint64_t seed) {
    seed_ = seed;
    WriteHead();
  }
  void Add(uint32_t sample, const std::string& text, bool is_last) {
    if (sample >= waiting_.size()) return;
    waiting_[sample] += text;
    ended_[sample] = is_last;
    while (shown_ < waiting_.size()) {
      Write(std::exchange(waiting_[shown_], {}));
      if (!ended_[shown_]) return;
      if (++shown_ == waiting_.size()) return;
      WriteHead();
    }
  }

 private:
  void WriteHead() {
    Write(absl::StrFormat("%s--- sample %d (seed %d)\n", at_line_start_ ? "" : "\n", shown_, seed_ + shown_));
  }
  void Write(const std::string& text) {
    if (!text.empty()) at_line_start_ = text.back() == '\n';
    write_(text);
  }

  std::vector<std::string> waiting_;  // text that is not shown yet
  std::vector<bool> ended_;
  size_t shown_ = 0;  // the one that is being shown
  uint64_t seed_ = 0;
  bool at_line_start_ = true;
  const std::function<void(const std::string&)> write_;
};

int RunGenerate(const GenerateFlags& flags) {
  if (!flags.prompt.given() && !flags.chat_file && !flags.system && !flags.user && !flags.session) {
    RefuseFlags(
        "there is nothing to continue; give one of --prompt, --prompt-file, --token-ids, --chat, --user and "
        "--session");
  }
  const absl::StatusOr<v1::GenerateRequest> request = MakeRequest(flags);
  if (!request.ok()) return ExitStatus(request.status());

  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);

  v1::Accepted accepted;
  v1::Finished finished;
  std::string stats;  // a line of each sample
  absl::Status written;
  bool at_line_start = true;  // of the terminal, in text mode
  auto write = [&](const std::string& text) {
    if (text.empty()) return;
    at_line_start = text.back() == '\n';
    written = WriteOut(text);
  };
  const uint32_t samples = flags.samples.value_or(1);
  SamplesText texts(samples, write);
  const auto write_text = [&](uint32_t sample, const std::string& text, bool is_last) {
    samples > 1 ? texts.Add(sample, text, is_last) : write(text);
  };
  auto on_event = [&](const v1::GenerateResponse& event) {
    if (event.has_accepted()) {
      accepted = event.accepted();
      if (!flags.json && samples > 1) texts.Begin(accepted.seed());
    }
    if (event.has_delta()) {
      const v1::Delta& delta = event.delta();
      flags.json ? write(TokensJson(delta, flags).dump() + "\n")
                 : write_text(delta.sample(), delta.text(), /*is_last=*/false);
    }
    if (event.has_finished()) {
      finished = event.finished();
      flags.json ? write(FinishedJson(finished, accepted, flags).dump() + "\n")
                 : write_text(finished.sample(), finished.text(), /*is_last=*/true);
      stats += StatsLine(finished, accepted);
    }
    return written.ok();
  };
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::Status status =
      flags.session && flags.server.retries > 0
          ? GenerateResuming(*client, *request, options, {.attempts = flags.server.retries + 1}, on_event)
          : client->Generate(*request, options, on_event);
  if (!written.ok()) return ExitStatus(written, interrupt);
  if (!at_line_start) write("\n");
  if (status.ok() && flags.stats) std::fputs(stats.c_str(), stderr);
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
  const std::vector<CLI::Option*> prompts = AddPromptFlags(*app, flags->prompt);
  CLI::Option* chat =
      app->add_option("--chat", flags->chat_file,
                      "A file with a conversation, for models with a chat template: a JSON list of "
                      "{\"role\": ..., \"content\": ...}; - is standard input");
  CLI::Option* system =
      app->add_option("--system", flags->system, "A chat's system message")->check(Utf8())->excludes(chat);
  CLI::Option* user = app->add_option("--user", flags->user, "A chat's user message, instead of a prompt")
                          ->check(Utf8())
                          ->excludes(chat);
  for (CLI::Option* prompt : prompts) prompt->excludes(chat)->excludes(system)->excludes(user);
  AddGenerationFlags(*app, flags->generation);
  AddConstraintFlags(*app, flags->constraint);
  CLI::Option* session = app->add_option("--session", flags->session,
                                         "Continue this session with the prompt, which may be left out then")
                             ->check(Utf8());
  app->add_flag("--create", flags->create, "Make the session when there is none")->needs(session);
  AddChangeFlags(*app, flags->change, session);
  app->add_option("--on-cancel", flags->on_cancel,
                  "What becomes of a turn that is cancelled: rollback, or keep what there is")
      ->check(CLI::IsMember({"rollback", "keep"}))
      ->needs(session);
  app->add_option("--samples", flags->samples,
                  "Independent continuations of the prompt, which is computed once; sample i has seed + i")
      ->check(WholeNumber(1, kMaxSamples))
      ->excludes(session);
  app->add_flag("--echo", flags->echo, "Begin the output with the prompt");
  CLI::Option* json = app->add_flag("--json", flags->json, "One JSON object a line");
  app->add_option("--logprobs", flags->logprobs,
                  "Log-probability of each token, and of so many alternatives (0: none); needs --json")
      ->check(WholeNumber(0, kMaxUint32))
      ->needs(json);
  app->add_flag("--stats", flags->stats, "Counts and times on standard error at the end");
  return {app, [flags] { return RunGenerate(*flags); }};
}

}  // namespace efla
