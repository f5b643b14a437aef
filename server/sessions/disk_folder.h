// The files of a disk store: how they are named, read whole, and written so that after a power cut each is
// the old one or the new one. README.md has the folder's layout.
#ifndef EFLA_SERVER_SESSIONS_DISK_FOLDER_H_
#define EFLA_SERVER_SESSIONS_DISK_FOLDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/file_ops.h"
#include "server/sessions/host_buffer.h"
#include "server/sessions/stored_record.h"

namespace efla {

// A snapshot's file: "ID+SIZE+HASH.efls", so that the file is the snapshot and nothing else, and a scan of
// the folder finds out a file of the wrong size without reading it.
struct SnapshotFile {
  std::string id;
  int64_t bytes = 0;
  std::string hash;  // XXH3, 128 bits, hexadecimal

  std::string Name() const;
  static std::optional<SnapshotFile> Parse(std::string_view name);
};

// One process's at a time; within it, for any number of threads. What fails to be written is
// RESOURCE_EXHAUSTED where the disk is full, else UNAVAILABLE: the disk cannot be used.
class DiskFolder {
 public:
  DiskFolder(const std::string& path, FileOps* files);  // null: the system's own
  ~DiskFolder();                                        // lets go of it
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;

  // Before anything else: makes it, with its parents, takes its lock and removes what an earlier process left
  // unfinished. FAILED_PRECONDITION: another process has it.
  absl::Status Take();

  const std::string& path() const { return path_; }
  const std::string& snapshots() const { return snapshots_; }
  const std::string& records() const { return records_; }
  const std::string& clean_mark() const { return clean_mark_; }  // a file
  std::string SnapshotPath(const SnapshotFile& file) const;
  std::string RecordPath(const std::string& session_id) const;

  // Of each entry that has the name of one, until an error, which is returned.
  using Entry = std::filesystem::directory_entry;
  absl::Status ForEachSnapshot(
      const std::function<absl::Status(const Entry& entry, const SnapshotFile& file)>& visit) const;
  absl::Status ForEachRecord(
      const std::function<absl::Status(const Entry& entry, const std::string& session_id)>& visit) const;

  // NOT_FOUND; UNAVAILABLE where it cannot be read, whole as it may be; DATA_LOSS.
  absl::StatusOr<HostBuffer> ReadSnapshot(const SnapshotFile& file, HostBuffers& buffers) const;
  // Likewise; FAILED_PRECONDITION: of another version. `size_hint` is what its file may have.
  absl::StatusOr<StoredRecord> ReadRecord(const std::string& session_id, size_t size_hint) const;

  // To a new temporary file, synced: its path. No file is left behind an error.
  absl::StatusOr<std::string> WriteTemporary(std::span<const std::byte> bytes);
  // Gives a temporary file its name: for good once the folder that it is in now has been synced.
  absl::Status Rename(const std::string& from, const std::string& to);
  absl::Status Sync(const std::string& folder);
  void Remove(const std::string& file);
  // Removes it for good. False: there was none.
  absl::StatusOr<bool> TakeCleanMark();

 private:
  absl::Status TakeLock();
  absl::StatusOr<int> OpenToRead(const std::string& path) const;
  // Reads until the end or until `to` is full; how many bytes.
  absl::StatusOr<size_t> ReadUpTo(int fd, const std::string& path, std::span<std::byte> to) const;
  absl::StatusOr<std::vector<std::byte>> ReadFile(const std::string& path, size_t size_hint) const;

  const std::string path_, snapshots_, records_, temporaries_, clean_mark_;
  FileOps own_files_;
  FileOps& files_;
  int lock_fd_ = -1;
  std::atomic<uint64_t> next_temporary_ = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_DISK_FOLDER_H_
