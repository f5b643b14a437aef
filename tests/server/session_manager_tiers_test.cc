// Where states rest, what is durable when, and what a restart finds.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/sessions/disk_store.h"
#include "tests/model/scratch.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SessionChange To(const std::string& id, Durability durability = Durability::kAsync) {
  return ChangeOf(id, durability);
}

std::unique_ptr<DiskStore> OpenDisk(const ScratchDirectory& folder) {
  DiskStoreOptions options;
  options.folder = folder.path();
  absl::StatusOr<std::unique_ptr<DiskStore>> store = DiskStore::Open(options);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

bool Written(SessionRig& s) {
  return Eventually([&] { return s.manager->stats().dirty == 0; });
}

// Three turns of a conversation, with something in between.
constexpr int kTurns = 4;
std::vector<TokenId> Prompt(int turn) {
  constexpr int kLengths[kTurns] = {100, 37, 200, 1};
  return SomePrompt(kLengths[turn], static_cast<uint32_t>(turn + 1));
}
std::vector<Bits> Undisturbed() {
  SessionRig s;
  std::vector<Bits> bits;
  for (int turn = 0; turn < kTurns; ++turn) bits.push_back(s.Generate("a", Prompt(turn), 12).bits);
  return bits;
}

class SessionTierTest : public testing::TestWithParam<SessionTier> {};

TEST_P(SessionTierTest, ARestedSessionGoesOnBitForBit) {
  const std::vector<Bits> undisturbed = Undisturbed();
  ScratchDirectory folder;
  SessionRigOptions options;
  options.disk = OpenDisk(folder);
  options.sessions.replica = "r";
  if (GetParam() == SessionTier::kShared) {
    options.disk = nullptr;
    options.shared = std::make_unique<MemoryStore>(std::make_shared<MemoryStoreContents>(), true);
  }
  SessionRig s(std::move(options));
  for (int turn = 0; turn < kTurns; ++turn) {
    const Turned turned = s.Generate("a", Prompt(turn), 12);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, undisturbed[turn]) << "turn " << turn;
    const absl::StatusOr<SessionInfo> moved = s.manager->Move("a", GetParam());
    ASSERT_TRUE(moved.ok()) << moved.status();
    EXPECT_EQ(moved->tier, GetParam());
    EXPECT_EQ(moved->revision, turned.info.revision);
    EXPECT_TRUE(s.manager->CheckInvariants().ok()) << s.manager->CheckInvariants();
    if (GetParam() != SessionTier::kDevice) {
      EXPECT_TRUE(Eventually([&] { return s.rig.pool->counts().free == 8; }));
    }
  }
  // And back up without a turn.
  const absl::StatusOr<SessionInfo> lifted = s.manager->Move("a", SessionTier::kDevice);
  ASSERT_TRUE(lifted.ok()) << lifted.status();
  EXPECT_EQ(lifted->tier, SessionTier::kDevice);
  const SessionManager::Stats stats = s.manager->stats();
  const uint64_t lifts = GetParam() == SessionTier::kHost     ? stats.lifts_host
                         : GetParam() == SessionTier::kDisk   ? stats.lifts_disk
                         : GetParam() == SessionTier::kShared ? stats.lifts_shared
                                                              : 4;
  EXPECT_EQ(lifts, 4u);
}

std::string NameOf(const testing::TestParamInfo<SessionTier>& tier) {
  constexpr const char* kNames[] = {"None", "Device", "Host", "Disk", "Shared"};
  return kNames[static_cast<int>(tier.param)];
}
INSTANTIATE_TEST_SUITE_P(Tiers, SessionTierTest,
                         testing::Values(SessionTier::kDevice, SessionTier::kHost, SessionTier::kDisk,
                                         SessionTier::kShared),
                         NameOf);

