// The command-line client against a server: its JSON, its exit statuses, its one line of error.
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using nlohmann::json;

std::vector<json> JsonLines(const std::string& out) {
  std::vector<json> lines;
  std::istringstream stream(out);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_FALSE(lines.back().is_discarded()) << line;
  }
  return lines;
}

std::string Joined(const std::vector<uint32_t>& ids) {
  std::string text;
  for (uint32_t id : ids) absl::StrAppendFormat(&text, "%s%d", text.empty() ? "" : ",", id);
  return text;
}

class CliTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    golden_server_ = ServerProcess::Start(GoldenDir("efla_basic")).release();
    demo_server_ = ServerProcess::Start(SourceDir() / "model/demo").release();
  }
  static void TearDownTestSuite() {
    delete golden_server_;
    delete demo_server_;
  }
  void SetUp() override {
    ASSERT_NE(golden_server_, nullptr);
    ASSERT_NE(demo_server_, nullptr);
  }

  static ProgramResult Efla(const std::string& command, const ServerProcess& server,
                            std::vector<std::string> flags) {
    flags.insert(flags.begin(), {ProgramPath("efla"), command, "--target", server.grpc_address()});
    return RunProgram(flags);
  }
  static void ExpectFails(const ProgramResult& result, const std::vector<std::string>& words) {
    EXPECT_GT(result.exit_status, 0) << result.out;
    EXPECT_LT(result.exit_status, 128) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << "one line: " << result.err;
    for (const std::string& word : words)
      EXPECT_NE(result.err.find(word), std::string::npos) << word << ": " << result.err;
  }

  static void ExpectUsageError(std::vector<std::string> flags, const std::vector<std::string>& words) {
    flags.insert(flags.begin(), ProgramPath("efla"));
    const ProgramResult result = RunProgram(flags);
    EXPECT_EQ(result.exit_status, 2) << ::testing::PrintToString(flags) << result.err;
    ExpectFails(result, words);
  }

  static ServerProcess* golden_server_;
  static ServerProcess* demo_server_;
};

ServerProcess* CliTest::golden_server_ = nullptr;
ServerProcess* CliTest::demo_server_ = nullptr;

TEST_F(CliTest, GenerateWritesOneJsonObjectALine) {
  const GoldenCase golden = GoldenCases("efla_basic")[2];
  const ProgramResult result = Efla("generate", *golden_server_,
                                    {"--token-ids", Joined(golden.tokens), "--max-tokens", "24",
                                     "--temperature", "0", "--ignore-eos", "--logprobs", "2", "--json"});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  const std::vector<json> lines = JsonLines(result.out);
  ASSERT_GT(lines.size(), 1u);
  std::vector<uint32_t> ids;
  std::vector<double> logprobs;
  for (const json& line : lines) {
    for (uint32_t id : line.at("token_ids")) ids.push_back(id);
    for (double logprob : line.at("logprobs")) logprobs.push_back(logprob);
    EXPECT_TRUE(line.at("text").is_string());
    EXPECT_EQ(line.contains("finish_reason"), &line == &lines.back());
  }
  ASSERT_EQ(ids.size(), golden.greedy.size());
  ASSERT_EQ(logprobs.size(), ids.size());
  ExpectGreedy(ids, golden.greedy, golden.greedy_margins, "efla generate");
  EXPECT_NEAR(logprobs[0], golden.top5_next[0].second, DeviceTolerance().logprob);
  EXPECT_EQ(lines.back().at("usage").at("prompt_tokens"), golden.tokens.size());
  EXPECT_EQ(lines.back().at("usage").at("completion_tokens"), 24);
}

