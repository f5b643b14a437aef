// Replicas on one shared store: who may continue a session, and what becomes of it when its owner goes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/sessions/redis_store.h"
#include "tests/server/redis_server.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SessionChange To(const std::string& id, Durability durability = Durability::kAsync) {
  return ChangeOf(id, durability);
}

// One replica, with an engine of its own.
struct Replica {
  explicit Replica(const std::string& name, std::shared_ptr<MemoryStoreContents> contents,
                   SessionOptions sessions = {},
                   std::shared_ptr<MemoryStoreContents> disk_contents = nullptr) {
    auto shared = std::make_unique<MemoryStore>(std::move(contents), true);
    store = shared.get();
    SessionRigOptions options;
    options.sessions = sessions;
    options.sessions.replica = name;
    options.sessions.address = name + ":50051";
    options.sessions.claim_wait = milliseconds(300);
    options.sessions.lease_ttl = milliseconds(600);
    options.shared = std::move(shared);
    if (disk_contents != nullptr)
      options.disk = std::make_unique<MemoryStore>(std::move(disk_contents), false);
    rig = std::make_unique<SessionRig>(std::move(options));
  }
  SessionRig* operator->() { return rig.get(); }
  SessionManager& manager() { return *rig->manager; }

  MemoryStore* store;
  std::unique_ptr<SessionRig> rig;
};

bool Released(const std::shared_ptr<MemoryStoreContents>& contents, const std::string& id) {
  return Eventually([&] { return contents->Record(id).owner.empty() && contents->Record(id).revision > 0; });
}

std::vector<Bits> Undisturbed(int turns) {
  SessionRig s;
  std::vector<Bits> bits;
  for (int turn = 0; turn < turns; ++turn) {
    bits.push_back(s.Generate("a", SomePrompt(30 + 40 * turn, static_cast<uint32_t>(turn)), 8).bits);
  }
  return bits;
}
std::vector<TokenId> Prompt(int turn) { return SomePrompt(30 + 40 * turn, static_cast<uint32_t>(turn)); }

TEST(SessionSharedTest, AnyReplicaGoesOnBitForBit) {
  const std::vector<Bits> undisturbed = Undisturbed(6);
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  uint64_t epoch = 0;
  for (int turn = 0; turn < 6; ++turn) {
    Replica& replica = turn % 3 == 2 ? one : two;
    const Turned turned = replica->Generate(To("a"), Prompt(turn), 8);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, undisturbed[turn]) << "turn " << turn;
    EXPECT_EQ(turned.info.revision, static_cast<uint64_t>(turn + 2));
    EXPECT_GT(turned.info.epoch, epoch);
    epoch = turned.info.epoch;
    ASSERT_TRUE(Released(contents, "a"));
  }
  EXPECT_EQ(one->Get("a").revision, 7u);
  EXPECT_EQ(one.manager().stats().takeovers + two.manager().stats().takeovers, 0u);
}

TEST(SessionSharedTest, ACachedStateIsUsedAgain) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  // Looking and failing elsewhere changes nothing, whatever the epoch says.
  ASSERT_TRUE(two.manager().Get("a").ok());
  ASSERT_TRUE(two.manager().Mark(To("a", Durability::kSync), "m").ok());
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(1), 8).status.ok());
  EXPECT_EQ(one.manager().stats().lifts_shared, 0u);
  EXPECT_EQ(one->Get("a").revision, 4u);
  EXPECT_EQ(one->Get("a").marks.size(), 1u);
}

TEST(SessionSharedTest, ATurnElsewhereIsWaitedForThenNamed) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  absl::StatusOr<SessionManager::Begun> begun = one.manager().BeginTurn(To("a"), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok()) << begun.status();
  const absl::Status status = two->Generate(To("a"), Prompt(1), 8).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ReasonOf(status), "SESSION_ELSEWHERE");
  EXPECT_EQ(GetSessionError(status)->metadata["address"], "one:50051");
  EXPECT_EQ(two->Get("a").revision, 2u);  // looking is allowed
  // A turn that gives up lets go; one that waits meanwhile gets it.
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(50));
    begun->turn.reset();
  });
  EXPECT_TRUE(two->Generate(To("a"), Prompt(1), 8).status.ok());
  later.join();
}

