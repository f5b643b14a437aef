#include "server/rpc/session_validation.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "server/rpc/status.h"

namespace efla {
namespace {

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
}

}  // namespace

absl::Status CheckName(std::string_view field, std::string_view name) {
  if (!name.empty()) return CheckOptionalName(field, name);
  return InvalidField(
      field, absl::StrFormat("is empty; it needs 1 to %d characters of [A-Za-z0-9._-]", kMaxNameBytes));
}

absl::Status CheckOptionalName(std::string_view field, std::string_view name) {
  if (name.size() > kMaxNameBytes) {
    return InvalidField(field,
                        absl::StrFormat("has %d characters; the limit is %d", name.size(), kMaxNameBytes));
  }
  if (!std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return InvalidField(field, absl::StrFormat("is \"%s\"; it may have characters of [A-Za-z0-9._-] only",
                                               absl::Utf8SafeCHexEscape(std::string(name))));
  }
  return absl::OkStatus();
}

absl::Status CheckRequestId(std::string_view request_id) {
  if (request_id.size() <= kMaxRequestIdBytes) return absl::OkStatus();
  return InvalidField(
      "request_id", absl::StrFormat("has %d bytes; the limit is %d", request_id.size(), kMaxRequestIdBytes));
}

absl::StatusOr<Durability> ToDurability(std::string_view field, v1::Durability durability,
                                        const ServedModel& model) {
  switch (durability) {
    case v1::DURABILITY_NONE:
      return Durability::kNone;
    case v1::DURABILITY_UNSPECIFIED:
    case v1::DURABILITY_ASYNC:
      return Durability::kAsync;
    case v1::DURABILITY_SYNC:
      if (model.has_disk_store || model.has_shared_store) return Durability::kSync;
      return WithReason(absl::FailedPreconditionError(
                            absl::StrFormat("%s is DURABILITY_SYNC and this server has no store; start it "
                                            "with --session-dir or --session-store",
                                            field)),
                        "NO_STORE");
    default:
      return InvalidField(field,
                          absl::StrFormat("is %d; the values are 0 to %d", static_cast<int>(durability),
                                          static_cast<int>(v1::Durability_MAX)));
  }
}

absl::StatusOr<OnCancel> ToOnCancel(std::string_view field, v1::OnCancel on_cancel) {
  switch (on_cancel) {
    case v1::ON_CANCEL_UNSPECIFIED:
    case v1::ON_CANCEL_ROLLBACK:
      return OnCancel::kRollback;
    case v1::ON_CANCEL_KEEP:
      return OnCancel::kKeep;
    default:
      return InvalidField(field, absl::StrFormat("is %d; the values are 0 to %d", static_cast<int>(on_cancel),
                                                 static_cast<int>(v1::OnCancel_MAX)));
  }
}

absl::StatusOr<SessionTier> ToTier(v1::Tier tier, const ServedModel& model) {
  const auto store = [](SessionTier stored, bool there, const char* flag) -> absl::StatusOr<SessionTier> {
    if (there) return stored;
    return WithReason(absl::FailedPreconditionError(
                          absl::StrFormat("this server has no such tier; start it with %s", flag)),
                      "NO_STORE");
  };
  switch (tier) {
    case v1::TIER_DEVICE:
      return SessionTier::kDevice;
    case v1::TIER_HOST:
      return SessionTier::kHost;
    case v1::TIER_DISK:
      return store(SessionTier::kDisk, model.has_disk_store, "--session-dir");
    case v1::TIER_SHARED:
      return store(SessionTier::kShared, model.has_shared_store, "--session-store");
    default:
      return InvalidField(
          "tier", absl::StrFormat("is %d; the values are %d (DEVICE) to %d (SHARED)", static_cast<int>(tier),
                                  static_cast<int>(v1::TIER_DEVICE), static_cast<int>(v1::TIER_SHARED)));
  }
}

absl::Status CheckRevision(std::string_view field, std::optional<uint64_t> revision) {
  if (!revision || *revision > 0) return absl::OkStatus();
  return InvalidField(field, "is 0; revisions begin at 1");
}

absl::StatusOr<std::chrono::milliseconds> ToTtl(std::string_view field, uint64_t ttl_ms,
                                                const ServedModel& model) {
  const uint64_t most = static_cast<uint64_t>(model.limits.max_session_ttl_ms);
  if (ttl_ms <= most) return std::chrono::milliseconds(ttl_ms);
  return InvalidField(field, absl::StrFormat("is %d; the limit is %d", ttl_ms, most));
}

}  // namespace efla
