#include "server/sessions/disk_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/stored_record.h"

namespace efla {
namespace {

using SystemTime = std::chrono::system_clock::time_point;

constexpr std::string_view kSnapshotSuffix = ".efls";
constexpr std::string_view kRecordSuffix = ".record";
constexpr size_t kHashDigits = 32;

int64_t UnixMs(SystemTime time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

std::string HashHex(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

// A snapshot's file: "ID+SIZE+HASH.efls", so that the file is the snapshot and nothing else, and a scan of
// the folder finds out a file of the wrong size without reading it.
struct SnapshotFile {
  std::string id;
  int64_t bytes = 0;
  std::string hash;  // XXH3, 128 bits, hexadecimal

  std::string Name() const { return absl::StrFormat("%s+%d+%s%s", id, bytes, hash, kSnapshotSuffix); }
  static std::optional<SnapshotFile> Parse(std::string_view name) {
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
};

// ENOSPC and its like are the caller's business; all else means that the disk cannot be used.
absl::Status WriteError(const char* what, const std::string& path, int negative_errno) {
  const std::string message = absl::StrFormat("cannot %s %s: %s", what, path, std::strerror(-negative_errno));
  const bool full = negative_errno == -ENOSPC || negative_errno == -EDQUOT;
  return full ? absl::ResourceExhaustedError(message) : absl::UnavailableError(message);
}

class DiskStoreImpl final : public DiskStore {
 public:
  explicit DiskStoreImpl(const DiskStoreOptions& options);
  ~DiskStoreImpl() override;
  absl::Status Start();

  const char* kind() const override { return "disk"; }
  bool shared() const override { return false; }
  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override;
  absl::StatusOr<std::vector<std::byte>> GetSnapshot(const std::string& id) override;
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override;
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override;
  absl::StatusOr<std::vector<std::string>> ListRecords() override;
  absl::Status RenewLease(const std::string& owner, const std::string& address,
                          std::chrono::milliseconds ttl) override;
  absl::StatusOr<std::string> GetLease(const std::string& owner) override;
  Stats stats() const override;
  void Sweep() override;

 private:
  struct SnapshotEntry {
    SnapshotFile file;
    int names = 0;  // records that name it, those being written included
    SystemTime unnamed_since{};
  };
  struct RecordEntry {
    SessionRecord record;                // without its payload
    std::vector<std::string> snapshots;  // whose `names` count this record
    int64_t file_bytes = 0;
    int64_t written_unix_ms = 0;
    bool damaged = false;
  };
  // A written file on its way to its name.
  struct Commit {
    std::string from, to;
    const std::string* folder = nullptr;  // of `to`
    absl::Status status;
    bool renamed = false;  // with an error: `to` is the new file, but a power cut may bring the old one back
    bool done = false;
  };

  std::string SnapshotPath(const SnapshotFile& file) const { return snapshot_folder_ + "/" + file.Name(); }
  std::string RecordPath(const std::string& id) const {
    return record_folder_ + "/" + id + std::string(kRecordSuffix);
  }
  SystemTime Now() const { return options_.now ? options_.now() : std::chrono::system_clock::now(); }

  absl::Status TakeLock();
  absl::Status ScanTemporaries();
  absl::Status ScanSnapshots();
  absl::Status ScanRecords();
  absl::StatusOr<std::vector<std::byte>> ReadFile(const std::string& path, size_t size_hint) const;
  // To a new temporary file, synced: its path. No file is left behind an error.
  absl::StatusOr<std::string> WriteTemporary(std::span<const std::byte> bytes);
  // Blocks until the file has its name for good, or `status` says why not.
  Commit CommitFile(const std::string& from, const std::string& to, const std::string& folder);

  // The following are called with mutex_ held.
  bool Expired(const RecordEntry& entry, SystemTime now) const;
  // Null: there is none that counts.
  const RecordEntry* FindRecord(const std::string& id) const;
  absl::Status Reserve(std::unique_lock<std::mutex>& lock, int64_t bytes, const char* what);
  void Name(const std::vector<std::string>& ids);
  void Unname(const std::vector<std::string>& ids);

  void RunCommitter();
  void CommitBatch(std::span<Commit* const> batch);
  void RemoveStale();

  const DiskStoreOptions options_;
  const std::string snapshot_folder_, record_folder_, temporary_folder_;
  FileOps own_file_ops_;
  FileOps& files_;
  int lock_fd_ = -1;
  std::atomic<uint64_t> next_temporary_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable committer_wake_, progress_;
  std::map<std::string, SnapshotEntry> snapshots_;
  std::map<std::string, RecordEntry> records_;
  std::set<std::string> busy_snapshots_, busy_records_;  // being written: one writer an id
  std::map<std::string, std::pair<std::string, SystemTime>> leases_;
  std::vector<Commit*> queue_;
  int64_t bytes_ = 0;
  uint64_t commits_ = 0, folder_syncs_ = 0;
  uint64_t sweeps_wanted_ = 0, sweeps_done_ = 0;
  bool stopping_ = false;
  std::thread committer_;  // renames, syncs and removes; nobody else does
};

DiskStoreImpl::DiskStoreImpl(const DiskStoreOptions& options)
    : options_(options),
      snapshot_folder_(options.folder + "/snapshots"),
      record_folder_(options.folder + "/records"),
      temporary_folder_(options.folder + "/unfinished"),
      files_(options.file_ops ? *options.file_ops : own_file_ops_) {}

DiskStoreImpl::~DiskStoreImpl() {
  if (committer_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    committer_wake_.notify_all();
    committer_.join();
  }
  if (lock_fd_ >= 0) close(lock_fd_);
}

absl::Status DiskStoreImpl::Start() {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> new_entries_in = {options_.folder};
  for (fs::path path = fs::absolute(options_.folder, error); !error && !fs::exists(path, error);) {
    path = path.parent_path();
    new_entries_in.push_back(path.string());
  }
  for (const std::string& folder : {snapshot_folder_, record_folder_, temporary_folder_}) {
    fs::create_directories(folder, error);
    // A state tells a conversation.
    if (!error) fs::permissions(folder, fs::perms::owner_all, error);
    if (error) {
      return absl::UnavailableError(
          absl::StrFormat("cannot make the session folder %s: %s", folder, error.message()));
    }
  }
  for (const std::string& folder : new_entries_in) {
    if (const int result = files_.SyncFolder(folder); result < 0) return WriteError("sync", folder, result);
  }
  absl::Status status = TakeLock();
  if (!status.ok()) return status;
  if (status = ScanTemporaries(); !status.ok()) return status;
  if (status = ScanSnapshots(); !status.ok()) return status;
  if (status = ScanRecords(); !status.ok()) return status;
  for (auto& [id, entry] : snapshots_) {
    if (entry.names == 0) entry.unnamed_since = SystemTime::min();  // no put of before is under way any more
  }
  RemoveStale();
  committer_ = std::thread([this] { RunCommitter(); });
  return absl::OkStatus();
}

absl::Status DiskStoreImpl::TakeLock() {
  const std::string path = options_.folder + "/LOCK";
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
      "the session folder %s is in use by process %s; each server needs its own", options_.folder, holder));
}

absl::Status DiskStoreImpl::ScanTemporaries() {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(temporary_folder_, error)) {
    files_.Unlink(file.path().string());
  }
  if (error) return absl::UnavailableError("cannot list " + temporary_folder_ + ": " + error.message());
  return absl::OkStatus();
}

absl::Status DiskStoreImpl::ScanSnapshots() {
  std::error_code error;
  std::vector<std::string> unusable;
  for (const auto& entry : std::filesystem::directory_iterator(snapshot_folder_, error)) {
    std::optional<SnapshotFile> file = SnapshotFile::Parse(entry.path().filename().string());
    if (!file) continue;  // not ours
    std::error_code size_error;
    const auto size = entry.file_size(size_error);
    if (size_error || static_cast<int64_t>(size) != file->bytes || snapshots_.contains(file->id)) {
      unusable.push_back(entry.path().string());
      continue;
    }
    bytes_ += file->bytes;
    snapshots_[file->id].file = *file;
  }
  if (error) return absl::UnavailableError("cannot list " + snapshot_folder_ + ": " + error.message());
  for (const std::string& path : unusable) files_.Unlink(path);
  return absl::OkStatus();
}

absl::Status DiskStoreImpl::ScanRecords() {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(record_folder_, error)) {
    std::string name = file.path().filename().string();
    if (!name.ends_with(kRecordSuffix)) continue;
    const std::string id = name.substr(0, name.size() - kRecordSuffix.size());
    if (!CheckStoreName("session_id", id).ok()) continue;
    RecordEntry entry;
    const auto bytes = ReadFile(file.path().string(), 0);
    auto stored = bytes.ok() ? DecodeRecord(*bytes) : absl::StatusOr<StoredRecord>(bytes.status());
    if (stored.ok() && stored->record.session_id == id) {
      entry.record = std::move(stored->record);
      entry.record.payload = std::string();
      entry.written_unix_ms = stored->written_unix_ms;
      entry.file_bytes = static_cast<int64_t>(bytes->size());
      entry.snapshots = DistinctSnapshots(entry.record);
      Name(entry.snapshots);
    } else if (!stored.ok() &&
               !absl::IsDataLoss(stored.status())) {  // of a later version, or not for us to read
      return absl::Status(stored.status().code(),
                          file.path().string() + ": " + std::string(stored.status().message()));
    } else {
      entry.damaged = true;
      entry.record.session_id = id;
      entry.file_bytes = bytes.ok() ? static_cast<int64_t>(bytes->size()) : 0;
    }
    bytes_ += entry.file_bytes;
    records_[id] = std::move(entry);
  }
  if (error) return absl::UnavailableError("cannot list " + record_folder_ + ": " + error.message());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> DiskStoreImpl::ReadFile(const std::string& path,
                                                               size_t size_hint) const {
  constexpr size_t kFirstRead = 4096;
  const int fd = files_.OpenToRead(path);
  if (fd == -ENOENT) return absl::NotFoundError(path + " is gone");
  const auto failed = [&](long result) {
    const std::string message =
        absl::StrFormat("cannot read %s: %s", path, std::strerror(static_cast<int>(-result)));
    return result == -EIO ? absl::DataLossError(message) : absl::UnavailableError(message);
  };
  if (fd < 0) return failed(fd);
  std::vector<std::byte> bytes(size_hint + 1);  // one more: the read that finds the end
  size_t size = 0;
  long result = 1;
  while (result > 0 || result == -EINTR) {
    if (size == bytes.size()) bytes.resize(std::max(2 * bytes.size(), kFirstRead));
    result = files_.Read(fd, bytes.data() + size, bytes.size() - size);
    if (result > 0) size += static_cast<size_t>(result);
  }
  files_.Close(fd);
  if (result < 0) return failed(result);
  bytes.resize(size);
  return bytes;
}

absl::StatusOr<std::string> DiskStoreImpl::WriteTemporary(std::span<const std::byte> bytes) {
  const std::string path = absl::StrFormat("%s/%d", temporary_folder_, next_temporary_++);
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

DiskStoreImpl::Commit DiskStoreImpl::CommitFile(const std::string& from, const std::string& to,
                                                const std::string& folder) {
  Commit commit;
  commit.from = from;
  commit.to = to;
  commit.folder = &folder;
  std::unique_lock lock(mutex_);
  queue_.push_back(&commit);
  committer_wake_.notify_one();
  progress_.wait(lock, [&] { return commit.done; });
  return commit;
}

bool DiskStoreImpl::Expired(const RecordEntry& entry, SystemTime now) const {
  if (entry.damaged) return false;
  if (entry.record.deleted) return entry.written_unix_ms + options_.tombstone_ttl.count() <= UnixMs(now);
  return entry.record.expires_unix_ms != 0 && entry.record.expires_unix_ms <= UnixMs(now);
}

const DiskStoreImpl::RecordEntry* DiskStoreImpl::FindRecord(const std::string& id) const {
  const auto found = records_.find(id);
  if (found == records_.end() || Expired(found->second, Now())) return nullptr;
  return &found->second;
}

absl::Status DiskStoreImpl::Reserve(std::unique_lock<std::mutex>& lock, int64_t bytes, const char* what) {
  const auto fits = [&] { return options_.max_bytes == 0 || bytes_ + bytes <= options_.max_bytes; };
  if (!fits()) {
    lock.unlock();
    Sweep();
    lock.lock();
  }
  if (!fits()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the session folder %s holds %d of at most %d bytes; %s of %d bytes does not fit",
                        options_.folder, bytes_, options_.max_bytes, what, bytes));
  }
  bytes_ += bytes;
  return absl::OkStatus();
}

void DiskStoreImpl::Name(const std::vector<std::string>& ids) {
  for (const std::string& id : ids) {
    if (const auto found = snapshots_.find(id); found != snapshots_.end()) ++found->second.names;
  }
}

void DiskStoreImpl::Unname(const std::vector<std::string>& ids) {
  for (const std::string& id : ids) {
    const auto found = snapshots_.find(id);
    if (found == snapshots_.end()) continue;
    EFLA_CHECK(found->second.names > 0);
    if (--found->second.names == 0) found->second.unnamed_since = Now();
  }
}

absl::Status DiskStoreImpl::PutSnapshot(const std::string& id, std::span<const std::byte> bytes) {
  if (absl::Status status = CheckStoreName("snapshot id", id); !status.ok()) return status;
  const SnapshotFile file{.id = id, .bytes = static_cast<int64_t>(bytes.size()), .hash = HashHex(bytes)};
  {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [&] { return !busy_snapshots_.contains(id); });
    if (const auto found = snapshots_.find(id); found != snapshots_.end()) {
      if (found->second.file.hash != file.hash) {
        return absl::InvalidArgumentError(
            absl::StrFormat("snapshot %s has other content in the store than in this put", id));
      }
      found->second.unnamed_since = Now();
      return absl::OkStatus();
    }
    busy_snapshots_.insert(id);
    if (absl::Status status = Reserve(lock, file.bytes, "a snapshot"); !status.ok()) {
      busy_snapshots_.erase(id);
      progress_.notify_all();
      return status;
    }
  }
  absl::StatusOr<std::string> temporary = WriteTemporary(bytes);
  absl::Status status = temporary.status();
  if (status.ok()) {
    const Commit commit = CommitFile(*temporary, SnapshotPath(file), snapshot_folder_);
    status = commit.status;
    if (!status.ok()) files_.Unlink(commit.renamed ? commit.to : commit.from);
  }
  const std::lock_guard lock(mutex_);
  busy_snapshots_.erase(id);
  if (status.ok()) {
    SnapshotEntry& entry = snapshots_[id];
    entry.file = file;
    entry.unnamed_since = Now();
  } else {
    bytes_ -= file.bytes;
  }
  progress_.notify_all();
  return status;
}

