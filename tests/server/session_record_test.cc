#include "server/sessions/session_record.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace efla {
namespace {

SessionPayload Example() {
  SessionPayload payload;
  payload.weights_fingerprint = "w";
  payload.tokenizer_fingerprint = "t";
  payload.revision = 9;
  payload.head_since = 8;
  payload.created_unix_ms = 1'700'000'000'000;
  payload.ttl_ms = 60'000;
  payload.head = {
      .snapshot_id = "s1", .fed_tokens = 100, .waiting = {.pending_token = 5, .pending_prompt = {1, 2}}};
  payload.turns = {{1, 1, {}}, {2, 7, {.snapshot_id = "s0", .fed_tokens = 64, .waiting = {}}}};
  payload.marks = {{"here", 2, {.snapshot_id = "s0", .fed_tokens = 64, .waiting = {}}}};
  payload.replies = {{RecordedReply::Call::kTurn, "r1", 2, true, std::string("\0\xff binary", 9)},
                     {RecordedReply::Call::kFork, "r2", 8, false, ""}};
  return payload;
}

TEST(SessionRecordTest, ComesBackAsItWas) {
  const std::string bytes = SerializePayload(Example());
  const absl::StatusOr<SessionPayload> payload = ParsePayload(bytes);
  ASSERT_TRUE(payload.ok()) << payload.status();
  EXPECT_EQ(SerializePayload(*payload), bytes);
  EXPECT_EQ(payload->head.waiting.pending_token, 5);
  EXPECT_EQ(payload->turns.at(1).until, 7u);
  EXPECT_EQ(payload->replies.at(0).content, std::string("\0\xff binary", 9));
  EXPECT_FALSE(payload->replies.at(1).has_content);
}

TEST(SessionRecordTest, DamageIsFound) {
  const std::string bytes = SerializePayload(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(ParsePayload(bytes.substr(0, size)).status().code(), absl::StatusCode::kDataLoss) << size;
  }
  EXPECT_EQ(ParsePayload(bytes + "x").status().code(), absl::StatusCode::kDataLoss);
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string other = bytes;
    other[at] ^= 1;
    EXPECT_FALSE(ParsePayload(other).ok()) << at;
  }
}

TEST(SessionRecordTest, AnotherVersionIsNamed) {
  std::string bytes = SerializePayload(Example());
  bytes[4] = 2;
  const absl::Status status = ParsePayload(bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("version 2"), std::string::npos) << status;
}

TEST(SessionRecordTest, FieldsThatContradictEachOtherAreRefused) {
  const auto refused = [](const auto& spoil) {
    SessionPayload payload = Example();
    spoil(payload);
    return ParsePayload(SerializePayload(payload)).status().code() == absl::StatusCode::kDataLoss;
  };
  EXPECT_TRUE(refused([](SessionPayload& p) { p.revision = 0; }));
  EXPECT_TRUE(refused([](SessionPayload& p) { p.head_since = 10; }));
  EXPECT_TRUE(refused([](SessionPayload& p) { p.head.fed_tokens = 0; }));
  EXPECT_TRUE(refused([](SessionPayload& p) { p.head.snapshot_id = ""; }));
  EXPECT_TRUE(refused([](SessionPayload& p) { p.head.waiting.pending_prompt.resize(65); }));
  EXPECT_TRUE(refused([](SessionPayload& p) { p.turns[1].since = 8; }));
  EXPECT_FALSE(refused([](SessionPayload& p) {}));
}

TEST(SessionRecordTest, InfosComeBackAsTheyWere) {
  SessionInfo info;
  info.session_id = "a";
  info.revision = 7;
  info.tier = SessionTier::kHost;
  info.marks = {{"m", 3, 100}};
  info.turns = {1, 2};
  const absl::StatusOr<std::vector<SessionInfo>> infos = ParseInfos(SerializeInfos({info, SessionInfo{}}));
  ASSERT_TRUE(infos.ok()) << infos.status();
  ASSERT_EQ(infos->size(), 2u);
  EXPECT_EQ(infos->at(0).marks.at(0).tokens, 100);
  EXPECT_EQ(infos->at(0).tier, SessionTier::kHost);
  EXPECT_EQ(infos->at(0).turns, info.turns);
  EXPECT_FALSE(ParseInfos(SerializeInfos({info}).substr(1)).ok());
}

}  // namespace
}  // namespace efla
