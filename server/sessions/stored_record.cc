#include "server/sessions/stored_record.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/session_key.h"

namespace efla {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little-endian");

constexpr std::string_view kMagic = "EFLR";
constexpr uint32_t kVersion = 1;

class RecordWriter {
 public:
  template <std::integral T>
  void Number(T value) {
    const auto raw = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  void Raw(std::string_view text) {
    const auto raw = std::as_bytes(std::span(text));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  void Text(const std::string& text) {
    Number(static_cast<uint32_t>(text.size()));
    Raw(text);
  }
  std::vector<std::byte> TakeWithHash() {
    Number(static_cast<uint64_t>(XXH3_64bits(bytes_.data(), bytes_.size())));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

// Reads beyond the end give zero and nothing, and set `failed`.
class RecordReader {
 public:
  explicit RecordReader(std::span<const std::byte> bytes) : left_(bytes) {}
  template <std::integral T>
  T Number() {
    T value{};
    const auto raw = Take(sizeof(T));
    if (!failed_) std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  std::string Text() {
    const auto raw = Take(Number<uint32_t>());
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  bool ended_well() const { return !failed_ && left_.empty(); }
  bool failed() const { return failed_; }

 private:
  std::span<const std::byte> Take(size_t count) {
    failed_ |= count > left_.size();
    if (failed_) return {};
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  std::span<const std::byte> left_;
  bool failed_ = false;
};

}  // namespace

absl::Status CheckStoreName(const char* what, const std::string& key) {
  const std::string_view name = NameOf(key);
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' ||
           c == '_' || c == '-';
  };
  if (!name.empty() && name.size() <= kMaxStoreNameBytes && HasGoodTenant(key) &&
      std::all_of(name.begin(), name.end(), allowed)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has %d bytes or a character outside [A-Za-z0-9._-]; it is 1 to %d of these", what,
                      name.size(), kMaxStoreNameBytes));
}

absl::Status CheckOwner(const std::string& owner) {
  if (!owner.empty() && owner.size() <= kMaxOwnerBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("an owner's name has %d bytes; the range is 1 to %d", owner.size(), kMaxOwnerBytes));
}

absl::Status CheckRecord(const SessionRecord& record, uint64_t expected_epoch) {
  absl::Status status = CheckStoreName("session_id", record.session_id);
  if (!record.owner.empty()) status.Update(CheckOwner(record.owner));
  for (const std::string& id : record.snapshots) status.Update(CheckStoreName("snapshot id", id));
  if (!status.ok()) return status;
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError("record of session " + record.session_id + ": " + why);
  };
  if (record.epoch == 0 || record.epoch < expected_epoch) {
    return bad(absl::StrFormat("epoch is %d; it is at least 1 and at least the expected %d", record.epoch,
                               expected_epoch));
  }
  if (record.deleted && record.epoch == expected_epoch) {
    return bad(absl::StrFormat("a deletion needs an epoch above the expected %d", expected_epoch));
  }
  if (record.deleted && !record.snapshots.empty()) {
    return bad(
        absl::StrFormat("a deleted session names %d snapshots; it names none", record.snapshots.size()));
  }
  if (record.snapshots.size() > kMaxRecordSnapshots) {
    return bad(absl::StrFormat("it names %d snapshots; the limit is %d", record.snapshots.size(),
                               kMaxRecordSnapshots));
  }
  if (record.payload.size() > kMaxRecordPayloadBytes) {
    return bad(absl::StrFormat("the payload has %d bytes; the limit is %d", record.payload.size(),
                               kMaxRecordPayloadBytes));
  }
  if (record.expires_unix_ms < 0 || record.expires_unix_ms > kMaxUnixMs) {
    return bad(
        absl::StrFormat("expires_unix_ms is %d; the range is 0 to %d", record.expires_unix_ms, kMaxUnixMs));
  }
  return absl::OkStatus();
}

absl::Status CheckReplaces(const SessionRecord* stored, const SessionRecord& record,
                           uint64_t expected_epoch) {
  bool replaces = false;
  if (stored == nullptr) {
    replaces = expected_epoch == 0;
  } else if (stored->deleted) {
    const bool is_expected = expected_epoch == 0 || expected_epoch == stored->epoch;
    replaces =
        is_expected && (record.epoch > stored->epoch || (record.deleted && record.epoch == stored->epoch));
  } else if (stored->epoch == expected_epoch) {
    const bool takes = !record.owner.empty() && record.owner != stored->owner;
    const bool goes_back = record.revision < stored->revision;
    const bool claims_stale = goes_back && !record.owner.empty() && record.revision > 0;
    replaces = record.epoch > stored->epoch ? !claims_stale || record.deleted : !goes_back && !takes;
  }
  return replaces ? absl::OkStatus() : StaleRecord(stored, record, expected_epoch);
}

absl::Status StaleRecord(const SessionRecord* stored, const SessionRecord& record, uint64_t expected_epoch) {
  const std::string put = absl::StrFormat(
      "session %s: a record of epoch %d, revision %d, owner \"%s\" was put over an expected epoch %d, but ",
      record.session_id, record.epoch, record.revision, record.owner, expected_epoch);
  if (stored == nullptr) return absl::AbortedError(put + "there is no record");
  return absl::AbortedError(
      put + absl::StrFormat("the stored record has epoch %d, revision %d, owner \"%s\"%s", stored->epoch,
                            stored->revision, stored->owner, stored->deleted ? " and is deleted" : ""));
}

std::string HashHex(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

std::vector<std::byte> EncodeRecord(const SessionRecord& record, int64_t written_unix_ms) {
  RecordWriter out;
  out.Raw(kMagic);
  out.Number(kVersion);
  out.Number(record.epoch);
  out.Number(record.revision);
  out.Number(record.expires_unix_ms);
  out.Number(written_unix_ms);
  out.Number(static_cast<uint32_t>(record.deleted));
  out.Text(record.session_id);
  out.Text(record.owner);
  out.Number(static_cast<uint32_t>(record.snapshots.size()));
  for (const std::string& id : record.snapshots) out.Text(id);
  out.Text(record.payload);
  return out.TakeWithHash();
}

absl::StatusOr<StoredRecord> DecodeRecord(std::span<const std::byte> bytes) {
  constexpr size_t kFrame = kMagic.size() + sizeof(kVersion) + sizeof(uint64_t);
  if (bytes.size() < kFrame || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return absl::DataLossError(absl::StrFormat("%d bytes are not a session's record", bytes.size()));
  }
  const auto content = bytes.first(bytes.size() - sizeof(uint64_t));
  uint64_t hash = 0;
  std::memcpy(&hash, bytes.data() + content.size(), sizeof(hash));
  if (XXH3_64bits(content.data(), content.size()) != hash) {
    return absl::DataLossError("a session's record is damaged: its checksum differs");
  }
  RecordReader in(content.subspan(kMagic.size()));
  if (const auto version = in.Number<uint32_t>(); version != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrFormat("a session's record has format version %d, this server reads %d", version, kVersion));
  }
  StoredRecord stored;
  SessionRecord& record = stored.record;
  record.epoch = in.Number<uint64_t>();
  record.revision = in.Number<uint64_t>();
  record.expires_unix_ms = in.Number<int64_t>();
  stored.written_unix_ms = in.Number<int64_t>();
  record.deleted = in.Number<uint32_t>() != 0;
  record.session_id = in.Text();
  record.owner = in.Text();
  const auto snapshots = in.Number<uint32_t>();
  for (uint32_t i = 0; i < snapshots && !in.failed(); ++i) record.snapshots.push_back(in.Text());
  record.payload = in.Text();
  if (!in.ended_well()) return absl::DataLossError("a session's record contradicts its own lengths");
  return stored;
}

std::vector<std::string> DistinctSnapshots(const SessionRecord& record) {
  std::vector<std::string> ids = record.snapshots;
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace efla
