#include "client/command.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

const char* Advice(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kResourceExhausted:
      return " (try again later)";
    case absl::StatusCode::kDeadlineExceeded:
      return " (give more with --timeout)";
    default:
      return "";
  }
}

}  // namespace

std::optional<std::chrono::milliseconds> ServerFlags::timeout() const {
  if (!timeout_seconds) return std::nullopt;
  return std::chrono::milliseconds(std::llround(*timeout_seconds * 1e3));
}

void AddServerFlags(CLI::App& app, ServerFlags& flags) {
  app.add_option("--target", flags.target, "The server's HOST:PORT")->capture_default_str();
  app.add_option("--timeout", flags.timeout_seconds, "Deadline of a call, in seconds; none when left out")
      ->check(AboveZero());
}

void AddPromptFlags(CLI::App& app, PromptFlags& flags) {
  app.add_option("--prompt", flags.text, "The prompt");
  app.add_option("--prompt-file", flags.file, "A file that holds the prompt; - is standard input");
  app.add_option("--token-ids", flags.token_ids, "The prompt as ids: 1,2,3, or @FILE (@- is standard input)");
}

absl::StatusOr<Client> ConnectedClient(const ServerFlags& flags, const Interrupt& interrupt) {
  ClientOptions options;
  options.target = flags.target;
  Client client(options);
  absl::Status connected = client.Connect(interrupt.token());
  if (!connected.ok()) {
    return absl::UnavailableError(
        absl::StrFormat("%s; start a server with: efla_server --checkpoint DIR --listen %s",
                        std::string(connected.message()), flags.target));
  }
  return client;
}

absl::Status WriteOut(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("cannot write to standard output: %s", std::strerror(errno)));
  }
  return absl::OkStatus();
}

int ExitStatus(const absl::Status& status) {
  if (status.ok()) return 0;
  std::string line =
      absl::StrFormat("efla: %s: %s", absl::StatusCodeToString(status.code()), std::string(status.message()));
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::fprintf(stderr, "%s\n", line.c_str());
  return kExitFailure;
}

int ExitStatus(const absl::Status& status, const Interrupt& interrupt) {
  return interrupt.token().stop_requested() ? kExitInterrupted : ExitStatus(status);
}

int CallExitStatus(const absl::Status& status, const Interrupt& interrupt) {
  return ExitStatus(absl::Status(status.code(), std::string(status.message()) + Advice(status.code())),
                    interrupt);
}

CLI::Validator AboveZero() {
  return CLI::Validator(
      [](std::string& value) {
        double number = 0;
        bool above = CLI::detail::lexical_cast(value, number) && std::isfinite(number) && number > 0;
        return above ? std::string() : absl::StrFormat("%s is not a number above 0", value);
      },
      "ABOVE 0");
}

}  // namespace efla
