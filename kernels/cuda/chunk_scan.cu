// The chunks of each segment in order, in the symmetric form (chunk_prepare.cu), S the state before the
// chunk:
//
//   U = T (V' - K' S),  O = Q S + P U,  S <- S + K'^T U
//
// Shapes: prepared float16 [tokens, q|k|v]; T, P float16 [chunks, heads, 64, 64]; state float32 [128, 128] a
// head in the segment's slots; mixed float32 [tokens, heads 128].
//
// A warp owns 16 of the state's 128 columns and computes the transposes, U^T = (V'^T - S^T K'^T) T^T and so
// on, in which its columns are the rows of every left operand, and each result is, rounded to float16, the
// left operand of the next product as it lies in the registers: U and the float16 copy of S never move. Four
// warps, 64 columns, form the group that multiplies one right operand at a time (chunk_product.cuh). A block
// is one group, or two where there are heads enough; its right operands Q, K', T, P and its V' wait in
// kStages buffers, filled by asynchronous copies kStages - 1 chunks ahead.
//
// Halves are those of d_k. A chunk's products are queued as Q S (half), T, Q S (half), K'^T U (half), P U,
// K'^T U (half), and the next chunk's K'S in halves; what is rounded, added and stored in between is done
// while the product queued before it runs. The one barrier of a chunk lies in the shadow of K'S and Q S.
//
// The 16 x 16 blocks of T and P above the diagonal are zeros that the kernel lays down itself. The update
// K'^T U is summed on its own before it is added to S, in float32 and rounded to nearest.
//
// Exactness: nothing depends on the number of groups, on other segments, or on where a segment was cut on the
// chunk grid. Bytes: 2 * 64 * 128 * 3 + 2 * 2 * 5120 a chunk and head (Q, K', T, P once more for the other
// block of a head), and 4 * 64 * 128 written.
#include <type_traits>

#include "kernels/cuda/chunk_product.cuh"
#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kHeadSize = 128;
constexpr int kKeyParts = kHeadSize / kGroupTile;          // tiles of d_k
constexpr int kPartFragments = kGroupTile / kFragment;     // 16-wide fragments of a tile
constexpr int kTokenFragments = kChunkTokens / kFragment;  // of a chunk
constexpr int kTileElements = kChunkTokens * kGroupTile;
static_assert(kChunkTokens == kGroupTile);

template <int kGroups>
struct Stage {
  __half keys[kKeyParts][kTileElements];  // [token][d_k]
  __half queries[kKeyParts][kTileElements];
  __half inverse[kTileElements];
  __half scores[kTileElements];
  __half values[kGroups][kTileElements];  // [token][column]
};

// The sums of 64 tokens: sums[n][0..1]: tokens 8n + 2t, + 1 of column g; sums[n][2..3]: of column g + 8.
using Sums = float[2 * kTokenFragments][4];
// 16-wide fragments of the 16 columns, left operands.
using Left = uint32_t[kTokenFragments][4];

__device__ inline void Round(Left& left, const Sums& sums) {
#pragma unroll
  for (int k = 0; k < kTokenFragments; ++k) PackLeft(left[k], sums[2 * k], sums[2 * k + 1]);
}

// sums (+)= left M^T for M [64, 64].
__device__ inline void MultiplySquare(Sums& sums, const Left& left, const GroupTile& square, bool accumulate,
                                      int lane) {
#pragma unroll
  for (int k = 0; k < kTokenFragments; ++k) {
    MultiplyRows<false>(sums, left[k], square, k * kFragment, accumulate || k > 0, lane);
  }
}

// What a block copies for its chunks, and where this thread's share of it lies. Vectors are of 16 bytes.
template <int kGroups>
struct Loader {
  static constexpr int kThreads = kGroups * kGroupWarps * kWarpLanes;
  static constexpr int kTileVectors = kGroupTile / kTileVector;
  static constexpr int kSquare = kChunkTokens * kChunkTokens;

  const __half* queries;  // the segment's first token, the head's channels
  const __half* keys;
  const __half* values;   // the block's columns
  const __half* inverse;  // the segment's first chunk, the head's square
  const __half* scores;
  int64_t channels, square_stride;
  int num_tokens;

