// Stores for the random test of the session manager: in memory, on the disk, in a Redis server; each with
// faults of its own and replicas that can be cut off for good, as a killed process is.
#ifndef EFLA_TESTS_SERVER_SESSION_CHAOS_STORES_H_
#define EFLA_TESTS_SERVER_SESSION_CHAOS_STORES_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/sessions/disk_store.h"
#include "server/sessions/file_ops.h"
#include "server/sessions/redis_store.h"
#include "server/sessions/session_store.h"
#include "tests/model/scratch.h"
#include "tests/server/memory_store.h"
#include "tests/server/redis_server.h"

namespace efla {

// What the replicas keep their sessions in. Calls from one thread; the stores handed out are used by others.
class ChaosStores {
 public:
  virtual ~ChaosStores() = default;
  virtual bool shared() const = 0;
  // For a replica that begins, or begins again, and has none now.
  virtual std::unique_ptr<SessionStore> Open(int replica) = 0;
  // Begins one of the faults and names it.
  virtual std::string BeginFault(std::mt19937& random) = 0;
  virtual void EndFault() = 0;
  virtual std::chrono::milliseconds LongestFault() const { return std::chrono::milliseconds(60); }
  // Until its next Open nothing that the replica does has any effect.
  virtual void Kill(int replica) = 0;
  // Drops what no record names, with all replicas gone.
  virtual void Sweep() {}
};

class MemoryChaosStores final : public ChaosStores {
 public:
  MemoryChaosStores(bool shared, int replicas)
      : shared_(shared), stores_(static_cast<size_t>(replicas)), killed_(static_cast<size_t>(replicas)) {}

  bool shared() const override { return shared_; }
  std::unique_ptr<SessionStore> Open(int replica) override {
    auto store = std::make_unique<MemoryStore>(contents_, shared_);
    stores_[replica] = store.get();
    killed_[replica] = false;
    return store;
  }
  std::string BeginFault(std::mt19937& random) override {
    MemoryStore& store = *stores_[random() % stores_.size()];
    switch (random() % 6) {
      case 0:
        store.down = true;
        return "replica cut off";
      case 1:
        for (MemoryStore* each : stores_) each->down = true;
        return "store gone";
      case 2:
        store.full = true;
        return "store full";
      case 3:
        store.failing_percent = 20;
        return "one call in five fails";
      case 4:
        store.delay_us = 2000;
        return "store slow";
      default:
        return "none";
    }
  }
  void EndFault() override {
    for (size_t i = 0; i < stores_.size(); ++i) {
      stores_[i]->down = killed_[i];
      stores_[i]->full = false;
      stores_[i]->failing_percent = stores_[i]->delay_us = 0;
    }
  }
  void Kill(int replica) override {
    killed_[replica] = true;
    stores_[replica]->down = true;
  }
  void Sweep() override { contents_->Sweep(); }

 private:
  const bool shared_;
  const std::shared_ptr<MemoryStoreContents> contents_ = std::make_shared<MemoryStoreContents>();
  std::vector<MemoryStore*> stores_;  // as long as their replicas keep them
  std::vector<bool> killed_;
};

// A disk that is slow, full, or fails what is written, now and then or for good.
class ChaosDisk final : public FileOps {
 public:
  enum class Mode { kGood, kSlow, kFull, kFailing, kDead };
  void Set(Mode mode) { mode_ = mode; }

  int Create(const std::string& path) override { return Fails() ? -EIO : FileOps::Create(path); }
  long Write(int fd, const void* bytes, size_t count) override {
    if (mode_ == Mode::kFull) {
      // The last that fits.
      const size_t fits = count / 2;
      return fits > 0 && Below(2) == 0 ? FileOps::Write(fd, bytes, fits) : -ENOSPC;
    }
    return Fails() ? -EIO : FileOps::Write(fd, bytes, count);
  }
  // The machine does not die here, only processes do: nothing needs to be synced.
  int SyncData(int) override {
    Dawdle();
    return Fails() ? -EIO : 0;
  }
  int Rename(const std::string& from, const std::string& to) override {
    return Fails() ? -EIO : FileOps::Rename(from, to);
  }
  int Unlink(const std::string& path) override { return Fails() ? -EIO : FileOps::Unlink(path); }
  int SyncFolder(const std::string&) override {
    Dawdle();
    return Fails() ? -EIO : 0;
  }

 private:
  bool Fails() { return mode_ == Mode::kDead || (mode_ == Mode::kFailing && Below(8) == 0); }
  void Dawdle() {
    if (mode_ == Mode::kSlow) std::this_thread::sleep_for(std::chrono::milliseconds(Below(20)));
  }
  uint32_t Below(uint32_t bound) {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(random_() % bound);
  }

