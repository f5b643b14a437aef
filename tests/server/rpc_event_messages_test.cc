#include <gtest/gtest.h>

#include <iterator>
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

TEST_F(EventMessagesTest, EveryReasonHasItsName) {
  for (const auto& [reason, message] :
       {std::pair(FinishReason::kEos, v1::FINISH_REASON_EOS),
        std::pair(FinishReason::kStopString, v1::FINISH_REASON_STOP_STRING),
        std::pair(FinishReason::kStopToken, v1::FINISH_REASON_STOP_TOKEN),
        std::pair(FinishReason::kMaxTokens, v1::FINISH_REASON_MAX_TOKENS),
        std::pair(FinishReason::kTimeBudget, v1::FINISH_REASON_TIME_BUDGET),
        std::pair(FinishReason::kConstraintComplete, v1::FINISH_REASON_CONSTRAINT_COMPLETE)}) {
    EXPECT_EQ(ToProto(reason), message);
  }
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

TEST_F(EventMessagesTest, EachSampleIsGatheredForItself) {
  v1::CompleteResponse message;
  for (const int branch : {1, 0, 2, 1}) {
    DeltaEvent delta = Delta(std::string(1, static_cast<char>('a' + branch)), 300 + branch);
    delta.branch = branch;
    Event event = std::move(delta);
    AppendEvent(context_, event, message);
  }
  for (const int branch : {1, 0, 2}) {
    FinishedEvent finished;
    finished.reason = branch == 2 ? FinishReason::kEos : FinishReason::kMaxTokens;
    finished.matched_token = branch == 2 ? 2 : -1;
    finished.usage = {.prompt_tokens = 9, .cached_tokens = 4, .completion_tokens = 1 + branch};
    finished.timing = {.queue_us = 10 + branch, .total_us = 100 + branch};
    finished.branch = branch;
    Event event = std::move(finished);
    AppendEvent(context_, event, message);
  }
  EXPECT_EQ(message.text(), "a");
  EXPECT_EQ(message.seed(), 42u);
  ASSERT_EQ(message.more_samples_size(), 2);
  EXPECT_EQ(message.more_samples(0).text(), "bb");
  EXPECT_EQ(message.more_samples(0).token_ids_size(), 2);
  EXPECT_EQ(message.more_samples(0).logprobs_size(), 2);
  EXPECT_EQ(message.more_samples(0).seed(), 43u);
  EXPECT_EQ(message.more_samples(0).finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(message.more_samples(1).finish_reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(message.more_samples(1).token_id(), 2u);
  EXPECT_EQ(message.usage().completion_tokens(), 6u) << "of all";
  EXPECT_EQ(message.usage().prompt_tokens(), 9u) << "once";
  EXPECT_EQ(message.usage().cached_tokens(), 4u);
  EXPECT_EQ(message.timing().queue_us(), 10u) << "the first sample's";
  EXPECT_EQ(message.timing().total_us(), 102u) << "the last one's";
}

TEST_F(EventMessagesTest, EchoedTokensHaveEntriesWithoutLogprobs) {
  const std::vector<TokenId> ids = *tokenizer_->Encode("Once upon", false);
  DeltaEvent delta;
  delta.tokens.push_back(Token(1));
  for (TokenId id : ids) delta.tokens.push_back(Token(id));
  delta.echoed = std::ssize(delta.tokens);
  delta.tokens.push_back(Token(ids.front(), -2));
  for (const bool at_start : {true, false}) {
    context_.echo_at_start = at_start;
    DeltaEvent copy = delta;
    Event event = std::move(copy);
    v1::GenerateResponse message;
    FillResponse(context_, event, message);
    ASSERT_EQ(message.delta().logprobs_size(), std::ssize(ids) + 2);
    std::string bytes;
    for (int i = 0; i <= std::ssize(ids); ++i) {
      EXPECT_FALSE(message.delta().logprobs(i).has_logprob());
      bytes += message.delta().logprobs(i).bytes();
    }
    EXPECT_EQ(bytes, at_start ? "Once upon" : " Once upon");
    EXPECT_EQ(message.delta().logprobs().rbegin()->logprob(), -2);
  }
}

TEST_F(EventMessagesTest, AContinuationsScoreIsTheEndOfItsCalls) {
  FinishedEvent finished;
  finished.prompt_logprobs = {{.token = 7, .logprob = -9, .top = {{8, -1.f}}},
                              {.token = 300, .logprob = -0.5f, .top = {{300, -0.5f}, {301, -1.f}}},
                              {.token = 301, .logprob = -0.25f, .top = {{301, -0.25f}, {300, -2.f}}}};
  const std::vector<TokenId> continuation = {300, 301};
  v1::ContinuationScore message;
  FillScore(context_, continuation, finished, /*top_logprobs=*/1, message);
  EXPECT_EQ(message.sum_logprob(), -0.75);
  EXPECT_TRUE(message.is_greedy());
  EXPECT_EQ(message.logprobs_size(), 2);
  EXPECT_EQ(message.logprobs(1).top_size(), 1);
  EXPECT_EQ(message.text_bytes(),
            tokenizer_->PieceBytes(300, false).size() + tokenizer_->PieceBytes(301, false).size());
  finished.prompt_logprobs[1].top = {{299, -0.4f}};
  v1::ContinuationScore other;
  FillScore(context_, continuation, finished, /*top_logprobs=*/0, other);
  EXPECT_FALSE(other.is_greedy());
  EXPECT_EQ(other.logprobs(0).top_size(), 0);
}

}  // namespace
}  // namespace efla
