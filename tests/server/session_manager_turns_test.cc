// Turns, forks, marks, rewinds, and repeated requests, on one machine without a store.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/sessions/session_record.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

std::vector<TokenId> Join(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

SessionChange To(const std::string& id, const std::string& request_id = "") {
  return ChangeOf(id, Durability::kAsync, request_id);
}

TEST(SessionTurnTest, TheFirstTurnIsAPlainCall) {
  SessionRig s;
  GenerationRequest request = SessionRequest(20);
  request.prompt = SomePrompt(100);
  const Bits plain = BitsOf(s.rig.Run(request));
  const Turned turned = s.Generate("a", SomePrompt(100), 20);
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.bits, plain);
  EXPECT_EQ(turned.info.revision, 2u);
  EXPECT_EQ(turned.info.tokens, 120);
  EXPECT_EQ(turned.info.waiting_tokens, 1);
  EXPECT_EQ(turned.info.tier, SessionTier::kDevice);
  EXPECT_EQ(turned.info.turns, std::vector<uint64_t>{1});
  EXPECT_FALSE(turned.info.busy);
}

TEST(SessionTurnTest, PiecesAndTheWholeGiveTheSameBits) {
  SessionRig s;
  const std::vector<TokenId> a = SomePrompt(50, 1), b = SomePrompt(70, 2), c = SomePrompt(3, 3);
  // After nothing, and after drawn tokens.
  for (const std::string kind : {"fresh", "going"}) {
    const std::string pieces = kind + "-pieces", whole = kind + "-whole";
    if (kind == "going") {
      ASSERT_EQ(s.Generate(pieces, SomePrompt(77, 9), 5).bits, s.Generate(whole, SomePrompt(77, 9), 5).bits);
    }
    for (const auto& piece : {a, b}) {
      const Turned appended = s.Append(pieces, piece);
      ASSERT_TRUE(appended.status.ok()) << appended.status;
    }
    const Turned in_pieces = s.Generate(pieces, c, 20), at_once = s.Generate(whole, Join(Join(a, b), c), 20);
    ASSERT_TRUE(in_pieces.status.ok()) << in_pieces.status;
    EXPECT_EQ(in_pieces.bits, at_once.bits);
    EXPECT_EQ(in_pieces.info.tokens, at_once.info.tokens);
  }
}

TEST(SessionTurnTest, AShortAppendComputesNothing) {
  SessionRig s;
  const int64_t steps = s.rig.counter.steps;
  ASSERT_TRUE(s.Append("a", SomePrompt(64)).status.ok());
  EXPECT_EQ(s.rig.counter.steps, steps);
  SessionInfo info = s.Get("a");
  EXPECT_EQ(info.tier, SessionTier::kNone);
  EXPECT_EQ(info.tokens, 64);
  EXPECT_EQ(info.waiting_tokens, 64);
  ASSERT_TRUE(s.Append("a", SomePrompt(1)).status.ok());
  info = s.Get("a");
  EXPECT_EQ(info.tokens, 65);
  EXPECT_EQ(info.waiting_tokens, 1);
  EXPECT_EQ(info.tier, SessionTier::kDevice);
}

TEST(SessionTurnTest, TurnsMayBeEmptyWhereSomethingWaits) {
  SessionRig s;
  const absl::StatusOr<SessionInfo> made = s.manager->Create("a", milliseconds(0), "", Durability::kAsync);
  ASSERT_TRUE(made.ok()) << made.status();
  const Turned nothing = s.Generate("a", {}, 5);
  EXPECT_EQ(nothing.status.code(), absl::StatusCode::kInvalidArgument) << nothing.status;
  EXPECT_EQ(s.Get("a").revision, 1u);
  const Bits at_once = s.Generate("b", SomePrompt(30), 10).bits;
  ASSERT_TRUE(s.Append("a", SomePrompt(30)).status.ok());
  const Turned first = s.Generate("a", {}, 4), then = s.Generate("a", {}, 6);
  ASSERT_TRUE(then.status.ok()) << then.status;
  Bits joined = first.bits;
  joined.drawn.insert(joined.drawn.end(), then.bits.drawn.begin(), then.bits.drawn.end());
  EXPECT_EQ(joined, at_once);  // going on without new tokens is the same generation
}

TEST(SessionTurnTest, AnEmptyAppendIsAChangeOfNothing) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(10), 3).status.ok());
  const Turned turned = s.Append("a", {});
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.info.revision, 3u);
  EXPECT_EQ(turned.info.tokens, 13);
}

