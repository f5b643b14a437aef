#include "client/command.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "client/target.h"

namespace efla {
namespace {

constexpr size_t kMostTokenBytes = 4096;
constexpr uint64_t kMostRetries = 4;  // gRPC makes five attempts at most

const char* Advice(const absl::Status& status) {
  constexpr std::string_view kTooLarge = "larger than max";  // gRPC's words
  static constexpr char kLater[] = " (try again later)";
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      if (status.message().find(kTooLarge.data()) != absl::string_view::npos) {
        return " (the message exceeds the server's limit, --max-message-mib)";
      }
      return RetryDelay(status) ? kLater : "";
    case absl::StatusCode::kUnavailable:
      return kLater;
    case absl::StatusCode::kDeadlineExceeded:
      return " (give more with --timeout)";
    default:
      return "";
  }
}

// 0 when something accepts a connection there, otherwise the system's error number.
int ConnectError(const addrinfo& address) {
  constexpr int kPatienceMs = 1000;
  const int descriptor = socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  int error = connect(descriptor, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd wait{.fd = descriptor, .events = POLLOUT, .revents = 0};
    socklen_t size = sizeof(error);
    if (poll(&wait, 1, kPatienceMs) <= 0) {
      error = ETIMEDOUT;
    } else if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  close(descriptor);
  return error;
}

// Why gRPC could not connect: it does not tell a closed port from one where something else listens.
std::string WhyNotConnected(const std::string& target, bool tls) {
  const std::optional<HostPort> address = ParseHostPort(target);
  if (!address) return "it is not HOST:PORT";
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (int error = getaddrinfo(address->host.c_str(), address->port.c_str(), &hints, &found); error != 0) {
    return absl::StrFormat("the host is not found: %s", gai_strerror(error));
  }
  int error = 0;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    error = ConnectError(*one);
    if (error == 0) break;
  }
  freeaddrinfo(found);
  if (error == 0) {
    return tls ? "no TLS connection comes about; see whether the server has TLS, whether --tls-ca signed its "
                 "certificate, whether that is for the target's host (--tls-server-name), and whether the "
                 "server wants a certificate (--tls-cert)"
               : "what listens there does not answer as a gRPC server (one that has TLS needs --tls or "
                 "EFLA_TLS)";
  }
  if (error != ECONNREFUSED) return std::strerror(error);
  return absl::StrFormat(
      "nothing listens there; start a server with: efla_server --checkpoint DIR --listen %s", target);
}

// What a flag or its variable says.
struct Setting {
  std::string value;
  std::string name;  // of the flag or the variable, for errors
  bool is_variable = false;
};

// The flag beats the variable. What is empty says nothing.
std::optional<Setting> Find(const std::optional<std::string>& given, const char* flag, const char* variable) {
  const char* const found = std::getenv(variable);
  Setting setting{given ? *given : found != nullptr ? found : "", given ? flag : variable, !given};
  if (setting.value.empty()) return std::nullopt;
  return setting;
}

std::string Target(const ServerFlags& flags) {
  const std::optional<Setting> target = Find(flags.target, "--target", "EFLA_TARGET");
  if (!target) return ClientOptions().target;
  const std::string wrong = HostAndPort()(target->value);
  if (!wrong.empty()) RefuseFlags(target->name + ": " + wrong);
  return target->value;
}

// Whether to use TLS; nothing where neither flag nor variable says so.
std::optional<bool> TlsSwitch(const ServerFlags& flags) {
  const std::optional<Setting> tls = Find(flags.tls, "--tls", "EFLA_TLS");
  if (!tls) return std::nullopt;
  for (const auto& [word, means] :
       {std::pair{"true", true}, std::pair{"false", false}, std::pair{"1", true}, std::pair{"0", false},
        std::pair{"yes", true}, std::pair{"no", false}, std::pair{"on", true}, std::pair{"off", false}}) {
    if (absl::EqualsIgnoreCase(tls->value, word)) return means;
  }
  RefuseFlags(tls->name + ": " + tls->value + " is neither true nor false");
}

// Nothing: plain text.
absl::StatusOr<std::optional<ClientTls>> Tls(const ServerFlags& flags) {
  const std::optional<bool> tls_switch = TlsSwitch(flags);
  const std::optional<Setting> ca = Find(flags.tls_ca, "--tls-ca", "EFLA_TLS_CA"),
                               certificate = Find(flags.tls_cert, "--tls-cert", "EFLA_TLS_CERT"),
                               key = Find(flags.tls_key, "--tls-key", "EFLA_TLS_KEY"),
                               server_name =
                                   Find(flags.tls_server_name, "--tls-server-name", "EFLA_TLS_SERVER_NAME");
  if (!tls_switch.value_or(false)) {
    for (const std::optional<Setting>& one : {ca, certificate, key, server_name}) {
      // Who switches TLS off for one call need not unset the variables.
      if (one && !(tls_switch && one->is_variable)) RefuseFlags(one->name + " needs --tls or EFLA_TLS");
    }
    return std::nullopt;
  }
  if (certificate && !key) RefuseFlags(certificate->name + " needs --tls-key or EFLA_TLS_KEY");
  if (key && !certificate) RefuseFlags(key->name + " needs --tls-cert or EFLA_TLS_CERT");
  ClientTls tls;
  if (server_name) tls.server_name = server_name->value;
  for (const auto& [file, text] :
       {std::pair{&ca, &tls.ca}, std::pair{&certificate, &tls.certificate}, std::pair{&key, &tls.key}}) {
    if (!*file) continue;
    const auto& [path, name, _] = **file;
    absl::StatusOr<std::string> pem = ReadTextFile(path);
    if (!pem.ok()) {
      return absl::Status(pem.status().code(), name + ": " + std::string(pem.status().message()));
    }
    if (pem->find("-----BEGIN ") == std::string::npos) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: %s holds nothing in PEM form", name, path));
    }
    *text = *std::move(pem);
  }
  return tls;
}

