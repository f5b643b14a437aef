// The chunks of each segment in order, in the symmetric form (chunk_prepare.cu), S the state before the
// chunk:
//
//   U = T (V' - K' S),  O = Q S + P U,  S <- S + K'^T U
//
// Shapes: prepared float16 [tokens, q|k|v]; T, P float16 [chunks, heads, 64, 64]; state float32 [128, 128] a
// head in the segment's slots; mixed float32 [tokens, heads 128].
//
// A block owns one head of one segment and 16 kWarps of the state's 128 columns; a warp 16 of them, and needs
// no other warp: it computes the transposes, U^T = (V'^T - S^T K'^T) T^T and so on, in which its 16 columns
// are the rows of every left operand, and each result is, rounded to float16, the left operand of the next
// product as it lies in the registers. Its strip of S^T [16, 128] stays in registers in float32 from the
// first chunk to the last. The right operands Q, K', T, P are shared by the block's warps in two buffers,
// filled by asynchronous copies one chunk ahead. Blocks of T and P above the diagonal are neither read nor
// multiplied. The update K'^T U is summed on its own before it is added to S, in float32 and rounded to
// nearest.
//
// Exactness: nothing depends on kWarps, on other segments, or on where a segment was cut on the chunk grid.
// Bytes: 2 * 64 * 128 * 3 + 2 * 2 * 5120 a chunk and head (Q, K', T, P once more for each further block of a
// head), and 4 * 64 * 128 written.
#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kHeadSize = 128;
constexpr int kKeyTiles = kHeadSize / kFragment;       // 16-wide tiles of d_k
constexpr int kTokenTiles = kChunkTokens / kFragment;  // 16-wide tiles of a chunk

template <int kWarps>
struct Stage {
  __half keys[kChunkTokens * kHeadSize];
  __half queries[kChunkTokens * kHeadSize];
  __half inverse[kChunkTokens * kChunkTokens];
  __half scores[kChunkTokens * kChunkTokens];
  __half values[kChunkTokens * kWarps * kFragment];
};

