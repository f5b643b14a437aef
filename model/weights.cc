#include "model/weights.h"

#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "kernels/create_device.h"
#include "model/safetensors.h"

namespace efla {
namespace {

constexpr size_t kVectorAlignFloats = 64;  // 256 bytes, as Device::Allocate aligns

float FromBF16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float FromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide_exponent = exponent == 31 ? 255 : exponent + 112;  // biases 15 and 127
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (fraction << 13));
}

int64_t NumElements(const TensorInfo& tensor) {
  return tensor.bytes() / static_cast<int64_t>(ByteSize(tensor.dtype));
}

// Collects vectors as float32 on the host, then gives all of them one allocation on the device.
class VectorArena {
 public:
  // `*field` will point at the copy once Upload has succeeded.
  void Add(const TensorInfo& tensor, const float** field) {
    const size_t offset = host_.size();
    const size_t count = static_cast<size_t>(NumElements(tensor));
    host_.resize((offset + count + kVectorAlignFloats - 1) / kVectorAlignFloats * kVectorAlignFloats);
    float* to = host_.data() + offset;
    if (tensor.dtype == DType::kF32) {
      std::memcpy(to, tensor.data, count * sizeof(float));
    } else {
      const auto* from = static_cast<const uint16_t*>(tensor.data);
      for (size_t i = 0; i < count; ++i) {
        to[i] = tensor.dtype == DType::kBF16 ? FromBF16(from[i]) : FromF16(from[i]);
      }
    }
    places_.push_back({field, offset});
  }

  absl::StatusOr<Buffer> Upload(Device& device) const {
    const size_t bytes = host_.size() * sizeof(float);
    Buffer buffer = Buffer::Allocate(device, bytes);
    if (!buffer) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("norms and convolutions: out of device memory: %d bytes wanted, %d free", bytes,
                          device.free_memory_bytes()));
    }
    device.CopyToDevice(buffer.get(), host_.data(), bytes);
    if (DeviceStatus status = device.Synchronize(); !status.ok()) return ToStatus(status);
    for (const Place& place : places_) *place.field = static_cast<const float*>(buffer.get()) + place.offset;
    return buffer;
  }

 private:
  struct Place {
    const float** field;
    size_t offset;  // floats
  };
  std::vector<float> host_;
  std::vector<Place> places_;
};

class Loader {
 public:
  Loader(const Checkpoint& checkpoint, Device& device) : checkpoint_(checkpoint), device_(device) {}

  absl::StatusOr<Weights> Load() {
    const ModelConfig& config = checkpoint_.config();
    weights_.embeddings = Stack({"model.embeddings.weight"}, MatrixUse::kEmbedding);
    weights_.layers.resize(static_cast<size_t>(config.num_layers));
    for (int layer = 0; layer < config.num_layers; ++layer) {
      LoadLayer(absl::StrFormat("model.layers.%d.", layer), config,
                weights_.layers[static_cast<size_t>(layer)]);
    }
    Vector("model.norm.weight", &weights_.norm);
    const char* head = config.tie_word_embeddings ? "model.embeddings.weight" : "lm_head.weight";
    weights_.lm_head = Stack({head}, MatrixUse::kLinear);
    if (!status_.ok()) return status_;

    absl::StatusOr<Buffer> vectors = vectors_.Upload(device_);
    if (!vectors.ok()) return vectors.status();
    weights_.vectors = *std::move(vectors);
    weights_.bytes += static_cast<int64_t>(weights_.vectors.bytes());
    return std::move(weights_);
  }

 private:
  void LoadLayer(const std::string& prefix, const ModelConfig& config, LayerWeights& layer) {
    const std::string attn = prefix + "attn.", mlp = prefix + "mlp.";
    const MixLayer shapes = MixShapes(config);
    layer.mix = shapes;

    Vector(prefix + "attn_norm.weight", &layer.attn_norm);
    std::vector<std::string> projection = {attn + "q_proj.weight", attn + "k_proj.weight",
                                           attn + "v_proj.weight"};
    if (config.use_gate) projection.push_back(attn + "g_proj.weight");
    layer.projection = Stack(projection, MatrixUse::kLinear);

    std::vector<std::string> coefficients;
    if (config.use_beta) coefficients.push_back(attn + "b_proj.weight");
    if (IsGated(config.type)) coefficients.push_back(attn + "a_proj.weight");
    if (!coefficients.empty()) layer.coefficients = Stack(coefficients, MatrixUse::kLinear);

    if (config.conv_size > 0) {
      Vector(attn + "q_conv1d.weight", &layer.mix.q_conv);
      Vector(attn + "k_conv1d.weight", &layer.mix.k_conv);
      Vector(attn + "v_conv1d.weight", &layer.mix.v_conv);
    }
    if (IsGated(config.type)) {
      Vector(attn + "A_log", &layer.mix.a_log);
      Vector(attn + "dt_bias", &layer.mix.dt_bias);
    }
    Vector(attn + "o_norm.weight", &layer.mix.o_norm);
    layer.o_proj = Stack({attn + "o_proj.weight"}, MatrixUse::kLinear);

    Vector(prefix + "mlp_norm.weight", &layer.mlp_norm);
    layer.gate_up = Stack({mlp + "gate_proj.weight", mlp + "up_proj.weight"}, MatrixUse::kGateUp);
    layer.down_proj = Stack({mlp + "down_proj.weight"}, MatrixUse::kLinear);
  }

