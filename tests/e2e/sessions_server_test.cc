// Sessions on one server: every method, every refusal, and the same bits whichever way a context has gone.
#include <random>
#include <thread>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/session_calls.h"

namespace efla::e2e {
namespace {

constexpr uint32_t kVocabulary = 320;
constexpr uint32_t kEndless = 1'000'000;  // tokens: more than any test waits for

// Ids that depend on the seed alone.
Ids SomeIds(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Ids ids(count);
  for (uint32_t& id : ids) id = 3 + random() % (kVocabulary - 3);
  return ids;
}

Ids Joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class SessionsServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempDir();
    server_ = ServerProcess::Start(GoldenDir("efla_basic"),
                                   {"--session-dir", (folder_->path() / "sessions").string(), "--state-slots",
                                    "64", "--debug-poison"})
                  .release();
  }
  static void TearDownTestSuite() {
    delete server_;
    delete folder_;
    server_ = nullptr;
  }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    client_ = std::make_unique<SessionClient>(*server_);
    // A name of its own for each test: they share the server.
    name_ = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }

  void ExpectOk(const grpc::Status& status) { ASSERT_TRUE(status.ok()) << ToString(status); }
  static void ExpectError(const grpc::Status& status, grpc::StatusCode code, const std::string& reason,
                          const std::string& words = "") {
    EXPECT_EQ(status.error_code(), code) << ToString(status);
    EXPECT_EQ(InfoOf(status).reason, reason) << ToString(status);
    EXPECT_NE(status.error_message().find(words), std::string::npos) << words << ": " << ToString(status);
  }

  // A session of two turns, `id`; returns what its third turn is to give.
  void TwoTurns(const std::string& id) {
    ExpectOk(client_->Create(id).status);
    ExpectOk(client_->Turn(id, SomeIds(70, 1), 9).status);
    ExpectOk(client_->Turn(id, SomeIds(3, 2), 12).status);
  }
  Reply ThirdTurn(const std::string& id) { return client_->Turn(id, SomeIds(41, 3), 15); }
  // Of a session that has gone no way but ahead.
  Reply Expected() {
    TwoTurns(name_ + ".plain");
    return ThirdTurn(name_ + ".plain");
  }

  static TempDir* folder_;
  static ServerProcess* server_;
  std::unique_ptr<SessionClient> client_;
  std::string name_;
};

TempDir* SessionsServerTest::folder_ = nullptr;
ServerProcess* SessionsServerTest::server_ = nullptr;

// ---- What the methods do ----

TEST_F(SessionsServerTest, ASessionIsMadeReadListedAndDeleted) {
  const auto created = client_->Create(name_);
  ExpectOk(created.status);
  EXPECT_EQ(created->session_id(), name_);
  EXPECT_EQ(created->revision(), 1u);
  EXPECT_EQ(created->tokens(), 0u);
  EXPECT_EQ(created->tier(), v1::TIER_NONE);
  EXPECT_GT(created->created_unix_ms(), 0u);
  EXPECT_GT(created->expires_unix_ms(), created->created_unix_ms());
  ExpectError(client_->Create(name_).status, grpc::ALREADY_EXISTS, "SESSION_EXISTS", name_);
  EXPECT_EQ(client_->Get(name_)->revision(), 1u);
  const auto unnamed = client_->Create("");
  ExpectOk(unnamed.status);
  EXPECT_FALSE(unnamed->session_id().empty());

  ExpectOk(client_->Delete(name_));
  ExpectError(client_->Get(name_).status, grpc::NOT_FOUND, "SESSION_NOT_FOUND", name_);
  ExpectError(client_->Delete(name_), grpc::NOT_FOUND, "SESSION_NOT_FOUND");
  ExpectOk(client_->Create(name_).status);
}

TEST_F(SessionsServerTest, PagesHoldEverySessionOnceInOrder) {
  for (int i = 0; i < 25; ++i) ExpectOk(client_->Create(absl::StrFormat("page.%02d", i)).status);
  v1::ListSessionsRequest request;
  request.set_prefix("page.");
  request.set_page_size(10);
  std::vector<std::string> names;
  int pages = 0;
  do {
    const auto page = client_->List(request);
    ExpectOk(page.status);
    ASSERT_LE(page->sessions_size(), 10);
    for (const v1::Session& session : page->sessions()) names.push_back(session.session_id());
    request.set_page_token(page->next_page_token());
    ASSERT_LT(++pages, 10);
  } while (!request.page_token().empty());
  EXPECT_EQ(pages, 3);
  ASSERT_EQ(names.size(), 25u);
  for (int i = 0; i < 25; ++i) EXPECT_EQ(names[i], absl::StrFormat("page.%02d", i));
  request.set_page_size(1001);
  ExpectError(client_->List(request).status, grpc::INVALID_ARGUMENT, "", "page_size is 1001");
}

