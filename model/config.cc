#include "model/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/strict_json.h"

namespace efla {
namespace {

using nlohmann::json;

// Generous next to any model of this family, and small enough that no product of them overflows 64 bits.
constexpr int64_t kMaxVocabSize = 1 << 24;
constexpr int64_t kMaxHiddenSize = 1 << 16;
constexpr int64_t kMaxIntermediateSize = 1 << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadWidth = 1024;
constexpr int64_t kMinConvSize = 2;
constexpr int64_t kMaxConvSize = 16;
constexpr double kMinNormEps = 1e-12;
constexpr double kMaxNormEps = 0.1;
constexpr double kMaxExpansion = 1 << 20;
constexpr double kMaxHiddenRatio = 64;
constexpr double kDefaultHiddenRatio = 4;
constexpr int64_t kDefaultConvSize = 4;
// intermediate_size, when it is derived, is rounded up to a multiple of this.
constexpr int64_t kIntermediateMultiple = 256;

struct TypeEntry {
  ModelType type;
  std::string_view name;
};
constexpr TypeEntry kTypes[] = {{ModelType::kEfla, "efla"},
                                {ModelType::kGatedEfla, "gated_efla"},
                                {ModelType::kDeltaNet, "delta_net"},
                                {ModelType::kGatedDeltaNet, "gated_deltanet"}};

struct ActivationEntry {
  QkActivation activation;
  std::string_view name;
};
constexpr ActivationEntry kActivations[] = {{QkActivation::kSilu, "silu"},
                                            {QkActivation::kRelu, "relu"},
                                            {QkActivation::kElu, "elu"},
                                            {QkActivation::kIdentity, "identity"}};

template <typename T>
absl::Status CheckRange(const char* name, T value, T min, T max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", name, " is ", value, "; it must be from ", min, " to ", max));
}

// width * expansion / parts when that is a whole number from 1 to kMaxHeadWidth.
int HeadWidth(JsonFields& fields, const char* key, double expansion, int64_t width, int64_t parts) {
  const double exact = static_cast<double>(width) * expansion / static_cast<double>(parts);
  const double rounded = std::nearbyint(exact);
  if (std::abs(exact - rounded) > 1e-6 * std::max(1.0, exact) || rounded < 1 || rounded > kMaxHeadWidth) {
    fields.Refuse(key,
                  absl::StrFormat("it gives heads %g wide (%d * %g / %d), and a whole number from 1 to %d "
                                  "is needed",
                                  exact, width, expansion, parts, kMaxHeadWidth));
    return 1;
  }
  return static_cast<int>(rounded);
}

int64_t DerivedIntermediateSize(int64_t hidden_size, double hidden_ratio) {
  const auto wanted = static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return (wanted + kIntermediateMultiple - 1) / kIntermediateMultiple * kIntermediateMultiple;
}

// Keys that change the mathematics in a way that is not built.
void RefuseUnbuilt(JsonFields& fields, int num_heads) {
  if (fields.Has("attn")) fields.Refuse("attn", "hybrid softmax attention layers are not supported");
  if (fields.Has("attnres_block_size")) {
    fields.Refuse("attnres_block_size", "attention residuals are not supported");
  }
  if (fields.OptionalInteger("num_v_heads", 1, kMaxHeads).value_or(num_heads) != num_heads) {
    fields.Refuse("num_v_heads",
                  absl::StrFormat("only as many value heads as num_heads (%d) are supported", num_heads));
  }
  if (fields.Has("conv_bias") && fields.Boolean("conv_bias", false)) {
    fields.Refuse("conv_bias", "short convolutions with a bias are not supported");
  }
  const std::string hidden_act = fields.Text("hidden_act", "swish");
  if (hidden_act != "swish" && hidden_act != "silu") {
    fields.Refuse("hidden_act", "only \"swish\" and its other name \"silu\" are supported");
  }
  if (fields.Has("qk_norm") && fields.Text("qk_norm") != "l2") {
    fields.Refuse("qk_norm",
                  "only null and \"l2\" are supported (the query is L2-normalised, the key as "
                  "model_type says)");
  }
}

// The double whose shortest decimal form reads like the float's, so that files say 1e-06.
double Readable(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double shortest = 0;
  std::from_chars(text, end, shortest);
  return static_cast<float>(shortest) == value ? shortest : value;
}

}  // namespace

std::string_view ModelTypeName(ModelType type) {
  for (const TypeEntry& entry : kTypes) {
    if (entry.type == type) return entry.name;
  }
  return "unknown";
}

absl::StatusOr<ModelType> ParseModelType(std::string_view name) {
  for (const TypeEntry& entry : kTypes) {
    if (entry.name == name) return entry.type;
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "model_type is \"%s\"; one of efla, gated_efla, delta_net, gated_deltanet is needed", Printable(name)));
}

