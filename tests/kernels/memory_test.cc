// Copies between host and device that any thread may make, beside whatever the device does.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/kernels/device_test.h"

namespace efla {
namespace {

class MemoryTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice({.kind = GetParam(), .threads = 1});
    if (!device.ok()) GTEST_SKIP() << device.status().ToString();
    device_ = *std::move(device);
  }
  TestRandom random_;
  std::unique_ptr<Device> device_;
};

TEST_P(MemoryTest, WhatWasWrittenIsRead) {
  constexpr size_t kFloats = 100'003;
  const std::vector<float> values = random_.Normals(kFloats);
  FloatArray array(*device_, kFloats + 2);
  ASSERT_TRUE(device_->Synchronize().ok());
  ASSERT_TRUE(device_->WriteMemory(array.get() + 1, values.data(), kFloats * sizeof(float)).ok());
  std::vector<float> read(kFloats);
  ASSERT_TRUE(device_->ReadMemory(read.data(), array.get() + 1, kFloats * sizeof(float)).ok());
  EXPECT_EQ(read, values);
  EXPECT_EQ(array.Read(1, kFloats), values) << "the operations see it too";
  EXPECT_TRUE(std::isnan(array.Read(0, 1)[0]) && std::isnan(array.Read(kFloats + 1, 1)[0]));
  EXPECT_TRUE(device_->WriteMemory(array.get(), values.data(), 0).ok());
  EXPECT_TRUE(device_->ReadMemory(read.data(), array.get(), 0).ok());
}

TEST_P(MemoryTest, WhatWasWrittenIsReadThroughPageLockedMemory) {
  constexpr size_t kFloats = 3'000'017;  // several pieces of a copy through other memory
  constexpr size_t kBytes = kFloats * sizeof(float);
  auto* const locked = static_cast<float*>(device_->AllocateHost(kBytes));
  if (locked == nullptr) GTEST_SKIP() << GetParam() << " has no host memory of its own";
  const std::vector<float> values = random_.Normals(kFloats);
  FloatArray array(*device_, kFloats + 1);
  ASSERT_TRUE(device_->Synchronize().ok());
  std::copy(values.begin(), values.end(), locked);
  ASSERT_TRUE(device_->WriteMemory(array.get() + 1, locked, kBytes).ok());
  EXPECT_EQ(array.Read(1, kFloats), values);
  std::fill(locked, locked + kFloats, 0.0F);
  ASSERT_TRUE(device_->ReadMemory(locked, array.get() + 1, kBytes).ok());
  EXPECT_TRUE(std::equal(values.begin(), values.end(), locked));
  // From and to its middle.
  std::fill(locked, locked + kFloats, 0.0F);
  ASSERT_TRUE(device_->ReadMemory(locked + 5, array.get() + 6, 1000 * sizeof(float)).ok());
  EXPECT_TRUE(std::equal(locked + 5, locked + 1005, values.begin() + 5));
  EXPECT_EQ(locked[4], 0.0F);
  EXPECT_EQ(locked[1005], 0.0F);
  device_->FreeHost(locked);
}

TEST_P(MemoryTest, OtherThreadsCopyWhileTheDeviceWorks) {
  constexpr size_t kFloats = 65'536;
  constexpr int kThreads = 3, kRounds = 50;
  FloatArray worked(*device_, kFloats), source(*device_, random_.Normals(kFloats));
  std::vector<FloatArray> theirs;
  for (int i = 0; i < kThreads; ++i) theirs.emplace_back(*device_, kFloats);
  ASSERT_TRUE(device_->Synchronize().ok());
  std::atomic<int> wrong = 0;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < kRounds; ++round) {
        const std::vector<float> values(kFloats, static_cast<float>(thread * kRounds + round));
        std::vector<float> read(kFloats);
        float* const memory = theirs[static_cast<size_t>(thread)].get();
        wrong += device_->WriteMemory(memory, values.data(), kFloats * sizeof(float)).ok() ? 0 : 1;
        wrong += device_->ReadMemory(read.data(), memory, kFloats * sizeof(float)).ok() ? 0 : 1;
        wrong += read == values ? 0 : 1;
      }
    });
  }
  std::thread driver([&] {
    while (!done) {
      device_->CopyOnDevice(worked.get(), source.get(), kFloats * sizeof(float));
      wrong += device_->Synchronize().ok() ? 0 : 1;
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  driver.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(worked.Read(0, kFloats), source.Read(0, kFloats));
}

INSTANTIATE_TEST_SUITE_P(Devices, MemoryTest, testing::Values("cpu", "cuda"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace efla
