// What session_store.h promises, of every store.
#include "server/sessions/session_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/disk_store.h"
#include "server/sessions/redis_store.h"
#include "server/sessions/stored_record.h"
#include "tests/model/scratch.h"
#include "tests/server/redis_server.h"
#include "tests/server/store_example.h"

namespace efla {
namespace {

using Bytes = std::vector<std::byte>;
using absl::StatusCode;
using std::chrono::milliseconds;

int64_t UnixMsFromNow(milliseconds later) {
  const auto at = std::chrono::system_clock::now() + later;
  return std::chrono::duration_cast<milliseconds>(at.time_since_epoch()).count();
}

class SessionStoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (kind() == "disk") {
      folder_ = std::make_unique<ScratchDirectory>();
      DiskStoreOptions options;
      options.folder = folder_->path() + "/a/store";
      auto store = DiskStore::Open(options);
      ASSERT_TRUE(store.ok()) << store.status();
      store_ = *std::move(store);
    } else {
      EFLA_SKIP_WITHOUT_REDIS();
      server_ = std::make_unique<RedisServer>();
      auto store = RedisStore::Create(server_->address(), {});
      ASSERT_TRUE(store.ok()) << store.status();
      store_ = *std::move(store);
    }
  }
  std::string kind() const { return GetParam(); }
  SessionStore& store() { return *store_; }

  void PutSnapshot(const std::string& id, size_t size = 100) {
    const absl::Status status = store().PutSnapshot(id, BytesOf(id, size));
    EXPECT_TRUE(status.ok()) << status;
  }
  void Put(const SessionRecord& record, uint64_t expected_epoch) {
    const absl::Status status = store().PutRecord(record, expected_epoch);
    EXPECT_TRUE(status.ok()) << status;
  }
  void Refused(const SessionRecord& record, uint64_t expected_epoch, StatusCode code,
               const std::vector<std::string>& parts = {}) {
    const absl::Status status = store().PutRecord(record, expected_epoch);
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) {
      EXPECT_NE(status.ToString().find(part), std::string::npos) << part << " in " << status;
    }
  }
  void Holds(const SessionRecord& record) {
    const auto stored = store().GetRecord(record.session_id);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_TRUE(SameRecord(*stored, record)) << record.session_id;
  }

 private:
  std::unique_ptr<ScratchDirectory> folder_;
  std::unique_ptr<RedisServer> server_;
  std::unique_ptr<SessionStore> store_;
};

TEST_P(SessionStoreTest, SaysWhatItIs) {
  EXPECT_EQ(store().kind(), kind());
  EXPECT_EQ(store().shared(), kind() == "redis");
}

TEST_P(SessionStoreTest, SnapshotsComeBackByteForByte) {
  constexpr size_t kMiB = 1 << 20;
  for (const size_t size : {size_t{0}, size_t{1}, kMiB - 1, kMiB, kMiB + 1, 13 * kMiB + 12345}) {
    const std::string id = absl::StrFormat("s%d", size);
    PutSnapshot(id, size);
    const auto bytes = store().GetSnapshot(id);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_TRUE(*bytes == BytesOf(id, size)) << size;
  }
  EXPECT_EQ(store().GetSnapshot("none").status().code(), StatusCode::kNotFound);
}