TEST(SessionMoveTest, ATierThatIsNotThereIsRefused) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(5), 2).status.ok());
  for (const SessionTier tier : {SessionTier::kNone, SessionTier::kDisk, SessionTier::kShared}) {
    EXPECT_EQ(s.manager->Move("a", tier).status().code(), absl::StatusCode::kInvalidArgument);
  }
  ASSERT_TRUE(s.manager->Create("empty", milliseconds(0), "", Durability::kAsync).ok());
  EXPECT_EQ(s.manager->Move("empty", SessionTier::kDevice).value().tier, SessionTier::kNone);
}

// Up to host memory too, from where a turn lifts it without the disk.
TEST(SessionMoveTest, FromTheDiskToHostMemory) {
  ScratchDirectory folder;
  SessionRigOptions options;
  options.disk = OpenDisk(folder);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate("a", SomePrompt(70), 5).status.ok());
  ASSERT_EQ(s.manager->Move("a", SessionTier::kDisk).value().tier, SessionTier::kDisk);
  EXPECT_EQ(s.manager->Move("a", SessionTier::kHost).value().tier, SessionTier::kHost);
  EXPECT_EQ(s.manager->stats().contexts_host, 1);
  EXPECT_EQ(s.manager->stats().lifts_disk, 1u);
  ASSERT_TRUE(s.Generate("a", SomePrompt(3), 5).status.ok());
  EXPECT_EQ(s.manager->stats().lifts_disk, 1u);
  EXPECT_EQ(s.manager->stats().lifts_host, 1u);
}

TEST(SessionIdleTest, WhatIsIdleSinks) {
  ScratchDirectory folder;
  SessionRigOptions options;
  options.disk = OpenDisk(folder);
  SessionRig s(std::move(options));
  const Bits first = s.Generate("a", SomePrompt(70), 5).bits;
  ASSERT_TRUE(s.Generate("b", SomePrompt(70), 5).status.ok());
  EXPECT_EQ(s.Get("a").tier, SessionTier::kDevice);
  s.clock.Advance(seconds(15));
  EXPECT_TRUE(Eventually([&] { return s.Get("a").tier == SessionTier::kHost; }));
  EXPECT_TRUE(Eventually([&] { return s.rig.pool->counts().free == 8; }));
  EXPECT_GT(s.manager->stats().host_bytes, 0);
  s.clock.Advance(seconds(600));
  EXPECT_TRUE(Eventually([&] { return s.manager->stats().contexts_stored == 2; }));
  EXPECT_EQ(s.Get("a").tier, SessionTier::kDisk);
  EXPECT_EQ(s.manager->stats().host_bytes, 0);
  EXPECT_TRUE(s.Generate("a", SomePrompt(5), 5).status.ok());
  EXPECT_EQ(s.Get("a").tier, SessionTier::kDevice);
  EXPECT_EQ(s.Get("b").tier, SessionTier::kDisk);
}

TEST(SessionIdleTest, WithoutAStoreWhatIsIdleStaysInHostMemory) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(70), 5).status.ok());
  s.clock.Advance(seconds(3600));
  EXPECT_TRUE(Eventually([&] { return s.Get("a").tier == SessionTier::kHost; }));
  EXPECT_TRUE(s.Generate("a", SomePrompt(5), 5).status.ok());
}

// ---- Room ----