template <int kWarps>
__global__ __launch_bounds__(kWarps* kWarpLanes) void ScanKernel(ChunkParams params) {
  constexpr int kThreads = kWarps * kWarpLanes;
  constexpr int kColumns = kWarps * kFragment;  // of the state, in this block
  constexpr int kBlocksPerHead = kHeadSize / kColumns;
  EFLA_DYNAMIC_SHARED(raw);
  Stage<kWarps>* stages = reinterpret_cast<Stage<kWarps>*>(raw);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int g = lane / 4, t = lane % 4;
  const MixLayer& layer = params.mix.layer;
  const int column_begin = static_cast<int>(blockIdx.x % kBlocksPerHead) * kColumns;
  const int head = static_cast<int>(blockIdx.x / kBlocksPerHead % layer.num_heads);
  const int segment_index =
      params.segment_begin + static_cast<int>(blockIdx.x / kBlocksPerHead / layer.num_heads);
  const Segment segment = params.segments[segment_index];
  const int num_chunks = (segment.num_tokens + kChunkTokens - 1) / kChunkTokens;
  const int64_t channels = layer.conv_channels();
  const __half* rows =
      static_cast<const __half*>(params.prepared) + static_cast<int64_t>(segment.token_begin) * channels;
  const __half* query_rows = rows + PartChannel(layer, kQuery, head);
  const __half* key_rows = rows + PartChannel(layer, kKey, head);
  const __half* value_rows = rows + PartChannel(layer, kValue, head) + column_begin;
  constexpr int kSquare = kChunkTokens * kChunkTokens;
  const int64_t square_stride = static_cast<int64_t>(layer.num_heads) * kSquare;  // from chunk to chunk
  const int64_t first_square = (params.first_chunk[segment_index] - params.chunk_begin) * square_stride +
                               static_cast<int64_t>(head) * kSquare;
  const __half* inverses = static_cast<const __half*>(params.inverse) + first_square;
  const __half* scores = static_cast<const __half*>(params.scores) + first_square;
  GridDependencyWait();
  GridDependencyTrigger();

  const auto load = [&](int chunk) {
    Stage<kWarps>& stage = stages[chunk % 2];
    const HalfTile<kHeadSize> key_tile = {stage.keys}, query_tile = {stage.queries};
    const HalfTile<kColumns> value_tile = {stage.values};
    const HalfTile<kChunkTokens> inverse_tile = {stage.inverse}, score_tile = {stage.scores};
    const int64_t first = static_cast<int64_t>(chunk) * kChunkTokens;
    const int64_t count = segment.num_tokens - first;
    constexpr int kRowVectors = kHeadSize / kTileVector;
    for (int i = threadIdx.x; i < kChunkTokens * kRowVectors; i += kThreads) {
      const int token = i / kRowVectors, vector = i % kRowVectors;
      const bool valid = token < count;
      const int64_t offset = (valid ? (first + token) * channels : 0) + vector * kTileVector;
      CpAsync16(key_tile.Vector(token, vector), key_rows + offset, valid);
      CpAsync16(query_tile.Vector(token, vector), query_rows + offset, valid);
    }
    constexpr int kValueVectors = kColumns / kTileVector;
    for (int i = threadIdx.x; i < kChunkTokens * kValueVectors; i += kThreads) {
      const int token = i / kValueVectors, vector = i % kValueVectors;
      const bool valid = token < count;
      const int64_t offset = (valid ? (first + token) * channels : 0) + vector * kTileVector;
      CpAsync16(value_tile.Vector(token, vector), value_rows + offset, valid);
    }
    constexpr int kSquareVectors = kChunkTokens / kTileVector;
    for (int i = threadIdx.x; i < kChunkTokens * kSquareVectors; i += kThreads) {
      const int token = i / kSquareVectors, vector = i % kSquareVectors;
      if (vector * kTileVector / kFragment > token / kFragment) continue;
      const int64_t offset = chunk * square_stride + i * kTileVector;
      CpAsync16(inverse_tile.Vector(token, vector), inverses + offset, true);
      CpAsync16(score_tile.Vector(token, vector), scores + offset, true);
    }
    CpAsyncCommit();
  };
  load(0);

  // state[n][0..1]: S[8n + 2t, + 1][g], state[n][2..3]: S[...][g + 8] of this warp's columns.
  float state[2 * kKeyTiles][4];
  const int state_column = column_begin + warp * kFragment + g;
  const StateView& view = params.mix.state;
  const int64_t state_offset = view.recurrent_offset + static_cast<int64_t>(head) * (kHeadSize * kHeadSize) +
                               static_cast<int64_t>(2 * t) * kHeadSize + state_column;
  const float* read = view.pool + static_cast<int64_t>(segment.read_slot) * view.slot_stride + state_offset;
#pragma unroll
  for (int n = 0; n < 2 * kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state[n][i] = read[(8 * n + i % 2) * kHeadSize + i / 2 * 8];
  }

  const int64_t out_stride = layer.v_channels();
  float* out = params.mixed + static_cast<int64_t>(segment.token_begin) * out_stride +
               static_cast<int64_t>(head) * kHeadSize + state_column;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    CpAsyncWait<0>();
    __syncthreads();  // the chunk has arrived, and everyone is done with the one before it
    if (chunk + 1 < num_chunks) load(chunk + 1);
    Stage<kWarps>& stage = stages[chunk % 2];
    const HalfTile<kHeadSize> key_tile = {stage.keys}, query_tile = {stage.queries};
    const HalfTile<kColumns> value_tile = {stage.values};
    const HalfTile<kChunkTokens> inverse_tile = {stage.inverse}, score_tile = {stage.scores};

    // S^T K'^T and S^T Q^T, [16 columns, 64 tokens].
    float erased[2 * kTokenTiles][4] = {}, output[2 * kTokenTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      uint32_t a[4];
      ToFragmentA(a, state[2 * k], state[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        uint32_t b[4];
        key_tile.LoadB(b, n * kFragment, k * kFragment, lane);
        Mma<__half>(erased[2 * n], a, b[0], b[1]);
        Mma<__half>(erased[2 * n + 1], a, b[2], b[3]);
        query_tile.LoadB(b, n * kFragment, k * kFragment, lane);
        Mma<__half>(output[2 * n], a, b[0], b[1]);
        Mma<__half>(output[2 * n + 1], a, b[2], b[3]);
      }
    }

    // V'^T - S^T K'^T, as left operands.
    uint32_t rest[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      uint32_t v[4];
      value_tile.LoadATransposed(v, n * kFragment, warp * kFragment, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float first, second;
        UnpackPair<__half>(v[i], first, second);
        const float* sums = &erased[2 * n + i / 2][i % 2 * 2];
        rest[n][i] = PackPair<__half>(first - sums[0], second - sums[1]);
      }
    }

    // U^T, as left operands, and P's part of the output.
    uint32_t update[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      float sums[2][4] = {};
#pragma unroll
      for (int k = 0; k <= n; ++k) {
        uint32_t b[4];
        inverse_tile.LoadB(b, n * kFragment, k * kFragment, lane);
        Mma<__half>(sums[0], rest[k], b[0], b[1]);
        Mma<__half>(sums[1], rest[k], b[2], b[3]);
      }
      ToFragmentA(update[n], sums[0], sums[1]);
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int k = 0; k <= n; ++k) {
        uint32_t b[4];
        score_tile.LoadB(b, n * kFragment, k * kFragment, lane);
        Mma<__half>(output[2 * n], update[k], b[0], b[1]);
        Mma<__half>(output[2 * n + 1], update[k], b[2], b[3]);
      }
    }

    // S^T += U^T K'.
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float sums[2][4] = {};
#pragma unroll
      for (int k = 0; k < kTokenTiles; ++k) {
        uint32_t b[4];
        key_tile.LoadBTransposed(b, k * kFragment, n * kFragment, lane);
        Mma<__half>(sums[0], update[k], b[0], b[1]);
        Mma<__half>(sums[1], update[k], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state[2 * n][i] += sums[0][i];
        state[2 * n + 1][i] += sums[1][i];
      }
    }

    const int64_t first = static_cast<int64_t>(chunk) * kChunkTokens;
#pragma unroll
    for (int n = 0; n < 2 * kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t token = first + 8 * n + 2 * t + i % 2;
        if (token < segment.num_tokens) out[token * out_stride + i / 2 * 8] = output[n][i];
      }
    }
  }

  float* write = view.pool + static_cast<int64_t>(segment.write_slot) * view.slot_stride + state_offset;
#pragma unroll
  for (int n = 0; n < 2 * kKeyTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) write[(8 * n + i % 2) * kHeadSize + i / 2 * 8] = state[n][i];
  }
}

template <int kWarps>
cudaError_t LaunchWarps(const LaunchContext& context, const ChunkParams& params) {
  constexpr int kBlocksPerHead = kHeadSize / (kWarps * kFragment);
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(params.num_segments) * params.mix.layer.num_heads * kBlocksPerHead),
      .block = dim3(kWarps * kWarpLanes),
      .shared_bytes = 2 * sizeof(Stage<kWarps>)};
  return Launch(context, shape, ScanKernel<kWarps>, params);
}

}  // namespace

cudaError_t LaunchChunkScan(const LaunchContext& context, const ChunkParams& params) {
  // Few heads are spread over more, narrower blocks: a chunk's latency falls until every multiprocessor has
  // one.
  const int heads = params.num_segments * params.mix.layer.num_heads;
  if (heads * 4 <= context.multiprocessors) return LaunchWarps<2>(context, params);
  if (heads * 2 <= context.multiprocessors) return LaunchWarps<4>(context, params);
  return LaunchWarps<8>(context, params);
}

}  // namespace efla::cuda