// From a file or the environment: everybody on the machine can read a command line.
absl::StatusOr<std::string> Token(const ServerFlags& flags) {
  std::string token;
  std::string from = "EFLA_TOKEN";
  if (!flags.token_file.empty()) {
    absl::StatusOr<std::string> text = ReadTextFile(flags.token_file);
    if (!text.ok()) return text.status();
    token = *std::move(text);
    from = flags.token_file;
    while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.pop_back();
  } else if (const char* variable = std::getenv("EFLA_TOKEN")) {
    token = variable;
    if (token.empty()) return token;
  } else {
    return token;
  }
  const bool visible = std::all_of(token.begin(), token.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (!token.empty() && token.size() <= kMostTokenBytes && visible) return token;
  return absl::InvalidArgumentError(
      absl::StrFormat("%s holds no token: 1 to %d visible characters of ASCII", from, kMostTokenBytes));
}

}  // namespace

void RefuseFlags(const std::string& words) { throw CLI::ValidationError(words); }

std::string UnknownSubcommand(const CLI::App& program, int argc, const char* const* argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  return program.get_subcommands(is_named).empty() ? argv[1] : "";
}

std::optional<std::chrono::milliseconds> ServerFlags::timeout() const {
  if (!timeout_seconds) return std::nullopt;
  return std::chrono::milliseconds(std::llround(*timeout_seconds * 1e3));
}

void AddServerFlags(CLI::App& app, ServerFlags& flags) {
  app.add_option("--target", flags.target, "The server's HOST:PORT; the variable EFLA_TARGET when left out")
      ->check(HostAndPort())
      ->default_str(ClientOptions().target);
  app.add_option("--timeout", flags.timeout_seconds, "Deadline of a call, in seconds; none when left out")
      ->check(Number(kShortestSeconds, kLongestSeconds));
  app.add_option(
         "--retries", flags.retries,
         "Make a call again that UNAVAILABLE ended before it began; of calls that change sessions, only "
         "generate, which then resumes a turn that broke off too")
      ->check(WholeNumber(0, kMostRetries))
      ->capture_default_str();
  app.add_flag("--tls", flags.tls,
               "The server has TLS (--tls=false: not). For each of the --tls flags that is left out there "
               "is a variable: EFLA_TLS (true or false), EFLA_TLS_CA, EFLA_TLS_CERT, EFLA_TLS_KEY, "
               "EFLA_TLS_SERVER_NAME");
  app.add_option("--tls-ca", flags.tls_ca,
                 "PEM file of the authorities to trust; the system's when left out");
  app.add_option("--tls-cert", flags.tls_cert, "PEM file of this client's certificate, with --tls-key");
  app.add_option("--tls-key", flags.tls_key, "PEM file of its private key");
  app.add_option("--tls-server-name", flags.tls_server_name,
                 "The name that the server's certificate is for; the target's host when left out");
  app.add_option("--token-file", flags.token_file,
                 "File with the token that the server wants; the variable EFLA_TOKEN when left out");
  app.add_flag("--insecure-token", flags.insecure_token,
               "Send the token to another machine without --tls, too: everybody on the way can read it");
}