TEST(SessionRoomTest, ManySessionsShareFewSlots) {
  SessionRigOptions options;
  options.engine.slots = 3;
  SessionRig s(std::move(options));
  constexpr int kSessions = 12;
  std::vector<Bits> first, second;
  {
    SessionRig reference;
    for (int i = 0; i < kSessions; ++i) {
      first.push_back(reference.Generate(Numbered("a", i), SomePrompt(66, static_cast<uint32_t>(i)), 6).bits);
      second.push_back(reference.Generate(Numbered("a", i), SomePrompt(9, static_cast<uint32_t>(i)), 6).bits);
    }
  }
  for (int i = 0; i < kSessions; ++i) {
    const Turned turned = s.Generate(Numbered("a", i), SomePrompt(66, static_cast<uint32_t>(i)), 6);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, first[i]);
  }
  // All at once: more turns than slots, each of which needs two.
  std::vector<std::thread> threads;
  for (int i = 0; i < kSessions; ++i) {
    threads.emplace_back([&, i] {
      const Turned turned = s.Generate(Numbered("a", i), SomePrompt(9, static_cast<uint32_t>(i)), 6);
      EXPECT_TRUE(turned.status.ok()) << turned.status;
      EXPECT_EQ(turned.bits, second[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(s.manager->stats().sinks, 0u);
}

TEST(SessionRoomTest, RestingSessionsMakeWayForCalls) {
  SessionRigOptions options;
  options.engine.slots = 4;
  SessionRig s(std::move(options));
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(s.Generate(Numbered("a", i), SomePrompt(20), 3).status.ok());
  std::vector<std::shared_ptr<Reader>> readers;
  std::vector<std::shared_ptr<Generation>> generations;
  for (uint32_t i = 0; i < 8; ++i) {
    readers.push_back(Reader::Make());
    generations.push_back(s.rig.Submit(Greedy(SomePrompt(20, i), 30), readers.back()));
  }
  for (size_t i = 0; i < readers.size(); ++i) {
    EXPECT_TRUE(WaitBounded(*readers[i], *generations[i]).status.ok());
  }
}

TEST(SessionRoomTest, WithoutAStoreKeptTurnsGoFirst) {
  SessionRigOptions options;
  options.engine.slots = 4;
  options.sessions.host_bytes = 4 * 150'000;  // four states
  options.sessions.slot_wait = milliseconds(200);
  SessionRig s(std::move(options));
  const int64_t state_bytes = [&] {
    EXPECT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok());
    EXPECT_TRUE(s.manager->Move("a", SessionTier::kHost).ok());
    const int64_t bytes = s.manager->stats().host_bytes;
    return bytes;
  }();
  ASSERT_GT(state_bytes * 5, 4 * 150'000);
  ASSERT_LE(state_bytes * 4, 4 * 150'000);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok()) << i;
  EXPECT_LT(s.Get("a").turns.size(), 8u);
  EXPECT_GE(s.Get("a").turns.size(), 1u);
  // Heads stay: what does not fit is refused. Six states fit: four in host memory, two on the device.
  absl::Status refused;
  int sessions = 1;
  while (refused.ok() && sessions < 20) {
    refused = s.Generate(Numbered("b", sessions), SomePrompt(10), 2).status;
    sessions += refused.ok();
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(ReasonOf(refused), "SESSION_LIMIT");
  EXPECT_EQ(sessions, 6);
  // Those that are there go on: the new head takes the old one's place, and there is no undo.
  for (int i = 0; i < 12; ++i) {
    const std::string id = i % 2 == 0 ? "a" : "b3";
    const Turned turned = s.Generate(id, SomePrompt(10), 2);
    ASSERT_TRUE(turned.status.ok()) << id << ": " << turned.status;
    EXPECT_TRUE(turned.info.turns.empty());
  }
  // Not so where a mark stands on the old head: then both would stay.
  ASSERT_TRUE(s.manager->Mark(To("a"), "m").ok());
  EXPECT_EQ(ReasonOf(s.Generate("a", SomePrompt(10), 2).status), "SESSION_LIMIT");
  // One that comes to nothing leaves the old head.
  const uint64_t revision = s.Get("b3").revision;
  {
    absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("b3"), OnCancel::kRollback, false);
    ASSERT_TRUE(begun.ok());
    GenerationRequest request = SessionRequest(2);
    ASSERT_TRUE(begun->turn->Prepare(SomePrompt(10), true, request).value());
  }
  EXPECT_EQ(s.Get("b3").revision, revision);
  EXPECT_TRUE(s.manager->Export("b3", "").ok());
  EXPECT_TRUE(s.manager->Export("a", "").ok());
  EXPECT_LE(s.manager->stats().host_bytes, 4 * 150'000);
  // Calls without a session still run.
  EXPECT_TRUE(s.rig.Run(Greedy(SomePrompt(10), 5)).status.ok());
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
  EXPECT_TRUE(s.Generate("c", SomePrompt(10), 2).status.ok());
}

TEST(SessionRoomTest, WithAStoreMemoryIsNoLimit) {
  ScratchDirectory folder;
  SessionRigOptions options;
  options.engine.slots = 4;
  options.sessions.host_bytes = 2 * 150'000;
  options.disk = OpenDisk(folder);
  SessionRig s(std::move(options));
  std::vector<Bits> expected;
  {
    SessionRig reference;
    for (uint32_t i = 0; i < 20; ++i) {
      reference.Generate(Numbered("a", i), SomePrompt(20, i), 3);
      expected.push_back(reference.Generate(Numbered("a", i), SomePrompt(20, i + 50), 3).bits);
    }
  }
  for (uint32_t i = 0; i < 20; ++i) {
    // Even those that nobody asked to be written.
    const Turned turned = s.Generate(To(Numbered("a", i), i % 2 ? Durability::kNone : Durability::kAsync),
                                     SomePrompt(20, i), 3);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
  }
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(s.Generate(Numbered("a", i), SomePrompt(20, i + 50), 3).bits, expected[i]) << i;
  }
  EXPECT_LE(s.manager->stats().host_bytes, 2 * 150'000);
  EXPECT_GT(s.manager->stats().lifts_disk, 0u);
}

TEST(SessionRoomTest, NoSlotIsAnError) {
  SessionRigOptions options;
  options.engine.slots = 2;
  options.sessions.slot_wait = milliseconds(50);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok());
  ASSERT_TRUE(s.Generate("b", SomePrompt(10), 2).status.ok());
  absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("a"), OnCancel::kRollback, false);
  GenerationRequest holds = SessionRequest(5);
  ASSERT_TRUE(begun->turn->Prepare(SomePrompt(3), true, holds).value());
  const absl::Status status = s.Generate("b", SomePrompt(10), 2).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), "NO_STATE_SLOT");
  holds = {};
  begun->turn.reset();
  EXPECT_TRUE(s.Generate("b", SomePrompt(10), 2).status.ok());
}

// ---- Durability ----

TEST(SessionDurabilityTest, SyncIsDurableWithTheReply) {
  ScratchDirectory folder;
  SessionRigOptions options;
  options.disk = OpenDisk(folder);
  SessionRig s(std::move(options));
  const Turned turned = s.Generate(To("a", Durability::kSync), SomePrompt(10), 2);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.durable_revision, turned.info.revision);
  EXPECT_EQ(s.manager->Mark(To("a", Durability::kSync), "m").value().durable_revision, 3u);
  EXPECT_EQ(s.manager->Create("b", milliseconds(0), "", Durability::kSync).value().durable_revision, 1u);
  EXPECT_EQ(s.manager->Fork(To("a", Durability::kSync), {"c"}, "").value().at(0).durable_revision, 1u);
}

TEST(SessionDurabilityTest, NoneIsWrittenWhenItSinks) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("a", Durability::kNone), SomePrompt(10), 2).status.ok());
  ASSERT_TRUE(s.Generate(To("b", Durability::kAsync), SomePrompt(10), 2).status.ok());
  EXPECT_TRUE(Eventually([&] { return s.Get("b").durable_revision == 2; }));
  EXPECT_EQ(s.Get("a").durable_revision, 0u);
  EXPECT_EQ(contents->snapshot_puts, 1);
  EXPECT_EQ(s.manager->stats().dirty, 1);
  s.clock.Advance(seconds(600));
  EXPECT_TRUE(Eventually([&] { return s.Get("a").durable_revision == 2; }));
  EXPECT_TRUE(Eventually([&] { return s.Get("a").tier == SessionTier::kDisk; }));
}