absl::StatusOr<std::vector<std::byte>> DiskStoreImpl::GetSnapshot(const std::string& id) {
  SnapshotFile file;
  {
    const std::lock_guard lock(mutex_);
    const auto found = snapshots_.find(id);
    if (found == snapshots_.end()) {
      return absl::NotFoundError(absl::StrFormat("there is no snapshot %s in %s", id, options_.folder));
    }
    file = found->second.file;
  }
  auto bytes = ReadFile(SnapshotPath(file), static_cast<size_t>(file.bytes));
  if (!bytes.ok()) return bytes;
  if (static_cast<int64_t>(bytes->size()) != file.bytes || HashHex(*bytes) != file.hash) {
    return absl::DataLossError(
        absl::StrFormat("snapshot %s in %s is damaged: it has %d bytes of %d, or other ones", id,
                        options_.folder, bytes->size(), file.bytes));
  }
  return bytes;
}

absl::StatusOr<SessionRecord> DiskStoreImpl::GetRecord(const std::string& session_id) {
  size_t size_hint = 0;
  {
    const std::lock_guard lock(mutex_);
    const RecordEntry* entry = FindRecord(session_id);
    if (entry == nullptr) {
      return absl::NotFoundError(
          absl::StrFormat("there is no session %s in %s", session_id, options_.folder));
    }
    if (entry->damaged) {
      return absl::DataLossError(
          absl::StrFormat("the record of session %s is damaged: %s", session_id, RecordPath(session_id)));
    }
    size_hint = static_cast<size_t>(entry->file_bytes);
  }
  const auto bytes = ReadFile(RecordPath(session_id), size_hint);
  if (!bytes.ok()) return bytes.status();
  auto stored = DecodeRecord(*bytes);
  if (!stored.ok()) return stored.status();
  return std::move(stored->record);
}

