#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  ExpectInvalid("text", "is absent, and so are token_ids and chat; exactly one is needed");
  const absl::Status score = ToScoringRequest(v1::ScoreRequest(), model_).status();
  EXPECT_EQ(score.message(), "text and token_ids are both absent; exactly one is needed");
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

TEST_F(RequestValidationTest, EverySamplingFieldReachesTheEngine) {
  v1::SamplingParams& sampling = *request_.mutable_sampling();
  sampling.set_typical_p(0.25f);
  sampling.set_repetition_penalty(1.5f);
  sampling.set_presence_penalty(-0.5f);
  sampling.set_frequency_penalty(0.75f);
  sampling.set_penalty_window(77);
  sampling.set_no_repeat_ngram_size(3);
  (*sampling.mutable_logit_bias())[12] = -7.5f;
  (*sampling.mutable_logit_bias())[4] = 2;
  for (uint32_t id : {5u, 3u}) sampling.add_allowed_token_ids(id);
  sampling.add_banned_token_ids(9);
  request_.mutable_stopping()->set_min_tokens(6);
  request_.mutable_stopping()->set_max_tokens(6);
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  const SamplingParams& params = converted->generation.sampling;
  EXPECT_EQ(params.typical_p, 0.25f);
  EXPECT_EQ(params.repetition_penalty, 1.5f);
  EXPECT_EQ(params.presence_penalty, -0.5f);
  EXPECT_EQ(params.frequency_penalty, 0.75f);
  EXPECT_EQ(params.penalty_window, 77);
  EXPECT_EQ(params.no_repeat_ngram_size, 3);
  EXPECT_EQ(params.logit_bias, (std::vector<std::pair<TokenId, float>>{{4, 2.0f}, {12, -7.5f}}));
  EXPECT_EQ(params.allowed_token_ids, (std::vector<TokenId>{5, 3}));
  EXPECT_EQ(params.banned_token_ids, (std::vector<TokenId>{9}));
  EXPECT_EQ(converted->generation.stopping.min_tokens, 6);
}

TEST_F(RequestValidationTest, RefusesPenaltiesAndListsOutOfRange) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  v1::SamplingParams& sampling = *request_.mutable_sampling();
  const auto check = [&](const std::string& field, const std::string& words) {
    ExpectInvalid("sampling." + field, words);
    sampling.Clear();
  };
  for (const float bad : {0.0f, 1e-40f, 0.0099f, 10.5f, kNan}) {
    sampling.set_repetition_penalty(bad);
    check("repetition_penalty", "must be in [0.01, 10]");
  }
  for (const float bad : {-2.5f, 2.5f, kNan}) {
    sampling.set_presence_penalty(bad);
    check("presence_penalty", "must be in [-2, 2]");
    sampling.set_frequency_penalty(bad);
    check("frequency_penalty", "must be in [-2, 2]");
  }
  for (const float bad : {0.0f, 1.5f, kNan}) {
    sampling.set_typical_p(bad);
    check("typical_p", "must be in (0, 1]");
  }
  sampling.set_penalty_window(0);
  check("penalty_window", "is 0");
  for (const uint32_t bad : {uint32_t{kMaxPenaltyWindow} + 1, ~uint32_t{0}}) {
    sampling.set_penalty_window(bad);
    check("penalty_window", "is " + std::to_string(bad) + "; the limit is 4096");
    sampling.set_no_repeat_ngram_size(bad);
    check("no_repeat_ngram_size", "is " + std::to_string(bad) + "; the limit is 64");
  }
  (*sampling.mutable_logit_bias())[5] = kNan;
  check("logit_bias", "of id 5");
  (*sampling.mutable_logit_bias())[5] = 101;
  check("logit_bias", "of id 5 is 101; it must be in [-100, 100]");
  for (const uint32_t bad : {static_cast<uint32_t>(config_.vocab_size), uint32_t{1} << 31, ~uint32_t{0}}) {
    (*sampling.mutable_logit_bias())[bad] = 1;
    check("logit_bias", "has id " + std::to_string(bad));
    sampling.add_allowed_token_ids(1);
    sampling.add_allowed_token_ids(bad);
    check("allowed_token_ids[1]", "is " + std::to_string(bad));
    sampling.add_banned_token_ids(bad);
    check("banned_token_ids[0]", "is " + std::to_string(bad));
  }
  sampling.add_allowed_token_ids(7);
  sampling.add_banned_token_ids(7);
  check("allowed_token_ids", "nothing is left to draw");
  request_.mutable_stopping()->set_max_tokens(3);
  request_.mutable_stopping()->set_min_tokens(4);
  ExpectInvalid("stopping.min_tokens", "is 4; it must be 0 to max_tokens, 3");
}

TEST_F(RequestValidationTest, HugeTopKCutsNothing) {
  request_.mutable_sampling()->set_top_k(~uint32_t{0});
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.sampling.top_k, std::numeric_limits<int32_t>::max());
}