// ---- Turns that do not end well ----

struct OpenTurn {
  std::unique_ptr<Turn> turn;
  std::shared_ptr<Reader> reader = Reader::Make();
  std::shared_ptr<Generation> generation;
};

OpenTurn BeginGenerating(SessionRig& s, const std::string& id, OnCancel on_cancel,
                         std::vector<TokenId> tokens, GenerationRequest request) {
  OpenTurn open;
  absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To(id), on_cancel, true);
  EXPECT_TRUE(begun.ok()) << begun.status();
  open.turn = std::move(begun->turn);
  EXPECT_TRUE(open.turn->Prepare(std::move(tokens), true, request).value());
  open.generation = s.rig.Submit(std::move(request), open.reader);
  return open;
}

TEST(SessionTurnTest, ACancelledTurnRollsBack) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  const HostBuffer before = s.manager->Export("a", "").value();
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kRollback, SomePrompt(30, 2), SessionRequest(100'000));
  ASSERT_TRUE(Eventually([&] { return open.generation->usage().completion_tokens > 3; }));
  open.generation->Cancel();
  EXPECT_EQ(WaitBounded(*open.reader, *open.generation).status.code(), absl::StatusCode::kCancelled);
  const absl::StatusOr<SessionInfo> info = open.turn->Commit(open.generation->TakeFinalState(), true, "");
  EXPECT_EQ(info.status().code(), absl::StatusCode::kAborted) << info.status();
  open.turn.reset();
  EXPECT_EQ(s.Get("a").revision, 2u);
  EXPECT_EQ(s.manager->Export("a", "").value(), before);
  EXPECT_TRUE(s.Generate("a", SomePrompt(3), 2).status.ok());
}

TEST(SessionTurnTest, ACancelledTurnMayKeepWhatItDrew) {
  SessionRig s;
  const Bits whole = s.Generate("b", SomePrompt(40), 60).bits;
  s.rig.device.Hold();
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kKeep, SomePrompt(40), SessionRequest(100'000));
  while (open.generation->usage().completion_tokens < 5) s.rig.device.LetStep();
  open.generation->Cancel();
  s.rig.device.Open();
  const Result result = WaitBounded(*open.reader, *open.generation);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kCancelled);
  std::optional<FinalState> state = open.generation->TakeFinalState();
  ASSERT_TRUE(state.has_value());
  const int64_t drawn = std::ssize(state->drawn);
  ASSERT_GE(drawn, 5);
  const absl::StatusOr<SessionInfo> info = open.turn->Commit(std::move(state), true, "");
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->tokens, 40 + drawn);
  open.turn.reset();
  const Turned rest = s.Generate("a", {}, 60 - drawn);
  ASSERT_TRUE(rest.status.ok()) << rest.status;
  const auto skipped = static_cast<int64_t>(whole.drawn.size()) * drawn / 60;
  EXPECT_EQ(rest.bits.drawn, decltype(whole.drawn)(whole.drawn.begin() + skipped, whole.drawn.end()));
}

TEST(SessionTurnTest, ATurnThatComputedNothingCommitsNothing) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  // A time budget that ends before the prompt has been computed.
  s.rig.device.Hold();
  GenerationRequest request = SessionRequest(10);
  request.time_budget = std::chrono::microseconds(1);
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kRollback, SomePrompt(1000, 2), request);
  std::this_thread::sleep_for(milliseconds(2));
  s.rig.device.Open();
  EXPECT_TRUE(WaitBounded(*open.reader, *open.generation).status.ok());
  const absl::StatusOr<SessionInfo> info = open.turn->Commit(open.generation->TakeFinalState(), false, "r");
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->revision, 2u);
  EXPECT_EQ(info->tokens, 25);
  open.turn.reset();
  EXPECT_FALSE(s.Get("a").busy);
}

TEST(SessionTurnTest, ATurnThatIsForgottenLeavesNoTrace) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  {
    OpenTurn open = BeginGenerating(s, "a", OnCancel::kKeep, SomePrompt(10), SessionRequest(5));
    WaitBounded(*open.reader, *open.generation);
  }
  EXPECT_EQ(s.Get("a").revision, 2u);
  EXPECT_FALSE(s.Get("a").busy);
}