TEST_P(SessionStoreTest, ASnapshotIsPutOnce) {
  PutSnapshot("a");
  PutSnapshot("a");
  EXPECT_EQ(store().PutSnapshot("a", BytesOf("b", 100)).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(*store().GetSnapshot("a") == BytesOf("a", 100));
}

TEST_P(SessionStoreTest, AnyNameOfTheAlphabetIsSafe) {
  const std::vector<std::string> names = {".",
                                          "..",
                                          "...",
                                          "-",
                                          "_",
                                          "a",
                                          "A",
                                          "-a",
                                          ".record",
                                          "a.record",
                                          "LOCK",
                                          "CON",
                                          std::string(128, 'x')};
  for (const std::string& name : names) {
    PutSnapshot(name);
    Put(RecordOf(name, 1, 1, "", {name}), 0);
  }
  for (const std::string& name : names) {
    Holds(RecordOf(name, 1, 1, "", {name}));
    EXPECT_TRUE(*store().GetSnapshot(name) == BytesOf(name, 100)) << name;
  }
  auto sorted = names;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(IdsIn(store()), sorted);
  for (const std::string& name : {std::string(), std::string("a/b"), std::string("../x"), std::string("a b"),
                                  std::string("a\0b", 3), std::string("a+b"), std::string(129, 'x')}) {
    EXPECT_EQ(store().PutSnapshot(name, BytesOf(name, 1)).code(), StatusCode::kInvalidArgument) << name;
    Refused(RecordOf(name, 1, 1, ""), 0, StatusCode::kInvalidArgument);
    EXPECT_FALSE(store().GetSnapshot(name).ok());
    EXPECT_FALSE(store().GetRecord(name).ok());
  }
}

TEST_P(SessionStoreTest, RecordsComeBackAsPut) {
  PutSnapshot("x");
  PutSnapshot("y");
  SessionRecord record = RecordOf("s", UINT64_MAX - 1, UINT64_MAX, "replica:1", {"y", "x", "y"});
  record.payload = std::string(100'000, '\0') + "\xff\r\n end";
  record.expires_unix_ms = UnixMsFromNow(std::chrono::hours(1));
  Put(record, 0);
  Holds(record);
  EXPECT_EQ(store().GetRecord("t").status().code(), StatusCode::kNotFound);
}

TEST_P(SessionStoreTest, ARecordReplacesOnlyTheEpochItExpects) {
  Put(RecordOf("s", 3, 10, "a"), 0);
  const std::vector<std::string> stored = {"epoch 3", "revision 10", "owner \"a\""};
  Refused(RecordOf("s", 3, 11, "a"), 0, StatusCode::kAborted, stored);
  Refused(RecordOf("s", 4, 11, "b"), 2, StatusCode::kAborted, stored);
  Refused(RecordOf("s", 5, 11, "b"), 4, StatusCode::kAborted, stored);
  Refused(RecordOf("none", 2, 1, "a"), 1, StatusCode::kAborted, {"there is no record"});
  Holds(RecordOf("s", 3, 10, "a"));
  Put(RecordOf("s", 4, 10, "b"), 3);
  Holds(RecordOf("s", 4, 10, "b"));
}

// What was written between a claim's look at the record and its put is not undone by it.
TEST_P(SessionStoreTest, AClaimDoesNotGoBackBehindTheStoredRevision) {
  Put(RecordOf("s", 3, 10, "a"), 0);
  Put(RecordOf("s", 3, 11, "a"), 3);
  Refused(RecordOf("s", 4, 10, "b"), 3, StatusCode::kAborted, {"epoch 3", "revision 11"});
  Holds(RecordOf("s", 3, 11, "a"));
  Put(RecordOf("s", 4, 11, "b"), 3);
  // To begin anew, to delete, and to write without an owner is no claim.
  Put(RecordOf("s", 5, 0, "c"), 4);
  Put(RecordOf("s", 5, 7, "c"), 5);
  Put(RecordOf("s", 6, 3, ""), 5);
  Put(TombstoneOf("s", 7), 6);
}

TEST_P(SessionStoreTest, WithinAnEpochTheRevisionRisesAndTheOwnerOnlyGivesUp) {
  Put(RecordOf("s", 1, 5, "a"), 0);
  Put(RecordOf("s", 1, 5, "a"), 1);
  Put(RecordOf("s", 1, 6, "a"), 1);
  Refused(RecordOf("s", 1, 5, "a"), 1, StatusCode::kAborted, {"revision 6"});
  Refused(RecordOf("s", 1, 7, "b"), 1, StatusCode::kAborted, {"owner \"a\""});
  Put(RecordOf("s", 1, 7, ""), 1);
  Refused(RecordOf("s", 1, 8, "a"), 1, StatusCode::kAborted, {"owner \"\""});
  Put(RecordOf("s", 2, 7, "a"), 1);
}

TEST_P(SessionStoreTest, RecordsThatMakeNoSenseAreRefused) {
  Refused(RecordOf("s", 0, 1, ""), 0, StatusCode::kInvalidArgument, {"epoch is 0"});
  Refused(RecordOf("s", 1, 1, ""), 2, StatusCode::kInvalidArgument, {"epoch is 1", "expected 2"});
  Refused(TombstoneOf("s", 2), 2, StatusCode::kInvalidArgument, {"above the expected 2"});
  SessionRecord record = TombstoneOf("s", 2);
  record.snapshots = {"a"};
  Refused(record, 0, StatusCode::kInvalidArgument, {"names 1 snapshots"});
  record = RecordOf("s", 1, 1, "");
  record.expires_unix_ms = -1;
  Refused(record, 0, StatusCode::kInvalidArgument, {"expires_unix_ms is -1"});
  record.expires_unix_ms = kMaxUnixMs + 1;
  Refused(record, 0, StatusCode::kInvalidArgument, {"4503599627370497"});
  Refused(RecordOf("s", 1, 1, std::string(257, 'o')), 0, StatusCode::kInvalidArgument, {"257 bytes"});
  Refused(RecordOf("s", 1, 1, "", {"a/b"}), 0, StatusCode::kInvalidArgument, {"snapshot id"});
  Refused(RecordOf("s", 1, 1, "", {"absent"}), 0, StatusCode::kFailedPrecondition, {"snapshot absent"});
  EXPECT_EQ(store().GetRecord("s").status().code(), StatusCode::kNotFound);
}

TEST_P(SessionStoreTest, ATombstoneIsComeBackFromOnlyAboveItsEpoch) {
  PutSnapshot("x");
  Put(RecordOf("s", 4, 1, "a", {"x"}), 0);
  Put(TombstoneOf("s", 5), 4);
  Holds(TombstoneOf("s", 5));
  EXPECT_TRUE(IdsIn(store()).empty());
  Refused(RecordOf("s", 4, 9, "a", {"x"}), 4, StatusCode::kAborted, {"epoch 5", "deleted"});  // who missed it
  Refused(RecordOf("s", 1, 1, "a"), 0, StatusCode::kAborted, {"epoch 5"});
  Refused(RecordOf("s", 5, 1, "a"), 0, StatusCode::kAborted, {"epoch 5"});
  Put(TombstoneOf("s", 5), 0);
  Put(RecordOf("s", 6, 1, "b"), 0);
  Put(TombstoneOf("s", 7), 6);
  Put(RecordOf("s", 8, 1, "b"), 7);
  Holds(RecordOf("s", 8, 1, "b"));
}

TEST_P(SessionStoreTest, ExpiredRecordsAreAsIfNeverPut) {
  SessionRecord record = RecordOf("s", 7, 3, "a");
  record.expires_unix_ms = UnixMsFromNow(milliseconds(-5));
  Put(record, 0);
  EXPECT_EQ(store().GetRecord("s").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(IdsIn(store()).empty());
  Refused(RecordOf("s", 8, 3, "a"), 7, StatusCode::kAborted, {"there is no record"});
  Put(RecordOf("s", 1, 1, "b"), 0);
  Holds(RecordOf("s", 1, 1, "b"));
}

TEST_P(SessionStoreTest, ListsManyRecordsInOrder) {
  std::vector<std::string> ids;
  const int count = kind() == "redis" ? 2500 : 300;  // more than one batch of SCAN; a disk takes its time
  for (int i = 0; i < count; ++i) ids.push_back(absl::StrFormat("s%d", i));
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < ids.size(); i = next++) Put(RecordOf(ids[i], 1, 1, ""), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(IdsIn(store()), ids);
}

TEST_P(SessionStoreTest, AListingTellsOfRecordsByTheBeginningOfTheirIds) {
  SessionRecord record = RecordOf("acme~b", 3, 7, "a");
  record.expires_unix_ms = UnixMsFromNow(std::chrono::hours(1));
  Put(record, 0);
  for (const char* id : {"acme~a", "acme", "acm~a", "acmf", "b"}) Put(RecordOf(id, 1, 0, "a"), 0);
  Put(TombstoneOf("acme~c", 1), 0);
  EXPECT_EQ(IdsIn(store(), "acme~"), (std::vector<std::string>{"acme~a", "acme~b"}));
  EXPECT_EQ(IdsIn(store(), "acm"), (std::vector<std::string>{"acme", "acme~a", "acme~b", "acmf", "acm~a"}));
  EXPECT_TRUE(IdsIn(store(), "c").empty());
  const auto listed = store().ListRecords("acme~");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ(listed->at(0).revision, 0u);
  EXPECT_EQ(listed->at(0).expires_unix_ms, 0);
  EXPECT_EQ(listed->at(1).revision, 7u);
  EXPECT_EQ(listed->at(1).expires_unix_ms, record.expires_unix_ms);
}

TEST_P(SessionStoreTest, OfManyClaimsExactlyOneWins) {
  Put(RecordOf("s", 1, 1, ""), 0);
  for (uint64_t epoch = 1; epoch <= 30; ++epoch) {
    std::atomic<int> won = 0, lost = 0;
    std::atomic<int> winner = -1;
    std::vector<std::thread> threads;
    for (int t = 0; t < 12; ++t) {
      threads.emplace_back([&, t] {
        const absl::Status status =
            store().PutRecord(RecordOf("s", epoch + 1, 1, "owner" + std::to_string(t)), epoch);
        if (status.ok()) {
          ++won;
          winner = t;
        } else if (status.code() == StatusCode::kAborted) {
          ++lost;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(won, 1);
    ASSERT_EQ(lost, 11);
    ASSERT_EQ(store().GetRecord("s")->owner, "owner" + std::to_string(winner));
  }
}

TEST_P(SessionStoreTest, ManyThreadsPutAndGetTheirOwn) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const std::string session = "session" + std::to_string(t);
      for (uint64_t revision = 1; revision <= 20; ++revision) {
        const std::string snapshot = session + "." + std::to_string(revision);
        PutSnapshot("shared", 3'000'000);
        PutSnapshot(snapshot, 200'000 + 1000 * revision);
        Put(RecordOf(session, 1, revision, "a", {"shared", snapshot}), revision == 1 ? 0 : 1);
        Holds(RecordOf(session, 1, revision, "a", {"shared", snapshot}));
        const auto bytes = store().GetSnapshot(snapshot);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        EXPECT_TRUE(*bytes == BytesOf(snapshot, 200'000 + 1000 * revision));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(SessionStoreTest, LeasesRunOut) {
  EXPECT_EQ(store().GetLease("a").status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(store().RenewLease("a", "host:1", std::chrono::hours(1)).ok());
  EXPECT_TRUE(store().RenewLease("b", "host:2", milliseconds(30)).ok());
  EXPECT_EQ(*store().GetLease("a"), "host:1");
  EXPECT_TRUE(store().RenewLease("a", "host:3", std::chrono::hours(1)).ok());
  EXPECT_EQ(*store().GetLease("a"), "host:3");
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_EQ(store().GetLease("b").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(store().RenewLease("", "host:1", milliseconds(30)).code(), StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Stores, SessionStoreTest, ::testing::Values("disk", "redis"),
                         [](const auto& test) { return std::string(test.param); });

TEST(StoredRecordTest, DamagedBytesAreFoundOut) {
  const SessionRecord record = RecordOf("s", 3, 4, "a", {"x", "y"});
  const Bytes bytes = EncodeRecord(record, 77);
  const auto decoded = DecodeRecord(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(SameRecord(decoded->record, record));
  EXPECT_EQ(decoded->written_unix_ms, 77);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(DecodeRecord(std::span(bytes).first(size)).status().code(), StatusCode::kDataLoss) << size;
  }
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(DecodeRecord(flipped).ok()) << bit;
  }
}

}  // namespace
}  // namespace efla