TEST_F(RequestValidationTest, DefaultsComeFromTheCheckpointAndZerosAreKept) {
  model_.defaults = {.temperature = 0.5f,
                     .top_p = 0.9f,
                     .min_p = 0.1f,
                     .typical_p = 0.7f,
                     .repetition_penalty = 1.2f,
                     .top_k = 40,
                     .no_repeat_ngram_size = 3,
                     .max_tokens = 12};
  auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.sampling.temperature, 0.5f);
  EXPECT_EQ(converted->generation.sampling.top_k, 40);
  EXPECT_EQ(converted->generation.sampling.typical_p, 0.7f);
  EXPECT_EQ(converted->generation.sampling.repetition_penalty, 1.2f);
  EXPECT_EQ(converted->generation.sampling.no_repeat_ngram_size, 3);
  EXPECT_EQ(converted->generation.stopping.max_tokens, 12);
  request_.mutable_sampling()->set_temperature(0);
  request_.mutable_sampling()->set_top_k(0);
  request_.mutable_sampling()->set_repetition_penalty(1);
  request_.mutable_sampling()->set_no_repeat_ngram_size(0);
  request_.mutable_stopping()->set_max_tokens(0);
  converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.sampling.temperature, 0);
  EXPECT_EQ(converted->generation.sampling.top_k, 0);
  EXPECT_EQ(converted->generation.sampling.repetition_penalty, 1.0f);
  EXPECT_EQ(converted->generation.sampling.no_repeat_ngram_size, 0);
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

TEST_F(RequestValidationTest, SamplesAreBranchesWithSeedsOfTheirOwn) {
  request_.mutable_sampling()->set_seed(std::numeric_limits<uint64_t>::max());
  EXPECT_TRUE(Convert()->branches.empty()) << "one, when nothing is said";
  request_.set_samples(1);
  EXPECT_TRUE(Convert()->branches.empty());
  request_.set_samples(3);
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  ASSERT_EQ(converted->branches.size(), 3u);
  EXPECT_EQ(converted->branches[0].seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(converted->branches[1].seed, 0u);
  EXPECT_EQ(converted->branches[2].seed, 1u);
  request_.set_samples(0);
  ExpectInvalid("samples", "is 0; it must be 1 to 64");
  request_.set_samples(65);
  ExpectInvalid("samples", "asks for 65; the limit is 64");
  request_.set_samples(std::numeric_limits<uint32_t>::max());
  ExpectInvalid("samples", "the limit is 64");
  model_.limits.max_queue = 16;
  request_.set_samples(17);
  ExpectInvalid("samples", "asks for 17; the queue of this server holds 16");
  request_.set_samples(2);
  request_.mutable_session()->set_session_id("s");
  ExpectInvalid("samples", "is 2 and a session is given");
}

TEST_F(RequestValidationTest, AnEchoIsOfThePromptAndBounded) {
  request_.mutable_output()->set_echo(true);
  const auto converted = Convert();
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->generation.echo_tokens, std::ssize(converted->generation.prompt));
  model_.limits.max_prompt_tokens = 1 << 20;
  request_.clear_text();
  for (int i = 0; i < kMaxEchoTokens; ++i) request_.mutable_token_ids()->add_ids(5);
  EXPECT_TRUE(Convert().ok());
  request_.mutable_token_ids()->add_ids(5);
  ExpectInvalid("output.echo", "the prompt has 32769 tokens; the limit with it is 32768");

  request_.clear_token_ids();
  request_.set_text("go on");
  request_.mutable_session()->set_session_id("s");
  const auto turn = Convert();
  ASSERT_TRUE(turn.ok()) << turn.status();
  EXPECT_TRUE(turn->turn->echoes);
  EXPECT_EQ(turn->generation.echo_tokens, 0) << "which prompt it is will be known with the session";
  request_.mutable_stopping()->set_max_tokens(0);
  ExpectInvalid("output.echo", "a session's turn with max_tokens 0 has no output");
}

TEST_F(RequestValidationTest, AWholeReplyHoldsAllSamplesAndTheEcho) {
  model_.limits.max_reply_bytes = 21 * 1000;  // a thousand tokens of 5 + 16 bytes
  request_.clear_text();
  for (int i = 0; i < 100; ++i) request_.mutable_token_ids()->add_ids(5);
  request_.mutable_stopping()->set_max_tokens(500);
  EXPECT_TRUE(Convert(ReplyKind::kWhole).ok());
  request_.set_samples(2);
  EXPECT_TRUE(Convert(ReplyKind::kWhole).ok());
  request_.mutable_output()->set_echo(true);
  const absl::Status status = Convert(ReplyKind::kWhole).status();
  EXPECT_EQ(FieldOf(status), "stopping.max_tokens") << status;
  EXPECT_TRUE(Convert(ReplyKind::kStream).ok());
}