std::vector<CLI::Option*> AddPromptFlags(CLI::App& app, PromptFlags& flags) {
  CLI::Option* const text = app.add_option("--prompt", flags.text, "The prompt")->check(Utf8());
  CLI::Option* const file =
      app.add_option("--prompt-file", flags.file, "A file that holds the prompt; - is standard input")
          ->excludes(text);
  CLI::Option* const ids = app.add_option("--token-ids", flags.token_ids,
                                          "The prompt as ids: 1,2,3, or @FILE (@- is standard input)")
                               ->check(TokenIds())
                               ->excludes(text)
                               ->excludes(file);
  return {text, file, ids};
}

void RequirePrompt(const PromptFlags& flags) {
  if (!flags.given()) RefuseFlags("there is no prompt; give one of --prompt, --prompt-file and --token-ids");
}

absl::StatusOr<Client> ConnectedClient(const ServerFlags& flags, const Interrupt& interrupt) {
  ClientOptions options;
  options.target = Target(flags);
  options.retries = flags.retries;
  if (const auto timeout = flags.timeout())
    options.connect_timeout = std::min(options.connect_timeout, *timeout);
  absl::StatusOr<std::string> token = Token(flags);
  if (!token.ok()) return token.status();
  options.token = *std::move(token);
  options.insecure_token = flags.insecure_token;
  absl::StatusOr<std::optional<ClientTls>> tls = Tls(flags);
  if (!tls.ok()) return tls.status();
  options.tls = *std::move(tls);
  if (options.tls && flags.tls && flags.insecure_token) RefuseFlags("--insecure-token excludes --tls");
  if (!options.token.empty() && !options.tls && !flags.insecure_token && !IsOnThisMachine(options.target)) {
    RefuseFlags(absl::StrFormat(
        "the token of %s would go to %s in clear text; give --tls, or --insecure-token if the way is safe",
        flags.token_file.empty() ? "EFLA_TOKEN" : flags.token_file, options.target));
  }
  Client client(options);
  absl::Status connected = client.Connect(interrupt.token());
  if (absl::IsCancelled(connected)) return connected;
  if (!connected.ok()) {
    return absl::UnavailableError(absl::StrFormat("%s: %s", std::string(connected.message()),
                                                  WhyNotConnected(options.target, options.tls.has_value())));
  }
  return client;
}

absl::Status WriteOut(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return absl::FailedPreconditionError(
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
  return ExitStatus(absl::Status(status.code(), std::string(status.message()) + Advice(status)), interrupt);
}

CLI::Validator Number(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& value) {
        double number = 0;
        const bool in_range = CLI::detail::lexical_cast(value, number) && number >= low && number <= high;
        return in_range ? std::string()
                        : absl::StrFormat("%s is not a number from %.15g to %.15g", value, low, high);
      },
      absl::StrFormat("%.15g to %.15g", low, high));
}

// CLI11 itself takes a negative number as a large one, and one out of range as the nearest in it.
CLI::Validator WholeNumber(uint64_t low, uint64_t high) {
  return CLI::Validator(
      [low, high](std::string& value) {
        uint64_t number = 0;
        const char* const last = value.data() + value.size();
        const auto [end, error] = std::from_chars(value.data(), last, number);
        const bool in_range = error == std::errc() && end == last && number >= low && number <= high;
        return in_range ? std::string()
                        : absl::StrFormat("%s is not a whole number from %d to %d", value, low, high);
      },
      absl::StrFormat("%d to %d", low, high));
}

CLI::Validator HostAndPort() {
  return CLI::Validator(
      [](std::string& value) {
        return ParseHostPort(value)
                   ? std::string()
                   : absl::StrFormat("%s is not HOST:PORT with a port from 1 to 65535", value);
      },
      "HOST:PORT");
}

CLI::Validator Utf8() {
  return CLI::Validator(
      [](std::string& value) { return std::string(CheckUtf8("the text", value).message()); }, "UTF-8");
}

CLI::Validator Utf8OrFile() {
  return CLI::Validator(
      [](std::string& value) {
        return value.starts_with('@') ? std::string() : std::string(CheckUtf8("the text", value).message());
      },
      "UTF-8 or @FILE");
}

CLI::Validator TokenIds() {
  return CLI::Validator(
      [](std::string& value) {
        return value.starts_with('@') ? std::string() : std::string(ParseTokenIds(value).status().message());
      },
      "IDS or @FILE");
}

}  // namespace efla