int64_t ModelConfig::parameter_count() const {
  const int64_t q = q_channels(), v = v_channels(), heads = num_heads;
  int64_t layer = hidden_size * (2 * q + v)  // q, k, v
                  + v * hidden_size          // o_proj
                  + 2 * hidden_size + d_v    // norms
                  + int64_t{conv_channels()} * conv_size + 3 * hidden_size * intermediate_size;
  if (use_beta) layer += heads * hidden_size;
  if (IsGated(type)) layer += heads * hidden_size + 2 * heads;
  if (use_gate) layer += v * hidden_size;
  const int64_t tables = tie_word_embeddings ? 1 : 2;
  return num_layers * layer + hidden_size + tables * vocab_size * hidden_size;
}

absl::StatusOr<ModelConfig> ModelConfig::Parse(std::string_view text,
                                               std::optional<ModelType> type_override) {
  absl::StatusOr<json> object = ParseJsonObject(text, "config.json");
  if (!object.ok()) return object.status();
  JsonFields fields(*object, "config.json");

  ModelConfig config;
  const std::string type_name =
      fields.Text("model_type", type_override ? std::optional<std::string>("") : std::nullopt);
  if (type_override) {
    config.type = *type_override;
  } else if (fields.status().ok()) {
    absl::StatusOr<ModelType> type = ParseModelType(type_name);
    if (!type.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("config.json: %s", std::string(type.status().message())));
    }
    config.type = *type;
  }
  config.vocab_size = fields.Integer("vocab_size", 1, kMaxVocabSize);
  config.hidden_size = fields.Integer("hidden_size", 1, kMaxHiddenSize);
  config.num_layers = static_cast<int>(fields.Integer("num_hidden_layers", 1, kMaxLayers));
  config.num_heads = static_cast<int>(fields.Integer("num_heads", 1, kMaxHeads));

  const double expand_k = fields.Number("expand_k", 1.0 / kMaxExpansion, kMaxExpansion, 1.0);
  const double expand_v = fields.Number("expand_v", 1.0 / kMaxExpansion, kMaxExpansion, 1.0);
  const std::optional<int64_t> head_dim = fields.OptionalInteger("head_dim", 1, kMaxHeadWidth);
  if (IsGated(config.type)) {
    if (!head_dim) {
      fields.Refuse("head_dim", absl::StrFormat("model type %s needs it: the width of a key head",
                                                ModelTypeName(config.type)));
    }
    config.d_k = static_cast<int>(head_dim.value_or(1));
    config.d_v = HeadWidth(fields, "expand_v", expand_v, config.d_k, 1);
  } else {
    config.d_k = HeadWidth(fields, "expand_k", expand_k, config.hidden_size, config.num_heads);
    config.d_v = HeadWidth(fields, "expand_v", expand_v, config.hidden_size, config.num_heads);
  }

  const double hidden_ratio = fields.OptionalNumber("hidden_ratio", 1.0 / kMaxHiddenRatio, kMaxHiddenRatio)
                                  .value_or(kDefaultHiddenRatio);
  config.intermediate_size = fields.OptionalInteger("intermediate_size", 1, kMaxIntermediateSize)
                                 .value_or(DerivedIntermediateSize(config.hidden_size, hidden_ratio));

  const bool use_short_conv = fields.Boolean("use_short_conv", true);
  const std::optional<int64_t> conv_size = fields.OptionalInteger("conv_size", kMinConvSize, kMaxConvSize);
  config.conv_size = use_short_conv ? static_cast<int>(conv_size.value_or(kDefaultConvSize)) : 0;
  config.use_beta = fields.Boolean("use_beta", true);
  config.use_gate = fields.Boolean("use_gate", false);
  config.allow_neg_eigval = fields.Boolean("allow_neg_eigval", false);
  config.tie_word_embeddings = fields.Boolean("tie_word_embeddings", false);
  config.norm_eps = static_cast<float>(fields.Number("norm_eps", kMinNormEps, kMaxNormEps, 1e-6));

  const std::string activation = fields.Text("qk_activation", "silu");
  const auto known = std::find_if(std::begin(kActivations), std::end(kActivations),
                                  [&](const ActivationEntry& entry) { return entry.name == activation; });
  if (known == std::end(kActivations)) {
    fields.Refuse("qk_activation", "one of \"silu\", \"relu\", \"elu\", \"identity\" is needed");
  } else {
    config.qk_activation = known->activation;
  }
  RefuseUnbuilt(fields, config.num_heads);

  config.bos_token_id = static_cast<TokenId>(fields.Integer("bos_token_id", 0, config.vocab_size - 1, 1));
  config.eos_token_ids = fields.TokenIds("eos_token_id", config.vocab_size, {2});
  const std::optional<int64_t> pad = fields.OptionalInteger("pad_token_id", 0, config.vocab_size - 1);
  if (pad) config.pad_token_id = static_cast<TokenId>(*pad);

  if (!fields.status().ok()) return fields.status();
  if (absl::Status status = config.Validate(); !status.ok()) return status;
  return config;
}

