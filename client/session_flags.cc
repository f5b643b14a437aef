#include "client/session_flags.h"

#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/command.h"

namespace efla {

v1::Durability ChangeFlags::Durability() const { return ParseDurability(durability); }

void AddRevisionFlags(CLI::App& app, ChangeFlags& flags, CLI::Option* session) {
  CLI::Option* const revision = app.add_option("--expected-revision", flags.expected_revision,
                                               "Fail, and change nothing, at another revision")
                                    ->check(WholeNumber(1, kMaxUint64));
  app.add_option("--request-id", flags.request_id,
                 "A repetition with the same id is answered with the first one's result")
      ->check(Utf8());
  if (session != nullptr) revision->needs(session);
}

void AddChangeFlags(CLI::App& app, ChangeFlags& flags, CLI::Option* session) {
  AddRevisionFlags(app, flags, session);
  AddDurabilityFlag(app, flags.durability, session);
}

void AddDurabilityFlag(CLI::App& app, std::string& durability, CLI::Option* session) {
  CLI::Option* const option =
      app.add_option("--durability", durability,
                     "When the change is in a store: none (some time), async (soon), sync (now)")
          ->check(CLI::IsMember({"none", "async", "sync"}))
          ->capture_default_str();
  if (session != nullptr) option->needs(session);
}

v1::Durability ParseDurability(const std::string& durability) {
  if (durability == "none") return v1::DURABILITY_NONE;
  return durability == "sync" ? v1::DURABILITY_SYNC : v1::DURABILITY_ASYNC;
}

std::string TierName(v1::Tier tier) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::Tier_Name(tier), "TIER_"));
}

std::string SessionLine(const v1::Session& session) {
  std::string line = absl::StrFormat("%s: revision %d, %d tokens, %s", session.session_id(),
                                     session.revision(), session.tokens(), TierName(session.tier()));
  if (session.durable_revision() > 0)
    absl::StrAppendFormat(&line, ", durable %d", session.durable_revision());
  if (session.damaged()) line += ", damaged";
  if (session.busy()) line += ", busy";
  for (int i = 0; i < session.marks_size(); ++i) {
    absl::StrAppendFormat(&line, "%s%s at %d", i == 0 ? ", marks " : " ", session.marks(i).name(),
                          session.marks(i).tokens());
  }
  return line;
}

void TellNotDurable(const std::string& session_id, uint64_t revision, uint64_t durable_revision) {
  std::fputs(absl::StrFormat("efla: session %s: revision %d is not durable; the last durable one is %d\n",
                             session_id, revision, durable_revision)
                 .c_str(),
             stderr);
}

absl::StatusOr<v1::Session> ImportFile(Client& client, const v1::ImportOptions& import,
                                       const std::string& path, const CallOptions& options) {
  InputFile file(path, kMaxSnapshotBytes);
  absl::StatusOr<std::string> first = file.Next();
  if (!first.ok()) return first.status();
  if (first->empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s is empty", path == "-" ? "standard input" : path));
  }
  const auto next = [&]() -> absl::StatusOr<std::string> {
    return first->empty() ? file.Next() : std::exchange(*first, "");
  };
  return client.Import(import, next, options);
}

}  // namespace efla
