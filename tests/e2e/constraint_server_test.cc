// Constrained outputs of the demonstration model, which knows nothing of JSON, seen from a client.
#include <algorithm>
#include <atomic>
#include <fstream>
#include <regex>
#include <thread>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

class ConstraintServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = ServerProcess::Start(SourceDir() / "model/demo").release(); }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    ASSERT_NE(server_, nullptr);
    stub_ = v1::Generation::NewStub(server_->NewChannel());
  }

  static v1::GenerateRequest Request(uint64_t seed = 1) {
    v1::GenerateRequest request;
    request.set_text("The captain looked at the sea and said:");
    request.mutable_sampling()->set_seed(seed);
    request.mutable_stopping()->set_max_tokens(400);
    return request;
  }
  // What comes out with each of several seeds, where it ended by itself.
  std::vector<std::string> Outputs(v1::GenerateRequest request) const {
    std::vector<std::string> outputs;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      request.mutable_sampling()->set_seed(seed);
      const Reply reply = Generate(*stub_, request);
      EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
      const v1::FinishReason reason = reply.finished.finish_reason();
      if (reason == v1::FINISH_REASON_MAX_TOKENS) continue;
      EXPECT_TRUE(reason == v1::FINISH_REASON_CONSTRAINT_COMPLETE || reason == v1::FINISH_REASON_EOS)
          << reason;
      outputs.push_back(reply.text);
    }
    return outputs;
  }
  std::string Refusal(const v1::GenerateRequest& request) const {
    return ToString(Generate(*stub_, request).status);
  }

  static ServerProcess* server_;
  std::unique_ptr<v1::Generation::Stub> stub_;
};

ServerProcess* ConstraintServerTest::server_ = nullptr;

TEST_F(ConstraintServerTest, ChoicesAreOneOfThem) {
  v1::GenerateRequest request = Request();
  for (const char* choice : {" yes", " no", " not yet"})
    request.mutable_constraint()->mutable_choices()->add_choices(choice);
  const std::vector<std::string> outputs = Outputs(request);
  EXPECT_EQ(outputs.size(), 6u);
  for (const std::string& output : outputs) {
    EXPECT_TRUE(output == " yes" || output == " no" || output == " not yet") << output;
  }
}

TEST_F(ConstraintServerTest, ACompleteOutputEndsTheCall) {
  v1::GenerateRequest request = Request();
  request.mutable_constraint()->set_regex(" [0-9]{3}");
  request.mutable_stopping()->set_ignore_eos(true);
  const Reply reply = Generate(*stub_, request);
  ASSERT_TRUE(reply.status.ok()) << ToString(reply.status);
  EXPECT_EQ(reply.finished.finish_reason(), v1::FINISH_REASON_CONSTRAINT_COMPLETE);
  EXPECT_TRUE(std::regex_match(reply.text, std::regex(" [0-9]{3}"))) << reply.text;
}

TEST_F(ConstraintServerTest, ARegexIsOfTheWholeOutput) {
  v1::GenerateRequest request = Request();
  const std::string regex = "( [a-z]+){3,6}(, [a-z]+)?[.!?]";
  request.mutable_constraint()->set_regex(regex);
  const std::vector<std::string> outputs = Outputs(request);
  EXPECT_FALSE(outputs.empty());
  for (const std::string& output : outputs)
    EXPECT_TRUE(std::regex_match(output, std::regex(regex))) << output;
}

TEST_F(ConstraintServerTest, AGrammarsOutputsAreOfTheGrammar) {
  v1::GenerateRequest request = Request();
  request.mutable_constraint()->set_grammar(
      "root ::= sum\nsum ::= n ([+] n){1,3}\nn ::= [0-9]{1,2} | \"(\" sum \")\"");
  const std::vector<std::string> outputs = Outputs(request);
  EXPECT_FALSE(outputs.empty());
  for (const std::string& output : outputs) {
    EXPECT_EQ(output.find_first_not_of("0123456789+()"), std::string::npos) << output;
    EXPECT_EQ(std::count(output.begin(), output.end(), '('), std::count(output.begin(), output.end(), ')'))
        << output;
    EXPECT_NE(output.find('+'), std::string::npos) << output;
  }
}