TEST(SessionSharedTest, ARepeatedRequestIsAnsweredByAnyReplica) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  SessionChange change = To("a", Durability::kSync);
  change.request_id = "r";
  ASSERT_TRUE(one->Generate(change, Prompt(0), 8).status.ok());
  const uint64_t epoch = contents->Record("a").epoch;
  EXPECT_EQ(two->Generate(change, Prompt(0), 8).reply, "8 tokens of a");
  EXPECT_EQ(contents->Record("a").epoch, epoch);  // nothing was claimed for it
  change.expected_revision = 7;
  change.request_id = "s";
  EXPECT_EQ(ReasonOf(two->Generate(change, Prompt(0), 8).status), "REVISION_MISMATCH");
  EXPECT_EQ(contents->Record("a").epoch, epoch);
}

TEST(SessionSharedTest, NamesAreTakenEverywhere) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one.manager().Create("a", milliseconds(0), "c", Durability::kAsync).ok());
  EXPECT_EQ(two.manager().Create("a", milliseconds(0), "", Durability::kAsync).status().code(),
            absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(Released(contents, "a"));
  EXPECT_EQ(two.manager().Create("a", milliseconds(0), "c", Durability::kAsync).value().session_id, "a");
  ASSERT_TRUE(two->Generate("b", Prompt(0), 2).status.ok());
  ASSERT_TRUE(Released(contents, "b"));
  EXPECT_EQ(one.manager().Fork(To("a"), {"b"}, "").status().code(), absl::StatusCode::kAlreadyExists);
  std::string listed;
  const std::vector<SessionInfo> sessions = one.manager().List("", "", 10).value();
  for (const SessionInfo& info : sessions) listed += info.session_id + " ";
  EXPECT_EQ(listed, "a b ");
}

// ---- Listing and counting what others made: the store is asked once, and for no more than that ----

// What the store has been asked for since the last look.
struct Asked {
  int64_t gets, listed;
  bool operator==(const Asked&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Asked& asked) {
  return out << asked.gets << " records read, " << asked.listed << " listed";
}
Asked TakeAsked(MemoryStoreContents& contents) {
  const std::lock_guard lock(contents.mutex);
  return {std::exchange(contents.record_gets, 0), std::exchange(contents.records_listed, 0)};
}

// Sessions that replica `one` has made and written, of tenant acme (a0 and on), of another and of nobody.
void MakeWritten(Replica& one, const std::shared_ptr<MemoryStoreContents>& contents, int acmes) {
  std::vector<std::string> ids = {"acme", "other~a0", "other~b", "z"};
  for (int i = 0; i < acmes; ++i) ids.push_back(Numbered("acme~a", i));
  for (const std::string& id : ids) {
    ASSERT_TRUE(one.manager().Create(id, milliseconds(0), "", Durability::kSync).ok()) << id;
  }
  for (const std::string& id : ids) ASSERT_TRUE(Released(contents, id)) << id;
}

TEST(SessionSharedTest, CountingLoadsNothing) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  MakeWritten(one, contents, 5);
  TakeAsked(*contents);
  EXPECT_EQ(two.manager().Count("acme~"), 5);
  EXPECT_EQ(TakeAsked(*contents), (Asked{0, 5}));
  EXPECT_EQ(one.manager().Count("acme~"), 5) << "and so where they were made";
  EXPECT_EQ(TakeAsked(*contents), (Asked{0, 5}));
  EXPECT_EQ(two.manager().Count("acme~b"), 0);
  EXPECT_EQ(two.manager().Count(""), 2) << "nobody's";
  EXPECT_EQ(two.manager().stats().sessions, 0);
}

