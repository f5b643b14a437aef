// The generation contract from outside: samples, echo, continuations to be scored, long texts, and the
// identity of streamed text.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using nlohmann::json;

class ContractServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = ServerProcess::Start(SourceDir() / "model/demo").release(); }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    generation_ = v1::Generation::NewStub(server_->NewChannel());
    models_ = v1::Models::NewStub(server_->NewChannel());
  }

  static v1::GenerateRequest TextRequest(const std::string& text, uint32_t max_tokens) {
    v1::GenerateRequest request;
    request.set_text(text);
    request.mutable_stopping()->set_max_tokens(max_tokens);
    return request;
  }
  // Of some `words` words, the same each time.
  static std::string Story(int words) {
    const char* const kWords[] = {"the", "dog", "ran", "home", "and", "Lily", "was", "happy", "to", "see"};
    std::string text = "Once";
    for (int i = 0; i < words; ++i) absl::StrAppendFormat(&text, " %s", kWords[(i * 7 + i / 3) % 10]);
    return text;
  }

  std::string Detokenize(const std::vector<uint32_t>& ids) { return e2e::Detokenize(*models_, ids); }
  std::vector<uint32_t> Tokenize(const std::string& text, bool add_bos) {
    v1::TokenizeRequest request;
    request.set_text(text);
    request.set_add_bos(add_bos);
    v1::TokenizeResponse response;
    grpc::ClientContext context;
    const grpc::Status status = models_->Tokenize(&context, request, &response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    return {response.token_ids().begin(), response.token_ids().end()};
  }
  grpc::Status Complete(const v1::GenerateRequest& request, v1::CompleteResponse& response) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    return generation_->Complete(&context, request, &response);
  }
  v1::CompleteResponse Completed(const v1::GenerateRequest& request) {
    v1::CompleteResponse response;
    const grpc::Status status = Complete(request, response);
    EXPECT_TRUE(status.ok()) << ToString(status);
    return response;
  }
  grpc::Status Score(const v1::ScoreRequest& request, v1::ScoreResponse& response) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    return generation_->Score(&context, request, &response);
  }

  // A stream of several samples, taken apart; `read_delay` between reads.
  struct Samples {
    grpc::Status status;
    v1::Accepted accepted;
    std::map<uint32_t, Reply> replies;
    int num_accepted = 0;
  };
  Samples GenerateSamples(const v1::GenerateRequest& request, milliseconds read_delay = milliseconds(0)) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const auto reader = generation_->Generate(&context, request);
    Samples samples;
    const auto add = [&](const auto& part) -> Reply& {
      Reply& reply = samples.replies[part.sample()];
      EXPECT_EQ(reply.events.size(), 0u) << "sample " << part.sample() << " goes on after its end";
      reply.text += part.text();
      reply.token_ids.insert(reply.token_ids.end(), part.token_ids().begin(), part.token_ids().end());
      reply.logprobs.insert(reply.logprobs.end(), part.logprobs().begin(), part.logprobs().end());
      return reply;
    };
    for (v1::GenerateResponse event; reader->Read(&event);) {
      if (event.has_accepted()) {
        samples.accepted = event.accepted();
        ++samples.num_accepted;
      }
      if (event.has_delta()) add(event.delta());
      if (event.has_finished()) {
        Reply& reply = add(event.finished());
        reply.finished = event.finished();
        reply.events.push_back(event);
      }
      std::this_thread::sleep_for(read_delay);
    }
    samples.status = reader->Finish();
    for (auto& [index, reply] : samples.replies) reply.status = samples.status;
    return samples;
  }

  static ServerProcess* server_;
  std::unique_ptr<v1::Generation::Stub> generation_;
  std::unique_ptr<v1::Models::Stub> models_;
};

ServerProcess* ContractServerTest::server_ = nullptr;

