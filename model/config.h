// What a checkpoint's config.json says, typed and validated.
#ifndef EFLA_MODEL_CONFIG_H_
#define EFLA_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace efla {

// "efla", "gated_efla", "delta_net", "gated_deltanet".
std::string_view ModelTypeName(ModelType type);
absl::StatusOr<ModelType> ParseModelType(std::string_view name);

struct ModelConfig {
  ModelType type = ModelType::kEfla;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int d_k = 0;        // key and query width of a head
  int d_v = 0;        // value width of a head
  int conv_size = 4;  // taps of the short convolutions; 0 when the model has none
  bool use_beta = true;
  bool use_gate = false;
  bool allow_neg_eigval = false;
  bool tie_word_embeddings = false;
  QkActivation qk_activation = QkActivation::kSilu;
  float norm_eps = 1e-6f;
  TokenId bos_token_id = 1;
  std::vector<TokenId> eos_token_ids = {2};
  std::optional<TokenId> pad_token_id;

  int q_channels() const { return num_heads * d_k; }
  int v_channels() const { return num_heads * d_v; }
  int conv_channels() const { return 2 * q_channels() + v_channels(); }
  int64_t parameter_count() const;

  // Parses and validates config.json's text. Unknown keys that do not change the mathematics are ignored; a
  // key that does and is not built is refused by its name (INVALID_ARGUMENT). `type_override` replaces
  // model_type: checkpoints of EFLA models trained by patching DeltaNet may still say "delta_net".
  static absl::StatusOr<ModelConfig> Parse(std::string_view json,
                                           std::optional<ModelType> type_override = std::nullopt);
  // "demo", "340m", "1.3b": the published shapes.
  static absl::StatusOr<ModelConfig> Preset(std::string_view name);
  // config.json text that Parse reads back to an equal config.
  std::string ToJson() const;
  // Every dimension in range and consistent.
  absl::Status Validate() const;

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONFIG_H_