absl::Status DiskStoreImpl::PutRecord(const SessionRecord& record, uint64_t expected_epoch) {
  if (absl::Status status = CheckRecord(record, expected_epoch); !status.ok()) return status;
  const std::string& id = record.session_id;
  RecordEntry next;
  next.record = record;
  next.snapshots = DistinctSnapshots(record);
  next.written_unix_ms = UnixMs(Now());
  const std::vector<std::byte> bytes = EncodeRecord(record, next.written_unix_ms);
  next.record.payload = std::string();
  next.file_bytes = static_cast<int64_t>(bytes.size());
  {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [&] { return !busy_records_.contains(id); });
    const RecordEntry* stored = FindRecord(id);
    const bool counts = stored != nullptr && !stored->damaged;
    absl::Status status = CheckReplaces(counts ? &stored->record : nullptr, record, expected_epoch);
    if (!status.ok()) return status;
    for (const std::string& snapshot : next.snapshots) {
      if (!snapshots_.contains(snapshot)) {
        return absl::FailedPreconditionError(absl::StrFormat(
            "the record of session %s names snapshot %s, which is not in the store", id, snapshot));
      }
    }
    busy_records_.insert(id);
    Name(next.snapshots);
    // A deletion is let in always: it is what makes room.
    if (record.deleted) {
      bytes_ += next.file_bytes;
    } else if (status = Reserve(lock, next.file_bytes, "a record"); !status.ok()) {
      Unname(next.snapshots);
      busy_records_.erase(id);
      progress_.notify_all();
      return status;
    }
  }
  absl::StatusOr<std::string> temporary = WriteTemporary(bytes);
  absl::Status status = temporary.status();
  bool replaced = false;
  if (status.ok()) {
    const Commit commit = CommitFile(*temporary, RecordPath(id), record_folder_);
    status = commit.status;
    replaced = commit.renamed;
    if (!replaced) files_.Unlink(*temporary);
  }
  const std::lock_guard lock(mutex_);
  busy_records_.erase(id);
  if (replaced) {
    RecordEntry& entry = records_[id];
    bytes_ -= entry.file_bytes;
    std::vector<std::string> before = std::move(entry.snapshots);
    entry = std::move(next);
    if (status.ok()) {
      Unname(before);
    } else {  // a power cut may bring the old record back: what it names stays until the next put
      entry.snapshots.insert(entry.snapshots.end(), before.begin(), before.end());
    }
  } else {
    Unname(next.snapshots);
    bytes_ -= next.file_bytes;
  }
  progress_.notify_all();
  return status;
}