TEST(SessionTurnTest, DeletionDuringATurnAbortsIt) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kKeep, SomePrompt(10), SessionRequest(5));
  WaitBounded(*open.reader, *open.generation);
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
  EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kNotFound);
  // Somebody else takes the name.
  const Turned other = s.Generate("a", SomePrompt(7), 2);
  ASSERT_TRUE(other.status.ok()) << other.status;
  const absl::Status status = open.turn->Commit(open.generation->TakeFinalState(), false, "").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(status), "SESSION_LOST");
  open.turn.reset();
  EXPECT_EQ(s.Get("a").tokens, 9);
}

// It does not run to its end for nobody.
TEST(SessionTurnTest, DeletionStopsTheTurn) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kKeep, SomePrompt(10), SessionRequest(1'000'000));
  std::atomic<int> stops{0};
  open.turn->OnLost([&] {
    ++stops;
    open.generation->Cancel();
  });
  EXPECT_TRUE(open.turn->Lost().ok());
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
  EXPECT_EQ(stops, 1);
  EXPECT_EQ(ReasonOf(open.turn->Lost()), "SESSION_LOST");
  EXPECT_EQ(WaitBounded(*open.reader, *open.generation).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReasonOf(open.turn->Commit(open.generation->TakeFinalState(), true, "").status()),
            "SESSION_LOST");
  // One that hears of it too late is told at once.
  absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("b"), OnCancel::kRollback, true);
  ASSERT_TRUE(begun.ok());
  ASSERT_TRUE(s.manager->Delete(To("b")).ok());
  begun->turn->OnLost([&] { ++stops; });
  EXPECT_EQ(stops, 2);
}

TEST(SessionTurnTest, ASessionForATurnThatFailsIsNotLeftBehind) {
  SessionRig s;
  for (const bool prepared : {false, true}) {
    absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("a"), OnCancel::kRollback, true);
    ASSERT_TRUE(begun.ok()) << begun.status();
    GenerationRequest request = SessionRequest(5);
    if (prepared) {
      ASSERT_TRUE(begun->turn->Prepare(SomePrompt(10), true, request).ok());
    }
    begun->turn.reset();
    EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kNotFound);
  }
  // Cancelled, and not kept.
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kRollback, SomePrompt(10), SessionRequest(1'000'000));
  open.generation->Cancel();
  WaitBounded(*open.reader, *open.generation);
  EXPECT_FALSE(open.turn->Commit(open.generation->TakeFinalState(), true, "").ok());
  EXPECT_EQ(s.manager->Get("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(s.manager->stats().sessions, 0);
  // One that was there before stays.
  ASSERT_TRUE(s.manager->Create("a", milliseconds(0), "", Durability::kAsync).ok());
  s.manager->BeginTurn(To("a"), OnCancel::kRollback, true).value().turn.reset();
  EXPECT_EQ(s.Get("a").revision, 1u);
  // And one whose first turn has come to something.
  ASSERT_TRUE(s.Generate("b", SomePrompt(10), 2).status.ok());
  EXPECT_EQ(s.Get("b").revision, 2u);
}

// ---- One writer ----

TEST(SessionTurnTest, ASecondWriterIsRefused) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("a"), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_TRUE(s.Get("a").busy);
  const std::vector<absl::Status> refusals = {
      s.manager->BeginTurn(To("a"), OnCancel::kRollback, true).status(),
      s.manager->Mark(To("a"), "m").status(), s.manager->Rewind(To("a"), "", std::nullopt).status(),
      s.manager->Fork(To("a"), {""}, "").status()};
  for (const absl::Status& status : refusals) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_EQ(ReasonOf(status), "SESSION_BUSY");
    EXPECT_EQ(GetSessionError(status)->metadata["revision"], "2");
  }
  EXPECT_TRUE(s.manager->Export("a", "").ok());  // looking is allowed
  begun->turn.reset();
  EXPECT_TRUE(s.manager->Mark(To("a"), "m").ok());
}

TEST(SessionTurnTest, AnotherRevisionThanExpectedIsRefused) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  SessionChange stale = To("a");
  stale.expected_revision = 1;
  const absl::Status status = s.Generate(stale, SomePrompt(2), 2).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(status), "REVISION_MISMATCH");
  EXPECT_EQ(GetSessionError(status)->metadata["revision"], "2");
  EXPECT_EQ(s.manager->Delete(stale).code(), absl::StatusCode::kAborted);
  stale.expected_revision = 2;
  EXPECT_TRUE(s.Generate(stale, SomePrompt(2), 2).status.ok());
  // What does not exist cannot be expected to have a revision.
  SessionChange absent = To("none");
  absent.expected_revision = 3;
  EXPECT_EQ(s.Generate(absent, SomePrompt(2), 2).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(s.manager->Get("none").status().code(), absl::StatusCode::kNotFound);
}

