#include "server/sessions/disk_store.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/file_ops.h"
#include "tests/model/scratch.h"
#include "tests/server/store_example.h"

namespace efla {
namespace {

using Bytes = std::vector<std::byte>;
using absl::StatusCode;
using std::chrono::milliseconds;
namespace fs = std::filesystem;

class DiskStoreTest : public ::testing::Test {
 protected:
  DiskStoreTest() {
    options_.folder = scratch_.File("store");
    options_.now = [this] { return now_.load(); };
    options_.sweep_interval = std::chrono::hours(1);  // the tests call Sweep
  }
  absl::StatusOr<std::unique_ptr<DiskStore>> TryOpen() const { return DiskStore::Open(options_); }
  void Open() {
    store_.reset();
    auto store = TryOpen();
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void PutSnapshot(const std::string& id, size_t size = 1000) {
    const absl::Status status = store_->PutSnapshot(id, BytesOf(id, size));
    EXPECT_TRUE(status.ok()) << status;
  }
  void Put(const SessionRecord& record, uint64_t expected_epoch) {
    const absl::Status status = store_->PutRecord(record, expected_epoch);
    EXPECT_TRUE(status.ok()) << status;
  }
  bool HasSnapshot(const std::string& id) { return store_->GetSnapshot(id).ok(); }
  // The one file of a folder whose name begins so.
  std::string FileOf(const std::string& folder, const std::string& begin) const {
    for (const auto& entry : fs::directory_iterator(options_.folder + "/" + folder)) {
      if (entry.path().filename().string().starts_with(begin)) return entry.path().string();
    }
    return "";
  }
  size_t FilesIn(const std::string& folder) const {
    const fs::directory_iterator files(options_.folder + "/" + folder);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }

  ScratchDirectory scratch_;
  DiskStoreOptions options_;
  std::atomic<std::chrono::system_clock::time_point> now_{std::chrono::system_clock::now()};
  std::unique_ptr<DiskStore> store_;
};

TEST_F(DiskStoreTest, WhatWasPutIsThereAfterARestart) {
  Open();
  PutSnapshot("x");
  Put(RecordOf("s", 1, 1, "a", {"x"}), 0);
  Put(RecordOf("s", 2, 5, "b", {"x"}), 1);
  Put(TombstoneOf("t", 3), 0);
  Open();
  EXPECT_TRUE(SameRecord(*store_->GetRecord("s"), RecordOf("s", 2, 5, "b", {"x"})));
  EXPECT_TRUE(store_->GetRecord("t")->deleted);
  EXPECT_TRUE(*store_->GetSnapshot("x") == BytesOf("x", 1000));
  EXPECT_EQ(store_->PutRecord(RecordOf("s", 3, 6, "c"), 1).code(), StatusCode::kAborted);
  const DiskStore::Stats stats = store_->stats();
  EXPECT_EQ(stats.snapshots, 1);
  EXPECT_EQ(stats.unnamed_snapshots, 0);
  EXPECT_EQ(stats.records, 1);
  EXPECT_EQ(stats.tombstones, 1);
}

TEST_F(DiskStoreTest, SnapshotFilesHoldTheSnapshotAndNothingElse) {
  Open();
  PutSnapshot("x");
  const std::string bytes = ReadWhole(FileOf("snapshots", "x+"));
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(bytes)), BytesOf("x", 1000)));
  const auto others = fs::perms::group_all | fs::perms::others_all;
  EXPECT_EQ(fs::status(options_.folder + "/snapshots").permissions() & others, fs::perms::none);
  EXPECT_EQ(fs::status(FileOf("snapshots", "x+")).permissions() & others, fs::perms::none);
}

TEST_F(DiskStoreTest, RecordsLeaveTheirPayloadOnTheDisk) {
  Open();
  constexpr size_t kRecords = 200, kPayload = 100'000;
  const auto put_all = [&](uint64_t epoch) {
    const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    for (size_t i = 0; i < kRecords; ++i) {
      SessionRecord record = RecordOf(absl::StrFormat("s%d", i), epoch, epoch, "");
      record.payload = std::string(kPayload, 'x');
      Put(record, epoch - 1);
    }
    return static_cast<int64_t>(mallinfo2().uordblks + mallinfo2().hblkhd - before);
  };
  EXPECT_LT(put_all(1), static_cast<int64_t>(kRecords * kPayload / 10)) << "bytes of memory";
  EXPECT_LT(put_all(2), static_cast<int64_t>(kRecords * kPayload / 10));
  EXPECT_EQ(store_->GetRecord("s7")->payload.size(), kPayload);
}

