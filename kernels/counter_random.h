// Counter-based random numbers (Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). A draw is a function of (seed, position) alone: no state, no order, no dependence on a batch.
#ifndef EFLA_KERNELS_COUNTER_RANDOM_H_
#define EFLA_KERNELS_COUNTER_RANDOM_H_

#include <cstdint>

#include "kernels/efla_math.h"

namespace efla {

struct Philox4x32 {
  uint32_t word[4];
};

EFLA_HOST_DEVICE inline Philox4x32 Philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  constexpr int kRounds = 10;
  uint32_t c0 = static_cast<uint32_t>(counter_low), c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c0;
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1), a multiple of 2^-53.
EFLA_HOST_DEVICE inline double CounterUniform(uint64_t seed, uint64_t position) {
  const Philox4x32 random = Philox(seed, position, 0);
  const uint64_t bits = (static_cast<uint64_t>(random.word[1]) << 32 | random.word[0]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

}  // namespace efla

#endif  // EFLA_KERNELS_COUNTER_RANDOM_H_