TEST_F(ConstraintServerTest, JsonIsJson) {
  v1::GenerateRequest request = Request();
  request.mutable_constraint()->mutable_json_object();
  int objects = 0;
  for (const std::string& output : Outputs(request)) {
    const auto value = nlohmann::json::parse(output, nullptr, false);
    EXPECT_TRUE(value.is_object()) << output;
    ++objects;
  }
  request.mutable_constraint()->set_json_schema(
      R"({"type":"object","properties":{"name":{"type":"string","maxLength":40},"age":{"type":"integer","minimum":0,"maximum":120},
          "mood":{"enum":["calm","angry"]},"crew":{"type":"array","items":{"type":"string","maxLength":12},"maxItems":3}},
          "required":["name","age","mood"]})");
  for (const std::string& output : Outputs(request)) {
    const auto value = nlohmann::json::parse(output, nullptr, false);
    ASSERT_TRUE(value.is_object()) << output;
    EXPECT_TRUE(value["name"].is_string()) << output;
    EXPECT_TRUE(value["age"].is_number_integer() && value["age"] >= 0 && value["age"] <= 120) << output;
    EXPECT_TRUE(value["mood"] == "calm" || value["mood"] == "angry") << output;
    EXPECT_TRUE(!value.contains("crew") || value["crew"].size() <= 3) << output;
    ++objects;
  }
  EXPECT_GE(objects, 6);
}

// Rows without a constraint give the bits that they give alone.
TEST_F(ConstraintServerTest, OtherRowsDoNotNotice) {
  const Reply alone = Generate(*stub_, Request(9));
  std::vector<std::unique_ptr<BackgroundStream>> constrained;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    v1::GenerateRequest request = Request(seed);
    request.mutable_constraint()->mutable_json_object();
    constrained.push_back(std::make_unique<BackgroundStream>(server_->NewChannel(), request));
  }
  const Reply beside = Generate(*stub_, Request(9));
  ExpectSameTokens(alone, beside, "beside constrained streams");
}

TEST_F(ConstraintServerTest, RefusalsNameTheFieldAndThePlace) {
  const auto refused = [&](void (*set)(v1::Constraint&)) {
    v1::GenerateRequest request = Request();
    set(*request.mutable_constraint());
    return Refusal(request);
  };
  EXPECT_EQ(
      refused([](v1::Constraint& c) { c.set_regex("(a)\\1"); }),
      "INVALID_ARGUMENT: constraint.regex at byte 3 (\"\\1\"): back references (\\1) are not supported");
  EXPECT_EQ(refused([](v1::Constraint& c) { c.set_json_schema(R"({"properties":{"a":{"not":{}}}})"); }),
            "INVALID_ARGUMENT: constraint.json_schema /properties/a/not: this keyword is not supported");
  EXPECT_EQ(refused([](v1::Constraint& c) { c.set_grammar("root ::= a"); }),
            "INVALID_ARGUMENT: constraint.grammar line 1, column 10: rule a is not defined");
  EXPECT_EQ(refused([](v1::Constraint& c) { c.mutable_choices(); }),
            "INVALID_ARGUMENT: constraint.choices has 0 choices; 1 to 1024 are needed");
  EXPECT_EQ(refused([](v1::Constraint& c) { c.set_regex(std::string(70000, 'a')); }),
            "INVALID_ARGUMENT: constraint.regex has 70000 bytes; the limit is 65536");
  EXPECT_EQ(refused([](v1::Constraint&) {}),
            "INVALID_ARGUMENT: constraint has no kind; exactly one is needed");
  v1::GenerateRequest request = Request();
  request.mutable_constraint()->set_regex("a");
  request.mutable_stopping()->set_max_tokens(0);
  EXPECT_EQ(Refusal(request),
            "INVALID_ARGUMENT: constraint is given and stopping.max_tokens is 0; there is no output then");
}