absl::StatusOr<std::vector<std::string>> DiskStoreImpl::ListRecords() {
  const std::lock_guard lock(mutex_);
  const SystemTime now = Now();
  std::vector<std::string> ids;
  for (const auto& [id, entry] : records_) {
    if (!entry.damaged && !entry.record.deleted && !Expired(entry, now)) ids.push_back(id);
  }
  return ids;
}

absl::Status DiskStoreImpl::RenewLease(const std::string& owner, const std::string& address,
                                       std::chrono::milliseconds ttl) {
  if (absl::Status status = CheckOwner(owner); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  leases_[owner] = {address, Now() + ttl};
  return absl::OkStatus();
}

absl::StatusOr<std::string> DiskStoreImpl::GetLease(const std::string& owner) {
  const std::lock_guard lock(mutex_);
  const auto found = leases_.find(owner);
  if (found == leases_.end() || found->second.second <= Now()) {
    return absl::NotFoundError(absl::StrFormat("\"%s\" has no lease", owner));
  }
  return found->second.first;
}

DiskStore::Stats DiskStoreImpl::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats;
  stats.bytes = bytes_;
  stats.snapshots = static_cast<int>(snapshots_.size());
  stats.commits = commits_;
  stats.folder_syncs = folder_syncs_;
  for (const auto& [id, entry] : snapshots_) stats.unnamed_snapshots += entry.names == 0;
  for (const auto& [id, entry] : records_) {
    ++(entry.damaged ? stats.damaged_records : entry.record.deleted ? stats.tombstones : stats.records);
  }
  return stats;
}

