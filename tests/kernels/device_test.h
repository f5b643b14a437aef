// What the tests of device operations share: a device per test, fresh random inputs, arrays on the device.
#ifndef EFLA_TESTS_KERNELS_DEVICE_TEST_H_
#define EFLA_TESTS_KERNELS_DEVICE_TEST_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hwy/highway.h"
#include "kernels/create_device.h"
#include "kernels/device.h"
#include "tests/kernels/reference.h"

namespace efla {

// Fresh random numbers; the seed is in the test's output, and EFLA_TEST_SEED repeats it.
class TestRandom {
 public:
  TestRandom() {
    const char* given = std::getenv("EFLA_TEST_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    engine_.seed(seed_);
  }
  uint64_t seed() const { return seed_; }
  std::mt19937_64& engine() { return engine_; }
  int Integer(int least, int greatest) {
    return std::uniform_int_distribution<int>(least, greatest)(engine_);
  }
  double Uniform(double least, double greatest) {
    return std::uniform_real_distribution<double>(least, greatest)(engine_);
  }
  float Normal(double scale = 1) {
    return static_cast<float>(scale * std::normal_distribution<double>()(engine_));
  }
  std::vector<float> Normals(size_t count, double scale = 1) {
    std::vector<float> values(count);
    for (float& value : values) value = Normal(scale);
    return values;
  }

 private:
  uint64_t seed_;
  std::mt19937_64 engine_;
};

inline reference::Vector ToDouble(std::span<const float> values) {
  return reference::Vector(values.begin(), values.end());
}

// A weight as a checkpoint holds it, and its exact values.
struct TestWeight {
  std::vector<uint8_t> bytes;
  reference::Vector values;
  HostMatrix host;
};

// Elements of random sign, mantissa and exponent, of about 1 / sqrt(cols) in size; some are zero.
inline TestWeight RandomWeight(TestRandom& random, int64_t rows, int64_t cols, DType dtype) {
  TestWeight weight;
  const int base = -static_cast<int>(std::lround(std::log2(static_cast<double>(cols)) / 2));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int mantissa_bits = dtype == DType::kF32 ? 23 : dtype == DType::kF16 ? 10 : 7;
    const int bias = dtype == DType::kF16 ? 15 : 127;
    const uint32_t mantissa = static_cast<uint32_t>(random.engine()()) & ((1u << mantissa_bits) - 1);
    const int exponent = base + random.Integer(-2, 0);
    const bool negative = random.Integer(0, 1) == 1, zero = random.Integer(0, 50) == 0;
    const int size = static_cast<int>(ByteSize(dtype));
    uint32_t bits = zero ? 0 : static_cast<uint32_t>(exponent + bias) << mantissa_bits | mantissa;
    if (negative) bits |= 1u << (size * 8 - 1);
    for (int byte = 0; byte < size; ++byte) weight.bytes.push_back(static_cast<uint8_t>(bits >> (8 * byte)));
    const double magnitude = zero ? 0 : std::ldexp(1 + std::ldexp(mantissa, -mantissa_bits), exponent);
    weight.values.push_back(negative ? -magnitude : magnitude);
  }
  weight.host = {weight.bytes.data(), dtype, rows, cols};
  return weight;
}

inline TestWeight Bf16Weight(std::span<const float> values, int64_t rows, int64_t cols) {
  TestWeight weight;
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= 0xFFFF0000u;
    float kept;
    std::memcpy(&kept, &bits, sizeof kept);
    weight.bytes.push_back(static_cast<uint8_t>(bits >> 16));
    weight.bytes.push_back(static_cast<uint8_t>(bits >> 24));
    weight.values.push_back(static_cast<double>(kept));
  }
  weight.host = {weight.bytes.data(), DType::kBF16, rows, cols};
  return weight;
}

// float32 on the device.
class FloatArray {
 public:
  FloatArray(Device& device, size_t count)
      : device_(device), count_(count), memory_(static_cast<float*>(device.Allocate(count * sizeof(float)))) {
    EXPECT_NE(memory_, nullptr);
    Poison();
  }
  FloatArray(Device& device, std::span<const float> values) : FloatArray(device, values.size()) {
    Write(values);
  }
  FloatArray(FloatArray&& other) noexcept
      : device_(other.device_), count_(other.count_), memory_(std::exchange(other.memory_, nullptr)) {}
  ~FloatArray() { device_.Free(memory_); }
  float* get() const { return memory_; }
  void Poison() { device_.FillBytes(memory_, 0xFF, count_ * sizeof(float)); }  // all NaN
  void Write(std::span<const float> values, size_t at = 0) {
    device_.CopyToDevice(memory_ + at, values.data(), values.size_bytes());
    EXPECT_TRUE(device_.Synchronize().ok());
  }
  std::vector<float> Read(size_t at, size_t count) const {
    std::vector<float> values(count);
    device_.CopyToHost(values.data(), memory_ + at, count * sizeof(float));
    EXPECT_TRUE(device_.Synchronize().ok());
    return values;
  }

