#include "server/sessions/observed_store.h"

#include <string_view>
#include <utility>

namespace efla {
namespace {

constexpr char kSnapshot[] = "snapshot";

bool IsFailure(const absl::Status& status) {
  return !status.ok() && !absl::IsNotFound(status) && !absl::IsAborted(status) &&
         !absl::IsInvalidArgument(status);
}

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

class ObservedStore final : public SessionStore {
 public:
  ObservedStore(std::unique_ptr<SessionStore> store, std::function<void(const StoreFailure&)> on_failure)
      : store_(std::move(store)), on_failure_(std::move(on_failure)) {}

  const char* kind() const override { return store_->kind(); }
  bool shared() const override { return store_->shared(); }
  void SetSnapshotsInUse(std::function<bool(const std::string& id)> in_use) override {
    store_->SetSnapshotsInUse(std::move(in_use));
  }
  void SetSessionOfSnapshot(std::function<std::string(const std::string& id)> session_of) override {
    session_of_ = std::move(session_of);
  }
  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override {
    return Watch("PutSnapshot", kSnapshot, id, store_->PutSnapshot(id, bytes));
  }
  absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) override {
    return Watch("GetSnapshot", kSnapshot, id, store_->GetSnapshot(id));
  }
  absl::StatusOr<bool> HasSnapshot(const std::string& id) override {
    return Watch("HasSnapshot", kSnapshot, id, store_->HasSnapshot(id));
  }
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override {
    return Watch("GetRecord", "session", session_id, store_->GetRecord(session_id));
  }
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override {
    return Watch("PutRecord", "session", record.session_id, store_->PutRecord(record, expected_epoch));
  }
  absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) override {
    return Watch("ListRecords", "", "", store_->ListRecords(prefix));
  }
  absl::Status RenewLease(const std::string& owner, const std::string& address,
                          std::chrono::milliseconds ttl) override {
    return Watch("RenewLease", "owner", owner, store_->RenewLease(owner, address, ttl));
  }
  absl::StatusOr<std::string> GetLease(const std::string& owner) override {
    return Watch("GetLease", "owner", owner, store_->GetLease(owner));
  }
  absl::Status PutCleanMark() override { return Watch("PutCleanMark", "", "", store_->PutCleanMark()); }
  absl::StatusOr<bool> TakeCleanMark() override {
    return Watch("TakeCleanMark", "", "", store_->TakeCleanMark());
  }

 private:
  template <typename Result>
  Result Watch(const char* operation, const char* subject_kind, const std::string& subject,
               Result result) const {
    if (const absl::Status& status = StatusOf(result); IsFailure(status)) {
      const bool of_snapshot = session_of_ && std::string_view(subject_kind) == kSnapshot;
      on_failure_({store_->kind(), operation, subject_kind, subject, status,
                   of_snapshot ? session_of_(subject) : ""});
    }
    return result;
  }

  const std::unique_ptr<SessionStore> store_;
  const std::function<void(const StoreFailure&)> on_failure_;
  std::function<std::string(const std::string& id)> session_of_;
};

}  // namespace

std::unique_ptr<SessionStore> ObserveFailures(std::unique_ptr<SessionStore> store,
                                              std::function<void(const StoreFailure&)> on_failure) {
  return std::make_unique<ObservedStore>(std::move(store), std::move(on_failure));
}

}  // namespace efla