TEST_F(CliTest, GenerateStreamsTextAndStops) {
  std::ifstream file(SourceDir() / "model/demo/expected.json");
  const json prompt = json::parse(file).at("prompts").at(0);
  const std::string text = prompt.at("text"), expected = prompt.at("greedy_text");
  TempDir folder;
  const std::string prompt_file = folder.path() / "prompt.txt";
  std::ofstream(prompt_file) << text;
  const std::vector<std::string> flags = {"--max-tokens", "48", "--temperature", "0", "--ignore-eos"};
  for (const std::vector<std::string>& source :
       {std::vector<std::string>{"--prompt", text}, std::vector<std::string>{"--prompt-file", prompt_file}}) {
    std::vector<std::string> all = source;
    all.insert(all.end(), flags.begin(), flags.end());
    const ProgramResult plain = Efla("generate", *demo_server_, all);
    EXPECT_EQ(plain.exit_status, 0) << plain.err;
    EXPECT_EQ(plain.err, "");
    if (TestDevice() == "cpu") {
      EXPECT_NE(plain.out.find(expected), std::string::npos) << plain.out;
    }
    EXPECT_GT(plain.out.size(), 60u);

    all.insert(all.end(), {"--stop", "never in it", "--stop", plain.out.substr(20, 6), "--json"});
    const ProgramResult stopped = Efla("generate", *demo_server_, all);
    ASSERT_EQ(stopped.exit_status, 0) << stopped.err;
    std::string joined;
    const std::vector<json> lines = JsonLines(stopped.out);
    for (const json& line : lines) joined += line.at("text");
    EXPECT_EQ(joined, plain.out.substr(0, plain.out.find(plain.out.substr(20, 6))));
    EXPECT_EQ(lines.back().at("finish_reason"), "stop_string");
  }
}

TEST_F(CliTest, ASeedRepeatsTheText) {
  const std::vector<std::string> flags = {"--prompt",      "Once", "--max-tokens", "20",
                                          "--temperature", "1",    "--seed",       "11"};
  const ProgramResult a = Efla("generate", *demo_server_, flags), b = Efla("generate", *demo_server_, flags);
  EXPECT_EQ(a.exit_status, 0) << a.err;
  EXPECT_GT(a.out.size(), 1u);
  EXPECT_EQ(a.out, b.out);
}

TEST_F(CliTest, SamplingFlagsReachTheDraw) {
  const auto ids = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(),
                 {"--token-ids", "5,6,7", "--max-tokens", "12", "--ignore-eos", "--seed", "3", "--json"});
    const ProgramResult result = Efla("generate", *golden_server_, flags);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    std::vector<uint32_t> drawn;
    for (const json& line : JsonLines(result.out)) {
      for (uint32_t id : line.at("token_ids")) drawn.push_back(id);
    }
    return drawn;
  };
  const std::vector<uint32_t> plain = ids({});
  EXPECT_EQ(ids({"--logit-bias", "9=-1", "--logit-bias", "300=100"}), std::vector<uint32_t>(12, 300));
  const std::vector<uint32_t> distinct = ids(
      {"--allow-ids", "20,21,22,23,24,25,26,27,28,29,30,31,32", "--ban-ids", "32", "--no-repeat-ngram", "1"});
  EXPECT_EQ(std::set<uint32_t>(distinct.begin(), distinct.end()).size(), 12u);
  EXPECT_EQ(*std::max_element(distinct.begin(), distinct.end()), 31u);
  // Penalties of 2 for each time tell a token that is drawn again and again from the others.
  const std::vector<std::string> biased = {"--logit-bias", "300=20", "--temperature", "0"};
  std::vector<std::string> penalised = biased;
  penalised.insert(penalised.end(),
                   {"--frequency-penalty", "2", "--presence-penalty", "2", "--penalty-window", "50"});
  EXPECT_EQ(ids(biased), std::vector<uint32_t>(12, 300));
  EXPECT_NE(ids(penalised), ids(biased));
  EXPECT_NE(ids({"--logit-bias", "300=20", "--temperature", "0", "--repetition-penalty", "10"}), ids(biased));
  EXPECT_NE(ids({"--typical-p", "0.01", "--temperature", "2"}), plain);
  const ProgramResult early = Efla(
      "generate", *golden_server_,
      {"--token-ids", "5,6,7", "--max-tokens", "12", "--min-tokens", "5", "--logit-bias", "2=100", "--json"});
  ASSERT_EQ(early.exit_status, 0) << early.err;
  EXPECT_EQ(JsonLines(early.out).back().at("usage").at("completion_tokens"), 6);
  EXPECT_EQ(JsonLines(early.out).back().at("finish_reason"), "eos");
  ExpectFails(Efla("generate", *golden_server_, {"--token-ids", "5", "--repetition-penalty", "11"}),
              {"repetition_penalty", "11", "[0.01, 10]"});
  ExpectFails(Efla("generate", *golden_server_, {"--token-ids", "5", "--logit-bias", "5:1"}), {"ID=VALUE"});
}

