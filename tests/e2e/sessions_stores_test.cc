// Sessions that outlive their server: restarts, crashes, a second server, a shared store that comes and goes.
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/session_calls.h"
#include "tests/server/redis_server.h"

namespace efla::e2e {
namespace {

constexpr uint32_t kVocabulary = 320;

Ids SomeIds(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Ids ids(count);
  for (uint32_t& id : ids) id = 3 + random() % (kVocabulary - 3);
  return ids;
}

v1::GenerateRequest SyncTurn(const std::string& session, const Ids& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request = TurnRequest(session, prompt, max_tokens);
  request.mutable_session()->set_durability(v1::DURABILITY_SYNC);
  return request;
}

class SessionsStoresTest : public ::testing::Test {
 protected:
  std::unique_ptr<ServerProcess> StartServer(const std::vector<std::string>& flags,
                                             const std::string& model = "efla_basic") {
    auto server = ServerProcess::Start(GoldenDir(model), flags);
    EXPECT_NE(server, nullptr);
    return server;
  }
  std::vector<std::string> DiskFlags() const { return {"--session-dir", folder_.path().string()}; }
  // What the third turn of TwoTurns gives where nothing has happened to the session.
  Reply Expected() {
    const auto server = StartServer({});
    SessionClient client(*server);
    TwoTurns(client, "s");
    return ThirdTurn(client, "s");
  }
  void TwoTurns(SessionClient& client, const std::string& id) {
    ASSERT_TRUE(client.Create(id).status.ok());
    const Reply first = client.Turn(id, SomeIds(70, 1), 9);
    ASSERT_TRUE(first.status.ok()) << ToString(first.status);
    ASSERT_TRUE(Generate(*client.generation, SyncOrNot(id, SomeIds(3, 2), 12)).status.ok());
  }
  v1::GenerateRequest SyncOrNot(const std::string& id, const Ids& prompt, uint32_t max_tokens) const {
    return sync_ ? SyncTurn(id, prompt, max_tokens) : TurnRequest(id, prompt, max_tokens);
  }
  static Reply ThirdTurn(SessionClient& client, const std::string& id) {
    return client.Turn(id, SomeIds(41, 3), 15);
  }
  // Exit status and last line of a server that is not to start.
  static ProgramResult FailingServer(const std::vector<std::string>& flags) {
    return RunProgram(ServerProcess::Command(GoldenDir("efla_basic"), flags));
  }