TEST_F(SessionsServerTest, ATurnsRepliesTellWhatTheSessionIs) {
  ExpectOk(client_->Create(name_).status);
  const Reply first = client_->Turn(name_, SomeIds(5, 1), 4);
  ExpectOk(first.status);
  EXPECT_EQ(first.accepted.session_revision(), 1u);
  EXPECT_FALSE(first.accepted.replayed());
  EXPECT_EQ(first.accepted.prompt_tokens(), 5u);
  const v1::SessionAfterTurn& after = first.finished.session();
  EXPECT_EQ(after.session_id(), name_);
  EXPECT_TRUE(after.committed());
  EXPECT_EQ(after.revision(), 2u);
  EXPECT_EQ(after.tokens(), 9u);
  EXPECT_EQ(after.tier(), v1::TIER_DEVICE);
  EXPECT_GT(after.expires_unix_ms(), 0u);
  const Reply second = client_->Turn(name_, {}, 3);
  ExpectOk(second.status);
  EXPECT_EQ(second.accepted.session_revision(), 2u);
  EXPECT_EQ(second.finished.usage().prompt_tokens(), 0u) << "what the session held before is not this turn's";
  EXPECT_EQ(second.finished.session().tokens(), 12u);
  EXPECT_EQ(client_->Get(name_)->tokens(), 12u);
}

TEST_F(SessionsServerTest, AFirstTurnIsWhatACallWithoutASessionGives) {
  const Ids prompt = SomeIds(150, 5);
  v1::GenerateRequest plain = TurnRequest("x", prompt, 20);
  plain.clear_session();
  const Reply alone = Generate(*client_->generation, plain);
  v1::GenerateRequest request = TurnRequest(name_, prompt, 20);
  request.mutable_session()->set_create_if_missing(true);
  const Reply turn = Generate(*client_->generation, request);
  ExpectSameTokens(alone, turn, "the first turn");
  // And goes on as if it had not been cut.
  plain.mutable_stopping()->set_max_tokens(40);
  const Reply longer = Generate(*client_->generation, plain);
  const Reply more = client_->Turn(name_, {}, 20);
  ASSERT_EQ(more.token_ids.size(), 20u);
  EXPECT_EQ(Joined(turn.token_ids, more.token_ids), longer.token_ids);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(SameBits(more.logprobs[i], longer.logprobs[20 + i])) << i;
}

TEST_F(SessionsServerTest, AppendedInPiecesOrAtOnceIsTheSame) {
  const Ids all = SomeIds(300, 6);
  ExpectOk(client_->Create(name_ + ".once", all).status);
  ExpectOk(client_->Create(name_ + ".pieces").status);
  size_t begin = 0;
  for (const size_t piece : {1, 63, 1, 64, 5, 100, 66}) {
    const auto appended =
        client_->Append(name_ + ".pieces", Ids(all.begin() + begin, all.begin() + begin + piece));
    ExpectOk(appended.status);
    EXPECT_EQ(appended->appended_tokens(), piece);
    begin += piece;
    EXPECT_EQ(appended->session().tokens(), begin);
  }
  ASSERT_EQ(begin, all.size());
  v1::GenerateRequest plain = TurnRequest("x", all, 12);
  plain.clear_session();
  const Reply alone = Generate(*client_->generation, plain);
  ExpectSameTokens(alone, client_->Turn(name_ + ".once", {}, 12), "created with everything");
  ExpectSameTokens(alone, client_->Turn(name_ + ".pieces", {}, 12), "appended in pieces");
}

