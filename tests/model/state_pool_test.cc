#include "model/state_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/create_device.h"

namespace efla {
namespace {

// Two layers of two heads of 4 x 8, convolutions of 4 taps over 2*8 + 16 = 32 channels.
ModelConfig SmallConfig() {
  ModelConfig config;
  config.vocab_size = 16;
  config.hidden_size = 8;
  config.intermediate_size = 16;
  config.num_layers = 2;
  config.num_heads = 2;
  config.d_k = 4;
  config.d_v = 8;
  config.conv_size = 4;
  return config;
}

class StatePoolTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice({.kind = GetParam(), .threads = 1});
    if (!device.ok()) GTEST_SKIP() << device.status().ToString();
    device_ = *std::move(device);
  }
  std::unique_ptr<StatePool> Create(int num_slots, bool poison = false) {
    return StatePool::Create(*device_, SmallConfig(), num_slots, poison).value();
  }
  std::vector<float> Read(const StatePool& pool, SlotHandle slot) {
    std::vector<float> state(static_cast<size_t>(pool.layout().state_bytes()) / sizeof(float));
    EXPECT_TRUE(pool.CopyOut(slot, std::as_writable_bytes(std::span(state))).ok());
    return state;
  }
  void Write(StatePool& pool, SlotHandle slot, const std::vector<float>& state) {
    EXPECT_TRUE(pool.CopyIn(slot, std::as_bytes(std::span(state))).ok());
  }

  std::unique_ptr<Device> device_;
};

TEST(StateLayoutTest, AddsUpAndPads) {
  const StateLayout layout = StateLayout::Of(SmallConfig());
  EXPECT_EQ(layout.recurrent_floats, 2 * 4 * 8);
  EXPECT_EQ(layout.conv_floats, 3 * 32);
  EXPECT_EQ(layout.state_bytes(), 2 * (64 + 96) * 4);
  EXPECT_EQ(layout.slot_bytes(), 64 * 1024);
}

TEST(StateLayoutTest, ConvolutionsMayBeAbsent) {
  ModelConfig config = SmallConfig();
  config.conv_size = 0;
  EXPECT_EQ(StateLayout::Of(config).conv_floats, 0);
  EXPECT_EQ(StateLayout::Of(config).state_bytes(), 2 * 64 * 4);
  config.conv_size = 1;  // one tap remembers nothing
  EXPECT_EQ(StateLayout::Of(config).conv_floats, 0);
}

TEST(StateLayoutTest, PublishedSizes) {
  ModelConfig config;
  config.num_layers = 24;
  config.num_heads = 8;
  config.d_k = config.d_v = 128;
  const StateLayout layout = StateLayout::Of(config);
  EXPECT_EQ(layout.num_layers * layout.recurrent_floats * 4, 12'582'912);
  EXPECT_EQ(layout.state_bytes(), 12'582'912 + 24 * 3 * 3072 * 4);
  EXPECT_EQ(layout.slot_bytes() % (64 * 1024), 0);
  EXPECT_GE(layout.slot_bytes(), layout.state_bytes());
  EXPECT_LT(layout.slot_bytes() - layout.state_bytes(), 64 * 1024);
}

TEST_P(StatePoolTest, HandsOutEverySlotOnceAndNeverTheReservedOnes) {
  auto pool = Create(5);
  std::set<int32_t> slots;
  for (int i = 0; i < 5; ++i) slots.insert(pool->Acquire().value().slot);
  EXPECT_EQ(slots, (std::set<int32_t>{2, 3, 4, 5, 6}));
  const absl::Status full = pool->Acquire().status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(full.message()).find("5"), std::string::npos) << full;
  EXPECT_TRUE(pool->CheckInvariants(true).ok());
}

TEST_P(StatePoolTest, CountsFollowReferences) {
  auto pool = Create(3);
  const auto expect = [&pool](int live, int shared, int free) {
    const StatePool::Counts counts = pool->counts();
    EXPECT_EQ(counts.total, 3);
    EXPECT_EQ(counts.live, live);
    EXPECT_EQ(counts.shared, shared);
    EXPECT_EQ(counts.free, free);
    EXPECT_TRUE(pool->CheckInvariants().ok()) << pool->CheckInvariants();
  };
  expect(0, 0, 3);
  const SlotHandle a = pool->Acquire().value(), b = pool->Acquire().value();
  expect(2, 0, 1);
  pool->AddReference(a);
  pool->AddReference(a);
  EXPECT_TRUE(pool->IsShared(a));
  EXPECT_FALSE(pool->IsShared(b));
  expect(1, 1, 1);
  pool->Release(a);
  expect(1, 1, 1);
  pool->Release(a);
  EXPECT_FALSE(pool->IsShared(a));
  expect(2, 0, 1);
  pool->Release(a);
  pool->Release(b);
  expect(0, 0, 3);
}