TEST(SessionSharedTest, CountedIsWhatIsAlive) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  MakeWritten(one, contents, 3);
  ASSERT_TRUE(two.manager().Get("acme~a0").ok());
  ASSERT_TRUE(one.manager().Delete(To("acme~a0")).ok());
  EXPECT_EQ(two.manager().Count("acme~"), 2) << "deleted elsewhere, and still known here";
  {
    const std::lock_guard lock(contents->mutex);
    SessionRecord& reserved = contents->records["acme~reserved"];
    reserved.session_id = "acme~reserved";
    reserved.epoch = 1;
    reserved.owner = "three/x";
  }
  EXPECT_EQ(two.manager().Count("acme~"), 2) << "a name that has been reserved";
  absl::StatusOr<SessionManager::Begun> begun =
      two.manager().BeginTurn(To("acme~turn"), OnCancel::kRollback, true);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(two.manager().Count("acme~"), 3) << "made here, and not written yet";
  EXPECT_EQ(one.manager().Count("acme~"), 2);
  begun->turn.reset();
  ASSERT_TRUE(one.manager().Create("acme~brief", seconds(10), "", Durability::kSync).ok());
  EXPECT_EQ(two.manager().Count("acme~"), 3);
  two->clock.Advance(seconds(11));
  EXPECT_EQ(two.manager().Count("acme~"), 2) << "expired, with its record there still";
  EXPECT_FALSE(two.manager().Get("acme~a0").ok());
  ASSERT_TRUE(two.manager().Get("acme~a1").ok());
  two.store->down = true;
  EXPECT_EQ(two.manager().Count("acme~"), 1) << "out of reach: what is known here";
  two.store->down = false;
}

TEST(SessionSharedTest, APageLoadsItsOwnSessionsOnly) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  for (const char* id : {"acme~0", "acme~1"})  // expired by then
    ASSERT_TRUE(one.manager().Create(id, seconds(10), "", Durability::kSync).ok());
  MakeWritten(one, contents, 5);
  two->clock.Advance(seconds(11));
  TakeAsked(*contents);
  const auto page = [&](const std::string& prefix, const std::string& after, int limit) {
    std::string ids;
    const std::vector<SessionInfo> sessions = two.manager().List(prefix, after, limit).value();
    for (const SessionInfo& info : sessions) ids += info.session_id + " ";
    return ids;
  };
  EXPECT_EQ(page("acme~", "", 1), "acme~a0 ");
  EXPECT_EQ(TakeAsked(*contents), (Asked{1, 7}));
  EXPECT_EQ(page("acme~", "acme~a1", 2), "acme~a2 acme~a3 ");
  EXPECT_EQ(TakeAsked(*contents), (Asked{2, 7}));
  EXPECT_EQ(page("", "", 2), "acme z ") << "nobody's";
  EXPECT_EQ(TakeAsked(*contents).gets, 2);
}

TEST(SessionSharedTest, DeletionReachesEveryReplica) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(two.manager().Get("a").ok());
  ASSERT_TRUE(two.manager().Delete(To("a")).ok());
  EXPECT_EQ(one.manager().Get("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(one->Generate(To("a"), Prompt(0), 8, /*create=*/false).status.code(),
            absl::StatusCode::kNotFound);
  // During another's turn, too.
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  absl::StatusOr<SessionManager::Begun> begun =
      one.manager().BeginTurn(To("a", Durability::kSync), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok());
  GenerationRequest request;
  ASSERT_FALSE(begun->turn->Prepare({5}, false, request).value());
  ASSERT_TRUE(two.manager().Delete(To("a")).ok());
  const absl::Status status = begun->turn->Commit(std::nullopt, false, "").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(ReasonOf(status), "SESSION_LOST");
}

// ---- Owners that go ----

// After a takeover the next change leaves out what the former owner may have given out.
constexpr uint64_t kSkipped = 1000;
// A third of a lease.
constexpr milliseconds kUntilTakeovers{200};

TEST(SessionTakeoverTest, TheLastDurableRevisionIsTakenOver) {
  const std::vector<Bits> undisturbed = Undisturbed(2);
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica two("two", contents);
  {
    Replica one("one", contents);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    // Not durable, and not released.
    ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(5), 8).status.ok());
    EXPECT_EQ(contents->Record("a").owner.substr(0, 4), "one/");
    EXPECT_EQ(ReasonOf(two->Generate(To("a"), Prompt(1), 8).status), "SESSION_ELSEWHERE");
  }  // dies without a drain; its lease runs out
  Turned turned;
  ASSERT_TRUE(Eventually([&] {
    turned = two->Generate(To("a"), Prompt(1), 8);
    return turned.status.ok();
  })) << turned.status;
  EXPECT_EQ(turned.info.revision, 3u + kSkipped);
  EXPECT_EQ(turned.bits, undisturbed[1]);
  EXPECT_EQ(two.manager().stats().takeovers, 1u);
}