TEST_F(SessionsServerTest, MaxTokensZeroAppends) {
  ExpectOk(client_->Create(name_).status);
  const Reply few = client_->Turn(name_, SomeIds(4, 1), 0);  // waits to be computed
  ExpectOk(few.status);
  EXPECT_EQ(few.finished.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(few.accepted.prompt_tokens(), 4u);
  EXPECT_EQ(few.finished.session().tokens(), 4u);
  const Reply many = client_->Turn(name_, SomeIds(196, 2), 0);
  ExpectOk(many.status);
  EXPECT_EQ(many.finished.session().tokens(), 200u);
  v1::GenerateRequest plain = TurnRequest("x", Joined(SomeIds(4, 1), SomeIds(196, 2)), 8);
  plain.clear_session();
  ExpectSameTokens(Generate(*client_->generation, plain), client_->Turn(name_, {}, 8), "after both");
}

TEST_F(SessionsServerTest, CompleteTakesATurnToo) {
  TwoTurns(name_);
  const Reply expected = Expected();
  v1::CompleteResponse response;
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  ExpectOk(client_->generation->Complete(&context, TurnRequest(name_, SomeIds(41, 3), 15), &response));
  EXPECT_EQ(Ids(response.token_ids().begin(), response.token_ids().end()), expected.token_ids);
  EXPECT_EQ(response.session().revision(), 4u);
  EXPECT_FALSE(response.replayed());
}

// ---- The same bits ----

TEST_F(SessionsServerTest, AForkGoesOnLikeItsParent) {
  const Reply expected = Expected();
  TwoTurns(name_);
  v1::ForkRequest fork;
  fork.set_session_id(name_);
  fork.set_count(3);
  const auto children = client_->Fork(fork);
  ExpectOk(children.status);
  ASSERT_EQ(children->children_size(), 3);
  for (const v1::Session& child : children->children()) {
    EXPECT_EQ(child.tokens(), client_->Get(name_)->tokens());
    ExpectSameTokens(expected, ThirdTurn(child.session_id()), "a child");
  }
  ExpectSameTokens(expected, ThirdTurn(name_), "the parent after its children");
  ExpectOk(client_->Delete(name_));
  EXPECT_TRUE(client_->Turn(children->children(0).session_id(), {}, 3).status.ok())
      << "a child without its parent";
}

TEST_F(SessionsServerTest, AMarkIsReturnedToAndForkedFrom) {
  const Reply expected = Expected();
  TwoTurns(name_);
  ExpectOk(client_->Mark(name_, "here").status);
  for (int turn = 0; turn < 12; ++turn) ExpectOk(client_->Turn(name_, SomeIds(7, 50 + turn), 5).status);
  ExpectOk(client_->Fork(name_, name_ + ".child", "here").status);
  ExpectSameTokens(expected, ThirdTurn(name_ + ".child"), "forked at the mark");
  const auto rewound = client_->Rewind(name_, "here");
  ExpectOk(rewound.status);
  EXPECT_EQ(rewound->tokens(), 94u);
  ASSERT_EQ(rewound->marks_size(), 1);
  EXPECT_EQ(rewound->marks(0).name(), "here");
  ExpectSameTokens(expected, ThirdTurn(name_), "rewound to the mark");
  ExpectError(client_->Rewind(name_, "nowhere").status, grpc::NOT_FOUND, "MARK_NOT_FOUND", "nowhere");
  ExpectError(client_->Fork(name_, "x", "nowhere").status, grpc::NOT_FOUND, "MARK_NOT_FOUND");
}

TEST_F(SessionsServerTest, ARewindTakesBackTheLastTurn) {
  const Reply expected = Expected();
  TwoTurns(name_);
  const uint64_t revision = client_->Get(name_)->revision();
  ExpectOk(client_->Turn(name_, SomeIds(100, 77), 30).status);
  ExpectOk(client_->Turn(name_, SomeIds(2, 78), 3).status);
  ExpectOk(client_->Rewind(name_).status);
  const auto twice = client_->Rewind(name_);
  ExpectOk(twice.status);
  EXPECT_EQ(twice->tokens(), 94u);
  ExpectSameTokens(expected, ThirdTurn(name_), "rewound twice");

  ExpectOk(client_->Turn(name_, SomeIds(2, 79), 3).status);
  v1::RewindRequest request;
  request.set_session_id(name_);
  request.set_revision(revision);
  const auto to_revision = client_->Rewind(request);
  // The rewinds above have cut the history off before that revision: it is kept, or refused by name.
  if (to_revision.status.ok()) {
    ExpectSameTokens(expected, ThirdTurn(name_), "rewound to a revision");
  } else {
    ExpectError(to_revision.status, grpc::OUT_OF_RANGE, "REVISION_NOT_KEPT");
  }
  request.set_revision(1'000'000);
  ExpectError(client_->Rewind(request).status, grpc::OUT_OF_RANGE, "REVISION_NOT_KEPT", "1000000");
  ExpectOk(client_->Create(name_ + ".new").status);
  ExpectError(client_->Rewind(name_ + ".new").status, grpc::OUT_OF_RANGE, "REVISION_NOT_KEPT");
}

TEST_F(SessionsServerTest, EachTierAndBackIsTheSame) {
  const Reply expected = Expected();
  for (const v1::Tier tier : {v1::TIER_HOST, v1::TIER_DISK, v1::TIER_DEVICE}) {
    const std::string id = name_ + "." + std::to_string(tier);
    TwoTurns(id);
    const auto moved = client_->Move(id, tier);
    ExpectOk(moved.status);
    EXPECT_EQ(moved->tier(), tier);
    EXPECT_EQ(client_->Get(id)->tier(), tier);
    ExpectSameTokens(expected, ThirdTurn(id), v1::Tier_Name(tier));
    EXPECT_EQ(client_->Get(id)->tier(), v1::TIER_DEVICE);
  }
  ExpectOk(client_->Move(name_ + ".plain", v1::TIER_DISK).status);
  EXPECT_EQ(client_->Move(name_ + ".plain", v1::TIER_HOST)->tier(), v1::TIER_HOST);
  ExpectError(client_->Move(name_ + ".plain", v1::TIER_SHARED).status, grpc::FAILED_PRECONDITION, "NO_STORE",
              "--session-store");
  ExpectError(client_->Move(name_ + ".plain", v1::TIER_NONE).status, grpc::INVALID_ARGUMENT, "", "tier is 1");
}

TEST_F(SessionsServerTest, ASnapshotGoesOnUnderAnotherName) {
  const Reply expected = Expected();
  TwoTurns(name_);
  ExpectOk(client_->Mark(name_, "here").status);
  const auto snapshot = client_->Export(name_);
  ExpectOk(snapshot.status);
  const auto imported = client_->Import(name_ + ".copy", snapshot.value);
  ExpectOk(imported.status);
  EXPECT_EQ(imported->tokens(), 94u);
  ExpectSameTokens(expected, ThirdTurn(name_ + ".copy"), "imported");
  ExpectOk(client_->Turn(name_, SomeIds(9, 9), 9).status);
  EXPECT_EQ(client_->Export(name_, "here").value, snapshot.value) << "a context's snapshot is its bytes";
  ExpectError(client_->Import(name_ + ".copy", snapshot.value).status, grpc::ALREADY_EXISTS,
              "SESSION_EXISTS");
  ExpectError(client_->Export(name_ + ".none").status, grpc::NOT_FOUND, "SESSION_NOT_FOUND");
  ExpectError(client_->Export(name_, "nowhere").status, grpc::NOT_FOUND, "MARK_NOT_FOUND");

  ExpectOk(client_->Create(name_ + ".empty").status);
  const auto empty = client_->Export(name_ + ".empty");
  ExpectOk(empty.status);
  ExpectOk(client_->Import(name_ + ".empty2", empty.value).status);
  EXPECT_EQ(client_->Get(name_ + ".empty2")->tokens(), 0u);
}

TEST_F(SessionsServerTest, ManySessionsTakeTurnsOnFewSlots) {
  const Reply expected = Expected();
  constexpr int kSessions = 150;  // 64 slots
  for (int i = 0; i < kSessions; ++i) {
    const std::string id = absl::StrFormat("%s.%d", name_, i);
    ExpectOk(client_->Create(id).status);
    ExpectOk(client_->Turn(id, SomeIds(70, 1), 9).status);
  }
  for (int i = 0; i < kSessions; ++i) {
    ExpectOk(client_->Turn(absl::StrFormat("%s.%d", name_, i), SomeIds(3, 2), 12).status);
  }
  for (int i = 0; i < kSessions; i += 7) {
    ExpectSameTokens(expected, ThirdTurn(absl::StrFormat("%s.%d", name_, i)), std::to_string(i));
  }
  for (int i = 0; i < kSessions; ++i) ExpectOk(client_->Delete(absl::StrFormat("%s.%d", name_, i)));
}

TEST_F(SessionsServerTest, APrefixFoundInTheCacheGivesTheSameBits) {
  const Ids prompt = SomeIds(400, 1234);
  v1::GenerateRequest request = TurnRequest("x", prompt, 10);
  request.clear_session();
  request.set_use_prefix_cache(false);
  const Reply cold = Generate(*client_->generation, request);
  EXPECT_EQ(cold.finished.usage().cached_tokens(), 0u);
  request.clear_use_prefix_cache();
  uint64_t cached = 0;
  for (int i = 0; i < 4; ++i) {
    const Reply warm = Generate(*client_->generation, request);
    ExpectSameTokens(cold, warm, "with the cache");
    cached = warm.finished.usage().cached_tokens();
  }
  EXPECT_GE(cached, 320u) << "of 400 tokens on the 64-token grid";
  EXPECT_LT(cached, 400u);
  request.set_cache_salt("another tenant");
  EXPECT_EQ(Generate(*client_->generation, request).finished.usage().cached_tokens(), 0u);
  request.set_use_prefix_cache(false);
  request.clear_cache_salt();
  EXPECT_EQ(Generate(*client_->generation, request).finished.usage().cached_tokens(), 0u);
  const Metrics metrics = Metrics::Read(server_->admin_address());
  EXPECT_GE(metrics.Sum("efla_prefix_cache_hits_total"), 1);
  EXPECT_GE(metrics.Sum("efla_prefix_cache_hit_tokens_total"), 320);
  EXPECT_GE(metrics.Sum("efla_prefix_cache_slots"), 1);
}

// ---- One writer ----

TEST_F(SessionsServerTest, ABusySessionRefusesOtherChanges) {
  TwoTurns(name_);
  const Reply expected = Expected();
  const uint64_t revision = client_->Get(name_)->revision();
  {
    BackgroundStream running(server_->NewChannel(), TurnRequest(name_, SomeIds(3, 9), kEndless));
    ASSERT_TRUE(running.WaitForEvents(3));
    EXPECT_TRUE(client_->Get(name_)->busy());
    for (const grpc::Status& status :
         {client_->Append(name_, {5}).status, client_->Turn(name_, {5}, 1).status,
          client_->Rewind(name_).status, client_->Mark(name_, "x").status}) {
      ExpectError(status, grpc::ABORTED, "SESSION_BUSY", name_);
      EXPECT_EQ(InfoOf(status).metadata["revision"], std::to_string(revision));
    }
    EXPECT_TRUE(client_->Export(name_).status.ok()) << "reading is no change";
    running.Cancel();
    EXPECT_EQ(running.Join().error_code(), grpc::CANCELLED);
  }
  client_->WaitUntilIdle(name_);
  EXPECT_EQ(client_->Get(name_)->revision(), revision) << "a cancelled turn leaves no trace";
  ExpectSameTokens(expected, ThirdTurn(name_), "after a cancelled turn");
}

TEST_F(SessionsServerTest, ATurnOfADeletedSessionIsLost) {
  TwoTurns(name_);
  BackgroundStream running(server_->NewChannel(), TurnRequest(name_, SomeIds(3, 9), kEndless));
  ASSERT_TRUE(running.WaitForEvents(3));
  ExpectOk(client_->Delete(name_));
  const auto deleted = std::chrono::steady_clock::now();
  ExpectError(running.Join(), grpc::ABORTED, "SESSION_LOST", name_);
  EXPECT_LT(std::chrono::steady_clock::now() - deleted, seconds(5)) << "it ran on for nobody";
  ExpectError(client_->Get(name_).status, grpc::NOT_FOUND, "SESSION_NOT_FOUND");
  ExpectOk(client_->Create(name_).status);
}

TEST_F(SessionsServerTest, AStaleRevisionIsRefusedAndNamed) {
  TwoTurns(name_);
  v1::GenerateRequest request = TurnRequest(name_, SomeIds(3, 9), 5);
  request.mutable_session()->set_expected_revision(2);
  const Reply stale = Generate(*client_->generation, request);
  ExpectError(stale.status, grpc::ABORTED, "REVISION_MISMATCH", "3");
  EXPECT_EQ(InfoOf(stale.status).metadata["revision"], "3");
  EXPECT_TRUE(stale.events.empty()) << "refused before any event";
  request.mutable_session()->set_expected_revision(3);
  EXPECT_TRUE(Generate(*client_->generation, request).status.ok());
  v1::AppendRequest append;
  append.set_session_id(name_);
  append.mutable_token_ids()->add_ids(5);
  append.set_expected_revision(3);
  ExpectError(client_->Append(append).status, grpc::ABORTED, "REVISION_MISMATCH");
  v1::RewindRequest rewind;
  rewind.set_session_id(name_);
  rewind.set_expected_revision(9);
  ExpectError(client_->Rewind(rewind).status, grpc::ABORTED, "REVISION_MISMATCH");
  EXPECT_EQ(client_->Get(name_)->revision(), 4u);
}

TEST_F(SessionsServerTest, ACancelledTurnMayKeepWhatItHadDrawn) {
  TwoTurns(name_);
  v1::GenerateRequest request = TurnRequest(name_, SomeIds(3, 9), kEndless);
  request.mutable_session()->set_on_cancel(v1::ON_CANCEL_KEEP);
  request.set_request_id("kept");
  {
    BackgroundStream running(server_->NewChannel(), request);
    ASSERT_TRUE(running.WaitForEvents(5));
    running.Cancel();
    running.Join();
  }
  client_->WaitUntilIdle(name_);
  ASSERT_TRUE(Eventually([&] { return client_->Get(name_)->revision() == 4; }));
  const uint64_t tokens = client_->Get(name_)->tokens();
  EXPECT_GT(tokens, 94u + 3) << "the prompt and what had been drawn";
  const Reply replayed = Generate(*client_->generation, request);
  ExpectOk(replayed.status);
  EXPECT_TRUE(replayed.accepted.replayed());
  EXPECT_EQ(replayed.finished.finish_reason(), v1::FINISH_REASON_CANCELLED);
  EXPECT_EQ(replayed.finished.session().revision(), 4u);
  EXPECT_EQ(replayed.finished.session().tokens(), tokens);
  EXPECT_LE(replayed.token_ids.size(), tokens - 97);
  EXPECT_GT(replayed.token_ids.size(), 0u);
  EXPECT_EQ(client_->Get(name_)->revision(), 4u) << "nothing was done again";
}

TEST_F(SessionsServerTest, ADeadlineCutsATurnAndLeavesNoTrace) {
  TwoTurns(name_);
  const Reply cut =
      Generate(*client_->generation, TurnRequest(name_, SomeIds(3, 9), kEndless), milliseconds(300));
  EXPECT_EQ(cut.status.error_code(), grpc::DEADLINE_EXCEEDED) << ToString(cut.status);
  client_->WaitUntilIdle(name_);
  EXPECT_EQ(client_->Get(name_)->revision(), 3u);
}

TEST_F(SessionsServerTest, ATimeBudgetEndsATurnWell) {
  TwoTurns(name_);
  v1::GenerateRequest request = TurnRequest(name_, SomeIds(3, 9), kEndless);
  request.set_time_budget_ms(200);
  const Reply reply = Generate(*client_->generation, request);
  ExpectOk(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_TIME_BUDGET);
  EXPECT_TRUE(reply.finished.session().committed());
  EXPECT_EQ(reply.finished.session().tokens(), 94 + 3 + reply.finished.usage().completion_tokens());
}

TEST_F(SessionsServerTest, ATurnThatFailsLeavesNoSessionBehind) {
  v1::GenerateRequest request = TurnRequest(name_, SomeIds(3, 9), kEndless);
  request.mutable_session()->set_create_if_missing(true);
  EXPECT_EQ(Generate(*client_->generation, request, milliseconds(300)).status.error_code(),
            grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return client_->Get(name_).status.error_code() == grpc::NOT_FOUND; }));
  // Nor does one that has nothing to feed.
  v1::GenerateRequest empty = TurnRequest(name_, {}, 2);
  empty.mutable_session()->set_create_if_missing(true);
  EXPECT_EQ(Generate(*client_->generation, empty).status.error_code(), grpc::INVALID_ARGUMENT);
  ExpectError(client_->Get(name_).status, grpc::NOT_FOUND, "SESSION_NOT_FOUND");
}