TEST(SessionDurabilityTest, NoneIsWrittenByADrain) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("a", Durability::kNone), SomePrompt(10), 2).status.ok());
  EXPECT_TRUE(s.manager->Drain(seconds(30)).empty());
  EXPECT_EQ(contents->Record("a").revision, 2u);
}

// Of each turn's state once and nothing else worth mentioning.
TEST(SessionDurabilityTest, AStateIsWrittenOnce) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  constexpr int kWritten = 8;
  for (uint32_t turn = 0; turn < kWritten; ++turn) {
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(20, turn), 5).status.ok());
  }
  EXPECT_EQ(contents->snapshot_puts, kWritten);
  // Short appends, marks, rewinds and forks write records only; so does sinking what has been written.
  ASSERT_TRUE(s.Append(To("a", Durability::kSync), SomePrompt(20)).status.ok());
  ASSERT_TRUE(s.manager->Mark(To("a", Durability::kSync), "m").ok());
  ASSERT_TRUE(s.manager->Fork(To("a", Durability::kSync), {"b", "c"}, "").ok());
  ASSERT_TRUE(s.manager->Rewind(To("a", Durability::kSync), "", std::nullopt).ok());
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kDisk).ok());
  ASSERT_TRUE(s.manager->Move("b", SessionTier::kDisk).ok());
  EXPECT_EQ(contents->snapshot_puts, kWritten);
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kHost).ok());
  const double state_bytes = static_cast<double>(s.rig.pool->layout().state_bytes());
  const double written = static_cast<double>(s.manager->stats().stored_bytes);
  EXPECT_LE(written / kWritten / state_bytes, 1.05);
  EXPECT_GE(written / kWritten / state_bytes, 1.0);
}

