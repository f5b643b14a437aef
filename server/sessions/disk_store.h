// Sessions on the local disk: one folder, one server.
#ifndef EFLA_SERVER_SESSIONS_DISK_STORE_H_
#define EFLA_SERVER_SESSIONS_DISK_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/file_ops.h"
#include "server/sessions/host_buffer.h"
#include "server/sessions/session_store.h"

namespace efla {

struct DiskStoreOptions {
  std::string folder;     // made when missing, with its parents
  int64_t max_bytes = 0;  // of snapshots and records together; 0: what the disk has
  // A snapshot that no record names (a put whose record has not come yet, or one that all records have left)
  // is removed after so long; at the next start in any case. One that all have left and the store's user does
  // not stand on (SetSnapshotsInUse) goes at once when a put needs its room.
  std::chrono::milliseconds unnamed_grace{std::chrono::minutes(5)};
  // How long a deleted session's id is kept from coming back with a lower epoch. Only this process writes
  // here, so what it has under way bounds that.
  std::chrono::milliseconds tombstone_ttl{std::chrono::minutes(10)};
  std::chrono::milliseconds sweep_interval{std::chrono::seconds(10)};    // of removals
  std::shared_ptr<HostBuffers> buffers = nullptr;                        // for snapshots read; null: its own
  std::function<std::chrono::system_clock::time_point()> now = nullptr;  // for tests
  FileOps* file_ops = nullptr;                                           // for tests; outlives the store
};

// Beyond SessionStore: file names, formats and what survives which failure are in README.md. Leases live in
// this process only. Calls block for the disk; any number may run at once, and those that finish writing
// together share one sync of the folder.
class DiskStore : public SessionStore {
 public:
  // Takes the folder's lock, removes what an earlier process left unfinished, checks every record.
  // FAILED_PRECONDITION: another server uses the folder, or it holds a record of a later version.
  // UNAVAILABLE: it cannot be made, listed or written. What cannot be read in it, or is damaged, does not
  // stop the start: problems().
  static absl::StatusOr<std::unique_ptr<DiskStore>> Open(const DiskStoreOptions& options);

  // A file that the start found damaged (DATA_LOSS) or could not read (UNAVAILABLE), and what that means.
  struct Problem {
    std::string path;
    absl::Status status;
  };
  virtual const std::vector<Problem>& problems() const = 0;

  struct Stats {
    int64_t bytes = 0;  // of files, and of those being written
    int snapshots = 0, unnamed_snapshots = 0;
    int records = 0, tombstones = 0, damaged_records = 0, unreadable_records = 0;
    uint64_t commits = 0, folder_syncs = 0;  // commits share syncs
  };
  virtual Stats stats() const = 0;
  // Removes what has expired or is not named any longer, as the store itself does every sweep_interval.
  virtual void Sweep() = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_DISK_STORE_H_
