// What a chunk needs that does not depend on the state:
//
//   T = (I + tril(K' K'^T, -1))^-1,  P = tril(Q K'^T)
//
// Shapes: prepared float16 [tokens, q|k|v]; T and P float16 [chunks, heads, 64, 64], of which the 16 x 16
// blocks on and below the diagonal are written. Rows and columns of tokens beyond the segment are those of
// the identity (T), zero (P). A block owns one head of one chunk, a warp 16 of its tokens. Products on the
// matrix units, float16 in, float32 sums.
//
// The inverse: each warp inverts one 16 x 16 diagonal block by forward substitution in float32, a lane one
// column; then warp j computes the blocks below T_jj, T_ij = -T_ii sum_{m=j}^{i-1} A_im T_mj, as transposes:
// T_mj^T is then a left operand as it comes out of the product before. Not a Neumann series: the powers of A
// grow like binomials before they cancel, and keys that repeat make float16 overflow. Bytes: 4 * 64 * 128
// read, 2 * 5120 written.
#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kHeadSize = 128;
constexpr int kBlocks = kChunkTokens / kFragment;  // diagonal blocks, and warps
constexpr int kThreads = kBlocks * kWarpLanes;
constexpr int kDiagonalStride = kFragment + 4;  // floats; 16-byte aligned rows

struct Shared {
  __half keys[kChunkTokens * kHeadSize];
  __half queries[kChunkTokens * kHeadSize];
  __half below[kChunkTokens * kChunkTokens];    // A's blocks below the diagonal
  __half inverse[kChunkTokens * kChunkTokens];  // T
  __half scores[kChunkTokens * kChunkTokens];   // P
  float diagonal[kBlocks][kFragment][kDiagonalStride];
};

