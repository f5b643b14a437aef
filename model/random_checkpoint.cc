// Checkpoint::Random: weights that behave like a freshly trained model's, each a function of (seed, tensor
// name, index) alone, so that they are the same on every machine and with any number of threads.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/checkpoint.h"
#include "model/files.h"
#include "model/fingerprint.h"

namespace efla {
namespace {

constexpr int64_t kTensorAlignment = 4096;  // a page: Release can drop whole tensors
constexpr int64_t kBlockElements = 1 << 18;
constexpr unsigned kMaxThreads = 16;

constexpr float kEmbeddingStd = 0.02f;
constexpr float kConvStd = 0.5f;

// Finaliser of the SplitMix64 generator.
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15u;

uint64_t NameHash(std::string_view name) {  // FNV-1a
  uint64_t hash = 0xCBF29CE484222325u;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return hash;
}

uint16_t ToBF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Round to nearest even; the magnitudes here are below float16's largest.
uint16_t ToF16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  if (magnitude < kSmallestNormal) {
    // Adding 0.5 leaves the subnormal's bits, rounded, at the end of the fraction.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | ((rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13));
}

// One tensor's distribution.
struct Recipe {
  enum class Kind { kOne, kNormal, kUniform } kind = Kind::kNormal;
  float std_dev = 0;  // kNormal
  float low = 0;      // kUniform: [low, low + 4)
  uint64_t key = 0;
};

bool EndsWith(std::string_view name, std::string_view end) { return name.ends_with(end); }

Recipe RecipeFor(const TensorInfo& tensor, uint64_t seed) {
  Recipe recipe;
  recipe.key = Mix(seed + kGoldenGamma) ^ NameHash(tensor.name);
  if (EndsWith(tensor.name, "norm.weight")) {
    recipe.kind = Recipe::Kind::kOne;
  } else if (EndsWith(tensor.name, "A_log")) {
    recipe.kind = Recipe::Kind::kUniform;
    recipe.low = -3;
  } else if (EndsWith(tensor.name, "dt_bias")) {
    recipe.kind = Recipe::Kind::kUniform;
    recipe.low = -4;
  } else if (EndsWith(tensor.name, "conv1d.weight")) {
    recipe.std_dev = kConvStd;
  } else if (EndsWith(tensor.name, "embeddings.weight")) {
    recipe.std_dev = kEmbeddingStd;
  } else {
    recipe.std_dev = static_cast<float>(1.0 / std::sqrt(static_cast<double>(tensor.shape.back())));
  }
  return recipe;
}

// Writes `make(index)` for [begin, end) to `out` in the tensor's dtype.
template <typename Make>
void Store(DType dtype, int64_t begin, int64_t end, void* out, Make make) {
  switch (dtype) {
    case DType::kF32:
      for (int64_t i = begin; i < end; ++i) static_cast<float*>(out)[i - begin] = make(i);
      break;
    case DType::kF16:
      for (int64_t i = begin; i < end; ++i) static_cast<uint16_t*>(out)[i - begin] = ToF16(make(i));
      break;
    case DType::kBF16:
      for (int64_t i = begin; i < end; ++i) static_cast<uint16_t*>(out)[i - begin] = ToBF16(make(i));
      break;
  }
}

// Elements [begin, end) of a tensor. Every step is exact or a single rounding, so no compiler changes the
// bits.
void Generate(const Recipe& recipe, DType dtype, int64_t begin, int64_t end, void* out) {
  const auto bits = [&](int64_t i) { return Mix(recipe.key + static_cast<uint64_t>(i + 1) * kGoldenGamma); };
  switch (recipe.kind) {
    case Recipe::Kind::kOne:
      Store(dtype, begin, end, out, [](int64_t) { return 1.0f; });
      break;
    case Recipe::Kind::kUniform:
      Store(dtype, begin, end, out, [&](int64_t i) {
        return static_cast<float>(static_cast<int32_t>(bits(i) >> 48)) * 0x1p-14f + recipe.low;
      });
      break;
    case Recipe::Kind::kNormal: {
      // The sum of four uniform 16-bit numbers: close to normal, within 3.5 standard deviations. Its variance
      // is 4 * (2^32 - 1) / 12.
      const float scale = static_cast<float>(recipe.std_dev / std::sqrt((0x1p32 - 1) / 3));
      Store(dtype, begin, end, out, [&](int64_t i) {
        const uint64_t word = bits(i);
        const auto sum = static_cast<int32_t>((word & 0xFFFF) + ((word >> 16) & 0xFFFF) +
                                              ((word >> 32) & 0xFFFF) + (word >> 48));
        return static_cast<float>(sum - 2 * 0xFFFF) * scale;
      });
      break;
    }
  }
}

int64_t Elements(const TensorInfo& tensor) {
  return tensor.bytes() / static_cast<int64_t>(ByteSize(tensor.dtype));
}

class AnonymousMemory {
 public:
  AnonymousMemory() = default;
  ~AnonymousMemory() {
    if (begin_ != nullptr) munmap(begin_, static_cast<size_t>(bytes_));
  }
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;