TEST_P(StatePoolTest, AStaleHandleIsNotLiveAfterReuse) {
  auto pool = Create(1);
  const SlotHandle first = pool->Acquire().value();
  EXPECT_TRUE(pool->IsLive(first));
  pool->Release(first);
  EXPECT_FALSE(pool->IsLive(first));
  const SlotHandle second = pool->Acquire().value();
  EXPECT_EQ(second.slot, first.slot);
  EXPECT_NE(second, first);
  EXPECT_FALSE(pool->IsLive(first));
  EXPECT_TRUE(pool->IsLive(second));
}

TEST_P(StatePoolTest, NothingElseIsLive) {
  auto pool = Create(2);
  EXPECT_FALSE(pool->IsLive({}));
  EXPECT_FALSE(pool->IsLive({StatePool::kZeroSlot, 1}));
  EXPECT_FALSE(pool->IsLive({StatePool::kSinkSlot, 1}));
  EXPECT_FALSE(pool->IsLive({StatePool::kFirstSlot, 1})) << "not acquired yet";
  EXPECT_FALSE(pool->IsLive({4, 1})) << "past the end";
}

TEST_P(StatePoolTest, FreedSlotsAreReusedOldestFirst) {
  auto pool = Create(3);
  const SlotHandle a = pool->Acquire().value(), b = pool->Acquire().value();
  pool->Release(b);
  pool->Release(a);
  pool->Acquire().value();  // the one that was never taken
  EXPECT_EQ(pool->Acquire().value().slot, b.slot);
  EXPECT_EQ(pool->Acquire().value().slot, a.slot);
}

TEST_P(StatePoolTest, StatesSurviveTheRoundTripAndTheirNeighbours) {
  auto pool = Create(3);
  std::vector<SlotHandle> slots;
  std::vector<std::vector<float>> states;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(pool->Acquire().value());
    std::vector<float> state(static_cast<size_t>(pool->layout().state_bytes()) / sizeof(float));
    for (size_t j = 0; j < state.size(); ++j) state[j] = static_cast<float>(1000 * i) + static_cast<float>(j);
    states.push_back(std::move(state));
  }
  for (size_t i = 0; i < 3; ++i) Write(*pool, slots[i], states[i]);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(Read(*pool, slots[i]), states[i]);
  EXPECT_TRUE(pool->CheckInvariants(true).ok());
}

TEST_P(StatePoolTest, PoisonFillsFreshAndFreedSlots) {
  auto pool = Create(1, /*poison=*/true);
  const auto expect_nan = [this, &pool](SlotHandle slot) {
    for (float value : Read(*pool, slot)) ASSERT_TRUE(std::isnan(value));
  };
  SlotHandle slot = pool->Acquire().value();
  expect_nan(slot);
  const std::vector<float> ones(static_cast<size_t>(pool->layout().state_bytes()) / sizeof(float), 1.0f);
  Write(*pool, slot, ones);
  pool->AddReference(slot);
  pool->Release(slot);
  EXPECT_EQ(Read(*pool, slot), ones) << "a slot with a reference left keeps its contents";
  pool->Release(slot);
  expect_nan(pool->Acquire().value());
  EXPECT_TRUE(pool->CheckInvariants(true).ok()) << "poison never reaches the zero slot";
}

TEST_P(StatePoolTest, ViewsAddressTheLayout) {
  auto pool = Create(2);
  const StateView first = pool->View(0), second = pool->View(1);
  EXPECT_EQ(first.pool, second.pool);
  EXPECT_EQ(first.slot_stride, pool->layout().slot_floats);
  EXPECT_EQ(first.recurrent_offset, 0);
  EXPECT_EQ(second.recurrent_offset, 64);
  EXPECT_EQ(first.conv_offset, 128);
  EXPECT_EQ(second.conv_offset, 128 + 96);
}

TEST_P(StatePoolTest, AWrittenZeroSlotIsFound) {
  auto pool = Create(1);
  ASSERT_TRUE(pool->CheckInvariants(true).ok());
  const float one = 1.0f;
  device_->CopyToDevice(pool->View(1).pool + 5, &one, sizeof(one));
  const absl::Status status = pool->CheckInvariants(true);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(status.message()).find("float 5"), std::string::npos) << status;
  EXPECT_TRUE(pool->CheckInvariants(false).ok());
}

TEST_P(StatePoolTest, TooManySlotsAreRefusedWithTheNumberThatFits) {
  constexpr int kTooMany = 1'000'000'000;  // 64 TiB
  const absl::Status status = StatePool::Create(*device_, SmallConfig(), kTooMany, false).status();
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string message(status.message());
  EXPECT_NE(message.find("1000000000"), std::string::npos) << message;
  const std::string marker = "at most ";
  ASSERT_NE(message.find(marker), std::string::npos) << message;
  const int64_t fits = std::stoll(message.substr(message.find(marker) + marker.size()));
  EXPECT_GT(fits, 0);
  EXPECT_LT(fits, kTooMany);
  EXPECT_LE(fits * 64 * 1024, device_->info().memory_total_bytes);
}

