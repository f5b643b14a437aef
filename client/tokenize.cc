// efla tokenize: text to token ids, and back.
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/command.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

struct TokenizeFlags {
  ServerFlags server;
  std::optional<std::string> text, file, token_ids;
  bool detokenize = false, add_bos = false, parse_special_tokens = false, json = false;
};

int RunDetokenize(const TokenizeFlags& flags) {
  absl::StatusOr<TokenIdList> ids = ParseTokenIds(*flags.token_ids);
  if (!ids.ok()) return ExitStatus(ids.status());
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Assign(ids->begin(), ids->end());
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::StatusOr<v1::DetokenizeResponse> reply = client->Detokenize(request, options);
  if (!reply.ok()) return CallExitStatus(reply.status(), interrupt);
  return ExitStatus(WriteOut((flags.json ? Json{{"text", reply->text()}}.dump() : reply->text()) + "\n"),
                    interrupt);
}

int RunTokenize(const TokenizeFlags& flags) {
  if (flags.detokenize) return RunDetokenize(flags);
  if (!flags.text && !flags.file) {
    RefuseFlags("there is no text; give one of --text and --file, or --detokenize with --token-ids");
  }
  v1::TokenizeRequest request;
  request.set_add_bos(flags.add_bos);
  request.set_parse_special_tokens(flags.parse_special_tokens);
  if (flags.text) {
    request.set_text(*flags.text);
  } else {
    absl::StatusOr<std::string> text = ReadTextFile(*flags.file);
    if (!text.ok()) return ExitStatus(text.status());
    request.set_text(*std::move(text));
  }
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  absl::StatusOr<v1::TokenizeResponse> reply = client->Tokenize(request, options);
  if (!reply.ok()) return CallExitStatus(reply.status(), interrupt);

  std::string out;
  if (flags.json) {
    Json json{{"token_ids", Json::array()}, {"pieces", Json::array()}};
    for (uint32_t id : reply->token_ids()) json["token_ids"].push_back(id);
    for (const std::string& piece : reply->pieces()) json["pieces"].push_back(piece);
    out = json.dump() + "\n";
  } else {
    for (int i = 0; i < reply->token_ids_size(); ++i) {
      const std::string piece = i < reply->pieces_size() ? reply->pieces(i) : "";
      out += absl::StrFormat("%8d  \"%s\"\n", reply->token_ids(i), absl::Utf8SafeCHexEscape(piece));
    }
  }
  return ExitStatus(WriteOut(out), interrupt);
}

}  // namespace

Command AddTokenize(CLI::App& program) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* app =
      program.add_subcommand("tokenize", "Text to token ids with the server's tokenizer, and back");
  AddServerFlags(*app, flags->server);
  CLI::Option* text = app->add_option("--text", flags->text, "The text")->check(Utf8());
  CLI::Option* file =
      app->add_option("--file", flags->file, "A file that holds the text; - is standard input")
          ->excludes(text);
  CLI::Option* bos = app->add_flag("--add-bos", flags->add_bos, "Put the beginning-of-text token in front");
  CLI::Option* special = app->add_flag("--parse-special-tokens", flags->parse_special_tokens,
                                       "Special tokens written in the text become such tokens");
  CLI::Option* detokenize = app->add_flag("--detokenize", flags->detokenize, "Ids to text")
                                ->excludes(text)
                                ->excludes(file)
                                ->excludes(bos)
                                ->excludes(special);
  CLI::Option* ids = app->add_option("--token-ids", flags->token_ids,
                                     "With --detokenize: 1,2,3, or @FILE (@- is standard input)")
                         ->check(TokenIds())
                         ->needs(detokenize);
  detokenize->needs(ids);
  app->add_flag("--json", flags->json, "One JSON object");
  return {app, [flags] { return RunTokenize(*flags); }};
}

}  // namespace efla
