#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "tests/model/scratch.h"

namespace efla {
namespace {

using nlohmann::json;

json Small() {
  return {{"model_type", "efla"},
          {"vocab_size", 300},
          {"hidden_size", 128},
          {"num_heads", 2},
          {"num_hidden_layers", 2}};
}

json With(const std::string& key, const json& value) {
  json config = Small();
  config[key] = value;
  return config;
}

TEST(ConfigTest, AbsentKeysTakeTheirDefaults) {
  const auto config = ModelConfig::Parse(Small().dump());
  ASSERT_TRUE(config.ok()) << config.status();
  ModelConfig expected;
  expected.vocab_size = 300;
  expected.hidden_size = 128;
  expected.intermediate_size = 512;  // 128 * 4 * 2 / 3 = 341, up to a multiple of 256
  expected.num_layers = 2;
  expected.num_heads = 2;
  expected.d_k = expected.d_v = 64;
  EXPECT_EQ(*config, expected);
  EXPECT_EQ(config->conv_size, 4);
  EXPECT_EQ(config->eos_token_ids, std::vector<TokenId>{2});
}

TEST(ConfigTest, EveryKeyIsRead) {
  json text = Small();
  text.update({{"expand_k", 0.5},
               {"expand_v", 2.0},
               {"use_beta", false},
               {"use_gate", true},
               {"conv_size", 3},
               {"allow_neg_eigval", true},
               {"qk_activation", "elu"},
               {"norm_eps", 1e-5},
               {"hidden_ratio", 3},
               {"tie_word_embeddings", true},
               {"bos_token_id", 7},
               {"eos_token_id", {5, 6, 5}},
               {"pad_token_id", 0},
               {"hidden_act", "silu"},
               {"qk_norm", "l2"},
               {"num_v_heads", 2},
               {"conv_bias", false},
               {"attn", nullptr},
               {"torch_dtype", "bfloat16"}});
  const auto config = ModelConfig::Parse(text.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->d_k, 32);
  EXPECT_EQ(config->d_v, 128);
  EXPECT_FALSE(config->use_beta);
  EXPECT_TRUE(config->use_gate);
  EXPECT_EQ(config->conv_size, 3);
  EXPECT_TRUE(config->allow_neg_eigval);
  EXPECT_EQ(config->qk_activation, QkActivation::kElu);
  EXPECT_EQ(config->norm_eps, 1e-5f);
  EXPECT_EQ(config->intermediate_size, 256);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->bos_token_id, 7);
  EXPECT_EQ(config->eos_token_ids, (std::vector<TokenId>{5, 6}));
  EXPECT_EQ(config->pad_token_id, 0);
}

TEST(ConfigTest, GatedTypesTakeTheHeadWidthFromHeadDim) {
  json text = With("model_type", "gated_efla");
  text["head_dim"] = 48;
  text["expand_v"] = 2.0;
  text["num_heads"] = 3;  // need not divide hidden_size
  const auto config = ModelConfig::Parse(text.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->d_k, 48);
  EXPECT_EQ(config->d_v, 96);
}

TEST(ConfigTest, TypeOverrideReplacesTheFilesType) {
  const std::string text = With("model_type", "delta_net").dump();
  EXPECT_EQ(ModelConfig::Parse(text)->type, ModelType::kDeltaNet);
  EXPECT_EQ(ModelConfig::Parse(text, ModelType::kEfla)->type, ModelType::kEfla);
  EXPECT_EQ(ModelConfig::Parse(With("model_type", "other").dump(), ModelType::kEfla)->type, ModelType::kEfla);
}

TEST(ConfigTest, WithoutShortConvolutionThereAreNoTaps) {
  EXPECT_EQ(ModelConfig::Parse(With("use_short_conv", false).dump())->conv_size, 0);
}

TEST(ConfigTest, NullEosMeansNone) {
  EXPECT_TRUE(ModelConfig::Parse(With("eos_token_id", nullptr).dump())->eos_token_ids.empty());
}

struct BadKey {
  const char* key;
  json value;
};

// Every refusal names the key and shows the value.
TEST(ConfigTest, RefusesByName) {
  const BadKey cases[] = {
      {"model_type", "llama"},
      {"model_type", 3},
      {"vocab_size", 0},
      {"vocab_size", -1},
      {"vocab_size", 1e30},
      {"vocab_size", 300.5},
      {"vocab_size", "300"},
      {"vocab_size", nullptr},
      {"vocab_size", 18446744073709551615u},
      {"hidden_size", int64_t{1} << 40},
      {"num_hidden_layers", 0},
      {"num_hidden_layers", 1000000},
      {"num_heads", 0},
      {"num_heads", true},
      {"expand_k", 0.3},
      {"expand_k", -1.0},
      {"expand_k", 1000.0},
      {"expand_v", 0},
      {"expand_v", "2"},
      {"head_dim", 1 << 20},
      {"use_beta", 1},
      {"use_beta", nullptr},
      {"use_gate", "yes"},
      {"use_short_conv", 0},
      {"conv_size", 0},
      {"conv_size", 1000},
      {"allow_neg_eigval", json::array()},
      {"qk_activation", "gelu"},
      {"qk_activation", nullptr},
      {"qk_norm", "sum"},
      {"qk_norm", true},
      {"norm_eps", 0},
      {"norm_eps", -1e-6},
      {"norm_eps", 2.0},
      {"hidden_ratio", 0},
      {"intermediate_size", 0},
      {"intermediate_size", int64_t{1} << 50},
      {"hidden_act", "gelu"},
      {"tie_word_embeddings", "false"},
      {"bos_token_id", 300},
      {"bos_token_id", -1},
      {"bos_token_id", nullptr},
      {"eos_token_id", 300},
      {"eos_token_id", json::array({2, -1})},
      {"eos_token_id", json::array({2, 2.5})},
      {"eos_token_id", "2"},
      {"pad_token_id", 300},
      {"attn", json{{"layers", {1}}}},
      {"attn", false},
      {"attnres_block_size", 4},
      {"num_v_heads", 4},
      {"conv_bias", true},
  };
  for (const BadKey& bad : cases) {
    const auto config = ModelConfig::Parse(With(bad.key, bad.value).dump());
    ASSERT_FALSE(config.ok()) << bad.key << " " << bad.value;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(config.status().message());
    EXPECT_NE(message.find(bad.key), std::string::npos) << message;
    std::string shown = bad.value.dump();
    if (bad.value.is_number_float()) shown = "";
    if (std::string(bad.key) == "model_type") shown = bad.value.is_string() ? "llama" : "3";
    EXPECT_NE(message.find(shown), std::string::npos) << message;
  }
}

TEST(ConfigTest, RefusesMissingKeysAndGatedTypesWithoutHeadDim) {
  for (const char* key : {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads"}) {
    json text = Small();
    text.erase(key);
    const auto config = ModelConfig::Parse(text.dump());
    ASSERT_FALSE(config.ok()) << key;
    EXPECT_NE(std::string(config.status().message()).find(key), std::string::npos) << config.status();
  }
  const auto gated = ModelConfig::Parse(With("model_type", "gated_deltanet").dump());
  ASSERT_FALSE(gated.ok());
  EXPECT_NE(std::string(gated.status().message()).find("head_dim"), std::string::npos);
}

TEST(ConfigTest, RefusesWhatIsNotOneJsonObject) {
  const std::string bad[] = {"",
                             "{",
                             "[]",
                             "null",
                             "{} {}",
                             "{'a':1}",
                             "\xFF",
                             R"({"vocab_size": 1, "vocab_size": 2})",
                             R"({"a": 1e999})",
                             std::string("{\"a\": \"\xC3\x28\"}"),
                             std::string(100000, '['),
                             "{\"a\":" + std::string(100000, '[')};
  for (const std::string& text : bad) {
    const auto config = ModelConfig::Parse(text);
    ASSERT_FALSE(config.ok()) << text.substr(0, 40);
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(ConfigTest, ToJsonReadsBackEqual) {
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("tests/golden"))) {
    const auto config = ModelConfig::Parse(ReadWhole(entry.path() / "config.json"));
    ASSERT_TRUE(config.ok()) << config.status();
    const auto again = ModelConfig::Parse(config->ToJson());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, *config) << entry.path();
  }
  ModelConfig odd = *ModelConfig::Preset("demo");
  odd.hidden_size = 640;
  odd.num_heads = 7;
  odd.d_k = 96;
  odd.d_v = 33;
  odd.conv_size = 0;
  odd.qk_activation = QkActivation::kIdentity;
  odd.norm_eps = std::nextafter(1e-6f, 1.0f);
  odd.eos_token_ids = {};
  odd.pad_token_id = 9;
  for (ModelType type : {ModelType::kDeltaNet, ModelType::kGatedEfla}) {
    odd.type = type;
    const auto again = ModelConfig::Parse(odd.ToJson());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, odd);
  }
}

