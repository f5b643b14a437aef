// Every golden checkpoint, every case, through a running server.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

class GoldenServerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    server_ = ServerProcess::Start(GoldenDir(GetParam()));
    ASSERT_NE(server_, nullptr);
    stub_ = v1::Generation::NewStub(server_->NewChannel());
    cases_ = GoldenCases(GetParam());
    ASSERT_FALSE(cases_.empty());
  }

  static std::string Name(const GoldenCase& golden) {
    return absl::StrFormat("%s, prompt of %d", GetParam(), golden.tokens.size());
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::Generation::Stub> stub_;
  std::vector<GoldenCase> cases_;
  const Tolerance tolerance_ = DeviceTolerance(GetParam());
};

TEST_P(GoldenServerTest, ScoresPromptsAsTheReference) {
  for (const GoldenCase& golden : cases_) {
    v1::ScoreRequest request;
    request.mutable_token_ids()->mutable_ids()->Add(golden.tokens.begin(), golden.tokens.end());
    v1::ScoreResponse response;
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const grpc::Status status = stub_->Score(&context, request, &response);
    ASSERT_TRUE(status.ok()) << Name(golden) << ": " << ToString(status);

    const std::vector<uint32_t> ids(response.token_ids().begin(), response.token_ids().end());
    EXPECT_EQ(ids, golden.tokens) << Name(golden);
    EXPECT_EQ(response.usage().prompt_tokens(), golden.tokens.size());
    EXPECT_EQ(response.usage().completion_tokens(), 0u);
    ASSERT_EQ(response.logprobs_size(), static_cast<int>(golden.tokens.size()));
    EXPECT_FALSE(response.logprobs(0).has_logprob());
    double sum = 0;
    for (size_t i = 1; i < golden.tokens.size(); ++i) {
      const v1::TokenLogprob& scored = response.logprobs(static_cast<int>(i));
      EXPECT_EQ(scored.token_id(), golden.tokens[i]);
      ASSERT_TRUE(scored.has_logprob()) << Name(golden) << ", position " << i;
      sum += scored.logprob();
      if (*golden.prompt_logprobs[i] < tolerance_.least_logprob) continue;
      EXPECT_NEAR(scored.logprob(), *golden.prompt_logprobs[i], tolerance_.logprob)
          << Name(golden) << ", position " << i;
    }
    EXPECT_NEAR(response.sum_logprob(), sum, 1e-6 * (1 + std::abs(sum))) << Name(golden);
  }
}

TEST_P(GoldenServerTest, ContinuesPromptsAsTheReference) {
  for (const GoldenCase& golden : cases_) {
    v1::GenerateRequest request = GreedyRequest(golden.tokens, static_cast<uint32_t>(golden.greedy.size()));
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(5);
    const Reply reply = Generate(*stub_, request);
    ASSERT_TRUE(reply.status.ok()) << Name(golden) << ": " << ToString(reply.status);
    EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
    EXPECT_EQ(reply.accepted.prompt_tokens(), golden.tokens.size());
    EXPECT_EQ(reply.finished.usage().completion_tokens(), golden.greedy.size());
    ASSERT_EQ(reply.token_ids.size(), golden.greedy.size()) << Name(golden);
    ExpectGreedy(reply.token_ids, golden.greedy, golden.greedy_margins, Name(golden), tolerance_);

    ASSERT_EQ(reply.logprobs.size(), golden.greedy.size()) << Name(golden);
    const v1::TokenLogprob& first = reply.logprobs[0];
    EXPECT_EQ(first.token_id(), reply.token_ids[0]);
    ASSERT_EQ(first.top_size(), 5) << Name(golden);
    EXPECT_EQ(first.logprob(), first.top(0).logprob()) << "the greedy token is the most probable one";
    for (int i = 0; i < 5; ++i) {
      const auto& [id, logprob] = golden.top5_next[i];
      // By rank, not by id: two that are closer than the tolerance may have changed places.
      EXPECT_NEAR(first.top(i).logprob(), logprob, tolerance_.logprob)
          << Name(golden) << ", alternative " << i;
      for (const v1::TokenLogprob::Alternative& alternative : first.top()) {
        if (alternative.token_id() != id) continue;
        EXPECT_NEAR(alternative.logprob(), logprob, tolerance_.logprob) << Name(golden) << ", token " << id;
      }
      EXPECT_LE(first.top(i).logprob(), first.top(std::max(i - 1, 0)).logprob()) << "best first";
    }
  }
  ExpectIdle(server_->admin_address());
}

TEST(GoldenFilesTest, CoverEveryModelType) {
  std::string all;
  for (const std::string& name : GoldenNames()) all += name + " ";
  for (const char* name : {"efla_basic", "gated_efla", "delta_net", "gated_deltanet"}) {
    EXPECT_NE(all.find(name), std::string::npos) << name << " is not in " << SourceDir() / "tests/golden";
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenServerTest, ::testing::ValuesIn(GoldenNames()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace efla::e2e