TEST_F(SessionsServerTest, ACreatesReplyTellsWhatItTook) {
  EXPECT_FALSE(client_->Create(name_)->has_usage());
  const auto first = client_->Create(name_ + ".1", SomeIds(200, 77));
  ExpectOk(first.status);
  EXPECT_EQ(first->usage().prompt_tokens(), 200u);
  EXPECT_EQ(first->usage().cached_tokens(), 0u);
  const auto second = client_->Create(name_ + ".2", SomeIds(200, 77));
  EXPECT_EQ(second->usage().cached_tokens(), 128u);
  EXPECT_FALSE(client_->Get(name_ + ".2")->has_usage());
}

// ---- Repeated requests ----

TEST_F(SessionsServerTest, ARepeatedTurnIsAnsweredWithItsRecord) {
  TwoTurns(name_);
  v1::GenerateRequest request = TurnRequest(name_, SomeIds(41, 3), 15);
  request.set_request_id("turn 3");
  request.mutable_session()->set_expected_revision(3);
  const Reply first = Generate(*client_->generation, request);
  ExpectOk(first.status);
  const Reply again = Generate(*client_->generation, request);
  ExpectSameTokens(first, again, "replayed");
  EXPECT_TRUE(again.accepted.replayed());
  EXPECT_EQ(again.events.size(), 3u) << "accepted, one delta, finished";
  EXPECT_EQ(again.accepted.seed(), first.accepted.seed());
  EXPECT_EQ(again.accepted.session_revision(), 3u);
  EXPECT_EQ(again.finished.finish_reason(), first.finished.finish_reason());
  EXPECT_EQ(again.finished.session().revision(), 4u);
  EXPECT_EQ(again.finished.session().tokens(), first.finished.session().tokens());
  EXPECT_EQ(again.finished.usage().completion_tokens(), 15u);
  ExpectOk(client_->Turn(name_, {}, 2).status);
  EXPECT_EQ(Generate(*client_->generation, request).finished.session().revision(), 4u)
      << "its own, not the last";

  v1::CompleteResponse whole;
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  ExpectOk(client_->generation->Complete(&context, request, &whole));
  EXPECT_TRUE(whole.replayed());
  EXPECT_EQ(Ids(whole.token_ids().begin(), whole.token_ids().end()), first.token_ids);
  EXPECT_EQ(client_->Get(name_)->revision(), 5u);
}

