// The demonstration model from outside: its published figures, and the rules of text.
#include <cmath>
#include <fstream>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

class DemoServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = ServerProcess::Start(SourceDir() / "model/demo").release();
    std::ifstream file(SourceDir() / "model/demo/expected.json");
    expected_ = new nlohmann::json(nlohmann::json::parse(file));
  }
  static void TearDownTestSuite() {
    delete server_;
    delete expected_;
  }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    generation_ = v1::Generation::NewStub(server_->NewChannel());
    models_ = v1::Models::NewStub(server_->NewChannel());
  }

  static v1::GenerateRequest TextRequest(const std::string& text, uint32_t max_tokens = 48) {
    v1::GenerateRequest request = GreedyRequest({}, max_tokens);
    request.clear_token_ids();
    request.set_text(text);
    return request;
  }

  std::vector<uint32_t> Tokenize(const std::string& text, bool add_bos = false, bool parse_special = false) {
    v1::TokenizeRequest request;
    request.set_text(text);
    request.set_add_bos(add_bos);
    request.set_parse_special_tokens(parse_special);
    v1::TokenizeResponse response;
    grpc::ClientContext context;
    const grpc::Status status = models_->Tokenize(&context, request, &response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    EXPECT_EQ(response.pieces_size(), response.token_ids_size());
    return {response.token_ids().begin(), response.token_ids().end()};
  }

  std::string Detokenize(const std::vector<uint32_t>& ids) { return e2e::Detokenize(*models_, ids); }

  // What `ids` add to the text of `prompt`: what a stream of them must say.
  std::string Continuation(const std::vector<uint32_t>& prompt, const std::vector<uint32_t>& ids) {
    std::vector<uint32_t> whole = prompt;
    whole.insert(whole.end(), ids.begin(), ids.end());
    const std::string before = Detokenize(prompt), after = Detokenize(whole);
    EXPECT_EQ(after.substr(0, before.size()), before);
    return after.substr(before.size());
  }

  v1::ScoreResponse Score(const v1::ScoreRequest& request) {
    v1::ScoreResponse response;
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const grpc::Status status = generation_->Score(&context, request, &response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    return response;
  }

  static ServerProcess* server_;
  static nlohmann::json* expected_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
};

ServerProcess* DemoServerTest::server_ = nullptr;
nlohmann::json* DemoServerTest::expected_ = nullptr;

TEST_F(DemoServerTest, DescribesItself) {
  v1::Model model;
  grpc::ClientContext context;
  const grpc::Status status = models_->GetModel(&context, v1::GetModelRequest(), &model);
  ASSERT_TRUE(status.ok()) << ToString(status);
  EXPECT_EQ(model.name(), server_->model());
  EXPECT_EQ(model.model_type(), "efla");
  EXPECT_NEAR(static_cast<double>(model.parameters()), 9.6e6, 0.1e6);
  EXPECT_EQ(model.vocab_size(), 4096u);
  EXPECT_EQ(model.num_layers(), 10u);
  EXPECT_EQ(model.num_heads() * model.d_k(), 256u);
  EXPECT_EQ(model.num_heads() * model.d_v(), 256u);
  // S in float32 is the greatest part of a context; the convolution tails come on top.
  EXPECT_GE(model.state_bytes(), 10u * 2 * 128 * 128 * 4);
  EXPECT_LT(model.state_bytes(), 11u * 2 * 128 * 128 * 4);
  EXPECT_EQ(model.bos_token_id(), 1u);
  ASSERT_EQ(model.eos_token_ids_size(), 1);
  EXPECT_EQ(model.eos_token_ids(0), 2u);
  EXPECT_TRUE(model.has_tokenizer());
  EXPECT_EQ(model.device().substr(0, TestDevice().size()), TestDevice());
  EXPECT_EQ(model.limits().max_top_logprobs(), 20u);
  EXPECT_EQ(model.limits().max_stop_strings(), 64u);
  EXPECT_EQ(model.limits().max_stop_bytes(), 1024u);
  EXPECT_GT(model.limits().state_slots(), 0u);
  EXPECT_EQ(model.defaults().max_tokens(), 256u);
  EXPECT_EQ(model.defaults().top_p(), 1.0f);
}

TEST_F(DemoServerTest, ReachesItsPerplexityFromTextAndFromIds) {
  const nlohmann::json& eval = expected_->at("eval");
  std::ifstream file(SourceDir() / "model/demo" / eval.at("file"));
  const std::string text(std::istreambuf_iterator<char>(file), {});
  v1::ScoreRequest by_text;
  by_text.set_text(text);
  const v1::ScoreResponse scored = Score(by_text);
  const int num_scored = eval.at("tokens_scored");
  ASSERT_EQ(scored.logprobs_size(), num_scored + 1);
  EXPECT_EQ(scored.token_ids(0), 1u) << "text gets a BOS in front";
  const double perplexity = std::exp(-scored.sum_logprob() / num_scored);
  const double relative = TestDevice() == "cpu" ? 5e-4 : 3e-3;
  EXPECT_NEAR(perplexity, eval.at("perplexity").get<double>(),
              relative * eval.at("perplexity").get<double>());
  const Tolerance tolerance = DeviceTolerance();
  for (int i = 0; i < 256; ++i) {
    const double value = eval.at("first_256_logprobs").at(i);
    if (value < tolerance.least_logprob) continue;
    EXPECT_NEAR(scored.logprobs(i + 1).logprob(), value, tolerance.logprob) << "position " << i + 1;
  }

  v1::ScoreRequest by_ids;
  const std::vector<uint32_t> ids = Tokenize(text, /*add_bos=*/true);
  by_ids.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  const v1::ScoreResponse again = Score(by_ids);
  ASSERT_EQ(again.logprobs_size(), scored.logprobs_size());
  for (int i = 0; i < scored.logprobs_size(); ++i) {
    ASSERT_TRUE(SameBits(again.logprobs(i), scored.logprobs(i))) << "position " << i;
  }
}

TEST_F(DemoServerTest, ContinuesTextAsTheReference) {
  const Tolerance tolerance = DeviceTolerance();
  for (const nlohmann::json& prompt : expected_->at("prompts")) {
    const std::string text = prompt.at("text");
    v1::GenerateRequest request = TextRequest(text);
    request.mutable_output()->set_logprobs(true);
    const Reply reply = Generate(*generation_, request);
    ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
    const std::vector<uint32_t> prompt_ids = prompt.at("ids"), expected_ids = prompt.at("greedy_ids");
    EXPECT_EQ(reply.accepted.prompt_tokens(), prompt_ids.size()) << text;
    ASSERT_EQ(reply.token_ids.size(), expected_ids.size());
    ExpectGreedy(reply.token_ids, expected_ids, prompt.at("greedy_margins"), text);
    ASSERT_EQ(reply.logprobs.size(), expected_ids.size());
    for (size_t i = 0; i < expected_ids.size() && reply.token_ids[i] == expected_ids[i]; ++i) {
      const double value = prompt.at("greedy_logprobs").at(i);
      EXPECT_NEAR(reply.logprobs[i].logprob(), value, tolerance.logprob) << text << ", token " << i;
    }
    EXPECT_EQ(reply.text, Continuation(prompt_ids, reply.token_ids)) << text;
    if (reply.token_ids == expected_ids) {
      // The reference decodes the continuation by itself and so drops the space of its first piece.
      const std::string expected_text = prompt.at("greedy_text");
      EXPECT_EQ(reply.text.substr(reply.text.size() - expected_text.size()), expected_text);
      EXPECT_LE(reply.text.size(), expected_text.size() + 1);
    }
  }
}

TEST_F(DemoServerTest, TokenizesAsSentencePiece) {
  for (const nlohmann::json& expected : expected_->at("tokenizer")) {
    const std::string text = expected.at("text");
    const std::vector<uint32_t> ids = expected.at("ids");
    EXPECT_EQ(Tokenize(text), ids) << text;
    EXPECT_EQ(Detokenize(ids), expected.at("decoded").get<std::string>());
    std::vector<uint32_t> with_bos = {1};
    with_bos.insert(with_bos.end(), ids.begin(), ids.end());
    EXPECT_EQ(Tokenize(text, /*add_bos=*/true), with_bos) << text;
  }
  EXPECT_EQ(Tokenize("</s>", false, /*parse_special=*/true), std::vector<uint32_t>{2});
  EXPECT_NE(Tokenize("</s>"), std::vector<uint32_t>{2}) << "plain text by default";
}

TEST_F(DemoServerTest, ScoredBytesJoinToTheText) {
  for (const char* text : {"emoji 🙂👩‍👩‍👧 日本語", "a </s> b", "two  spaces"}) {
    v1::ScoreRequest request;
    request.set_text(text);
    std::string bytes;
    const v1::ScoreResponse scored = Score(request);
    for (const v1::TokenLogprob& token : scored.logprobs()) bytes += token.bytes();
    if (!bytes.empty() && bytes[0] == ' ') bytes.erase(0, 1);  // the dummy prefix
    EXPECT_EQ(bytes, text);
  }
}

TEST_F(DemoServerTest, DeltasAreWholeCharactersAndJoinToTheDetokenizedIds) {
  // At so high a temperature the draw is close to uniform: byte pieces in every order, most of them no UTF-8.
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    v1::GenerateRequest request = TextRequest("Once", 300);
    request.mutable_sampling()->set_temperature(100);
    request.mutable_sampling()->set_seed(seed);
    request.mutable_output()->set_skip_special_tokens(seed % 2 == 0);
    const Reply reply = Generate(*generation_, request);
    ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
    ASSERT_EQ(reply.token_ids.size(), 300u);
    for (const v1::GenerateResponse& event : reply.events) {
      EXPECT_TRUE(IsValidUtf8(event.has_delta() ? event.delta().text() : event.finished().text()));
    }
    EXPECT_NE(reply.text.find("\xEF\xBF\xBD"), std::string::npos) << "broken characters were in it";
    if (seed % 2 == 0) {
      EXPECT_EQ(reply.text, Continuation(Tokenize("Once", true), reply.token_ids));
    }
  }
}

