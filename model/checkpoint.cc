#include "model/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/files.h"
#include "model/fingerprint.h"
#include "model/safetensors.h"
#include "model/sampling.h"
#include "model/strict_json.h"

namespace efla {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxShards = 1024;
constexpr char kEmbeddings[] = "model.embeddings.weight";
constexpr char kHead[] = "lm_head.weight";

bool NameBefore(const TensorInfo& tensor, std::string_view name) { return tensor.name < name; }

struct WeightFiles {
  std::vector<std::unique_ptr<const SafetensorsFile>> files;
  std::vector<TensorInfo> tensors;
};

// Which shard holds each tensor, as model.safetensors.index.json says.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<nlohmann::json> index = ParseJsonObject(*text, path);
  if (!index.ok()) return index.status();
  const auto map = index->find("weight_map");
  if (map == index->end() || !map->is_object() || map->empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: weight_map is not an object with entries", path));
  }
  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : map->items()) {
    const std::string name = shard.is_string() ? shard.get<std::string>() : "";
    const bool plain = !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
                       name.find('\0') == std::string::npos;
    if (!plain) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: weight_map gives %s for %s; a file name without a folder is needed", path,
                          Printable(shard.dump(), 80), Printable(tensor)));
    }
    shards.insert(name);
    shard_of[tensor] = name;
  }
  if (shards.size() > kMaxShards) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %d shards; at most %d are allowed", path, shards.size(), kMaxShards));
  }
  return shard_of;
}

absl::StatusOr<WeightFiles> OpenShards(const std::string& directory, const std::string& index_path) {
  absl::StatusOr<std::map<std::string, std::string>> shard_of = ReadIndex(index_path);
  if (!shard_of.ok()) return shard_of.status();
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : *shard_of) shards.insert(shard);

  WeightFiles weights;
  for (const std::string& shard : shards) {
    const std::string path = directory + "/" + shard;
    absl::StatusOr<std::unique_ptr<const SafetensorsFile>> file = SafetensorsFile::Open(path);
    if (!file.ok()) return file.status();
    for (const TensorInfo& tensor : (*file)->tensors()) {
      const auto entry = shard_of->find(tensor.name);
      if (entry == shard_of->end() || entry->second != shard) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "%s: holds tensor %s, which %s places %s", path, Printable(tensor.name), index_path,
            entry == shard_of->end() ? std::string("nowhere") : "in " + Printable(entry->second)));
      }
      weights.tensors.push_back(tensor);
    }
    weights.files.push_back(*std::move(file));
  }
  std::set<std::string> found;
  for (const TensorInfo& tensor : weights.tensors) found.insert(tensor.name);
  for (const auto& [tensor, shard] : *shard_of) {
    if (!found.contains(tensor)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is to be in %s, which does not hold it", index_path,
                          Printable(tensor), Printable(shard)));
    }
  }
  return weights;
}

absl::StatusOr<WeightFiles> OpenWeights(const std::string& directory) {
  const std::string single = directory + "/model.safetensors";
  const std::string index = directory + "/model.safetensors.index.json";
  if (!FileExists(single) && FileExists(index)) return OpenShards(directory, index);
  if (!FileExists(single)) {
    return absl::NotFoundError(absl::StrFormat(
        "%s: neither model.safetensors nor model.safetensors.index.json is there", directory));
  }
  absl::StatusOr<std::unique_ptr<const SafetensorsFile>> file = SafetensorsFile::Open(single);
  if (!file.ok()) return file.status();
  WeightFiles weights;
  weights.tensors = (*file)->tensors();
  weights.files.push_back(*std::move(file));
  return weights;
}