// All leases run out together when the store is away for longer than one lasts: nobody is dead for that.
TEST(SessionTakeoverTest, AfterAnOutageTheLivingKeepWhatIsTheirs) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(1), 8).status.ok());
  one.store->down = two.store->down = true;
  std::this_thread::sleep_for(milliseconds(700));
  // Two is the first to hear of it.
  two.store->down = false;
  std::thread back([&] {
    std::this_thread::sleep_for(milliseconds(50));
    one.store->down = false;
  });
  EXPECT_EQ(ReasonOf(two->Generate(To("a"), Prompt(2), 8).status), "SESSION_ELSEWHERE");
  back.join();
  const Turned turned = one->Generate(To("a", Durability::kSync), Prompt(2), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 4u);
  EXPECT_EQ(turned.info.durable_revision, 4u);
  EXPECT_EQ(two.manager().stats().takeovers, 0u);
}

// What a turn is told beforehand is what it commits.
TEST(SessionTakeoverTest, ATurnKnowsTheRevisionItWillMake) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica two("two", contents);
  {
    Replica one("one", contents);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(5), 8).status.ok());
  }
  absl::StatusOr<SessionManager::Begun> begun;
  ASSERT_TRUE(Eventually([&] {
    begun = two.manager().BeginTurn(To("a"), OnCancel::kRollback, false);
    return begun.ok();
  })) << begun.status();
  EXPECT_EQ(begun->turn->before().revision, 2u);
  EXPECT_EQ(begun->turn->next_revision(), 3u + kSkipped);
  GenerationRequest request;
  ASSERT_FALSE(begun->turn->Prepare({5}, false, request).value());
  const absl::StatusOr<SessionInfo> committed = begun->turn->Commit(std::nullopt, false, "");
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->revision, 3u + kSkipped);
}

TEST(SessionTakeoverTest, AnOwnerThatComesBackFindsOut) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("b", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("b", Durability::kNone), Prompt(1), 8).status.ok());
  absl::StatusOr<SessionManager::Begun> begun =
      one.manager().BeginTurn(To("a", Durability::kNone), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok());
  GenerationRequest request;
  ASSERT_FALSE(begun->turn->Prepare({5}, false, request).value());
  one.store->down = true;  // cut off until its lease has run out
  ASSERT_TRUE(
      Eventually([&] { return two->Generate(To("a", Durability::kSync), Prompt(2), 8).status.ok(); }));
  ASSERT_TRUE(
      Eventually([&] { return two->Generate(To("b", Durability::kSync), Prompt(2), 8).status.ok(); }));
  one.store->down = false;
  // At its commit, though it has a lease again meanwhile.
  ASSERT_TRUE(Eventually([&] {
    const std::lock_guard lock(contents->mutex);
    return std::any_of(contents->leases.begin(), contents->leases.end(), [](const auto& lease) {
      return lease.first.starts_with("one/") && lease.second.until > Clock::now();
    });
  }));
  const absl::Status status = begun->turn->Commit(std::nullopt, false, "").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(ReasonOf(status), "SESSION_LOST");
  begun->turn.reset();
  // At its next turn: it goes on from what the other one made.
  const Turned turned = one->Generate(To("b"), Prompt(3), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 4u + kSkipped);
  EXPECT_EQ(turned.info.tokens,
            3 * 8 + 30 + 110 + 150);  // of Prompt(0), (2) and (3): its own undurable turn is lost
  EXPECT_EQ(one->Get("a").revision, 3u + kSkipped);
}

// What was written only here is refused by the epoch, not only by good manners.
TEST(SessionTakeoverTest, AStaleOwnersWriteIsRefused) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(1), 8).status.ok());
  std::this_thread::sleep_for(kUntilTakeovers);
  {
    // The lease is lost behind its back; it renews it before it notices.
    const std::lock_guard lock(contents->mutex);
    std::erase_if(contents->leases, [](const auto& lease) { return lease.first.starts_with("one/"); });
  }
  const Turned taken = two->Generate(To("a", Durability::kSync), Prompt(2), 8);
  if (!taken.status.ok()) GTEST_SKIP() << "the lease was renewed in between";
  EXPECT_EQ(one.manager().Move("a", SessionTier::kShared).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(contents->Record("a").revision, 3u + kSkipped);
  EXPECT_EQ(one->Get("a").revision, 3u + kSkipped);
  EXPECT_EQ(one->Get("a").tokens, taken.info.tokens);
}