void DiskStoreImpl::Sweep() {
  std::unique_lock lock(mutex_);
  const uint64_t wanted = ++sweeps_wanted_;
  committer_wake_.notify_one();
  progress_.wait(lock, [&] { return sweeps_done_ >= wanted; });
}

void DiskStoreImpl::RunCommitter() {
  auto next_sweep = std::chrono::steady_clock::now() + options_.sweep_interval;
  std::unique_lock lock(mutex_);
  while (true) {
    committer_wake_.wait_until(lock, next_sweep,
                               [&] { return !queue_.empty() || stopping_ || sweeps_wanted_ > sweeps_done_; });
    if (!queue_.empty()) {
      const std::vector<Commit*> batch = std::exchange(queue_, {});
      lock.unlock();
      CommitBatch(batch);
      lock.lock();
      commits_ += batch.size();
      for (Commit* commit : batch) commit->done = true;
      progress_.notify_all();
    }
    const uint64_t wanted = sweeps_wanted_;
    const auto now = std::chrono::steady_clock::now();
    if (wanted > sweeps_done_ || now >= next_sweep) {
      lock.unlock();
      RemoveStale();
      lock.lock();
      sweeps_done_ = wanted;
      next_sweep = now + options_.sweep_interval;
      progress_.notify_all();
    }
    if (stopping_ && queue_.empty()) return;
  }
}

