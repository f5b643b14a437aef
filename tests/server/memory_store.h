// A session store in memory that several managers may share, with handles for faults.
#ifndef EFLA_TESTS_SERVER_MEMORY_STORE_H_
#define EFLA_TESTS_SERVER_MEMORY_STORE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/session_store.h"

namespace efla {

// What the store holds.
class MemoryStoreContents {
 public:
  // Drops the snapshots that no record names, as stores do after a while.
  void Sweep() {
    const std::lock_guard lock(mutex);
    std::set<std::string> named;
    for (const auto& [id, record] : records) {
      if (!record.deleted) named.insert(record.snapshots.begin(), record.snapshots.end());
    }
    std::erase_if(snapshots, [&](const auto& entry) { return !named.contains(entry.first); });
  }
  SessionRecord Record(const std::string& id) {
    const std::lock_guard lock(mutex);
    return records[id];
  }

  std::mutex mutex;  // guards what follows
  std::map<std::string, std::vector<std::byte>> snapshots;
  std::map<std::string, SessionRecord> records;
  struct Lease {
    std::string address;
    std::chrono::steady_clock::time_point until;
  };
  std::map<std::string, Lease> leases;
  bool clean = false;        // its mark
  int unbacked_records = 0;  // refused: they named snapshots that were not there
  int64_t snapshot_puts = 0, snapshot_bytes = 0, record_bytes = 0;
  int64_t record_gets = 0, records_listed = 0;
};

// One client's way to it.
class MemoryStore final : public SessionStore {
 public:
  MemoryStore(std::shared_ptr<MemoryStoreContents> contents, bool shared)
      : contents_(std::move(contents)), shared_(shared) {}

  // --- Faults, any thread ---
  std::atomic<bool> down{false};  // out of reach
  std::atomic<bool> full{false};  // puts of snapshots fail
  std::atomic<int> failing_percent{
      0};  // of the calls are out of reach; half of these are carried out nevertheless
  std::atomic<int> delay_us{0};
  // Called without locks before each put of a record, from now on. False: nothing is heard of this put, which
  // is under way until DeliverLate.
  void SetBeforePut(std::function<bool(const SessionRecord&)> before) {
    const std::lock_guard lock(late_mutex_);
    before_put_ = std::move(before);
  }
  // The puts that are under way arrive.
  void DeliverLate() {
    std::vector<std::pair<SessionRecord, uint64_t>> late;
    {
      const std::lock_guard lock(late_mutex_);
      late.swap(late_);
    }
    for (const auto& [record, expected] : late) Put(record, expected).IgnoreError();
  }

