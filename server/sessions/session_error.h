// Reasons of session errors, for programs: a payload beside an absl::Status's code and message, which the RPC
// layer turns into the public error details.
#ifndef EFLA_SERVER_SESSIONS_SESSION_ERROR_H_
#define EFLA_SERVER_SESSIONS_SESSION_ERROR_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/cord.h"

namespace efla {

// What the code alone does not tell:
//   ABORTED              SESSION_BUSY (revision), REVISION_MISMATCH (revision, expected),
//                        SESSION_LOST: deleted or taken over during the turn
//   NOT_FOUND            SESSION_NOT_FOUND, MARK_NOT_FOUND
//   ALREADY_EXISTS       SESSION_EXISTS,
//                        RESULT_NOT_KEPT: a repeated request whose reply was too long to be kept
//   OUT_OF_RANGE         REVISION_NOT_KEPT (revision)
//   UNAVAILABLE          SESSION_ELSEWHERE (address, owner), STORE_UNAVAILABLE, DRAINING
//   RESOURCE_EXHAUSTED   SESSION_LIMIT (of sessions, marks, host memory), NO_STATE_SLOT
//   FAILED_PRECONDITION  SNAPSHOT_MISMATCH
//   DATA_LOSS            SNAPSHOT_DAMAGED
// In parentheses, the keys of its metadata; `revision` is the session's current one.
struct SessionError {
  std::string reason;
  std::map<std::string, std::string> metadata;
};

inline constexpr char kSessionErrorUrl[] = "efla/session_error";

// Lines: the reason, then KEY=VALUE. Nothing in it has line ends.
inline absl::Status WithSessionError(absl::Status status, std::string_view reason,
                                     const std::map<std::string, std::string>& metadata = {}) {
  std::string payload(reason);
  for (const auto& [key, value] : metadata) payload += "\n" + key + "=" + value;
  status.SetPayload(kSessionErrorUrl, absl::Cord(payload));
  return status;
}

inline std::optional<SessionError> GetSessionError(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kSessionErrorUrl);
  if (!payload) return std::nullopt;
  const std::string text(*payload);
  SessionError error;
  size_t begin = text.find('\n');
  error.reason = text.substr(0, begin);
  while (begin != std::string::npos) {
    const size_t end = text.find('\n', ++begin);
    const std::string line = text.substr(begin, end == std::string::npos ? end : end - begin);
    const size_t equals = line.find('=');
    if (equals != std::string::npos) error.metadata[line.substr(0, equals)] = line.substr(equals + 1);
    begin = end;
  }
  return error;
}

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_ERROR_H_