TEST(ConstraintServerWithoutTokenizerTest, RefusesConstraints) {
  const auto server = ServerProcess::Start(GoldenDir("efla_basic"));
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  const std::vector<uint32_t> prompt = {1, 2, 3};
  v1::GenerateRequest request = GreedyRequest(prompt, 4);
  request.mutable_constraint()->mutable_json_object();
  EXPECT_EQ(ToString(Generate(*stub, request).status),
            "FAILED_PRECONDITION: constraint needs a tokenizer and the checkpoint has none; give token ids");
}

// Refused as too large after some work, each a constraint of its own.
v1::GenerateRequest CostlyRequest(int i) {
  v1::GenerateRequest request;
  request.set_text("He said:");
  request.mutable_stopping()->set_max_tokens(1);
  request.mutable_constraint()->set_regex("(.*a){" + std::to_string(900 + i) + "}");
  return request;
}

v1::GenerateRequest PlainRequest() {
  v1::GenerateRequest request;
  request.set_text("He said:");
  request.mutable_stopping()->set_max_tokens(1);
  return request;
}

// `token`: the tenant's; empty: none.
grpc::Status Complete(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
                      const std::string& token = "", milliseconds timeout = kCallTimeout) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  v1::CompleteResponse response;
  return stub.Complete(&context, request, &response);
}

// Compilations go one after the other, and plain calls go by all of them. What they cost is paid once.
TEST_F(ConstraintServerTest, CostlyConstraintsDoNotHoldUpPlainCalls) {
  constexpr int kCostly = 20;
  using Clock = std::chrono::steady_clock;
  const auto costly_calls = [&] {  // how long all of them take
    std::atomic<int> left = kCostly;
    int plain_calls = 0;
    const Clock::time_point begin = Clock::now();
    std::vector<std::thread> threads;
    for (int i = 0; i < kCostly; ++i) {
      threads.emplace_back([&, i] {
        const grpc::Status status = Complete(*stub_, CostlyRequest(i));
        EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << ToString(status);
        EXPECT_NE(status.error_message().find("is too large"), std::string::npos) << ToString(status);
        --left;
      });
    }
    while (left > 0) {
      EXPECT_TRUE(Complete(*stub_, PlainRequest()).ok());
      ++plain_calls;
    }
    for (std::thread& thread : threads) thread.join();
    return std::pair(Clock::now() - begin, plain_calls);
  };
  const auto [first, plain_calls] = costly_calls();
  EXPECT_GE(plain_calls, 5) << "while 20 constraints were compiled one after the other";
  const auto [again, plain_calls_again] = costly_calls();
  EXPECT_LT(again * 3, first) << "refusals are remembered";
}

TEST_F(ConstraintServerTest, ACallsDeadlineEndsItsWaitingForACompilation) {
  constexpr int kCostly = 20;
  const auto num_late = [&] {
    return Metrics::Read(server_->admin_address())
        .Sum("efla_requests_rejected_total", {"reason=\"deadline\""});
  };
  const double late_before = num_late();
  std::atomic<int> left = kCostly;
  std::vector<std::thread> threads;
  for (int i = 0; i < kCostly; ++i) {
    threads.emplace_back([&, i] {
      Complete(*stub_, CostlyRequest(30 + i));
      --left;
    });
  }
  ASSERT_TRUE(Complete(*stub_, PlainRequest()).ok());  // the others have been sent by now
  v1::GenerateRequest cheap = PlainRequest();
  cheap.mutable_constraint()->set_regex("( [a-z]+){1,7}");
  const grpc::Status late = Complete(*stub_, cheap, "", milliseconds(200));
  EXPECT_EQ(late.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ToString(late);
  EXPECT_TRUE(Eventually([&] { return num_late() > late_before; }));
  EXPECT_GT(left, 0) << "it ended while others' constraints were still compiled";
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Complete(*stub_, cheap).ok());
}