TEST_F(SessionsServerTest, EveryChangeMayBeRepeated) {
  v1::CreateSessionRequest create;
  create.set_session_id(name_);
  create.set_request_id("create");
  for (const uint32_t id : SomeIds(100, 4)) create.mutable_token_ids()->add_ids(id);
  ExpectOk(client_->Create(create).status);
  const auto created = client_->Create(create);
  ExpectOk(created.status);
  EXPECT_EQ(created->tokens(), 100u) << "once";
  v1::AppendRequest append;
  append.set_session_id(name_);
  append.set_request_id("append");
  append.mutable_token_ids()->add_ids(5);
  const auto appended = client_->Append(append);
  ExpectOk(appended.status);
  EXPECT_FALSE(appended->replayed());
  const auto again = client_->Append(append);
  ExpectOk(again.status);
  EXPECT_TRUE(again->replayed());
  EXPECT_EQ(again->appended_tokens(), 1u);
  EXPECT_EQ(again->session().tokens(), 101u);
  v1::GenerateRequest other = TurnRequest(name_, {5}, 2);
  other.set_request_id("append");
  ExpectError(Generate(*client_->generation, other).status, grpc::FAILED_PRECONDITION, "REQUEST_ID_REUSED");
  v1::ForkRequest fork;
  fork.set_session_id(name_);
  fork.set_request_id("fork");
  const std::string child = client_->Fork(fork)->children(0).session_id();
  EXPECT_FALSE(child.empty());
  EXPECT_EQ(client_->Fork(fork)->children(0).session_id(), child);
  ExpectOk(client_->Turn(name_, {}, 2).status);
  ExpectOk(client_->Turn(name_, {}, 2).status);
  v1::RewindRequest rewind;
  rewind.set_session_id(name_);
  rewind.set_request_id("rewind");
  const auto rewound = client_->Rewind(rewind);
  ExpectOk(rewound.status);
  ExpectOk(client_->Move(name_, v1::TIER_DISK).status);
  EXPECT_EQ(client_->Rewind(rewind)->SerializeAsString(), rewound->SerializeAsString());
  EXPECT_EQ(client_->Get(name_)->tokens(), 103u);
}

