#include "kernels/create_device.h"

#include <gtest/gtest.h>

namespace efla {
namespace {

TEST(CreateDeviceTest, CpuTellsItsThreads) {
  const auto device = CreateDevice({.kind = "cpu", .threads = 3});
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->info().kind, "cpu");
  EXPECT_NE((*device)->info().name.find("3 threads"), std::string::npos) << (*device)->info().name;
  EXPECT_GT((*device)->info().memory_total_bytes, 0);
  EXPECT_GT((*device)->free_memory_bytes(), 0);
  EXPECT_EQ((*device)->activation_bytes(), 4u);
}

TEST(CreateDeviceTest, AutoAlwaysFindsOne) {
  const auto device = CreateDevice({.kind = "auto"});
  ASSERT_TRUE(device.ok()) << device.status();
}

TEST(CreateDeviceTest, CudaOpensOrSaysWhyNot) {
  const auto device = CreateDevice({.kind = "cuda"});
  if (device.ok()) {
    EXPECT_EQ((*device)->info().kind, "cuda");
    return;
  }
  EXPECT_TRUE(absl::IsNotFound(device.status()) || absl::IsUnavailable(device.status())) << device.status();
  EXPECT_FALSE(device.status().message().empty());
}

TEST(CreateDeviceTest, RefusesWhatItDoesNotKnow) {
  for (const DeviceOptions& options :
       {DeviceOptions{.kind = "tpu"}, DeviceOptions{.kind = ""}, DeviceOptions{.kind = "cpu", .threads = -1},
        DeviceOptions{.kind = "cpu", .threads = 1 << 20}, DeviceOptions{.kind = "cuda", .ordinal = -1}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CreateDevice(options).status())) << options.kind;
  }
}

TEST(CreateDeviceTest, MemoryThatCannotBeHadIsNull) {
  const auto device = CreateDevice({.kind = "cpu", .threads = 1});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ((*device)->Allocate(size_t{1} << 60), nullptr);
  EXPECT_EQ((*device)->Allocate(~size_t{0}), nullptr);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, size_t{64} << 20}) {
    void* memory = (*device)->Allocate(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    (*device)->FillBytes(memory, 1, bytes);
    (*device)->Free(memory);
  }
}

TEST(ToStatusTest, KeepsKindAndMessage) {
  EXPECT_TRUE(ToStatus({}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ToStatus({DeviceStatus::Code::kOutOfMemory, "m"})));
  EXPECT_TRUE(absl::IsUnavailable(ToStatus({DeviceStatus::Code::kUnavailable, "m"})));
  EXPECT_TRUE(absl::IsInvalidArgument(ToStatus({DeviceStatus::Code::kInvalid, "m"})));
  EXPECT_TRUE(absl::IsInternal(ToStatus({DeviceStatus::Code::kInternal, "m"})));
  EXPECT_EQ(ToStatus({DeviceStatus::Code::kInternal, "m"}).message(), "m");
}

}  // namespace
}  // namespace efla