TEST(SessionTurnTest, WhatDoesNotExistIsNotMadeUnasked) {
  SessionRig s;
  const Turned turned = s.Generate(To("a"), SomePrompt(3), 3, /*create=*/false);
  EXPECT_EQ(turned.status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(turned.status), "SESSION_NOT_FOUND");
}

TEST(SessionTurnTest, NamesAreChecked) {
  SessionRig s;
  for (const std::string& id : {std::string(), std::string(129, 'a'), std::string("a b"), std::string("a/b"),
                                std::string("\xc3\xa4")}) {
    EXPECT_EQ(s.Generate(id, SomePrompt(3), 3).status.code(), absl::StatusCode::kInvalidArgument) << id;
    EXPECT_EQ(s.manager->Get(id).status().code(), absl::StatusCode::kInvalidArgument) << id;
  }
  EXPECT_TRUE(s.Generate(std::string(128, 'Z'), SomePrompt(3), 3).status.ok());
  EXPECT_EQ(s.manager->Mark(To(std::string(128, 'Z')), "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ---- Repeated requests ----

TEST(SessionRequestTest, ARepeatedTurnGetsTheRecordedReply) {
  SessionRig s;
  const Turned first = s.Generate(To("a", "r1"), SomePrompt(20), 5);
  ASSERT_TRUE(first.status.ok());
  const Turned again = s.Generate(To("a", "r1"), SomePrompt(20), 5);
  EXPECT_EQ(again.reply, "5 tokens of a");
  EXPECT_EQ(again.info.revision, 2u);
  // Even where the session has gone on, and whatever revision the repetition expects.
  ASSERT_TRUE(s.Generate(To("a", "r2"), SomePrompt(20), 5).status.ok());
  SessionChange stale = To("a", "r1");
  stale.expected_revision = 1;
  EXPECT_EQ(s.Generate(stale, SomePrompt(20), 5).reply, "5 tokens of a");
  EXPECT_EQ(s.Get("a").revision, 3u);
  // While another turn is under way, too.
  absl::StatusOr<SessionManager::Begun> begun = s.manager->BeginTurn(To("a"), OnCancel::kRollback, false);
  ASSERT_TRUE(begun.ok());
  EXPECT_EQ(s.Generate(To("a", "r2"), SomePrompt(20), 5).reply, "5 tokens of a");
  begun->turn.reset();
  // Only the last sixteen are known.
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(s.Append(To("a", Numbered("x", i)), {5}).status.ok());
  EXPECT_FALSE(s.Generate(To("a", "r1"), SomePrompt(20), 5).reply.has_value());
}

TEST(SessionRequestTest, ALongReplyIsRememberedWithoutItsContent) {
  SessionRig s;
  for (const auto& [id, bytes, kept] : {std::tuple("a", (256 << 10), true), {"b", (256 << 10) + 1, false}}) {
    absl::StatusOr<SessionManager::Begun> begun =
        s.manager->BeginTurn(To(id, "r"), OnCancel::kRollback, true);
    ASSERT_TRUE(begun.ok());
    GenerationRequest request;
    ASSERT_FALSE(begun->turn->Prepare({1, 2, 3}, false, request).value());
    ASSERT_TRUE(begun->turn->Commit(std::nullopt, false, std::string(bytes, 'x')).ok());
    begun->turn.reset();
    begun = s.manager->BeginTurn(To(id, "r"), OnCancel::kRollback, true);
    if (kept) {
      ASSERT_TRUE(begun.ok());
      EXPECT_EQ(begun->reply->size(), static_cast<size_t>(bytes));
    } else {
      EXPECT_EQ(begun.status().code(), absl::StatusCode::kAlreadyExists);
      EXPECT_NE(std::string(begun.status().message()).find("revision 2"), std::string::npos)
          << begun.status();
    }
  }
}

TEST(SessionRequestTest, RepeatedCallsOfEveryKind) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  const SessionInfo marked = s.manager->Mark(To("a", "m"), "here").value();
  EXPECT_EQ(s.manager->Mark(To("a", "m"), "here").value().revision, marked.revision);
  ASSERT_TRUE(s.Generate("a", SomePrompt(20), 5).status.ok());
  const SessionInfo rewound = s.manager->Rewind(To("a", "w"), "", std::nullopt).value();
  EXPECT_EQ(s.manager->Rewind(To("a", "w"), "", std::nullopt).value().revision, rewound.revision);
  EXPECT_EQ(s.Get("a").revision, rewound.revision);
  const std::vector<SessionInfo> children = s.manager->Fork(To("a", "f"), {"", ""}, "").value();
  const std::vector<SessionInfo> again = s.manager->Fork(To("a", "f"), {"", ""}, "").value();
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[1].session_id, children[1].session_id);
  EXPECT_EQ(s.manager->stats().sessions, 3);
  // One id may name requests of several kinds.
  EXPECT_TRUE(s.Generate(To("a", "m"), SomePrompt(2), 2).status.ok());

  const SessionInfo made = s.manager->Create("", milliseconds(0), "c", Durability::kAsync).value();
  EXPECT_EQ(s.manager->Create("", milliseconds(0), "c", Durability::kAsync).value().session_id,
            made.session_id);
  EXPECT_EQ(s.manager->Create("other", milliseconds(0), "c", Durability::kAsync).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(s.manager->Create("a", milliseconds(0), "d", Durability::kAsync).status().code(),
            absl::StatusCode::kAlreadyExists);
  const HostBuffer snapshot = s.manager->Export("a", "").value();
  const SessionInfo imported =
      s.manager->Import("", milliseconds(0), snapshot, "i", Durability::kAsync).value();
  EXPECT_EQ(s.manager->Import("", milliseconds(0), snapshot, "i", Durability::kAsync).value().session_id,
            imported.session_id);
  ASSERT_TRUE(s.manager->Delete(To("a", "x")).ok());
  EXPECT_TRUE(s.manager->Delete(To("a", "x")).ok());
  EXPECT_EQ(s.manager->Delete(To("a", "y")).code(), absl::StatusCode::kNotFound);
}

// Whatever has become of the session since.
TEST(SessionRequestTest, ARepetitionIsAnsweredWithWhatWasAnsweredThen) {
  auto contents = std::make_shared<MemoryStoreContents>();
  SessionRigOptions options;
  options.disk = std::make_unique<MemoryStore>(contents, false);
  SessionRig s(std::move(options));
  for (const Durability durability : {Durability::kNone, Durability::kSync}) {
    const std::string id = durability == Durability::kSync ? "sync" : "none";
    const auto change = [&](const char* request) { return ChangeOf(id, durability, request); };
    const auto call = [&](int kind) -> SessionInfo {
      switch (kind) {
        case 0:
          return s.manager->Create(id, milliseconds(0), id + "c", durability).value();
        case 1:
          return s.manager->Mark(change("m"), "here").value();
        case 2:
          return s.manager->Rewind(change("w"), "here", std::nullopt).value();
        default:
          return s.manager->Fork(change("f"), {id + "-child"}, "").value().at(0);
      }
    };
    std::vector<std::string> answers;
    for (int kind = 0; kind < 4; ++kind) {
      answers.push_back(SerializeInfos({call(kind)}));
      ASSERT_TRUE(s.Generate(id, SomePrompt(20), 5).status.ok());
    }
    ASSERT_TRUE(s.Generate(id + "-child", SomePrompt(20), 5).status.ok());
    ASSERT_TRUE(s.manager->Move(id, SessionTier::kDisk).ok());
    for (int kind = 0; kind < 4; ++kind) EXPECT_EQ(SerializeInfos({call(kind)}), answers[kind]) << id << kind;
  }
}

// ---- Fork, mark, rewind ----

TEST(SessionForkTest, ChildrenGoOnAsTheParentWould) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(100), 10).status.ok());
  const int slots = s.rig.pool->counts().live + s.rig.pool->counts().shared;
  const absl::StatusOr<std::vector<SessionInfo>> children = s.manager->Fork(To("a"), {"b", "", "d"}, "");
  ASSERT_TRUE(children.ok()) << children.status();
  EXPECT_EQ(s.rig.pool->counts().live + s.rig.pool->counts().shared, slots);  // no state was copied
  const Turned parent = s.Generate("a", SomePrompt(30, 2), 10);
  for (const SessionInfo& child : *children) {
    EXPECT_EQ(child.revision, 1u);
    EXPECT_EQ(child.tokens, 110);
    const Turned turned = s.Generate(child.session_id, SomePrompt(30, 2), 10);
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    EXPECT_EQ(turned.bits, parent.bits);
  }
  // Their ways part.
  const Turned one = s.Generate("b", SomePrompt(5, 3), 10), other = s.Generate("d", SomePrompt(5, 4), 10);
  EXPECT_NE(one.bits, other.bits);
  EXPECT_EQ(s.Get("a").revision, 3u);
}

