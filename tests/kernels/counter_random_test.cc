#include "kernels/counter_random.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

namespace efla {
namespace {

std::array<uint32_t, 4> Words(uint64_t key, uint64_t low, uint64_t high) {
  const Philox4x32 random = Philox(key, low, high);
  return {random.word[0], random.word[1], random.word[2], random.word[3]};
}

// The known answers that the generator's authors publish with it.
TEST(PhiloxTest, KnownAnswers) {
  constexpr uint64_t kOnes = ~uint64_t{0};
  EXPECT_EQ(Words(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Words(kOnes, kOnes, kOnes),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Words(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterUniformTest, IsUniformOverPositionsAndOverSeeds) {
  constexpr int kDraws = 200000, kBins = 64;
  for (const bool vary_seed : {false, true}) {
    std::array<int, kBins> bins = {};
    for (uint64_t i = 0; i < kDraws; ++i) {
      const double uniform = vary_seed ? CounterUniform(i, 7) : CounterUniform(7, i);
      ASSERT_GE(uniform, 0);
      ASSERT_LT(uniform, 1);
      ++bins[static_cast<int>(uniform * kBins)];
    }
    double chi_squared = 0;
    const double expected = static_cast<double>(kDraws) / kBins;
    for (const int count : bins) chi_squared += (count - expected) * (count - expected) / expected;
    EXPECT_LT(chi_squared, kBins - 1 + 6 * std::sqrt(2.0 * (kBins - 1)));
  }
}

}  // namespace
}  // namespace efla