TEST_F(ContractServerTest, EachSampleIsTheCallOfItsSeed) {
  for (const int words : {3, 150}) {
    SCOPED_TRACE(words);
    v1::GenerateRequest request = TextRequest(Story(words), 24);
    request.mutable_sampling()->set_seed(11);
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(2);
    request.set_samples(5);
    const Samples samples = GenerateSamples(request);
    ASSERT_TRUE(samples.status.ok()) << ToString(samples.status);
    EXPECT_EQ(samples.num_accepted, 1);
    EXPECT_EQ(samples.accepted.seed(), 11u);
    ASSERT_EQ(samples.replies.size(), 5u);
    const v1::CompleteResponse whole = Completed(request);
    ASSERT_EQ(whole.more_samples_size(), 4);
    uint64_t drawn = 0;
    for (uint32_t i = 0; i < 5; ++i) {
      v1::GenerateRequest alone = request;
      alone.clear_samples();
      alone.mutable_sampling()->set_seed(11 + i);
      const Reply expected = Generate(*generation_, alone);
      const Reply& sample = samples.replies.at(i);
      ExpectSameTokens(sample, expected, absl::StrFormat("sample %d", i));
      EXPECT_EQ(sample.finished.finish_reason(), expected.finished.finish_reason());
      EXPECT_EQ(sample.finished.usage().completion_tokens(), expected.finished.usage().completion_tokens());
      EXPECT_EQ(sample.finished.usage().prompt_tokens(), samples.accepted.prompt_tokens());
      EXPECT_EQ(i == 0 ? whole.text() : whole.more_samples(static_cast<int>(i) - 1).text(), expected.text);
      EXPECT_EQ(i == 0 ? whole.seed() : whole.more_samples(static_cast<int>(i) - 1).seed(), 11 + i);
      drawn += expected.finished.usage().completion_tokens();
    }
    EXPECT_EQ(whole.usage().completion_tokens(), drawn) << "of all";
    EXPECT_EQ(whole.usage().prompt_tokens(), samples.accepted.prompt_tokens()) << "once";
    EXPECT_LE(whole.usage().cached_tokens(), whole.usage().prompt_tokens());
    EXPECT_NE(samples.replies.at(0).text, samples.replies.at(1).text);
  }
}

TEST_F(ContractServerTest, SamplesAreOneRequestAndOnePrefill) {
  const Metrics before = Metrics::Read(server_->admin_address());
  v1::GenerateRequest request = TextRequest(Story(300), 4);
  request.set_use_prefix_cache(false);
  request.set_samples(8);
  const v1::CompleteResponse response = Completed(request);
  const Metrics after = Metrics::Read(server_->admin_address());
  const double prompt = static_cast<double>(response.usage().prompt_tokens());
  EXPECT_EQ(after.Sum("efla_requests_total") - before.Sum("efla_requests_total"), 1);
  EXPECT_EQ(after.Sum("efla_generation_tokens_total") - before.Sum("efla_generation_tokens_total"),
            static_cast<double>(response.usage().completion_tokens()));
  EXPECT_LE(after.Sum("efla_prompt_tokens_total") - before.Sum("efla_prompt_tokens_total"), prompt + 7 * 64);
}

TEST_F(ContractServerTest, SamplesAreNoTurn) {
  v1::GenerateRequest request = TextRequest("Hello", 4);
  request.set_samples(2);
  request.mutable_session()->set_session_id("two-samples");
  request.mutable_session()->set_create_if_missing(true);
  v1::CompleteResponse response;
  const grpc::Status status = Complete(request, response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << ToString(status);
  EXPECT_EQ(status.error_message().substr(0, 7), "samples");
}

TEST_F(ContractServerTest, AnEchoBeginsTheOutput) {
  v1::GenerateRequest request = TextRequest("Once upon a time, there was a", 16);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_output()->set_logprobs(true);
  const Reply plain = Generate(*generation_, request);
  request.mutable_output()->set_echo(true);
  const Reply echoed = Generate(*generation_, request);
  ASSERT_TRUE(echoed.status.ok()) << ToString(echoed.status);
  const std::vector<uint32_t> prompt = Tokenize(request.text(), /*add_bos=*/true);
  std::vector<uint32_t> expected = prompt;
  expected.insert(expected.end(), plain.token_ids.begin(), plain.token_ids.end());
  EXPECT_EQ(echoed.token_ids, expected);
  EXPECT_EQ(echoed.text, request.text() + plain.text);
  EXPECT_EQ(echoed.text, Detokenize(echoed.token_ids));
  ASSERT_EQ(echoed.logprobs.size(), expected.size()) << "an entry a token";
  std::string bytes;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(echoed.logprobs[i].has_logprob(), i >= prompt.size()) << i;
    bytes += echoed.logprobs[i].bytes();
  }
  EXPECT_EQ(bytes, echoed.text);
  EXPECT_EQ(echoed.finished.usage().completion_tokens(), plain.finished.usage().completion_tokens());
  EXPECT_EQ(echoed.events.at(1).delta().text().substr(0, request.text().size()), request.text())
      << "the first delta carries it";

  request.mutable_stopping()->add_stop("time");
  EXPECT_EQ(Completed(request).text(), echoed.text) << "no stop string is looked for in it";
  request.mutable_stopping()->clear_stop();
  request.mutable_stopping()->set_max_tokens(0);
  EXPECT_EQ(Completed(request).text(), request.text()) << "with nothing drawn, the prompt is all";
}

