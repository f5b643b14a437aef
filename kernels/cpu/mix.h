// Token mixing on the CPU: short convolution, activation, coefficients, recurrence, output norm and gate, in
// the recurrent form (one token of each sequence) and the chunkwise form (runs of tokens).
#ifndef EFLA_KERNELS_CPU_MIX_H_
#define EFLA_KERNELS_CPU_MIX_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cpu/step.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/op_args.h"

namespace efla {

// Widest short convolution that the chunkwise form has room for.
inline constexpr int kMaxConvSize = 64;

// Floats that each thread needs to mix heads of such a layer.
size_t RecurrentScratchFloats(const MixLayer& layer);
size_t ChunkScratchFloats(const MixLayer& layer);

struct MixWorkspace {
  float* taps = nullptr;      // [conv_size, conv_channels]
  float* scratch = nullptr;   // [threads, scratch_stride], 64-byte aligned
  size_t scratch_stride = 0;  // floats, at least what the functions above say; a multiple of 16
};

// The step's decode rows; parallel over (row, head). `act` is float32 here.
void MixRecurrentRows(const Step& step, const MixArgs& args, const MixWorkspace& workspace, ThreadPool& pool);

// The step's segments; parallel over (segment, head).
void MixChunkSegments(const Step& step, const MixArgs& args, const MixWorkspace& workspace, ThreadPool& pool);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_MIX_H_