  const char* kind() const override { return "memory"; }
  bool shared() const override { return shared_; }

  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override {
    return Call([&]() -> absl::Status {
      if (full) return absl::ResourceExhaustedError("the store is full");
      ++contents_->snapshot_puts;
      contents_->snapshot_bytes += static_cast<int64_t>(bytes.size());
      contents_->snapshots[id].assign(bytes.begin(), bytes.end());
      return absl::OkStatus();
    });
  }
  absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) override {
    return Call([&]() -> absl::StatusOr<HostBuffer> {
      const auto found = contents_->snapshots.find(id);
      if (found == contents_->snapshots.end()) return absl::NotFoundError("no snapshot " + id);
      return HostBuffer::CopyOf(found->second);
    });
  }
  absl::Status PutCleanMark() override {
    return Call([&]() -> absl::Status {
      contents_->clean = true;
      return absl::OkStatus();
    });
  }
  absl::StatusOr<bool> TakeCleanMark() override {
    return Call([&]() -> absl::StatusOr<bool> { return std::exchange(contents_->clean, false); });
  }
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override {
    return Call([&]() -> absl::StatusOr<SessionRecord> {
      ++contents_->record_gets;
      const auto found = contents_->records.find(session_id);
      if (found == contents_->records.end()) return absl::NotFoundError("no record " + session_id);
      return found->second;
    });
  }
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override {
    std::function<bool(const SessionRecord&)> before;
    {
      const std::lock_guard lock(late_mutex_);
      before = before_put_;
    }
    if (before && !before(record)) {
      const std::lock_guard lock(late_mutex_);
      late_.emplace_back(record, expected_epoch);
      return absl::UnavailableError("nothing was heard of the put");
    }
    return Put(record, expected_epoch);
  }
  absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) override {
    return Call([&]() -> absl::StatusOr<std::vector<ListedRecord>> {
      std::vector<ListedRecord> listed;
      for (const auto& [id, record] : contents_->records) {
        if (record.deleted || !id.starts_with(prefix)) continue;
        listed.push_back({id, record.revision, record.expires_unix_ms});
      }
      contents_->records_listed += static_cast<int64_t>(listed.size());
      return listed;
    });
  }
  absl::Status RenewLease(const std::string& owner, const std::string& address,
                          std::chrono::milliseconds ttl) override {
    return Call([&]() -> absl::Status {
      contents_->leases[owner] = {address, std::chrono::steady_clock::now() + ttl};
      return absl::OkStatus();
    });
  }
  absl::StatusOr<std::string> GetLease(const std::string& owner) override {
    return Call([&]() -> absl::StatusOr<std::string> {
      const auto found = contents_->leases.find(owner);
      if (found == contents_->leases.end() || found->second.until <= std::chrono::steady_clock::now()) {
        return absl::NotFoundError("no lease of " + owner);
      }
      return found->second.address;
    });
  }

 private:
  absl::Status Put(const SessionRecord& record, uint64_t expected_epoch) {
    return Call([&]() -> absl::Status {
      const auto found = contents_->records.find(record.session_id);
      if (found != contents_->records.end()) {
        const SessionRecord& stored = found->second;
        const bool expected = stored.deleted && expected_epoch == 0 ? record.epoch > stored.epoch
                                                                    : stored.epoch == expected_epoch;
        const bool claims = record.epoch > stored.epoch && !record.owner.empty() && record.revision > 0;
        const bool older = !record.deleted && !stored.deleted && record.revision < stored.revision &&
                           (record.epoch == stored.epoch || claims);
        if (!expected || older || (stored.deleted && expected_epoch != 0)) {
          return absl::AbortedError(absl::StrFormat("the record has epoch %d, owner %s, revision %d",
                                                    stored.epoch, stored.owner, stored.revision));
        }
      } else if (expected_epoch != 0) {
        return absl::AbortedError("there is no record");
      }
      for (const std::string& id : record.snapshots) {
        if (contents_->snapshots.contains(id)) continue;
        ++contents_->unbacked_records;
        return absl::FailedPreconditionError("the record names a snapshot that is not there: " + id);
      }
      contents_->record_bytes += static_cast<int64_t>(record.payload.size());
      contents_->records[record.session_id] = record;
      return absl::OkStatus();
    });
  }
  template <typename Effect>
  auto Call(const Effect& effect) -> decltype(effect()) {
    if (const int us = delay_us; us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    const absl::Status out_of_reach = absl::UnavailableError("the store is out of reach");
    if (down) return out_of_reach;
    const std::lock_guard lock(contents_->mutex);
    bool fails, before;
    {
      const std::lock_guard random_lock(random_mutex_);
      fails = static_cast<int>(random_() % 100) < failing_percent;
      before = random_() % 2 == 0;
    }
    if (fails && before) return out_of_reach;
    auto result = effect();
    if (fails) return out_of_reach;
    return result;
  }

  const std::shared_ptr<MemoryStoreContents> contents_;
  const bool shared_;
  std::mutex late_mutex_;  // guards what follows
  std::function<bool(const SessionRecord&)> before_put_;
  std::vector<std::pair<SessionRecord, uint64_t>> late_;
  std::mutex random_mutex_;
  std::mt19937 random_{7};
};

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_MEMORY_STORE_H_