  __device__ void Load(Stage<kGroups>& stage, int chunk) const {
    const int first = chunk * kChunkTokens, count = num_tokens - first;
    if (count <= 0) return;
    constexpr int kRowVectors = kKeyParts * kTileVectors, kRows = kThreads / kRowVectors;
    {
      const int vector = threadIdx.x % kRowVectors, part = vector / kTileVectors;
      const GroupTile key_tile = {stage.keys[part]}, query_tile = {stage.queries[part]};
#pragma unroll
      for (int i = 0; i < kChunkTokens / kRows; ++i) {
        const int token = threadIdx.x / kRowVectors + i * kRows;
        const bool valid = token < count;
        const int64_t offset = (valid ? first + token : 0) * channels + vector * kTileVector;
        CpAsync16(key_tile.Vector(token, vector % kTileVectors), keys + offset, valid);
        CpAsync16(query_tile.Vector(token, vector % kTileVectors), queries + offset, valid);
      }
    }
    constexpr int kValueVectors = kGroups * kTileVectors, kValueRows = kThreads / kValueVectors;
    {
      const int vector = threadIdx.x % kValueVectors;
      const GroupTile tile = {stage.values[vector / kTileVectors]};
#pragma unroll
      for (int i = 0; i < kChunkTokens / kValueRows; ++i) {
        const int token = threadIdx.x / kValueVectors + i * kValueRows;
        const bool valid = token < count;
        const int64_t offset = (valid ? first + token : 0) * channels + vector * kTileVector;
        CpAsync16(tile.Vector(token, vector % kTileVectors), values + offset, valid);
      }
    }
    constexpr int kSquareRows = kThreads / kTileVectors;
    {
      const int vector = threadIdx.x % kTileVectors;
      const GroupTile inverse_tile = {stage.inverse}, score_tile = {stage.scores};
#pragma unroll
      for (int i = 0; i < kChunkTokens / kSquareRows; ++i) {
        const int token = threadIdx.x / kTileVectors + i * kSquareRows;
        if (vector * kTileVector / kFragment > token / kFragment) continue;
        const int64_t offset = chunk * square_stride + token * kChunkTokens + vector * kTileVector;
        CpAsync16(inverse_tile.Vector(token, vector), inverse + offset, true);
        CpAsync16(score_tile.Vector(token, vector), scores + offset, true);
      }
    }
  }

  // Zeros where Load does not write.
  __device__ static void ClearAbove(Stage<kGroups>& stage) {
    const GroupTile inverse_tile = {stage.inverse}, score_tile = {stage.scores};
    for (int i = threadIdx.x; i < kChunkTokens * kTileVectors; i += kThreads) {
      const int token = i / kTileVectors, vector = i % kTileVectors;
      if (vector * kTileVector / kFragment <= token / kFragment) continue;
      *reinterpret_cast<uint4*>(inverse_tile.Vector(token, vector)) = {};
      *reinterpret_cast<uint4*>(score_tile.Vector(token, vector)) = {};
    }
  }
};

// V'^T of this warp's columns.
__device__ inline void LoadValues(Sums& sums, const __half* values, int warp, int lane) {
  const GroupTile tile = {const_cast<__half*>(values)};
#pragma unroll
  for (int n = 0; n < kTokenFragments; ++n) {
    uint32_t v[4];
    tile.LoadATransposed(v, n * kFragment, warp % kGroupWarps * kFragment, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* pair = &sums[2 * n + i / 2][i % 2 * 2];
      UnpackPair<__half>(v[i], pair[0], pair[1]);
    }
  }
}

