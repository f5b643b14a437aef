// Sessions whose files are damaged or cannot be read: what the start says, what calls get, the way out.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "server/sessions/disk_store.h"
#include "server/sessions/file_ops.h"
#include "server/sessions/observed_store.h"
#include "tests/model/scratch.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
namespace fs = std::filesystem;

// A disk of which nothing can be read while it is told so.
class UnreadableDisk final : public FileOps {
 public:
  long Read(int fd, void* bytes, size_t count) override {
    return unreadable ? -EIO : FileOps::Read(fd, bytes, count);
  }
  std::atomic<bool> unreadable{false};
};

class SessionDamageTest : public ::testing::Test {
 protected:
  std::unique_ptr<DiskStore> Open() {
    auto disk = DiskStore::Open({.folder = folder_.File("sessions"), .file_ops = &disk_});
    EXPECT_TRUE(disk.ok()) << disk.status();
    return disk.ok() ? *std::move(disk) : nullptr;
  }
  SessionRigOptions Options() {
    SessionRigOptions options;
    options.sessions.on_unusable = [this](const std::string& id, const absl::Status& why) {
      unusable_[id] = why;
    };
    return options;
  }
  void Restart(SessionRig& s) {
    s.manager.reset();
    s.StartManager(Open(), nullptr);
  }
  // The middle byte of the one file of a folder whose name begins so.
  void Damage(const std::string& folder, const std::string& begin) const {
    for (const auto& entry : fs::directory_iterator(folder_.File("sessions/" + folder))) {
      if (!entry.path().filename().string().starts_with(begin)) continue;
      std::string bytes = ReadWhole(entry.path());
      bytes[bytes.size() / 2] ^= 1;
      std::ofstream(entry.path(), std::ios::binary) << bytes;
    }
  }

  ScratchDirectory folder_;
  UnreadableDisk disk_;  // outlives the stores
  std::map<std::string, absl::Status> unusable_;
};

TEST_F(SessionDamageTest, ADamagedRecordIsNamedAndCanBeDeletedAndMadeAnew) {
  SessionRig s(Options());
  Restart(s);
  for (const char* id : {"a", "b"}) {
    ASSERT_TRUE(s.Generate(ChangeOf(id, Durability::kSync), SomePrompt(70), 3).status.ok());
  }
  s.manager.reset();
  Damage("records", "a.");
  s.StartManager(Open(), nullptr);
  EXPECT_EQ(s.Get("b").revision, 2u);

  const auto expect_damaged = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_NE(status.message().find("session a"), absl::string_view::npos) << status;
  };
  expect_damaged(s.manager->Get("a").status());
  expect_damaged(s.manager->Create("a", milliseconds(0), "", Durability::kSync).status());
  expect_damaged(s.Generate("a", SomePrompt(10), 1).status);
  EXPECT_TRUE(s.manager->Delete(ChangeOf("a", Durability::kAsync, "once")).ok());
  EXPECT_TRUE(s.manager->Delete(ChangeOf("a", Durability::kAsync, "once")).ok()) << "the request again";
  EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(s.manager->Create("a", milliseconds(0), "", Durability::kSync).ok());
  ASSERT_TRUE(s.Generate(ChangeOf("a", Durability::kSync), SomePrompt(10), 1).status.ok());
  Restart(s);
  EXPECT_EQ(s.Get("a").tokens, 11);
}