TEST_F(ContractServerTest, ASessionsEchoIsOfThisCallsPrompt) {
  v1::GenerateRequest request = TextRequest("Once upon a time", 5);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_output()->set_echo(true);
  request.mutable_session()->set_session_id("echo");
  request.mutable_session()->set_create_if_missing(true);
  const v1::CompleteResponse first = Completed(request);
  EXPECT_EQ(first.text().substr(0, request.text().size()), request.text());
  request.set_text(" The end. Then");
  const v1::CompleteResponse second = Completed(request);
  EXPECT_EQ(second.text().substr(0, request.text().size()), request.text())
      << "the space is kept: it goes on";
  EXPECT_EQ(second.text().find("Once upon"), std::string::npos);
}

// The identity under everything: random ids, drawn hot, with stop strings, echo and special tokens, read fast
// or slowly.
TEST_F(ContractServerTest, DeltasJoinToTheDetokenizedIds) {
  std::mt19937 random(31);
  const char* const kStops[] = {"e", "th", "\n", ". ", "qu", "\xEF\xBF\xBD", "zz", "\xC3\xA9"};
  int stopped = 0, replaced = 0;
  const int rounds = Sanitized() ? 40 : 120;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    v1::GenerateRequest request;
    std::vector<uint32_t> prompt = {1};
    for (uint32_t i = random() % 20; i > 0; --i) {
      // Byte pieces stand at 3 to 258: half of all, so that characters are begun, broken and finished.
      prompt.push_back(random() % 2 == 0 ? 3 + random() % 256 : random() % 4096);
    }
    request.mutable_token_ids()->mutable_ids()->Add(prompt.begin(), prompt.end());
    v1::SamplingParams& sampling = *request.mutable_sampling();
    sampling.set_seed(random());
    sampling.set_temperature(random() % 3 == 0 ? 100 : 2);  // 100 draws from all ids alike
    request.mutable_stopping()->set_max_tokens(1 + random() % 40);
    request.mutable_stopping()->set_ignore_eos(random() % 2 == 0);
    const bool echo = random() % 2 == 0, skip = random() % 4 != 0;
    for (uint32_t i = random() % 3; i > 0; --i)
      request.mutable_stopping()->add_stop(kStops[random() % std::size(kStops)]);
    request.mutable_stopping()->set_include_stop(random() % 2 == 0);
    request.mutable_output()->set_echo(echo);
    request.mutable_output()->set_skip_special_tokens(skip);

    const Samples streamed = GenerateSamples(request, milliseconds(random() % 4 == 0 ? 5 : 0));
    ASSERT_TRUE(streamed.status.ok()) << ToString(streamed.status);
    const Reply& reply = streamed.replies.at(0);
    const v1::CompleteResponse whole = Completed(request);
    EXPECT_EQ(reply.text, whole.text()) << "one reply and any cut of a stream";
    EXPECT_EQ(reply.token_ids, std::vector<uint32_t>(whole.token_ids().begin(), whole.token_ids().end()));
    EXPECT_TRUE(IsValidUtf8(reply.text));
    if (!skip) continue;
    std::vector<uint32_t> all = prompt;
    all.insert(all.end(), reply.token_ids.begin() + (echo ? std::ssize(prompt) : 0), reply.token_ids.end());
    std::string text = Detokenize(all);
    if (!echo) {
      // What is left of a character that the prompt began belongs to the prompt's text.
      const std::string before = Detokenize(prompt);
      if (text.substr(0, before.size()) != before || before.ends_with("\xEF\xBF\xBD")) continue;
      text.erase(0, before.size());
    }
    replaced += text.find("\xEF\xBF\xBD") != std::string::npos ? 1 : 0;
    if (reply.finished.finish_reason() == v1::FINISH_REASON_STOP_STRING) {
      ++stopped;
      EXPECT_EQ(text.substr(0, reply.text.size()), reply.text) << "a beginning of it";
      const bool include = request.stopping().include_stop();
      EXPECT_EQ(include
                    ? reply.text.ends_with(reply.finished.stop())
                    : text.substr(reply.text.size(), reply.finished.stop().size()) == reply.finished.stop(),
                true);
    } else {
      EXPECT_EQ(reply.text, text);
    }
  }
  EXPECT_GT(stopped, rounds / 20);
  EXPECT_GT(replaced, rounds / 20) << "texts with broken characters";
}