  TempDir folder_;
  bool sync_ = false;
};

// ---- The disk ----

TEST_F(SessionsStoresTest, ARestartChangesNoBit) {
  const Reply expected = Expected();
  std::string marked;
  {
    const auto server = StartServer(DiskFlags());
    SessionClient client(*server);
    for (const char* id : {"plain", "marked", "deleted"}) TwoTurns(client, id);
    ASSERT_TRUE(client.Mark("marked", "here").status.ok());
    ASSERT_TRUE(client.Turn("marked", SomeIds(200, 9), 9).status.ok());
    ASSERT_TRUE(client.Fork("plain", "child").status.ok());
    ASSERT_TRUE(client.Delete("deleted").ok());
    ASSERT_TRUE(client.Create("empty").status.ok());
    ASSERT_TRUE(client.Append("empty", SomeIds(5, 1)).status.ok());
    EXPECT_EQ(server->Terminate(), 0);
    EXPECT_NE(server->process().err().find("sessions are in their stores"), std::string::npos)
        << server->process().err();
  }
  const auto server = StartServer(DiskFlags());
  SessionClient client(*server);
  const auto found = client.Get("plain");
  ASSERT_TRUE(found.status.ok()) << ToString(found.status);
  EXPECT_EQ(found->revision(), 3u);
  EXPECT_EQ(found->durable_revision(), 3u);
  EXPECT_EQ(found->tier(), v1::TIER_DISK);
  EXPECT_EQ(client.Get("deleted").status.error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(client.Get("empty")->tokens(), 5u);
  ExpectSameTokens(expected, ThirdTurn(client, "plain"), "after a restart");
  ExpectSameTokens(expected, ThirdTurn(client, "child"), "a fork after a restart");
  ASSERT_TRUE(client.Rewind("marked", "here").status.ok());
  ExpectSameTokens(expected, ThirdTurn(client, "marked"), "rewound to a mark after a restart");
  ASSERT_TRUE(client.Rewind("plain").status.ok());
  ExpectSameTokens(expected, ThirdTurn(client, "plain"), "replayed");
}

TEST_F(SessionsStoresTest, ARepeatedRequestIsKnownAfterARestart) {
  v1::GenerateRequest request = SyncTurn("s", SomeIds(10, 1), 7);
  request.set_request_id("once");
  request.mutable_session()->set_create_if_missing(true);
  Reply first;
  {
    const auto server = StartServer(DiskFlags());
    SessionClient client(*server);
    first = Generate(*client.generation, request);
    ASSERT_TRUE(first.status.ok()) << ToString(first.status);
    server->process().Signal(SIGKILL);
    server->WaitForExit();
  }
  const auto server = StartServer(DiskFlags());
  SessionClient client(*server);
  const Reply again = Generate(*client.generation, request);
  EXPECT_TRUE(again.accepted.replayed());
  ExpectSameTokens(first, again, "the record");
  EXPECT_EQ(client.Get("s")->tokens(), 17u);
}

TEST_F(SessionsStoresTest, WhatWasAcknowledgedAsDurableSurvivesAKill) {
  std::mt19937 random(7);
  std::map<std::string, uint64_t> acknowledged;  // revision by session
  std::map<std::string, uint64_t> tokens;        // at that revision
  for (int round = 0; round < 4; ++round) {
    const auto server = StartServer(DiskFlags());
    {
      SessionClient client(*server);
      for (const auto& [id, revision] : acknowledged) {
        const auto found = client.Get(id);
        ASSERT_TRUE(found.status.ok()) << id << ": " << ToString(found.status);
        EXPECT_GE(found->revision(), revision) << id;
        if (found->revision() == revision) {
          EXPECT_EQ(found->tokens(), tokens[id]) << id;
        }
        ASSERT_TRUE(client.Turn(id, {}, 2).status.ok()) << id;
      }
    }
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        SessionClient client(*server);
        for (int turn = 0;; ++turn) {
          const std::string id = absl::StrFormat("s%d.%d", i, turn % 5);
          v1::GenerateRequest request = SyncTurn(id, SomeIds(1 + turn % 70, turn), 3);
          request.mutable_session()->set_create_if_missing(true);
          grpc::ClientContext context;
          SetTimeout(context, kCallTimeout);
          v1::CompleteResponse response;
          if (!client.generation->Complete(&context, request, &response).ok()) return;  // killed
          EXPECT_EQ(response.session().durable_revision(), response.session().revision());
          const std::scoped_lock lock(mutex);
          acknowledged[id] = response.session().revision();
          tokens[id] = response.session().tokens();
        }
      });
    }
    std::this_thread::sleep_for(milliseconds(300 + random() % 700));
    server->process().Signal(SIGKILL);
    for (std::thread& thread : threads) thread.join();
    server->WaitForExit();
    EXPECT_GT(acknowledged.size(), 3u);
  }
}

TEST_F(SessionsStoresTest, OneDirectoryHasOneServer) {
  const auto server = StartServer(DiskFlags());
  const ProgramResult second = FailingServer(DiskFlags());
  EXPECT_EQ(second.exit_status, 1);
  EXPECT_EQ(second.out, "");
  EXPECT_NE(second.err.find("--session-dir: the session folder " + folder_.path().string()),
            std::string::npos)
      << second.err;
  EXPECT_NE(second.err.find("is in use"), std::string::npos) << second.err;
}