TEST_P(StatePoolTest, ThereIsNoPoolWithoutSlots) {
  for (int num_slots : {0, -1}) {
    const absl::Status status = StatePool::Create(*device_, SmallConfig(), num_slots, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(std::to_string(num_slots)), std::string::npos) << status;
  }
}

TEST_P(StatePoolTest, CountsAreCoherentFromAnotherThread) {
  auto pool = Create(4);
  std::atomic<bool> done = false;
  bool coherent = true;
  std::thread reader([&] {
    while (!done.load()) {
      const StatePool::Counts counts = pool->counts();
      // The loop below never holds more than one slot besides the shared one.
      coherent = coherent && counts.live + counts.shared + counts.free == counts.total && counts.live >= 0 &&
                 counts.shared >= 0 && counts.live + counts.shared <= 2 && counts.shared <= 1;
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    const SlotHandle a = pool->Acquire().value(), b = pool->Acquire().value();
    pool->AddReference(a);
    pool->Release(b);
    pool->Release(a);
    pool->Release(a);
  }
  done = true;
  reader.join();
  EXPECT_TRUE(coherent);
}

TEST_P(StatePoolTest, TellsWhenASlotHasBecomeFree) {
  auto pool = Create(2);
  int freed = 0;
  pool->SetFreedCallback([&] {
    ++freed;
    EXPECT_GT(pool->counts().free, 0);
  });
  const SlotHandle a = pool->Acquire().value(), b = pool->Acquire().value();
  pool->AddReference(a);
  pool->Release(a);
  EXPECT_EQ(freed, 0) << "it is still held";
  pool->Release(a);
  EXPECT_EQ(freed, 1);
  pool->SetFreedCallback(nullptr);
  pool->Release(b);
  EXPECT_EQ(freed, 1);
}

// Several owners at once, each of whom must find in its slots what it has written, and nothing but poison in
// fresh ones.
TEST_P(StatePoolTest, OwnersOnAnyThreadDoNotMeet) {
  constexpr int kThreads = 4, kRounds = 400;
  auto pool = Create(5, /*poison=*/true);
  std::atomic<int> freed = 0, acquired = 0, wrong = 0;
  pool->SetFreedCallback([&] { ++freed; });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < kRounds; ++round) {
        const absl::StatusOr<SlotHandle> slot = pool->Acquire();
        if (!slot.ok()) continue;
        ++acquired;
        for (float value : Read(*pool, *slot)) wrong += std::isnan(value) ? 0 : 1;
        const std::vector<float> mine(static_cast<size_t>(pool->layout().state_bytes()) / sizeof(float),
                                      static_cast<float>(thread * kRounds + round));
        Write(*pool, *slot, mine);
        pool->AddReference(*slot);
        std::thread other([&] {
          wrong += Read(*pool, *slot) == mine ? 0 : 1;
          pool->Release(*slot);
        });
        wrong += Read(*pool, *slot) == mine && pool->IsLive(*slot) ? 0 : 1;
        if (round % 2 == 0) {
          other.join();
          pool->Release(*slot);
        } else {
          pool->Release(*slot);  // either may be the last
          other.join();
        }
        wrong += pool->IsLive(*slot) ? 1 : 0;
        wrong += pool->CheckInvariants().ok() ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(acquired, kRounds);
  EXPECT_EQ(freed, acquired);
  EXPECT_EQ(pool->counts().free, 5);
  EXPECT_TRUE(pool->CheckInvariants(true).ok());
}

using StatePoolDeathTest = StatePoolTest;

TEST_P(StatePoolDeathTest, BrokenContractsEndTheProcess) {
  if (GetParam() != "cpu") GTEST_SKIP() << "death tests fork, which a CUDA context does not survive";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  auto pool = Create(2);
  const SlotHandle slot = pool->Acquire().value();
  pool->AddReference(slot);
  const std::vector<float> state(static_cast<size_t>(pool->layout().state_bytes()) / sizeof(float));
  EXPECT_DEATH(Write(*pool, slot, state), "broken contract");
  EXPECT_DEATH(Write(*pool, slot, std::vector<float>(3)), "broken contract");
  pool->Release(slot);
  pool->Release(slot);
  EXPECT_DEATH(pool->Release(slot), "broken contract");
  EXPECT_DEATH(pool->AddReference(slot), "broken contract");
  EXPECT_DEATH(pool->Release({StatePool::kZeroSlot, 1}), "broken contract");
  EXPECT_DEATH(pool->View(2), "broken contract");
}

INSTANTIATE_TEST_SUITE_P(Devices, StatePoolTest, ::testing::Values("cpu", "cuda"),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Devices, StatePoolDeathTest, ::testing::Values("cpu", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace efla