  bool Allocate(int64_t bytes) {
    void* begin =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED) return false;
    begin_ = static_cast<char*>(begin);
    bytes_ = bytes;
    return true;
  }
  char* begin() const { return begin_; }

 private:
  char* begin_ = nullptr;
  int64_t bytes_ = 0;
};

class RandomCheckpoint final : public Checkpoint {
 public:
  RandomCheckpoint(ModelConfig config, uint64_t seed) : config_(std::move(config)), seed_(seed) {}

  absl::Status Fill(DType dtype) {
    int64_t bytes = 0;
    std::vector<int64_t> offsets;
    for (const ExpectedTensor& expected : ExpectedTensors(config_)) {
      const DType stored = expected.float32_only ? DType::kF32 : dtype;
      tensors_.push_back({expected.name, stored, expected.shape, nullptr});
    }
    std::sort(tensors_.begin(), tensors_.end(),
              [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
    for (const TensorInfo& tensor : tensors_) {
      offsets.push_back(bytes);
      bytes += (tensor.bytes() + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
    }
    if (!memory_.Allocate(bytes)) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("random weights of %d parameters take %d bytes, more than the system gives",
                          config_.parameter_count(), bytes));
    }
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = memory_.begin() + offsets[i];

    struct Block {
      size_t tensor;
      int64_t begin, end;
    };
    std::vector<Block> blocks;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const int64_t elements = Elements(tensors_[i]);
      for (int64_t begin = 0; begin < elements; begin += kBlockElements) {
        blocks.push_back({i, begin, std::min(begin + kBlockElements, elements)});
      }
    }
    std::atomic<size_t> next = 0;
    const auto work = [&] {
      for (size_t at = next++; at < blocks.size(); at = next++) {
        const Block& block = blocks[at];
        const TensorInfo& tensor = tensors_[block.tensor];
        const int64_t offset =
            offsets[block.tensor] + block.begin * static_cast<int64_t>(ByteSize(tensor.dtype));
        Generate(RecipeFor(tensor, seed_), tensor.dtype, block.begin, block.end, memory_.begin() + offset);
      }
    };
    std::vector<std::thread> threads;
    const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
    for (unsigned i = 1; i < std::min<size_t>(count, blocks.size()); ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return absl::OkStatus();
  }

  const ModelConfig& config() const override { return config_; }
  const std::string& directory() const override { return directory_; }
  const GenerationDefaults& defaults() const override { return defaults_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }

  absl::StatusOr<TensorInfo> Find(std::string_view name) const override {
    const auto found = std::lower_bound(
        tensors_.begin(), tensors_.end(), name,
        [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
    if (found != tensors_.end() && found->name == name) return *found;
    return absl::NotFoundError(absl::StrFormat("random checkpoint: there is no tensor %s", name));
  }

  void Release(const TensorInfo& tensor) const override { DropPages(tensor.data, tensor.bytes()); }

  // Makes the weights again, block by block: memory that was released holds them no more.
  std::string Fingerprint() const override {
    Sha256 hash;
    BeginModel(hash, config_);
    std::vector<char> block;
    for (const TensorInfo& tensor : tensors_) {
      BeginTensor(hash, tensor);
      const Recipe recipe = RecipeFor(tensor, seed_);
      const int64_t elements = Elements(tensor);
      for (int64_t begin = 0; begin < elements; begin += kBlockElements) {
        const int64_t end = std::min(begin + kBlockElements, elements);
        block.resize(static_cast<size_t>(end - begin) * ByteSize(tensor.dtype));
        Generate(recipe, tensor.dtype, begin, end, block.data());
        hash.Add({block.data(), block.size()});
      }
    }
    return hash.Hex();
  }

 private:
  const ModelConfig config_;
  const uint64_t seed_;
  const std::string directory_;
  const GenerationDefaults defaults_;
  std::vector<TensorInfo> tensors_;
  AnonymousMemory memory_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Checkpoint>> Checkpoint::Random(const ModelConfig& config, uint64_t seed,
                                                                     DType dtype) {
  if (absl::Status status = config.Validate(); !status.ok()) return status;
  auto checkpoint = std::make_shared<RandomCheckpoint>(config, seed);
  if (absl::Status status = checkpoint->Fill(dtype); !status.ok()) return status;
  return checkpoint;
}

}  // namespace efla
