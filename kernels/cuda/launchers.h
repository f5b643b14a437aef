// The kernels' launchers, for cuda_device.cc. Each enqueues on context.stream and returns the launch's
// status; pointers are device pointers, shapes row-major, "act" the 16-bit type that the ActType names.
#ifndef EFLA_KERNELS_CUDA_LAUNCHERS_H_
#define EFLA_KERNELS_CUDA_LAUNCHERS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/op_args.h"
#include "kernels/types.h"

namespace efla::cuda {

enum class ActType : uint8_t { kF16, kBF16 };

inline constexpr int kMaxLanes = 2;

struct LaunchContext {
  cudaStream_t stream = nullptr;
  ActType act = ActType::kF16;
  bool hopper = false;   // compute capability 9.0, and code for it: clusters, the warpgroups' matrix units
  bool overlap = false;  // programmatic dependent launch: start before the predecessor's end; needs `hopper`
  int multiprocessors = 1;
  int lane = 0;  // streams whose work may overlap have different lanes, below kMaxLanes, for workspaces
};

// --- embed.cu ---
// x[t] = table[tokens[t]] for t < num_tokens; the table keeps its own dtype.
cudaError_t LaunchEmbed(const LaunchContext& context, const int32_t* tokens, int num_tokens,
                        const void* table, DType table_dtype, int64_t hidden_size, float* x);

// --- norm.cu ---
struct NormParams {
  const float* x = nullptr;         // [rows, cols]
  const int32_t* gather = nullptr;  // row r reads x[gather[r]]; null: x[r]
  const float* norm = nullptr;      // [cols]
  float eps = 0;
  int num_rows = 0, cols = 0;         // cols: a multiple of 8
  void* y = nullptr;                  // act [rows, cols]
  const void* coef_weight = nullptr;  // act [coef_columns, cols], or null
  int coef_columns = 0;
  float* coef = nullptr;  // [rows, coef_columns]
};
cudaError_t LaunchNorm(const LaunchContext& context, const NormParams& params);
// The same for prompt rows (norm_rows.cu): other sums, so other bits. A row takes one or the other by what it
// is, never by how many there are.
cudaError_t LaunchNormRows(const LaunchContext& context, const NormParams& params);

// --- linear.cu ---
enum class LinearOutput : uint8_t {
  kAct,        // act [rows, outputs]
  kFloat,      // float32 [rows, outputs]
  kAddFloat,   // float32 [rows, outputs], added to
  kGatedSilu,  // act [rows, outputs / 2]: silu(gate) up of weight rows interleaved by kGateUpGroup
};

// Interleaved gate and up rows come in turns of this many: gate 0..7, up 0..7, gate 8..15, ...
inline constexpr int kGateUpGroup = 8;

// Products with at most this many rows can normalise their input themselves (LinearParams::norm). For more,
// the rows that every block normalises anew cost more than a kernel of its own.
inline constexpr int kMaxFusedNormRows = 2;

struct LinearParams {
  const void* y = nullptr;       // act [rows, cols]; null when `norm` is set
  const void* weight = nullptr;  // act [outputs, cols]
  int num_rows = 0;
  int64_t outputs = 0;  // kGatedSilu: gate and up rows together, a multiple of 2 kGateUpGroup
  int cols = 0;         // a multiple of 8
  LinearOutput output = LinearOutput::kAct;
  void* out = nullptr;
  int64_t out_columns = 0;  // row length of `out`; outputs beyond it (padding) are dropped
  // With `norm`: y = rms_norm(x; norm), and coef = y coef_weight^T as in NormParams. num_rows <=
  // kMaxFusedNormRows.
  const float* x = nullptr;
  const float* norm = nullptr;
  float eps = 0;
  const void* coef_weight = nullptr;
  int coef_columns = 0;
  float* coef = nullptr;
};
// Whether this module's code for the current device was made for compute capability 9.0.
bool HasHopperCode();

// The bits of an output depend on its row of y, its row of the weight and `cols` alone.
cudaError_t LaunchLinear(const LaunchContext& context, const LinearParams& params);

// out[r] = silu(gate) up of an interleaved product [rows, 2 kGateUpGroup groups]; out is act [rows, columns].
cudaError_t LaunchGatedSilu(const LaunchContext& context, const void* gate_up, int num_rows, int64_t columns,
                            void* out);

// Adds to *mismatches how many 32-bit words of row r differ from the words of expected[r % expected_rows].
cudaError_t LaunchCompareRows(const LaunchContext& context, const void* rows, int num_rows, int64_t row_words,
                              const void* expected, int expected_rows, int32_t* mismatches);

// --- recurrent.cu, chunk_*.cu, token_*.cu ---
struct MixParams {
  MixLayer layer;
  const void* proj = nullptr;   // act [tokens, proj_columns]
  const float* coef = nullptr;  // [tokens, coef_columns]
  StateView state;
  void* out = nullptr;  // act [tokens, num_heads d_v]
};

bool HeadSizeSupported(int d_k, int d_v);
inline constexpr int kMaxConvSize = 8;

// One token for each row r < min(num_rows, *active_rows): state read from read_slot[r], written to
// write_slot[r].
struct RecurrentParams {
  MixParams mix;
  int num_rows = 0;  // that the grid is made for
  const int32_t* active_rows = nullptr;
  const int32_t* read_slot = nullptr;
  const int32_t* write_slot = nullptr;
};
cudaError_t LaunchRecurrent(const LaunchContext& context, const RecurrentParams& params);

// A run of at most kChunkTokens tokens of one segment.
struct Chunk {
  int32_t segment;
  int32_t token_begin;
  int32_t num_tokens;
};

// What the chunk kernels share. Prepared rows are indexed by token, T and P by chunk.
struct ChunkParams {
  MixParams mix;
  const Segment* segments = nullptr;
  int segment_begin = 0, num_segments = 0;  // the segments of this pass
  const Chunk* chunks = nullptr;
  int chunk_begin = 0, num_chunks = 0;   // the chunks of this pass
  const int32_t* first_chunk = nullptr;  // [segments], first chunk of each segment
  // The tensor-core form (ChunkFormSupported): float16, q scaled, k' = sqrt(erase) k, v' = sqrt(erase) v.
  // The token-by-token form: float32, q scaled, the key as used, v.
  void* prepared = nullptr;   // [tokens, q|k|v channels]
  float4* scalars = nullptr;  // [tokens, num_heads] decay, erase, write, k.q; token-by-token form
  void* inverse = nullptr;    // float16 [chunks of the pass, num_heads, 64, 64]
  void* scores = nullptr;     // float16, the same shape
  float* mixed = nullptr;     // [tokens, num_heads d_v], before the output norm
};

// Whether the tensor-core form serves this layer; the token-by-token form serves all supported head sizes.
bool ChunkFormSupported(const MixLayer& layer);

cudaError_t LaunchChunkPrepare(const LaunchContext& context, const ChunkParams& params);
cudaError_t LaunchChunkInverse(const LaunchContext& context, const ChunkParams& params);
cudaError_t LaunchChunkScan(const LaunchContext& context, const ChunkParams& params);
cudaError_t LaunchTokenPrepare(const LaunchContext& context, const ChunkParams& params);
cudaError_t LaunchTokenScan(const LaunchContext& context, const ChunkParams& params);
// The output norm and gate of the pass's tokens, and the segments' new convolution states.
cudaError_t LaunchChunkFinish(const LaunchContext& context, const ChunkParams& params);

// --- sample.cu ---
struct SampleParams {
  const float* logits = nullptr;  // [rows, vocab]
  int num_rows = 0;               // that the grid is made for
  const int32_t* active_rows = nullptr;
  int vocab_size = 0;
  const SampleRow* rows = nullptr;
  const LogitAdjustment* adjustments = nullptr;  // the rows' lists
  const uint32_t* masks = nullptr;               // [masks, MaskWords(vocab)]
  float* reshaped = nullptr;  // [rows, vocab] scratch of rows that DrawsReshaped; null where SampleFitsShared
  SampleResult* results = nullptr;     // [rows]; host memory that the device can write
  const int32_t* top_begin = nullptr;  // [rows] where each row's alternatives start in `top`
  TokenLogprob* top = nullptr;         // likewise host memory
};
// Whether a block's shared memory holds a row of logits.
bool SampleFitsShared(int vocab_size);
cudaError_t LaunchSample(const LaunchContext& context, const SampleParams& params);

// --- convert.cu ---
// Copies [rows, cols] of `from`, adding a row stride and converting to the act type. Counts in
// *unrepresentable the finite values that have no finite counterpart there.
cudaError_t LaunchConvertRows(const LaunchContext& context, const void* from, DType from_dtype, int64_t rows,
                              int64_t cols, void* to, int64_t to_row_group, int64_t to_row_offset,
                              int32_t* unrepresentable);
cudaError_t LaunchToFloat(const LaunchContext& context, const void* act, int64_t count, float* values);
cudaError_t LaunchFromFloat(const LaunchContext& context, const float* values, int64_t count, void* act);

}  // namespace efla::cuda

#endif  // EFLA_KERNELS_CUDA_LAUNCHERS_H_