TEST(SessionTakeoverTest, ADrainLeavesEverythingToTheOthers) {
  const std::vector<Bits> undisturbed = Undisturbed(2);
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(one->Generate(To(Numbered("a", i), Durability::kNone), Prompt(0), 8).status.ok());
  }
  EXPECT_TRUE(one.manager().Drain(seconds(30)).empty());
  for (int i = 0; i < 10; ++i) {
    const Turned turned = two->Generate(To(Numbered("a", i)), Prompt(1), 8);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, undisturbed[1]);
  }
  EXPECT_EQ(two.manager().stats().takeovers, 0u);
  EXPECT_EQ(one.manager().BeginTurn(To("a0"), OnCancel::kRollback, false).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(SessionTakeoverTest, ARestartedReplicaTakesItsOwnBackAtOnce) {
  auto contents = std::make_shared<MemoryStoreContents>();
  {
    Replica one("one", contents);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(1), 8).status.ok());
    EXPECT_EQ(contents->Record("a").owner.substr(0, 4), "one/");
  }
  // Its clients may have been told of revision 3, which was not written.
  Replica one("one", contents);
  EXPECT_EQ(one->Generate(To("a"), Prompt(1), 8).info.revision, 3u + kSkipped);
}

// A takeover that comes to nothing does not make the former owner's revisions forgotten.
TEST(SessionTakeoverTest, WhatWasLostIsLeftOutByWhoeverGoesOnAtLast) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica two("two", contents), three("three", contents);
  {
    Replica one("one", contents);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(1), 8).status.ok());  // revision 3
  }
  ASSERT_TRUE(Eventually([&] {
    return two.manager().BeginTurn(To("a"), OnCancel::kRollback, false).ok();  // and drops it
  }));
  Turned turned;
  ASSERT_TRUE(Eventually([&] {
    turned = three->Generate(To("a"), Prompt(2), 8);
    return turned.status.ok();
  })) << turned.status;
  EXPECT_EQ(turned.info.revision, 3u + kSkipped);
  EXPECT_EQ(two.manager().stats().takeovers, 1u);
  ASSERT_TRUE(Released(contents, "a"));
  EXPECT_EQ(two->Generate(To("a"), Prompt(1), 8).info.revision, 4u + kSkipped);  // once is enough
}

// ---- Puts that arrive late ----

bool IsRelease(const SessionRecord& record) { return record.session_id == "a" && record.owner.empty(); }

TEST(SessionLatePutTest, AReleaseThatWasGivenUpDoesNotFreeWhatGoesOn) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  one.store->SetBeforePut([](const SessionRecord& record) { return !IsRelease(record); });
  const Turned unheard = one->Generate(To("a", Durability::kSync), Prompt(1), 8);
  ASSERT_TRUE(unheard.status.ok()) << unheard.status;
  EXPECT_EQ(unheard.info.durable_revision, 2u);
  absl::StatusOr<SessionManager::Begun> begun =
      one.manager().BeginTurn(To("a", Durability::kNone), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok()) << begun.status();
  one.store->DeliverLate();
  GenerationRequest request;
  ASSERT_FALSE(begun->turn->Prepare({5}, false, request).value());
  const absl::StatusOr<SessionInfo> committed = begun->turn->Commit(std::nullopt, false, "");
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->revision, 4u);
  begun->turn.reset();
  // Revision 4 has been given out here: nobody else may.
  const absl::Status elsewhere = two->Generate(To("a"), Prompt(2), 8).status;
  EXPECT_EQ(ReasonOf(elsewhere), "SESSION_ELSEWHERE") << elsewhere;
  one.store->SetBeforePut(nullptr);
  const absl::StatusOr<SessionInfo> written = one.manager().Move("a", SessionTier::kShared);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->durable_revision, 4u);
  EXPECT_EQ(two->Generate(To("a"), Prompt(2), 8).info.revision, 5u);
}

