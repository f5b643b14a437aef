// What a session's record holds: SessionRecord::payload in this program's own format, version 1.
//
// Little-endian: "EFSR", version (4 bytes), XXH3-64 of the rest, then the fields of SessionPayload in order;
// texts and lists begin with their length (4 bytes).
#ifndef EFLA_SERVER_SESSIONS_SESSION_RECORD_H_
#define EFLA_SERVER_SESSIONS_SESSION_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "server/sessions/session_manager.h"
#include "server/sessions/turn_tokens.h"

namespace efla {

// What a repeated request is answered with.
struct RecordedReply {
  enum class Call : uint8_t { kTurn = 1, kCreate = 2, kImport = 3, kFork = 4, kMark = 5, kRewind = 6 };
  Call call = Call::kTurn;
  std::string request_id;
  uint64_t revision = 0;    // the session's after the call
  bool has_content = true;  // false: it was too long to be kept
  std::string content;
};

// A context as a record names it.
struct RecordedContext {
  std::string snapshot_id;  // of its state; empty: nothing has been fed
  int64_t fed_tokens = 0;
  WaitingTokens waiting;
};

struct SessionPayload {
  // The model's, that tokens and snapshots belong to: SnapshotIdentity's fingerprints.
  std::string weights_fingerprint, tokenizer_fingerprint;
  uint64_t revision = 0;
  uint64_t head_since = 0;  // the revision that made the head what it is
  int64_t created_unix_ms = 0, ttl_ms = 0;
  RecordedContext head;
  struct Turn {
    uint64_t since = 0, until = 0;  // the revisions whose head it was
    RecordedContext context;
  };
  std::vector<Turn> turns;  // oldest first
  struct Mark {
    std::string name;
    uint64_t since = 0;
    RecordedContext context;
  };
  std::vector<Mark> marks;             // by name
  std::vector<RecordedReply> replies;  // oldest first
};

std::string SerializePayload(const SessionPayload& payload);
// DATA_LOSS: damaged. FAILED_PRECONDITION: of another version.
absl::StatusOr<SessionPayload> ParsePayload(std::string_view bytes);

// Recorded results of calls that answer with sessions.
std::string SerializeInfos(const std::vector<SessionInfo>& infos);
absl::StatusOr<std::vector<SessionInfo>> ParseInfos(std::string_view bytes);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_RECORD_H_
