#include "model/model.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/buffer.h"
#include "kernels/check.h"
#include "kernels/create_device.h"
#include "model/weights.h"

namespace efla {
namespace {

constexpr size_t kAlignBytes = 256;

size_t Aligned(size_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

// What one step's operations hand to each other, for max_tokens tokens. "act": see op_args.h.
struct Activations {
  Buffer memory;
  float* x = nullptr;         // [tokens, hidden], the residual stream
  void* projected = nullptr;  // act [tokens, q|k|v|gate]
  float* coef = nullptr;      // [tokens, b|a]; null when the model has neither
  void* mixed = nullptr;      // act [tokens, heads * d_v]
  void* mlp = nullptr;        // act [tokens, intermediate]

  static absl::StatusOr<Activations> Allocate(Device& device, const ModelConfig& config, int max_tokens) {
    const MixLayer mix = MixShapes(config);
    const size_t tokens = static_cast<size_t>(max_tokens), act = device.activation_bytes();
    const size_t x = Aligned(tokens * static_cast<size_t>(config.hidden_size) * sizeof(float));
    const size_t projected = Aligned(tokens * static_cast<size_t>(mix.proj_columns()) * act);
    const size_t coef = Aligned(tokens * static_cast<size_t>(mix.coef_columns()) * sizeof(float));
    const size_t mixed = Aligned(tokens * static_cast<size_t>(mix.v_channels()) * act);
    const size_t mlp = Aligned(tokens * static_cast<size_t>(config.intermediate_size) * act);
    const size_t bytes = x + projected + coef + mixed + mlp;

    Activations a;
    a.memory = Buffer::Allocate(device, bytes);
    if (!a.memory) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("activations of %d tokens a step: out of device memory: %d bytes wanted, %d free",
                          max_tokens, bytes, device.free_memory_bytes()));
    }
    auto* next = static_cast<std::byte*>(a.memory.get());
    const auto take = [&next](size_t part) { return std::exchange(next, next + part); };
    a.x = reinterpret_cast<float*>(take(x));
    a.projected = take(projected);
    a.coef = coef > 0 ? reinterpret_cast<float*>(take(coef)) : nullptr;
    a.mixed = take(mixed);
    a.mlp = take(mlp);
    return a;
  }
};

absl::Status CheckLimits(const ModelLimits& limits) {
  if (limits.max_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_tokens is %d; it must be at least 1", limits.max_tokens));
  }
  if (limits.max_decode < 1 || limits.max_decode > limits.max_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_decode is %d; it must be between 1 and max_tokens, %d", limits.max_decode, limits.max_tokens));
  }
  if (limits.max_samples < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_samples is %d; it must be at least 1", limits.max_samples));
  }
  return absl::OkStatus();
}

Device::Limits DeviceLimits(const ModelConfig& config, const ModelLimits& limits) {
  Device::Limits device_limits;
  device_limits.max_tokens = limits.max_tokens;
  device_limits.max_decode = limits.max_decode;
  device_limits.max_samples = limits.max_samples;
  device_limits.hidden_size = config.hidden_size;
  device_limits.intermediate_size = config.intermediate_size;
  device_limits.vocab_size = config.vocab_size;
  device_limits.mix = MixShapes(config);
  return device_limits;
}

}  // namespace

struct Model::Impl {
  std::shared_ptr<const Checkpoint> checkpoint;  // first: the embedding table may lie in its mapping
  Device& device;
  ModelLimits limits;
  Weights weights;
  Activations activations;
};

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Load(std::shared_ptr<const Checkpoint> checkpoint,
                                                   Device& device, const ModelLimits& limits) {
  if (absl::Status status = CheckLimits(limits); !status.ok()) return status;
  absl::StatusOr<Weights> weights = LoadWeights(*checkpoint, device);
  if (!weights.ok()) return weights.status();
  const ModelConfig& config = checkpoint->config();
  absl::StatusOr<Activations> activations = Activations::Allocate(device, config, limits.max_tokens);
  if (!activations.ok()) return activations.status();
  if (DeviceStatus status = device.Prepare(DeviceLimits(config, limits)); !status.ok())
    return ToStatus(status);
  return std::unique_ptr<Model>(new Model(std::unique_ptr<Impl>(
      new Impl{std::move(checkpoint), device, limits, *std::move(weights), *std::move(activations)})));
}

void Model::Submit(const StepInput& input, const StatePool& states) {
  const Weights& weights = impl_->weights;
  const Activations& act = impl_->activations;
  const ModelConfig& config = this->config();
  Device& device = impl_->device;
  const int num_tokens = static_cast<int>(input.tokens.size());
  EFLA_CHECK(num_tokens >= 1 && num_tokens <= impl_->limits.max_tokens);
  EFLA_CHECK(input.num_decode >= 0 && input.num_decode <= impl_->limits.max_decode);
  EFLA_CHECK(input.samples.size() <= static_cast<size_t>(impl_->limits.max_samples));
  EFLA_CHECK(states.layout().num_layers == config.num_layers);

  if (device.BeginStep(input)) {
    device.Embed({.table = weights.embeddings.get(), .x = act.x});
    for (int i = 0; i < config.num_layers; ++i) {
      const LayerWeights& layer = weights.layers[static_cast<size_t>(i)];
      const MixArgs mix = {.layer = &layer.mix,
                           .proj = act.projected,
                           .coef = act.coef,
                           .state = states.View(i),
                           .out = act.mixed};
      device.Project({.num_tokens = num_tokens,
                      .x = act.x,
                      .norm = layer.attn_norm,
                      .norm_eps = config.norm_eps,
                      .weight = layer.projection.get(),
                      .out = act.projected,
                      .coef_weight = layer.coefficients.get(),
                      .coef_out = act.coef});
      device.MixRecurrent(mix);
      device.MixChunk(mix);
      device.AddLinear({.num_tokens = num_tokens, .in = act.mixed, .weight = layer.o_proj.get(), .x = act.x});
      device.GatedMlp({.num_tokens = num_tokens,
                       .x = act.x,
                       .norm = layer.mlp_norm,
                       .norm_eps = config.norm_eps,
                       .gate_up = layer.gate_up.get(),
                       .out = act.mlp});
      device.AddLinear(
          {.num_tokens = num_tokens, .in = act.mlp, .weight = layer.down_proj.get(), .x = act.x});
    }
    device.Head(
        {.x = act.x, .norm = weights.norm, .norm_eps = config.norm_eps, .head = weights.lm_head.get()});
  }
  device.EndStep();
}

absl::StatusOr<StepOutput> Model::Wait() {
  if (DeviceStatus status = impl_->device.Synchronize(); !status.ok()) return ToStatus(status);
  return impl_->device.output();
}

const ModelConfig& Model::config() const { return impl_->checkpoint->config(); }
const ModelLimits& Model::limits() const { return impl_->limits; }
int64_t Model::weight_bytes() const { return impl_->weights.bytes; }
Device& Model::device() const { return impl_->device; }

}  // namespace efla
