// Requests that cannot be served: each gets its status and a message that names the field, the value and the
// bound, and the server goes on.
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using grpc::StatusCode;

constexpr uint32_t kVocab = 320;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// `words` must all be in the message, whatever their case.
void ExpectRefused(const grpc::Status& status, StatusCode code, const std::vector<std::string>& words,
                   const std::string& what) {
  EXPECT_EQ(status.error_code(), code) << what << ": " << ToString(status);
  const std::string message = absl::AsciiStrToLower(status.error_message());
  for (const std::string& word : words) {
    EXPECT_NE(message.find(absl::AsciiStrToLower(word)), std::string::npos)
        << what << ": \"" << word << "\" is not in: " << status.error_message();
  }
}

struct BadGenerate {
  const char* name;
  void (*spoil)(v1::GenerateRequest& good);
  StatusCode code;
  std::vector<std::string> words;
};

void SetPrompt(v1::GenerateRequest& r, std::initializer_list<uint32_t> ids) {
  r.mutable_token_ids()->mutable_ids()->Clear();
  r.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
}

template <typename Message>
void AddUnknownField(Message& message, int number) {
  message.GetReflection()->MutableUnknownFields(&message)->AddVarint(number, 1);
}

const std::vector<BadGenerate>& BadGenerates() {
  using R = v1::GenerateRequest;
  constexpr auto kInvalid = StatusCode::INVALID_ARGUMENT;
  static const std::vector<BadGenerate> kCases = {
      {"temperature NaN",
       [](R& r) { r.mutable_sampling()->set_temperature(kNan); },
       kInvalid,
       {"temperature", "nan", "100"}},
      {"temperature Inf",
       [](R& r) { r.mutable_sampling()->set_temperature(kInf); },
       kInvalid,
       {"temperature", "inf", "100"}},
      {"temperature -1",
       [](R& r) { r.mutable_sampling()->set_temperature(-1); },
       kInvalid,
       {"temperature", "-1", "0"}},
      {"temperature 101",
       [](R& r) { r.mutable_sampling()->set_temperature(101); },
       kInvalid,
       {"temperature", "101", "100"}},
      {"top_p 0", [](R& r) { r.mutable_sampling()->set_top_p(0); }, kInvalid, {"top_p", "0", "1"}},
      {"top_p 1.5", [](R& r) { r.mutable_sampling()->set_top_p(1.5f); }, kInvalid, {"top_p", "1.5", "1"}},
      {"top_p -1", [](R& r) { r.mutable_sampling()->set_top_p(-1); }, kInvalid, {"top_p", "-1"}},
      {"top_p NaN", [](R& r) { r.mutable_sampling()->set_top_p(kNan); }, kInvalid, {"top_p", "nan"}},
      {"min_p 1", [](R& r) { r.mutable_sampling()->set_min_p(1); }, kInvalid, {"min_p", "1"}},
      {"min_p -0.5", [](R& r) { r.mutable_sampling()->set_min_p(-0.5f); }, kInvalid, {"min_p", "-0.5"}},
      {"min_p NaN", [](R& r) { r.mutable_sampling()->set_min_p(kNan); }, kInvalid, {"min_p", "nan"}},
      {"prompt id vocab_size",
       [](R& r) {
         SetPrompt(r, {5, kVocab});
       },
       kInvalid,
       {"token_ids", "320"}},
      {"prompt id 2^31",
       [](R& r) {
         SetPrompt(r, {5, 1u << 31});
       },
       kInvalid,
       {"token_ids", "2147483648", "320"}},
      {"prompt id 2^32-1", [](R& r) { SetPrompt(r, {~0u}); }, kInvalid, {"token_ids", "4294967295", "320"}},
      {"stop id vocab_size",
       [](R& r) { r.mutable_stopping()->add_stop_token_ids(kVocab); },
       kInvalid,
       {"stop_token_ids", "320"}},
      {"stop id 2^31",
       [](R& r) { r.mutable_stopping()->add_stop_token_ids(1u << 31); },
       kInvalid,
       {"stop_token_ids", "2147483648", "320"}},
      {"stop id 2^32-1",
       [](R& r) { r.mutable_stopping()->add_stop_token_ids(~0u); },
       kInvalid,
       {"stop_token_ids", "4294967295", "320"}},
      {"257 stop ids",
       [](R& r) {
         for (int i = 0; i < 257; ++i) r.mutable_stopping()->add_stop_token_ids(5);
       },
       kInvalid,
       {"stop_token_ids", "257", "256"}},
      {"65 stops",
       [](R& r) {
         for (int i = 0; i < 65; ++i) r.mutable_stopping()->mutable_stop()->Add("x");
       },
       kInvalid,
       {"stop", "65", "64"}},
      {"stop of 1025 bytes",
       [](R& r) { r.mutable_stopping()->add_stop(std::string(1025, 'x')); },
       kInvalid,
       {"stop", "1025", "1024"}},
      {"empty stop", [](R& r) { r.mutable_stopping()->add_stop(""); }, kInvalid, {"stop", "empty"}},
      {"max_tokens 2^32-1",
       [](R& r) { r.mutable_stopping()->set_max_tokens(~0u); },
       kInvalid,
       {"max_tokens", "4294967295", "1048576"}},
      {"empty prompt ids", [](R& r) { SetPrompt(r, {}); }, kInvalid, {"token_ids", "empty"}},
      {"prompt of 101",
       [](R& r) {
         for (int i = 0; i < 98; ++i) r.mutable_token_ids()->add_ids(5);
       },
       kInvalid,
       {"prompt", "101", "100"}},
      {"both prompts", [](R& r) { r.set_text("x"); }, kInvalid, {"text", "token_ids"}},
      {"neither prompt", [](R& r) { r.clear_token_ids(); }, kInvalid, {"text", "token_ids"}},
      {"unknown model",
       [](R& r) { r.set_model("other"); },
       StatusCode::NOT_FOUND,
       {"model", "other", "efla_basic"}},
      {"text without a tokenizer",
       [](R& r) {
         r.clear_token_ids();
         r.set_text("x");
       },
       StatusCode::FAILED_PRECONDITION,
       {"tokenizer"}},
      {"top_logprobs 21",
       [](R& r) {
         r.mutable_output()->set_logprobs(true);
         r.mutable_output()->set_top_logprobs(21);
       },
       kInvalid,
       {"top_logprobs", "21", "20"}},
      {"top_logprobs without logprobs",
       [](R& r) { r.mutable_output()->set_top_logprobs(2); },
       kInvalid,
       {"top_logprobs", "logprobs", "2"}},
      {"request_id of 257 bytes",
       [](R& r) { r.set_request_id(std::string(257, 'x')); },
       kInvalid,
       {"request_id", "257", "256"}},
      {"unknown field", [](R& r) { AddUnknownField(r, 4711); }, StatusCode::UNIMPLEMENTED, {"4711"}},
      {"unknown sampling field",
       [](R& r) { AddUnknownField(*r.mutable_sampling(), 815); },
       StatusCode::UNIMPLEMENTED,
       {"815"}},
      {"unknown stopping field",
       [](R& r) { AddUnknownField(*r.mutable_stopping(), 816); },
       StatusCode::UNIMPLEMENTED,
       {"816"}},
      {"unknown output field",
       [](R& r) { AddUnknownField(*r.mutable_output(), 817); },
       StatusCode::UNIMPLEMENTED,
       {"817"}},
      {"unknown prompt field",
       [](R& r) { AddUnknownField(*r.mutable_token_ids(), 818); },
       StatusCode::UNIMPLEMENTED,
       {"818"}},
  };
  return kCases;
}

class BadInputTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = ServerProcess::Start(GoldenDir("efla_basic"), {"--max-prompt-tokens", "100", "--model-name",
                                                             "efla_basic", "--max-message-mib", "1"})
                  .release();
  }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    channel_ = server_->NewChannel();
    generation_ = v1::Generation::NewStub(channel_);
    models_ = v1::Models::NewStub(channel_);
  }
  void TearDown() override {
    if (server_ == nullptr) return;
    const GoldenCase golden = GoldenCases("efla_basic")[2];
    const Reply reply = Generate(*generation_, GreedyRequest(golden.tokens, 24));
    ASSERT_TRUE(reply.status.ok()) << "a good request after the bad ones: " << ToString(reply.status);
    ExpectGreedy(reply.token_ids, golden.greedy, golden.greedy_margins, "after the bad requests");
    ExpectIdle(server_->admin_address());
  }

  grpc::Status Complete(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    v1::CompleteResponse response;
    return generation_->Complete(&context, request, &response);
  }
  grpc::Status Score(const v1::ScoreRequest& request) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    v1::ScoreResponse response;
    return generation_->Score(&context, request, &response);
  }

  static v1::GenerateRequest Good() { return GreedyRequest(std::vector<uint32_t>{5, 6, 7}, 4); }

  static ServerProcess* server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
};

