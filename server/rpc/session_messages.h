// Sessions and their errors as messages.
#ifndef EFLA_SERVER_RPC_SESSION_MESSAGES_H_
#define EFLA_SERVER_RPC_SESSION_MESSAGES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/sessions.pb.h"
#include "server/sessions/session_manager.h"

namespace efla {

v1::Tier ToProto(SessionTier tier);
void FillSession(const SessionInfo& session, v1::Session& message);
// `before`: the revision that the turn began with.
void FillAfterTurn(const SessionInfo& session, uint64_t before, v1::SessionAfterTurn& message);

// Of a replayed turn: what it had made, and where that rests now.
v1::SessionAfterTurn RecordedTurn(const v1::SessionAfterTurn& recorded, const SessionInfo& now);

// Turns the session manager's reason (session_error.h), or the one that the code implies where it gave none,
// into google.rpc.ErrorInfo, and adds RetryInfo where repeating may help.
absl::Status WithSessionDetails(absl::Status status);

// What a repeated request id is answered with. One record may not be read as the other; one above the bound
// keeps only that it was made.
inline constexpr size_t kMaxRecordBytes = 256 << 10;
std::string EncodeRecord(const v1::CompleteResponse& reply);
std::string EncodeRecord(const v1::AppendResponse& reply);
// Of a reply that was too long to be gathered.
std::string EncodeTooLongRecord();
// FAILED_PRECONDITION: the record is another method's. ALREADY_EXISTS: it was too long to be kept.
absl::StatusOr<v1::CompleteResponse> DecodeGenerationRecord(const std::string& record);
absl::StatusOr<v1::AppendResponse> DecodeAppendRecord(const std::string& record);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SESSION_MESSAGES_H_