  // The tensors stacked by rows into one matrix; null, with status_ set, on the first error, and from then
  // on.
  std::unique_ptr<Matrix> Stack(const std::vector<std::string>& names, MatrixUse use) {
    std::vector<TensorInfo> tensors;
    std::vector<HostMatrix> parts;
    int64_t bytes = 0;
    for (const std::string& name : names) {
      std::optional<TensorInfo> tensor = Find(name);
      if (!tensor.has_value()) return nullptr;
      EFLA_CHECK(tensor->shape.size() == 2);
      if (!parts.empty() && tensor->dtype != parts.front().dtype) {
        status_ = absl::InvalidArgumentError(absl::StrFormat(
            "%s is %s but %s is %s; the two are stacked and must have one dtype", name,
            SafetensorsName(tensor->dtype), names.front(), SafetensorsName(parts.front().dtype)));
        return nullptr;
      }
      parts.push_back({tensor->data, tensor->dtype, tensor->shape[0], tensor->shape[1]});
      bytes += tensor->bytes();
      tensors.push_back(*std::move(tensor));
    }

    DeviceStatus loaded;
    std::unique_ptr<Matrix> matrix = device_.LoadMatrix(parts, use, loaded);
    if (loaded.code == DeviceStatus::Code::kOutOfMemory) {
      status_ = absl::ResourceExhaustedError(
          absl::StrFormat("%s: out of device memory: %d bytes wanted, %d free; the weights before it took %d",
                          names.front(), bytes, device_.free_memory_bytes(), weights_.bytes));
      return nullptr;
    }
    if (!loaded.ok()) {
      const absl::Status status = ToStatus(loaded);
      status_ = absl::Status(status.code(), absl::StrFormat("%s: %s", names.front(), loaded.message));
      return nullptr;
    }
    EFLA_CHECK(matrix != nullptr);
    weights_.bytes += bytes;
    if (names.front() != "model.embeddings.weight") {  // whose pages the device may keep reading
      for (const TensorInfo& tensor : tensors) checkpoint_.Release(tensor);
    }
    return matrix;
  }

  void Vector(const std::string& name, const float** field) {
    std::optional<TensorInfo> tensor = Find(name);
    if (!tensor.has_value()) return;
    vectors_.Add(*tensor, field);
    checkpoint_.Release(*tensor);
  }

  std::optional<TensorInfo> Find(const std::string& name) {
    if (!status_.ok()) return std::nullopt;
    absl::StatusOr<TensorInfo> tensor = checkpoint_.Find(name);
    if (!tensor.ok()) {
      status_ = tensor.status();
      return std::nullopt;
    }
    // A number that is none would spread to every reply.
    if (status_ = CheckFinite(*tensor); !status_.ok()) return std::nullopt;
    return *std::move(tensor);
  }

  const Checkpoint& checkpoint_;
  Device& device_;
  absl::Status status_;  // the first error; nothing is loaded after it
  VectorArena vectors_;
  Weights weights_;
};

}  // namespace

MixLayer MixShapes(const ModelConfig& config) {
  MixLayer mix;
  mix.type = config.type;
  mix.qk_activation = config.qk_activation;
  mix.num_heads = config.num_heads;
  mix.d_k = config.d_k;
  mix.d_v = config.d_v;
  mix.conv_size = config.conv_size;
  mix.use_beta = config.use_beta;
  mix.allow_neg_eigval = config.allow_neg_eigval;
  mix.use_gate = config.use_gate;
  mix.norm_eps = config.norm_eps;
  return mix;
}

absl::StatusOr<Weights> LoadWeights(const Checkpoint& checkpoint, Device& device) {
  return Loader(checkpoint, device).Load();
}

}  // namespace efla