// A head beside tied embeddings is harmless when it is the same matrix: then it is left out.
absl::Status DropTiedHead(const std::string& directory, std::vector<TensorInfo>& tensors) {
  const auto head = std::lower_bound(tensors.begin(), tensors.end(), kHead, NameBefore);
  if (head == tensors.end() || head->name != kHead) return absl::OkStatus();
  const auto table = std::lower_bound(tensors.begin(), tensors.end(), kEmbeddings, NameBefore);
  const bool same = table != tensors.end() && table->name == kEmbeddings && table->dtype == head->dtype &&
                    table->shape == head->shape &&
                    std::memcmp(table->data, head->data, static_cast<size_t>(head->bytes())) == 0;
  if (!same) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tie_word_embeddings is true, but there is a %s that differs from %s", directory,
                        kHead, kEmbeddings));
  }
  tensors.erase(head);
  return absl::OkStatus();
}

// Exactly the expected tensors, each with its shape. `tensors` is sorted by name.
absl::Status CheckTensors(const std::string& directory, const ModelConfig& config,
                          const std::vector<TensorInfo>& tensors) {
  std::set<std::string> expected_names;
  for (const ExpectedTensor& expected : ExpectedTensors(config)) {
    expected_names.insert(expected.name);
    const auto found = std::lower_bound(tensors.begin(), tensors.end(), expected.name, NameBefore);
    if (found == tensors.end() || found->name != expected.name) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is missing (config.json asks for shape %s)", directory,
                          expected.name, ShapeText(expected.shape)));
    }
    if (found->shape != expected.shape) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: tensor %s has shape %s; config.json asks for %s",
                                                        directory, expected.name, ShapeText(found->shape),
                                                        ShapeText(expected.shape)));
    }
    if (expected.float32_only && found->dtype != DType::kF32) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: tensor %s is %s; it must be F32", directory,
                                                        expected.name, SafetensorsName(found->dtype)));
    }
  }
  for (const TensorInfo& tensor : tensors) {
    if (!expected_names.contains(tensor.name)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s %s is not part of a %s model of this "
          "config.json",
          directory, Printable(tensor.name), ShapeText(tensor.shape), ModelTypeName(config.type)));
    }
  }
  return absl::OkStatus();
}

// Keys of generation_config.json that shape the output and are not read here, and the value with which each
// changes nothing, beside null.
const std::map<std::string, nlohmann::json>& UnsupportedKeys() {
  static const auto* const keys =
      new std::map<std::string, nlohmann::json>{{"bad_words_ids", nlohmann::json::array()},
                                                {"begin_suppress_tokens", nlohmann::json::array()},
                                                {"constraints", nlohmann::json::array()},
                                                {"diversity_penalty", 0},
                                                {"dola_layers", nullptr},
                                                {"encoder_no_repeat_ngram_size", 0},
                                                {"encoder_repetition_penalty", 1},
                                                {"epsilon_cutoff", 0},
                                                {"eta_cutoff", 0},
                                                {"exponential_decay_length_penalty", nullptr},
                                                {"force_words_ids", nlohmann::json::array()},
                                                {"forced_bos_token_id", nullptr},
                                                {"forced_eos_token_id", nullptr},
                                                {"guidance_scale", 1},
                                                {"max_length", 20},
                                                {"max_time", nullptr},
                                                {"min_length", 0},
                                                {"min_new_tokens", 0},
                                                {"num_beam_groups", 1},
                                                {"num_beams", 1},
                                                {"num_return_sequences", 1},
                                                {"penalty_alpha", 0},
                                                {"renormalize_logits", false},
                                                {"sequence_bias", nullptr},
                                                {"stop_strings", nlohmann::json::array()},
                                                {"suppress_tokens", nlohmann::json::array()},
                                                {"top_h", nullptr},
                                                {"watermarking_config", nullptr}};
  return *keys;
}

std::vector<std::string> UnsupportedIn(const nlohmann::json& config) {
  std::vector<std::string> unsupported;
  for (const auto& [key, neutral] : UnsupportedKeys()) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null() || *found == neutral) continue;
    unsupported.push_back(absl::StrFormat("%s %s", key, Printable(found->dump(), 40)));
  }
  return unsupported;
}