TEST_F(SessionsStoresTest, ADirectoryThatCannotBeUsedIsNamed) {
  const std::string file = folder_.path() / "file";
  std::ofstream(file) << "x";
  const ProgramResult result = FailingServer({"--session-dir", file + "/sub"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_NE(result.err.find("--session-dir: "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(file + "/sub"), std::string::npos) << result.err;
}

TEST_F(SessionsStoresTest, AnotherModelsSessionsAreRefusedNotMistaken) {
  std::string snapshot;
  {
    const auto server = StartServer(DiskFlags());
    SessionClient client(*server);
    TwoTurns(client, "s");
    snapshot = client.Export("s").value;
    EXPECT_EQ(server->Terminate(), 0);
  }
  const auto other = StartServer(DiskFlags(), "gated_efla");
  SessionClient client(*other);
  const grpc::Status imported = client.Import("x", snapshot).status;
  EXPECT_EQ(imported.error_code(), grpc::FAILED_PRECONDITION) << ToString(imported);
  EXPECT_EQ(InfoOf(imported).reason, "SNAPSHOT_MISMATCH");
  const Reply turn = client.Turn("s", {5}, 2);
  EXPECT_FALSE(turn.status.ok()) << "it is another model's";
  EXPECT_TRUE(client.Create("mine", {5, 6, 7}).status.ok());
}

TEST_F(SessionsStoresTest, ASnapshotGoesFromServerToServer) {
  const Reply expected = Expected();
  const auto a = StartServer({}), b = StartServer({"--state-slots", "4", "--threads", "1"});
  SessionClient at_a(*a), at_b(*b);
  TwoTurns(at_a, "s");
  const auto snapshot = at_a.Export("s");
  ASSERT_TRUE(snapshot.status.ok()) << ToString(snapshot.status);
  const auto imported = at_b.Import("s", snapshot.value);
  ASSERT_TRUE(imported.status.ok()) << ToString(imported.status);
  ExpectSameTokens(expected, ThirdTurn(at_b, "s"), "on the other server");
  EXPECT_EQ(at_b.Get("s")->tokens(), 94u + 41 + 15);
}

// ---- A shared store ----

class SharedStoreTest : public SessionsStoresTest {
 protected:
  void SetUp() override {
    EFLA_SKIP_WITHOUT_REDIS();
    redis_ = std::make_unique<RedisServer>();
  }
  std::unique_ptr<ServerProcess> StartReplica(const std::string& name, std::vector<std::string> flags = {}) {
    flags.insert(flags.end(), {"--session-store", redis_->url(), "--replica-name", name});
    return StartServer(flags);
  }

  std::unique_ptr<RedisServer> redis_;
};

TEST_F(SharedStoreTest, EitherServerContinuesTheOthersSession) {
  const Reply expected = Expected();
  sync_ = true;
  const auto a = StartReplica("a"), b = StartReplica("b");
  SessionClient at_a(*a), at_b(*b);
  TwoTurns(at_a, "s");
  const auto seen = at_b.Get("s");
  ASSERT_TRUE(seen.status.ok()) << ToString(seen.status);
  EXPECT_EQ(seen->revision(), 3u);
  const Reply third = ThirdTurn(at_b, "s");
  ExpectSameTokens(expected, third, "continued by the other server");
  EXPECT_EQ(third.finished.session().revision(), 4u);

  // And to and fro, turn by turn: revisions go on without a gap, and both know the same.
  for (int turn = 0; turn < 6; ++turn) {
    SessionClient& client = turn % 2 == 0 ? at_a : at_b;
    v1::GenerateRequest request = SyncTurn("s", SomeIds(5, turn), 4);
    request.mutable_session()->set_expected_revision(4 + turn);
    const Reply reply = Generate(*client.generation, request);
    ASSERT_TRUE(reply.status.ok()) << turn << ": " << ToString(reply.status);
    EXPECT_EQ(reply.finished.session().revision(), 5u + turn);
  }
  EXPECT_EQ(at_a.Get("s")->revision(), 10u);
  EXPECT_EQ(at_b.Get("s")->tokens(), at_a.Get("s")->tokens());
  v1::ListSessionsRequest list;
  EXPECT_EQ(at_b.List(list)->sessions_size(), 1);
}

TEST_F(SharedStoreTest, ASessionUnderWayElsewhereIsNamedWithItsServer) {
  sync_ = true;
  const auto a = StartReplica("a", {"--advertise", "replica-a.example:50051"}), b = StartReplica("b");
  SessionClient at_a(*a), at_b(*b);
  TwoTurns(at_a, "s");
  BackgroundStream running(a->NewChannel(), TurnRequest("s", {5}, 1'000'000));
  ASSERT_TRUE(running.WaitForEvents(3));
  const Reply refused = at_b.Turn("s", {5}, 2);
  EXPECT_EQ(refused.status.error_code(), grpc::UNAVAILABLE) << ToString(refused.status);
  ErrorInfo info = InfoOf(refused.status);
  EXPECT_EQ(info.reason, "SESSION_ELSEWHERE");
  EXPECT_EQ(info.metadata["address"], "replica-a.example:50051");
  EXPECT_TRUE(RetryDelaySeconds(refused.status));
  running.Cancel();
  running.Join();
  EXPECT_TRUE(Eventually([&] { return at_b.Turn("s", {5}, 2).status.ok(); })) << "released after the turn";
}

// A store that is full is not the client's limit: what this server owns goes on, and the rest is told to
// wait.
TEST_F(SharedStoreTest, AFullStoreIsToldFromALimitOfTheClients) {
  redis_ = std::make_unique<RedisServer>(std::vector<std::string>{"--maxmemory-policy", "noeviction"});
  const auto a = StartReplica("a");
  SessionClient client(*a);
  const auto limit_redis = [&](const std::string& bytes) {
    RunProgram({"/usr/bin/env", "redis-cli", "-p", std::to_string(redis_->port()), "CONFIG", "SET",
                "maxmemory", bytes});
  };
  v1::GenerateRequest turn = TurnRequest("owned", SomeIds(70, 1), 4);
  turn.mutable_session()->set_create_if_missing(true);
  turn.mutable_session()->set_durability(v1::DURABILITY_NONE);
  ASSERT_TRUE(Generate(*client.generation, turn).status.ok());
  limit_redis("100kb");
  turn.mutable_token_ids()->mutable_ids()->Truncate(3);
  const Reply owned = Generate(*client.generation, turn);
  EXPECT_TRUE(owned.status.ok()) << ToString(owned.status);
  turn.mutable_session()->set_session_id("new");
  const Reply refused = Generate(*client.generation, turn);
  EXPECT_EQ(refused.status.error_code(), grpc::UNAVAILABLE) << ToString(refused.status);
  EXPECT_EQ(InfoOf(refused.status).reason, "STORE_UNAVAILABLE");
  EXPECT_NE(refused.status.error_message().find("is full"), std::string::npos) << ToString(refused.status);
  limit_redis("0");
  EXPECT_TRUE(Eventually([&] { return Generate(*client.generation, turn).status.ok(); }));

  redis_->Kill();
  v1::ListSessionsRequest list;
  EXPECT_EQ(client.List(list).status.error_code(), grpc::UNAVAILABLE) << "half a list is none";
}

TEST_F(SharedStoreTest, ADrainedServersSessionsGoOnElsewhere) {
  const Reply expected = Expected();
  const auto a = StartReplica("a"), b = StartReplica("b");
  SessionClient at_b(*b);
  constexpr int kSessions = 20;
  {
    SessionClient at_a(*a);
    for (int i = 0; i < kSessions; ++i) {  // not durable before the drain
      v1::GenerateRequest first = TurnRequest(absl::StrFormat("s%d", i), SomeIds(70, 1), 9);
      first.mutable_session()->set_create_if_missing(true);
      first.mutable_session()->set_durability(v1::DURABILITY_NONE);
      ASSERT_TRUE(Generate(*at_a.generation, first).status.ok());
      v1::GenerateRequest second = TurnRequest(absl::StrFormat("s%d", i), SomeIds(3, 2), 12);
      second.mutable_session()->set_durability(v1::DURABILITY_NONE);
      ASSERT_TRUE(Generate(*at_a.generation, second).status.ok());
    }
  }
  EXPECT_EQ(a->Terminate(), 0);
  EXPECT_NE(a->process().err().find("sessions_drained"), std::string::npos) << a->process().err();
  for (int i = 0; i < kSessions; ++i) {
    ExpectSameTokens(expected, ThirdTurn(at_b, absl::StrFormat("s%d", i)), "after the drain");
  }
}

TEST_F(SharedStoreTest, AKilledServersDurableTurnsGoOnElsewhere) {
  const Reply expected = Expected();
  sync_ = true;
  const auto a = StartReplica("a"), b = StartReplica("b");
  {
    SessionClient at_a(*a);
    TwoTurns(at_a, "s");
  }
  a->process().Signal(SIGKILL);
  a->WaitForExit();
  SessionClient at_b(*b);
  Reply third;
  // The turn that was released goes on at once; what had been claimed waits for the lease to run out.
  ASSERT_TRUE(Eventually(
      [&] {
        third = ThirdTurn(at_b, "s");
        return third.status.error_code() != grpc::UNAVAILABLE;
      },
      seconds(30)));
  ExpectSameTokens(expected, third, "after the kill");
}

TEST_F(SharedStoreTest, AStoreThatIsGoneIsToldFromASessionThatIs) {
  sync_ = true;
  const auto a = StartReplica("a");
  SessionClient client(*a);
  TwoTurns(client, "s");
  redis_->Pause();
  const grpc::Status unknown = client.Get("never-seen").status;
  EXPECT_EQ(unknown.error_code(), grpc::UNAVAILABLE) << ToString(unknown);
  EXPECT_EQ(InfoOf(unknown).reason, "STORE_UNAVAILABLE");
  EXPECT_TRUE(RetryDelaySeconds(unknown));
  v1::GenerateRequest plain = TurnRequest("x", {5, 6}, 3);
  plain.clear_session();
  EXPECT_TRUE(Generate(*client.generation, plain).status.ok()) << "calls without sessions need no store";
  redis_->Resume();
  EXPECT_TRUE(Eventually([&] { return client.Turn("s", {5}, 2).status.ok(); }));
  EXPECT_EQ(client.Get("never-seen").status.error_code(), grpc::NOT_FOUND);
  const Metrics metrics = Metrics::Read(a->admin_address());
  EXPECT_GT(metrics.Sum("efla_session_store_errors_total"), 0);
}

TEST_F(SharedStoreTest, AStoreThatIsNotThereStopsTheStart) {
  const std::string url = redis_->url();
  redis_->Kill();
  const ProgramResult result = FailingServer({"--session-store", url});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_NE(result.err.find("--session-store"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(url.substr(std::string("redis://").size())), std::string::npos) << result.err;
}

TEST_F(SharedStoreTest, BothStoresTogether) {
  const Reply expected = Expected();
  sync_ = true;
  std::vector<std::string> flags = DiskFlags();
  {
    const auto a = StartReplica("a", flags);
    SessionClient client(*a);
    TwoTurns(client, "s");
    const auto on_disk = client.Move("s", v1::TIER_DISK);
    ASSERT_TRUE(on_disk.status.ok()) << ToString(on_disk.status);
    EXPECT_EQ(on_disk->tier(), v1::TIER_DISK);
    EXPECT_EQ(a->Terminate(), 0);
  }
  const auto again = StartReplica("a", flags);
  SessionClient client(*again);
  ExpectSameTokens(expected, ThirdTurn(client, "s"), "after a restart with both stores");
}

}  // namespace
}  // namespace efla::e2e
