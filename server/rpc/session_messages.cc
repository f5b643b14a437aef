#include "server/rpc/session_messages.h"

#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/status.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

// Another server can be asked at once, a store may be back soon.
constexpr milliseconds kElsewhereRetry{0}, kStoreRetry{1000}, kRoomRetry{500};

// The first byte of a record.
constexpr char kGeneration = 'G', kAppend = 'A', kTooLong = 'L';

const char* ReasonOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kNotFound:
      return "SESSION_NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "SESSION_EXISTS";
    case absl::StatusCode::kAborted:
      return "SESSION_LOST";
    case absl::StatusCode::kOutOfRange:
      return "REVISION_NOT_KEPT";
    case absl::StatusCode::kFailedPrecondition:
      return "SNAPSHOT_MISMATCH";
    case absl::StatusCode::kDataLoss:
      return "SNAPSHOT_DAMAGED";
    case absl::StatusCode::kUnavailable:
      return "STORE_UNAVAILABLE";
    case absl::StatusCode::kResourceExhausted:
      return "SESSION_LIMIT";
    default:
      return nullptr;
  }
}

template <typename Message>
std::string Encode(char kind, const Message& reply) {
  if (reply.ByteSizeLong() > kMaxRecordBytes) return EncodeTooLongRecord();
  return kind + reply.SerializeAsString();
}

template <typename Message>
absl::StatusOr<Message> Decode(char kind, const std::string& record) {
  if (!record.empty() && record.front() == kTooLong) {
    return WithReason(
        absl::AlreadyExistsError(absl::StrFormat(
            "the request_id has been seen, and its result was longer than the %d KiB that are kept",
            kMaxRecordBytes >> 10)),
        "RESULT_NOT_KEPT");
  }
  Message message;
  if (record.empty() || record.front() != kind || !message.ParseFromString(record.substr(1))) {
    return WithReason(
        absl::FailedPreconditionError("the request_id has been seen with another method of this session"),
        "REQUEST_ID_REUSED");
  }
  return message;
}

}  // namespace

v1::Tier ToProto(SessionTier tier) {
  switch (tier) {
    case SessionTier::kNone:
      return v1::TIER_NONE;
    case SessionTier::kDevice:
      return v1::TIER_DEVICE;
    case SessionTier::kHost:
      return v1::TIER_HOST;
    case SessionTier::kDisk:
      return v1::TIER_DISK;
    case SessionTier::kShared:
      return v1::TIER_SHARED;
  }
  return v1::TIER_UNSPECIFIED;
}

void FillSession(const SessionInfo& session, v1::Session& message) {
  message.set_session_id(session.session_id);
  message.set_revision(session.revision);
  message.set_durable_revision(session.durable_revision);
  message.set_tokens(static_cast<uint64_t>(session.tokens));
  message.set_waiting_tokens(static_cast<uint64_t>(session.waiting_tokens));
  message.set_tier(ToProto(session.tier));
  message.set_damaged(session.damaged);
  message.set_busy(session.busy);
  for (const SessionInfo::Mark& mark : session.marks) {
    v1::SessionMark& one = *message.add_marks();
    one.set_name(mark.name);
    one.set_revision(mark.revision);
    one.set_tokens(static_cast<uint64_t>(mark.tokens));
  }
  for (const uint64_t revision : session.turns) message.add_kept_revisions(revision);
  message.set_created_unix_ms(static_cast<uint64_t>(session.created_unix_ms));
  message.set_expires_unix_ms(static_cast<uint64_t>(session.expires_unix_ms));
}

void FillAfterTurn(const SessionInfo& session, uint64_t before, v1::SessionAfterTurn& message) {
  message.set_session_id(session.session_id);
  message.set_began_revision(before);
  message.set_revision(session.revision);
  message.set_durable_revision(session.durable_revision);
  message.set_tokens(static_cast<uint64_t>(session.tokens));
  message.set_committed(session.revision != before);
  message.set_tier(ToProto(session.tier));
  message.set_expires_unix_ms(static_cast<uint64_t>(session.expires_unix_ms));
}

v1::SessionAfterTurn RecordedTurn(const v1::SessionAfterTurn& recorded, const SessionInfo& now) {
  v1::SessionAfterTurn message = recorded;
  message.set_durable_revision(now.durable_revision);
  message.set_tier(ToProto(now.tier));
  message.set_expires_unix_ms(static_cast<uint64_t>(now.expires_unix_ms));
  return message;
}

absl::Status WithSessionDetails(absl::Status status) {
  if (status.ok()) return status;
  std::string reason;
  if (std::optional<SessionError> error = GetSessionError(status)) {
    status.ErasePayload(kSessionErrorUrl);
    reason = error->reason;
    status = WithReason(std::move(status), reason, error->metadata);
  } else if (HasReason(status)) {
    return status;
  } else if (const char* implied = ReasonOf(status.code())) {
    reason = implied;
    status = WithReason(std::move(status), reason);
  }
  if (status.code() == absl::StatusCode::kResourceExhausted) return WithRetry(std::move(status), kRoomRetry);
  if (status.code() == absl::StatusCode::kUnavailable) {
    return WithRetry(std::move(status), reason == "STORE_UNAVAILABLE" ? kStoreRetry : kElsewhereRetry);
  }
  return status;
}

std::string EncodeRecord(const v1::CompleteResponse& reply) { return Encode(kGeneration, reply); }
std::string EncodeRecord(const v1::AppendResponse& reply) { return Encode(kAppend, reply); }
std::string EncodeTooLongRecord() { return std::string(1, kTooLong); }

absl::StatusOr<v1::CompleteResponse> DecodeGenerationRecord(const std::string& record) {
  return Decode<v1::CompleteResponse>(kGeneration, record);
}

absl::StatusOr<v1::AppendResponse> DecodeAppendRecord(const std::string& record) {
  return Decode<v1::AppendResponse>(kAppend, record);
}

}  // namespace efla