absl::StatusOr<ModelConfig> ModelConfig::Preset(std::string_view name) {
  ModelConfig config;
  if (name == "demo") {
    config.vocab_size = 4096;
    config.hidden_size = 256;
    config.intermediate_size = 768;
    config.num_layers = 10;
    config.num_heads = 2;
    config.tie_word_embeddings = true;
  } else if (name == "340m" || name == "1.3b") {
    const bool large = name == "1.3b";
    config.vocab_size = 32000;
    config.hidden_size = large ? 2048 : 1024;
    config.intermediate_size = DerivedIntermediateSize(config.hidden_size, kDefaultHiddenRatio);
    config.num_layers = 24;
    config.num_heads = large ? 16 : 8;
  } else {
    return absl::InvalidArgumentError(
        absl::StrFormat("preset is \"%s\"; one of demo, 340m, 1.3b is needed", Printable(name)));
  }
  config.d_k = config.d_v = static_cast<int>(config.hidden_size / config.num_heads);
  return config;
}

std::string ModelConfig::ToJson() const {
  json out;
  out["architectures"] = {"EFLAForCausalLM"};
  out["model_type"] = std::string(ModelTypeName(type));
  out["vocab_size"] = vocab_size;
  out["hidden_size"] = hidden_size;
  out["intermediate_size"] = intermediate_size;
  out["num_hidden_layers"] = num_layers;
  out["num_heads"] = num_heads;
  if (IsGated(type)) {
    out["head_dim"] = d_k;
    out["expand_v"] = static_cast<double>(d_v) / d_k;
  } else {
    out["expand_k"] = static_cast<double>(q_channels()) / static_cast<double>(hidden_size);
    out["expand_v"] = static_cast<double>(v_channels()) / static_cast<double>(hidden_size);
  }
  out["use_short_conv"] = conv_size > 0;
  if (conv_size > 0) out["conv_size"] = conv_size;
  out["use_beta"] = use_beta;
  out["use_gate"] = use_gate;
  out["allow_neg_eigval"] = allow_neg_eigval;
  out["tie_word_embeddings"] = tie_word_embeddings;
  for (const ActivationEntry& entry : kActivations) {
    if (entry.activation == qk_activation) out["qk_activation"] = std::string(entry.name);
  }
  out["hidden_act"] = "swish";
  out["norm_eps"] = Readable(norm_eps);
  out["bos_token_id"] = bos_token_id;
  if (eos_token_ids.size() == 1) {
    out["eos_token_id"] = eos_token_ids.front();
  } else {
    out["eos_token_id"] = eos_token_ids;
  }
  out["pad_token_id"] = nullptr;
  if (pad_token_id) out["pad_token_id"] = *pad_token_id;
  return out.dump(2) + "\n";
}

absl::Status ModelConfig::Validate() const {
  const absl::Status checks[] = {
      CheckRange<int64_t>("vocab_size", vocab_size, 1, kMaxVocabSize),
      CheckRange<int64_t>("hidden_size", hidden_size, 1, kMaxHiddenSize),
      CheckRange<int64_t>("intermediate_size", intermediate_size, 1, kMaxIntermediateSize),
      CheckRange<int64_t>("num_layers", num_layers, 1, kMaxLayers),
      CheckRange<int64_t>("num_heads", num_heads, 1, kMaxHeads),
      CheckRange<int64_t>("d_k", d_k, 1, kMaxHeadWidth),
      CheckRange<int64_t>("d_v", d_v, 1, kMaxHeadWidth),
      conv_size == 0 ? absl::OkStatus()
                     : CheckRange<int64_t>("conv_size", conv_size, kMinConvSize, kMaxConvSize),
      CheckRange<double>("norm_eps", Readable(norm_eps), kMinNormEps, kMaxNormEps),
      CheckRange<int64_t>("bos_token_id", bos_token_id, 0, vocab_size - 1),
      CheckRange<int64_t>("pad_token_id", pad_token_id.value_or(0), 0, vocab_size - 1),
  };
  for (const absl::Status& status : checks) {
    if (!status.ok()) return status;
  }
  for (TokenId id : eos_token_ids) {
    if (absl::Status status = CheckRange<int64_t>("eos_token_id", id, 0, vocab_size - 1); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace efla