TEST(SessionLatePutTest, AReleaseThatWasCarriedOutUnheardIsTakenForOne) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  // So are the next ones, which are made in doubt of it.
  one.store->SetBeforePut([&](const SessionRecord& record) { return !IsRelease(record); });
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(1), 8).status.ok());
  one.store->DeliverLate();
  ASSERT_TRUE(Eventually([&] { return contents->Record("a").revision == 3; }));
  std::this_thread::sleep_for(milliseconds(150));  // one retry
  one.store->DeliverLate();
  one.store->SetBeforePut(nullptr);
  EXPECT_TRUE(Eventually([&] { return one->Get("a").durable_revision == 3; }));
  EXPECT_EQ(two->Generate(To("a"), Prompt(2), 8).info.revision, 4u);
}

TEST(SessionLatePutTest, AClaimThatWasGivenUpDoesNotComeBack) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  const uint64_t epoch = contents->Record("a").epoch;
  one.store->SetBeforePut([](const SessionRecord& record) { return !record.owner.starts_with("one/"); });
  EXPECT_EQ(one->Generate(To("a"), Prompt(1), 8).status.code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(Eventually([&] { return contents->Record("a").epoch > epoch; }));
  one.store->DeliverLate();
  EXPECT_EQ(contents->Record("a").owner, "");
  one.store->SetBeforePut(nullptr);
  EXPECT_TRUE(two->Generate(To("a"), Prompt(1), 8).status.ok());
}

// One that was made here and never written is not lost with its maker while that lives.
TEST(SessionLatePutTest, ANewSessionWhoseFirstWriteWasNotHeardOfGoesOn) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  one.store->SetBeforePut([](const SessionRecord& record) { return !IsRelease(record); });
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  EXPECT_EQ(contents->Record("a").revision, 0u);
  const Turned turned = one->Generate(To("a", Durability::kNone), Prompt(1), 8, /*create=*/false);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 3u);
  one.store->DeliverLate();
  one.store->SetBeforePut(nullptr);
  ASSERT_TRUE(one.manager().Move("a", SessionTier::kShared).ok());
  EXPECT_EQ(two->Generate(To("a"), Prompt(2), 8).info.revision, 4u);
}

// Between a takeover's look at the record and its claim, the owner that was thought dead writes.
TEST(SessionLatePutTest, AClaimDoesNotGoBackBehindWhatWasWritten) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("a", Durability::kNone), Prompt(1), 8).status.ok());
  std::atomic<bool> written{false};
  two.store->SetBeforePut([&](const SessionRecord& record) {
    if (!record.owner.starts_with("two/") || written.exchange(true)) return true;
    const absl::StatusOr<SessionInfo> moved = one.manager().Move("a", SessionTier::kShared);
    EXPECT_EQ(moved.ok() ? moved->durable_revision : 0, 3u) << moved.status();
    return true;
  });
  std::this_thread::sleep_for(kUntilTakeovers);
  {
    const std::lock_guard lock(contents->mutex);
    std::erase_if(contents->leases, [](const auto& lease) { return lease.first.starts_with("one/"); });
  }
  const Turned turned = two->Generate(To("a", Durability::kSync), Prompt(2), 8);
  if (!written) GTEST_SKIP() << "the lease was renewed in between";
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 4u);  // after 3, which was durable
  EXPECT_EQ(turned.info.tokens, 3 * 8 + 30 + 70 + 110);
}

// A first turn that fails leaves neither a session nor its name.
TEST(SessionSharedTest, ASessionForATurnThatFailsIsNotLeftBehind) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  absl::StatusOr<SessionManager::Begun> begun = one.manager().BeginTurn(To("a"), OnCancel::kRollback, true);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(contents->Record("a").owner.substr(0, 4), "one/");
  begun->turn.reset();
  EXPECT_TRUE(contents->Record("a").deleted);
  EXPECT_EQ(one.manager().Get("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(two->Generate(To("a"), Prompt(1), 8).info.revision, 2u);
}

// The claim of a record that names it must not be in the way.
TEST(SessionSharedTest, ASessionThatHasLostItsStateCanBeRewound) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica two("two", contents);
  {
    Replica one("one", contents);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    ASSERT_TRUE(one.manager().Mark(To("a", Durability::kSync), "m").ok());
    const std::string first = contents->Record("a").snapshots.at(0);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(1), 8).status.ok());
    const std::lock_guard lock(contents->mutex);
    std::erase_if(contents->snapshots, [&](const auto& snapshot) { return snapshot.first != first; });
  }
  const absl::Status damaged = two->Generate(To("a"), Prompt(2), 8).status;
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss) << damaged;
  EXPECT_TRUE(two->Get("a").damaged);
  EXPECT_EQ(two->Get("a").tier, SessionTier::kNone);
  ASSERT_TRUE(two.manager().Rewind(To("a", Durability::kSync), "m", std::nullopt).ok());
  EXPECT_FALSE(two->Get("a").damaged);
  const Turned turned = two->Generate(To("a", Durability::kSync), Prompt(1), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.durable_revision, turned.info.revision);
}

