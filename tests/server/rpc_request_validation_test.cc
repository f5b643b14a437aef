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

  absl::StatusOr<CallRequest> Convert(ReplyKind reply = ReplyKind::kStream) const {
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
  EXPECT_EQ(converted->generation.prompt.front(), 1);
  EXPECT_NE(converted->generation.prompt.at(1), 1);
  request_.set_parse_special_tokens(true);
  request_.set_text("<s>Once upon a time");
  const auto special = Convert();
  ASSERT_TRUE(special.ok()) << special.status();
  EXPECT_EQ(special->generation.prompt.front(), 1);
  EXPECT_NE(special->generation.prompt.at(1), 1);
}

TEST_F(RequestValidationTest, IdsAreTakenAsTheyAre) {
  request_.clear_text();
  for (uint32_t id : {5u, 1u, 7u}) request_.mutable_token_ids()->add_ids(id);
  const auto plain = Convert();
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->generation.prompt, (std::vector<TokenId>{5, 1, 7}));
  request_.set_add_bos(true);
  const auto with_bos = Convert();
  ASSERT_TRUE(with_bos.ok()) << with_bos.status();
  EXPECT_EQ(with_bos->generation.prompt, (std::vector<TokenId>{1, 5, 1, 7}));
}

TEST_F(RequestValidationTest, EmptyTextIsABosAlone) {
  request_.set_text("");
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.prompt, std::vector<TokenId>{1});
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
  EXPECT_EQ(converted->generation.sampling.top_k, std::numeric_limits<int32_t>::max());
}

TEST_F(RequestValidationTest, DefaultsComeFromTheCheckpointAndZerosAreKept) {
  model_.defaults = {.temperature = 0.5f, .top_p = 0.9f, .min_p = 0.1f, .top_k = 40, .max_tokens = 12};
  auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.sampling.temperature, 0.5f);
  EXPECT_EQ(converted->generation.sampling.top_k, 40);
  EXPECT_EQ(converted->generation.stopping.max_tokens, 12);
  request_.mutable_sampling()->set_temperature(0);
  request_.mutable_sampling()->set_top_k(0);
  request_.mutable_stopping()->set_max_tokens(0);
  converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.sampling.temperature, 0);
  EXPECT_EQ(converted->generation.sampling.top_k, 0);
  EXPECT_EQ(converted->generation.stopping.max_tokens, 0);
}

TEST_F(RequestValidationTest, DrawsASeedOnlyWhereThereIsNone) {
  EXPECT_NE(Convert()->generation.sampling.seed, Convert()->generation.sampling.seed);
  request_.mutable_sampling()->set_seed(0);
  EXPECT_EQ(Convert()->generation.sampling.seed, 0u);
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
  EXPECT_TRUE(converted->generation.prompt_logprobs);
  EXPECT_EQ(converted->generation.stopping.max_tokens, 0);
  EXPECT_EQ(converted->generation.top_logprobs, 2);
  EXPECT_EQ(converted->generation.prompt.front(), 1);
  EXPECT_FALSE(converted->generation.use_prefix_cache) << "every position is scored";
  EXPECT_FALSE(converted->turn);
}

TEST_F(RequestValidationTest, APrefixCacheIsUsedUnlessTheRequestSaysNo) {
  EXPECT_TRUE(Convert()->generation.use_prefix_cache);
  request_.set_use_prefix_cache(false);
  request_.set_cache_salt("tenant 7");
  EXPECT_FALSE(Convert()->generation.use_prefix_cache);
  EXPECT_EQ(Convert()->generation.prefix_cache_salt, "tenant 7");
  request_.set_cache_salt(std::string(129, 's'));
  ExpectInvalid("cache_salt", "has 129 bytes; the limit is 128");
}

TEST_F(RequestValidationTest, TextGoesOnWhereASessionHoldsText) {
  request_.mutable_session()->set_session_id("s");
  auto call = Convert();
  ASSERT_TRUE(call.ok()) << call.status();
  ASSERT_TRUE(call->turn);
  EXPECT_EQ(call->generation.prompt.front(), 1) << "of an empty session";
  EXPECT_EQ(call->turn->continuation, *tokenizer_->EncodeContinuation("Once upon a time", false));
  EXPECT_NE(call->turn->continuation.front(), 1);
  EXPECT_TRUE(call->turn->generates);

  request_.set_add_bos(true);
  EXPECT_EQ(Convert()->turn->continuation.front(), 1) << "unless it is asked for";
  request_.set_add_bos(false);
  EXPECT_EQ(Convert()->generation.prompt, *tokenizer_->Encode("Once upon a time", false));
  request_.mutable_stopping()->set_max_tokens(0);
  EXPECT_FALSE(Convert()->turn->generates) << "nothing is drawn: the prompt is only added";
}