TEST_F(DemoServerTest, StopStringsAreFoundAcrossTokens) {
  const std::string prompt = expected_->at("prompts").at(0).at("text");
  const Reply whole = Generate(*generation_, TextRequest(prompt));
  ASSERT_TRUE(whole.status.ok()) << ToString(whole.status);
  ASSERT_GT(whole.text.size(), 60u);
  EXPECT_GT(whole.token_ids.size(), whole.text.size() / 8) << "stops of 9 bytes cross a token's border";
  for (size_t begin : {1, 7, 20, 33, 41}) {
    for (bool include : {false, true}) {
      const std::string stop = whole.text.substr(begin, 9);
      v1::GenerateRequest request = TextRequest(prompt);
      request.mutable_stopping()->add_stop("never in the text");
      request.mutable_stopping()->add_stop(stop);
      request.mutable_stopping()->set_include_stop(include);
      const Reply reply = Generate(*generation_, request);
      ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
      EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_STOP_STRING) << stop;
      EXPECT_EQ(reply.finished.stop(), stop);
      const size_t end = whole.text.find(stop) + (include ? stop.size() : 0);
      EXPECT_EQ(reply.text, whole.text.substr(0, end));
      EXPECT_LT(reply.finished.usage().completion_tokens(), whole.token_ids.size());
    }
  }
}

TEST_F(DemoServerTest, TextHeldForAStopStringComesWithTheEnd) {
  const std::string prompt = expected_->at("prompts").at(0).at("text");
  const Reply whole = Generate(*generation_, TextRequest(prompt));
  v1::GenerateRequest request = TextRequest(prompt);
  request.mutable_stopping()->add_stop(whole.text.substr(whole.text.size() - 12) + "\x7f never");
  const Reply reply = Generate(*generation_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(reply.text, whole.text);
  EXPECT_EQ(reply.token_ids, whole.token_ids);
  EXPECT_FALSE(reply.finished.text().empty()) << "the end releases what was held";
}

}  // namespace
}  // namespace efla::e2e