template <int kGroups, int kStages>
__global__ __launch_bounds__(kGroups* kGroupWarps* kWarpLanes, 1) void ScanKernel(ChunkParams params) {
  constexpr int kColumns = kGroups * kGroupTile;  // of the state, in this block
  constexpr int kBlocksPerHead = kHeadSize / kColumns;
  EFLA_DYNAMIC_SHARED(raw);
  Stage<kGroups>* stages = reinterpret_cast<Stage<kGroups>*>(
      raw + (kGroupTileAlign - SharedAddress(raw) % kGroupTileAlign) % kGroupTileAlign);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int g = lane / 4, t = lane % 4;
  const MixLayer& layer = params.mix.layer;
  const int column_begin = static_cast<int>(blockIdx.x % kBlocksPerHead) * kColumns;
  const int head = static_cast<int>(blockIdx.x / kBlocksPerHead % layer.num_heads);
  const int segment_index =
      params.segment_begin + static_cast<int>(blockIdx.x / kBlocksPerHead / layer.num_heads);
  const Segment segment = params.segments[segment_index];
  const int num_chunks = (segment.num_tokens + kChunkTokens - 1) / kChunkTokens;

  Loader<kGroups> loader;
  loader.channels = layer.conv_channels();
  const __half* rows = static_cast<const __half*>(params.prepared) + segment.token_begin * loader.channels;
  loader.queries = rows + PartChannel(layer, kQuery, head);
  loader.keys = rows + PartChannel(layer, kKey, head);
  loader.values = rows + PartChannel(layer, kValue, head) + column_begin;
  loader.square_stride = static_cast<int64_t>(layer.num_heads) * Loader<kGroups>::kSquare;
  const int64_t first_square =
      (params.first_chunk[segment_index] - params.chunk_begin) * loader.square_stride +
      static_cast<int64_t>(head) * Loader<kGroups>::kSquare;
  loader.inverse = static_cast<const __half*>(params.inverse) + first_square;
  loader.scores = static_cast<const __half*>(params.scores) + first_square;
  loader.num_tokens = segment.num_tokens;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) Loader<kGroups>::ClearAbove(stages[stage]);
  GridDependencyWait();
  GridDependencyTrigger();
#pragma unroll
  for (int chunk = 0; chunk < kStages; ++chunk) {
    loader.Load(stages[chunk], chunk);
    CpAsyncCommit();
  }

  // state[p][n][0..1]: S[64p + 8n + 2t, + 1][g], [2..3]: S[...][g + 8] of this warp's columns.
  Sums state[kKeyParts];
  Left state_left[kKeyParts];
  const int state_column = column_begin + warp * kFragment + g;
  const StateView& view = params.mix.state;
  const int64_t state_offset = view.recurrent_offset + static_cast<int64_t>(head) * (kHeadSize * kHeadSize) +
                               static_cast<int64_t>(2 * t) * kHeadSize + state_column;
  const float* read = view.pool + static_cast<int64_t>(segment.read_slot) * view.slot_stride + state_offset;