TEST(SessionDurabilityTest, AFullStoreIsTriedAgain) {
  auto contents = std::make_shared<MemoryStoreContents>();
  auto store = std::make_unique<MemoryStore>(contents, false);
  MemoryStore& disk = *store;
  SessionRigOptions options;
  options.disk = std::move(store);
  SessionRig s(std::move(options));
  disk.full = true;
  const Turned turned = s.Generate(To("a", Durability::kSync), SomePrompt(10), 2);
  ASSERT_TRUE(turned.status.ok()) << turned.status;  // the turn stands
  EXPECT_EQ(turned.info.revision, 2u);
  EXPECT_EQ(turned.info.durable_revision, 0u);
  EXPECT_GT(s.manager->stats().store_errors, 0u);
  EXPECT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok());
  disk.full = false;
  EXPECT_TRUE(Eventually([&] { return s.Get("a").durable_revision == 3; }));
}

// A child lives on what only its parent's record named.
TEST(SessionDurabilityTest, AForkOutlivesItsParent) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  options.sessions.max_kept_turns = 0;
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(80), 5).status.ok());
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kDisk).ok());
  ASSERT_TRUE(s.manager->Fork(To("a", Durability::kNone), {"b"}, "").ok());
  const Bits parent = s.Generate(To("a", Durability::kSync), SomePrompt(5), 5).bits;
  contents->Sweep();
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
  EXPECT_TRUE(Written(s));
  contents->Sweep();
  ASSERT_TRUE(s.manager->Move("b", SessionTier::kDisk).ok());
  const Turned child = s.Generate("b", SomePrompt(5), 5);
  ASSERT_TRUE(child.status.ok()) << child.status;
  EXPECT_EQ(child.bits, parent);
}

TEST(SessionDurabilityTest, ASnapshotThatTheStoreLostIsPutAgain) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(80), 5).status.ok());
  {
    const std::lock_guard lock(contents->mutex);
    contents->snapshots.clear();
  }
  EXPECT_EQ(s.manager->Mark(To("a", Durability::kSync), "m").value().durable_revision, 3u);
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kDisk).ok());
  EXPECT_TRUE(s.Generate("a", SomePrompt(5), 5).status.ok());
}

