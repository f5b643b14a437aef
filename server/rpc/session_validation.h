// The fields that calls of sessions have in common, checked. Errors: INVALID_ARGUMENT naming the field, the
// value and the bound; FAILED_PRECONDITION for what needs a store where there is none.
#ifndef EFLA_SERVER_RPC_SESSION_VALIDATION_H_
#define EFLA_SERVER_RPC_SESSION_VALIDATION_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/sessions.pb.h"
#include "server/served_model.h"
#include "server/sessions/session_manager.h"

namespace efla {

inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxRequestIdBytes = 256;

// 1 to 128 characters of [A-Za-z0-9._-].
absl::Status CheckName(std::string_view field, std::string_view name);
// The same, or empty.
absl::Status CheckOptionalName(std::string_view field, std::string_view name);
absl::Status CheckRequestId(std::string_view request_id);
absl::StatusOr<Durability> ToDurability(std::string_view field, v1::Durability durability,
                                        const ServedModel& model);
absl::StatusOr<OnCancel> ToOnCancel(std::string_view field, v1::OnCancel on_cancel);
absl::StatusOr<SessionTier> ToTier(v1::Tier tier, const ServedModel& model);
absl::Status CheckRevision(std::string_view field, std::optional<uint64_t> revision);
// Zero: the server's longest.
absl::StatusOr<std::chrono::milliseconds> ToTtl(std::string_view field, uint64_t ttl_ms,
                                                const ServedModel& model);

template <typename Request>
absl::StatusOr<Durability> DurabilityOf(const Request& request, const ServedModel& model) {
  if constexpr (requires { request.durability(); }) {
    return ToDurability("durability", request.durability(), model);
  } else {
    return Durability::kAsync;
  }
}

// session_id, expected_revision, request_id and durability of a request that changes a session.
template <typename Request>
absl::StatusOr<SessionChange> ToChange(const Request& request, const ServedModel& model) {
  if (absl::Status status = CheckName("session_id", request.session_id()); !status.ok()) return status;
  if (absl::Status status = CheckRequestId(request.request_id()); !status.ok()) return status;
  SessionChange change;
  change.session_id = request.session_id();
  if (request.has_expected_revision()) change.expected_revision = request.expected_revision();
  if (absl::Status status = CheckRevision("expected_revision", change.expected_revision); !status.ok())
    return status;
  change.request_id = request.request_id();
  absl::StatusOr<Durability> durability = DurabilityOf(request, model);
  if (!durability.ok()) return durability.status();
  change.durability = *durability;
  return change;
}

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SESSION_VALIDATION_H_