TEST(SessionForkTest, AForkThatCannotBeWholeLeavesNothing) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(10), 2).status.ok());
  ASSERT_TRUE(s.Generate("taken", SomePrompt(10), 2).status.ok());
  EXPECT_EQ(s.manager->Fork(To("a"), {"b", "taken"}, "").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(s.manager->Get("b").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(s.manager->Fork(To("a"), {"b", "b"}, "").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s.manager->Fork(To("a"), {}, "").status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = s.manager->Fork(To("a"), {"b"}, "nowhere").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "MARK_NOT_FOUND");
  EXPECT_EQ(s.manager->stats().sessions, 2);
}

TEST(SessionRewindTest, AReplayGivesTheSameBits) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(100), 10).status.ok());  // 2
  ASSERT_TRUE(s.manager->Mark(To("a"), "start").ok());            // 3
  const Turned second = s.Generate("a", SomePrompt(20, 2), 10);   // 4
  const Turned third = s.Generate("a", SomePrompt(90, 3), 10);    // 5
  EXPECT_EQ(s.Get("a").turns, (std::vector<uint64_t>{1, 2, 4}));

  ASSERT_TRUE(s.manager->Rewind(To("a"), "", std::nullopt).ok());      // 6, as 4
  EXPECT_EQ(s.Generate("a", SomePrompt(90, 3), 10).bits, third.bits);  // 7
  const absl::StatusOr<SessionInfo> to_two = s.manager->Rewind(To("a"), "", 2);
  ASSERT_TRUE(to_two.ok()) << to_two.status();  // 8
  EXPECT_EQ(to_two->turns, std::vector<uint64_t>{1});
  EXPECT_EQ(s.Generate("a", SomePrompt(20, 2), 10).bits, second.bits);  // 9
  ASSERT_TRUE(s.manager->Rewind(To("a"), "start", std::nullopt).ok());  // 10
  EXPECT_EQ(s.Get("a").turns, std::vector<uint64_t>{1});
  EXPECT_EQ(s.Generate("a", SomePrompt(20, 2), 10).bits, second.bits);
  // Back to nothing at all.
  ASSERT_TRUE(s.manager->Rewind(To("a"), "", 1).ok());
  EXPECT_EQ(s.Get("a").tokens, 0);
  EXPECT_EQ(s.Get("a").tier, SessionTier::kNone);
  EXPECT_EQ(s.manager->Fork(To("a"), {"b"}, "start").value().at(0).tokens, 110);
  EXPECT_EQ(s.Generate("b", SomePrompt(20, 2), 10).bits, second.bits);
}