TEST(SessionDurabilityTest, ALostSnapshotIsSaidSo) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(80), 5).status.ok());
  ASSERT_TRUE(s.manager->Move("a", SessionTier::kDisk).ok());
  {
    const std::lock_guard lock(contents->mutex);
    for (auto& [id, bytes] : contents->snapshots) bytes[bytes.size() / 2] ^= std::byte{1};
  }
  const absl::Status damaged = s.Generate("a", SomePrompt(5), 5).status;
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss) << damaged;
  EXPECT_EQ(ReasonOf(damaged), "SNAPSHOT_DAMAGED");
  EXPECT_TRUE(s.Get("a").damaged);
  EXPECT_TRUE(s.manager->List("", "", 10)->at(0).damaged);
  const absl::Status forked = s.manager->Fork(To("a"), {"child"}, "").status();
  EXPECT_EQ(forked.code(), absl::StatusCode::kDataLoss) << forked;
  EXPECT_EQ(s.manager->Get("child").status().code(), absl::StatusCode::kNotFound);
  // Nor does what needs no computing pretend.
  EXPECT_EQ(s.Append("a", {5}).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s.manager->Mark(To("a"), "m").status().code(), absl::StatusCode::kDataLoss);
  // What does not stand on it can still be reached.
  ASSERT_TRUE(s.manager->Rewind(To("a"), "", std::nullopt).ok());
  EXPECT_FALSE(s.Get("a").damaged);
  EXPECT_TRUE(s.Generate("a", SomePrompt(5), 5).status.ok());
  ASSERT_TRUE(Written(s));
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
}

