#include "server/sessions/disk_store.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/disk_folder.h"
#include "server/sessions/stored_record.h"

namespace efla {
namespace {

using SystemTime = std::chrono::system_clock::time_point;

int64_t UnixMs(SystemTime time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

// With its memory, which an assignment of an empty string would keep.
void DropPayload(SessionRecord& record) { std::string().swap(record.payload); }

class DiskStoreImpl final : public DiskStore {
 public:
  explicit DiskStoreImpl(const DiskStoreOptions& options);
  ~DiskStoreImpl() override;
  absl::Status Start();

  const char* kind() const override { return "disk"; }
  bool shared() const override { return false; }
  void SetSnapshotsInUse(std::function<bool(const std::string& id)> in_use) override {
    in_use_ = std::move(in_use);
  }
  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override;
  absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) override;
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override;
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override;
  absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) override;
  absl::Status RenewLease(const std::string& owner, const std::string& address,
                          std::chrono::milliseconds ttl) override;
  absl::StatusOr<std::string> GetLease(const std::string& owner) override;
  absl::StatusOr<bool> HasSnapshot(const std::string& id) override;
  absl::Status PutCleanMark() override;
  absl::StatusOr<bool> TakeCleanMark() override { return folder_.TakeCleanMark(); }
  const std::vector<Problem>& problems() const override { return problems_; }
  Stats stats() const override;
  void Sweep() override { Sweep(/*room_is_short=*/false); }

 private:
  struct SnapshotEntry {
    SnapshotFile file;
    int names = 0;      // records that name it, those being written included
    bool left = false;  // records have named it and do so no longer
    SystemTime unnamed_since{};
  };
  struct RecordEntry {
    SessionRecord record;                // without its payload
    std::vector<std::string> snapshots;  // whose `names` count this record
    int64_t file_bytes = 0;
    int64_t written_unix_ms = 0;
    // What the start made of a file that it could not take up: it counts as none, but that another record
    // than a deletion does not replace an unreadable one, which may be whole.
    enum class State { kGood, kDamaged, kUnreadable } state = State::kGood;
  };
  // A written file on its way to its name.
  struct Commit {
    std::string from, to;
    const std::string* folder = nullptr;  // of `to`
    absl::Status status;
    bool renamed = false;  // with an error: `to` is the new file, but a power cut may bring the old one back
    bool done = false;
  };

  SystemTime Now() const { return options_.now ? options_.now() : std::chrono::system_clock::now(); }

  absl::Status ScanSnapshots();
  absl::Status ScanRecords();
  absl::Status ScanRecord(const DiskFolder::Entry& file, const std::string& id);
  // An unreadable record that has been read after all, or turned out to be damaged.
  void TakeUp(const std::string& id, const absl::StatusOr<StoredRecord>& stored);
  // DiskFolder's WriteTemporary; on a full disk once more when there was something to remove.
  absl::StatusOr<std::string> WriteMakingRoom(std::span<const std::byte> bytes);
  // Blocks until the file has its name for good, or `status` says why not.
  Commit CommitFile(const std::string& from, const std::string& to, const std::string& folder);

  // The following are called with mutex_ held.
  bool Expired(const RecordEntry& entry, SystemTime now) const;
  // Null: there is none that counts.
  const RecordEntry* FindRecord(const std::string& id) const;
  absl::Status Reserve(std::unique_lock<std::mutex>& lock, int64_t bytes, const char* what);
  void Name(const std::vector<std::string>& ids);
  // `left`: by a record that had named them, and not by one that could not be put.
  void Unname(const std::vector<std::string>& ids, bool left);
  bool MayRemove(const SnapshotEntry& entry, SystemTime now, bool room_is_short) const;

  void Sweep(bool room_is_short);
  void RunCommitter();
  void CommitBatch(std::span<Commit* const> batch);
  void RemoveStale(bool room_is_short);

  const DiskStoreOptions options_;
  DiskFolder folder_;
  const std::shared_ptr<HostBuffers> buffers_;
  std::function<bool(const std::string& id)> in_use_;
  std::vector<Problem> problems_;