 private:
  Device& device_;
  size_t count_;
  float* memory_;
};

// Activations on the device.
class ActArray {
 public:
  ActArray(Device& device, size_t count)
      : device_(device), count_(count), memory_(device.Allocate(count * device.activation_bytes())) {
    EXPECT_NE(memory_, nullptr);
    Poison();
  }
  ActArray(const ActArray&) = delete;
  ~ActArray() { device_.Free(memory_); }
  void* get() const { return memory_; }
  void Poison() { device_.FillBytes(memory_, 0xFF, count_ * device_.activation_bytes()); }
  void Write(std::span<const float> values) {
    device_.WriteActivations(memory_, values);
    EXPECT_TRUE(device_.Synchronize().ok());
  }
  std::vector<float> Read(size_t count) const {
    std::vector<float> values(count);
    device_.ReadActivations(values, memory_);
    EXPECT_TRUE(device_.Synchronize().ok());
    return values;
  }

 private:
  Device& device_;
  size_t count_;
  void* memory_;
};

// A step whose tokens are all decode rows with slots of their own, for operations that look at no slot.
class DecodeRows {
 public:
  explicit DecodeRows(int count) : tokens_(count, 0), slots_(count) {
    for (int i = 0; i < count; ++i) slots_[i] = i + 1;
    input = {.tokens = tokens_,
             .num_decode = count,
             .decode_read_slot = slots_,
             .decode_write_slot = slots_,
             .segments = {},
             .samples = {}};
  }
  StepInput input;

 private:
  std::vector<TokenId> tokens_;
  std::vector<int32_t> slots_;
};

// Kinds are those of CreateDevice, and "cpu_" with an instruction set narrower than this machine's best.
inline std::unique_ptr<Device> TryCreateDevice(std::string kind, std::string& reason) {
  int64_t targets = 0;  // all that the machine has
  if (kind == "cpu_avx2") targets = HWY_AVX2;
  if (kind == "cpu_ssse3") targets = HWY_SSSE3;
  if (targets != 0) kind = "cpu";
  hwy::SetSupportedTargetsForTest(0);
  if ((hwy::SupportedTargets() & targets) != targets) {
    reason = "this machine has no such instructions";
    return nullptr;
  }
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice({.kind = kind, .threads = 2});
  if (device.ok()) return *std::move(device);
  reason = std::string(device.status().message());
  return nullptr;
}

// Runs one step: the operations are skipped when the device replays a recording, as the engine does.
template <typename Operations>
void RunStep(Device& device, const StepInput& input, const Operations& operations) {
  if (device.BeginStep(input)) operations();
  device.EndStep();
  const DeviceStatus status = device.Synchronize();
  ASSERT_TRUE(status.ok()) << status.message;
}

// The worst |value - expected| / (|expected| + rms of all expected); NaN counts as infinite.
inline double WorstError(std::span<const float> values, std::span<const double> expected) {
  double squares = 1e-30, worst = 0;
  for (const double value : expected) squares += value * value;
  const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error =
        std::abs(static_cast<double>(values[i]) - expected[i]) / (std::abs(expected[i]) + rms);
    worst = std::max(worst, std::isfinite(error) ? error : std::numeric_limits<double>::infinity());
  }
  return worst;
}

// Bit equality, NaN included.
inline bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Creates the device, or skips the test with the reason.
#define EFLA_CREATE_DEVICE_OR_SKIP(device, kind)                                 \
  std::string device##_reason;                                                   \
  const std::unique_ptr<Device> device = TryCreateDevice(kind, device##_reason); \
  if (device == nullptr) GTEST_SKIP() << kind << ": " << device##_reason

// A shape that a device does not take is skipped there, never on the CPU.
#define EFLA_PREPARE_OR_SKIP(device, limits)                                             \
  do {                                                                                   \
    const DeviceStatus prepared = (device)->Prepare(limits);                             \
    if (prepared.code == DeviceStatus::Code::kInvalid && (device)->info().kind != "cpu") \
      GTEST_SKIP() << prepared.message;                                                  \
    ASSERT_TRUE(prepared.ok()) << prepared.message;                                      \
  } while (false)

inline double Tolerance(const Device& device) { return device.activation_bytes() == 4 ? 1e-4 : 2e-2; }

inline std::vector<std::string> TestedDevices() { return {"cpu", "cpu_avx2", "cpu_ssse3", "cuda"}; }

}  // namespace efla

#endif  // EFLA_TESTS_KERNELS_DEVICE_TEST_H_
