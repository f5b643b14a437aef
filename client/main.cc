// efla: the command-line client.
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "client/command.h"

int main(int argc, char** argv) {
  // gRPC's own log would add lines to the one that an error is to have.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);

  CLI::App program("Client of an EFLA inference server", "efla");
  program.set_version_flag("--version", EFLA_VERSION);
  program.require_subcommand(1);
  std::vector<efla::Command> commands = {efla::AddGenerate(program), efla::AddScore(program),
                                         efla::AddTokenize(program), efla::AddLoad(program),
                                         efla::AddEval(program),     efla::AddSessions(program),
                                         efla::AddChat(program),     efla::AddHealth(program),
                                         efla::AddAdmin(program),    efla::AddToken(program)};
  try {
    program.parse(argc, argv);
    for (const efla::Command& command : commands) {
      if (command.app->parsed()) return command.run();
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help, --version
    std::string what = error.what();
    std::replace(what.begin(), what.end(), '\n', ' ');
    const std::string unknown = efla::UnknownSubcommand(program, argc, argv);
    if (!unknown.empty()) what = "there is no subcommand " + unknown;
    std::string chosen;
    for (const CLI::App* app = &program; !app->get_subcommands().empty();) {
      app = app->get_subcommands().front();
      chosen += app->get_name() + " ";
    }
    std::fprintf(stderr, "efla: %s; see: efla %s--help\n", what.c_str(), chosen.c_str());
    return efla::kExitUsage;
  }
  return efla::kExitUsage;  // not reached: one subcommand is required
}