absl::StatusOr<GenerationDefaults> ReadGenerationConfig(const std::string& path, int64_t vocab_size) {
  GenerationDefaults defaults;
  absl::StatusOr<std::string> text = ReadFile(path, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return defaults;
  if (!text.ok()) return text.status();
  absl::StatusOr<nlohmann::json> object = ParseJsonObject(*text, path);
  if (!object.ok()) return object.status();
  JsonFields fields(*object, path);
  const auto as_float = [](std::optional<double> value) {
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  constexpr double kAnyNumber = 1e30;  // SamplingParams knows the bounds
  defaults.temperature = as_float(fields.OptionalNumber("temperature", -kAnyNumber, kAnyNumber));
  defaults.top_p = as_float(fields.OptionalNumber("top_p", -kAnyNumber, kAnyNumber));
  defaults.min_p = as_float(fields.OptionalNumber("min_p", -kAnyNumber, kAnyNumber));
  defaults.typical_p = as_float(fields.OptionalNumber("typical_p", -kAnyNumber, kAnyNumber));
  defaults.repetition_penalty =
      as_float(fields.OptionalNumber("repetition_penalty", -kAnyNumber, kAnyNumber));
  if (const auto top_k = fields.OptionalInteger("top_k", 0, INT32_MAX)) {
    defaults.top_k = static_cast<int>(*top_k);
  }
  if (const auto ngram = fields.OptionalInteger("no_repeat_ngram_size", 0, kMaxNoRepeatNgram)) {
    defaults.no_repeat_ngram_size = static_cast<int>(*ngram);
  }
  defaults.max_new_tokens = fields.OptionalInteger("max_new_tokens", 1, UINT32_MAX);
  if (fields.Has("do_sample") && !fields.Boolean("do_sample", true)) defaults.temperature = 0.0f;
  defaults.eos_token_ids = fields.TokenIds("eos_token_id", vocab_size, {});
  defaults.unsupported = UnsupportedIn(*object);
  if (!fields.status().ok()) return fields.status();

  SamplingParams params;
  params.temperature = defaults.temperature.value_or(params.temperature);
  params.top_k = defaults.top_k.value_or(params.top_k);
  params.top_p = defaults.top_p.value_or(params.top_p);
  params.min_p = defaults.min_p.value_or(params.min_p);
  params.typical_p = defaults.typical_p.value_or(params.typical_p);
  params.repetition_penalty = defaults.repetition_penalty.value_or(params.repetition_penalty);
  if (absl::Status status = params.Validate(vocab_size); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path, std::string(status.message())));
  }
  return defaults;
}

class DirectoryCheckpoint final : public Checkpoint {
 public:
  DirectoryCheckpoint(std::string directory, ModelConfig config, GenerationDefaults defaults,
                      WeightFiles weights)
      : directory_(std::move(directory)),
        config_(std::move(config)),
        defaults_(std::move(defaults)),
        weights_(std::move(weights)) {}

  const ModelConfig& config() const override { return config_; }
  const std::string& directory() const override { return directory_; }
  const GenerationDefaults& defaults() const override { return defaults_; }
  const std::vector<TensorInfo>& tensors() const override { return weights_.tensors; }

  absl::StatusOr<TensorInfo> Find(std::string_view name) const override {
    const auto found = std::lower_bound(weights_.tensors.begin(), weights_.tensors.end(), name, NameBefore);
    if (found != weights_.tensors.end() && found->name == name) return *found;
    return absl::NotFoundError(absl::StrFormat("%s: there is no tensor %s", directory_, Printable(name)));
  }

  void Release(const TensorInfo& tensor) const override { DropPages(tensor.data, tensor.bytes()); }

  std::string Fingerprint() const override {
    std::call_once(fingerprint_once_, [this] {
      Sha256 hash;
      BeginModel(hash, config_);
      for (const TensorInfo& tensor : weights_.tensors) {
        BeginTensor(hash, tensor);
        hash.Add({static_cast<const char*>(tensor.data), static_cast<size_t>(tensor.bytes())});
      }
      fingerprint_ = hash.Hex();
    });
    return fingerprint_;
  }

