#include "model/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "tests/model/scratch.h"

namespace efla {
namespace {

using nlohmann::json;

const char kBasic[] = "tests/golden/efla_basic";
const char kSharded[] = "tests/golden/efla_tied_sharded";

void ExpectRefused(const std::string& directory, const std::string& message) {
  const auto checkpoint = Checkpoint::Open(directory);
  ASSERT_FALSE(checkpoint.ok()) << message;
  EXPECT_NE(std::string(checkpoint.status().message()).find(message), std::string::npos)
      << checkpoint.status();
}

// A golden checkpoint with its tensors changed by `change`.
void Rewrite(const ScratchDirectory& scratch, const std::function<void(std::vector<TensorInfo>&)>& change) {
  scratch.CopyFrom(SourcePath(kBasic));
  const auto file = SafetensorsFile::Open(SourcePath(std::string(kBasic) + "/model.safetensors"));
  ASSERT_TRUE(file.ok());
  std::vector<TensorInfo> tensors = (*file)->tensors();
  change(tensors);
  ASSERT_TRUE(WriteSafetensors(scratch.File("model.safetensors"), tensors).ok());
}

void Edit(const ScratchDirectory& scratch, const std::string& name,
          const std::function<void(json&)>& change) {
  json value = json::parse(ReadWhole(scratch.File(name)));
  change(value);
  scratch.Write(name, value.dump());
}

TEST(CheckpointTest, OpensEveryGoldenCheckpointAndTheDemo) {
  std::vector<std::string> directories = {SourcePath("model/demo")};
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("tests/golden"))) {
    directories.push_back(entry.path());
  }
  EXPECT_GE(directories.size(), 12u);
  for (const std::string& directory : directories) {
    const auto checkpoint = Checkpoint::Open(directory);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ((*checkpoint)->directory(), directory);
    int64_t parameters = 0;
    for (const TensorInfo& tensor : (*checkpoint)->tensors()) {
      parameters += tensor.bytes() / static_cast<int64_t>(ByteSize(tensor.dtype));
      EXPECT_EQ((*checkpoint)->Find(tensor.name)->data, tensor.data);
    }
    EXPECT_EQ(parameters, (*checkpoint)->config().parameter_count()) << directory;
    EXPECT_EQ((*checkpoint)->tensors().size(), ExpectedTensors((*checkpoint)->config()).size());
    EXPECT_EQ((*checkpoint)->Find("nothing").status().code(), absl::StatusCode::kNotFound);
  }
}

TEST(CheckpointTest, ReleasedTensorsOfFilesReadAsBefore) {
  const auto checkpoint = *Checkpoint::Open(SourcePath("model/demo"));
  const TensorInfo table = *checkpoint->Find("model.embeddings.weight");
  const std::vector<char> before(static_cast<const char*>(table.data),
                                 static_cast<const char*>(table.data) + table.bytes());
  checkpoint->Release(table);
  EXPECT_EQ(std::memcmp(table.data, before.data(), before.size()), 0);
}

