// Where sessions are kept beyond this process: one narrow interface, for the local disk and for stores that
// replicas share.
#ifndef EFLA_SERVER_SESSIONS_SESSION_STORE_H_
#define EFLA_SERVER_SESSIONS_SESSION_STORE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/host_buffer.h"

namespace efla {

// A session's entry in the store. The store interprets the fields below and nothing of the payload.
struct SessionRecord {
  std::string session_id;
  // From 1 on. Rises when somebody becomes the owner and with deletion, not when the owner gives up; fences
  // stale owners.
  uint64_t epoch = 0;
  uint64_t revision = 0;  // of the payload; never falls within an epoch
  std::string owner;      // the replica that may continue it; empty: anyone may claim it
  bool deleted = false;   // a tombstone, naming no snapshots: the id cannot come back with a lower epoch
  std::vector<std::string> snapshots;  // ids of the snapshots that the payload refers to
  std::string payload;
  int64_t expires_unix_ms = 0;  // 0: never
};

// What a listing tells of a record.
struct ListedRecord {
  std::string session_id;
  uint64_t revision = 0;
  int64_t expires_unix_ms = 0;
};

// Snapshots are immutable and shared between records (forks); a store drops those that no record has named
// for some time. Thread-safe; calls block, with a time-out where there is a network. UNAVAILABLE: the store
// cannot be reached or read, or its circuit breaker is open: what it holds may be whole. RESOURCE_EXHAUSTED:
// full. DATA_LOSS: what it holds is damaged. What has returned OK is durable. Ids of sessions and snapshots
// are 1 to 128 characters of [A-Za-z0-9._-].
class SessionStore {
 public:
  SessionStore() = default;
  SessionStore(const SessionStore&) = delete;
  SessionStore& operator=(const SessionStore&) = delete;
  virtual ~SessionStore() = default;

  virtual const char* kind() const = 0;  // "disk", "redis"
  virtual bool shared() const = 0;       // other replicas see it too: owners and leases matter

  // Whether its user still stands on a snapshot that records have named and none names now. One that it does
  // not stand on may go as soon as room is short. Set once, before other calls; called by any thread, with
  // locks held: it must not call the store. Unset: nobody does.
  virtual void SetSnapshotsInUse(std::function<bool(const std::string& id)> /*in_use*/) {}
  // Which session a snapshot was made for, for messages; empty where that is not known. As above.
  virtual void SetSessionOfSnapshot(std::function<std::string(const std::string& id)> /*session_of*/) {}

  // Idempotent: an id names one content. Kept for some minutes for a record that names it.
  virtual absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) = 0;
  // NOT_FOUND.
  virtual absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) = 0;
  // Whether it has the snapshot, which may be damaged nevertheless.
  virtual absl::StatusOr<bool> HasSnapshot(const std::string& id) {
    const absl::Status status = GetSnapshot(id).status();
    if (status.ok() || absl::IsDataLoss(status)) return true;
    if (absl::IsNotFound(status)) return false;
    return status;
  }

  // NOT_FOUND; a tombstone is returned as a record.
  virtual absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) = 0;
  // Compare-and-set: replaces the stored record when that has `expected_epoch` (0: there is none, or a
  // tombstone of a lower epoch) and, within one epoch, no later revision and no other owner unless the new
  // one is empty. A claim, that is a higher epoch with an owner, must not go back behind the stored revision
  // either, unless it makes the session anew (revision 0): it was read before it was claimed. ABORTED, naming
  // the stored epoch, owner and revision, otherwise; so of any number of puts that raise the same epoch
  // exactly one returns OK. FAILED_PRECONDITION: it names a snapshot that is not here. INVALID_ARGUMENT: an
  // epoch below the expected one, a deletion without a higher one, names that are not names. After
  // UNAVAILABLE the record may have been replaced or not.
  virtual absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) = 0;
  // The records whose ids begin with `prefix`, but tombstones and expired ones, in order of id. Reads no
  // payload.
  virtual absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) = 0;

  // A replica's sign of life, and the address where others may send its sessions' clients.
  virtual absl::Status RenewLease(const std::string& owner, const std::string& address,
                                  std::chrono::milliseconds ttl) = 0;
  // Its address; NOT_FOUND when the lease has run out.
  virtual absl::StatusOr<std::string> GetLease(const std::string& owner) = 0;

  // A mark that this server's last process was through with the store when it left it. Taking it removes it,
  // durably. A shared store has none: there leases tell.
  virtual absl::Status PutCleanMark() { return absl::OkStatus(); }
  virtual absl::StatusOr<bool> TakeCleanMark() { return true; }
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_STORE_H_