TEST(SessionDurabilityTest, AMissingSnapshotIsKnownFromTheStart) {
  auto contents = std::make_shared<MemoryStoreContents>();
  {
    SessionRigOptions options;
    options.disk = std::make_unique<MemoryStore>(contents, false);
    SessionRig s(std::move(options));
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(80), 5).status.ok());
    ASSERT_TRUE(s.manager->Mark(To("a", Durability::kSync), "good").ok());
    const std::string good = contents->Record("a").snapshots.at(0);
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(80), 5).status.ok());
    ASSERT_TRUE(s.manager->Mark(To("a", Durability::kSync), "bad").ok());
    ASSERT_TRUE(s.Generate(To("b", Durability::kSync), SomePrompt(80), 5).status.ok());
    ASSERT_TRUE(s.Generate(To("c", Durability::kSync), SomePrompt(80), 5).status.ok());
    const std::string of_b = contents->Record("b").snapshots.at(0);
    const std::string of_c = contents->Record("c").snapshots.at(0);
    EXPECT_TRUE(s.manager->Drain(seconds(30)).empty());
    const std::lock_guard lock(contents->mutex);
    std::erase_if(contents->snapshots, [&](const auto& snapshot) {
      return snapshot.first != good && snapshot.first != of_b && snapshot.first != of_c;
    });
    contents->snapshots.at(of_c)[1000] ^= std::byte{1};
  }
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  EXPECT_TRUE(s.Get("a").damaged);
  EXPECT_EQ(s.Get("a").tier, SessionTier::kNone);
  EXPECT_FALSE(s.Get("b").damaged);
  EXPECT_EQ(s.Get("b").tier, SessionTier::kDisk);
  EXPECT_EQ(s.manager->Fork(To("b"), {"child"}, "").value().at(0).tier, SessionTier::kDisk);
  // One that is there and damaged is found out when it is read: children of it are not made.
  EXPECT_FALSE(s.Get("c").damaged);
  EXPECT_EQ(s.manager->Fork(To("c"), {"other"}, "").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(s.Get("c").damaged);
  EXPECT_EQ(s.manager->Get("other").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(s.manager->Rewind(To("a"), "bad", std::nullopt).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(s.manager->Rewind(To("a", Durability::kSync), "good", std::nullopt).ok());
  // The mark that is lost does not keep the rest from being written.
  const Turned turned = s.Generate(To("a", Durability::kSync), SomePrompt(5), 5);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.durable_revision, turned.info.revision);
}

// ---- Restart ----

TEST(SessionRestartTest, TheDiskBringsEverythingBack) {
  ScratchDirectory folder;
  std::vector<Bits> undisturbed = Undisturbed();
  HostBuffer exported;
  {
    SessionRigOptions options;
    options.disk = OpenDisk(folder);
    SessionRig s(std::move(options));
    SessionChange first = To("a");
    first.request_id = "r1";
    ASSERT_TRUE(s.Generate(first, Prompt(0), 12).status.ok());
    ASSERT_TRUE(s.manager->Mark(To("a"), "m").ok());
    ASSERT_TRUE(Written(s));  // else the kept turns are none of the record's
    ASSERT_TRUE(s.Generate("a", Prompt(1), 12).status.ok());
    ASSERT_TRUE(s.manager->Create("empty", milliseconds(5000), "c", Durability::kAsync).ok());
    ASSERT_TRUE(s.Append("waiting", SomePrompt(30)).status.ok());
    ASSERT_TRUE(s.Generate("gone", Prompt(1), 12).status.ok());
    ASSERT_TRUE(Written(s));
    ASSERT_TRUE(s.manager->Delete(To("gone")).ok());
    exported = s.manager->Export("a", "").value();
    EXPECT_TRUE(s.manager->Drain(seconds(30)).empty());
  }
  SessionRigOptions options;
  options.disk = OpenDisk(folder);
  SessionRig s(std::move(options));
  EXPECT_EQ(s.manager->stats().sessions, 3);
  EXPECT_EQ(s.manager->stats().dirty, 0);
  const SessionInfo info = s.Get("a");
  EXPECT_EQ(info.revision, 4u);
  EXPECT_EQ(info.durable_revision, 4u);
  EXPECT_EQ(info.tier, SessionTier::kDisk);
  EXPECT_EQ(info.turns, (std::vector<uint64_t>{1, 2}));
  ASSERT_EQ(info.marks.size(), 1u);
  EXPECT_EQ(s.manager->Export("a", "").value(), exported);
  SessionChange again = To("a");
  again.request_id = "r1";
  EXPECT_EQ(s.Generate(again, Prompt(0), 12).reply, "12 tokens of a");
  EXPECT_EQ(s.manager->Create("empty", milliseconds(5000), "c", Durability::kAsync).value().session_id,
            "empty");
  EXPECT_EQ(s.Get("waiting").waiting_tokens, 30);
  EXPECT_EQ(s.manager->Get("gone").status().code(), absl::StatusCode::kNotFound);
  // Bit for bit, from the head, and from the turn before it.
  EXPECT_EQ(s.Generate("a", Prompt(2), 12).bits, undisturbed[2]);
  ASSERT_TRUE(s.manager->Rewind(To("a"), "", 2).ok());
  EXPECT_EQ(s.Generate("a", Prompt(1), 12).bits, undisturbed[1]);
  ASSERT_TRUE(s.manager->Rewind(To("a"), "m", std::nullopt).ok());
  EXPECT_EQ(s.Generate("a", Prompt(1), 12).bits, undisturbed[1]);
}

TEST(SessionRestartTest, WithoutADrainWhatIsDurableIsThere) {
  auto contents = std::make_shared<MemoryStoreContents>();
  std::vector<Bits> undisturbed = Undisturbed();
  {
    SessionRigOptions options;
    options.disk = std::make_unique<MemoryStore>(contents, false);
    SessionRig s(std::move(options));
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), Prompt(0), 12).status.ok());
    ASSERT_TRUE(s.Generate(To("a", Durability::kNone), Prompt(3), 12).status.ok());
  }
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  EXPECT_EQ(s.Get("a").revision, 2u);
  EXPECT_EQ(s.Generate("a", Prompt(1), 12).bits, undisturbed[1]);
}

