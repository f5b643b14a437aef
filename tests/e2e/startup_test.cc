// Start-up: every way a checkpoint or a flag can be wrong ends in one line that says what, and a status that
// is not 0.
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

namespace fs = std::filesystem;

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void WriteFile(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// A copy of a golden checkpoint, to be spoilt.
class StartupTest : public ::testing::Test {
 protected:
  void CopyGolden(const std::string& name) {
    fs::remove_all(checkpoint_);
    fs::copy(GoldenDir(name), checkpoint_);
  }
  void SetConfig(const std::string& key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(ReadFile(checkpoint_ / "config.json"));
    config[key] = value;
    WriteFile(checkpoint_ / "config.json", config.dump());
  }
  // Lets `change` edit the header of model.safetensors; the weights stay.
  void EditHeader(const std::function<void(nlohmann::json&)>& change) {
    const std::string file = ReadFile(checkpoint_ / "model.safetensors");
    uint64_t size = 0;
    std::memcpy(&size, file.data(), sizeof(size));
    nlohmann::json header = nlohmann::json::parse(file.substr(8, size));
    change(header);
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t new_size = text.size();
    WriteFile(checkpoint_ / "model.safetensors",
              std::string(reinterpret_cast<const char*>(&new_size), 8) + text + file.substr(8 + size));
  }

  // `words` must be in the one line that the server leaves.
  void ExpectRefused(const std::string& what, const std::vector<std::string>& words,
                     const std::vector<std::string>& flags = {}) {
    const ProgramResult result = RunProgram(ServerProcess::Command(checkpoint_, flags));
    EXPECT_GT(result.exit_status, 0) << what << "\n" << result.err;
    EXPECT_LT(result.exit_status, 128) << what << ": ended by a signal\n" << result.err;
    EXPECT_EQ(result.out, "") << what << ": no ready line";
    // The last line is the error; log lines may come before it.
    std::string error = result.err;
    while (!error.empty() && error.back() == '\n') error.pop_back();
    error = error.substr(error.rfind('\n') + 1);
    EXPECT_FALSE(error.empty()) << what;
    for (const std::string& word : words) {
      EXPECT_NE(error.find(word), std::string::npos)
          << what << ": \"" << word << "\" is not in: " << result.err;
    }
  }

  TempDir folder_;
  const fs::path checkpoint_ = folder_.path() / "checkpoint";
};

TEST_F(StartupTest, TheCopyIsServed) {
  CopyGolden("efla_basic");
  EditHeader([](nlohmann::json&) {});
  EXPECT_NE(ServerProcess::Start(checkpoint_), nullptr) << "what the other tests spoil is good";
}

TEST_F(StartupTest, GenerationConfigGivesTheDefaults) {
  CopyGolden("efla_basic");
  WriteFile(
      checkpoint_ / "generation_config.json",
      R"({"do_sample": false, "no_repeat_ngram_size": 1, "max_new_tokens": 9, "num_beams": 4, "top_h": 0.5})");
  const auto server = ServerProcess::Start(checkpoint_);
  ASSERT_NE(server, nullptr);
  v1::Model model;
  {
    grpc::ClientContext context;
    SetTimeout(context, kCallTimeout);
    const grpc::Status status =
        v1::Models::NewStub(server->NewChannel())->GetModel(&context, v1::GetModelRequest(), &model);
    ASSERT_TRUE(status.ok()) << ToString(status);
  }
  EXPECT_EQ(model.defaults().temperature(), 0);
  EXPECT_EQ(model.defaults().no_repeat_ngram_size(), 1u);
  EXPECT_EQ(model.defaults().max_tokens(), 9u);
  const auto generation = v1::Generation::NewStub(server->NewChannel());
  const auto drawn = [&](const v1::GenerateRequest& request) {
    const Reply reply = Generate(*generation, request);
    EXPECT_TRUE(reply.status.ok()) << ToString(reply.status);
    return reply.token_ids;
  };
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(5);
  request.mutable_stopping()->set_ignore_eos(true);
  (*request.mutable_sampling()->mutable_logit_bias())[300] = 100;
  const std::vector<uint32_t> distinct = drawn(request);
  EXPECT_EQ(distinct.size(), 9u);
  EXPECT_EQ(std::count(distinct.begin(), distinct.end(), 300u), 1);
  request.mutable_sampling()->set_no_repeat_ngram_size(0);
  request.mutable_stopping()->set_max_tokens(4);
  EXPECT_EQ(drawn(request), std::vector<uint32_t>(4, 300));
  EXPECT_EQ(server->Terminate(), 0);
  const std::string log = server->process().err();
  EXPECT_NE(log.find("num_beams 4, top_h 0.5"), std::string::npos) << log;
}

TEST_F(StartupTest, BrokenFilesAreNamed) {
  ExpectRefused("no such folder", {checkpoint_.string()});
  CopyGolden("efla_basic");
  const std::string weights = ReadFile(checkpoint_ / "model.safetensors");
  WriteFile(checkpoint_ / "model.safetensors", weights.substr(0, weights.size() / 2));
  ExpectRefused("half of the file", {"model.safetensors"});
  WriteFile(checkpoint_ / "model.safetensors", weights.substr(0, 5));
  ExpectRefused("five bytes", {"model.safetensors"});
  WriteFile(checkpoint_ / "model.safetensors", "");
  ExpectRefused("no bytes", {"model.safetensors"});
  WriteFile(checkpoint_ / "model.safetensors", std::string(8, '\xff') + weights.substr(8));
  ExpectRefused("a header of 2^64 bytes", {"model.safetensors"});
  fs::remove(checkpoint_ / "model.safetensors");
  ExpectRefused("no weights", {"model.safetensors"});

  CopyGolden("efla_basic");
  fs::remove(checkpoint_ / "config.json");
  ExpectRefused("no config", {"config.json"});
  WriteFile(checkpoint_ / "config.json", "{\"model_type\": ");
  ExpectRefused("half a config", {"config.json"});
  WriteFile(checkpoint_ / "config.json", "[1, 2]");
  ExpectRefused("a config that is a list", {"config.json"});
}

TEST_F(StartupTest, LyingHeadersAreRefused) {
  const auto kName = "model.layers.0.attn.q_proj.weight";
  const std::vector<std::pair<const char*, std::function<void(nlohmann::json&)>>> kLies = {
      {"past the end",
       [&](auto& h) {
         h[kName]["data_offsets"] = {0, uint64_t{1} << 40};
       }},
      {"end before begin",
       [&](auto& h) {
         h[kName]["data_offsets"] = {64, 0};
       }},
      {"near 2^64",
       [&](auto& h) {
         h[kName]["data_offsets"] = {~uint64_t{0} - 8, ~uint64_t{0}};
       }},
      {"negative",
       [&](auto& h) {
         h[kName]["data_offsets"] = {-8, 8};
       }},
      {"bytes that are not the shape's",
       [&](auto& h) {
         h[kName]["shape"] = {128, 127};
       }},
      {"a shape that overflows",
       [&](auto& h) {
         h[kName]["shape"] = {uint64_t{1} << 33, uint64_t{1} << 33};
       }},
      {"unknown dtype", [&](auto& h) { h[kName]["dtype"] = "Q4"; }},
      {"not an object", [&](auto& h) { h[kName] = 7; }},
  };
  for (const auto& [what, lie] : kLies) {
    CopyGolden("efla_basic");
    EditHeader(lie);
    ExpectRefused(what, {kName});
  }
  CopyGolden("efla_basic");
  EditHeader([&](nlohmann::json& header) {
    header["model.layers.0.attn.q_projection.weight"] = header[kName];
    header.erase(kName);
  });
  ExpectRefused("a tensor that is missing", {kName});
}

TEST_F(StartupTest, MissingShardsAreNamed) {
  CopyGolden("efla_tied_sharded");
  fs::remove(checkpoint_ / "model-00002-of-00003.safetensors");
  ExpectRefused("a shard is missing", {"model-00002-of-00003.safetensors"});
  CopyGolden("efla_tied_sharded");
  WriteFile(checkpoint_ / "model.safetensors.index.json", "{}");
  ExpectRefused("an empty index", {"model.safetensors.index.json"});
}

TEST_F(StartupTest, ConfigsThatContradictTheWeightsOrAreNotBuiltAreNamed) {
  struct Case {
    const char* key;
    nlohmann::json value;
    std::vector<std::string> words;
  };
  const std::vector<Case> kCases = {
      {"hidden_size", 256, {"256", "128"}},
      {"vocab_size", 321, {"321", "320"}},
      {"num_hidden_layers", 3, {"model.layers.2"}},
      {"intermediate_size", 511, {"511", "512"}},
      {"num_heads", 3, {"128", "3"}},
      {"num_heads", 0, {"num_heads", "0"}},
      {"hidden_size", -1, {"hidden_size", "-1"}},
      {"hidden_size", "many", {"hidden_size"}},
      {"model_type", "llama", {"model_type", "llama"}},
      {"attn", {{"layers", {1}}}, {"attn"}},
      {"hidden_act", "gelu", {"hidden_act", "gelu"}},
      {"conv_bias", true, {"conv_bias"}},
      {"attnres_block_size", 4, {"attnres_block_size"}},
      {"num_v_heads", 2, {"num_v_heads", "2"}},
      {"qk_activation", "tanh", {"qk_activation", "tanh"}},
      {"norm_eps", -1.0, {"norm_eps"}},
  };
  for (const Case& c : kCases) {
    CopyGolden("efla_basic");
    SetConfig(c.key, c.value);
    ExpectRefused(std::string(c.key) + " " + c.value.dump(), c.words);
  }
}

TEST_F(StartupTest, ATokenizerThatIsNoneIsNamed) {
  CopyGolden("efla_basic");
  WriteFile(checkpoint_ / "tokenizer.model", "this is no SentencePiece model");
  ExpectRefused("garbage", {"tokenizer.model"});
  fs::copy_file(SourceDir() / "model/demo/tokenizer.model", checkpoint_ / "tokenizer.model",
                fs::copy_options::overwrite_existing);
  ExpectRefused("a tokenizer of a larger vocabulary", {"tokenizer", "4096", "320"});
}

TEST_F(StartupTest, PortsInUseAreNamed) {
  CopyGolden("efla_basic");
  const auto first = ServerProcess::Start(checkpoint_);
  ASSERT_NE(first, nullptr);
  ExpectRefused("gRPC port in use", {"in use", first->grpc_address()}, {"--listen", first->grpc_address()});
  ExpectRefused("admin port in use", {"in use", first->admin_address()}, {"--admin", first->admin_address()});
  EXPECT_EQ(HealthOf(first->NewChannel(), ""), 1) << "the first server is untouched";
}

TEST_F(StartupTest, BadFlagsAreNamed) {
  CopyGolden("efla_basic");
  const std::vector<std::vector<std::string>> kFlags = {
      {"--no-such-flag", "7"},      {"--max-batch-tokens", "100"},   {"--max-batch-tokens", "0"},
      {"--max-queue", "-1"},        {"--max-running", "-5"},         {"--state-slots", "many"},
      {"--max-prompt-tokens", "0"}, {"--drain-timeout", "-1"},       {"--slow-reader-timeout", "-1"},
      {"--listen", "nowhere"},      {"--listen", "127.0.0.1:99999"}, {"--admin", "127.0.0.1:-1"},
      {"--model-type", "llama"},    {"--load-format", "pickle"},     {"--preset", "7b"},
      {"--threads", "-2"},          {"--log-level", "loud"},
  };
  for (const std::vector<std::string>& flag : kFlags) {
    ExpectRefused(flag[0] + " " + flag[1], flag, flag);
  }
  ExpectRefused("NaN seconds", {"--drain-timeout", "number"}, {"--drain-timeout", "nan"});
  const ProgramResult bare = RunProgram({ProgramPath("efla_server")});
  EXPECT_GT(bare.exit_status, 0);
  EXPECT_NE(bare.err.find("--checkpoint"), std::string::npos) << bare.err;
}

TEST_F(StartupTest, HelpNamesEveryFlag) {
  const ProgramResult help = RunProgram({ProgramPath("efla_server"), "--help"});
  EXPECT_EQ(help.exit_status, 0);
  for (const char* flag :
       {"--checkpoint", "--listen", "--admin", "--device", "--model-type", "--model-name", "--state-slots",
        "--max-batch-tokens", "--max-running", "--max-queue", "--max-prompt-tokens", "--drain-timeout",
        "--slow-reader-timeout", "--load-format", "--preset", "--config"}) {
    EXPECT_NE(help.out.find(flag), std::string::npos) << flag;
  }
}

TEST_F(StartupTest, FlagBeatsConfigFileBeatsEnvironment) {
  CopyGolden("efla_basic");
  const fs::path config = folder_.path() / "server.toml";
  const auto model_name = [&](std::vector<std::string> flags) {
    const auto server = ServerProcess::Start(checkpoint_, flags);
    return server == nullptr ? "" : server->model();
  };
  EXPECT_EQ(model_name({}), "checkpoint") << "the folder's name";
  WriteFile(config, "model-name = \"from-file\"\n");
  EXPECT_EQ(model_name({"--config", config.string()}), "from-file");
  EXPECT_EQ(model_name({"--config", config.string(), "--model-name", "from-flag"}), "from-flag");
  setenv("EFLA_SERVER_MODEL_NAME", "from-environment", 1);
  EXPECT_EQ(model_name({}), "from-environment");
  EXPECT_EQ(model_name({"--config", config.string()}), "from-file");
  unsetenv("EFLA_SERVER_MODEL_NAME");
  WriteFile(config, "no-such-flag = 1\n");
  ExpectRefused("an unknown name in the file", {"no-such-flag"}, {"--config", config.string()});
}

TEST_F(StartupTest, DummyWeightsServeAPreset) {
  ChildProcess server({ProgramPath("efla_server"), "--load-format", "dummy", "--preset", "demo", "--listen",
                       "127.0.0.1:0", "--admin", "127.0.0.1:0", "--device", TestDevice()});
  ASSERT_TRUE(Eventually([&] { return server.out().find("model=demo\n") != std::string::npos; }, seconds(60)))
      << server.err();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(seconds(10)), 0);
}

}  // namespace
}  // namespace efla::e2e
