// What the subcommands of `efla` have in common.
#ifndef EFLA_CLIENT_COMMAND_H_
#define EFLA_CLIENT_COMMAND_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "client/client.h"
#include "client/interrupt.h"
#include "client/prompt.h"

namespace efla {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

// Ends the command where its flags are wrong in themselves: main writes `words` and the way to the help on
// standard error, and ends with kExitUsage. A CLI::ParseError, as for all that CLI11 finds wrong.
[[noreturn]] void RefuseFlags(const std::string& words);

// A subcommand added to the program, and what runs it once the flags are parsed: returns the exit status,
// or refuses the flags.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

// The word that stands where a subcommand should and is none; empty when there is no such word.
std::string UnknownSubcommand(const CLI::App& program, int argc, const char* const* argv);

Command AddGenerate(CLI::App& program);
Command AddScore(CLI::App& program);
Command AddTokenize(CLI::App& program);
Command AddLoad(CLI::App& program);
Command AddEval(CLI::App& program);
Command AddSessions(CLI::App& program);
Command AddChat(CLI::App& program);
Command AddHealth(CLI::App& program);
Command AddAdmin(CLI::App& program);
Command AddToken(CLI::App& program);

struct ServerFlags {
  // ConnectedClient takes what is not given from the variables EFLA_TARGET, EFLA_TLS, EFLA_TLS_CA and so on.
  std::optional<std::string> target, tls, tls_ca, tls_cert, tls_key, tls_server_name;
  std::optional<double> timeout_seconds;
  int retries = 0;
  bool insecure_token = false;
  std::string token_file;

  std::optional<std::chrono::milliseconds> timeout() const;
};
void AddServerFlags(CLI::App& app, ServerFlags& flags);
// At most one of them is given, which the flags see to. Returns them.
std::vector<CLI::Option*> AddPromptFlags(CLI::App& app, PromptFlags& flags);

// Refuses flags without a prompt.
void RequirePrompt(const PromptFlags& flags);

// A flag whose value is one item of a list: it is given again for each further one.
template <typename Item>
CLI::Option* AddRepeatedFlag(CLI::App& app, const std::string& name, std::vector<Item>& items,
                             const std::string& help) {
  return app.add_option(name, items, help + "; may be given again for more")
      ->expected(1)
      ->allow_extra_args(false)
      ->take_all();
}

// A client that has reached its server, or an error that says why not, and how to start a server where
// nothing listens. Refuses flags and variables that are wrong or contradict each other, and those with which
// a token would go to another machine in clear text.
absl::StatusOr<Client> ConnectedClient(const ServerFlags& flags, const Interrupt& interrupt);

// Writes the whole text to standard output at once, so that a reader of a pipe sees it.
absl::Status WriteOut(const std::string& text);

// The exit status of a run that ended so; an error is one line on standard error.
int ExitStatus(const absl::Status& status);
// The same for what a signal may have cut short: no line then.
int ExitStatus(const absl::Status& status, const Interrupt& interrupt);
// The same for a server's answer, with advice where its code calls for it.
int CallExitStatus(const absl::Status& status, const Interrupt& interrupt);

// Checks of a flag's text; the error names the flag, the value and the bounds, which are allowed values.
CLI::Validator Number(double low, double high);
CLI::Validator WholeNumber(uint64_t low, uint64_t high);
CLI::Validator HostAndPort();
CLI::Validator Utf8();
CLI::Validator Utf8OrFile();  // or "@FILE", which is not looked at
CLI::Validator TokenIds();    // as ParseTokenIds takes them; a file is not looked at

inline constexpr uint64_t kMaxUint32 = std::numeric_limits<uint32_t>::max();
inline constexpr uint64_t kMaxUint64 = std::numeric_limits<uint64_t>::max();
// A year, the server's longest deadline.
inline constexpr double kShortestSeconds = 0.001, kLongestSeconds = 31'536'000;

}  // namespace efla

#endif  // EFLA_CLIENT_COMMAND_H_
