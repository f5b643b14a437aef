// What stores have in common: the names they take, when a record may replace another, a record in bytes.
#ifndef EFLA_SERVER_SESSIONS_STORED_RECORD_H_
#define EFLA_SERVER_SESSIONS_STORED_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/session_store.h"

namespace efla {

inline constexpr size_t kMaxStoreNameBytes = 128;
inline constexpr size_t kMaxOwnerBytes = 256;
inline constexpr size_t kMaxRecordSnapshots = 4096;
inline constexpr size_t kMaxRecordPayloadBytes = 64 << 20;
// Of expires_unix_ms; what a double, which is what Redis scripts calculate with, still holds exactly.
inline constexpr int64_t kMaxUnixMs = int64_t{1} << 52;

// INVALID_ARGUMENT, naming `what`, unless `key` is 1 to 128 characters of [A-Za-z0-9._-], which may stand
// behind a tenant's name and a "~" (session_key.h).
absl::Status CheckStoreName(const char* what, const std::string& key);
// INVALID_ARGUMENT unless it is 1 to 256 bytes.
absl::Status CheckOwner(const std::string& owner);

// The checks of PutRecord that need no store: INVALID_ARGUMENT.
absl::Status CheckRecord(const SessionRecord& record, uint64_t expected_epoch);
// The compare-and-set rule of PutRecord. `stored`: null when there is none, or it has expired. ABORTED.
// REQUIRES: CheckRecord.
absl::Status CheckReplaces(const SessionRecord* stored, const SessionRecord& record, uint64_t expected_epoch);
// ABORTED as CheckReplaces says it, for a store that decides elsewhere.
absl::Status StaleRecord(const SessionRecord* stored, const SessionRecord& record, uint64_t expected_epoch);

// XXH3 (128 bits) in hexadecimal.
std::string HashHex(std::span<const std::byte> bytes);

// A record in bytes, for files: "EFLR", version, the fields, XXH3 (64 bits) of what precedes.
std::vector<std::byte> EncodeRecord(const SessionRecord& record, int64_t written_unix_ms);
struct StoredRecord {
  SessionRecord record;
  int64_t written_unix_ms = 0;
};
// DATA_LOSS: cut off, or the checksum differs. FAILED_PRECONDITION: another version.
absl::StatusOr<StoredRecord> DecodeRecord(std::span<const std::byte> bytes);

// Each id once, in order.
std::vector<std::string> DistinctSnapshots(const SessionRecord& record);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_STORED_RECORD_H_
