// efla health: whether a server is ready, as an exit status.
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/command.h"

namespace efla {
namespace {

constexpr double kDefaultSeconds = 5;

struct HealthFlags {
  ServerFlags server;
  std::string service = "efla.v1.Generation";
};

int RunHealth(HealthFlags flags) {
  Interrupt interrupt;
  if (!flags.server.timeout_seconds) flags.server.timeout_seconds = kDefaultSeconds;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  const absl::Status health =
      client->CheckHealth(flags.service, {.timeout = flags.server.timeout(), .stop = interrupt.token()});
  if (!health.ok()) return ExitStatus(health, interrupt);
  return ExitStatus(WriteOut("serving\n"), interrupt);
}

}  // namespace

Command AddHealth(CLI::App& program) {
  auto flags = std::make_shared<HealthFlags>();
  CLI::App* app =
      program.add_subcommand("health", "Ask a server whether it serves; for scripts and containers");
  AddServerFlags(*app, flags->server);
  app->add_option("--service", flags->service,
                  "efla.v1.Generation is ready while new requests are welcome; empty: the process lives")
      ->check(Utf8())
      ->check(CLI::Validator(
          [](std::string& name) {
            return name.size() <= kMaxServiceBytes ? std::string()
                                                   : absl::StrFormat("the name has %d bytes; the limit is %d",
                                                                     name.size(), kMaxServiceBytes);
          },
          ""))
      ->capture_default_str();
  return {app, [flags] { return RunHealth(*flags); }};
}

}  // namespace efla