TEST_F(ContractServerTest, TextOfManyBytesToACharacterStreamsWhole) {
  // Korean syllables and faces are three and four byte pieces each to this tokenizer.
  std::string text;
  for (int i = 0; i < 500; ++i) {
    const int syllable = 0xAC00 + i * 21 % 11172;
    text += {static_cast<char>(0xE0 | syllable >> 12), static_cast<char>(0x80 | (syllable >> 6 & 0x3F)),
             static_cast<char>(0x80 | (syllable & 0x3F))};
    if (i % 10 == 0) text += "\xF0\x9F\x99\x82";
  }
  v1::GenerateRequest request = TextRequest(text, 1);
  request.mutable_output()->set_echo(true);
  request.mutable_output()->set_logprobs(true);
  const Reply reply = Generate(*generation_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.text.substr(0, text.size()), text);
  EXPECT_EQ(reply.text.substr(0, text.size()).find("\xEF\xBF\xBD"), std::string::npos);
  std::string bytes;
  for (const v1::TokenLogprob& token : reply.logprobs) bytes += token.bytes();
  EXPECT_EQ(bytes.substr(0, text.size()), text) << "the tokens' bytes are the characters' own";
}

TEST_F(ContractServerTest, ContinuationsScoreAsTheJoinedIdsDo) {
  for (const int words : {2, 130}) {
    SCOPED_TRACE(words);
    v1::ScoreRequest request;
    request.set_text(Story(words));
    request.set_top_logprobs(2);
    const std::vector<std::string> texts = {" and the dog", " was happy.", "\n",
                                            " to see her mom again and again"};
    for (const std::string& text : texts) request.add_continuations()->set_text(text);
    request.add_continuations()->mutable_token_ids()->add_ids(300);
    v1::ScoreResponse response;
    grpc::Status status = Score(request, response);
    ASSERT_TRUE(status.ok()) << ToString(status);
    ASSERT_EQ(response.continuations_size(), 5);
    EXPECT_EQ(response.token_ids_size(), 0);
    const std::vector<uint32_t> context = Tokenize(request.text(), /*add_bos=*/true);
    uint64_t prompt_tokens = context.size();
    for (int i = 0; i < 5; ++i) {
      SCOPED_TRACE(i);
      const v1::ContinuationScore& score = response.continuations(i);
      v1::ScoreRequest joined;
      joined.set_top_logprobs(2);
      joined.mutable_token_ids()->mutable_ids()->Add(context.begin(), context.end());
      joined.mutable_token_ids()->mutable_ids()->MergeFrom(score.token_ids());
      v1::ScoreResponse alone;
      status = Score(joined, alone);
      ASSERT_TRUE(status.ok()) << ToString(status);
      const int first = static_cast<int>(context.size());
      ASSERT_EQ(alone.logprobs_size(), first + score.logprobs_size());
      double sum = 0;
      bool is_greedy = true;
      for (int t = 0; t < score.logprobs_size(); ++t) {
        ASSERT_TRUE(SameBits(score.logprobs(t), alone.logprobs(first + t))) << "token " << t;
        sum += score.logprobs(t).logprob();
        is_greedy = is_greedy && score.logprobs(t).top(0).token_id() == score.token_ids(t);
      }
      EXPECT_EQ(score.sum_logprob(), sum);
      EXPECT_EQ(score.is_greedy(), is_greedy);
      if (i < 4) {
        EXPECT_EQ(score.text_bytes(), texts[static_cast<size_t>(i)].size());
      }
      prompt_tokens += static_cast<uint64_t>(score.token_ids_size());
    }
    EXPECT_EQ(response.usage().prompt_tokens(), prompt_tokens);

    request.set_top_logprobs(0);
    ASSERT_TRUE(Score(request, response).ok());
    EXPECT_EQ(response.continuations(0).logprobs(0).top_size(), 0) << "alternatives only where asked for";
  }
}