TEST_F(RequestValidationTest, ASessionMayBeContinuedWithNothing) {
  request_.clear_text();
  request_.mutable_session()->set_session_id("s");
  const auto call = Convert();
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_TRUE(call->turn->continuation.empty());
  EXPECT_TRUE(call->generation.prompt.empty());
  request_.set_parse_special_tokens(true);
  ExpectInvalid("parse_special_tokens", "none is given");
}

TEST_F(RequestValidationTest, ASessionsFieldsAreChecked) {
  v1::SessionTurn& session = *request_.mutable_session();
  ExpectInvalid("session.session_id", "is empty");
  session.set_session_id(std::string(129, 'a'));
  ExpectInvalid("session.session_id", "has 129 characters; the limit is 128");
  session.set_session_id("a b");
  ExpectInvalid("session.session_id", "is \"a b\"");
  session.set_session_id("a/../b");
  ExpectInvalid("session.session_id", "[A-Za-z0-9._-]");
  session.set_session_id("a.b_C-9");
  EXPECT_TRUE(Convert().ok());
  session.set_expected_revision(0);
  ExpectInvalid("session.expected_revision", "is 0; revisions begin at 1");
  session.set_create_if_missing(true);
  EXPECT_TRUE(Convert().ok()) << "what does not exist has revision 0";
  session.set_expected_revision(7);
  session.set_on_cancel(v1::ON_CANCEL_KEEP);
  session.set_durability(v1::DURABILITY_NONE);
  request_.set_request_id("again");
  const auto call = Convert();
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->turn->change.expected_revision, 7u);
  EXPECT_EQ(call->turn->change.request_id, "again");
  EXPECT_EQ(call->turn->change.durability, Durability::kNone);
  EXPECT_EQ(call->turn->on_cancel, OnCancel::kKeep);
  EXPECT_TRUE(call->turn->create_if_missing);

  session.set_on_cancel(static_cast<v1::OnCancel>(3));
  ExpectInvalid("session.on_cancel", "is 3; the values are 0 to 2");
  session.clear_on_cancel();
  session.set_durability(static_cast<v1::Durability>(-1));
  ExpectInvalid("session.durability", "is -1; the values are 0 to 3");
  session.set_durability(v1::DURABILITY_SYNC);
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kFailedPrecondition) << "there is no store";
  model_.has_disk_store = true;
  EXPECT_EQ(Convert()->turn->change.durability, Durability::kSync);
}

TEST_F(RequestValidationTest, AppendingNeedsAPrompt) {
  v1::AppendRequest request;
  request.set_session_id("s");
  EXPECT_EQ(FieldOf(ToAppendRequest(request, model_).status()), "text");
  request.set_text("more");
  request.mutable_token_ids()->add_ids(3);
  EXPECT_EQ(FieldOf(ToAppendRequest(request, model_).status()), "text");
  request.clear_text();
  request.set_request_id(std::string(257, 'r'));
  EXPECT_EQ(FieldOf(ToAppendRequest(request, model_).status()), "request_id");
  request.set_request_id("r");
  const auto call = ToAppendRequest(request, model_);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_FALSE(call->turn->generates);
  EXPECT_EQ(call->turn->continuation, std::vector<TokenId>{3});
  EXPECT_EQ(call->generation.stopping.max_tokens, 0);
}

TEST_F(RequestValidationTest, ASessionMayBeMadeEmpty) {
  model_.limits.max_session_ttl_ms = 5000;
  v1::CreateSessionRequest request;
  auto call = ToCreateRequest(request, model_);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_TRUE(call->generation.prompt.empty());
  EXPECT_EQ(call->turn->new_session_ttl, std::chrono::milliseconds(0));
  request.set_text("Once");
  request.set_ttl_ms(5000);
  call = ToCreateRequest(request, model_);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->generation.prompt.front(), 1);
  request.set_ttl_ms(5001);
  EXPECT_EQ(FieldOf(ToCreateRequest(request, model_).status()), "ttl_ms");
  request.clear_ttl_ms();
  request.set_session_id("no good");
  EXPECT_EQ(FieldOf(ToCreateRequest(request, model_).status()), "session_id");
}

}  // namespace
}  // namespace efla