#pragma unroll
  for (int p = 0; p < kKeyParts; ++p) {
#pragma unroll
    for (int n = 0; n < 2 * kPartFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state[p][n][i] = read[(p * kGroupTile + 8 * n + i % 2) * kHeadSize + i / 2 * 8];
      }
    }
    Round(state_left[p], state[p]);
  }

  const int out_stride = layer.v_channels();
  float* out = params.mixed + static_cast<int64_t>(segment.token_begin) * out_stride +
               static_cast<int64_t>(2 * t) * out_stride + static_cast<int64_t>(head) * kHeadSize +
               state_column;
  // One half of a chunk's tokens.
  const auto store = [&](const Sums& output, int chunk, int half) {
    const int first = chunk * kChunkTokens + half * (kChunkTokens / 2);
    const int count = segment.num_tokens - first - 2 * t;
    float* to = out + static_cast<int64_t>(first) * out_stride;
#pragma unroll
    for (int n = 0; n < kTokenFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i >= count) continue;
        to[(8 * n + i) * out_stride] = output[half * kTokenFragments + n][i];
        to[(8 * n + i) * out_stride + 8] = output[half * kTokenFragments + n][i + 2];
      }
    }
  };

  // Ends when all but the block's last kPending chunks on their way have arrived.
  const auto arrive = [&](auto pending) {
    CpAsyncWait<decltype(pending)::value>();
    SharedWritesToProducts();
    __syncthreads();
  };
  arrive(std::integral_constant<int, kStages - 2>());

  const auto tile = [](const __half* base) { return GroupTile{const_cast<__half*>(base)}; };
  Sums rest, output, change;
  // V'^T - S^T K'^T of the chunk in `stage`, one part of d_k: adds to V'^T.
  const auto multiply_keys = [&](const Stage<kGroups>& stage, int part) {
    PinSums(rest);
    WarpgroupFence();
#pragma unroll
    for (int k = 0; k < kPartFragments; ++k) {
      MultiplyRows<true>(rest, state_left[part][k], tile(stage.keys[part]), k * kFragment, true, lane);
    }
    WarpgroupCommit();
  };
  // S^T Q^T, likewise: overwrites or adds to the output.
  const auto multiply_queries = [&](const Stage<kGroups>& stage, int part) {
#pragma unroll
    for (int k = 0; k < kPartFragments; ++k) {
      MultiplyRows<false>(output, state_left[part][k], tile(stage.queries[part]), k * kFragment,
                          part > 0 || k > 0, lane);
    }
    WarpgroupCommit();
  };
  // A part of S^T's change, U^T K'.
  const auto multiply_update = [&](const Stage<kGroups>& stage, const Left& update, int part) {
    PinSums(change);
    WarpgroupFence();
#pragma unroll
    for (int k = 0; k < kTokenFragments; ++k) {
      MultiplyColumns(change, update[k], tile(stage.keys[part]), k * kFragment, k > 0, lane);
    }
    WarpgroupCommit();
  };
  const auto add_change = [&](Sums& sums) {
    PinSums(change);
#pragma unroll
    for (int n = 0; n < 2 * kPartFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] += change[n][i];
    }
  };

  LoadValues(rest, stages[0].values[warp / kGroupWarps], warp, lane);
  multiply_keys(stages[0], 0);
  multiply_keys(stages[0], 1);
  WarpgroupWait<0>();
  PinSums(rest);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const Stage<kGroups>& stage = stages[chunk % kStages];
    const Stage<kGroups>& next = stages[(chunk + 1) % kStages];  // after the last chunk: anything
    PinSums(output);
    WarpgroupFence();
    multiply_queries(stage, 0);
    Left left;
    Round(left, rest);

    // U^T, into the place of the rest.
    PinSums(rest);
    WarpgroupFence();
    MultiplySquare(rest, left, tile(stage.inverse), false, lane);
    WarpgroupCommit();
    multiply_queries(stage, 1);
    WarpgroupWait<1>();
    PinSums(rest);
    Left update;
    Round(update, rest);

    multiply_update(stage, update, 0);
    WarpgroupFence();
    MultiplySquare(output, update, tile(stage.scores), true, lane);
    WarpgroupCommit();
    if constexpr (kStages == 2) arrive(std::integral_constant<int, 0>());
    WarpgroupWait<1>();
    add_change(state[0]);
    multiply_update(stage, update, 1);
    Round(state_left[0], state[0]);
    LoadValues(rest, next.values[warp / kGroupWarps], warp, lane);
    multiply_keys(next, 0);
    WarpgroupWait<2>();
    PinSums(output);
    store(output, chunk, 0);
    WarpgroupWait<1>();
    add_change(state[1]);
    Round(state_left[1], state[1]);
    multiply_keys(next, 1);
    store(output, chunk, 1);
    // Once every warp is here, this chunk's buffer is free, and the chunk after the next has arrived.
    if constexpr (kStages == 2) {
      __syncthreads();
    } else {
      arrive(std::integral_constant<int, kStages - 3>());
    }
    loader.Load(stages[chunk % kStages], chunk + kStages);
    CpAsyncCommit();
    WarpgroupWait<0>();
    PinSums(rest);
  }

  float* write = view.pool + static_cast<int64_t>(segment.write_slot) * view.slot_stride + state_offset;
#pragma unroll
  for (int p = 0; p < kKeyParts; ++p) {
#pragma unroll
    for (int n = 0; n < 2 * kPartFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        write[(p * kGroupTile + 8 * n + i % 2) * kHeadSize + i / 2 * 8] = state[p][n][i];
      }
    }
  }
}

template <int kGroups, int kStages>
constexpr size_t SharedBytes() {
  return kStages * sizeof(Stage<kGroups>) + kGroupTileAlign;
}

template <int kGroups, int kStages>
cudaError_t LaunchGroups(const LaunchContext& context, const ChunkParams& params) {
  constexpr int kBlocksPerHead = kHeadSize / (kGroups * kGroupTile);
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(params.num_segments) * params.mix.layer.num_heads * kBlocksPerHead),
      .block = dim3(kGroups * kGroupWarps * kWarpLanes),
      .shared_bytes = SharedBytes<kGroups, kStages>()};
  return Launch(context, shape, ScanKernel<kGroups, kStages>, params);
}

}  // namespace

cudaError_t LaunchChunkScan(const LaunchContext& context, const ChunkParams& params) {
  // Few heads are spread over more, narrower blocks.
  const int heads = params.num_segments * params.mix.layer.num_heads;
  if (!context.hopper) return LaunchGroups<1, 2>(context, params);
  if (heads * 2 <= context.multiprocessors) return LaunchGroups<1, 4>(context, params);
  return LaunchGroups<2, 3>(context, params);
}

}  // namespace efla::cuda