  std::atomic<Mode> mode_{Mode::kGood};
  std::mutex mutex_;
  std::mt19937 random_{7};  // under mutex_
};

class DiskChaosStores final : public ChaosStores {
 public:
  bool shared() const override { return false; }
  std::unique_ptr<SessionStore> Open(int) override {
    killed_ = false;
    EndFault();
    absl::StatusOr<std::unique_ptr<DiskStore>> store =
        DiskStore::Open({.folder = scratch_.File("store"),
                         .unnamed_grace = std::chrono::seconds(20),
                         .sweep_interval = std::chrono::seconds(2),
                         .file_ops = &disk_});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  std::string BeginFault(std::mt19937& random) override {
    if (killed_) return "none";
    switch (random() % 4) {
      case 0:
        disk_.Set(ChaosDisk::Mode::kSlow);
        return "disk slow";
      case 1:
        disk_.Set(ChaosDisk::Mode::kFull);
        return "disk full";
      case 2:
        disk_.Set(ChaosDisk::Mode::kFailing);
        return "one disk call in eight fails";
      default:
        return "none";
    }
  }
  void EndFault() override { disk_.Set(killed_ ? ChaosDisk::Mode::kDead : ChaosDisk::Mode::kGood); }
  void Kill(int) override {
    killed_ = true;
    EndFault();
  }

 private:
  const ScratchDirectory scratch_;
  ChaosDisk disk_;
  bool killed_ = false;
};

// One replica's way to a shared store, which can be cut.
class CuttableStore final : public SessionStore {
 public:
  explicit CuttableStore(std::unique_ptr<SessionStore> store) : store_(std::move(store)) {}
  void Cut(bool cut) { cut_ = cut; }

  const char* kind() const override { return store_->kind(); }
  bool shared() const override { return store_->shared(); }
  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override {
    return cut_ ? OutOfReach() : store_->PutSnapshot(id, bytes);
  }
  void SetSnapshotsInUse(std::function<bool(const std::string& id)> in_use) override {
    store_->SetSnapshotsInUse(std::move(in_use));
  }
  absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) override {
    if (cut_) return OutOfReach();
    return store_->GetSnapshot(id);
  }
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override {
    if (cut_) return OutOfReach();
    return store_->GetRecord(session_id);
  }
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override {
    return cut_ ? OutOfReach() : store_->PutRecord(record, expected_epoch);
  }
  absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) override {
    if (cut_) return OutOfReach();
    return store_->ListRecords(prefix);
  }
  absl::Status RenewLease(const std::string& owner, const std::string& address,
                          std::chrono::milliseconds ttl) override {
    return cut_ ? OutOfReach() : store_->RenewLease(owner, address, ttl);
  }
  absl::StatusOr<std::string> GetLease(const std::string& owner) override {
    if (cut_) return OutOfReach();
    return store_->GetLease(owner);
  }

 private:
  static absl::Status OutOfReach() { return absl::UnavailableError("this replica is cut off"); }
  const std::unique_ptr<SessionStore> store_;
  std::atomic<bool> cut_{false};
};

// A Redis server that writes down what it is told before it answers, so that it may be killed.
class RedisChaosStores final : public ChaosStores {
 public:
  explicit RedisChaosStores(int replicas)
      : stores_(static_cast<size_t>(replicas)), killed_(static_cast<size_t>(replicas)) {}

  bool shared() const override { return true; }
  std::unique_ptr<SessionStore> Open(int replica) override {
    RedisStoreOptions options;
    options.connect_timeout = options.command_timeout = std::chrono::milliseconds(200);
    options.breaker_open = std::chrono::milliseconds(50);
    // Longer than a server that is killed under load takes to come back, and writers to try again.
    options.unnamed_grace = std::chrono::seconds(20);
    options.tombstone_ttl = std::chrono::minutes(1);
    absl::StatusOr<std::unique_ptr<RedisStore>> redis = RedisStore::Create(server_.address(), options);
    EXPECT_TRUE(redis.ok()) << redis.status();
    auto store = std::make_unique<CuttableStore>(*std::move(redis));
    stores_[replica] = store.get();
    killed_[replica] = false;
    return store;
  }
  std::string BeginFault(std::mt19937& random) override {
    switch (random() % 4) {
      case 0:
        server_.Kill();
        is_down_ = true;
        return "Redis killed";
      case 1:
        server_.Pause();
        is_held_ = true;
        return "Redis held";
      case 2:
        stores_[random() % stores_.size()]->Cut(true);
        return "replica cut off";
      default:
        return "none";
    }
  }
  void EndFault() override {
    if (std::exchange(is_down_, false)) server_.Start();
    if (std::exchange(is_held_, false)) server_.Resume();
    for (size_t i = 0; i < stores_.size(); ++i) stores_[i]->Cut(killed_[i]);
  }
  // From less than the stores' time-outs to several times as long.
  std::chrono::milliseconds LongestFault() const override { return std::chrono::milliseconds(400); }
  void Kill(int replica) override {
    killed_[replica] = true;
    stores_[replica]->Cut(true);
  }

 private:
  // What it has written to its file outlives its process without a sync. The file is kept short, or reading
  // it at the start would take longer than the replicas' leases last.
  RedisServer server_{{"--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "50",
                       "--auto-aof-rewrite-min-size", "32mb"}};
  std::vector<CuttableStore*> stores_;  // as long as their replicas keep them
  std::vector<bool> killed_;
  bool is_down_ = false, is_held_ = false;
};

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_SESSION_CHAOS_STORES_H_
