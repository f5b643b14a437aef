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
#include <cstring>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

const char* Advice(const absl::Status& status) {
  constexpr std::string_view kTooLarge = "larger than max";  // gRPC's words
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      if (status.message().find(kTooLarge.data()) != absl::string_view::npos) {
        return " (the message exceeds the server's limit, --max-message-mib)";
      }
      [[fallthrough]];
    case absl::StatusCode::kUnavailable:
      return " (try again later)";
    case absl::StatusCode::kDeadlineExceeded:
      return " (give more with --timeout)";
    default:
      return "";
  }
}

// The parts of HOST:PORT or [HOST]:PORT.
struct Address {
  std::string host, port;
};

std::optional<Address> ParseAddress(std::string_view target) {
  const size_t colon = target.rfind(':');
  if (colon == target.npos) return std::nullopt;
  std::string_view host = target.substr(0, colon), port = target.substr(colon + 1);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (host.empty() || host.find_first_of(bracketed ? "[]/ " : "[]/ :") != host.npos) return std::nullopt;
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number == 0) return std::nullopt;
  return Address{std::string(host), std::string(port)};
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
std::string WhyNotConnected(const std::string& target) {
  const std::optional<Address> address = ParseAddress(target);
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
  if (error == 0) return "what listens there does not answer as a gRPC server";
  if (error != ECONNREFUSED) return std::strerror(error);
  return absl::StrFormat(
      "nothing listens there; start a server with: efla_server --checkpoint DIR --listen %s", target);
}

}  // namespace

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
  app.add_option("--target", flags.target, "The server's HOST:PORT")
      ->check(HostAndPort())
      ->capture_default_str();
  app.add_option("--timeout", flags.timeout_seconds, "Deadline of a call, in seconds; none when left out")
      ->check(Number(kShortestSeconds, kLongestSeconds));
}

void AddPromptFlags(CLI::App& app, PromptFlags& flags) {
  app.add_option("--prompt", flags.text, "The prompt")->check(Utf8());
  app.add_option("--prompt-file", flags.file, "A file that holds the prompt; - is standard input");
  app.add_option("--token-ids", flags.token_ids, "The prompt as ids: 1,2,3, or @FILE (@- is standard input)");
}

absl::StatusOr<Client> ConnectedClient(const ServerFlags& flags, const Interrupt& interrupt) {
  ClientOptions options;
  options.target = flags.target;
  Client client(options);
  absl::Status connected = client.Connect(interrupt.token());
  if (absl::IsCancelled(connected)) return connected;
  if (!connected.ok()) {
    return absl::UnavailableError(
        absl::StrFormat("%s: %s", std::string(connected.message()), WhyNotConnected(flags.target)));
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
        return ParseAddress(value)
                   ? std::string()
                   : absl::StrFormat("%s is not HOST:PORT with a port from 1 to 65535", value);
      },
      "HOST:PORT");
}

CLI::Validator Utf8() {
  return CLI::Validator(
      [](std::string& value) { return std::string(CheckUtf8("the text", value).message()); }, "UTF-8");
}

}  // namespace efla