TEST_F(SessionsServerTest, AnAnswerTooLongToKeepIsNotMadeTwice) {
  ExpectOk(client_->Create(name_).status);
  v1::GenerateRequest request = TurnRequest(name_, {5, 6, 7}, 5000);
  request.mutable_output()->set_top_logprobs(5);
  request.set_request_id("long");
  const Reply reply = Generate(*client_->generation, request);
  ExpectOk(reply.status);
  EXPECT_EQ(reply.token_ids.size(), 5000u);
  ExpectError(Generate(*client_->generation, request).status, grpc::ALREADY_EXISTS, "RESULT_NOT_KEPT");
  EXPECT_EQ(client_->Get(name_)->tokens(), 5003u);
}

// ---- Refusals ----

TEST_F(SessionsServerTest, FieldsAreCheckedAndNamed) {
  const auto expect_field = [&](const grpc::Status& status, const std::string& words) {
    ExpectError(status, grpc::INVALID_ARGUMENT, "", words);
  };
  expect_field(client_->Create("a b").status, "session_id is \"a b\"");
  expect_field(client_->Create(std::string(129, 'x')).status,
               "session_id has 129 characters; the limit is 128");
  expect_field(client_->Get("").status, "session_id is empty");
  expect_field(client_->Append(name_, {}).status, "token_ids is empty");
  expect_field(client_->Append(name_, {kVocabulary}).status, "token_ids.ids[0] is 320");
  expect_field(client_->Mark(name_, "").status, "name is empty");
  expect_field(client_->Turn("..//", {5}, 1).status, "session.session_id");
  v1::ForkRequest fork;
  fork.set_session_id(name_);
  fork.set_count(257);
  expect_field(client_->Fork(fork).status, "count asks for 257 children; the limit is 256");
  fork.set_count(3);
  fork.add_child_ids("a");
  expect_field(client_->Fork(fork).status, "child_ids has 1 names; count is 3");
  fork.set_count(0);
  fork.add_child_ids("a");
  expect_field(client_->Fork(fork).status, "child_ids[1] is \"a\" a second time");
  v1::CreateSessionRequest create;
  create.set_ttl_ms(uint64_t{1} << 62);
  expect_field(client_->Create(create).status, "ttl_ms is 4611686018427387904");
  create.clear_ttl_ms();
  create.set_model("other");
  ExpectError(client_->Create(create).status, grpc::NOT_FOUND, "MODEL_NOT_FOUND");
  create.clear_model();
  create.set_text("text");
  ExpectError(client_->Create(create).status, grpc::FAILED_PRECONDITION, "NO_TOKENIZER");
  EXPECT_EQ(SendBytes(server_->NewChannel(), "/efla.v1.Sessions/Get", "\xff\xff").error_code(),
            grpc::INVALID_ARGUMENT);
  EXPECT_EQ(SendBytes(server_->NewChannel(), "/efla.v1.Sessions/Fork", "\xf8\x3f\x01").error_code(),
            grpc::UNIMPLEMENTED)
      << "a field of a newer version";
}

