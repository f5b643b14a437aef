// The CPU device's copy of a step's input.
#ifndef EFLA_KERNELS_CPU_STEP_H_
#define EFLA_KERNELS_CPU_STEP_H_

#include <cstdint>
#include <vector>

#include "kernels/op_args.h"

namespace efla {

struct Step {
  std::vector<TokenId> tokens;
  std::vector<int32_t> decode_read_slot, decode_write_slot;
  std::vector<Segment> segments;
  std::vector<SampleRow> samples;
  std::vector<LogitAdjustment> adjustments;
  std::vector<uint32_t> masks;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  int num_decode() const { return static_cast<int>(decode_read_slot.size()); }
};

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_STEP_H_