TEST_F(CliTest, ScoreWritesTheLogprobs) {
  const GoldenCase golden = GoldenCases("efla_basic")[4];
  const ProgramResult result =
      Efla("score", *golden_server_, {"--token-ids", Joined(golden.tokens), "--json"});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  const json score = json::parse(result.out);
  EXPECT_EQ(score.at("token_ids").get<std::vector<uint32_t>>(), golden.tokens);
  ASSERT_EQ(score.at("logprobs").size(), golden.tokens.size());
  EXPECT_TRUE(score.at("logprobs").at(0).is_null());
  for (size_t i = 1; i < golden.tokens.size(); ++i) {
    if (*golden.prompt_logprobs[i] < DeviceTolerance().least_logprob) continue;
    EXPECT_NEAR(score.at("logprobs").at(i).get<double>(), *golden.prompt_logprobs[i],
                DeviceTolerance().logprob)
        << i;
  }
  TempDir folder;
  const std::string file = folder.path() / "text.txt";
  std::ofstream(file) << "Hello world";
  const ProgramResult text = Efla("score", *demo_server_, {"--prompt-file", file, "--json"});
  ASSERT_EQ(text.exit_status, 0) << text.err;
  EXPECT_EQ(json::parse(text.out).at("token_ids"), json({1, 385, 481, 3972, 1018})) << "text gets a BOS";
}

TEST_F(CliTest, TokenizeGoesBothWays) {
  const ProgramResult ids = Efla("tokenize", *demo_server_, {"--text", "Hello world", "--json"});
  ASSERT_EQ(ids.exit_status, 0) << ids.err;
  EXPECT_EQ(json::parse(ids.out).at("token_ids"), json({385, 481, 3972, 1018}));
  EXPECT_EQ(json::parse(ids.out).at("pieces").size(), 4u);
  const ProgramResult text =
      Efla("tokenize", *demo_server_, {"--detokenize", "--token-ids", "385,481,3972,1018", "--json"});
  ASSERT_EQ(text.exit_status, 0) << text.err;
  EXPECT_EQ(json::parse(text.out).at("text"), "Hello world");
}

TEST_F(CliTest, LoadReportsWhatItSent) {
  const ProgramResult result = Efla("load", *golden_server_,
                                    {"--requests", "20", "--concurrency", "4", "--prompt-lengths",
                                     "8:0.5,70:0.5", "--max-tokens", "6", "--json", "--quiet"});
  ASSERT_EQ(result.exit_status, 0) << result.err;
  const json report = json::parse(result.out);
  EXPECT_EQ(report.at("completed"), 20);
  EXPECT_EQ(report.at("failed"), 0);
  EXPECT_EQ(report.at("total_output_tokens"), 20 * 6);
  EXPECT_GT(report.at("output_throughput").get<double>(), 0);
  EXPECT_GT(report.at("p99_ttft_ms").get<double>(), 0);
}

TEST_F(CliTest, ErrorsAreOneLineThatSaysWhat) {
  ExpectFails(Efla("generate", *golden_server_, {"--prompt", "text"}), {"tokenizer"});
  ExpectFails(Efla("generate", *golden_server_, {"--token-ids", "5,320"}), {"320"});
  ExpectFails(Efla("generate", *golden_server_, {"--token-ids", "5", "--temperature", "101"}),
              {"temperature", "101", "100"});
  ExpectFails(Efla("generate", *golden_server_, {"--token-ids", "5", "--no-such-flag"}), {"--no-such-flag"});
  ExpectFails(Efla("generate", *golden_server_, {"--prompt-file", "/no/such/file"}), {"/no/such/file"});
  ExpectFails(Efla("score", *golden_server_, {"--token-ids", "4294967296"}), {"4294967296"});
  ExpectFails(Efla("tokenize", *golden_server_, {"--text", "x"}), {"tokenizer"});
  ExpectFails(RunProgram({ProgramPath("efla")}), {"--help"});
}

TEST_F(CliTest, BadFlagsAreUsageErrorsThatNameFlagValueAndRange) {
  const std::vector<std::vector<std::string>> flags = {
      {"load", "--warmup", "-1", "from 0 to 1000000000"},
      {"load", "--seed", "18446744073709551616", "from 0 to 18446744073709551615"},
      {"load", "--concurrency", "0", "from 1 to 100000"},
      {"generate", "--seed", "-1", "from 0 to 18446744073709551615"},
      {"generate", "--max-tokens", "4294967296", "from 0 to 4294967295"},
      {"generate", "--timeout", "1e300", "from 0.001 to 31536000"},
      {"generate", "--timeout", "nan", "from 0.001 to 31536000"},
      {"generate", "--target", "host", "HOST:PORT"},
      {"generate", "--target", "host:65536", "HOST:PORT"},
      {"generate", "--prompt", "abc\xff", "offset 3"},
      {"generate", "--stop", "\xff", "offset 0"},
      {"tokenize", "--text", "a\xff", "offset 1"},
      {"generate", "--logprobs", "2", "--json"},
  };
  for (const std::vector<std::string>& flag : flags) {
    ExpectUsageError({flag[0], flag[1], flag[2]}, {flag[1], flag[3]});
  }
  ExpectUsageError({"speak"}, {"speak"});
}