TEST_F(DiskStoreTest, TwoStoresNeverShareAFolder) {
  Open();
  const auto second = TryOpen();
  EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(second.status().ToString().find(std::to_string(getpid())), std::string::npos) << second.status();
  store_.reset();
  EXPECT_TRUE(TryOpen().ok());
}

TEST_F(DiskStoreTest, OptionsAndFoldersThatCannotBe) {
  options_.folder = "";
  EXPECT_EQ(TryOpen().status().code(), StatusCode::kInvalidArgument);
  scratch_.Write("file", "");
  options_.folder = scratch_.File("file") + "/store";
  const auto store = TryOpen();
  EXPECT_EQ(store.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(store.status().ToString().find(options_.folder), std::string::npos) << store.status();
}

TEST_F(DiskStoreTest, AStartRemovesWhatWasLeftUnfinished) {
  Open();
  PutSnapshot("named");
  PutSnapshot("unnamed");
  Put(RecordOf("s", 1, 1, "", {"named"}), 0);
  store_.reset();
  scratch_.Write("store/unfinished/17", "half");
  scratch_.Write("store/snapshots/notes.txt", "not ours");
  scratch_.Write("store/snapshots/cut+5000+" + std::string(32, '0') + ".efls", "not 5000 bytes");
  Open();
  EXPECT_TRUE(HasSnapshot("named"));
  EXPECT_FALSE(HasSnapshot("unnamed"));
  EXPECT_FALSE(HasSnapshot("cut"));
  EXPECT_EQ(FilesIn("unfinished"), 0u);
  EXPECT_EQ(FilesIn("snapshots"), 2u);  // the named one and what is not ours
}

TEST_F(DiskStoreTest, UnnamedSnapshotsStayForTheGrace) {
  Open();
  PutSnapshot("early");
  now_ = now_.load() + options_.unnamed_grace - milliseconds(1);
  PutSnapshot("late");
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("early"));
  Put(RecordOf("s", 1, 1, "", {"early"}), 0);
  now_ = now_.load() + options_.unnamed_grace + milliseconds(1);
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("early"));
  EXPECT_FALSE(HasSnapshot("late"));

  // Two name it; it stays until the grace after the last has let go.
  Put(RecordOf("t", 1, 1, "", {"early", "early"}), 0);
  Put(RecordOf("s", 1, 2, ""), 1);
  now_ = now_.load() + std::chrono::hours(10);
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("early"));
  Put(TombstoneOf("t", 2), 1);
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("early"));
  now_ = now_.load() + options_.unnamed_grace;
  store_->Sweep();
  EXPECT_FALSE(HasSnapshot("early"));
  EXPECT_EQ(FilesIn("snapshots"), 0u);
  EXPECT_EQ(store_->PutRecord(RecordOf("u", 1, 1, "", {"early"}), 0).code(), StatusCode::kFailedPrecondition);
  PutSnapshot("early");
  Put(RecordOf("u", 1, 1, "", {"early"}), 0);
}

TEST_F(DiskStoreTest, ExpiredRecordsAndOldTombstonesAreRemoved) {
  Open();
  PutSnapshot("x");
  SessionRecord record = RecordOf("s", 1, 1, "", {"x"});
  record.expires_unix_ms =
      std::chrono::duration_cast<milliseconds>(now_.load().time_since_epoch()).count() + 1000;
  Put(record, 0);
  Put(TombstoneOf("t", 1), 0);
  now_ = now_.load() + milliseconds(1001);
  EXPECT_FALSE(store_->GetRecord("s").ok());
  store_->Sweep();
  EXPECT_EQ(FilesIn("records"), 1u);
  now_ = now_.load() + options_.unnamed_grace;
  store_->Sweep();
  EXPECT_FALSE(HasSnapshot("x"));
  EXPECT_TRUE(store_->GetRecord("t").ok());
  Open();  // the tombstone's age is in its file
  now_ = now_.load() + options_.tombstone_ttl;
  EXPECT_FALSE(store_->GetRecord("t").ok());
  store_->Sweep();
  EXPECT_EQ(FilesIn("records"), 0u);
  EXPECT_EQ(store_->stats().bytes, 0);
}

TEST_F(DiskStoreTest, SweepsByItself) {
  options_.sweep_interval = milliseconds(5);
  options_.unnamed_grace = milliseconds(1);
  Open();
  PutSnapshot("x");
  now_ = now_.load() + milliseconds(2);
  for (int i = 0; i < 2000 && store_->stats().snapshots > 0; ++i)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(HasSnapshot("x"));
}