  mutable std::mutex mutex_;
  std::condition_variable committer_wake_, progress_;
  std::map<std::string, SnapshotEntry> snapshots_;
  std::map<std::string, RecordEntry> records_;
  std::set<std::string> busy_snapshots_, busy_records_;  // being written: one writer an id
  std::map<std::string, std::pair<std::string, SystemTime>> leases_;
  std::vector<Commit*> queue_;
  int64_t bytes_ = 0;
  uint64_t commits_ = 0, folder_syncs_ = 0, removals_ = 0;
  uint64_t sweeps_wanted_ = 0, sweeps_done_ = 0;
  int unreadable_ = 0;          // records
  bool room_is_short_ = false;  // for the next sweep
  bool stopping_ = false;
  std::thread committer_;  // renames, syncs and removes; nobody else does
};

DiskStoreImpl::DiskStoreImpl(const DiskStoreOptions& options)
    : options_(options),
      folder_(options.folder, options.file_ops),
      buffers_(options.buffers != nullptr ? options.buffers : HostBuffers::Create(0)) {}

DiskStoreImpl::~DiskStoreImpl() {
  if (!committer_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  committer_wake_.notify_all();
  committer_.join();
}

absl::Status DiskStoreImpl::Start() {
  if (absl::Status status = folder_.Take(); !status.ok()) return status;
  if (absl::Status status = ScanSnapshots(); !status.ok()) return status;
  if (absl::Status status = ScanRecords(); !status.ok()) return status;
  for (auto& [id, entry] : snapshots_) {
    if (entry.names == 0) entry.unnamed_since = SystemTime::min();  // no put of before is under way any more
  }
  RemoveStale(/*room_is_short=*/false);
  committer_ = std::thread([this] { RunCommitter(); });
  return absl::OkStatus();
}

absl::Status DiskStoreImpl::ScanSnapshots() {
  std::vector<std::string> unusable;
  const auto visit = [&](const DiskFolder::Entry& entry, const SnapshotFile& file) -> absl::Status {
    const std::string path = entry.path().string();
    std::error_code error;
    if (!entry.is_regular_file(error) && !error) {
      problems_.push_back({path, absl::DataLossError("not a file; it is left alone")});
      return absl::OkStatus();
    }
    const int64_t size = error ? 0 : static_cast<int64_t>(entry.file_size(error));
    if (error) {  // it may be whole nevertheless
      problems_.push_back({path, absl::UnavailableError("cannot be looked at: " + error.message())});
    } else if (size != file.bytes) {
      problems_.push_back(
          {path, absl::DataLossError(absl::StrFormat("has %d bytes of %d; removed", size, file.bytes))});
    }
    if ((!error && size != file.bytes) || snapshots_.contains(file.id)) {
      unusable.push_back(path);
      return absl::OkStatus();
    }
    bytes_ += file.bytes;
    snapshots_[file.id].file = file;
    return absl::OkStatus();
  };
  if (absl::Status status = folder_.ForEachSnapshot(visit); !status.ok()) return status;
  for (const std::string& path : unusable) folder_.Remove(path);
  return absl::OkStatus();
}

absl::Status DiskStoreImpl::ScanRecords() {
  return folder_.ForEachRecord(
      [&](const DiskFolder::Entry& file, const std::string& id) { return ScanRecord(file, id); });
}

absl::Status DiskStoreImpl::ScanRecord(const DiskFolder::Entry& file, const std::string& id) {
  const std::string path = file.path().string();
  std::error_code error;
  absl::StatusOr<StoredRecord> stored = absl::DataLossError("not a file");
  if (file.is_regular_file(error) || error) stored = folder_.ReadRecord(id, 0);
  if (absl::IsNotFound(stored.status())) return absl::OkStatus();
  if (absl::IsFailedPrecondition(stored.status())) {  // of a later version: not for us to remove
    return absl::FailedPreconditionError(path + ": " + std::string(stored.status().message()));
  }
  RecordEntry& entry = records_[id];
  entry.record.session_id = id;
  const auto size = file.file_size(error);
  entry.file_bytes = error ? 0 : static_cast<int64_t>(size);
  bytes_ += entry.file_bytes;
  if (stored.ok()) {
    entry.record = std::move(stored->record);
    DropPayload(entry.record);
    entry.written_unix_ms = stored->written_unix_ms;
    entry.snapshots = DistinctSnapshots(entry.record);
    Name(entry.snapshots);
    return absl::OkStatus();
  }
  const bool damaged = absl::IsDataLoss(stored.status());
  entry.state = damaged ? RecordEntry::State::kDamaged : RecordEntry::State::kUnreadable;
  unreadable_ += !damaged;
  problems_.push_back({path, stored.status()});
  return absl::OkStatus();
}

void DiskStoreImpl::TakeUp(const std::string& id, const absl::StatusOr<StoredRecord>& stored) {
  if (!stored.ok() && !absl::IsDataLoss(stored.status())) return;
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(id);
  if (found == records_.end() || found->second.state != RecordEntry::State::kUnreadable) return;
  RecordEntry& entry = found->second;
  --unreadable_;
  if (!stored.ok()) {
    entry.state = RecordEntry::State::kDamaged;
    return;
  }
  entry.state = RecordEntry::State::kGood;
  entry.record = stored->record;
  DropPayload(entry.record);
  entry.written_unix_ms = stored->written_unix_ms;
  entry.snapshots = DistinctSnapshots(entry.record);
  Name(entry.snapshots);
}

absl::StatusOr<std::string> DiskStoreImpl::WriteMakingRoom(std::span<const std::byte> bytes) {
  absl::StatusOr<std::string> path = folder_.WriteTemporary(bytes);
  if (!absl::IsResourceExhausted(path.status())) return path;
  const auto removals = [&] {
    const std::lock_guard lock(mutex_);
    return removals_;
  };
  const uint64_t before = removals();
  Sweep(/*room_is_short=*/true);
  return removals() == before ? path : folder_.WriteTemporary(bytes);
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
  if (entry.state != RecordEntry::State::kGood) return false;
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
    Sweep(/*room_is_short=*/true);
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

void DiskStoreImpl::Unname(const std::vector<std::string>& ids, bool left) {
  for (const std::string& id : ids) {
    const auto found = snapshots_.find(id);
    if (found == snapshots_.end()) continue;
    SnapshotEntry& entry = found->second;
    EFLA_CHECK(entry.names > 0);
    if (--entry.names > 0) continue;
    entry.unnamed_since = Now();
    entry.left |= left;
  }
}

// What a record that cannot be read may name stays.
bool DiskStoreImpl::MayRemove(const SnapshotEntry& entry, SystemTime now, bool room_is_short) const {
  if (entry.names > 0) return false;
  if (entry.unnamed_since == SystemTime::min()) return unreadable_ == 0;
  if (now - entry.unnamed_since >= options_.unnamed_grace) return true;
  return room_is_short && entry.left && !(in_use_ && in_use_(entry.file.id));
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
      found->second.left = false;  // a record is to come
      return absl::OkStatus();
    }
    busy_snapshots_.insert(id);
    if (absl::Status status = Reserve(lock, file.bytes, "a snapshot"); !status.ok()) {
      busy_snapshots_.erase(id);
      progress_.notify_all();
      return status;
    }
  }
  absl::StatusOr<std::string> temporary = WriteMakingRoom(bytes);
  absl::Status status = temporary.status();
  if (status.ok()) {
    const Commit commit = CommitFile(*temporary, folder_.SnapshotPath(file), folder_.snapshots());
    status = commit.status;
    if (!status.ok()) folder_.Remove(commit.renamed ? commit.to : commit.from);
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

absl::StatusOr<HostBuffer> DiskStoreImpl::GetSnapshot(const std::string& id) {
  SnapshotFile file;
  {
    const std::lock_guard lock(mutex_);
    const auto found = snapshots_.find(id);
    if (found == snapshots_.end()) {
      return absl::NotFoundError(absl::StrFormat("there is no snapshot %s in %s", id, options_.folder));
    }
    file = found->second.file;
  }
  return folder_.ReadSnapshot(file, *buffers_);
}

absl::StatusOr<SessionRecord> DiskStoreImpl::GetRecord(const std::string& session_id) {
  size_t size_hint = 0;
  auto state = RecordEntry::State::kGood;
  {
    const std::lock_guard lock(mutex_);
    const RecordEntry* entry = FindRecord(session_id);
    if (entry == nullptr) {
      return absl::NotFoundError(
          absl::StrFormat("there is no session %s in %s", session_id, options_.folder));
    }
    state = entry->state;
    size_hint = static_cast<size_t>(entry->file_bytes);
  }
  const absl::Status damaged = absl::DataLossError(
      absl::StrFormat("the record of session %s is damaged: %s", session_id, folder_.RecordPath(session_id)));
  if (state == RecordEntry::State::kDamaged) return damaged;
  absl::StatusOr<StoredRecord> stored = folder_.ReadRecord(session_id, size_hint);
  if (state == RecordEntry::State::kUnreadable) TakeUp(session_id, stored);
  if (absl::IsDataLoss(stored.status())) return damaged;
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
  DropPayload(next.record);
  next.file_bytes = static_cast<int64_t>(bytes.size());
  {
    std::unique_lock lock(mutex_);
    const auto find = [&] {
      progress_.wait(lock, [&] { return !busy_records_.contains(id); });
      return FindRecord(id);
    };
    const RecordEntry* stored = find();
    if (stored != nullptr && stored->state == RecordEntry::State::kUnreadable) {
      lock.unlock();
      const absl::Status readable = GetRecord(id).status();
      lock.lock();
      if (!readable.ok() && !absl::IsDataLoss(readable) && !record.deleted) return readable;
      stored = find();
    }
    const bool counts = stored != nullptr && stored->state == RecordEntry::State::kGood;
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
      Unname(next.snapshots, /*left=*/false);
      busy_records_.erase(id);
      progress_.notify_all();
      return status;
    }
  }
  absl::StatusOr<std::string> temporary = WriteMakingRoom(bytes);
  absl::Status status = temporary.status();
  bool replaced = false;
  if (status.ok()) {
    const Commit commit = CommitFile(*temporary, folder_.RecordPath(id), folder_.records());
    status = commit.status;
    replaced = commit.renamed;
    if (!replaced) folder_.Remove(*temporary);
  }
  const std::lock_guard lock(mutex_);
  busy_records_.erase(id);
  if (replaced) {
    RecordEntry& entry = records_[id];
    unreadable_ -= entry.state == RecordEntry::State::kUnreadable;
    bytes_ -= entry.file_bytes;
    std::vector<std::string> before = std::move(entry.snapshots);
    entry = std::move(next);
    if (status.ok()) {
      Unname(before, /*left=*/true);
    } else {  // a power cut may bring the old record back: what it names stays until the next put
      entry.snapshots.insert(entry.snapshots.end(), before.begin(), before.end());
    }
  } else {
    Unname(next.snapshots, /*left=*/false);
    bytes_ -= next.file_bytes;
  }
  progress_.notify_all();
  return status;
}

absl::StatusOr<std::vector<ListedRecord>> DiskStoreImpl::ListRecords(const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  const SystemTime now = Now();
  std::vector<ListedRecord> listed;
  for (auto at = records_.lower_bound(prefix); at != records_.end() && at->first.starts_with(prefix); ++at) {
    const RecordEntry& entry = at->second;
    if (entry.state != RecordEntry::State::kGood || entry.record.deleted || Expired(entry, now)) continue;
    listed.push_back({at->first, entry.record.revision, entry.record.expires_unix_ms});
  }
  return listed;
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

absl::StatusOr<bool> DiskStoreImpl::HasSnapshot(const std::string& id) {
  const std::lock_guard lock(mutex_);
  return snapshots_.contains(id);
}

absl::Status DiskStoreImpl::PutCleanMark() {
  const absl::StatusOr<std::string> temporary = folder_.WriteTemporary({});
  if (!temporary.ok()) return temporary.status();
  const Commit commit = CommitFile(*temporary, folder_.clean_mark(), folder_.path());
  if (!commit.renamed) folder_.Remove(*temporary);
  return commit.status;
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
    ++(entry.state == RecordEntry::State::kDamaged      ? stats.damaged_records
       : entry.state == RecordEntry::State::kUnreadable ? stats.unreadable_records
       : entry.record.deleted                           ? stats.tombstones
                                                        : stats.records);
  }
  return stats;
}

void DiskStoreImpl::Sweep(bool room_is_short) {
  std::unique_lock lock(mutex_);
  room_is_short_ |= room_is_short;
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
      const bool room_is_short = std::exchange(room_is_short_, false);
      lock.unlock();
      RemoveStale(room_is_short);
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
    commit->status = folder_.Rename(commit->from, commit->to);
    commit->renamed = commit->status.ok();
    if (commit->renamed) folders.insert(commit->folder);
  }
  for (const std::string* folder : folders) {
    const absl::Status status = folder_.Sync(*folder);
    for (Commit* commit : batch) {
      if (commit->renamed && commit->folder == folder) commit->status = status;
    }
  }
  const std::lock_guard lock(mutex_);
  folder_syncs_ += folders.size();
}

// Not synced: what a power cut brings back is stale still, and goes at the next start.
void DiskStoreImpl::RemoveStale(bool room_is_short) {
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
      paths.push_back(folder_.RecordPath(it->first));
      bytes_ -= entry.file_bytes;
      Unname(entry.snapshots, /*left=*/true);
      it = records_.erase(it);
    }
    for (auto it = snapshots_.begin(); it != snapshots_.end();) {
      const SnapshotEntry& entry = it->second;
      if (!MayRemove(entry, now, room_is_short)) {
        ++it;
        continue;
      }
      paths.push_back(folder_.SnapshotPath(entry.file));
      bytes_ -= entry.file.bytes;
      it = snapshots_.erase(it);
    }
    std::erase_if(leases_, [&](const auto& lease) { return lease.second.second <= now; });
    removals_ += paths.size();
  }
  for (const std::string& path : paths) folder_.Remove(path);
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