ServerProcess* BadInputTest::server_ = nullptr;

TEST_F(BadInputTest, GenerateAndCompleteNameFieldValueAndBound) {
  ASSERT_TRUE(Complete(Good()).ok()) << "the request that is spoilt below is good";
  for (const BadGenerate& bad : BadGenerates()) {
    v1::GenerateRequest request = Good();
    bad.spoil(request);
    const Reply reply = Generate(*generation_, request);
    ExpectRefused(reply.status, bad.code, bad.words, bad.name);
    EXPECT_TRUE(reply.events.empty()) << bad.name;
    ExpectRefused(Complete(request), bad.code, bad.words, std::string(bad.name) + " (Complete)");
  }
}

TEST_F(BadInputTest, ScoreNamesFieldValueAndBound) {
  v1::ScoreRequest good;
  good.mutable_token_ids()->add_ids(5);
  ASSERT_TRUE(Score(good).ok());
  v1::ScoreRequest bad = good;
  bad.mutable_token_ids()->add_ids(kVocab);
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"token_ids", "320"}, "id vocab_size");
  bad = good;
  bad.mutable_token_ids()->add_ids(~0u);
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"token_ids", "4294967295"}, "id 2^32-1");
  bad = good;
  bad.set_top_logprobs(21);
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"top_logprobs", "21", "20"}, "top_logprobs");
  bad = good;
  bad.set_text("x");
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"text", "token_ids"}, "both prompts");
  ExpectRefused(Score({}), StatusCode::INVALID_ARGUMENT, {"text", "token_ids"}, "neither prompt");
  bad = good;
  bad.mutable_token_ids()->clear_ids();
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"token_ids", "empty"}, "empty ids");
  bad.clear_token_ids();
  bad.set_text("x");
  ExpectRefused(Score(bad), StatusCode::FAILED_PRECONDITION, {"tokenizer"}, "text");
  bad = good;
  bad.set_model("other");
  ExpectRefused(Score(bad), StatusCode::NOT_FOUND, {"model", "other"}, "model");
  bad = good;
  bad.set_request_id(std::string(257, 'x'));
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"request_id", "257", "256"}, "request_id");
  bad = good;
  for (int i = 0; i < 100; ++i) bad.mutable_token_ids()->add_ids(5);
  ExpectRefused(Score(bad), StatusCode::INVALID_ARGUMENT, {"prompt", "101", "100"}, "too long");
  bad = good;
  AddUnknownField(bad, 4712);
  ExpectRefused(Score(bad), StatusCode::UNIMPLEMENTED, {"4712"}, "unknown field");
}

TEST_F(BadInputTest, ModelsNameWhatIsWrong) {
  v1::Model model;
  v1::GetModelRequest get;
  get.set_model("other");
  grpc::ClientContext contexts[4];
  ExpectRefused(models_->GetModel(&contexts[0], get, &model), StatusCode::NOT_FOUND, {"other"}, "GetModel");
  v1::TokenizeRequest tokenize;
  tokenize.set_text("x");
  v1::TokenizeResponse tokens;
  ExpectRefused(models_->Tokenize(&contexts[1], tokenize, &tokens), StatusCode::FAILED_PRECONDITION,
                {"tokenizer"}, "Tokenize");
  v1::DetokenizeRequest detokenize;
  detokenize.add_token_ids(5);
  v1::DetokenizeResponse text;
  ExpectRefused(models_->Detokenize(&contexts[2], detokenize, &text), StatusCode::FAILED_PRECONDITION,
                {"tokenizer"}, "Detokenize");
  AddUnknownField(get, 4713);
  get.clear_model();
  ExpectRefused(models_->GetModel(&contexts[3], get, &model), StatusCode::UNIMPLEMENTED, {"4713"},
                "unknown field");
}