TEST_F(ContractServerTest, WhatTheModelWouldSayIsGreedy) {
  v1::GenerateRequest generate = TextRequest("Once upon a time", 6);
  generate.mutable_sampling()->set_temperature(0);
  const v1::CompleteResponse greedy = Completed(generate);
  v1::ScoreRequest request;
  request.set_text(generate.text());
  request.add_continuations()->mutable_token_ids()->mutable_ids()->CopyFrom(greedy.token_ids());
  request.add_continuations()->set_text(" xylophones");
  v1::ScoreResponse response;
  ASSERT_TRUE(Score(request, response).ok());
  EXPECT_TRUE(response.continuations(0).is_greedy());
  EXPECT_EQ(response.continuations(0).text_bytes(), greedy.text().size());
  EXPECT_FALSE(response.continuations(1).is_greedy());
  EXPECT_GT(response.continuations(0).sum_logprob(), response.continuations(1).sum_logprob());
}

TEST_F(ContractServerTest, TheLargestScoreAndItsErrors) {
  v1::ScoreRequest request;
  request.set_text("Once");
  for (int i = 0; i < 256; ++i)
    request.add_continuations()->mutable_token_ids()->add_ids(static_cast<uint32_t>(300 + i));
  v1::ScoreResponse response;
  grpc::Status status = Score(request, response);
  EXPECT_TRUE(status.ok()) << ToString(status);
  EXPECT_EQ(response.continuations_size(), 256);
  request.add_continuations()->set_text("a");
  status = Score(request, response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "continuations asks for 257; the limit is 256");
  request.mutable_continuations()->Clear();
  for (int i = 0; i < 4; ++i) request.add_continuations()->mutable_token_ids()->add_ids(5);
  for (uint32_t id : {6u, 4096u}) request.mutable_continuations(3)->mutable_token_ids()->add_ids(id);
  status = Score(request, response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("continuations[3].token_ids.ids[2] is 4096"), std::string::npos)
      << ToString(status);
}