// ---- A store out of reach ----

TEST(SessionOutageTest, WhatIsOwnedGoesOnAndWhatIsNotIsUnavailable) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  ASSERT_TRUE(one->Generate(To("owned", Durability::kNone), Prompt(0), 8).status.ok());
  ASSERT_TRUE(one->Generate(To("released", Durability::kSync), Prompt(0), 8).status.ok());
  one.store->down = true;
  const Turned turned = one->Generate(To("owned", Durability::kSync), Prompt(1), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 3u);
  EXPECT_LT(turned.info.durable_revision, 3u);
  EXPECT_TRUE(one->Generate(To("owned"), Prompt(2), 8).status.ok());
  EXPECT_GE(one.manager().stats().dirty, 1);
  EXPECT_GT(one.manager().stats().store_errors, 0u);
  for (const absl::Status& status :
       {one->Generate(To("released"), Prompt(1), 8).status, one->Generate(To("unknown"), Prompt(1), 8).status,
        one.manager().Create("new", milliseconds(0), "", Durability::kAsync).status(),
        one.manager().Delete(To("owned"))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(ReasonOf(status), "STORE_UNAVAILABLE");
  }
  one.store->down = false;
  EXPECT_TRUE(Eventually([&] { return contents->Record("owned").revision == 4; }));
  EXPECT_TRUE(Released(contents, "owned"));
  EXPECT_TRUE(two->Generate(To("owned"), Prompt(3), 8).status.ok());
  EXPECT_TRUE(one->Generate(To("released"), Prompt(1), 8).status.ok());
}

TEST(SessionOutageTest, TheDiskKeepsWhatTheSharedStoreCannotTake) {
  auto contents = std::make_shared<MemoryStoreContents>();
  auto disk = std::make_shared<MemoryStoreContents>();
  const std::vector<Bits> undisturbed = Undisturbed(3);
  {
    Replica one("one", contents, {}, disk);
    ASSERT_TRUE(one->Generate(To("a", Durability::kSync), Prompt(0), 8).status.ok());
    absl::StatusOr<SessionManager::Begun> begun =
        one.manager().BeginTurn(To("a", Durability::kSync), OnCancel::kRollback, false);
    ASSERT_TRUE(begun.ok()) << begun.status();
    GenerationRequest request = SessionRequest(8);
    ASSERT_TRUE(begun->turn->Prepare(Prompt(1), true, request).value());
    one.store->down = true;
    const std::shared_ptr<Reader> reader = Reader::Make();
    const std::shared_ptr<Generation> generation = one->rig.Submit(request, reader);
    WaitBounded(*reader, *generation);
    const absl::StatusOr<SessionInfo> info = begun->turn->Commit(generation->TakeFinalState(), false, "");
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->durable_revision, 2u);
    begun->turn.reset();
    EXPECT_EQ(disk->Record("a").revision, 3u);
  }  // and dies
  Replica one("one", contents, {}, disk);
  const Turned turned = one->Generate(To("a", Durability::kSync), Prompt(2), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 4u + kSkipped);
  EXPECT_EQ(turned.bits, undisturbed[2]);
  EXPECT_EQ(contents->Record("a").revision, 4u + kSkipped);
}