TEST_F(BadInputTest, BytesThatAreNoRequestAreRefused) {
  const std::string not_utf8 = "\x1a\x02\xff\xfe";    // text = two bytes that are no UTF-8
  const std::string short_field = "\x1a\x7fx";        // text of 127 bytes, of which one is there
  const std::string wrong_type = "\x39\x01\x02\x03";  // sampling as a fixed64 that ends early
  const std::string endless_varint(20, '\xff');
  for (const std::string& bytes : {not_utf8, short_field, wrong_type, endless_varint}) {
    for (const char* method : {"Generate", "Complete", "Score"}) {
      const grpc::Status status = SendBytes(channel_, std::string("/efla.v1.Generation/") + method, bytes);
      EXPECT_TRUE(status.error_code() == StatusCode::INTERNAL ||
                  status.error_code() == StatusCode::INVALID_ARGUMENT ||
                  status.error_code() == StatusCode::UNIMPLEMENTED)
          << method << ": " << ToString(status);
    }
  }
  EXPECT_EQ(SendBytes(channel_, "/efla.v1.Generation/NoSuchMethod", "").error_code(),
            StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(SendBytes(channel_, "/no.such.Service/Method", "").error_code(), StatusCode::UNIMPLEMENTED);
}

TEST_F(BadInputTest, AMessageOverTheReceiveLimitIsRefused) {
  v1::GenerateRequest request = Good();
  request.set_request_id(std::string((size_t{1} << 20) + 1, 'x'));
  EXPECT_EQ(Complete(request).error_code(), StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(BadInputTest, ADeadlineThatPassesEndsTheCallAndFreesItsSlot) {
  const double before =
      Metrics::Read(server_->admin_address()).Sum("efla_requests_total", {"outcome=\"deadline\""});
  const Reply reply =
      Generate(*generation_, GreedyRequest(std::vector<uint32_t>{5, 6, 7}, 1'000'000), milliseconds(150));
  EXPECT_EQ(reply.status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_FALSE(reply.token_ids.empty());
  ExpectIdle(server_->admin_address());
  const Metrics metrics = Metrics::Read(server_->admin_address());
  // A deadline reaches the server either by its own clock or as the client's cancellation, whichever is
  // first.
  EXPECT_GE(metrics.Sum("efla_requests_total", {"outcome=\"deadline\""}) +
                metrics.Sum("efla_requests_total", {"outcome=\"cancelled\""}),
            before + 1);

  const Reply late = Generate(*generation_, Good(), milliseconds(-1));
  EXPECT_EQ(late.status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(late.events.empty());
}

TEST(BadTextTest, AnEmptyTextNeedsItsBos) {
  const auto server = ServerProcess::Start(SourceDir() / "model/demo");
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  v1::GenerateRequest request = GreedyRequest({}, 2);
  request.clear_token_ids();
  request.set_text("");
  EXPECT_EQ(Generate(*stub, request).accepted.prompt_tokens(), 1u);
  request.set_add_bos(false);
  ExpectRefused(Generate(*stub, request).status, StatusCode::INVALID_ARGUMENT, {"text", "empty"}, "no BOS");
  const auto models = v1::Models::NewStub(server->NewChannel());
  v1::DetokenizeRequest detokenize;
  detokenize.add_token_ids(4096);
  v1::DetokenizeResponse text;
  grpc::ClientContext context;
  ExpectRefused(models->Detokenize(&context, detokenize, &text), StatusCode::INVALID_ARGUMENT,
                {"token_ids", "4096"}, "Detokenize");
}

}  // namespace
}  // namespace efla::e2e
