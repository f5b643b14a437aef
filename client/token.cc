// efla token: a new token and what the server's auth file holds of it.
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <array>
#include <memory>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/command.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

constexpr size_t kRandomBytes = 32;

struct TokenFlags {
  std::string hash_file;
  bool json = false;
};

std::string Sha256Hex(const std::string& text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::string hex;
  for (const unsigned char byte : digest) hex += absl::StrFormat("%02x", byte);
  return hex;
}

int RunToken(const TokenFlags& flags) {
  if (!flags.hash_file.empty()) {
    absl::StatusOr<std::string> token = ReadTextFile(flags.hash_file);
    if (!token.ok()) return ExitStatus(token.status());
    while (!token->empty() && (token->back() == '\n' || token->back() == '\r')) token->pop_back();
    if (token->empty())
      return ExitStatus(absl::InvalidArgumentError("there is no token in " + flags.hash_file));
    const std::string hash = Sha256Hex(*token);
    return ExitStatus(WriteOut((flags.json ? nlohmann::ordered_json{{"sha256", hash}}.dump() : hash) + "\n"));
  }
  std::string random(kRandomBytes, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(random.data()), static_cast<int>(random.size())) != 1) {
    return ExitStatus(absl::UnavailableError("the machine gives no random numbers"));
  }
  const std::string token = "efla_" + absl::WebSafeBase64Escape(random);
  const std::string hash = Sha256Hex(token);
  return ExitStatus(WriteOut(flags.json
                                 ? nlohmann::ordered_json{{"token", token}, {"sha256", hash}}.dump() + "\n"
                                 : absl::StrFormat("token   %s\nsha256  %s\n", token, hash)));
}

}  // namespace

Command AddToken(CLI::App& program) {
  auto flags = std::make_shared<TokenFlags>();
  CLI::App* app = program.add_subcommand(
      "token", "Make a random token for a client, and its hash for the server's auth file");
  app->add_option("--hash-file", flags->hash_file,
                  "Instead, the hash of the token in this file; - is standard input");
  app->add_flag("--json", flags->json, "One JSON object");
  return {app, [flags] { return RunToken(*flags); }};
}

}  // namespace efla