TEST_F(CliTest, FlagsThatAreMissingOrContradictEachOtherAreUsageErrors) {
  const std::string long_name(512, 's');
  const std::pair<std::vector<std::string>, std::vector<std::string>> cases[] = {
      {{"generate"}, {"--prompt,", "--chat", "--user", "--session", "efla generate --help"}},
      {{"generate", "--prompt", "a", "--prompt-file", "b"}, {"--prompt", "--prompt-file"}},
      {{"generate", "--prompt", "a", "--user", "b"}, {"--prompt", "--user"}},
      {{"generate", "--token-ids", "1", "--chat", "b"}, {"--token-ids", "--chat"}},
      {{"generate", "--prompt-file", "a", "--system", "b"}, {"--prompt-file", "--system"}},
      {{"generate", "--token-ids", "1,2,x"}, {"--token-ids", "\"x\" at position 2"}},
      {{"generate", "--token-ids", ""}, {"--token-ids", "position 0 is empty"}},
      {{"generate", "--prompt", "a", "--stop", "b", "c"}, {"c"}},
      {{"generate", "--prompt", "a", "--choice", "b", "c"}, {"c"}},
      {{"generate", "--prompt", "a", "--grammar", "\xff"}, {"--grammar", "offset 0"}},
      {{"generate", "--prompt", "a", "--session", "\xff"}, {"--session", "offset 0"}},
      {{"generate", "--prompt", "a", "--tls", "--insecure-token"}, {"--insecure-token", "--tls"}},
      {{"score"}, {"--prompt,", "--token-ids"}},
      {{"score", "--prompt", "a", "--token-ids", "1"}, {"--prompt", "--token-ids"}},
      {{"score", "--prompt", "a", "--continuation", "b", "c"}, {"c"}},
      {{"tokenize"}, {"--text", "--file"}},
      {{"tokenize", "--text", "a", "--file", "b"}, {"--text", "--file"}},
      {{"tokenize", "--token-ids", "1"}, {"--detokenize"}},
      {{"tokenize", "--detokenize"}, {"--token-ids"}},
      {{"tokenize", "--detokenize", "--token-ids", "1;2"}, {"\"1;2\""}},
      {{"tokenize", "--detokenize", "--token-ids", "1", "--add-bos"}, {"--detokenize", "--add-bos"}},
      {{"eval"}, {"files", "--choices"}},
      {{"eval", "f", "--choices", "g"}, {"files", "--choices"}},
      {{"eval", "f", "--stride", "5"}, {"--stride", "--window"}},
      {{"eval", "f", "--window", "64", "--stride", "128"}, {"--stride is 128", "below --window, 64"}},
      {{"eval", "--choices", "g", "--window", "64"}, {"--window", "--choices"}},
      {{"load", "--prompt-lengths", "a"}, {"--prompt-lengths", "\"a\"", "TOKENS:WEIGHT"}},
      {{"load", "--quiet", "--progress"}, {"--quiet", "--progress"}},
      {{"health", "--service", long_name}, {"--service", "512", "127"}},
      {{"sessions", "append", "s"}, {"--prompt,", "efla sessions append --help"}},
      {{"sessions", "create", "--prompt", "a", "--token-ids", "1"}, {"--prompt", "--token-ids"}},
      {{"sessions", "delete", "s", "--durability", "sync"}, {"--durability"}},
      {{"sessions", "fork", "s", "--child", "a", "b"}, {"b"}},
      {{"sessions", "get", "\xff"}, {"offset 0"}},
  };
  for (const auto& [flags, words] : cases) ExpectUsageError(flags, words);
}

