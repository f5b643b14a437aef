// What the fields of a generation request do, seen from a client.
#include <algorithm>

#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

class GenerationServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = ServerProcess::Start(GoldenDir("efla_basic"), {"--model-name", "basic"}).release();
  }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    stub_ = v1::Generation::NewStub(server_->NewChannel());
    cases_ = GoldenCases("efla_basic");
  }
  // The prompt of `length` tokens.
  const GoldenCase& Case(size_t length) const {
    return *std::find_if(cases_.begin(), cases_.end(),
                         [&](const auto& c) { return c.tokens.size() == length; });
  }

  static ServerProcess* server_;
  std::unique_ptr<v1::Generation::Stub> stub_;
  std::vector<GoldenCase> cases_;
};

ServerProcess* GenerationServerTest::server_ = nullptr;

TEST_F(GenerationServerTest, TheModelNameOfTheFlagIsServed) {
  EXPECT_EQ(server_->model(), "basic");
  v1::GenerateRequest request = GreedyRequest(Case(7).tokens, 1);
  request.set_model("basic");
  const Reply reply = Generate(*stub_, request);
  EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.accepted.model(), "basic");
}

TEST_F(GenerationServerTest, CompleteIsTheStreamInOneReply) {
  v1::GenerateRequest request = GreedyRequest(Case(65).tokens, 24);
  request.set_request_id("complete-1");
  request.mutable_sampling()->set_temperature(0.9f);
  request.mutable_sampling()->set_seed(7);
  request.mutable_output()->set_logprobs(true);
  request.mutable_output()->set_top_logprobs(3);
  const Reply streamed = Generate(*stub_, request);
  ASSERT_TRUE(streamed.status.ok()) << ToString(streamed.status);
  v1::CompleteResponse complete;
  grpc::ClientContext context;
  const grpc::Status status = stub_->Complete(&context, request, &complete);
  ASSERT_TRUE(status.ok()) << ToString(status);

  EXPECT_EQ(streamed.accepted.request_id(), "complete-1");
  EXPECT_EQ(complete.request_id(), "complete-1");
  EXPECT_EQ(complete.model(), "basic");
  EXPECT_EQ(complete.seed(), 7u);
  EXPECT_EQ(complete.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(complete.usage().prompt_tokens(), 65u);
  EXPECT_EQ(complete.usage().completion_tokens(), 24u);
  const std::vector<uint32_t> ids(complete.token_ids().begin(), complete.token_ids().end());
  EXPECT_EQ(ids, streamed.token_ids);
  ASSERT_EQ(complete.logprobs_size(), 24);
  for (int i = 0; i < 24; ++i) EXPECT_TRUE(SameBits(complete.logprobs(i), streamed.logprobs[i])) << i;
  const v1::Timing& timing = complete.timing();
  EXPECT_GT(timing.first_token_us(), 0u);
  EXPECT_LE(timing.queue_us() + timing.prefill_us(), timing.first_token_us());
  EXPECT_LE(timing.first_token_us(), timing.total_us());
}

TEST_F(GenerationServerTest, AServerMadeRequestIdIsUnique) {
  const Reply a = Generate(*stub_, GreedyRequest(Case(2).tokens, 1));
  const Reply b = Generate(*stub_, GreedyRequest(Case(2).tokens, 1));
  EXPECT_FALSE(a.accepted.request_id().empty());
  EXPECT_NE(a.accepted.request_id(), b.accepted.request_id());
}

TEST_F(GenerationServerTest, StopTokensEndTheGeneration) {
  const GoldenCase& golden = Case(7);
  const uint32_t stop = golden.greedy[9];
  const auto first = std::find(golden.greedy.begin(), golden.greedy.end(), stop) - golden.greedy.begin();
  v1::GenerateRequest request = GreedyRequest(golden.tokens, 24);
  request.mutable_stopping()->add_stop_token_ids(stop);
  const Reply reply = Generate(*stub_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(reply.finished.token_id(), stop);
  EXPECT_EQ(reply.finished.usage().completion_tokens(), static_cast<uint64_t>(first) + 1);
}

TEST_F(GenerationServerTest, AStopOnTheLastTokenIsReportedAsAStop) {
  const GoldenCase& golden = Case(7);
  const uint32_t stop = golden.greedy[9];
  const auto first = std::find(golden.greedy.begin(), golden.greedy.end(), stop) - golden.greedy.begin();
  v1::GenerateRequest request = GreedyRequest(golden.tokens, static_cast<uint32_t>(first) + 1);
  request.mutable_stopping()->add_stop_token_ids(stop);
  EXPECT_EQ(Generate(*stub_, request).finished.finish_reason(), v1::FINISH_REASON_STOP_TOKEN);
}

TEST_F(GenerationServerTest, EndOfTextEndsUnlessIgnored) {
  // A near-uniform draw meets token 2 (of 320) among 4,000 with all but certainty.
  v1::GenerateRequest request = GreedyRequest(Case(7).tokens, 4000);
  request.mutable_sampling()->set_temperature(100);
  request.mutable_sampling()->set_seed(1);
  const Reply ignoring = Generate(*stub_, request);
  ASSERT_EQ(ignoring.token_ids.size(), 4000u) << ToString(ignoring.status);
  const auto eos =
      std::find(ignoring.token_ids.begin(), ignoring.token_ids.end(), 2u) - ignoring.token_ids.begin();
  ASSERT_LT(eos, 4000);
  request.mutable_stopping()->set_ignore_eos(false);
  const Reply reply = Generate(*stub_, request);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(reply.finished.token_id(), 2u);
  EXPECT_EQ(reply.finished.usage().completion_tokens(), static_cast<uint64_t>(eos) + 1);
  ASSERT_GE(reply.token_ids.size(), static_cast<size_t>(eos));
  EXPECT_TRUE(
      std::equal(ignoring.token_ids.begin(), ignoring.token_ids.begin() + eos, reply.token_ids.begin()));
}

TEST_F(GenerationServerTest, NoTokensAskedForMeansThePromptAlone) {
  const Reply reply = Generate(*stub_, GreedyRequest(Case(130).tokens, 0));
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_TRUE(reply.token_ids.empty());
  EXPECT_EQ(reply.finished.usage().prompt_tokens(), 130u);
  EXPECT_EQ(reply.finished.usage().completion_tokens(), 0u);
}

TEST_F(GenerationServerTest, ATimeBudgetEndsNormallyWithWhatThereIs) {
  v1::GenerateRequest request = GreedyRequest(Case(7).tokens, 1'000'000);
  request.set_time_budget_ms(100);
  const Reply reply = Generate(*stub_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_TIME_BUDGET);
  EXPECT_GT(reply.token_ids.size(), 0u);
  EXPECT_EQ(reply.finished.usage().completion_tokens(), reply.token_ids.size());
  EXPECT_GE(reply.finished.timing().total_us(), 100'000u);
}

TEST_F(GenerationServerTest, ProgressCountsUpToThePrompt) {
  v1::GenerateRequest request = GreedyRequest(Case(1000).tokens, 2);
  for (const v1::GenerateResponse& event : Generate(*stub_, request).events) {
    EXPECT_FALSE(event.has_progress()) << "not asked for";
  }
  request.mutable_output()->set_progress(true);
  const Reply reply = Generate(*stub_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  uint64_t done = 0;
  int num_progress = 0;
  for (const v1::GenerateResponse& event : reply.events) {
    if (!event.has_progress()) continue;
    ++num_progress;
    EXPECT_EQ(event.progress().prompt_tokens_total(), 1000u);
    EXPECT_GT(event.progress().prompt_tokens_done(), done);
    done = event.progress().prompt_tokens_done();
  }
  EXPECT_GT(num_progress, 0);
  EXPECT_LE(done, 1000u);
}

TEST_F(GenerationServerTest, UsageRunsAlongInTheDeltas) {
  const Reply reply = Generate(*stub_, GreedyRequest(Case(7).tokens, 50));
  uint64_t tokens = 0;
  for (const v1::GenerateResponse& event : reply.events) {
    if (!event.has_delta()) continue;
    tokens += event.delta().token_ids_size();
    EXPECT_EQ(event.delta().usage().prompt_tokens(), 7u);
    EXPECT_GE(event.delta().usage().completion_tokens(), tokens);
    EXPECT_LE(event.delta().usage().completion_tokens(), 50u);
    EXPECT_TRUE(event.delta().logprobs().empty()) << "not asked for";
  }
  EXPECT_EQ(reply.finished.usage().completion_tokens(), 50u);
}

TEST_F(GenerationServerTest, ASeedRepeatsAndItsAbsenceDoesNot) {
  v1::GenerateRequest request = GreedyRequest(Case(7).tokens, 40);
  request.mutable_sampling()->set_temperature(1);
  const Reply a = Generate(*stub_, request), b = Generate(*stub_, request);
  EXPECT_NE(a.accepted.seed(), b.accepted.seed());
  EXPECT_NE(a.token_ids, b.token_ids);
  request.mutable_sampling()->set_seed(a.accepted.seed());
  const Reply repeated = Generate(*stub_, request);
  EXPECT_EQ(repeated.accepted.seed(), a.accepted.seed());
  EXPECT_EQ(repeated.token_ids, a.token_ids);
  request.mutable_sampling()->set_seed(0);
  EXPECT_EQ(Generate(*stub_, request).accepted.seed(), 0u) << "a seed of zero is a seed";
}

TEST_F(GenerationServerTest, EveryCutDownToOneTokenIsGreedy) {
  const GoldenCase& golden = Case(65);
  v1::GenerateRequest request = GreedyRequest(golden.tokens, 24);
  const Reply greedy = Generate(*stub_, request);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(3);
  EXPECT_NE(Generate(*stub_, request).token_ids, greedy.token_ids);
  v1::GenerateRequest top_k = request, top_p = request, min_p = request;
  top_k.mutable_sampling()->set_top_k(1);
  top_p.mutable_sampling()->set_top_p(1e-6f);
  min_p.mutable_sampling()->set_min_p(0.999999f);
  EXPECT_EQ(Generate(*stub_, top_k).token_ids, greedy.token_ids);
  EXPECT_EQ(Generate(*stub_, top_p).token_ids, greedy.token_ids);
  EXPECT_EQ(Generate(*stub_, min_p).token_ids, greedy.token_ids);
}

TEST_F(GenerationServerTest, AWideTopKIsNoCut) {
  v1::GenerateRequest request = GreedyRequest(Case(65).tokens, 24);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(3);
  const Reply uncut = Generate(*stub_, request);
  request.mutable_sampling()->set_top_k(1'000'000);  // more than the vocabulary holds
  ExpectSameTokens(Generate(*stub_, request), uncut, "top_k 1,000,000 and none");
}

TEST_F(GenerationServerTest, ABosIsPutInFrontOnlyWhereAskedFor) {
  const std::vector<uint32_t> plain = {5, 6, 7}, with_bos = {1, 5, 6, 7};
  v1::GenerateRequest request = GreedyRequest(plain, 4);
  EXPECT_EQ(Generate(*stub_, request).accepted.prompt_tokens(), 3u);
  request.set_add_bos(true);
  const Reply added = Generate(*stub_, request);
  EXPECT_EQ(added.accepted.prompt_tokens(), 4u);
  EXPECT_EQ(added.token_ids, Generate(*stub_, GreedyRequest(with_bos, 4)).token_ids);
  v1::GenerateRequest twice = GreedyRequest(with_bos, 4);
  twice.set_add_bos(true);
  EXPECT_EQ(Generate(*stub_, twice).accepted.prompt_tokens(), 4u) << "never before a BOS";
  v1::GenerateRequest empty = GreedyRequest({}, 4);
  empty.mutable_token_ids();
  empty.set_add_bos(true);
  EXPECT_EQ(Generate(*stub_, empty).accepted.prompt_tokens(), 1u);
}

}  // namespace
}  // namespace efla::e2e