TEST_F(RequestValidationTest, AWholeReplyHoldsTheEchoOfASessionsTurn) {
  model_.limits.max_reply_bytes = 21 * 1000;
  request_.clear_text();
  for (int i = 0; i < 100; ++i) request_.mutable_token_ids()->add_ids(5);
  request_.mutable_session()->set_session_id("chat");
  request_.mutable_stopping()->set_max_tokens(901);
  EXPECT_TRUE(Convert(ReplyKind::kWhole).ok());
  request_.mutable_output()->set_echo(true);
  const absl::Status status = Convert(ReplyKind::kWhole).status();
  EXPECT_EQ(FieldOf(status), "stopping.max_tokens") << status;
  EXPECT_NE(status.message().find("asks for 1001 tokens in one reply; with top_logprobs 0 the limit is 1000"),
            absl::string_view::npos)
      << status;
  EXPECT_TRUE(Convert(ReplyKind::kStream).ok());
  request_.mutable_stopping()->set_max_tokens(900);
  EXPECT_TRUE(Convert(ReplyKind::kWhole).ok());
}

TEST_F(RequestValidationTest, ContinuationsAreBranchesAndAreNamedInErrors) {
  v1::ScoreRequest score;
  score.set_text("Once upon a");
  score.add_continuations()->set_text(" time");
  score.add_continuations()->mutable_token_ids()->add_ids(7);
  const auto converted = ToScoringRequest(score, model_);
  ASSERT_TRUE(converted.ok()) << converted.status();
  ASSERT_EQ(converted->branches.size(), 2u);
  EXPECT_EQ(converted->branches[0].continuation, *tokenizer_->EncodeContinuation(" time", false));
  EXPECT_EQ(converted->branches[1].continuation, std::vector<TokenId>{7});
  EXPECT_TRUE(converted->generation.prompt_logprobs);
  EXPECT_TRUE(converted->generation.use_prefix_cache);

  const auto expect_invalid = [&](const v1::ScoreRequest& bad, const std::string& field,
                                  const std::string& words) {
    const absl::Status status = ToScoringRequest(bad, model_).status();
    EXPECT_EQ(FieldOf(status), field) << status;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status;
  };
  v1::ScoreRequest bad = score;
  for (uint32_t id : {1u, 2u, 4096u}) bad.add_continuations()->mutable_token_ids()->add_ids(id);
  expect_invalid(bad, "continuations[4].token_ids.ids[0]", "is 4096");
  bad = score;
  bad.add_continuations();
  expect_invalid(bad, "continuations[2]", "neither text nor token_ids");
  bad = score;
  bad.add_continuations()->set_text("");
  expect_invalid(bad, "continuations[2]", "is empty");
  bad = score;
  while (bad.continuations_size() <= kMaxContinuations) bad.add_continuations()->set_text("a");
  expect_invalid(bad, "continuations", "asks for 257; the limit is 256");
  bad = score;
  for (int i = 0; i < 1000; ++i) bad.mutable_continuations(1)->mutable_token_ids()->add_ids(3);
  expect_invalid(bad, "continuations[1]", "the limit is 1000");
  bad = score;
  bad.clear_continuations();
  bad.set_use_prefix_cache(true);
  expect_invalid(bad, "use_prefix_cache", "there are no continuations");
  bad.clear_use_prefix_cache();
  bad.set_cache_salt("salt");
  expect_invalid(bad, "cache_salt", "there are no continuations");
}

TEST_F(RequestValidationTest, ATextWithoutASpaceHasALimit) {
  model_.limits.max_prompt_tokens = 1 << 24;
  request_.set_text("Once " + std::string(kMaxStretchBytes, 'a'));
  ExpectInvalid("text", "of 1048581 bytes cannot be tokenised: 1048581 bytes have no place to split them");
  ExpectInvalid("text", "the limit is 1048576");
  request_.mutable_session()->set_session_id("s");
  ExpectInvalid("text", "the limit is 1048576");
}

TEST_F(RequestValidationTest, ATextThatIsTooLongCostsNothing) {
  model_.limits.max_prompt_tokens = 1000;
  // Too long for its bytes alone: not even one space is there to cut it at.
  request_.set_text(std::string(64 << 20, 'x'));
  auto begin = std::chrono::steady_clock::now();
  ExpectInvalid("text", "of 67108864 bytes has at least");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
  // Too long for its tokens: found where it is cut.
  std::string text;
  while (text.size() < 15'000) text += "a b c d e ";
  request_.set_text(text);
  ExpectInvalid("text", "tokens; the limit is 1000");
}

TEST_F(RequestValidationTest, ALongTextIsGivenUpWhenNobodyWantsItAnyMore) {
  model_.limits.max_prompt_tokens = 1 << 20;
  std::string text;
  while (text.size() < (1 << 20)) text += "the little dog ran ";
  request_.set_text(text);
  int asked = 0;
  const auto wanted = [&] { return ++asked < 3 ? absl::OkStatus() : absl::DeadlineExceededError("passed"); };
  const absl::Status status = ToGenerationRequest(request_, model_, ReplyKind::kStream, wanted).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(asked, 3);
}

}  // namespace
}  // namespace efla