TEST_F(SessionsServerTest, WhatIsNotThereIsNotFound) {
  const std::string none = name_;
  for (const grpc::Status& status :
       {client_->Get(none).status, client_->Append(none, {5}).status, client_->Turn(none, {5}, 1).status,
        client_->Fork(none, none + ".c").status, client_->Mark(none, "m").status,
        client_->Rewind(none).status, client_->Delete(none), client_->Export(none).status,
        client_->Move(none, v1::TIER_HOST).status}) {
    ExpectError(status, grpc::NOT_FOUND, "SESSION_NOT_FOUND", none);
  }
}

TEST_F(SessionsServerTest, AnEmptySessionNeedsAPrompt) {
  ExpectOk(client_->Create(name_).status);
  ExpectError(client_->Turn(name_, {}, 5).status, grpc::INVALID_ARGUMENT, "",
              "is empty and so is the session");
  EXPECT_EQ(client_->Get(name_)->revision(), 1u);
  EXPECT_FALSE(client_->Get(name_)->busy());
}

TEST_F(SessionsServerTest, AFailedCreateLeavesNothing) {
  v1::CreateSessionRequest create;
  create.set_session_id(name_);
  create.mutable_token_ids()->add_ids(kVocabulary);
  EXPECT_EQ(client_->Create(create).status.error_code(), grpc::INVALID_ARGUMENT);
  ExpectError(client_->Get(name_).status, grpc::NOT_FOUND, "SESSION_NOT_FOUND");
  // Cut while it computes.
  create.mutable_token_ids()->Clear();
  for (const uint32_t id : SomeIds(400'000, 8)) create.mutable_token_ids()->add_ids(id);
  create.set_request_id(name_ + "-create");
  grpc::ClientContext context;
  SetTimeout(context, milliseconds(60));
  v1::Session session;
  EXPECT_EQ(client_->sessions->Create(&context, create, &session).error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return client_->Get(name_).status.error_code() == grpc::NOT_FOUND; }));
  // The request may be repeated, with what it was or in parts.
  create.mutable_token_ids()->mutable_ids()->Truncate(100);
  const auto again = client_->Create(create);
  ExpectOk(again.status);
  EXPECT_EQ(again->tokens(), 100u);
  const auto repeated = client_->Create(create);
  ExpectOk(repeated.status);
  EXPECT_EQ(repeated->revision(), again->revision());
}

TEST_F(SessionsServerTest, AnUnusedSessionExpires) {
  v1::CreateSessionRequest create;
  create.set_session_id(name_);
  create.set_ttl_ms(500);
  const auto created = client_->Create(create);
  ExpectOk(created.status);
  EXPECT_NEAR(
      static_cast<double>(created->expires_unix_ms()) - static_cast<double>(created->created_unix_ms()), 500,
      5);
  EXPECT_TRUE(Eventually([&] {
    std::this_thread::sleep_for(milliseconds(100));
    return client_->Get(name_).status.error_code() == grpc::NOT_FOUND;
  }));
}

TEST_F(SessionsServerTest, BytesThatAreNoGoodSnapshotAreRefused) {
  TwoTurns(name_);
  const std::string good = client_->Export(name_).value;
  ASSERT_GT(good.size(), 1000u);
  const auto import = [&](const std::string& bytes) {
    return client_->Import(name_ + ".copy", bytes).status;
  };
  ExpectError(import("not a snapshot at all"), grpc::INVALID_ARGUMENT, "NOT_A_SNAPSHOT");
  ExpectError(import(""), grpc::INVALID_ARGUMENT, "", "chunk is missing");
  for (const size_t at : {good.size() / 3, good.size() / 2, good.size() - 40}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    ExpectError(import(bad), grpc::DATA_LOSS, "SNAPSHOT_DAMAGED");
  }
  ExpectError(import(good.substr(0, good.size() / 2)), grpc::DATA_LOSS, "SNAPSHOT_DAMAGED");
  const grpc::Status large = import(good + std::string(size_t{64} << 20, 'x'));
  ExpectError(large, grpc::INVALID_ARGUMENT, "", "those of this model have at most");
  ExpectError(client_->Get(name_ + ".copy").status, grpc::NOT_FOUND, "SESSION_NOT_FOUND");
  ExpectOk(import(good));
}

