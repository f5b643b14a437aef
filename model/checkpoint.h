// A checkpoint directory: config.json, safetensors (one file or shards with an index), and the small files
// beside them. Files are untrusted: every offset, size, name, shape and dtype is checked before use.
#ifndef EFLA_MODEL_CHECKPOINT_H_
#define EFLA_MODEL_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "model/config.h"

namespace efla {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // in the mapping, aligned to its element size
  int64_t bytes() const;
};

struct CheckpointOptions {
  std::optional<ModelType> type_override;
};

// Default values and extra end tokens of generation_config.json; absent fields are not set.
struct GenerationDefaults {
  std::optional<float> temperature, top_p, min_p, typical_p, repetition_penalty;
  std::optional<int> top_k, no_repeat_ngram_size;
  std::optional<int64_t> max_new_tokens;
  std::vector<TokenId> eos_token_ids;
  std::vector<std::string> unsupported;  // "num_beams 4": what it asks for beside these, by name
};

// Immutable once open; safe to read from any thread. Tensors stay valid as long as the Checkpoint lives.
class Checkpoint {
 public:
  // Opens the directory, maps its weight files and checks that exactly the tensors which the config asks for
  // are there with the right shapes (NOT_FOUND for a missing file, INVALID_ARGUMENT or DATA_LOSS otherwise).
  static absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const std::string& directory,
                                                                const CheckpointOptions& options = {});
  // Random weights of a config, made in memory: --load-format=dummy. Same seed, same weights, everywhere.
  static absl::StatusOr<std::shared_ptr<const Checkpoint>> Random(const ModelConfig& config, uint64_t seed,
                                                                  DType dtype);
  virtual ~Checkpoint() = default;

  virtual const ModelConfig& config() const = 0;
  virtual const std::string& directory() const = 0;  // empty for Random
  virtual const GenerationDefaults& defaults() const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;  // sorted by name
  // NOT_FOUND when there is none of that name.
  virtual absl::StatusOr<TensorInfo> Find(std::string_view name) const = 0;
  // Tells the system that the tensor's pages are not needed soon: keeps memory low while weights are copied.
  // A tensor of a Random checkpoint must not be read again after that (it would be zero).
  virtual void Release(const TensorInfo& tensor) const = 0;
  // SHA-256 over the architecture and every tensor's name, shape, dtype and contents, as lower-case hex.
  // Reads all the weights: seconds for large models.
  virtual std::string Fingerprint() const = 0;
};

struct ExpectedTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool float32_only = false;  // A_log and dt_bias
};

// The tensors of a config, in a fixed order.
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config);

}  // namespace efla

#endif  // EFLA_MODEL_CHECKPOINT_H_
