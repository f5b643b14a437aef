#include "model/model.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/forwarding_device.h"
#include "tests/model/model_rig.h"

namespace efla {
namespace {

// A tied model with a gate and both coefficients, so that every kind of weight is there.
ModelConfig SmallConfig() {
  ModelConfig config;
  config.type = ModelType::kGatedEfla;
  config.vocab_size = 320;
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.num_layers = 2;
  config.num_heads = 2;
  config.d_k = config.d_v = 64;
  config.use_gate = true;
  config.tie_word_embeddings = true;
  return config;
}

// Another checkpoint with something changed, and a record of what was released.
class ChangedCheckpoint : public Checkpoint {
 public:
  explicit ChangedCheckpoint(std::shared_ptr<const Checkpoint> inner)
      : inner_(std::move(inner)), config_(inner_->config()) {}

  const ModelConfig& config() const override { return config_; }
  const std::string& directory() const override { return inner_->directory(); }
  const GenerationDefaults& defaults() const override { return inner_->defaults(); }
  const std::vector<TensorInfo>& tensors() const override { return inner_->tensors(); }
  absl::StatusOr<TensorInfo> Find(std::string_view name) const override {
    const auto found = replaced_.find(std::string(name));
    return found == replaced_.end() ? inner_->Find(name) : found->second;
  }
  void Release(const TensorInfo& tensor) const override { released_.insert(tensor.name); }
  std::string Fingerprint() const override { return inner_->Fingerprint(); }

  ModelConfig& mutable_config() { return config_; }
  void Replace(const std::string& name, absl::StatusOr<TensorInfo> tensor) {
    replaced_[name] = std::move(tensor);
  }
  const std::set<std::string>& released() const { return released_; }

 private:
  std::shared_ptr<const Checkpoint> inner_;
  ModelConfig config_;
  std::map<std::string, absl::StatusOr<TensorInfo>> replaced_;
  mutable std::set<std::string> released_;
};

// A CPU device that has memory for so many allocations and matrices, and counts what is still held.
class ScarceDevice : public ForwardingDevice {
 public:
  ScarceDevice(int allocations, int matrices)
      : ForwardingDevice(CreateDevice({.kind = "cpu", .threads = 1}).value()),
        allocations_left_(allocations),
        matrices_left_(matrices) {}

  int held() const { return held_; }

  int64_t free_memory_bytes() const override { return 12345; }
  void* Allocate(size_t bytes) override {
    if (allocations_left_-- <= 0) return nullptr;
    ++held_;
    return ForwardingDevice::Allocate(bytes);
  }
  void Free(void* memory) override {
    --held_;
    ForwardingDevice::Free(memory);
  }
  std::unique_ptr<Matrix> LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                     DeviceStatus& status) override {
    if (matrices_left_-- <= 0) {
      status = {DeviceStatus::Code::kOutOfMemory, "scarce"};
      return nullptr;
    }
    return ForwardingDevice::LoadMatrix(parts, use, status);
  }

 private:
  int allocations_left_, matrices_left_;
  int held_ = 0;
};

constexpr int kUnlimited = 1'000'000;
constexpr ModelLimits kLimits = {.max_tokens = 96, .max_decode = 8, .max_samples = 96};

std::shared_ptr<ChangedCheckpoint> SmallCheckpoint(DType dtype = DType::kBF16) {
  return std::make_shared<ChangedCheckpoint>(Checkpoint::Random(SmallConfig(), 5, dtype).value());
}

bool Contains(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

TEST(ModelTest, StackedTensorsMustShareOneDType) {
  for (const auto& [first, other] : std::vector<std::pair<std::string, std::string>>{
           {"model.layers.0.attn.q_proj.weight", "model.layers.0.attn.v_proj.weight"},
           {"model.layers.1.attn.q_proj.weight", "model.layers.1.attn.g_proj.weight"},
           {"model.layers.0.attn.b_proj.weight", "model.layers.0.attn.a_proj.weight"},
           {"model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"}}) {
    const auto checkpoint = SmallCheckpoint();
    TensorInfo changed = checkpoint->Find(other).value();
    changed.dtype = DType::kF16;  // of the same size
    checkpoint->Replace(other, changed);
    ScarceDevice device(kUnlimited, kUnlimited);
    const absl::Status status = Model::Load(checkpoint, device, kLimits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, first) && Contains(status, other)) << status;
    EXPECT_TRUE(Contains(status, "F16") && Contains(status, "BF16")) << status;
    EXPECT_EQ(device.held(), 0);
  }
}

TEST(ModelTest, TensorsThatAreNotStackedMayDiffer) {
  const auto checkpoint = SmallCheckpoint();
  for (const char* name : {"model.layers.0.attn.o_proj.weight", "model.layers.1.attn_norm.weight"}) {
    TensorInfo changed = checkpoint->Find(name).value();
    changed.dtype = DType::kF16;
    checkpoint->Replace(name, changed);
  }
  ScarceDevice device(kUnlimited, kUnlimited);
  EXPECT_TRUE(Model::Load(checkpoint, device, kLimits).ok());
}

TEST(ModelTest, AMissingTensorIsNamed) {
  const auto checkpoint = SmallCheckpoint();
  checkpoint->Replace("model.layers.1.attn.dt_bias", absl::NotFoundError("no model.layers.1.attn.dt_bias"));
  ScarceDevice device(kUnlimited, kUnlimited);
  const absl::Status status = Model::Load(checkpoint, device, kLimits).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Contains(status, "model.layers.1.attn.dt_bias")) << status;
}

