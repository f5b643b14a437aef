// efla score: log-probability of each token of a text.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/command.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kTableTokens = 64;  // longer texts get the summary only

struct ScoreFlags {
  ServerFlags server;
  PromptFlags prompt;
  std::vector<std::string> continuations;
  bool json = false;
};

// `Scored` is ScoreResponse or ContinuationScore.
template <typename Scored>
Json ScoredJson(const Scored& score) {
  Json json;
  json["token_ids"] = Json::array();
  for (uint32_t id : score.token_ids()) json["token_ids"].push_back(id);
  json["logprobs"] = Json::array();
  for (const v1::TokenLogprob& token : score.logprobs()) {
    json["logprobs"].push_back(token.has_logprob() ? Json(token.logprob()) : Json());
  }
  json["sum_logprob"] = score.sum_logprob();
  return json;
}

std::string ScoreJson(const v1::ScoreResponse& score) {
  Json json;
  if (score.continuations_size() == 0) {
    json = ScoredJson(score);
  } else {
    json["continuations"] = Json::array();
    for (const v1::ContinuationScore& continuation : score.continuations()) {
      Json entry = ScoredJson(continuation);
      entry["is_greedy"] = continuation.is_greedy();
      entry["text_bytes"] = continuation.text_bytes();
      json["continuations"].push_back(std::move(entry));
    }
  }
  json["usage"] = {{"prompt_tokens", score.usage().prompt_tokens()},
                   {"completion_tokens", score.usage().completion_tokens()},
                   {"cached_tokens", score.usage().cached_tokens()}};
  return json.dump() + "\n";
}

std::string ContinuationsTable(const v1::ScoreResponse& score, const std::vector<std::string>& texts) {
  std::string table;
  for (int i = 0; i < score.continuations_size(); ++i) {
    const v1::ContinuationScore& continuation = score.continuations(i);
    table += absl::StrFormat("%10.4f  %3d tokens  %s  \"%s\"\n", continuation.sum_logprob(),
                             continuation.token_ids_size(), continuation.is_greedy() ? "greedy" : "      ",
                             absl::CHexEscape(texts[static_cast<size_t>(i)]));
  }
  return table;
}

std::string ScoreTable(const v1::ScoreResponse& score, std::optional<size_t> text_bytes) {
  std::string table;
  int scored = 0;
  for (const v1::TokenLogprob& token : score.logprobs()) scored += token.has_logprob();
  if (score.logprobs_size() <= kTableTokens) {
    for (const v1::TokenLogprob& token : score.logprobs()) {
      std::string logprob = token.has_logprob() ? absl::StrFormat("%10.4f", token.logprob()) : "         -";
      table +=
          absl::StrFormat("%8d %s  \"%s\"\n", token.token_id(), logprob, absl::CHexEscape(token.bytes()));
    }
  }
  table += absl::StrFormat("%d tokens, %d scored, log-probability %.4f", score.token_ids_size(), scored,
                           score.sum_logprob());
  if (scored > 0)
    table += absl::StrFormat(", perplexity %.4f a token", std::exp(-score.sum_logprob() / scored));
  if (text_bytes && *text_bytes > 0) {
    table += absl::StrFormat(", %.4f bits a byte", -score.sum_logprob() / std::log(2.0) / *text_bytes);
  }
  return table + "\n";
}

int RunScore(const ScoreFlags& flags) {
  RequirePrompt(flags.prompt);
  absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
  if (!prompt.ok()) return ExitStatus(prompt.status());
  std::optional<size_t> text_bytes;
  if (const std::string* text = std::get_if<std::string>(&*prompt)) text_bytes = text->size();

  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  v1::ScoreRequest request;
  SetPrompt(*std::move(prompt), request);
  for (const std::string& text : flags.continuations) request.add_continuations()->set_text(text);
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::StatusOr<v1::ScoreResponse> score = client->Score(request, options);
  if (!score.ok()) return CallExitStatus(score.status(), interrupt);
  const std::string text = flags.json                    ? ScoreJson(*score)
                           : flags.continuations.empty() ? ScoreTable(*score, text_bytes)
                                                         : ContinuationsTable(*score, flags.continuations);
  return ExitStatus(WriteOut(text), interrupt);
}

}  // namespace

Command AddScore(CLI::App& program) {
  auto flags = std::make_shared<ScoreFlags>();
  CLI::App* app = program.add_subcommand("score", "Log-probability of each token of a text");
  AddServerFlags(*app, flags->server);
  AddPromptFlags(*app, flags->prompt);
  AddRepeatedFlag(*app, "--continuation", flags->continuations,
                  "Score this text after the prompt, which is computed once and not scored")
      ->check(Utf8());
  app->add_flag("--json", flags->json,
                "One JSON object: token_ids, and logprobs with null for the first; or continuations");
  return {app, [flags] { return RunScore(*flags); }};
}

}  // namespace efla