TEST_F(DiskStoreTest, DamageIsSaidNotServed) {
  Open();
  PutSnapshot("x");
  Put(RecordOf("s", 5, 1, "", {"x"}), 0);
  Put(RecordOf("t", 1, 1, ""), 0);
  const auto flip = [](const std::string& path) {
    std::string bytes = ReadWhole(path);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(path, std::ios::binary) << bytes;
  };
  flip(FileOf("snapshots", "x+"));
  EXPECT_EQ(store_->GetSnapshot("x").status().code(), StatusCode::kDataLoss);
  flip(FileOf("records", "s."));
  EXPECT_EQ(store_->GetRecord("s").status().code(), StatusCode::kDataLoss);
  Open();
  EXPECT_EQ(store_->GetRecord("s").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(IdsIn(*store_), std::vector<std::string>{"t"});
  EXPECT_EQ(store_->stats().damaged_records, 1);
  Put(TombstoneOf("s", 1), 0);  // the way out
  EXPECT_EQ(store_->stats().damaged_records, 0);
  EXPECT_TRUE(store_->GetRecord("s")->deleted);
}

TEST_F(DiskStoreTest, RecordsOfALaterVersionStopTheStartInsteadOfBeingDropped) {
  Open();
  store_.reset();
  // Version 2 with a right checksum (XXH3, 64 bits) over "EFLR" 02 00 00 00.
  scratch_.Write("store/records/s.record", std::string("EFLR\2\0\0\0\xe8\x41\x26\x27\x45\x4f\x94\x23", 16));
  const auto store = TryOpen();
  EXPECT_EQ(store.status().code(), StatusCode::kFailedPrecondition) << store.status();
  EXPECT_NE(store.status().ToString().find("version 2"), std::string::npos) << store.status();
}

TEST_F(DiskStoreTest, TheByteBudgetIsKeptAndNamed) {
  options_.max_bytes = 10'000;
  Open();
  PutSnapshot("x", 6000);
  const absl::Status status = store_->PutSnapshot("y", BytesOf("y", 5000));
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  for (const char* part : {"6000", "10000", "5000"}) {
    EXPECT_NE(status.ToString().find(part), std::string::npos) << status;
  }
  Put(RecordOf("s", 1, 1, "", {"x"}), 0);
  SessionRecord large = RecordOf("t", 1, 1, "");
  large.payload = std::string(5000, 'p');
  EXPECT_EQ(store_->PutRecord(large, 0).code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(store_->GetRecord("t").ok());
  PutSnapshot("z", 3000);

  // A deletion is let in however full it is, and what has lost its name makes room for the next put.
  PutSnapshot("w", 10'000 - store_->stats().bytes);
  Put(TombstoneOf("s", 2), 1);
  now_ = now_.load() + options_.unnamed_grace;
  PutSnapshot("y", 5000);
  EXPECT_FALSE(HasSnapshot("x"));
  EXPECT_TRUE(HasSnapshot("y"));
  EXPECT_LE(store_->stats().bytes, options_.max_bytes);
}

// ---- Disks that are slow, full, failing, or lose power ----

// Counts calls and fails those it is told to.
class FaultyFileOps : public FileOps {
 public:
  enum Call { kCreate, kWrite, kSyncData, kClose, kRename, kUnlink, kSyncFolder, kOpenToRead, kRead, kCalls };
  // From the `after`-th such call on, for `times` calls.
  void Fail(Call call, int error, int after = 0, int times = 1 << 30) {
    const std::lock_guard lock(mutex_);
    faults_[call] = {error, count_[call] + after, count_[call] + after + times};
  }
  void Heal() {
    const std::lock_guard lock(mutex_);
    faults_.clear();
    short_writes_ = 0;
    unreadable_.clear();
  }
  // Files whose paths contain `part` cannot be read.
  void FailReadsOf(const std::string& part, int error) {
    const std::lock_guard lock(mutex_);
    unreadable_[part] = error;
  }
  void DelaySync(milliseconds delay) { delay_ = delay; }
  // Writes of at most so many bytes at once; the disk takes no more than `room` bytes in all.
  void WriteShort(size_t most, int64_t room = INT64_MAX) {
    short_writes_ = most;
    room_ = room;
  }

  int Create(const std::string& path) override {
    return Next(kCreate, [&] { return FileOps::Create(path); });
  }
  long Write(int fd, const void* bytes, size_t count) override {
    return Next(kWrite, [&]() -> long {
      if (short_writes_ == 0) return FileOps::Write(fd, bytes, count);
      if (room_ <= 0) return -ENOSPC;
      const long written = FileOps::Write(
          fd, bytes, std::min({count, short_writes_.load(), static_cast<size_t>(room_.load())}));
      room_ -= written;
      return written;
    });
  }
  int OpenToRead(const std::string& path) override {
    return Next(kOpenToRead, [&] {
      const int fd = FileOps::OpenToRead(path);
      const std::lock_guard lock(mutex_);
      for (const auto& [part, error] : unreadable_) {
        if (fd >= 0 && path.find(part) != std::string::npos) failing_fds_[fd] = error;
      }
      return fd;
    });
  }
  long Read(int fd, void* bytes, size_t count) override {
    {
      const std::lock_guard lock(mutex_);
      if (const auto failing = failing_fds_.find(fd); failing != failing_fds_.end()) return -failing->second;
    }
    return Next(kRead, [&] { return FileOps::Read(fd, bytes, count); });
  }
  int SyncData(int fd) override {
    std::this_thread::sleep_for(delay_.load());
    return Next(kSyncData, [&] { return FileOps::SyncData(fd); });
  }
  int Close(int fd) override {
    {
      const std::lock_guard lock(mutex_);
      failing_fds_.erase(fd);
    }
    // As the operating system does, it closes the file even when it reports an error.
    const int result = FileOps::Close(fd);
    return Next(kClose, [&] { return result; });
  }
  int Rename(const std::string& from, const std::string& to) override {
    return Next(kRename, [&] { return FileOps::Rename(from, to); });
  }
  int Unlink(const std::string& path) override {
    return Next(kUnlink, [&] { return FileOps::Unlink(path); });
  }
  int SyncFolder(const std::string& folder) override {
    std::this_thread::sleep_for(delay_.load());
    return Next(kSyncFolder, [&] { return FileOps::SyncFolder(folder); });
  }

 private:
  struct Fault {
    int error = 0, begin = 0, end = 0;
  };
  template <typename Operation>
  auto Next(Call call, Operation operation) -> decltype(operation()) {
    {
      const std::lock_guard lock(mutex_);
      const int number = count_[call]++;
      const auto fault = faults_.find(call);
      if (fault != faults_.end() && number >= fault->second.begin && number < fault->second.end) {
        return -fault->second.error;
      }
    }
    return operation();
  }

  std::mutex mutex_;
  std::map<Call, int> count_;
  std::map<Call, Fault> faults_;
  std::map<std::string, int> unreadable_;
  std::map<int, int> failing_fds_;  // to their errors
  std::atomic<milliseconds> delay_{milliseconds(0)};
  std::atomic<size_t> short_writes_ = 0;
  std::atomic<int64_t> room_ = INT64_MAX;
};

TEST_F(DiskStoreTest, EveryCallThatFailsIsReportedAndLeavesNothingBehind) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  int round = 0;
  for (const int error : {ENOSPC, EDQUOT, EIO, EROFS}) {
    for (const auto call : {FaultyFileOps::kCreate, FaultyFileOps::kWrite, FaultyFileOps::kSyncData,
                            FaultyFileOps::kClose, FaultyFileOps::kRename, FaultyFileOps::kSyncFolder}) {
      SCOPED_TRACE(absl::StrFormat("call %d, errno %d", call, error));
      Open();
      const std::string id = absl::StrFormat("s%d", ++round);
      PutSnapshot(id);
      Put(RecordOf(id, 1, 1, "a", {id}), 0);
      const DiskStore::Stats before = store_->stats();

      disk.Fail(call, error);
      const auto expected =
          error == ENOSPC || error == EDQUOT ? StatusCode::kResourceExhausted : StatusCode::kUnavailable;
      const std::string second = id + ".second";
      absl::Status status = store_->PutSnapshot(second, BytesOf(second, 1000));
      EXPECT_EQ(status.code(), expected) << status;
      EXPECT_NE(status.ToString().find(options_.folder), std::string::npos) << status;
      EXPECT_FALSE(HasSnapshot(second));
      status = store_->PutRecord(RecordOf(id, 1, 2, "a", {id}), 1);
      EXPECT_EQ(status.code(), expected) << status;
      status = store_->PutRecord(RecordOf(second, 1, 1, "a"), 0);
      EXPECT_EQ(status.code(), expected) << status;
      disk.Heal();

      EXPECT_EQ(FilesIn("unfinished"), 0u);
      EXPECT_TRUE(*store_->GetSnapshot(id) == BytesOf(id, 1000));
      // Of a folder whose sync failed nobody knows; before that, the old record stands.
      const uint64_t revision = store_->GetRecord(id)->revision;
      if (call == FaultyFileOps::kSyncFolder) {
        EXPECT_TRUE(revision == 1 || revision == 2);
      } else {
        EXPECT_EQ(revision, 1u);
        EXPECT_EQ(store_->GetRecord(second).status().code(), StatusCode::kNotFound);
        EXPECT_EQ(store_->stats().bytes, before.bytes);
        EXPECT_EQ(store_->stats().snapshots, before.snapshots);
      }
      // The disk is well again: the same puts go through.
      PutSnapshot(second);
      Put(RecordOf(id, 1, 2, "a", {id, second}), 1);
      Open();
      EXPECT_TRUE(SameRecord(*store_->GetRecord(id), RecordOf(id, 1, 2, "a", {id, second})));
      EXPECT_TRUE(*store_->GetSnapshot(second) == BytesOf(second, 1000));
    }
  }
}

TEST_F(DiskStoreTest, ADiskThatFillsInTheMiddleOfAFile) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  Open();
  disk.WriteShort(300, 1234);
  EXPECT_EQ(store_->PutSnapshot("x", BytesOf("x", 5000)).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(FilesIn("unfinished"), 0u);
  disk.WriteShort(300);
  PutSnapshot("x", 5000);
  EXPECT_TRUE(*store_->GetSnapshot("x") == BytesOf("x", 5000));
}

TEST_F(DiskStoreTest, WhatCannotBeReadIsNotTakenForDamaged) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  Open();
  PutSnapshot("x");
  Put(RecordOf("s", 3, 1, "", {"x"}), 0);
  for (const auto call : {FaultyFileOps::kOpenToRead, FaultyFileOps::kRead}) {
    disk.Fail(call, EIO);
    for (const absl::Status& status : {store_->GetSnapshot("x").status(), store_->GetRecord("s").status()}) {
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
      EXPECT_NE(status.ToString().find("Input/output error"), std::string::npos) << status;
      EXPECT_NE(status.ToString().find(options_.folder), std::string::npos) << status;
    }
    disk.Heal();
    EXPECT_TRUE(*store_->GetSnapshot("x") == BytesOf("x", 1000));
    EXPECT_EQ(store_->GetRecord("s")->epoch, 3u);
  }
}

TEST_F(DiskStoreTest, AStartGoesOnPastWhatItCannotUse) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  Open();
  for (const char* id : {"good", "damaged", "unreadable", "forbidden"}) {
    PutSnapshot(id);
    Put(RecordOf(id, 2, 1, "", {id}), 0);
  }
  PutSnapshot("unnamed");
  store_.reset();
  std::string bytes = ReadWhole(FileOf("records", "damaged."));
  bytes[bytes.size() / 2] ^= 1;
  scratch_.Write("store/records/damaged.record", bytes);
  fs::create_directory(options_.folder + "/records/folder.record");
  fs::create_directory(options_.folder + "/snapshots/folder+7+" + std::string(32, '0') + ".efls");
  disk.FailReadsOf("unreadable.record", EIO);
  disk.FailReadsOf("forbidden.record", EACCES);
  Open();

  std::map<std::string, StatusCode> problems;
  for (const DiskStore::Problem& problem : store_->problems()) {
    EXPECT_FALSE(problem.status.message().empty());
    problems[fs::path(problem.path).filename().string()] = problem.status.code();
  }
  const std::map<std::string, StatusCode> expected = {
      {"damaged.record", StatusCode::kDataLoss},
      {"folder.record", StatusCode::kDataLoss},
      {"unreadable.record", StatusCode::kUnavailable},
      {"forbidden.record", StatusCode::kUnavailable},
      {"folder+7+" + std::string(32, '0') + ".efls", StatusCode::kDataLoss}};
  EXPECT_EQ(problems, expected);
  EXPECT_EQ(store_->stats().damaged_records, 2);
  EXPECT_EQ(store_->stats().unreadable_records, 2);
  EXPECT_EQ(IdsIn(*store_), std::vector<std::string>{"good"});
  EXPECT_TRUE(store_->GetRecord("good").ok());
  EXPECT_EQ(store_->GetRecord("damaged").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(store_->GetRecord("unreadable").status().code(), StatusCode::kUnavailable);
  // It may be whole: nothing but a deletion replaces it, and what it may name stays, for as long as it takes.
  EXPECT_EQ(store_->PutRecord(RecordOf("unreadable", 1, 1, ""), 0).code(), StatusCode::kUnavailable);
  now_ = now_.load() + std::chrono::hours(10);
  store_->Sweep();
  for (const char* id : {"unreadable", "forbidden", "unnamed"}) EXPECT_TRUE(HasSnapshot(id)) << id;

  disk.Heal();
  EXPECT_EQ(store_->GetRecord("unreadable")->epoch, 2u);
  EXPECT_EQ(store_->PutRecord(RecordOf("unreadable", 1, 1, ""), 0).code(), StatusCode::kAborted);
  disk.FailReadsOf("forbidden.record", EACCES);
  Put(TombstoneOf("forbidden", 1), 0);
  Put(TombstoneOf("damaged", 1), 0);
  EXPECT_EQ(store_->stats().unreadable_records, 0);
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("unreadable"));
  EXPECT_FALSE(HasSnapshot("forbidden"));
  EXPECT_FALSE(HasSnapshot("unnamed"));
  for (const char* id : {"forbidden", "damaged"}) Put(RecordOf(id, 2, 1, ""), 0);  // made anew
  disk.Heal();
  fs::remove(options_.folder + "/records/folder.record");
  fs::remove(options_.folder + "/snapshots/folder+7+" + std::string(32, '0') + ".efls");
  Open();
  EXPECT_TRUE(store_->problems().empty());
  EXPECT_EQ(IdsIn(*store_).size(), 4u);
}