TEST(ConstraintLimitsTest, CallsThatWaitForTheirConstraintCountForTheTenant) {
  TempDir folder;
  const std::string file = folder.path() / "auth.json";
  // SHA-256 of "one" and "two".
  std::ofstream(file)
      << R"({"tokens":[{"name":"a","sha256":"7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed","tenant":"limited","roles":["user"]},
             {"name":"b","sha256":"3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3","tenant":"other","roles":["user"]}],
             "tenants":{"limited":{"max_concurrent":1},"other":{}}})";
  const auto server = ServerProcess::Start(SourceDir() / "model/demo", {"--auth-file", file});
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Generation::NewStub(server->NewChannel());
  std::atomic<int> compiled = 0, refused = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 20; ++i) {
    threads.emplace_back([&, i] {
      const grpc::Status status = Complete(*stub, CostlyRequest(i), "one");
      if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT) ++compiled;
      if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
        EXPECT_NE(status.error_message().find("of this tenant are under way; the limit is 1"),
                  std::string::npos)
            << ToString(status);
        ++refused;
      }
    });
  }
  v1::GenerateRequest other = PlainRequest();
  other.mutable_constraint()->set_regex("( [a-z]+){1,9}");
  EXPECT_TRUE(Complete(*stub, other, "two").ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(compiled + refused, 20);
  EXPECT_GE(compiled, 1);
  EXPECT_GE(refused, 10) << "of 20 calls at once with max_concurrent 1";
  EXPECT_TRUE(Complete(*stub, PlainRequest(), "one").ok()) << "the tenant's place is free again";
}

TEST_F(ConstraintServerTest, FlagsOfTheClient) {
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {ProgramPath("efla"), "generate", "--target", server_->grpc_address(),
                                 "--prompt", "He said:", "--seed", "3", "--max-tokens", "300"});
    return RunProgram(flags);
  };
  TempDir folder;
  const std::string file = folder.path() / "constraint";
  const auto in_file = [&](const std::string& text) {
    std::ofstream(file) << text;
    return "@" + file;
  };
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"--choice", " aye", "--choice", " nay"}, " (aye|nay)"},
      {{"--regex", " [a-z]{4}!"}, " [a-z]{4}!"},
      {{"--json-schema", R"({"enum":[{"a":1}]})"}, R"(\{"a":1\})"},
      {{"--json-schema", in_file(R"({"type":"integer","minimum":10,"maximum":12})")}, "1[012]"},
  };
  for (const auto& [flags, expected] : cases) {
    const ProgramResult result = run(flags);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    const std::string text = result.out.substr(0, result.out.find_last_not_of('\n') + 1);
    EXPECT_TRUE(std::regex_match(text, std::regex(expected))) << expected << ": " << result.out;
  }
  const ProgramResult grammar = run({"--grammar", in_file("root ::= \" ho\"{2,3}")});
  EXPECT_TRUE(grammar.out.starts_with(" ho ho")) << grammar.out << grammar.err;
  const ProgramResult json = run({"--json-object", "--json"});  // an object, in lines of JSON
  EXPECT_EQ(json.exit_status, 0) << json.err;
  const ProgramResult refused = run({"--regex", "a\\b"});
  EXPECT_NE(refused.exit_status, 0);
  EXPECT_NE(refused.err.find("constraint.regex at byte 1"), std::string::npos) << refused.err;
  EXPECT_NE(run({"--regex", "a", "--json-object"}).exit_status, 0);
  EXPECT_NE(run({"--grammar", "@" + file + ".none"}).exit_status, 0);
}

}  // namespace
}  // namespace efla::e2e
