// What the commands that change sessions have in common.
#ifndef EFLA_CLIENT_SESSION_FLAGS_H_
#define EFLA_CLIENT_SESSION_FLAGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "client/client.h"
#include "efla/v1/sessions.pb.h"

namespace efla {

struct ChangeFlags {
  std::optional<uint64_t> expected_revision;
  std::string request_id, durability = "async";

  v1::Durability Durability() const;
  // Into a request of the Sessions service.
  template <typename Request>
  void Fill(Request& request) const {
    if (expected_revision) request.set_expected_revision(*expected_revision);
    request.set_request_id(request_id);
    if constexpr (requires { request.set_durability(Durability()); }) request.set_durability(Durability());
  }
};
// `session`: the option without which these make no sense; may be null.
void AddRevisionFlags(CLI::App& app, ChangeFlags& flags, CLI::Option* session = nullptr);
// These and the durability.
void AddChangeFlags(CLI::App& app, ChangeFlags& flags, CLI::Option* session = nullptr);
void AddDurabilityFlag(CLI::App& app, std::string& durability, CLI::Option* session = nullptr);
v1::Durability ParseDurability(const std::string& durability);

// "device" of TIER_DEVICE.
std::string TierName(v1::Tier tier);
// "story: revision 3, 132 tokens, device", what may be left out left out.
std::string SessionLine(const v1::Session& session);

void TellNotDurable(const std::string& session_id, uint64_t revision, uint64_t durable_revision);
// False, with a line on standard error, when sync was asked for and the store does not have what `session`,
// a Session or SessionAfterTurn, has become.
template <typename Session>
bool IsAsDurable(v1::Durability asked, const Session& session) {
  if (asked != v1::DURABILITY_SYNC || session.durable_revision() >= session.revision()) return true;
  TellNotDurable(session.session_id(), session.revision(), session.durable_revision());
  return false;
}

// A session made of the file's snapshot, which is sent as it is read.
absl::StatusOr<v1::Session> ImportFile(Client& client, const v1::ImportOptions& import,
                                       const std::string& path, const CallOptions& options);

}  // namespace efla

#endif  // EFLA_CLIENT_SESSION_FLAGS_H_