TEST(SessionRewindTest, OnlyWhatIsKeptCanBeReached) {
  SessionRigOptions options;
  options.sessions.max_kept_turns = 3;
  SessionRig s(std::move(options));
  for (uint32_t turn = 0; turn < 6; ++turn) ASSERT_TRUE(s.Generate("a", SomePrompt(5, turn), 2).status.ok());
  EXPECT_EQ(s.Get("a").turns, (std::vector<uint64_t>{4, 5, 6}));
  for (const uint64_t revision : {1, 3, 8, 99}) {
    const absl::Status status = s.manager->Rewind(To("a"), "", revision).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << revision;
    EXPECT_EQ(ReasonOf(status), "REVISION_NOT_KEPT");
  }
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(s.manager->Rewind(To("a"), "", std::nullopt).ok());
  EXPECT_EQ(s.manager->Rewind(To("a"), "", std::nullopt).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(s.manager->Rewind(To("a"), "m", 3).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s.manager->Rewind(To("a"), "m", std::nullopt).status().code(), absl::StatusCode::kNotFound);
}

TEST(SessionMarkTest, MarksMoveAndAreBounded) {
  SessionRigOptions options;
  options.sessions.max_marks = 2;
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.Generate("a", SomePrompt(5), 2).status.ok());
  ASSERT_TRUE(s.manager->Mark(To("a"), "x").ok());
  ASSERT_TRUE(s.manager->Mark(To("a"), "y").ok());
  const absl::Status full = s.manager->Mark(To("a"), "z").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), "SESSION_LIMIT");
  ASSERT_TRUE(s.Generate("a", SomePrompt(5), 2).status.ok());
  const absl::StatusOr<SessionInfo> moved = s.manager->Mark(To("a"), "x");
  ASSERT_TRUE(moved.ok()) << moved.status();
  ASSERT_EQ(moved->marks.size(), 2u);
  EXPECT_EQ(moved->marks[0].name, "x");
  EXPECT_EQ(moved->marks[0].tokens, 14);
  EXPECT_EQ(moved->marks[1].tokens, 7);
}

