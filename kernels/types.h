// Vocabulary types that every layer shares. Standard library only: device code includes this file.
#ifndef EFLA_KERNELS_TYPES_H_
#define EFLA_KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace efla {

using TokenId = int32_t;

// Element type of stored weights, by its safetensors meaning.
enum class DType : uint8_t { kF32, kF16, kBF16 };

constexpr size_t ByteSize(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// The four variants of the delta rule; they differ only in the scalars of efla_math.h.
enum class ModelType : uint8_t { kEfla, kGatedEfla, kDeltaNet, kGatedDeltaNet };

constexpr bool IsGated(ModelType type) {
  return type == ModelType::kGatedEfla || type == ModelType::kGatedDeltaNet;
}

// DeltaNet variants L2-normalise the key; EFLA variants use it as it is.
constexpr bool NormalizesKey(ModelType type) {
  return type == ModelType::kDeltaNet || type == ModelType::kGatedDeltaNet;
}

// What q and k pass through after the short convolution. v always takes SiLU. kElu means elu(x) + 1.
enum class QkActivation : uint8_t { kSilu, kRelu, kElu, kIdentity };

// Tokens a chunk of the chunkwise form holds. Prompts are cut on multiples of it only, counted from the
// start of the appended text, so that a prompt's arithmetic never depends on how it was scheduled.
inline constexpr int kChunkTokens = 64;

// Most alternatives that a log-probability row can report.
inline constexpr int kMaxTopLogprobs = 20;

// Most tokens whose logits one draw can adjust.
inline constexpr int kMaxAdjustments = 8192;

}  // namespace efla

#endif  // EFLA_KERNELS_TYPES_H_