TEST_F(CliTest, WhatAFileHoldsIsNoMatterOfTheFlags) {
  TempDir folder;
  const std::string file = folder.path() / "ids";
  std::ofstream(file) << "1,2,x";
  const ProgramResult result = Efla("generate", *golden_server_, {"--token-ids", "@" + file});
  EXPECT_EQ(result.exit_status, 1);
  ExpectFails(result, {"INVALID_ARGUMENT", "\"x\" at position 2"});
}

TEST_F(CliTest, HelpSaysWhichFlagsTakeListsAndWhichAreRepeated) {
  const std::string help = RunProgram({ProgramPath("efla"), "generate", "--help"}).out;
  const auto described = [&](const std::string& flag) {
    const size_t begin = help.find("  " + flag + " ");
    EXPECT_NE(begin, std::string::npos) << flag;
    return begin == std::string::npos ? "" : help.substr(begin, help.find("\n  -", begin + 1) - begin);
  };
  for (const char* flag : {"--stop", "--stop-token-id", "--logit-bias", "--choice"}) {
    EXPECT_EQ(described(flag).find("..."), std::string::npos) << described(flag);
    EXPECT_NE(described(flag).find("again"), std::string::npos) << described(flag);
  }
  for (const char* flag : {"--allow-ids", "--ban-ids"}) {
    EXPECT_NE(described(flag).find("5,6 or 5 6"), std::string::npos) << described(flag);
  }
  const ProgramResult lists = Efla("generate", *golden_server_,
                                   {"--token-ids", "5,6,7", "--max-tokens", "4", "--ban-ids", "5", "6",
                                    "--allow-ids", "5,6,9", "--ignore-eos", "--json"});
  ASSERT_EQ(lists.exit_status, 0) << lists.err;
  for (const json& line : JsonLines(lists.out)) {
    for (const uint32_t id : line.at("token_ids")) EXPECT_EQ(id, 9u);
  }
}

TEST_F(CliTest, ATokenIsNotSentInClearTextToAnotherMachine) {
  TempDir folder;
  const std::string file = folder.path() / "token", target = "no-such-host.invalid:50051";
  std::ofstream(file) << "secret\n";
  const std::vector<std::string> command = {ProgramPath("efla"), "generate", "--prompt", "a",
                                            "--target",          target};
  const auto with = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> all = command;
    all.insert(all.end(), flags.begin(), flags.end());
    return all;
  };
  for (const ProgramResult& result :
       {RunProgram(command, seconds(60), {"EFLA_TOKEN=secret"}), RunProgram(with({"--token-file", file}))}) {
    EXPECT_EQ(result.exit_status, 2) << result.err;
    ExpectFails(result, {target, "in clear text", "--tls", "--insecure-token"});
    EXPECT_EQ(result.err.find("secret"), std::string::npos) << result.err;
  }
  for (const ProgramResult& result :
       {RunProgram(command), RunProgram(with({"--token-file", file, "--insecure-token"}))}) {
    EXPECT_EQ(result.exit_status, 1) << result.err;
    ExpectFails(result, {"UNAVAILABLE", target});
  }
  const ProgramResult health =
      RunProgram({ProgramPath("efla"), "health", "--target", golden_server_->grpc_address()}, seconds(60),
                 {"EFLA_TOKEN=t"});
  EXPECT_EQ(health.exit_status, 0) << health.err;
}

TEST_F(CliTest, LoadFailsWhenARequestFails) {
  const ProgramResult result =
      Efla("load", *demo_server_,
           {"--requests", "2", "--warmup", "0", "--max-tokens", "20000", "--timeout", "0.3", "--quiet"});
  EXPECT_EQ(result.exit_status, 1) << result.out;
  EXPECT_NE(result.err.find("requests failed"), std::string::npos) << result.err;
}

TEST_F(CliTest, AServerThatIsNotThereIsNamed) {
  // The port of a server that has just ended: nothing listens there.
  auto gone = ServerProcess::Start(GoldenDir("efla_basic"));
  ASSERT_NE(gone, nullptr);
  const std::string address = gone->grpc_address();
  ASSERT_EQ(gone->Terminate(), 0);
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"generate", "--token-ids", "5"},
                                                std::vector<std::string>{"score", "--token-ids", "5"},
                                                std::vector<std::string>{"load", "--requests", "1"}}) {
    std::vector<std::string> command = {ProgramPath("efla"), flags[0], "--target", address};
    command.insert(command.end(), flags.begin() + 1, flags.end());
    ExpectFails(RunProgram(command), {address, "efla_server"});
  }
}

}  // namespace
}  // namespace efla::e2e