TEST(CheckpointTest, FingerprintDependsOnContentsAlone) {
  const auto checkpoint = *Checkpoint::Open(SourcePath(kBasic));
  const std::string fingerprint = checkpoint->Fingerprint();
  EXPECT_EQ(fingerprint.size(), 64u);
  EXPECT_EQ(checkpoint->Fingerprint(), fingerprint);

  const ScratchDirectory reordered;
  Rewrite(reordered, [](std::vector<TensorInfo>& tensors) { std::reverse(tensors.begin(), tensors.end()); });
  EXPECT_EQ((*Checkpoint::Open(reordered.path()))->Fingerprint(), fingerprint);

  const ScratchDirectory changed;
  changed.CopyFrom(SourcePath(kBasic));
  std::string bytes = ReadWhole(changed.File("model.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  changed.Write("model.safetensors", bytes);
  EXPECT_NE((*Checkpoint::Open(changed.path()))->Fingerprint(), fingerprint);

  CheckpointOptions as_delta_net;
  as_delta_net.type_override = ModelType::kDeltaNet;
  EXPECT_NE((*Checkpoint::Open(SourcePath(kBasic), as_delta_net))->Fingerprint(), fingerprint);
}

TEST(CheckpointTest, MissingFilesAreNotFound) {
  const ScratchDirectory scratch;
  EXPECT_EQ(Checkpoint::Open(scratch.File("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::Open(scratch.path()).status().code(), absl::StatusCode::kNotFound);
  scratch.Write("config.json", ReadWhole(SourcePath(std::string(kBasic) + "/config.json")));
  EXPECT_EQ(Checkpoint::Open(scratch.path()).status().code(), absl::StatusCode::kNotFound);
  ExpectRefused(scratch.path(), "neither model.safetensors nor");
}

TEST(CheckpointTest, RefusesTensorsThatTheConfigDoesNotAskFor) {
  const ScratchDirectory missing, extra, shape;
  Rewrite(missing, [](std::vector<TensorInfo>& tensors) {
    std::erase_if(tensors, [](const TensorInfo& t) { return t.name == "model.layers.1.attn.k_proj.weight"; });
  });
  ExpectRefused(missing.path(), "tensor model.layers.1.attn.k_proj.weight is missing");
  Rewrite(extra, [](std::vector<TensorInfo>& tensors) {
    tensors.push_back(tensors.front());
    tensors.back().name = "model.layers.2.attn_norm.weight";
  });
  ExpectRefused(extra.path(), "tensor model.layers.2.attn_norm.weight");
  Rewrite(shape, [](std::vector<TensorInfo>& tensors) {
    for (TensorInfo& tensor : tensors) {
      if (tensor.name == "model.layers.0.mlp.down_proj.weight") std::swap(tensor.shape[0], tensor.shape[1]);
    }
  });
  ExpectRefused(shape.path(), "tensor model.layers.0.mlp.down_proj.weight has shape [512, 128]");
}

TEST(CheckpointTest, RefusesAConfigThatDisagreesWithTheWeights) {
  const ScratchDirectory scratch;
  scratch.CopyFrom(SourcePath(kBasic));
  Edit(scratch, "config.json", [](json& config) { config["num_hidden_layers"] = 3; });
  ExpectRefused(scratch.path(), "model.layers.2");
  Edit(scratch, "config.json", [](json& config) {
    config["num_hidden_layers"] = 2;
    config["use_gate"] = true;
  });
  ExpectRefused(scratch.path(), "g_proj.weight is missing");
  scratch.Write("config.json", "{");
  ExpectRefused(scratch.path(), scratch.path() + "/config.json");
}

TEST(CheckpointTest, GateScalarsMustBeFloat32) {
  const ScratchDirectory scratch;
  const std::string golden = SourcePath("tests/golden/gated_efla");
  scratch.CopyFrom(golden);
  const auto file = *SafetensorsFile::Open(golden + "/model.safetensors");
  std::vector<TensorInfo> tensors = file->tensors();
  for (TensorInfo& tensor : tensors) {
    if (tensor.name.ends_with("1.attn.A_log")) tensor.dtype = DType::kBF16;
  }
  ASSERT_TRUE(WriteSafetensors(scratch.File("model.safetensors"), tensors).ok());
  ExpectRefused(scratch.path(), "tensor model.layers.1.attn.A_log is BF16; it must be F32");
}

TEST(CheckpointTest, AHeadBesideTiedEmbeddingsMustBeTheSame) {
  const auto golden = *Checkpoint::Open(SourcePath("model/demo"));
  ScratchDirectory scratch;
  scratch.Write("config.json", ReadWhole(SourcePath("model/demo/config.json")));
  std::vector<TensorInfo> tensors = golden->tensors();
  tensors.push_back(*golden->Find("model.embeddings.weight"));
  tensors.back().name = "lm_head.weight";
  ASSERT_TRUE(WriteSafetensors(scratch.File("model.safetensors"), tensors).ok());
  const auto same = Checkpoint::Open(scratch.path());
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_FALSE((*same)->Find("lm_head.weight").ok());
  EXPECT_EQ((*same)->Fingerprint(), golden->Fingerprint());

  std::vector<char> head(static_cast<const char*>(tensors.back().data),
                         static_cast<const char*>(tensors.back().data) + tensors.back().bytes());
  head[1000] = static_cast<char>(head[1000] ^ 1);
  tensors.back().data = head.data();
  ASSERT_TRUE(WriteSafetensors(scratch.File("model.safetensors"), tensors).ok());
  ExpectRefused(scratch.path(), "lm_head.weight that differs");
}

TEST(CheckpointTest, ShardsAndIndexMustAgreeBothWays) {
  const std::string index = "model.safetensors.index.json";
  const auto refused = [&](const std::function<void(const ScratchDirectory&)>& change, const char* message) {
    const ScratchDirectory scratch;
    scratch.CopyFrom(SourcePath(kSharded));
    change(scratch);
    ExpectRefused(scratch.path(), message);
  };
  const auto edited = [&](const std::function<void(json&)>& change, const char* message) {
    refused([&](const ScratchDirectory& scratch) { Edit(scratch, index, change); }, message);
  };
  edited([](json& v) { v["weight_map"].erase("model.norm.weight"); }, "model.norm.weight, which");
  edited([](json& v) { v["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"; },
         "model.norm.weight");
  edited([](json& v) { v["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"; },
         "tensor ghost is to be in model-00001-of-00003.safetensors, which does not hold it");
  edited([](json& v) { v["weight_map"]["ghost"] = "model-00009-of-00003.safetensors"; },
         "model-00009-of-00003");
  for (const char* name : {"../model.safetensors", "/etc/passwd", "..", "", "a/b"}) {
    edited([&](json& v) { v["weight_map"]["model.norm.weight"] = name; }, "without a folder");
  }
  edited([](json& v) { v["weight_map"]["model.norm.weight"] = 3; }, "without a folder");
  edited([](json& v) { v["weight_map"] = json::object(); }, "weight_map");
  edited([](json& v) { v.erase("weight_map"); }, "weight_map");
  refused([&](const ScratchDirectory& s) { s.Write(index, "[]"); }, "index.json");
  refused(
      [&](const ScratchDirectory& s) { std::filesystem::remove(s.File("model-00002-of-00003.safetensors")); },
      "model-00002-of-00003.safetensors: cannot open");
  refused(
      [&](const ScratchDirectory& s) {
        const std::string name = "model-00002-of-00003.safetensors";
        std::string bytes = ReadWhole(s.File(name));
        bytes.resize(bytes.size() - 100);
        s.Write(name, bytes);
      },
      "model-00002-of-00003.safetensors: tensor");
}

TEST(CheckpointTest, GenerationConfigGivesDefaults) {
  const ScratchDirectory scratch;
  scratch.CopyFrom(SourcePath(kBasic));
  EXPECT_FALSE((*Checkpoint::Open(scratch.path()))->defaults().temperature.has_value());
  scratch.Write("generation_config.json",
                R"({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": null, "do_sample": true,
                    "typical_p": 0.6, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
                    "max_new_tokens": 512, "eos_token_id": [2, 5], "transformers_version": "4.50"})");
  const auto checkpoint = *Checkpoint::Open(scratch.path());
  EXPECT_EQ(checkpoint->defaults().temperature, 0.7f);
  EXPECT_EQ(checkpoint->defaults().top_p, 0.9f);
  EXPECT_EQ(checkpoint->defaults().top_k, 40);
  EXPECT_FALSE(checkpoint->defaults().min_p.has_value());
  EXPECT_EQ(checkpoint->defaults().typical_p, 0.6f);
  EXPECT_EQ(checkpoint->defaults().repetition_penalty, 1.2f);
  EXPECT_EQ(checkpoint->defaults().no_repeat_ngram_size, 3);
  EXPECT_EQ(checkpoint->defaults().max_new_tokens, 512);
  EXPECT_TRUE(checkpoint->defaults().unsupported.empty());
  EXPECT_EQ(checkpoint->defaults().eos_token_ids, (std::vector<TokenId>{2, 5}));
  EXPECT_EQ(checkpoint->config().eos_token_ids, (std::vector<TokenId>{2, 5}));
  scratch.Write("generation_config.json", R"({"do_sample": false, "temperature": 0.7})");
  EXPECT_EQ((*Checkpoint::Open(scratch.path()))->defaults().temperature, 0.0f);
  for (const char* bad :
       {R"({"temperature": -1})", R"({"temperature": "hot"})", R"({"top_p": 0})", R"({"top_p": 1.5})",
        R"({"top_k": -1})", R"({"min_p": 1})", R"({"typical_p": 0})", R"({"repetition_penalty": 11})",
        R"({"repetition_penalty": 0})", R"({"repetition_penalty": 1e-40})", R"({"no_repeat_ngram_size": 65})",
        R"({"no_repeat_ngram_size": -1})", R"({"max_new_tokens": 0})", R"({"max_new_tokens": 1.5})",
        R"({"eos_token_id": 320})", R"({"do_sample": 1})", "[]", "{"}) {
    scratch.Write("generation_config.json", bad);
    ExpectRefused(scratch.path(), "generation_config.json");
  }
}

TEST(CheckpointTest, GenerationConfigSaysWhatItAsksForInVain) {
  const ScratchDirectory scratch;
  scratch.CopyFrom(SourcePath(kBasic));
  scratch.Write("generation_config.json",
                R"({"suppress_tokens": [7], "num_beams": 4, "num_beam_groups": 1, "min_length": 0,
                    "penalty_alpha": 0.0, "bad_words_ids": [], "guidance_scale": null, "pad_token_id": 0,
                    "use_cache": true})");
  EXPECT_EQ((*Checkpoint::Open(scratch.path()))->defaults().unsupported,
            (std::vector<std::string>{"num_beams 4", "suppress_tokens [7]"}));
}

TEST(CheckpointTest, RandomChangesToTheWeightFileNeverCrash) {
  const ScratchDirectory scratch;
  scratch.CopyFrom(SourcePath(kBasic));
  const std::string good = ReadWhole(scratch.File("model.safetensors"));
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, good.data(), 8);
  std::mt19937 random(8);
  int opened = 0;
  for (int i = 0; i < 300; ++i) {
    std::FILE* file = std::fopen(scratch.File("model.safetensors").c_str(), "r+b");
    ASSERT_NE(file, nullptr);
    const size_t at = random() % (8 + header_bytes);
    const char byte = static_cast<char>(i % 2 == 0 ? '0' + random() % 10 : random());
    std::fseek(file, static_cast<long>(at), SEEK_SET);
    std::fputc(byte, file);
    std::fflush(file);
    const auto checkpoint = Checkpoint::Open(scratch.path());
    if (checkpoint.ok()) ++opened;
    std::fseek(file, static_cast<long>(at), SEEK_SET);
    std::fputc(good[at], file);
    std::fclose(file);
  }
  EXPECT_LT(opened, 150);
  EXPECT_TRUE(Checkpoint::Open(scratch.path()).ok());
}

double ValueAt(const TensorInfo& tensor, int64_t i) {
  if (tensor.dtype == DType::kF32) return static_cast<const float*>(tensor.data)[i];
  const uint16_t half = static_cast<const uint16_t*>(tensor.data)[i];
  if (tensor.dtype == DType::kBF16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const int exponent = (half >> 10) & 31;
  const double fraction = (half & 1023) / 1024.0;
  const double size = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  return (half & 0x8000) != 0 ? -size : size;
}

TEST(RandomCheckpointTest, EveryTensorHasItsDistribution) {
  ModelConfig config = *ModelConfig::Preset("demo");
  config.type = ModelType::kGatedEfla;
  config.num_layers = 2;
  config.tie_word_embeddings = false;
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto checkpoint = Checkpoint::Random(config, 7, dtype);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ((*checkpoint)->tensors().size(), ExpectedTensors(config).size());
    EXPECT_EQ((*checkpoint)->directory(), "");
    for (const ExpectedTensor& expected : ExpectedTensors(config)) {
      const TensorInfo tensor = *(*checkpoint)->Find(expected.name);
      ASSERT_EQ(tensor.shape, expected.shape);
      ASSERT_EQ(tensor.dtype, expected.float32_only ? DType::kF32 : dtype);
      const int64_t elements = tensor.bytes() / static_cast<int64_t>(ByteSize(tensor.dtype));
      double sum = 0, squares = 0, least = 1e9, most = -1e9;
      for (int64_t i = 0; i < elements; ++i) {
        const double value = ValueAt(tensor, i);
        sum += value;
        squares += value * value;
        least = std::min(least, value);
        most = std::max(most, value);
      }
      const double mean = sum / static_cast<double>(elements);
      const double deviation = std::sqrt(squares / static_cast<double>(elements) - mean * mean);
      if (expected.name.ends_with("norm.weight")) {
        EXPECT_EQ(least, 1.0);
        EXPECT_EQ(most, 1.0);
      } else if (expected.float32_only) {
        const double low = expected.name.ends_with("A_log") ? -3 : -4;
        EXPECT_GE(least, low);
        EXPECT_LE(most, low + 4);
      } else {
        const double wanted = expected.name.ends_with("conv1d.weight") ? 0.5
                              : expected.name == "model.embeddings.weight"
                                  ? 0.02
                                  : 1 / std::sqrt(expected.shape.back());
        const double tolerance = 5 / std::sqrt(static_cast<double>(elements));
        EXPECT_NEAR(deviation / wanted, 1, tolerance) << expected.name;
        EXPECT_NEAR(mean / wanted, 0, tolerance) << expected.name;
      }
    }
  }
}

TEST(RandomCheckpointTest, SameSeedSameWeights) {
  const ModelConfig config = *ModelConfig::Preset("demo");
  const auto a = *Checkpoint::Random(config, 1, DType::kBF16);
  const auto b = *Checkpoint::Random(config, 1, DType::kBF16);
  const auto c = *Checkpoint::Random(config, 2, DType::kBF16);
  EXPECT_EQ(a->Fingerprint(), b->Fingerprint());
  EXPECT_NE(a->Fingerprint(), c->Fingerprint());
  EXPECT_NE(a->Fingerprint(), (*Checkpoint::Random(config, 1, DType::kF16))->Fingerprint());
  // These bits must not depend on the compiler or the machine.
  EXPECT_EQ(a->Fingerprint(), "4e309cf151c18b81128134965a1399e3916c33591c8647bebb58477ca42876a2");
  const TensorInfo q = *a->Find("model.layers.0.attn.q_proj.weight");
  const TensorInfo k = *a->Find("model.layers.0.attn.k_proj.weight");
  EXPECT_EQ(std::memcmp(q.data, b->Find(q.name)->data, static_cast<size_t>(q.bytes())), 0);
  EXPECT_NE(std::memcmp(q.data, k.data, static_cast<size_t>(q.bytes())), 0);
  a->Release(q);
  EXPECT_EQ(a->Fingerprint(), b->Fingerprint());  // made again, not read
}

TEST(RandomCheckpointTest, RefusesAConfigOutOfRange) {
  ModelConfig config = *ModelConfig::Preset("demo");
  config.num_layers = 0;
  EXPECT_EQ(Checkpoint::Random(config, 1, DType::kBF16).status().code(), absl::StatusCode::kInvalidArgument);
  config = *ModelConfig::Preset("demo");
  config.vocab_size = 1 << 24;
  config.hidden_size = 1 << 16;
  config.intermediate_size = 1 << 20;
  config.num_layers = 1024;
  EXPECT_EQ(Checkpoint::Random(config, 1, DType::kF32).status().code(), absl::StatusCode::kResourceExhausted);
}

struct ProgramResult {
  int exit_code;
  std::string output;  // both streams
};

ProgramResult RunProgram(const std::string& arguments) {
  const std::string command = std::string(EFLA_CHECKPOINT_PROGRAM) + " " + arguments + " 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  ProgramResult result = {-1, ""};
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer;
  for (size_t got; (got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    result.output.append(buffer.data(), got);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

TEST(CheckpointProgramTest, WhatItWritesOpensAndIsTheRandomCheckpoint) {
  const ScratchDirectory scratch;
  const ModelConfig config = *ModelConfig::Preset("demo");
  const std::string expected = (*Checkpoint::Random(config, 3, DType::kF16))->Fingerprint();
  for (const char* shards : {"1", "4", "9"}) {
    const std::string directory = scratch.File(std::string("out") + shards);
    const auto made =
        RunProgram("random " + directory + " --preset demo --seed 3 --dtype f16 --shards " + shards);
    ASSERT_EQ(made.exit_code, 0) << made.output;
    const auto checkpoint = Checkpoint::Open(directory);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ((*checkpoint)->config(), config);
    EXPECT_EQ((*checkpoint)->Fingerprint(), expected);
    const auto verified = RunProgram("verify " + directory);
    EXPECT_EQ(verified.exit_code, 0);
    EXPECT_EQ(verified.output, "ok " + expected + "\n");
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos);
      ++files;
    }
    EXPECT_EQ(files, *shards == '1' ? 2 : 2 + std::stoi(shards));
  }
}

TEST(CheckpointProgramTest, ReplacesOnlyWhenForced) {
  const ScratchDirectory scratch;
  const std::string directory = scratch.File("out");
  ASSERT_EQ(RunProgram("random " + directory + " --preset demo --shards 3").exit_code, 0);
  const std::string before = (*Checkpoint::Open(directory))->Fingerprint();
  const auto refused = RunProgram("random " + directory + " --preset demo --seed 9");
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.output.find("--force"), std::string::npos) << refused.output;
  EXPECT_EQ((*Checkpoint::Open(directory))->Fingerprint(), before);
  ASSERT_EQ(RunProgram("random " + directory + " --preset demo --seed 9 --force").exit_code, 0);
  EXPECT_NE((*Checkpoint::Open(directory))->Fingerprint(), before);
  EXPECT_FALSE(std::filesystem::exists(directory + "/model.safetensors.index.json"));
}

TEST(CheckpointProgramTest, TakesAConfigFileAndAType) {
  const ScratchDirectory scratch;
  const std::string config = SourcePath("tests/golden/gated_efla/config.json");
  const auto made = RunProgram("random " + scratch.File("out") + " --config " + config + " --dtype f32");
  ASSERT_EQ(made.exit_code, 0) << made.output;
  EXPECT_EQ((*Checkpoint::Open(scratch.File("out")))->config(), *ModelConfig::Parse(ReadWhole(config)));
  ASSERT_EQ(RunProgram("random " + scratch.File("typed") + " --preset demo --model-type delta_net").exit_code,
            0);
  EXPECT_EQ((*Checkpoint::Open(scratch.File("typed")))->config().type, ModelType::kDeltaNet);
  EXPECT_EQ(RunProgram("random " + scratch.File("bad") + " --preset demo --model-type rnn").exit_code, 1);
  EXPECT_EQ(RunProgram("random " + scratch.File("bad") + " --preset huge").exit_code, 1);
  EXPECT_NE(RunProgram("random " + scratch.File("bad")).exit_code, 0);
  EXPECT_NE(RunProgram("random " + scratch.File("bad") + " --preset demo --dtype f64").exit_code, 0);
  EXPECT_NE(RunProgram("random " + scratch.File("bad") + " --preset demo --shards 0").exit_code, 0);
}

TEST(CheckpointProgramTest, InspectTellsTheModel) {
  const auto result = RunProgram("inspect --json " + SourcePath("model/demo"));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const json about = json::parse(result.output);
  EXPECT_EQ(about["config"]["model_type"], "efla");
  const ModelConfig config = *ModelConfig::Preset("demo");
  EXPECT_EQ(about["parameters"], config.parameter_count());
  // 10 layers of 2 heads of 128 x 128 and 3 inputs of 3 * 256 channels, in float32.
  EXPECT_EQ(about["state_bytes_per_sequence"], 10 * (2 * 128 * 128 + 3 * 768) * 4);
  EXPECT_EQ(about["tensors"].size(), ExpectedTensors(config).size());
  EXPECT_EQ(about["dtypes"]["BF16"]["bytes"], about["weight_bytes"]);
  EXPECT_EQ(about["tokenizer"]["pieces"], 4096);
  const auto plain = RunProgram("inspect " + SourcePath("model/demo"));
  EXPECT_EQ(plain.exit_code, 0);
  EXPECT_NE(plain.output.find("model.layers.9.mlp.down_proj.weight"), std::string::npos);
}

TEST(CheckpointProgramTest, VerifyFindsBadWeightsAndBadFiles) {
  EXPECT_EQ(RunProgram("verify " + SourcePath("model/demo")).exit_code, 0);
  const ScratchDirectory scratch;
  scratch.CopyFrom(SourcePath(kBasic));
  std::string bytes = ReadWhole(scratch.File("model.safetensors"));
  bytes[bytes.size() - 1] = '\x7F';  // the last bfloat16's sign and exponent
  bytes[bytes.size() - 2] = '\x80';
  scratch.Write("model.safetensors", bytes);
  const auto infinite = RunProgram("verify " + scratch.path());
  EXPECT_EQ(infinite.exit_code, 1);
  EXPECT_NE(infinite.output.find("lm_head.weight: element"), std::string::npos) << infinite.output;
  const auto missing = RunProgram("verify " + scratch.File("none"));
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_NE(missing.output.find("config.json"), std::string::npos) << missing.output;
  ASSERT_EQ(RunProgram("random " + scratch.File("small") + " --config " +
                       SourcePath("tests/golden/efla_noconv/config.json"))
                .exit_code,
            0);
  std::filesystem::copy(SourcePath("model/demo/tokenizer.model"), scratch.File("small/tokenizer.model"));
  const auto tokenizer = RunProgram("verify " + scratch.File("small"));
  EXPECT_EQ(tokenizer.exit_code, 1);
  EXPECT_NE(tokenizer.output.find("4096 pieces"), std::string::npos) << tokenizer.output;
}

}  // namespace
}  // namespace efla
