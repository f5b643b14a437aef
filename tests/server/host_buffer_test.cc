#include "server/sessions/host_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace efla {
namespace {

constexpr size_t kLarge = 1'000'000;

TEST(HostBufferTest, MovesAndNarrowsWithoutCopies) {
  const auto pool = HostBuffers::Create(0);
  HostBuffer buffer = pool->Take(kLarge);
  ASSERT_EQ(buffer.size(), kLarge);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  for (size_t i = 0; i < kLarge; ++i) buffer.data()[i] = static_cast<std::byte>(i % 251);
  const std::byte* const place = buffer.data();
  HostBuffer moved = std::move(buffer);
  EXPECT_TRUE(buffer.empty());
  EXPECT_EQ(moved.data(), place);
  moved.Narrow(64, 1000);
  EXPECT_EQ(moved.data(), place + 64);
  const HostBuffer copy = HostBuffer::CopyOf(moved);
  EXPECT_NE(copy.data(), moved.data());
  EXPECT_TRUE(copy == moved);
  moved.data()[999] ^= std::byte{1};
  EXPECT_FALSE(copy == moved);
  moved.Narrow(0, 999);
  EXPECT_FALSE(copy == moved);
  EXPECT_TRUE(HostBuffer() == pool->Take(0));
}

TEST(HostBuffersTest, TakesAgainWhatWasGivenBack) {
  const auto pool = HostBuffers::Create(10 * kLarge);
  const std::byte* first;
  {
    HostBuffer buffer = pool->Take(kLarge);
    first = buffer.data();
    buffer.Narrow(100, 10);  // gives all of it back nevertheless
    EXPECT_GE(pool->stats().used_bytes, static_cast<int64_t>(kLarge));
  }
  EXPECT_EQ(pool->stats().used_bytes, 0);
  EXPECT_GE(pool->stats().idle_bytes, static_cast<int64_t>(kLarge));
  const HostBuffer again = pool->Take(kLarge - 5000);  // what is a little larger serves too
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(again.size(), kLarge - 5000);
  const HostBuffer half = pool->Take(kLarge / 2);
  EXPECT_EQ(pool->stats().idle_bytes, 0);
  EXPECT_EQ(pool->stats().allocations, 2u);
  EXPECT_EQ(pool->stats().reuses, 1u);
  pool->Take(1000);  // not worth it
  EXPECT_EQ(pool->stats().idle_bytes, 0);
}

TEST(HostBuffersTest, IdleBuffersStayWithinTheBudgetButForAFew) {
  constexpr size_t kBytes = HostBuffers::kGranule;
  constexpr auto kMost = static_cast<int64_t>(HostBuffers::kWorkingBuffers);
  const auto pool = HostBuffers::Create(10 * static_cast<int64_t>(kBytes));
  std::vector<HostBuffer> buffers;
  for (int i = 0; i < 30; ++i) buffers.push_back(pool->Take(kBytes));
  EXPECT_EQ(pool->stats().used_bytes, 30 * static_cast<int64_t>(kBytes));
  buffers.resize(20);
  EXPECT_EQ(pool->stats().idle_bytes, kMost * static_cast<int64_t>(kBytes));
  buffers.clear();
  EXPECT_EQ(pool->stats().used_bytes, 0);
  EXPECT_EQ(pool->stats().idle_bytes, 10 * static_cast<int64_t>(kBytes));
  // Idle ones make way for those that are wanted.
  for (int i = 0; i < 3; ++i) buffers.push_back(pool->Take(3 * kBytes));
  EXPECT_EQ(pool->stats().used_bytes, 9 * static_cast<int64_t>(kBytes));
  EXPECT_EQ(pool->stats().idle_bytes, kMost * static_cast<int64_t>(kBytes));
}

// Memory that is counted, and runs out.
struct CountedMemory {
  HostBuffers::Memory memory() {
    return {.allocate = [this](size_t bytes) -> void* {
              if (left-- <= 0) return nullptr;
              ++live;
              return std::aligned_alloc(64, bytes);
            },
            .free =
                [this](void* bytes) {
                  --live;
                  std::free(bytes);
                }};
  }
  std::atomic<int> left{2}, live{0};
};

TEST(HostBuffersTest, OtherMemoryServesWhereTheDevicesRunsOut) {
  CountedMemory counted;
  {
    auto pool = HostBuffers::Create(0, counted.memory());
    std::vector<HostBuffer> buffers;
    for (int i = 0; i < 10; ++i) buffers.push_back(pool->Take(kLarge));
    EXPECT_EQ(counted.live, 2);
    EXPECT_EQ(5 * pool->stats().foreign_bytes, pool->stats().used_bytes);
    for (HostBuffer& buffer : buffers) std::fill_n(buffer.data(), buffer.size(), std::byte{7});
    pool.reset();  // the buffers keep it
    EXPECT_EQ(counted.live, 2);
  }
  EXPECT_EQ(counted.live, 0);
}

TEST(HostBuffersTest, ManyThreadsTakeAndGiveBack) {
  const auto pool = HostBuffers::Create(4 * kLarge);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 300; ++round) {
        HostBuffer buffer = pool->Take(HostBuffers::kGranule + static_cast<size_t>(round % 7) * 20'000);
        std::fill_n(buffer.data(), buffer.size(), static_cast<std::byte>(t));
        std::this_thread::yield();
        wrong += std::any_of(buffer.data(), buffer.data() + buffer.size(),
                             [&](std::byte b) { return b != static_cast<std::byte>(t); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool->stats().used_bytes, 0);
  EXPECT_GT(pool->stats().reuses, 1000u);
}

}  // namespace
}  // namespace efla
