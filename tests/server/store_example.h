// Records and snapshots for tests of session stores.
#ifndef EFLA_TESTS_SERVER_STORE_EXAMPLE_H_
#define EFLA_TESTS_SERVER_STORE_EXAMPLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/sessions/session_store.h"

namespace efla {

// Bytes that follow from the id: whoever reads them knows whether they are whole and the right ones.
inline std::vector<std::byte> BytesOf(const std::string& id, size_t size) {
  std::mt19937_64 random(std::hash<std::string>()(id));
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    for (size_t j = i; j < size && j < i + 8; ++j) bytes[j] = static_cast<std::byte>(word >> 8 * (j - i));
  }
  return bytes;
}

inline SessionRecord RecordOf(const std::string& id, uint64_t epoch, uint64_t revision,
                              const std::string& owner, std::vector<std::string> snapshots = {}) {
  SessionRecord record;
  record.session_id = id;
  record.epoch = epoch;
  record.revision = revision;
  record.owner = owner;
  record.snapshots = std::move(snapshots);
  record.payload = "payload of " + id + " at " + std::to_string(revision) + std::string("\0\r\n", 3);
  return record;
}

inline SessionRecord TombstoneOf(const std::string& id, uint64_t epoch) {
  SessionRecord record = RecordOf(id, epoch, 0, "");
  record.deleted = true;
  return record;
}

inline std::vector<std::string> IdsIn(SessionStore& store, const std::string& prefix = "") {
  std::vector<std::string> ids;
  const absl::StatusOr<std::vector<ListedRecord>> listed = store.ListRecords(prefix);
  if (!listed.ok()) return {listed.status().ToString()};
  for (const ListedRecord& record : *listed) ids.push_back(record.session_id);
  return ids;
}

inline bool SameRecord(const SessionRecord& a, const SessionRecord& b) {
  return a.session_id == b.session_id && a.epoch == b.epoch && a.revision == b.revision &&
         a.owner == b.owner && a.deleted == b.deleted && a.snapshots == b.snapshots &&
         a.payload == b.payload && a.expires_unix_ms == b.expires_unix_ms;
}

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_STORE_EXAMPLE_H_