TEST_F(SessionDamageTest, TheStartTellsOfSessionsThatItCannotTakeUp) {
  {
    const std::unique_ptr<DiskStore> disk = Open();
    SessionRecord record;
    record.session_id = "garbled";
    record.epoch = record.revision = 1;
    record.payload = "no session at all";
    ASSERT_TRUE(disk->PutRecord(record, 0).ok());
  }
  SessionRig s(Options());
  Restart(s);
  ASSERT_EQ(unusable_.size(), 1u);
  EXPECT_EQ(unusable_["garbled"].code(), absl::StatusCode::kDataLoss) << unusable_["garbled"];
  EXPECT_EQ(s.manager->Get("garbled").status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(s.manager->Delete(ChangeOf("garbled")).ok());
  EXPECT_TRUE(s.manager->Create("garbled", milliseconds(0), "", Durability::kSync).ok());
  unusable_.clear();
  Restart(s);
  EXPECT_TRUE(unusable_.empty());
}

// What a head's lost state keeps from being written is told once, and not tried over and over.
TEST(SessionLossTest, ALostHeadIsToldOnceAndLeftAloneUntilItsNextChange) {
  auto contents = std::make_shared<MemoryStoreContents>();
  auto store = std::make_unique<MemoryStore>(contents, /*shared=*/false);
  MemoryStore& disk = *store;
  std::atomic<int> refused{0}, told{0};  // puts of snapshots; losses
  std::mutex mutex;                      // guards the three below
  std::string refused_of, lost;
  absl::Status why;
  SessionRigOptions options;
  options.sessions.host_idle = std::chrono::seconds(600);
  options.sessions.on_lost = [&](const std::string& id, const absl::Status& status) {
    const std::lock_guard lock(mutex);
    lost = id;
    why = status;
    ++told;
  };
  options.disk = ObserveFailures(std::move(store), [&](const StoreFailure& failure) {
    if (std::string(failure.operation) != "PutSnapshot") return;
    const std::lock_guard lock(mutex);
    refused_of = failure.session;
    ++refused;
  });
  SessionRig s(std::move(options));
  // The head's state is in the store, and a mark's in memory only: an attempt at the mark's can be seen.
  ASSERT_TRUE(s.Generate(ChangeOf("a", Durability::kSync), SomePrompt(70), 3).status.ok());
  ASSERT_TRUE(s.Generate(ChangeOf("a", Durability::kNone), SomePrompt(70, 5), 3).status.ok());
  ASSERT_TRUE(s.manager->Mark(ChangeOf("a", Durability::kNone), "later").ok());
  ASSERT_TRUE(s.manager->Rewind(ChangeOf("a", Durability::kNone), "", std::nullopt).ok());
  disk.full = true;
  s.clock.Advance(std::chrono::seconds(600));
  ASSERT_TRUE(Eventually([&] { return s.Get("a").tier == SessionTier::kDisk; })) << "it sinks";
  EXPECT_EQ(told.load(), 0) << "a full store loses nothing";
  {
    const std::lock_guard lock(contents->mutex);
    contents->snapshots.clear();
  }
  EXPECT_EQ(s.manager->Export("a", "").status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(Eventually([&] { return told == 1; }));
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(lost, "a");
    EXPECT_EQ(why.code(), absl::StatusCode::kDataLoss) << why;
    EXPECT_EQ(refused_of, "a") << "failures of snapshots name the session";
  }
  const int attempts = refused;
  EXPECT_GT(attempts, 0);
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_EQ(refused.load(), attempts) << "it is tried again and again";
  EXPECT_EQ(told.load(), 1);

  // A change that is lost as well is tried at once, and is no news.
  EXPECT_TRUE(s.Get("a").damaged);
  ASSERT_TRUE(s.manager->Rewind(ChangeOf("a"), "", s.Get("a").revision).ok());
  ASSERT_TRUE(Eventually([&] { return refused > attempts; }));
  EXPECT_EQ(told.load(), 1);
  // One that ends the loss is written.
  disk.full = false;
  ASSERT_TRUE(s.manager->Rewind(ChangeOf("a"), "later", std::nullopt).ok());
  ASSERT_TRUE(Eventually([&] { return s.Get("a").durable_revision == s.Get("a").revision; }));
  EXPECT_FALSE(s.Get("a").damaged);
}

TEST_F(SessionDamageTest, AStateThatCannotBeReadNowIsNotGivenUp) {
  SessionRig s(Options());
  Restart(s);
  const Turned expected = [&] {
    SessionRig undisturbed;
    EXPECT_TRUE(undisturbed.Generate("a", SomePrompt(70), 3).status.ok());
    return undisturbed.Generate("a", SomePrompt(10, 5), 8);
  }();
  ASSERT_TRUE(s.Generate(ChangeOf("a", Durability::kSync), SomePrompt(70), 3).status.ok());
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kDisk).ok());
  ASSERT_EQ(s.Get("a").tier, SessionTier::kDisk);

  disk_.unreadable = true;
  const absl::Status status = s.Generate("a", SomePrompt(10, 5), 8).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ReasonOf(status), "STORE_UNAVAILABLE");
  EXPECT_EQ(s.manager->Export("a", "").status().code(), absl::StatusCode::kUnavailable);
  disk_.unreadable = false;
  const Turned turned = s.Generate("a", SomePrompt(10, 5), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.bits, expected.bits);
}

TEST_F(SessionDamageTest, ARecordThatCannotBeReadAtTheStartIsThereAgainLater) {
  SessionRig s(Options());
  Restart(s);
  ASSERT_TRUE(s.Generate(ChangeOf("a", Durability::kSync), SomePrompt(70), 3).status.ok());
  ASSERT_TRUE(s.Generate(ChangeOf("b", Durability::kSync), SomePrompt(70), 3).status.ok());
  disk_.unreadable = true;
  Restart(s);
  EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(s.manager->Create("a", milliseconds(0), "", Durability::kSync).ok());
  EXPECT_TRUE(s.manager->Delete(ChangeOf("b")).ok()) << "whatever is in it";
  disk_.unreadable = false;
  EXPECT_EQ(s.Get("a").revision, 2u);
  EXPECT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok());
  EXPECT_EQ(s.manager->Get("b").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace efla