// ---- Export and import ----

TEST(SessionImportTest, AnImportGoesOnAsTheOriginalWould) {
  SessionRig from, to;
  ASSERT_TRUE(from.Generate("a", SomePrompt(100), 10).status.ok());
  ASSERT_TRUE(from.manager->Mark(To("a"), "m").ok());
  ASSERT_TRUE(from.Append("a", SomePrompt(40, 2)).status.ok());
  const HostBuffer head = from.manager->Export("a", "").value();
  const HostBuffer mark = from.manager->Export("a", "m").value();
  EXPECT_EQ(from.manager->Export("a", "n").status().code(), absl::StatusCode::kNotFound);
  const Bits after_head = from.Generate("a", SomePrompt(10, 3), 10).bits;
  ASSERT_TRUE(from.manager->Rewind(To("a"), "m", std::nullopt).ok());
  const Bits after_mark = from.Generate("a", SomePrompt(10, 3), 10).bits;

  const absl::StatusOr<SessionInfo> imported =
      to.manager->Import("x", milliseconds(0), head, "", Durability::kAsync);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->tier, SessionTier::kHost);
  EXPECT_EQ(imported->tokens, 150);
  EXPECT_EQ(imported->waiting_tokens, 41);
  EXPECT_EQ(to.manager->Export("x", "").value(), head);
  EXPECT_EQ(to.Generate("x", SomePrompt(10, 3), 10).bits, after_head);
  ASSERT_TRUE(to.manager->Import("y", milliseconds(0), mark, "", Durability::kAsync).ok());
  EXPECT_EQ(to.Generate("y", SomePrompt(10, 3), 10).bits, after_mark);
}

TEST(SessionImportTest, UnusableBytesMakeNoSession) {
  SessionRig s;
  ASSERT_TRUE(s.Generate("a", SomePrompt(100), 10).status.ok());
  HostBuffer bytes = s.manager->Export("a", "").value();
  bytes.data()[bytes.size() / 2] ^= std::byte{1};
  const absl::Status status = s.manager->Import("b", milliseconds(0), bytes, "", Durability::kAsync).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(ReasonOf(status), "SNAPSHOT_DAMAGED");
  EXPECT_FALSE(s.manager->Import("b", milliseconds(0), {}, "", Durability::kAsync).ok());
  EXPECT_EQ(s.manager->stats().sessions, 1);
}

// ---- Listing, limits, expiry ----

TEST(SessionListTest, PagesAreInOrderOfId) {
  SessionRig s;
  for (const char* id : {"b2", "a1", "b1", "b3", "c"}) {
    ASSERT_TRUE(s.manager->Create(id, milliseconds(0), "", Durability::kAsync).ok());
  }
  const auto list = [&](const std::string& prefix, const std::string& after, int limit) {
    std::string ids;
    const std::vector<SessionInfo> listed = s.manager->List(prefix, after, limit).value();
    for (const SessionInfo& info : listed) ids += info.session_id + " ";
    return ids;
  };
  EXPECT_EQ(list("", "", 10), "a1 b1 b2 b3 c ");
  EXPECT_EQ(list("", "", 2), "a1 b1 ");
  EXPECT_EQ(list("", "b1", 2), "b2 b3 ");
  EXPECT_EQ(list("b", "", 2), "b1 b2 ");
  EXPECT_EQ(list("b", "b2", 10), "b3 ");
  EXPECT_EQ(list("d", "", 10), "");
}

