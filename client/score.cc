// efla score: log-probability of each token of a text.
#include <cmath>
#include <memory>
#include <utility>

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
  bool json = false;
};

std::string ScoreJson(const v1::ScoreResponse& score) {
  Json json;
  json["token_ids"] = Json::array();
  for (uint32_t id : score.token_ids()) json["token_ids"].push_back(id);
  json["logprobs"] = Json::array();
  for (const v1::TokenLogprob& token : score.logprobs()) {
    json["logprobs"].push_back(token.has_logprob() ? Json(token.logprob()) : Json());
  }
  json["sum_logprob"] = score.sum_logprob();
  json["usage"] = {{"prompt_tokens", score.usage().prompt_tokens()},
                   {"completion_tokens", score.usage().completion_tokens()}};
  return json.dump() + "\n";
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
  absl::StatusOr<Prompt> prompt = ReadPrompt(flags.prompt);
  if (!prompt.ok()) return ExitStatus(prompt.status());
  std::optional<size_t> text_bytes;
  if (const std::string* text = std::get_if<std::string>(&*prompt)) text_bytes = text->size();

  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  v1::ScoreRequest request;
  SetPrompt(*std::move(prompt), request);
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::StatusOr<v1::ScoreResponse> score = client->Score(request, options);
  if (!score.ok()) return CallExitStatus(score.status(), interrupt);
  return ExitStatus(WriteOut(flags.json ? ScoreJson(*score) : ScoreTable(*score, text_bytes)), interrupt);
}

}  // namespace

Command AddScore(CLI::App& program) {
  auto flags = std::make_shared<ScoreFlags>();
  CLI::App* app = program.add_subcommand("score", "Log-probability of each token of a text");
  AddServerFlags(*app, flags->server);
  AddPromptFlags(*app, flags->prompt);
  app->add_flag("--json", flags->json, "One JSON object: token_ids, and logprobs with null for the first");
  return {app, [flags] { return RunScore(*flags); }};
}

}  // namespace efla
