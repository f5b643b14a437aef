// Runs tokens through a model in tests: a device, a model and a state pool, with steps composed by hand.
#ifndef EFLA_TESTS_MODEL_MODEL_RIG_H_
#define EFLA_TESTS_MODEL_MODEL_RIG_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/check.h"
#include "kernels/create_device.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "tests/source_path.h"

namespace efla {

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  EFLA_CHECK(file.good());
  return nlohmann::json::parse(file);
}

// Equal as bits: NaN equals itself, and 0 differs from -0.
template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// One step under construction. Decode rows must be added before prefill runs.
class Step {
 public:
  // Both return the token row of the (first) token.
  int Decode(TokenId token, int32_t read_slot, int32_t write_slot) {
    EFLA_CHECK(segments_.empty());
    tokens_.push_back(token);
    read_slots_.push_back(read_slot);
    write_slots_.push_back(write_slot);
    return num_tokens() - 1;
  }
  // `follows`: the segment, counted from 0, that writes read_slot in this step.
  int Prefill(std::span<const TokenId> tokens, int32_t read_slot, int32_t write_slot, int32_t follows = -1) {
    const int begin = num_tokens();
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    segments_.push_back({begin, static_cast<int32_t>(tokens.size()), read_slot, write_slot, follows});
    return begin;
  }
  void Sample(SampleRow row) { samples_.push_back(row); }
  // With a list and a mask of its own.
  void Sample(SampleRow row, std::span<const LogitAdjustment> list, std::span<const uint32_t> mask) {
    row.adjust_begin = static_cast<int32_t>(adjustments_.size());
    row.num_adjust = static_cast<int32_t>(list.size());
    adjustments_.insert(adjustments_.end(), list.begin(), list.end());
    if (!mask.empty()) row.mask = static_cast<int32_t>(masks_.size() / mask.size());
    masks_.insert(masks_.end(), mask.begin(), mask.end());
    samples_.push_back(row);
  }
  void Score(int token_row, TokenId target) { Sample({.token_row = token_row, .target = target}); }
  void Greedy(int token_row, int num_top = 0) {
    Sample({.token_row = token_row, .temperature = 0.0f, .num_top = num_top});
  }
  int num_tokens() const { return static_cast<int>(tokens_.size()); }
  int num_samples() const { return static_cast<int>(samples_.size()); }
  StepInput input() const {
    return {.tokens = tokens_,
            .num_decode = static_cast<int>(read_slots_.size()),
            .decode_read_slot = read_slots_,
            .decode_write_slot = write_slots_,
            .segments = segments_,
            .samples = samples_,
            .adjustments = adjustments_,
            .masks = masks_};
  }

 private:
  std::vector<TokenId> tokens_;
  std::vector<int32_t> read_slots_, write_slots_;
  std::vector<Segment> segments_;
  std::vector<SampleRow> samples_;
  std::vector<LogitAdjustment> adjustments_;
  std::vector<uint32_t> masks_;
};

struct StepResult {
  std::vector<SampleResult> rows;
  std::vector<TokenLogprob> top;
};

struct RigOptions {
  std::string device = "cpu";
  ModelLimits limits = {.max_tokens = 1024, .max_decode = 64, .max_samples = 1024};
  int num_slots = 8;
  bool poison = true;
};

class ModelRig {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRig>> Open(std::shared_ptr<const Checkpoint> checkpoint,
                                                        const RigOptions& options) {
    auto rig = std::unique_ptr<ModelRig>(new ModelRig);
    absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice({.kind = options.device});
    if (!device.ok()) return device.status();
    rig->device_ = *std::move(device);
    absl::StatusOr<std::unique_ptr<Model>> model =
        Model::Load(std::move(checkpoint), *rig->device_, options.limits);
    if (!model.ok()) return model.status();
    rig->model_ = *std::move(model);
    absl::StatusOr<std::unique_ptr<StatePool>> states =
        StatePool::Create(*rig->device_, rig->model_->config(), options.num_slots, options.poison);
    if (!states.ok()) return states.status();
    rig->states_ = *std::move(states);
    return rig;
  }
  static absl::StatusOr<std::unique_ptr<ModelRig>> Open(const std::string& directory,
                                                        const RigOptions& options) {
    absl::StatusOr<std::shared_ptr<const Checkpoint>> checkpoint = Checkpoint::Open(directory);
    if (!checkpoint.ok()) return checkpoint.status();
    return Open(*std::move(checkpoint), options);
  }

  Device& device() { return *device_; }
  Model& model() { return *model_; }
  StatePool& states() { return *states_; }
  SlotHandle Acquire() { return states_->Acquire().value(); }

  StepResult Run(const Step& step) {
    model_->Submit(step.input(), *states_);
    const StepOutput output = model_->Wait().value();
    return {{output.rows.begin(), output.rows.end()}, {output.top.begin(), output.top.end()}};
  }
  std::vector<float> ReadState(SlotHandle slot) {
    std::vector<float> state(static_cast<size_t>(states_->layout().state_bytes()) / sizeof(float));
    EFLA_CHECK(states_->CopyOut(slot, std::as_writable_bytes(std::span(state))).ok());
    return state;
  }
  void WriteState(SlotHandle slot, const std::vector<float>& state) {
    EFLA_CHECK(static_cast<int64_t>(state.size() * sizeof(float)) == states_->layout().state_bytes());
    EFLA_CHECK(states_->CopyIn(slot, std::as_bytes(std::span(state))).ok());
  }

 private:
  ModelRig() = default;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<StatePool> states_;
};

// Whether tests on this device can run here; otherwise why not. Opens and closes the device.
inline absl::Status DeviceAvailable(const std::string& kind) { return CreateDevice({.kind = kind}).status(); }

}  // namespace efla

#endif  // EFLA_TESTS_MODEL_MODEL_RIG_H_
