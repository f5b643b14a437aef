#include "server/sessions/session_checks.h"

#include <cstddef>
#include <string_view>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_key.h"

namespace efla {
namespace {

constexpr size_t kMaxIdBytes = 128;

std::string RevisionText(uint64_t revision) { return absl::StrFormat("%d", revision); }

}  // namespace

absl::Status CheckSessionKey(const char* what, const std::string& key) {
  const std::string_view id = NameOf(key);
  if (!HasGoodTenant(key)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has other than 1 to %d letters, digits and ._- before its ~", what, kMaxTenantPartBytes));
  }
  if (id.empty() || id.size() > kMaxIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d characters; it must have 1 to %d", what, id.size(), kMaxIdBytes));
  }
  for (const char c : id) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
        c == '-') {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has a character of code %d; letters, digits and ._- are allowed", what,
                        static_cast<unsigned char>(c)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::chrono::milliseconds> CheckTtl(std::chrono::milliseconds ttl,
                                                   std::chrono::milliseconds max_ttl) {
  if (ttl.count() == 0) return max_ttl;
  if (ttl.count() > 0 && ttl <= max_ttl) return ttl;
  return absl::InvalidArgumentError(
      absl::StrFormat("ttl is %d ms; it must be 0 to %d", ttl.count(), max_ttl.count()));
}

absl::Status SessionBusy(const Session& session) {
  return WithSessionError(
      absl::AbortedError(absl::StrFormat("session %s is being changed by another call; its revision is %d",
                                         session.id, session.state.revision)),
      "SESSION_BUSY", {{"revision", RevisionText(session.state.revision)}});
}

absl::Status SessionNotFound(const std::string& id, const char* why) {
  return WithSessionError(absl::NotFoundError(absl::StrFormat("session %s %s", id, why)),
                          "SESSION_NOT_FOUND");
}

absl::Status SessionExists(const std::string& id) {
  return WithSessionError(absl::AlreadyExistsError(absl::StrFormat("session %s exists already", id)),
                          "SESSION_EXISTS");
}

absl::Status ServerDraining() {
  return WithSessionError(absl::UnavailableError("the server is shutting down"), "DRAINING");
}

absl::Status CheckRevision(const std::string& id, const std::optional<uint64_t>& expected,
                           uint64_t revision) {
  if (!expected || *expected == revision) return absl::OkStatus();
  return WithSessionError(absl::AbortedError(absl::StrFormat(
                              "session %s has revision %d; the call expects %d", id, revision, *expected)),
                          "REVISION_MISMATCH",
                          {{"revision", RevisionText(revision)}, {"expected", RevisionText(*expected)}});
}

absl::Status MarkNotFound(const std::string& id, const std::string& mark) {
  return WithSessionError(absl::NotFoundError(absl::StrFormat("session %s has no mark %s", id, mark)),
                          "MARK_NOT_FOUND");
}

}  // namespace efla