TEST(SessionLimitTest, SessionsAreBounded) {
  SessionRigOptions options;
  options.sessions.max_sessions = 2;
  SessionRig s(std::move(options));
  ASSERT_TRUE(s.manager->Create("a", milliseconds(0), "", Durability::kAsync).ok());
  ASSERT_TRUE(s.manager->Create("b", milliseconds(0), "", Durability::kAsync).ok());
  const absl::Status status = s.manager->Create("c", milliseconds(0), "", Durability::kAsync).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "SESSION_LIMIT");
  ASSERT_TRUE(s.manager->Delete(To("a")).ok());
  EXPECT_TRUE(s.manager->Create("c", milliseconds(0), "", Durability::kAsync).ok());
}

TEST(SessionLimitTest, ALongerLifeThanAllowedIsRefused) {
  SessionRigOptions options;
  options.sessions.max_ttl = milliseconds(1000);
  SessionRig s(std::move(options));
  for (const int ttl : {-1, 1001}) {
    EXPECT_EQ(s.manager->Create("a", milliseconds(ttl), "", Durability::kAsync).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(s.manager->Create("a", milliseconds(1000), "", Durability::kAsync).ok());
}

TEST(SessionExpiryTest, WhatIsNotUsedGoes) {
  SessionRig s;
  ASSERT_TRUE(s.manager->Create("short", milliseconds(1000), "", Durability::kAsync).ok());
  ASSERT_TRUE(s.manager->Create("long", milliseconds(10'000), "", Durability::kAsync).ok());
  ASSERT_TRUE(s.Generate("short", SomePrompt(5), 2).status.ok());
  s.clock.Advance(milliseconds(999));
  ASSERT_TRUE(s.Append("short", {5}).status.ok());  // used: another second
  s.clock.Advance(milliseconds(999));
  EXPECT_TRUE(s.manager->Get("short").ok());
  s.clock.Advance(milliseconds(1));
  EXPECT_EQ(s.manager->Get("short").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(s.manager->BeginTurn(To("short"), OnCancel::kRollback, false).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(Eventually([&] { return s.manager->stats().sessions == 1; }));
  EXPECT_TRUE(Eventually([&] { return s.rig.pool->counts().free == 8; }));
  EXPECT_TRUE(s.manager->Create("short", milliseconds(1000), "", Durability::kAsync).ok());
}

// ---- Draining ----

TEST(SessionDrainTest, ATurnThatIsUnderWayMayCommit) {
  SessionRig s;
  OpenTurn open = BeginGenerating(s, "a", OnCancel::kRollback, SomePrompt(10), SessionRequest(5));
  WaitBounded(*open.reader, *open.generation);
  std::vector<std::string> lost;
  std::thread drain([&] { lost = s.manager->Drain(milliseconds(30'000)); });
  EXPECT_TRUE(Eventually([&] {
    return ReasonOf(s.manager->Create("b", milliseconds(0), "", Durability::kAsync).status()) == "DRAINING" ||
           !s.manager->Delete(To("b")).ok();
  }));
  EXPECT_TRUE(open.turn->Commit(open.generation->TakeFinalState(), false, "").ok());
  open.turn.reset();
  drain.join();
  EXPECT_EQ(lost.front(), "a");  // there is no store
  EXPECT_EQ(s.manager->BeginTurn(To("a"), OnCancel::kRollback, false).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(s.manager->Get("a").ok());
}

TEST(SessionStartTest, OptionsAreChecked) {
  EngineRig rig({.slots = 2});
  const auto start = [&](const SessionOptions& options, std::unique_ptr<SessionStore> shared) {
    SnapshotFormat format({std::string(64, 'a'), "", "x"}, rig.model->config());
    return SessionManager::Start(*rig.engine, std::move(format), nullptr, std::move(shared), options)
        .status();
  };
  EXPECT_TRUE(start({}, nullptr).ok());
  SessionOptions wrong;
  wrong.max_sessions = 0;
  EXPECT_EQ(start(wrong, nullptr).code(), absl::StatusCode::kInvalidArgument);
  wrong = {};
  wrong.host_bytes = -1;
  EXPECT_EQ(start(wrong, nullptr).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start({}, std::make_unique<MemoryStore>(std::make_shared<MemoryStoreContents>(), true)).code(),
            absl::StatusCode::kInvalidArgument);  // without a name
  EngineRig small({.slots = 1});
  SnapshotFormat format({std::string(64, 'a'), "", "x"}, small.model->config());
  EXPECT_EQ(SessionManager::Start(*small.engine, std::move(format), nullptr, nullptr, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace efla