TEST_F(DiskStoreTest, WhatAllRecordsHaveLeftMakesRoomAtOnce) {
  options_.max_bytes = 10'000;
  Open();
  std::atomic<bool> in_use = true;
  std::vector<std::string> asked;
  store_->SetSnapshotsInUse([&](const std::string& id) {
    asked.push_back(id);
    return in_use.load();
  });
  PutSnapshot("left", 4000);
  Put(RecordOf("s", 1, 1, "", {"left"}), 0);
  PutSnapshot("coming", 3000);  // its record is to come
  Put(TombstoneOf("s", 2), 1);
  EXPECT_EQ(store_->PutSnapshot("next", BytesOf("next", 5000)).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(HasSnapshot("left"));
  EXPECT_EQ(asked, std::vector<std::string>{"left"});
  in_use = false;
  EXPECT_TRUE(HasSnapshot("left")) << "there is room enough without it";
  PutSnapshot("next", 5000);
  EXPECT_FALSE(HasSnapshot("left"));
  EXPECT_TRUE(HasSnapshot("coming"));
  Put(RecordOf("t", 1, 1, "", {"coming", "next"}), 0);
  EXPECT_EQ(store_->stats().unnamed_snapshots, 0);

  // One that is put again has a record to come again.
  Put(TombstoneOf("t", 2), 1);
  PutSnapshot("coming", 3000);
  PutSnapshot("last", 6000);
  EXPECT_TRUE(HasSnapshot("coming"));
  EXPECT_FALSE(HasSnapshot("next"));
}

TEST_F(DiskStoreTest, AFullDiskIsTriedAgainWhenThereWasSomethingToRemove) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  Open();
  disk.Fail(FaultyFileOps::kWrite, ENOSPC, 0, 1);
  EXPECT_EQ(store_->PutSnapshot("x", BytesOf("x", 1000)).code(), StatusCode::kResourceExhausted);
  PutSnapshot("x");
  Put(RecordOf("s", 1, 1, "", {"x"}), 0);
  Put(TombstoneOf("s", 2), 1);
  disk.Fail(FaultyFileOps::kWrite, ENOSPC, 0, 1);
  PutSnapshot("y");
  EXPECT_FALSE(HasSnapshot("x"));
  EXPECT_TRUE(HasSnapshot("y"));
  EXPECT_EQ(FilesIn("unfinished"), 0u);
}