 private:
  const std::string directory_;
  const ModelConfig config_;
  const GenerationDefaults defaults_;
  const WeightFiles weights_;
  mutable std::once_flag fingerprint_once_;
  mutable std::string fingerprint_;
};

}  // namespace

int64_t TensorInfo::bytes() const {
  int64_t bytes = static_cast<int64_t>(ByteSize(dtype));
  for (int64_t size : shape) bytes *= size;
  return bytes;
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size, heads = config.num_heads;
  const int64_t q = config.q_channels(), v = config.v_channels();
  std::vector<ExpectedTensor> tensors;
  const auto add = [&](std::string name, std::vector<int64_t> shape, bool float32_only = false) {
    tensors.push_back({std::move(name), std::move(shape), float32_only});
  };
  add(kEmbeddings, {config.vocab_size, hidden});
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::string block = absl::StrFormat("model.layers.%d.", layer);
    const std::string attn = block + "attn.";
    add(block + "attn_norm.weight", {hidden});
    add(attn + "q_proj.weight", {q, hidden});
    add(attn + "k_proj.weight", {q, hidden});
    add(attn + "v_proj.weight", {v, hidden});
    if (config.use_beta) add(attn + "b_proj.weight", {heads, hidden});
    if (IsGated(config.type)) {
      add(attn + "a_proj.weight", {heads, hidden});
      add(attn + "A_log", {heads}, /*float32_only=*/true);
      add(attn + "dt_bias", {heads}, /*float32_only=*/true);
    }
    if (config.conv_size > 0) {
      add(attn + "q_conv1d.weight", {q, 1, config.conv_size});
      add(attn + "k_conv1d.weight", {q, 1, config.conv_size});
      add(attn + "v_conv1d.weight", {v, 1, config.conv_size});
    }
    if (config.use_gate) add(attn + "g_proj.weight", {v, hidden});
    add(attn + "o_norm.weight", {config.d_v});
    add(attn + "o_proj.weight", {hidden, v});
    add(block + "mlp_norm.weight", {hidden});
    add(block + "mlp.gate_proj.weight", {config.intermediate_size, hidden});
    add(block + "mlp.up_proj.weight", {config.intermediate_size, hidden});
    add(block + "mlp.down_proj.weight", {hidden, config.intermediate_size});
  }
  add("model.norm.weight", {hidden});
  if (!config.tie_word_embeddings) add(kHead, {config.vocab_size, hidden});
  return tensors;
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> Checkpoint::Open(const std::string& directory,
                                                                   const CheckpointOptions& options) {
  absl::StatusOr<std::string> text = ReadFile(directory + "/config.json", kMaxConfigBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<ModelConfig> config = ModelConfig::Parse(*text, options.type_override);
  if (!config.ok()) {
    return absl::Status(config.status().code(),
                        absl::StrFormat("%s/%s", directory, std::string(config.status().message())));
  }
  absl::StatusOr<GenerationDefaults> defaults =
      ReadGenerationConfig(directory + "/generation_config.json", config->vocab_size);
  if (!defaults.ok()) return defaults.status();
  for (TokenId id : defaults->eos_token_ids) {
    std::vector<TokenId>& ids = config->eos_token_ids;
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }

  absl::StatusOr<WeightFiles> weights = OpenWeights(directory);
  if (!weights.ok()) return weights.status();
  std::sort(weights->tensors.begin(), weights->tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  if (config->tie_word_embeddings) {
    if (absl::Status status = DropTiedHead(directory, weights->tensors); !status.ok()) return status;
  }
  if (absl::Status status = CheckTensors(directory, *config, weights->tensors); !status.ok()) return status;
  return std::make_shared<DirectoryCheckpoint>(directory, *std::move(config), *std::move(defaults),
                                               *std::move(weights));
}

}  // namespace efla