TEST_F(ContractServerTest, AFullQueueTakesAllSamplesOrNone) {
  const auto server =
      ServerProcess::Start(SourceDir() / "model/demo", {"--max-queue", "8", "--state-slots", "4"});
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  std::vector<std::unique_ptr<BackgroundStream>> streams;
  v1::GenerateRequest endless = TextRequest("Once", 1'000'000);
  endless.mutable_stopping()->set_ignore_eos(true);
  // Four run, and only then five come to wait: all at once could be more than the queue holds.
  for (const auto& [calls, metric] :
       {std::pair(4, "efla_requests_running"), std::pair(5, "efla_requests_waiting")}) {
    for (int i = 0; i < calls; ++i) {
      streams.push_back(std::make_unique<BackgroundStream>(server->NewChannel(), endless));
    }
    ASSERT_TRUE(Eventually([&] { return Metrics::Read(server->admin_address()).Sum(metric) == calls; }))
        << metric;
  }
  v1::GenerateRequest request = TextRequest("Twice", 2);
  request.set_samples(4);
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  v1::CompleteResponse response;
  const grpc::Status status = stub->Complete(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << ToString(status);
  EXPECT_TRUE(RetryDelaySeconds(status).has_value());
  EXPECT_EQ(Metrics::Read(server->admin_address()).Sum("efla_requests_waiting"), 5)
      << "nothing is left of it";
  request.set_samples(9);
  grpc::ClientContext another;
  const grpc::Status never = stub->Complete(&another, request, &response);
  EXPECT_EQ(never.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << ToString(never);
  EXPECT_NE(never.error_message().find("the queue of this server holds 8"), std::string::npos);
}

TEST_F(ContractServerTest, ACancelledCallEndsAllItsSamples) {
  v1::GenerateRequest request = TextRequest("Once", 1'000'000);
  request.mutable_stopping()->set_ignore_eos(true);
  request.set_samples(6);
  {
    BackgroundStream stream(server_->NewChannel(), request);
    ASSERT_TRUE(stream.WaitForEvents(20));
    EXPECT_TRUE(Eventually(
        [&] { return Metrics::Read(server_->admin_address()).Sum("efla_requests_running") == 6; }));
    stream.Cancel();
    EXPECT_EQ(stream.Join().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(
      Eventually([&] { return Metrics::Read(server_->admin_address()).Sum("efla_requests_running") == 0; }));
}

// Fifteen megabytes that would take many seconds to be tokenised.
TEST_F(ContractServerTest, TextsThatAreTooLongOrTooLateCostLittle) {
  const auto server = ServerProcess::Start(SourceDir() / "model/demo", {"--max-prompt-tokens", "2000"});
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  std::string text;
  while (text.size() < (15 << 20)) text += "the little dog ran home to see ";
  const auto refused = [&](const std::string& given) {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    v1::CompleteResponse response;
    const auto begin = std::chrono::steady_clock::now();
    const grpc::Status status = stub->Complete(&context, TextRequest(given, 1), &response);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(Sanitized() ? 20 : 3));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << ToString(status);
    EXPECT_NE(status.error_message().find("tokens; the limit is 2000"), std::string::npos)
        << ToString(status);
  };
  refused(text);                        // too long for its bytes
  refused(text.substr(0, 20'000));      // for its tokens
  refused(std::string(15 << 20, 'x'));  // without a place to cut it

  // A deadline passes while a text that is not too long for its bytes is tokenised.
  grpc::ClientContext context;
  SetTimeout(context, milliseconds(200));
  v1::CompleteResponse response;
  const grpc::Status late = generation_->Complete(&context, TextRequest(text, 1), &response);
  EXPECT_EQ(late.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ToString(late);
  // Whoever comes next does not wait for its end: the lane of long texts is free again.
  const auto begin = std::chrono::steady_clock::now();
  Tokenize(text.substr(0, 70'000), /*add_bos=*/true);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(Sanitized() ? 20 : 3));

  // Likewise of a text that is only tokenised.
  grpc::ClientContext hurried;
  SetTimeout(hurried, milliseconds(200));
  v1::TokenizeRequest tokenize;
  tokenize.set_text(text);
  v1::TokenizeResponse ids;
  const grpc::Status late_ids = models_->Tokenize(&hurried, tokenize, &ids);
  EXPECT_EQ(late_ids.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ToString(late_ids);
  const auto then = std::chrono::steady_clock::now();
  Tokenize(text.substr(0, 70'000), /*add_bos=*/true);
  EXPECT_LT(std::chrono::steady_clock::now() - then, seconds(Sanitized() ? 20 : 3));
}

// ---- efla eval, score and generate ----

ProgramResult Efla(const ServerProcess& server, const std::string& command, std::vector<std::string> flags) {
  flags.insert(flags.begin(), {ProgramPath("efla"), command, "--target", server.grpc_address()});
  return RunProgram(flags);
}

TEST_F(ContractServerTest, EvalReachesTheReferencePerplexity) {
  std::ifstream file(SourceDir() / "model/demo/expected.json");
  const json expected = json::parse(file).at("eval");
  const std::string text = (SourceDir() / "model/demo/eval.txt").string();
  const ProgramResult result = Efla(*server_, "eval", {text, "--json"});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  EXPECT_EQ(result.err, "") << "no bar where there is no terminal";
  const json report = json::parse(result.out);
  const json& total = report.at("total");
  const double relative = TestDevice() == "cpu" ? 5e-4 : 3e-3;
  EXPECT_EQ(total.at("tokens_scored"), expected.at("tokens_scored"));
  EXPECT_EQ(total.at("bytes"), expected.at("bytes"));
  EXPECT_NEAR(total.at("perplexity").get<double>(), expected.at("perplexity").get<double>(),
              26.311880 * relative);
  EXPECT_NEAR(total.at("bits_per_byte").get<double>(), expected.at("bits_per_byte").get<double>(),
              1.2553 * relative);
  const double sum = total.at("sum_logprob");
  EXPECT_NEAR(std::log(total.at("word_perplexity").get<double>()), -sum / total.at("words").get<double>(),
              1e-9);

  // Two files in windows: the figures of each, and of both.
  const ProgramResult windows = Efla(
      *server_, "eval", {text, text, "--window", "256", "--stride", "128", "--concurrency", "3", "--json"});
  ASSERT_EQ(windows.exit_status, 0) << windows.err;
  const json parts = json::parse(windows.out);
  ASSERT_EQ(parts.at("documents").size(), 2u);
  EXPECT_EQ(parts.at("documents")[0].at("sum_logprob"), parts.at("documents")[1].at("sum_logprob"));
  EXPECT_EQ(parts.at("total").at("tokens_scored").get<int>(), 2 * expected.at("tokens_scored").get<int>());
  const double in_windows = parts.at("total").at("perplexity"), whole = total.at("perplexity");
  EXPECT_NE(in_windows, whole) << "other contexts";
  EXPECT_NEAR(in_windows, whole, 0.1 * whole);
}

TEST_F(ContractServerTest, EvalAnswersQuestions) {
  const TempDir folder;
  const auto file = folder.path() / "questions.jsonl";
  std::ofstream(file) << R"({"context": "Once upon a", "choices": [" time", " xylophone"], "answer": 0})"
                      << "\n"
                      << R"({"context": "Once upon a", "choices": [" zebra crossing", " time"], "answer": 0})"
                      << "\n";
  const ProgramResult result = Efla(*server_, "eval", {"--choices", file.string(), "--json"});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(report.at("questions"), 2);
  EXPECT_EQ(report.at("accuracy"), 0.5);

  std::ofstream(file) << "{\n";
  const ProgramResult bad = Efla(*server_, "eval", {"--choices", file.string()});
  EXPECT_EQ(bad.exit_status, 1);
  EXPECT_NE(bad.err.find("line 1 is no JSON object"), std::string::npos) << bad.err;
  EXPECT_NE(Efla(*server_, "eval", {}).exit_status, 0);
  EXPECT_NE(Efla(*server_, "eval", {file.string(), "--stride", "3"}).exit_status, 0);
}

TEST_F(ContractServerTest, TheClientShowsSamplesEchoAndContinuations) {
  const std::vector<std::string> flags = {"--prompt", "Once upon a time", "--max-tokens", "8", "--seed", "5"};
  std::vector<std::string> with = flags;
  with.insert(with.end(), {"--samples", "3"});
  const ProgramResult text = Efla(*server_, "generate", with);
  ASSERT_EQ(text.exit_status, 0) << text.err;
  std::string expected;
  for (int i = 0; i < 3; ++i) {
    std::vector<std::string> alone = flags;
    alone.back() = std::to_string(5 + i);
    absl::StrAppendFormat(&expected, "--- sample %d (seed %d)\n%s", i, 5 + i,
                          Efla(*server_, "generate", alone).out);
  }
  EXPECT_EQ(text.out, expected);
  with.push_back("--json");
  std::istringstream lines(Efla(*server_, "generate", with).out);
  std::map<int, int> finished;
  for (std::string line; std::getline(lines, line);) {
    const json object = json::parse(line);
    if (object.contains("finish_reason")) ++finished[object.at("sample").get<int>()];
    if (object.contains("seed")) {
      EXPECT_EQ(object.at("seed"), 5 + object.at("sample").get<int>());
    }
  }
  EXPECT_EQ(finished, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}}));

  std::vector<std::string> echo = flags;
  echo.push_back("--echo");
  EXPECT_EQ(Efla(*server_, "generate", echo).out, "Once upon a time" + Efla(*server_, "generate", flags).out);

  const ProgramResult scores =
      Efla(*server_, "score",
           {"--prompt", "Once upon a", "--continuation", " time", "--continuation", " zoo", "--json"});
  ASSERT_EQ(scores.exit_status, 0) << scores.err;
  const json object = json::parse(scores.out);
  ASSERT_EQ(object.at("continuations").size(), 2u);
  EXPECT_FALSE(object.at("continuations")[1].at("is_greedy").get<bool>());
  EXPECT_GT(object.at("continuations")[0].at("sum_logprob").get<double>(),
            object.at("continuations")[1].at("sum_logprob").get<double>());
  EXPECT_EQ(object.at("continuations")[1].at("text_bytes"), 4);
}

// A checkpoint, a copy of a golden one, whose weights are finite and whose numbers overflow where token 7 is:
// only its embedding has something in the first dimension, from which the first layer makes values beyond a
// float's.
void BreakTokenSeven(const std::filesystem::path& checkpoint) {
  std::fstream file(checkpoint / "model.safetensors", std::ios::binary | std::ios::in | std::ios::out);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  std::string header(header_bytes, ' ');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  const json tensors = json::parse(header);
  const auto set = [&](const char* name, uint64_t row, uint64_t column, const char(&bf16)[3]) {
    const json& tensor = tensors.at(name);
    ASSERT_EQ(tensor.at("dtype"), "BF16");
    const uint64_t columns = tensor.at("shape")[1];
    file.seekp(static_cast<std::streamoff>(8 + header_bytes + tensor.at("data_offsets")[0].get<uint64_t>() +
                                           (row * columns + column) * 2));
    file.write(bf16, 2);
  };
  const auto rows = [&](const char* name) { return tensors.at(name).at("shape")[0].get<uint64_t>(); };
  const char* const kEmbeddings = "model.embeddings.weight";
  const char* const kValues = "model.layers.0.attn.v_proj.weight";
  for (uint64_t row = 0; row < rows(kEmbeddings); ++row) set(kEmbeddings, row, 0, "\x00\x00");
  for (uint64_t column = 1; column < tensors.at(kEmbeddings).at("shape")[1].get<uint64_t>(); ++column) {
    set(kEmbeddings, 7, column, "\x00\x00");
  }
  set(kEmbeddings, 7, 0, "\x80\x3F");                                                   // 1
  for (uint64_t row = 0; row < rows(kValues); ++row) set(kValues, row, 0, "\x7F\x7F");  // 3.39e38
}

TEST(BrokenRowTest, ACallWhoseLogitsAreNoNumbersFailsAlone) {
  const TempDir folder;
  const auto checkpoint = folder.path() / "broken";
  std::filesystem::copy(GoldenDir("efla_basic"), checkpoint);
  BreakTokenSeven(checkpoint);
  const auto server = ServerProcess::Start(checkpoint);
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  v1::GenerateRequest good = GreedyRequest(std::vector<uint32_t>{5, 6, 8}, 300);
  good.mutable_sampling()->add_banned_token_ids(7);  // it would break this call, too, once it is drawn
  const Reply before = Generate(*stub, good);
  ASSERT_TRUE(before.status.ok()) << ToString(before.status);
  BackgroundStream neighbour(server->NewChannel(), good);
  for (int i = 0; i < 5; ++i) {
    const Reply broken = Generate(*stub, GreedyRequest(std::vector<uint32_t>{5, 6, 7}, 10));
    EXPECT_EQ(broken.status.error_code(), grpc::StatusCode::INTERNAL) << ToString(broken.status);
    EXPECT_NE(broken.status.error_message().find("not finite"), std::string::npos) << ToString(broken.status);
    EXPECT_TRUE(broken.token_ids.empty()) << "nothing is drawn from it";
  }
  EXPECT_TRUE(neighbour.Join().ok());
  ExpectSameTokens(Generate(*stub, good), before, "after the failures");

  // One of several continuations fails all: the reply would not be whole.
  v1::ScoreRequest score;
  score.mutable_token_ids()->add_ids(5);
  score.add_continuations()->mutable_token_ids()->add_ids(6);
  for (uint32_t id : {7u, 6u}) score.mutable_continuations(0)->mutable_token_ids()->add_ids(id);
  score.add_continuations()->mutable_token_ids()->add_ids(8);
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  v1::ScoreResponse response;
  EXPECT_EQ(stub->Score(&context, score, &response).error_code(), grpc::StatusCode::INTERNAL);
}

}  // namespace
}  // namespace efla::e2e
