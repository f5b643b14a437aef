// efla admin: what operators ask of a server and tell it.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

struct AdminFlags {
  ServerFlags server;
  std::string level;
  bool json = false;
};

// NAME: VALUE lines, or one JSON object.
absl::Status Print(const Json& fields, bool json) {
  if (json) return WriteOut(fields.dump() + "\n");
  std::string text;
  for (const auto& [name, value] : fields.items()) {
    text += absl::StrFormat("%-20s %s\n", name, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return WriteOut(text);
}

absl::Status RunInfo(const AdminFlags& flags, Client& client, const CallOptions& options) {
  absl::StatusOr<v1::ServerInfo> info = client.GetServerInfo(options);
  if (!info.ok()) return info.status();
  Json features = Json::array();
  for (const std::string& feature : info->features()) features.push_back(feature);
  return Print({{"version", info->version()},
                {"api", info->api()},
                {"replica", info->replica()},
                {"model", info->model()},
                {"device", info->device()},
                {"uptime_ms", info->uptime_ms()},
                {"ready", info->ready()},
                {"draining", info->draining()},
                {"log_level", info->log_level()},
                {"features", features}},
               flags.json);
}

absl::Status RunLoadOf(const AdminFlags& flags, Client& client, const CallOptions& options) {
  absl::StatusOr<v1::Load> load = client.GetLoad(options);
  if (!load.ok()) return load.status();
  return Print({{"requests_waiting", load->requests_waiting()},
                {"requests_running", load->requests_running()},
                {"state_slots", load->state_slots()},
                {"state_slots_free", load->state_slots_free()},
                {"waiting_tokens", load->waiting_tokens()},
                {"sessions", load->sessions()}},
               flags.json);
}

absl::Status RunDrain(const AdminFlags&, Client& client, const CallOptions& options) {
  return client.Drain(options);
}

absl::Status RunLogLevel(const AdminFlags& flags, Client& client, const CallOptions& options) {
  absl::StatusOr<std::string> previous = client.SetLogLevel(flags.level, options);
  if (!previous.ok()) return previous.status();
  return Print({{"previous", *previous}, {"now", flags.level}}, flags.json);
}

}  // namespace

Command AddAdmin(CLI::App& program) {
  using Run = absl::Status (*)(const AdminFlags&, Client&, const CallOptions&);
  auto flags = std::make_shared<AdminFlags>();
  auto run = std::make_shared<Run>(nullptr);
  CLI::App* app = program.add_subcommand(
      "admin",
      "Ask and tell a server as its operator: with a token of the role admin, or on its own machine");
  app->require_subcommand(1);
  const auto add = [&](const char* name, const char* help, Run what) {
    CLI::App* command = app->add_subcommand(name, help);
    AddServerFlags(*command, flags->server);
    command->add_flag("--json", flags->json, "One JSON object");
    command->callback([run, what] { *run = what; });
    return command;
  };
  add("info", "What the server is", RunInfo);
  add("load", "What it has to do at the moment", RunLoadOf);
  add("drain", "Have it end as SIGTERM would", RunDrain);
  add("log-level", "Set what it logs, until it ends", RunLogLevel)
      ->add_option("level", flags->level, "debug, info, warning or error")
      ->required()
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  return {app, [flags, run] {
            Interrupt interrupt;
            absl::StatusOr<Client> client = ConnectedClient(flags->server, interrupt);
            if (!client.ok()) return ExitStatus(client.status(), interrupt);
            const CallOptions options{.timeout = flags->server.timeout(), .stop = interrupt.token()};
            return CallExitStatus((*run)(*flags, *client, options), interrupt);
          }};
}

}  // namespace efla
