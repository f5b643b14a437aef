#include "server/sessions/observed_store.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/memory_store.h"

namespace efla {
namespace {

class ObservedStoreTest : public ::testing::Test {
 protected:
  ObservedStoreTest() {
    auto store = std::make_unique<MemoryStore>(std::make_shared<MemoryStoreContents>(), /*shared=*/true);
    inner_ = store.get();
    store_ = ObserveFailures(std::move(store), [this](const StoreFailure& f) { failures_.push_back(f); });
  }
  static SessionRecord Record(const std::string& id) {
    SessionRecord record;
    record.session_id = id;
    record.epoch = 1;
    return record;
  }
  MemoryStore* inner_;
  std::vector<StoreFailure> failures_;
  std::unique_ptr<SessionStore> store_;
};

TEST_F(ObservedStoreTest, AnswersAreNoFailures) {
  EXPECT_STREQ(store_->kind(), "memory");
  EXPECT_TRUE(store_->shared());
  const std::vector<std::byte> bytes(10, std::byte{3});
  EXPECT_TRUE(store_->PutSnapshot("x", bytes).ok());
  EXPECT_TRUE(*store_->GetSnapshot("x") == bytes);
  EXPECT_TRUE(*store_->HasSnapshot("x"));
  EXPECT_TRUE(store_->PutRecord(Record("s"), 0).ok());
  EXPECT_EQ(store_->ListRecords("")->at(0).session_id, "s");
  EXPECT_TRUE(store_->ListRecords("t")->empty());
  EXPECT_EQ(store_->PutRecord(Record("s"), 5).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(store_->GetRecord("t").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(store_->RenewLease("me", "here", std::chrono::seconds(1)).ok());
  EXPECT_EQ(*store_->GetLease("me"), "here");
  EXPECT_TRUE(failures_.empty());
}

TEST_F(ObservedStoreTest, EveryCallThatFailsIsToldWithWhatItWasAbout) {
  inner_->down = true;
  const std::vector<std::pair<std::string, std::function<absl::Status()>>> calls = {
      {"PutSnapshot snapshot x", [&] { return store_->PutSnapshot("x", {}); }},
      {"GetSnapshot snapshot x", [&] { return store_->GetSnapshot("x").status(); }},
      {"HasSnapshot snapshot x", [&] { return store_->HasSnapshot("x").status(); }},
      {"GetRecord session s", [&] { return store_->GetRecord("s").status(); }},
      {"PutRecord session s", [&] { return store_->PutRecord(Record("s"), 0); }},
      {"ListRecords  ", [&] { return store_->ListRecords("").status(); }},
      {"RenewLease owner me", [&] { return store_->RenewLease("me", "", std::chrono::seconds(1)); }},
      {"GetLease owner me", [&] { return store_->GetLease("me").status(); }},
  };
  for (const auto& [told, call] : calls) {
    failures_.clear();
    EXPECT_EQ(call().code(), absl::StatusCode::kUnavailable) << told;
    ASSERT_EQ(failures_.size(), 1u) << told;
    const StoreFailure& failure = failures_[0];
    EXPECT_EQ(failure.store, "memory");
    EXPECT_EQ(std::string(failure.operation) + " " + failure.subject_kind + " " + failure.subject, told);
    EXPECT_EQ(failure.status.message(), "the store is out of reach");
  }
  inner_->down = false;
  inner_->full = true;
  failures_.clear();
  EXPECT_FALSE(store_->PutSnapshot("x", {}).ok());
  ASSERT_EQ(failures_.size(), 1u);
  EXPECT_EQ(failures_[0].session, "") << "nobody has said whose it is";
  store_->SetSessionOfSnapshot([](const std::string& id) { return "session of " + id; });
  failures_.clear();
  EXPECT_FALSE(store_->PutSnapshot("x", {}).ok());
  ASSERT_EQ(failures_.size(), 1u);
  EXPECT_EQ(failures_[0].status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(failures_[0].session, "session of x");
}

}  // namespace
}  // namespace efla
