#include "server/sessions/disk_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr std::string_view kSnapshotSuffix = ".efls";
constexpr std::string_view kRecordSuffix = ".record";
constexpr size_t kHashDigits = 32;

// ENOSPC and its like are the caller's business; all else means that the disk cannot be used.
absl::Status WriteError(const char* what, const std::string& path, int negative_errno) {
  const std::string message = absl::StrFormat("cannot %s %s: %s", what, path, std::strerror(-negative_errno));
  const bool full = negative_errno == -ENOSPC || negative_errno == -EDQUOT;
  return full ? absl::ResourceExhaustedError(message) : absl::UnavailableError(message);
}

// Calls `visit` for each entry of the folder.
template <typename Visit>
absl::Status ForEachEntry(const std::string& folder, const Visit& visit) {
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (const std::filesystem::directory_iterator end; !error && entry != end; entry.increment(error)) {
    if (absl::Status status = visit(*entry); !status.ok()) return status;
  }
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrFormat("cannot list %s: %s", folder, error.message()));
}

}  // namespace

std::string SnapshotFile::Name() const {
  return absl::StrFormat("%s+%d+%s%s", id, bytes, hash, kSnapshotSuffix);
}

std::optional<SnapshotFile> SnapshotFile::Parse(std::string_view name) {
  if (!name.ends_with(kSnapshotSuffix)) return std::nullopt;
  name.remove_suffix(kSnapshotSuffix.size());
  const size_t first = name.find('+');
  const size_t second = first == std::string_view::npos ? first : name.find('+', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  SnapshotFile file;
  file.id = std::string(name.substr(0, first));
  file.hash = std::string(name.substr(second + 1));
  const std::string_view digits = name.substr(first + 1, second - first - 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), file.bytes);
  if (error != std::errc() || end != digits.data() + digits.size() || file.bytes < 0 ||
      file.hash.size() != kHashDigits || !CheckStoreName("snapshot id", file.id).ok()) {
    return std::nullopt;
  }
  return file;
}

DiskFolder::DiskFolder(const std::string& path, FileOps* files)
    : path_(path),
      snapshots_(path + "/snapshots"),
      records_(path + "/records"),
      temporaries_(path + "/unfinished"),
      clean_mark_(path + "/CLEAN"),
      files_(files != nullptr ? *files : own_files_) {}

DiskFolder::~DiskFolder() {
  if (lock_fd_ >= 0) close(lock_fd_);
}

absl::Status DiskFolder::Take() {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> new_entries_in = {path_};
  for (fs::path path = fs::absolute(path_, error); !error && !fs::exists(path, error);) {
    path = path.parent_path();
    new_entries_in.push_back(path.string());
  }
  for (const std::string& folder : {snapshots_, records_, temporaries_}) {
    fs::create_directories(folder, error);
    // A state tells a conversation.
    if (!error) fs::permissions(folder, fs::perms::owner_all, error);
    if (error) {
      return absl::UnavailableError(
          absl::StrFormat("cannot make the session folder %s: %s", folder, error.message()));
    }
  }
  for (const std::string& folder : new_entries_in) {
    if (absl::Status status = Sync(folder); !status.ok()) return status;
  }
  if (absl::Status status = TakeLock(); !status.ok()) return status;
  return ForEachEntry(temporaries_, [&](const Entry& entry) {
    Remove(entry.path().string());
    return absl::OkStatus();
  });
}

absl::Status DiskFolder::TakeLock() {
  const std::string path = path_ + "/LOCK";
  lock_fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_fd_ < 0) return WriteError("open", path, -errno);
  if (flock(lock_fd_, LOCK_EX | LOCK_NB) == 0) {
    const std::string pid = absl::StrFormat("%d\n", getpid());
    if (ftruncate(lock_fd_, 0) != 0 || pwrite(lock_fd_, pid.data(), pid.size(), 0) < 0) {
      return WriteError("write", path, -errno);
    }
    return absl::OkStatus();
  }
  if (errno != EWOULDBLOCK) return WriteError("lock", path, -errno);
  char pid[32] = {};
  const ssize_t count = pread(lock_fd_, pid, sizeof(pid) - 1, 0);
  std::string holder(pid, count > 0 ? static_cast<size_t>(count) : 0);
  if (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return absl::FailedPreconditionError(absl::StrFormat(
      "the session folder %s is in use by process %s; each server needs its own", path_, holder));
}

std::string DiskFolder::SnapshotPath(const SnapshotFile& file) const {
  return snapshots_ + "/" + file.Name();
}

std::string DiskFolder::RecordPath(const std::string& session_id) const {
  return records_ + "/" + session_id + std::string(kRecordSuffix);
}

absl::Status DiskFolder::ForEachSnapshot(
    const std::function<absl::Status(const Entry& entry, const SnapshotFile& file)>& visit) const {
  return ForEachEntry(snapshots_, [&](const Entry& entry) -> absl::Status {
    const std::optional<SnapshotFile> file = SnapshotFile::Parse(entry.path().filename().string());
    return file ? visit(entry, *file) : absl::OkStatus();
  });
}

absl::Status DiskFolder::ForEachRecord(
    const std::function<absl::Status(const Entry& entry, const std::string& session_id)>& visit) const {
  return ForEachEntry(records_, [&](const Entry& entry) -> absl::Status {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(kRecordSuffix)) return absl::OkStatus();
    const std::string id = name.substr(0, name.size() - kRecordSuffix.size());
    if (!CheckStoreName("session_id", id).ok()) return absl::OkStatus();
    return visit(entry, id);
  });
}

