// What calls may name and expect, and the errors for what they may not.
#ifndef EFLA_SERVER_SESSIONS_SESSION_CHECKS_H_
#define EFLA_SERVER_SESSIONS_SESSION_CHECKS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/session.h"

namespace efla {

// INVALID_ARGUMENT naming `what`, unless the key is one of session_key.h with a name of 1 to 128 characters.
absl::Status CheckSessionKey(const char* what, const std::string& key);
// The time to live; the longest where 0 is given. INVALID_ARGUMENT.
absl::StatusOr<std::chrono::milliseconds> CheckTtl(std::chrono::milliseconds ttl,
                                                   std::chrono::milliseconds max_ttl);
// ABORTED, REVISION_MISMATCH, when another one is expected.
absl::Status CheckRevision(const std::string& id, const std::optional<uint64_t>& expected, uint64_t revision);

// ABORTED, SESSION_BUSY. With the session's mutex held.
absl::Status SessionBusy(const Session& session);
absl::Status SessionNotFound(const std::string& id, const char* why = "does not exist");
absl::Status SessionExists(const std::string& id);  // ALREADY_EXISTS
absl::Status MarkNotFound(const std::string& id, const std::string& mark);
absl::Status ServerDraining();  // UNAVAILABLE

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_CHECKS_H_