// Revisions that were given out and lost are not given out again.
TEST(SessionRestartTest, AfterAnUncleanEndRevisionsAreLeftOut) {
  constexpr uint64_t kSkipped = 1000;
  ScratchDirectory folder;
  const auto with_disk = [&] {
    SessionRigOptions options;
    options.disk = OpenDisk(folder);
    return options;
  };
  {
    SessionRig s(with_disk());
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), Prompt(0), 2).status.ok());
    ASSERT_TRUE(s.Generate(To("b", Durability::kSync), Prompt(0), 2).status.ok());
    EXPECT_EQ(s.Generate(To("a", Durability::kNone), Prompt(3), 2).info.revision, 3u);
  }  // dies
  {
    SessionRig s(with_disk());
    EXPECT_EQ(s.Get("a").revision, 2u);
    EXPECT_TRUE(s.manager->Drain(seconds(30)).empty());
  }  // is through, but has not gone on with either
  {
    SessionRig s(with_disk());
    EXPECT_EQ(s.Generate("a", Prompt(1), 2).info.revision, 3u + kSkipped);
    EXPECT_EQ(s.Generate("a", Prompt(1), 2).info.revision, 4u + kSkipped);
    EXPECT_EQ(s.Generate("b", Prompt(1), 2).info.revision, 3u + kSkipped);
    EXPECT_TRUE(s.manager->Drain(seconds(30)).empty());
  }
  {
    SessionRig s(with_disk());
    EXPECT_EQ(s.Generate("a", Prompt(1), 2).info.revision, 5u + kSkipped);
    EXPECT_EQ(s.Generate("new", Prompt(1), 2).info.revision, 2u);
  }
}

TEST(SessionRestartTest, ADeletedSessionMayComeAgainUnderItsName) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  for (int life = 0; life < 3; ++life) {
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(10), 2).status.ok());
    EXPECT_EQ(contents->Record("a").revision, 2u);
    EXPECT_FALSE(contents->Record("a").deleted);
    ASSERT_TRUE(s.manager->Delete(To("a")).ok());
    EXPECT_TRUE(contents->Record("a").deleted);
  }
  const uint64_t epoch = s.Generate(To("a", Durability::kSync), SomePrompt(10), 2).info.epoch;
  EXPECT_EQ(contents->Record("a").epoch, epoch);
  EXPECT_GT(contents->Record("a").epoch, 3u);
}

TEST(SessionRestartTest, AnotherModelsSessionsAreNamedAsSuch) {
  auto contents = std::make_shared<MemoryStoreContents>();
  {
    SessionRigOptions options;
    options.disk = std::make_unique<MemoryStore>(contents, false);
    SessionRig s(std::move(options));
    ASSERT_TRUE(s.Generate(To("a", Durability::kSync), SomePrompt(10), 2).status.ok());
  }
  EngineRig rig({});
  SnapshotFormat format({std::string(64, 'c'), std::string(64, 'b'), "cpu f32 test"}, rig.model->config());
  absl::StatusOr<std::unique_ptr<SessionManager>> manager = SessionManager::Start(
      *rig.engine, std::move(format), std::make_unique<MemoryStore>(contents, false), nullptr, {});
  ASSERT_TRUE(manager.ok()) << manager.status();
  const absl::Status status = (*manager)->Get("a").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(ReasonOf(status), "SNAPSHOT_MISMATCH");
  EXPECT_EQ((*manager)->Create("a", milliseconds(0), "", Durability::kAsync).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(SessionRestartTest, ExpiryGoesOnAcrossARestart) {
  auto contents = std::make_shared<MemoryStoreContents>();
  for (int round = 0; round < 2; ++round) {
    SessionRigOptions options;
    options.disk = std::make_unique<MemoryStore>(contents, false);
    SessionRig s(std::move(options));
    if (round == 0) {
      ASSERT_TRUE(s.manager->Create("a", seconds(3600), "", Durability::kSync).ok());
      continue;
    }
    EXPECT_TRUE(s.manager->Get("a").ok());
    s.clock.Advance(seconds(3601));
    EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kNotFound);
    EXPECT_TRUE(Eventually([&] { return contents->Record("a").deleted; }));
  }
}

}  // namespace
}  // namespace efla
