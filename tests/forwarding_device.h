// A device that passes everything on to another: tests override what they want to bend.
#ifndef EFLA_TESTS_FORWARDING_DEVICE_H_
#define EFLA_TESTS_FORWARDING_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "kernels/device.h"

namespace efla {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}

  const DeviceInfo& info() const override { return inner_->info(); }
  size_t activation_bytes() const override { return inner_->activation_bytes(); }
  int64_t free_memory_bytes() const override { return inner_->free_memory_bytes(); }
  void* Allocate(size_t bytes) override { return inner_->Allocate(bytes); }
  void Free(void* memory) override { inner_->Free(memory); }
  void CopyToDevice(void* to, const void* from, size_t bytes) override {
    inner_->CopyToDevice(to, from, bytes);
  }
  void CopyToHost(void* to, const void* from, size_t bytes) override { inner_->CopyToHost(to, from, bytes); }
  void CopyOnDevice(void* to, const void* from, size_t bytes) override {
    inner_->CopyOnDevice(to, from, bytes);
  }
  void FillBytes(void* memory, uint8_t value, size_t bytes) override {
    inner_->FillBytes(memory, value, bytes);
  }
  DeviceStatus ReadMemory(void* to, const void* from, size_t bytes) override {
    return inner_->ReadMemory(to, from, bytes);
  }
  DeviceStatus WriteMemory(void* to, const void* from, size_t bytes) override {
    return inner_->WriteMemory(to, from, bytes);
  }
  void* AllocateHost(size_t bytes) override { return inner_->AllocateHost(bytes); }
  void FreeHost(void* memory) override { inner_->FreeHost(memory); }
  void WriteActivations(void* act, std::span<const float> values) override {
    inner_->WriteActivations(act, values);
  }
  void ReadActivations(std::span<float> values, const void* act) override {
    inner_->ReadActivations(values, act);
  }
  std::unique_ptr<Matrix> LoadMatrix(std::span<const HostMatrix> parts, MatrixUse use,
                                     DeviceStatus& status) override {
    return inner_->LoadMatrix(parts, use, status);
  }
  DeviceStatus Prepare(const Limits& limits) override { return inner_->Prepare(limits); }
  DeviceStatus Synchronize() override { return inner_->Synchronize(); }
  StepOutput output() const override { return inner_->output(); }
  DeviceStatus ReadLogits(std::span<float> logits) override { return inner_->ReadLogits(logits); }

 protected:
  Device& inner() { return *inner_; }

  bool DoBeginStep(const StepInput& input) override { return inner_->BeginStep(input); }
  void DoEmbed(const EmbedArgs& args) override { inner_->Embed(args); }
  void DoProject(const ProjectArgs& args) override { inner_->Project(args); }
  void DoMixRecurrent(const MixArgs& args) override { inner_->MixRecurrent(args); }
  void DoMixChunk(const MixArgs& args) override { inner_->MixChunk(args); }
  void DoAddLinear(const AddLinearArgs& args) override { inner_->AddLinear(args); }
  void DoGatedMlp(const GatedMlpArgs& args) override { inner_->GatedMlp(args); }
  void DoHead(const HeadArgs& args) override { inner_->Head(args); }
  void DoEndStep() override { inner_->EndStep(); }

 private:
  const std::unique_ptr<Device> inner_;
};

}  // namespace efla

#endif  // EFLA_TESTS_FORWARDING_DEVICE_H_