TEST(ModelTest, AWeightThatIsNoNumberIsRefusedByNameAndPlace) {
  for (const char* name :
       {"model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embeddings.weight"}) {
    const auto checkpoint = SmallCheckpoint();
    TensorInfo tensor = checkpoint->Find(name).value();
    std::vector<std::byte> data(static_cast<size_t>(tensor.bytes()));
    std::memcpy(data.data(), tensor.data, data.size());
    const size_t place = data.size() / ByteSize(tensor.dtype) - 3;
    std::memset(data.data() + place * ByteSize(tensor.dtype), 0xff,
                ByteSize(tensor.dtype));  // a NaN of any type
    tensor.data = data.data();
    checkpoint->Replace(name, tensor);
    ScarceDevice device(kUnlimited, kUnlimited);
    const absl::Status status = Model::Load(checkpoint, device, kLimits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(Contains(status, name) && Contains(status, "element " + std::to_string(place))) << status;
    EXPECT_EQ(device.held(), 0);
  }
}

TEST(ModelTest, ADeviceWithoutRoomIsToldByNameAndBytes) {
  for (const auto& [allocations, matrices, name] :
       std::vector<std::tuple<int, int, std::string>>{{kUnlimited, 0, "model.embeddings.weight"},
                                                      {kUnlimited, 1, "model.layers.0.attn.q_proj.weight"},
                                                      {kUnlimited, 9, "model.layers.1.mlp.gate_proj.weight"},
                                                      {0, kUnlimited, "norms"},
                                                      {1, kUnlimited, "activations of 96 tokens"}}) {
    ScarceDevice device(allocations, matrices);
    const absl::Status status = Model::Load(SmallCheckpoint(), device, kLimits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(Contains(status, name)) << status;
    EXPECT_TRUE(Contains(status, "bytes wanted") && Contains(status, "12345 free")) << status;
    EXPECT_EQ(device.held(), 0) << "nothing may be left behind";
  }
}

TEST(ModelTest, DeviceMemoryGoesBackWithTheModel) {
  ScarceDevice device(kUnlimited, kUnlimited);
  {
    auto model = Model::Load(SmallCheckpoint(), device, kLimits);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_GT(device.held(), 0);
  }
  EXPECT_EQ(device.held(), 0);
}

TEST(ModelTest, PagesAreReleasedButTheEmbeddings) {
  const auto checkpoint = SmallCheckpoint();
  ScarceDevice device(kUnlimited, kUnlimited);
  ASSERT_TRUE(Model::Load(checkpoint, device, kLimits).ok());
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    EXPECT_EQ(checkpoint->released().count(tensor.name), tensor.name == "model.embeddings.weight" ? 0u : 1u)
        << tensor.name;
  }
}

TEST(ModelTest, WeightBytesCountTheTiedHeadTwice) {
  const auto checkpoint = SmallCheckpoint();
  ScarceDevice device(kUnlimited, kUnlimited);
  const auto model = Model::Load(checkpoint, device, kLimits).value();
  int64_t stored = 0;
  for (const TensorInfo& tensor : checkpoint->tensors()) stored += tensor.bytes();
  const int64_t head = checkpoint->Find("model.embeddings.weight").value().bytes();
  EXPECT_GE(model->weight_bytes(), stored + head);
  // Vectors become float32 and are padded to 256 bytes each; 11 a layer and the last norm.
  EXPECT_LE(model->weight_bytes(), stored + head + 23 * 256 + 64 * 1024);
}

TEST(ModelTest, LimitsAreChecked) {
  const auto refused = [](ModelLimits limits, const std::string& field) {
    ScarceDevice device(kUnlimited, kUnlimited);
    const absl::Status status = Model::Load(SmallCheckpoint(), device, limits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, field)) << status;
  };
  refused({.max_tokens = 0, .max_decode = 1, .max_samples = 1}, "max_tokens is 0");
  refused({.max_tokens = 8, .max_decode = 0, .max_samples = 1}, "max_decode is 0");
  refused({.max_tokens = 8, .max_decode = 9, .max_samples = 1}, "max_decode is 9");
  refused({.max_tokens = 8, .max_decode = 8, .max_samples = 0}, "max_samples is 0");
}

class ModelOnDeviceTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (absl::Status status = DeviceAvailable(GetParam()); !status.ok()) GTEST_SKIP() << status.ToString();
  }
  std::unique_ptr<ModelRig> Open(std::shared_ptr<const Checkpoint> checkpoint) {
    return ModelRig::Open(std::move(checkpoint), {.device = GetParam(), .limits = kLimits}).value();
  }
  std::vector<float> Logits(ModelRig& rig, const std::vector<TokenId>& tokens) {
    const SlotHandle slot = rig.Acquire();
    Step step;
    step.Prefill(tokens, StatePool::kZeroSlot, slot.slot);
    step.Greedy(static_cast<int>(tokens.size()) - 1);
    rig.Run(step);
    std::vector<float> logits(static_cast<size_t>(rig.model().config().vocab_size));
    EXPECT_TRUE(rig.device().ReadLogits(logits).ok());
    rig.states().Release(slot);
    return logits;
  }
};

TEST_P(ModelOnDeviceTest, ATiedHeadIsTheEmbeddingTable) {
  const auto tied = SmallCheckpoint(), untied = SmallCheckpoint();
  untied->mutable_config().tie_word_embeddings = false;
  TensorInfo head = untied->Find("model.embeddings.weight").value();
  head.name = "lm_head.weight";
  untied->Replace("lm_head.weight", head);
  const std::vector<TokenId> tokens = {1, 17, 300, 4, 4, 99};
  const std::vector<float> a = Logits(*Open(tied), tokens), b = Logits(*Open(untied), tokens);
  EXPECT_TRUE(SameBits(a, b));
  EXPECT_NE(a, std::vector<float>(a.size(), a[0])) << "logits that say something";
}

TEST_P(ModelOnDeviceTest, AStepMayBeAsLargeAsTheLimits) {
  auto rig = Open(SmallCheckpoint());
  std::mt19937 random(3);
  Step step;
  std::vector<SlotHandle> slots;
  for (int i = 0; i < 8; ++i) slots.push_back(rig->Acquire());
  for (int i = 0; i < 7; ++i) step.Decode(i + 1, StatePool::kZeroSlot, slots[static_cast<size_t>(i)].slot);
  const std::vector<TokenId> prompt(static_cast<size_t>(kLimits.max_tokens) - 7, 5);
  step.Prefill(prompt, StatePool::kZeroSlot, slots[7].slot);
  for (int row = 0; row < kLimits.max_samples; ++row) step.Greedy(row);
  const StepResult result = rig->Run(step);
  ASSERT_EQ(result.rows.size(), static_cast<size_t>(kLimits.max_samples));
  for (const SampleResult& row : result.rows) EXPECT_EQ(row.finite, 1);
}

TEST_P(ModelOnDeviceTest, AStepWithoutSamplesOnlyMovesTheState) {
  auto rig = Open(SmallCheckpoint());
  const SlotHandle slot = rig->Acquire();
  Step step;
  const std::vector<TokenId> prompt = {1, 2, 3};
  step.Prefill(prompt, StatePool::kZeroSlot, slot.slot);
  const StepResult result = rig->Run(step);
  EXPECT_TRUE(result.rows.empty());
  const std::vector<float> state = rig->ReadState(slot);
  for (float value : state) ASSERT_TRUE(std::isfinite(value));
  EXPECT_NE(state, std::vector<float>(state.size(), 0.0f));
}

TEST_P(ModelOnDeviceTest, PaddingRowsWriteTheSink) {
  auto rig = Open(SmallCheckpoint());
  const SlotHandle slot = rig->Acquire();
  Step alone;
  alone.Greedy(alone.Decode(9, StatePool::kZeroSlot, slot.slot));
  const SampleResult expected = rig->Run(alone).rows[0];
  const std::vector<float> state = rig->ReadState(slot);
  Step padded;
  padded.Greedy(padded.Decode(9, StatePool::kZeroSlot, slot.slot));
  padded.Decode(1, StatePool::kZeroSlot, StatePool::kSinkSlot);
  const SampleResult row = rig->Run(padded).rows[0];
  EXPECT_EQ(row.token, expected.token);
  EXPECT_EQ(std::bit_cast<uint32_t>(row.logprob), std::bit_cast<uint32_t>(expected.logprob));
  EXPECT_TRUE(SameBits(rig->ReadState(slot), state));
  EXPECT_TRUE(rig->states().CheckInvariants(true).ok());
}

INSTANTIATE_TEST_SUITE_P(Devices, ModelOnDeviceTest, ::testing::Values("cpu", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace efla