TEST(SessionOutageTest, WithBothStoresWhatSinksRestsOnTheDisk) {
  auto contents = std::make_shared<MemoryStoreContents>();
  auto disk = std::make_shared<MemoryStoreContents>();
  const std::vector<Bits> undisturbed = Undisturbed(3);
  Replica one("one", contents, {}, disk), two("two", contents);
  ASSERT_TRUE(one->Generate(To("a"), Prompt(0), 8).status.ok());
  ASSERT_TRUE(Released(contents, "a"));
  ASSERT_TRUE(one.manager().Move("a", SessionTier::kDisk).ok());
  EXPECT_EQ(one->Get("a").tier, SessionTier::kDisk);
  EXPECT_EQ(one->Generate(To("a"), Prompt(1), 8).bits, undisturbed[1]);
  EXPECT_EQ(one.manager().stats().lifts_disk, 1u);
  ASSERT_TRUE(Released(contents, "a"));
  // Another replica goes on; what lies on the disk here is out of date and is not used.
  ASSERT_TRUE(one.manager().Move("a", SessionTier::kDisk).ok());
  ASSERT_TRUE(two->Generate(To("a", Durability::kSync), Prompt(2), 8).status.ok());
  EXPECT_EQ(one->Get("a").revision, 4u);
  EXPECT_TRUE(one->Generate(To("a"), Prompt(3), 8).status.ok());
  EXPECT_EQ(one->Get("a").revision, 5u);
}

// A claim or a release whose answer was lost.
TEST(SessionOutageTest, CallsThatWereCarriedOutUnheard) {
  auto contents = std::make_shared<MemoryStoreContents>();
  Replica one("one", contents), two("two", contents);
  one.store->failing_percent = 40;
  two.store->failing_percent = 40;
  int64_t tokens = 0;
  int done = 0;
  for (int attempt = 0; attempt < 300 && done < 20; ++attempt) {
    Replica& replica = attempt % 2 == 0 ? one : two;
    const Turned turned = replica->Append(To("a", Durability::kSync), {static_cast<TokenId>(3 + done)});
    if (!turned.status.ok()) {
      EXPECT_TRUE(absl::IsUnavailable(turned.status) || absl::IsAborted(turned.status)) << turned.status;
      continue;
    }
    ++done;
    EXPECT_GT(turned.info.tokens, tokens - 1);
    tokens = turned.info.tokens;
  }
  EXPECT_EQ(done, 20);
  one.store->failing_percent = 0;
  two.store->failing_percent = 0;
  ASSERT_TRUE(Eventually([&] { return two->Generate(To("a"), Prompt(0), 2).status.ok(); }));
  EXPECT_TRUE(Released(contents, "a"));
}

// ---- Redis ----

TEST(SessionRedisTest, TwoReplicasHandASessionOver) {
  EFLA_SKIP_WITHOUT_REDIS();
  RedisServer redis;
  const std::vector<Bits> undisturbed = Undisturbed(4);
  const auto replica = [&](const std::string& name) {
    SessionRigOptions options;
    options.sessions.replica = name;
    options.sessions.address = name + ":50051";
    options.shared = RedisStore::Create(redis.address(), {}).value();
    return std::make_unique<SessionRig>(std::move(options));
  };
  auto one = replica("one"), two = replica("two");
  for (int turn = 0; turn < 4; ++turn) {
    const Turned turned = (turn % 2 == 0 ? one : two)->Generate(To("a"), Prompt(turn), 8);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, undisturbed[turn]) << "turn " << turn;
  }
  EXPECT_TRUE(Eventually([&] { return one->Get("a").revision == 5; }));
  ASSERT_TRUE(one->manager->Delete(To("a")).ok());
  // It may be at the end of its own last write still, and goes by what it has while it is.
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(two->manager->Get("a").status()); }));
}

TEST(SessionRedisTest, ARedisThatIsKilledComesBack) {
  EFLA_SKIP_WITHOUT_REDIS();
  RedisServer redis({"--appendonly", "yes", "--appendfsync", "always"});
  SessionRigOptions options;
  options.sessions.replica = "one";
  options.shared = RedisStore::Create(redis.address(), {}).value();
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("owned", Durability::kNone), Prompt(0), 8).status.ok());
  redis.Kill();
  const Turned turned = s.Generate(To("owned", Durability::kSync), Prompt(1), 8);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_LT(turned.info.durable_revision, 3u);
  EXPECT_EQ(s.Generate("other", Prompt(1), 8).status.code(), absl::StatusCode::kUnavailable);
  redis.Start();
  EXPECT_TRUE(Eventually([&] { return s.Get("owned").durable_revision == 3; }));
  EXPECT_TRUE(Eventually([&] { return s.Generate("other", Prompt(1), 8).status.ok(); }));
}

}  // namespace
}  // namespace efla
