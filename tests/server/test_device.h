// The CPU device with handles for tests: steps that wait to be let through, a synchronisation that fails, a
// sequence whose state is spoilt, and a record of what the steps held. Everything else is the CPU device's
// own.
#ifndef EFLA_TESTS_SERVER_TEST_DEVICE_H_
#define EFLA_TESTS_SERVER_TEST_DEVICE_H_

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/create_device.h"
#include "kernels/device.h"
#include "tests/forwarding_device.h"

namespace efla {

class TestDevice final : public ForwardingDevice {
 public:
  TestDevice() : ForwardingDevice(CreateDevice({.kind = "cpu", .threads = 1}).value()) {}

  // --- Handles, any thread ---

  // From now on every step waits before it begins until it is let through.
  void Hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
    allowed_ = 0;
  }
  // Waits until a step is at the gate.
  void AwaitStep() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return at_gate_; });
  }
  // Lets one step through, and waits until the next one, if `and_await_next`, is at the gate.
  void LetStep(bool and_await_next = true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return at_gate_; });
    const int passed = passed_;
    ++allowed_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return passed_ > passed; });
    if (and_await_next) changed_.wait(lock, [this] { return at_gate_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }

  // The synchronisation of the step after `steps` more ones fails.
  void FailAfter(int steps) {
    const std::lock_guard lock(mutex_);
    steps_to_failure_ = steps;
  }
  // The sequence whose prompt begins with `first` gets NaN into its recurrent state of layer 0 before its
  // `decode_step`th decode step (from 0), or before its prompt's second piece when that is -1.
  void SpoilSequence(TokenId first, int decode_step) {
    const std::lock_guard lock(mutex_);
    victim_token_ = first;
    victim_decode_step_ = decode_step;
  }

  struct StepShape {
    int num_decode = 0;
    std::vector<Segment> segments;
    int num_samples = 0;
  };
  std::vector<StepShape> steps() const {
    const std::lock_guard lock(mutex_);
    return steps_;
  }

  // --- Device ---

  DeviceStatus Synchronize() override {
    DeviceStatus status = inner().Synchronize();
    const std::lock_guard lock(mutex_);
    if (std::exchange(in_step_, false) && steps_to_failure_ && (*steps_to_failure_)-- == 0) {
      return {DeviceStatus::Code::kInternal, "a fault made by the test"};
    }
    return status;
  }

 private:
  bool DoBeginStep(const StepInput& input) override {
    {
      std::unique_lock lock(mutex_);
      at_gate_ = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !held_ || allowed_ > 0; });
      if (held_) --allowed_;
      at_gate_ = false;
      ++passed_;
      changed_.notify_all();
      in_step_ = true;
      steps_.push_back({input.num_decode,
                        {input.segments.begin(), input.segments.end()},
                        static_cast<int>(input.samples.size())});
      spoilt_slot_ = FindVictim(input);
    }
    return inner().BeginStep(input);
  }
  // The slot to spoil in this step, or -1.
  int32_t FindVictim(const StepInput& input) {
    if (!victim_token_) return -1;
    for (const Segment& segment : input.segments) {
      if (segment.read_slot == 0 && input.tokens[segment.token_begin] == *victim_token_) {
        victim_slot_ = segment.write_slot;
        victim_steps_ = 0;
      } else if (segment.write_slot == victim_slot_ && victim_decode_step_ < 0) {
        return std::exchange(victim_slot_, -1);
      }
    }
    for (const int32_t slot : input.decode_write_slot) {
      if (slot == victim_slot_ && victim_steps_++ == victim_decode_step_)
        return std::exchange(victim_slot_, -1);
    }
    return -1;
  }
  void DoMixRecurrent(const MixArgs& args) override {
    Spoil(args);
    inner().MixRecurrent(args);
  }
  void DoMixChunk(const MixArgs& args) override {
    Spoil(args);
    inner().MixChunk(args);
  }
  void Spoil(const MixArgs& args) {
    if (spoilt_slot_ < 0) return;
    const MixLayer& layer = *args.layer;
    float* state = args.state.pool + spoilt_slot_ * args.state.slot_stride + args.state.recurrent_offset;
    inner().FillBytes(state, 0xff, sizeof(float) * layer.num_heads * layer.d_k * layer.d_v);  // a NaN's bytes
    spoilt_slot_ = -1;
  }

  mutable std::mutex mutex_;  // guards what follows, down to steps_
  std::condition_variable changed_;
  bool held_ = false, at_gate_ = false, in_step_ = false;
  int allowed_ = 0, passed_ = 0;
  std::optional<int> steps_to_failure_;
  std::optional<TokenId> victim_token_;
  int victim_decode_step_ = 0;
  std::vector<StepShape> steps_;

  // The driving thread's.
  int32_t victim_slot_ = -1, spoilt_slot_ = -1;
  int victim_steps_ = 0;
};

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_TEST_DEVICE_H_
