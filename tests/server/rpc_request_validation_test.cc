#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "server/rpc/request_validation.h"
#include "tests/source_path.h"

namespace efla {
namespace {

class RequestValidationTest : public testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    config_.vocab_size = tokenizer_->vocab_size();
    config_.bos_token_id = 1;
    model_.name = "demo";
    model_.config = &config_;
    model_.tokenizer = tokenizer_.get();
    model_.limits.max_prompt_tokens = 1000;
    model_.limits.max_new_tokens = 4096;
    model_.max_piece_bytes = 16;
    request_.set_text("Once upon a time");
  }

  absl::StatusOr<GenerationRequest> Convert(ReplyKind reply = ReplyKind::kStream) const {
    return ToGenerationRequest(request_, model_, reply);
  }
  // The path of the one field that the refusal is about.
  static std::string FieldOf(const absl::Status& status) {
    const auto payload = status.GetPayload("type.googleapis.com/google.rpc.BadRequest");
    google::rpc::BadRequest details;
    if (!payload || !details.ParseFromString(std::string(*payload))) return "";
    return details.field_violations_size() == 1 ? details.field_violations(0).field() : "";
  }
  void ExpectInvalid(const std::string& field, const std::string& words) const {
    const absl::Status status = Convert().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status;
  }

  ModelConfig config_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  ServedModel model_;
  v1::GenerateRequest request_;
};

TEST_F(RequestValidationTest, TextGetsOneBos) {
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->prompt.front(), 1);
  EXPECT_NE(converted->prompt.at(1), 1);
  request_.set_parse_special_tokens(true);
  request_.set_text("<s>Once upon a time");
  const auto special = Convert();
  ASSERT_TRUE(special.ok()) << special.status();
  EXPECT_EQ(special->prompt.front(), 1);
  EXPECT_NE(special->prompt.at(1), 1);
}

TEST_F(RequestValidationTest, IdsAreTakenAsTheyAre) {
  request_.clear_text();
  for (uint32_t id : {5u, 1u, 7u}) request_.mutable_token_ids()->add_ids(id);
  const auto plain = Convert();
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->prompt, (std::vector<TokenId>{5, 1, 7}));
  request_.set_add_bos(true);
  const auto with_bos = Convert();
  ASSERT_TRUE(with_bos.ok()) << with_bos.status();
  EXPECT_EQ(with_bos->prompt, (std::vector<TokenId>{1, 5, 1, 7}));
}

TEST_F(RequestValidationTest, EmptyTextIsABosAlone) {
  request_.set_text("");
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->prompt, std::vector<TokenId>{1});
  request_.set_add_bos(false);
  ExpectInvalid("text", "is empty");
}

TEST_F(RequestValidationTest, NeedsExactlyOnePrompt) {
  request_.mutable_token_ids()->add_ids(3);
  ExpectInvalid("text", "both given");
  request_.clear_text();
  request_.mutable_token_ids()->Clear();
  ExpectInvalid("token_ids", "is empty");
  request_.clear_token_ids();
  ExpectInvalid("text", "both absent");
}

TEST_F(RequestValidationTest, RefusesIdsOutsideTheVocabulary) {
  request_.clear_text();
  for (uint32_t id : {static_cast<uint32_t>(config_.vocab_size), uint32_t{1} << 31, ~uint32_t{0}}) {
    request_.mutable_token_ids()->clear_ids();
    request_.mutable_token_ids()->add_ids(2);
    request_.mutable_token_ids()->add_ids(id);
    ExpectInvalid("token_ids.ids[1]", "is " + std::to_string(id));
  }
  request_.mutable_token_ids()->set_ids(1, static_cast<uint32_t>(config_.vocab_size - 1));
  EXPECT_TRUE(Convert().ok());
  request_.mutable_stopping()->add_stop_token_ids(~uint32_t{0});
  ExpectInvalid("stopping.stop_token_ids[0]", "is 4294967295");
}

TEST_F(RequestValidationTest, RefusesSamplingValuesOutOfRangeAndNan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float value : {-0.1f, 100.5f, kNan, kInfinity, -kInfinity}) {
    request_.mutable_sampling()->set_temperature(value);
    ExpectInvalid("sampling.temperature", "is ");
  }
  request_.mutable_sampling()->set_temperature(0);
  for (float value : {0.0f, 1.1f, kNan, -1.0f}) {
    request_.mutable_sampling()->set_top_p(value);
    ExpectInvalid("sampling.top_p", "is ");
  }
  request_.mutable_sampling()->set_top_p(1);
  for (float value : {1.0f, kNan, -0.5f}) {
    request_.mutable_sampling()->set_min_p(value);
    ExpectInvalid("sampling.min_p", "is ");
  }
}

TEST_F(RequestValidationTest, HugeTopKCutsNothing) {
  request_.mutable_sampling()->set_top_k(~uint32_t{0});
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->sampling.top_k, std::numeric_limits<int32_t>::max());
}

