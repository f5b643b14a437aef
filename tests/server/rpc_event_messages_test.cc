#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/rpc/event_messages.h"
#include "tests/source_path.h"

namespace efla {
namespace {

TokenOutput Token(TokenId id, float logprob = 0) {
  TokenOutput token;
  token.token = id;
  token.logprob = logprob;
  return token;
}

DeltaEvent Delta(std::string text, TokenId id) {
  DeltaEvent delta;
  delta.text = std::move(text);
  delta.tokens = {Token(id)};
  return delta;
}

class EventMessagesTest : public testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    context_ = {
        .request_id = "r1", .model = "demo", .tokenizer = tokenizer_.get(), .logprobs = true, .seed = 42};
  }

  std::unique_ptr<const Tokenizer> tokenizer_;
  ReplyContext context_;
};

TEST_F(EventMessagesTest, DeltaCarriesTextTokensAndCounts) {
  Event event = DeltaEvent{.text = " time",
                           .tokens = {{.token = 300, .logprob = -0.5f, .top = {{300, -0.5f}, {301, -1.5f}}}},
                           .usage = {.prompt_tokens = 4, .completion_tokens = 1},
                           .timing = {.queue_us = 1, .prefill_us = 2, .first_token_us = 3, .total_us = 4}};
  v1::GenerateResponse message;
  FillResponse(context_, event, message);
  const v1::Delta& delta = message.delta();
  EXPECT_EQ(delta.text(), " time");
  ASSERT_EQ(delta.token_ids_size(), 1);
  EXPECT_EQ(delta.token_ids(0), 300u);
  ASSERT_EQ(delta.logprobs_size(), 1);
  EXPECT_EQ(delta.logprobs(0).logprob(), -0.5f);
  EXPECT_EQ(delta.logprobs(0).bytes(), tokenizer_->PieceBytes(300, false));
  ASSERT_EQ(delta.logprobs(0).top_size(), 2);
  EXPECT_EQ(delta.logprobs(0).top(1).token_id(), 301u);
  EXPECT_EQ(delta.usage().completion_tokens(), 1u);
  EXPECT_EQ(delta.timing().first_token_us(), 3u);
}

TEST_F(EventMessagesTest, LogprobsOnlyWhereAskedFor) {
  context_.logprobs = false;
  Event event = Delta("x", 300);
  v1::GenerateResponse message;
  FillResponse(context_, event, message);
  EXPECT_EQ(message.delta().token_ids_size(), 1);
  EXPECT_EQ(message.delta().logprobs_size(), 0);
}

TEST_F(EventMessagesTest, EachMessageReplacesTheOneBefore) {
  v1::GenerateResponse message;
  Event delta = Delta("x", 300);
  FillResponse(context_, delta, message);
  FinishedEvent end;
  end.reason = FinishReason::kStopString;
  end.matched_stop = "END";
  Event finished = end;
  FillResponse(context_, finished, message);
  EXPECT_TRUE(message.has_finished());
  EXPECT_EQ(message.finished().finish_reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(message.finished().stop(), "END");
  EXPECT_EQ(message.finished().token_ids_size(), 0);
}

TEST_F(EventMessagesTest, WholeReplyJoinsTheEvents) {
  v1::CompleteResponse message;
  Event accepted = AcceptedEvent{.prompt_tokens = 2, .seed = 42};
  Event delta = Delta("ab", 300);
  FinishedEvent end;
  end.reason = FinishReason::kEos;
  end.text = "c";
  end.tokens = {Token(2)};
  end.matched_token = 2;
  Event finished = end;
  for (Event* event : {&accepted, &delta, &finished}) AppendEvent(context_, *event, message);
  EXPECT_EQ(message.request_id(), "r1");
  EXPECT_EQ(message.text(), "abc");
  EXPECT_EQ(message.token_ids_size(), 2);
  EXPECT_EQ(message.seed(), 42u);
  EXPECT_EQ(message.finish_reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(message.token_id(), 2u);
}

TEST_F(EventMessagesTest, ScoresJoinToTheText) {
  const std::string text = "Once upon a time";
  std::vector<TokenId> prompt = *tokenizer_->Encode(text, false);
  prompt.insert(prompt.begin(), 1);
  FinishedEvent finished;
  for (size_t i = 1; i < prompt.size(); ++i) finished.prompt_logprobs.push_back(Token(prompt[i], -0.25f));
  v1::ScoreResponse message;
  FillScore(context_, prompt, finished, message);
  ASSERT_EQ(message.logprobs_size(), static_cast<int>(prompt.size()));
  EXPECT_FALSE(message.logprobs(0).has_logprob());
  std::string joined;
  for (const v1::TokenLogprob& entry : message.logprobs()) joined += entry.bytes();
  EXPECT_EQ(joined, text);
  EXPECT_DOUBLE_EQ(message.sum_logprob(), -0.25 * static_cast<double>(prompt.size() - 1));
}

TEST_F(EventMessagesTest, TokensHaveNoBytesWithoutATokenizer) {
  context_.tokenizer = nullptr;
  v1::ScoreResponse message;
  const std::vector<TokenId> prompt = {3, 4};
  FinishedEvent finished;
  finished.prompt_logprobs = {Token(4, -1)};
  FillScore(context_, prompt, finished, message);
  EXPECT_EQ(message.logprobs(1).bytes(), "");
  EXPECT_EQ(message.logprobs(1).logprob(), -1);
}

}  // namespace
}  // namespace efla