absl::StatusOr<int> DiskFolder::OpenToRead(const std::string& path) const {
  const int fd = files_.OpenToRead(path);
  if (fd >= 0) return fd;
  if (fd == -ENOENT) return absl::NotFoundError(path + " is gone");
  return absl::UnavailableError(absl::StrFormat("cannot read %s: %s", path, std::strerror(-fd)));
}

absl::StatusOr<size_t> DiskFolder::ReadUpTo(int fd, const std::string& path, std::span<std::byte> to) const {
  size_t size = 0;
  while (size < to.size()) {
    const long result = files_.Read(fd, to.data() + size, to.size() - size);
    if (result == 0) break;
    if (result > 0) {
      size += static_cast<size_t>(result);
    } else if (result != -EINTR) {
      return absl::UnavailableError(
          absl::StrFormat("cannot read %s: %s", path, std::strerror(static_cast<int>(-result))));
    }
  }
  return size;
}

absl::StatusOr<std::vector<std::byte>> DiskFolder::ReadFile(const std::string& path, size_t size_hint) const {
  constexpr size_t kFirstRead = 4096;
  const absl::StatusOr<int> fd = OpenToRead(path);
  if (!fd.ok()) return fd.status();
  std::vector<std::byte> bytes;
  size_t size = 0;
  absl::Status status;
  do {
    bytes.resize(
        std::max({2 * bytes.size(), size_hint + 1, kFirstRead}));  // one more: the read that finds the end
    const absl::StatusOr<size_t> count = ReadUpTo(*fd, path, std::span(bytes).subspan(size));
    status = count.status();
    if (count.ok()) size += *count;
  } while (status.ok() && size == bytes.size());
  files_.Close(*fd);
  if (!status.ok()) return status;
  bytes.resize(size);
  return bytes;
}

absl::StatusOr<HostBuffer> DiskFolder::ReadSnapshot(const SnapshotFile& file, HostBuffers& buffers) const {
  const std::string path = SnapshotPath(file);
  const absl::StatusOr<int> fd = OpenToRead(path);
  if (!fd.ok()) return fd.status();
  HostBuffer bytes = buffers.Take(static_cast<size_t>(file.bytes) + 1);  // one more: none must follow
  const absl::StatusOr<size_t> count = ReadUpTo(*fd, path, bytes.span());
  files_.Close(*fd);
  if (!count.ok()) return count.status();
  bytes.Narrow(0, *count);
  if (static_cast<int64_t>(bytes.size()) != file.bytes || HashHex(bytes) != file.hash) {
    return absl::DataLossError(
        absl::StrFormat("snapshot %s in %s is damaged: it has %d bytes of %d, or other ones", file.id, path_,
                        bytes.size(), file.bytes));
  }
  return bytes;
}

absl::StatusOr<StoredRecord> DiskFolder::ReadRecord(const std::string& session_id, size_t size_hint) const {
  const auto bytes = ReadFile(RecordPath(session_id), size_hint);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<StoredRecord> stored = DecodeRecord(*bytes);
  if (stored.ok() && stored->record.session_id != session_id) {
    return absl::DataLossError("it is the record of session " + stored->record.session_id);
  }
  return stored;
}

absl::StatusOr<std::string> DiskFolder::WriteTemporary(std::span<const std::byte> bytes) {
  const std::string path = absl::StrFormat("%s/%d", temporaries_, next_temporary_++);
  const int fd = files_.Create(path);
  if (fd < 0) return WriteError("create", path, fd);
  absl::Status status;
  std::span<const std::byte> left = bytes;
  while (status.ok() && !left.empty()) {
    const long written = files_.Write(fd, left.data(), left.size());
    if (written > 0) {
      left = left.subspan(static_cast<size_t>(written));
    } else if (written != -EINTR) {
      status = WriteError(absl::StrFormat("write %d bytes to", bytes.size()).c_str(), path,
                          written == 0 ? -ENOSPC : static_cast<int>(written));
    }
  }
  // After a failed sync the pages may count as written: nothing but a new file can be trusted.
  if (status.ok()) {
    if (const int result = files_.SyncData(fd); result < 0) status = WriteError("sync", path, result);
  }
  if (const int result = files_.Close(fd); result < 0 && status.ok()) {
    status = WriteError("close", path, result);
  }
  if (!status.ok()) {
    files_.Unlink(path);
    return status;
  }
  return path;
}

absl::Status DiskFolder::Rename(const std::string& from, const std::string& to) {
  const int result = files_.Rename(from, to);
  return result == 0 ? absl::OkStatus() : WriteError("rename to", to, result);
}

absl::Status DiskFolder::Sync(const std::string& folder) {
  const int result = files_.SyncFolder(folder);
  return result < 0 ? WriteError("sync", folder, result) : absl::OkStatus();
}

void DiskFolder::Remove(const std::string& file) { files_.Unlink(file); }

absl::StatusOr<bool> DiskFolder::TakeCleanMark() {
  const int removed = files_.Unlink(clean_mark_);
  if (removed == -ENOENT) return false;
  if (removed < 0) return WriteError("remove", clean_mark_, removed);
  if (absl::Status status = Sync(path_); !status.ok()) return status;
  return true;
}

}  // namespace efla