TEST_F(RequestValidationTest, DefaultsComeFromTheCheckpointAndZerosAreKept) {
  model_.defaults = {.temperature = 0.5f, .top_p = 0.9f, .min_p = 0.1f, .top_k = 40, .max_tokens = 12};
  auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->sampling.temperature, 0.5f);
  EXPECT_EQ(converted->sampling.top_k, 40);
  EXPECT_EQ(converted->stopping.max_tokens, 12);
  request_.mutable_sampling()->set_temperature(0);
  request_.mutable_sampling()->set_top_k(0);
  request_.mutable_stopping()->set_max_tokens(0);
  converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->sampling.temperature, 0);
  EXPECT_EQ(converted->sampling.top_k, 0);
  EXPECT_EQ(converted->stopping.max_tokens, 0);
}

TEST_F(RequestValidationTest, DrawsASeedOnlyWhereThereIsNone) {
  EXPECT_NE(Convert()->sampling.seed, Convert()->sampling.seed);
  request_.mutable_sampling()->set_seed(0);
  EXPECT_EQ(Convert()->sampling.seed, 0u);
}

TEST_F(RequestValidationTest, RefusesStopsBeyondTheLimits) {
  request_.mutable_stopping()->add_stop(std::string());
  ExpectInvalid("stopping.stop[0]", "empty");
  request_.mutable_stopping()->set_stop(0, std::string(kMaxStopBytes + 1, 'x'));
  ExpectInvalid("stopping.stop[0]", "1025");
  request_.mutable_stopping()->set_stop(0, std::string("x"));
  for (int i = 0; i < kMaxStopStrings; ++i) request_.mutable_stopping()->add_stop(std::string("x"));
  ExpectInvalid("stopping.stop", "65");
}

TEST_F(RequestValidationTest, NamesTheLimitAndTheValue) {
  request_.mutable_stopping()->set_max_tokens(4097);
  ExpectInvalid("stopping.max_tokens", "is 4097; the limit is 4096");
  request_.clear_stopping();
  request_.set_request_id(std::string(257, 'r'));
  ExpectInvalid("request_id", "257 bytes; the limit is 256");
  request_.clear_request_id();
  request_.mutable_output()->set_logprobs(true);
  request_.mutable_output()->set_top_logprobs(21);
  ExpectInvalid("output.top_logprobs", "is 21; the limit is 20");
  request_.mutable_output()->set_top_logprobs(3);
  request_.mutable_output()->set_logprobs(false);
  ExpectInvalid("output.top_logprobs", "output.logprobs is not set");
  request_.clear_output();
  request_.clear_text();
  for (int i = 0; i < 1001; ++i) request_.mutable_token_ids()->add_ids(3);
  ExpectInvalid("token_ids", "1001 tokens; the limit is 1000");
}

TEST_F(RequestValidationTest, RefusesAnotherModel) {
  request_.set_model("other");
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kNotFound);
  request_.set_model("demo");
  EXPECT_TRUE(Convert().ok());
}

TEST_F(RequestValidationTest, TextNeedsATokenizer) {
  model_.tokenizer = nullptr;
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kFailedPrecondition);
  request_.clear_text();
  request_.mutable_token_ids()->add_ids(3);
  EXPECT_TRUE(Convert().ok());
  request_.mutable_stopping()->add_stop(std::string("x"));
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RequestValidationTest, RefusesFieldsItDoesNotKnowAtAnyDepth) {
  v1::GenerateRequest outer = request_;
  outer.GetReflection()->MutableUnknownFields(&outer)->AddVarint(77, 1);
  request_.ParseFromString(outer.SerializeAsString());
  absl::Status status = Convert().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(std::string(status.message()).find("efla.v1.GenerateRequest has no field number 77"),
            std::string::npos)
      << status;

  v1::SamplingParams inner;
  inner.GetReflection()->MutableUnknownFields(&inner)->AddVarint(12, 1);
  request_.Clear();
  request_.set_text("x");
  request_.mutable_sampling()->ParseFromString(inner.SerializeAsString());
  status = Convert().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(std::string(status.message()).find("efla.v1.SamplingParams has no field number 12"),
            std::string::npos)
      << status;
}

TEST_F(RequestValidationTest, BoundsRepliesThatAreOneMessage) {
  model_.limits.max_reply_bytes = 4096;
  request_.mutable_stopping()->set_max_tokens(1000);
  EXPECT_TRUE(Convert(ReplyKind::kStream).ok());
  EXPECT_EQ(FieldOf(Convert(ReplyKind::kWhole).status()), "stopping.max_tokens");
  request_.mutable_stopping()->set_max_tokens(10);
  EXPECT_TRUE(Convert(ReplyKind::kWhole).ok());

  v1::ScoreRequest score;
  for (int i = 0; i < 500; ++i) score.mutable_token_ids()->add_ids(3);
  EXPECT_EQ(FieldOf(ToScoringRequest(score, model_).status()), "token_ids");
}

TEST_F(RequestValidationTest, ScoringAsksForThePromptAlone) {
  v1::ScoreRequest score;
  score.set_text("Once");
  score.set_top_logprobs(2);
  const auto converted = ToScoringRequest(score, model_);
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_TRUE(converted->prompt_logprobs);
  EXPECT_EQ(converted->stopping.max_tokens, 0);
  EXPECT_EQ(converted->top_logprobs, 2);
  EXPECT_EQ(converted->prompt.front(), 1);
}

}  // namespace
}  // namespace efla