TEST(ConfigTest, PresetsAreThePublishedShapes) {
  EXPECT_EQ(*ModelConfig::Preset("demo"),
            *ModelConfig::Parse(ReadWhole(SourcePath("model/demo/config.json"))));
  const ModelConfig small = *ModelConfig::Preset("340m");
  EXPECT_EQ(small.intermediate_size, 2816);
  EXPECT_EQ(small.num_heads, 8);
  EXPECT_EQ(small.d_k, 128);
  EXPECT_NEAR(static_cast<double>(small.parameter_count()), 374e6, 2e6);  // the head is not tied
  const ModelConfig large = *ModelConfig::Preset("1.3b");
  EXPECT_EQ(large.intermediate_size, 5632);
  EXPECT_EQ(large.d_v, 128);
  EXPECT_NEAR(static_cast<double>(large.parameter_count()), 1.365e9, 5e6);
  EXPECT_TRUE(small.Validate().ok());
  EXPECT_TRUE(large.Validate().ok());
  EXPECT_FALSE(ModelConfig::Preset("7b").ok());
}

TEST(ConfigTest, ValidateNamesTheField) {
  ModelConfig config = *ModelConfig::Preset("demo");
  config.d_k = 1 << 20;
  const absl::Status status = config.Validate();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(std::string(status.message()).find("d_k is 1048576"), std::string::npos) << status;
  config = *ModelConfig::Preset("demo");
  config.eos_token_ids = {4096};
  EXPECT_FALSE(config.Validate().ok());
  config = *ModelConfig::Preset("demo");
  config.norm_eps = NAN;
  EXPECT_FALSE(config.Validate().ok());
}

TEST(ConfigTest, RandomChangesNeverCrash) {
  const std::string good = ReadWhole(SourcePath("tests/golden/gated_efla/config.json"));
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string text = good;
    for (int change = 0; change < 1 + i % 4; ++change)
      text[random() % text.size()] = static_cast<char>(random());
    if (i % 7 == 0) text.resize(random() % text.size());
    const auto config = ModelConfig::Parse(text);
    if (!config.ok()) continue;
    ++accepted;
    EXPECT_TRUE(config->Validate().ok());
    EXPECT_GT(config->parameter_count(), 0);
  }
  EXPECT_GT(accepted, 0);  // keys that are ignored may change
}

}  // namespace
}  // namespace efla