void DiskStoreImpl::CommitBatch(std::span<Commit* const> batch) {
  std::set<const std::string*> folders;
  for (Commit* commit : batch) {
    const int result = files_.Rename(commit->from, commit->to);
    commit->renamed = result == 0;
    if (commit->renamed) {
      folders.insert(commit->folder);
    } else {
      commit->status = WriteError("rename to", commit->to, result);
    }
  }
  for (const std::string* folder : folders) {
    const int result = files_.SyncFolder(*folder);
    for (Commit* commit : batch) {
      if (result < 0 && commit->renamed && commit->folder == folder) {
        commit->status = WriteError("sync", *folder, result);
      }
    }
  }
  const std::lock_guard lock(mutex_);
  folder_syncs_ += folders.size();
}

// Not synced: what a power cut brings back is stale still, and goes at the next start.
void DiskStoreImpl::RemoveStale() {
  std::vector<std::string> paths;
  {
    const std::lock_guard lock(mutex_);
    const SystemTime now = Now();
    for (auto it = records_.begin(); it != records_.end();) {
      RecordEntry& entry = it->second;
      if (!Expired(entry, now) || busy_records_.contains(it->first)) {
        ++it;
        continue;
      }
      paths.push_back(RecordPath(it->first));
      bytes_ -= entry.file_bytes;
      Unname(entry.snapshots);
      it = records_.erase(it);
    }
    for (auto it = snapshots_.begin(); it != snapshots_.end();) {
      const SnapshotEntry& entry = it->second;
      if (entry.names > 0 ||
          (entry.unnamed_since != SystemTime::min() && now - entry.unnamed_since < options_.unnamed_grace)) {
        ++it;
        continue;
      }
      paths.push_back(SnapshotPath(entry.file));
      bytes_ -= entry.file.bytes;
      it = snapshots_.erase(it);
    }
    std::erase_if(leases_, [&](const auto& lease) { return lease.second.second <= now; });
  }
  for (const std::string& path : paths) files_.Unlink(path);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DiskStore>> DiskStore::Open(const DiskStoreOptions& options) {
  if (options.folder.empty() || options.max_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("the session folder is \"%s\" with at most %d bytes",
                                                      options.folder, options.max_bytes));
  }
  auto store = std::make_unique<DiskStoreImpl>(options);
  if (absl::Status status = store->Start(); !status.ok()) return status;
  return std::unique_ptr<DiskStore>(std::move(store));
}

}  // namespace efla