TEST_F(DiskStoreTest, AfterAFailedFolderSyncBothRecordsSnapshotsStay) {
  FaultyFileOps disk;
  options_.file_ops = &disk;
  Open();
  PutSnapshot("old");
  PutSnapshot("new");
  Put(RecordOf("s", 1, 1, "", {"old"}), 0);
  disk.Fail(FaultyFileOps::kSyncFolder, EIO);
  EXPECT_FALSE(store_->PutRecord(RecordOf("s", 1, 2, "", {"new"}), 1).ok());
  disk.Heal();
  now_ = now_.load() + 2 * options_.unnamed_grace;
  store_->Sweep();
  EXPECT_TRUE(HasSnapshot("old"));
  EXPECT_TRUE(HasSnapshot("new"));
  Put(RecordOf("s", 1, 2, "", {"new"}), 1);
  now_ = now_.load() + 2 * options_.unnamed_grace;
  store_->Sweep();
  EXPECT_FALSE(HasSnapshot("old"));
  EXPECT_TRUE(HasSnapshot("new"));
}

TEST_F(DiskStoreTest, PutsThatComeTogetherShareAFolderSync) {
  FaultyFileOps disk;
  disk.DelaySync(milliseconds(5));
  options_.file_ops = &disk;
  Open();
  const DiskStore::Stats before = store_->stats();
  std::vector<std::thread> threads;
  for (int t = 0; t < 32; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t revision = 1; revision <= 4; ++revision) {
        Put(RecordOf(absl::StrFormat("s%d", t), 1, revision, ""), revision == 1 ? 0 : 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const DiskStore::Stats after = store_->stats();
  EXPECT_EQ(after.commits - before.commits, 128u);
  EXPECT_LE(after.folder_syncs - before.folder_syncs, 64u);
}

// A disk that keeps, when the power goes, what was synced, and of the rest what it likes.
class PowerCutFileOps : public FileOps {
 public:
  explicit PowerCutFileOps(uint64_t seed) : random_(seed) {}

  int Create(const std::string& path) override {
    return Unless([&] {
      const int fd = FileOps::Create(path);
      if (fd >= 0) open_[fd] = path;
      if (fd >= 0) unsynced_.insert(path);
      return fd;
    });
  }
  long Write(int fd, const void* bytes, size_t count) override {
    return Unless([&] { return static_cast<int>(FileOps::Write(fd, bytes, std::min<size_t>(count, 400))); });
  }
  int SyncData(int fd) override {
    return Unless([&] {
      unsynced_.erase(open_[fd]);
      return 0;
    });
  }
  int Close(int fd) override {
    const std::lock_guard lock(mutex_);
    open_.erase(fd);
    return FileOps::Close(fd);
  }
  int Rename(const std::string& from, const std::string& to) override {
    return Unless([&] {
      Pending pending{.from = from, .to = to, .old = to + ".old" + std::to_string(renames_++)};
      if (link(to.c_str(), pending.old.c_str()) != 0) pending.old.clear();
      const int result = FileOps::Rename(from, to);
      if (result == 0) pending_.push_back(pending);
      return result;
    });
  }
  int Unlink(const std::string& path) override {
    return Unless([&] {
      unsynced_.erase(path);
      return FileOps::Unlink(path);
    });
  }
  int SyncFolder(const std::string& folder) override {
    return Unless([&] {
      std::erase_if(pending_, [&](const Pending& rename) {
        if (!rename.to.starts_with(folder + "/")) return false;
        if (!rename.old.empty()) FileOps::Unlink(rename.old);
        return true;
      });
      return 0;
    });
  }

  // From now on everything fails.
  void Cut() {
    const std::lock_guard lock(mutex_);
    cut_ = true;
  }
  // After the store has gone: what the disk holds.
  void Settle() {
    std::set<std::string> kept;  // a rename that stays keeps those to the same name before it
    for (auto rename = pending_.rbegin(); rename != pending_.rend(); ++rename) {
      const bool undone = random_() % 2 != 0 && !kept.contains(rename->to);
      if (!undone) kept.insert(rename->to);
      if (undone) FileOps::Rename(rename->to, rename->from);
      if (undone && unsynced_.contains(rename->to)) unsynced_.insert(rename->from);
      if (!rename->old.empty()) {
        if (undone) {
          FileOps::Rename(rename->old, rename->to);
        } else {
          FileOps::Unlink(rename->old);
        }
      }
      if (!undone && unsynced_.contains(rename->from)) unsynced_.insert(rename->to);
    }
    for (const std::string& path : unsynced_) {
      std::error_code error;
      const auto size = fs::file_size(path, error);
      if (!error) fs::resize_file(path, random_() % (size + 1), error);
    }
  }

 private:
  struct Pending {
    std::string from, to, old;
  };
  template <typename Operation>
  int Unless(Operation operation) {
    const std::lock_guard lock(mutex_);
    return cut_ ? -EIO : operation();
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
  bool cut_ = false;
  int renames_ = 0;
  std::map<int, std::string> open_;
  std::set<std::string> unsynced_;
  std::vector<Pending> pending_;
};

// Threads that put session after session, and what of it the store has acknowledged.
struct Acknowledged {
  std::mutex mutex;
  std::map<std::string, uint64_t> revisions;  // by session
};

constexpr size_t kCrashSnapshotBytes = 3000;

// One session's life: each revision has a snapshot of its own and one that it shares with the next.
void PutRevisions(SessionStore& store, const std::string& session, uint64_t first,
                  const std::function<bool(uint64_t)>& acknowledge) {
  const auto snapshot = [&](uint64_t revision) { return absl::StrFormat("%s.%d", session, revision); };
  for (uint64_t revision = first;;) {
    if (!store.PutSnapshot(snapshot(revision), BytesOf(snapshot(revision), kCrashSnapshotBytes)).ok()) return;
    std::vector<std::string> snapshots = {snapshot(revision)};
    if (revision > first) snapshots.push_back(snapshot(revision - 1));
    const absl::Status status =
        store.PutRecord(RecordOf(session, 1, revision, "a", snapshots), revision == 1 ? 0 : 1);
    if (absl::IsFailedPrecondition(status)) continue;  // the grace was over before the record came
    if (!status.ok() || !acknowledge(revision++)) return;
  }
}

void ExpectNothingAcknowledgedIsLost(SessionStore& store,
                                     const std::map<std::string, uint64_t>& acknowledged) {
  for (const auto& [session, revision] : acknowledged) {
    const auto record = store.GetRecord(session);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_GE(record->revision, revision) << session;
    EXPECT_EQ(record->payload, RecordOf(session, 1, record->revision, "a").payload);
    for (const std::string& id : record->snapshots) {
      const auto bytes = store.GetSnapshot(id);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      EXPECT_TRUE(*bytes == BytesOf(id, kCrashSnapshotBytes)) << id;
    }
  }
}

TEST_F(DiskStoreTest, APowerCutTakesNothingThatWasAcknowledged) {
  std::map<std::string, uint64_t> acknowledged;
  size_t seen = 0;
  for (uint64_t round = 0; round < 24; ++round) {
    PowerCutFileOps disk(round);
    options_.file_ops = &disk;
    options_.now = nullptr;
    options_.unnamed_grace = milliseconds(round % 2 == 0 ? 2 : 1000);
    options_.sweep_interval = milliseconds(1);
    Open();
    Acknowledged now;
    std::atomic<int> puts = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const std::string session = absl::StrFormat("r%d.s%d", round, t);
        PutRevisions(*store_, session, 1, [&](uint64_t revision) {
          const std::lock_guard lock(now.mutex);
          now.revisions[session] = revision;
          if (++puts == static_cast<int>(5 + 5 * round)) disk.Cut();
          return true;
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
    store_.reset();
    disk.Settle();
    seen += now.revisions.size();
    acknowledged.merge(now.revisions);

    options_.file_ops = nullptr;
    Open();
    ExpectNothingAcknowledgedIsLost(*store_, acknowledged);
    EXPECT_EQ(store_->stats().damaged_records, 0);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(seen, 60u);
}

// A process of its own puts until it is killed; what it told to have been acknowledged is there afterwards.
TEST_F(DiskStoreTest, KilledAtAnyMomentNothingAcknowledgedIsLost) {
  struct Line {
    int thread = 0;
    uint64_t revision = 0;
  };
  std::map<std::string, uint64_t> acknowledged;
  std::mt19937_64 random(9);
  options_.now = nullptr;
  options_.unnamed_grace = milliseconds(1);
  options_.sweep_interval = milliseconds(1);
  for (int round = 0; round < 25; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    const pid_t child = fork();
    if (child == 0) {
      close(pipe_fds[0]);
      auto store = TryOpen();
      if (!store.ok()) _exit(1);
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          const std::string session = absl::StrFormat("s%d", t);
          const auto stored = (*store)->GetRecord(session);
          PutRevisions(**store, session, stored.ok() ? stored->revision + 1 : 1, [&](uint64_t revision) {
            const Line line{t, revision};
            return write(pipe_fds[1], &line, sizeof(line)) == static_cast<ssize_t>(sizeof(line));
          });
        });
      }
      for (std::thread& thread : threads) thread.join();
      _exit(2);
    }
    close(pipe_fds[1]);
    const auto take = [&] {
      Line line;
      if (read(pipe_fds[0], &line, sizeof(line)) != static_cast<ssize_t>(sizeof(line))) return false;
      acknowledged[absl::StrFormat("s%d", line.thread)] = line.revision;
      return true;
    };
    for (uint64_t lines = 1 + random() % 30; lines > 0 && take(); --lines) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    kill(child, SIGKILL);
    while (take()) {
    }
    close(pipe_fds[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;

    Open();
    ExpectNothingAcknowledgedIsLost(*store_, acknowledged);
    EXPECT_EQ(store_->stats().damaged_records, 0);
    store_.reset();
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(acknowledged.size(), 4u);
}

}  // namespace
}  // namespace efla