__global__ __launch_bounds__(kThreads) void InverseKernel(ChunkParams params) {
  EFLA_DYNAMIC_SHARED(raw);
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const HalfTile<kHeadSize> keys = {shared.keys}, queries = {shared.queries};
  const HalfTile<kChunkTokens> below = {shared.below}, inverse = {shared.inverse}, scores = {shared.scores};
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int g = lane / 4, t = lane % 4;
  const MixLayer& layer = params.mix.layer;
  const int head = static_cast<int>(blockIdx.x % layer.num_heads);
  const Chunk chunk = params.chunks[params.chunk_begin + blockIdx.x / layer.num_heads];
  const int64_t channels = layer.conv_channels();
  GridDependencyWait();
  GridDependencyTrigger();

  const __half* rows = static_cast<const __half*>(params.prepared) + chunk.token_begin * channels;
  constexpr int kRowVectors = kHeadSize / kTileVector;
  for (int i = threadIdx.x; i < kChunkTokens * kRowVectors; i += kThreads) {
    const int token = i / kRowVectors, vector = i % kRowVectors;
    const bool valid = token < chunk.num_tokens;
    const __half* row = rows + (valid ? token * channels : 0) + vector * kTileVector;
    CpAsync16(keys.Vector(token, vector), row + PartChannel(layer, kKey, head), valid);
    CpAsync16(queries.Vector(token, vector), row + PartChannel(layer, kQuery, head), valid);
  }
  CpAsyncCommit();
  CpAsyncWait<0>();
  __syncthreads();

  const int row = warp * kFragment;
  uint32_t key_rows[kHeadSize / kFragment][4], query_rows[kHeadSize / kFragment][4];
#pragma unroll
  for (int k = 0; k < kHeadSize / kFragment; ++k) {
    keys.LoadA(key_rows[k], row, k * kFragment, lane);
    queries.LoadA(query_rows[k], row, k * kFragment, lane);
  }
  for (int block = 0; block <= warp; ++block) {
    float key_dots[2][4] = {}, query_dots[2][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadSize / kFragment; ++k) {
      uint32_t b[4];
      keys.LoadB(b, block * kFragment, k * kFragment, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Mma<__half>(key_dots[half], key_rows[k], b[2 * half], b[2 * half + 1]);
        Mma<__half>(query_dots[half], query_rows[k], b[2 * half], b[2 * half + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = g + i / 2 * 8, n = half * 8 + 2 * t + i % 2;  // within the block
        const bool on_diagonal = block == warp;
        if (on_diagonal) {
          shared.diagonal[warp][m][n] = m > n ? key_dots[half][i] : 0.0f;
        } else {
          *below.At(row + m, block * kFragment + n) = FromFloat<__half>(key_dots[half][i]);
        }
        *scores.At(row + m, block * kFragment + n) =
            FromFloat<__half>(!on_diagonal || m >= n ? query_dots[half][i] : 0.0f);
      }
    }
  }
  __syncwarp();

  // Column `lane % 16` of the diagonal block's inverse; both halves of the warp compute the same.
  {
    const int column = lane % kFragment;
    float x[kFragment];
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; ++m) sum = fmaf(-shared.diagonal[warp][i][m], x[m], sum);
      x[i] = sum;
      if (lane < kFragment) *inverse.At(row + i, row + column) = FromFloat<__half>(sum);
    }
  }
  __syncthreads();

  if (warp + 1 < kBlocks) {
    uint32_t column_blocks[kBlocks][4];  // T_mj^T for m = j + index
    inverse.LoadATransposed(column_blocks[0], row, row, lane);
#pragma unroll
    for (int distance = 1; distance < kBlocks; ++distance) {
      const int i = warp + distance;
      if (i >= kBlocks) break;
      float sums[2][4] = {};
#pragma unroll
      for (int e = 0; e < distance; ++e) {
        uint32_t b[4];
        below.LoadB(b, i * kFragment, (warp + e) * kFragment, lane);
        Mma<__half>(sums[0], column_blocks[e], b[0], b[1]);
        Mma<__half>(sums[1], column_blocks[e], b[2], b[3]);
      }
      uint32_t a[4], b[4];
      ToFragmentA(a, sums[0], sums[1]);
      inverse.LoadB(b, i * kFragment, i * kFragment, lane);
      float result[2][4] = {};
      Mma<__half>(result[0], a, b[0], b[1]);
      Mma<__half>(result[1], a, b[2], b[3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          result[half][c] = -result[half][c];
          *inverse.At(i * kFragment + half * 8 + 2 * t + c % 2, row + g + c / 2 * 8) =
              FromFloat<__half>(result[half][c]);
        }
      }
      ToFragmentA(column_blocks[distance], result[0], result[1]);
    }
  }
  __syncthreads();

  const int64_t tile = static_cast<int64_t>(blockIdx.x) * (kChunkTokens * kChunkTokens);
  __half* inverse_out = static_cast<__half*>(params.inverse) + tile;
  __half* scores_out = static_cast<__half*>(params.scores) + tile;
  constexpr int kVectors = kChunkTokens / kTileVector;
  for (int i = threadIdx.x; i < kChunkTokens * kVectors; i += kThreads) {
    const int token = i / kVectors, vector = i % kVectors;
    if (vector * kTileVector / kFragment > token / kFragment) continue;
    *reinterpret_cast<uint4*>(inverse_out + i * kTileVector) =
        *reinterpret_cast<const uint4*>(inverse.Vector(token, vector));
    *reinterpret_cast<uint4*>(scores_out + i * kTileVector) =
        *reinterpret_cast<const uint4*>(scores.Vector(token, vector));
  }
}

}  // namespace

cudaError_t LaunchChunkInverse(const LaunchContext& context, const ChunkParams& params) {
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(params.num_chunks) * params.mix.layer.num_heads),
      .block = dim3(kThreads),
      .shared_bytes = sizeof(Shared)};
  return Launch(context, shape, InverseKernel, params);
}

}  // namespace efla::cuda