TEST_F(SessionsServerTest, AnImportsMessagesHaveAnOrder) {
  const auto import = [&](const std::vector<v1::ImportRequest>& messages, const std::string& words) {
    ExpectError(client_->Import(messages).status, grpc::INVALID_ARGUMENT, "", words);
  };
  v1::ImportRequest options, chunk, empty, large;
  options.mutable_options()->set_session_id(name_);
  chunk.set_chunk("x");
  large.set_chunk(std::string((1 << 20) + 1, 'x'));
  import({chunk}, "chunk comes first");
  import({options, options}, "options come a second time");
  import({options, empty}, "exactly one is needed");
  import({options, large}, "has 1048577 bytes; it must have 1 to 1048576");
  options.mutable_options()->set_session_id("no good");
  import({options, chunk}, "options.session_id");
}

TEST_F(SessionsServerTest, AnImportThatIsLeftIsForgotten) {
  for (int i = 0; i < 100; ++i) {  // more than may be under way
    grpc::ClientContext context;
    v1::Session session;
    const auto writer = client_->sessions->Import(&context, &session);
    v1::ImportRequest part;
    part.mutable_options()->set_session_id(name_);
    writer->Write(part);
    part.set_chunk(std::string(1000, 'x'));
    writer->Write(part);
    context.TryCancel();
    EXPECT_FALSE(writer->Finish().ok());
  }
  TwoTurns(name_ + ".other");
  const std::string snapshot = client_->Export(name_ + ".other").value;
  ASSERT_TRUE(Eventually([&] { return client_->Import(name_, snapshot).status.ok(); }));
}

// ---- Afterwards ----

TEST_F(SessionsServerTest, MetricsKnowTheSessions) {
  const Metrics before = Metrics::Read(server_->admin_address());
  TwoTurns(name_);
  ExpectOk(client_->Move(name_, v1::TIER_DISK).status);
  ExpectOk(ThirdTurn(name_).status);
  const Metrics after = Metrics::Read(server_->admin_address());
  EXPECT_EQ(after.Sum("efla_sessions") - before.Sum("efla_sessions"), 1);
  EXPECT_EQ(after.Sum("efla_session_lifts_total", {"from=\"disk\""}) -
                before.Sum("efla_session_lifts_total", {"from=\"disk\""}),
            1);
  EXPECT_GT(after.Sum("efla_session_stored_bytes_total"), before.Sum("efla_session_stored_bytes_total"));
  EXPECT_EQ(after.Sum("efla_session_store_errors_total"), 0);
  EXPECT_EQ(after.TypeOf("efla_session_contexts"), "gauge");
  EXPECT_EQ(after.Sum("efla_grpc_calls_handled_total", {"method=\"Move\"", "code=\"OK\""}) -
                before.Sum("efla_grpc_calls_handled_total", {"method=\"Move\"", "code=\"OK\""}),
            1);
}

TEST(SessionsLimitsTest, LimitsAreNamed) {
  const auto server =
      ServerProcess::Start(GoldenDir("efla_basic"), {"--max-sessions", "3", "--state-slots", "8"});
  ASSERT_NE(server, nullptr);
  SessionClient client(*server);
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(client.Create(id, {5, 6, 7}).status.ok());
  const grpc::Status full = client.Create("d").status;
  EXPECT_EQ(full.error_code(), grpc::RESOURCE_EXHAUSTED) << ToString(full);
  EXPECT_EQ(InfoOf(full).reason, "SESSION_LIMIT");
  EXPECT_TRUE(RetryDelaySeconds(full));
  ASSERT_TRUE(client.Delete("b").ok());
  EXPECT_TRUE(client.Create("d").status.ok());

  const grpc::Status no_store = client.Append("a", {5}, v1::DURABILITY_SYNC).status;
  EXPECT_EQ(no_store.error_code(), grpc::FAILED_PRECONDITION) << ToString(no_store);
  EXPECT_EQ(InfoOf(no_store).reason, "NO_STORE");
  EXPECT_EQ(client.Get("a")->durable_revision(), 0u);
  EXPECT_EQ(client.Move("a", v1::TIER_DISK).status.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_TRUE(client.Move("a", v1::TIER_HOST).status.ok());
}

TEST(SessionsLimitsTest, IdleSessionsSinkByThemselves) {
  const TempDir folder;
  const auto server = ServerProcess::Start(
      GoldenDir("efla_basic"), {"--session-dir", folder.path().string(), "--session-device-idle", "0.2",
                                "--session-host-idle", "0.6"});
  ASSERT_NE(server, nullptr);
  SessionClient client(*server);
  ASSERT_TRUE(client.Create("a").status.ok());
  const Reply turn = client.Turn("a", SomeIds(70, 1), 9);
  ASSERT_TRUE(turn.status.ok());
  EXPECT_EQ(turn.finished.session().tier(), v1::TIER_DEVICE);
  EXPECT_TRUE(Eventually([&] { return client.Get("a")->tier() == v1::TIER_HOST; }));
  EXPECT_TRUE(Eventually([&] { return client.Get("a")->tier() == v1::TIER_DISK; }));
  EXPECT_EQ(client.Get("a")->durable_revision(), 2u);
  EXPECT_TRUE(client.Turn("a", {}, 3).status.ok());
  EXPECT_EQ(client.Get("a")->tokens(), 82u);
}

}  // namespace
}  // namespace efla::e2e
