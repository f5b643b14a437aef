// out[r][n] = sum over k of y[r][k] weight[n][k] for up to 16 rows, with the outputs of LinearParams, and
// from x float32 with its norm for up to kMaxFusedNormRows.
//
// Shapes: y act [rows, cols] (or x float32 [rows, cols]), weight act [outputs, cols]. Bound by the weight's
// bytes: a block owns kTiles 8-row tiles of the weight, a warp one run of cols (linear.cuh); the weight goes
// from memory to registers, the first kBatch column blocks before the wait for the predecessor. With the
// norm, every block normalises the rows itself, and further blocks compute the coefficient columns. Bytes:
// outputs * cols * 2, and rows * cols * 2 (with the norm, * 4) from L2 for each block.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kNarrowThreads = kSlices * kWarpLanes;
static_assert(kNarrowThreads == kNormThreads, "the fused norm is computed by the product's warps");
// Rows in shared memory lie this many elements further apart than cols: 8 rows' vectors then meet no bank
// twice.
constexpr int kNarrowRowPad = 32;

template <typename Act, typename Stored>
__device__ inline void StoreNormalized(Stored* row, int vector, const float4& v) {
  if constexpr (sizeof(Stored) == sizeof(float)) {
    reinterpret_cast<float4*>(row)[vector] = v;
  } else {
    reinterpret_cast<uint2*>(row)[vector] = {PackPair<Act>(v.x, v.y), PackPair<Act>(v.z, v.w)};
  }
}

// Normalises the rows into shared memory as act (for the product) or float32 (for the coefficients).
template <typename Act, typename Stored>
__device__ void NormalizeRows(const LinearParams& params, Stored* rows, int stride,
                              float (&parts)[kMaxFusedNormRows][kNormWarps]) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int cols = params.cols;
  // One row stays in registers between the two passes where a lane has at most kHeldVectors of it.
  constexpr int kHeldVectors = 2;
  const int vectors = cols / 4;
  if (params.num_rows == 1 && vectors <= kHeldVectors * kNarrowThreads) {
    const int begin = static_cast<int>(static_cast<int64_t>(vectors) * warp / kNormWarps) + lane;
    const int end = static_cast<int>(static_cast<int64_t>(vectors) * (warp + 1) / kNormWarps);
    float4 v[kHeldVectors], w[kHeldVectors];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeldVectors; ++i) {
      const int vector = begin + i * kWarpLanes;
      v[i] = w[i] = {};
      if (vector < end) {
        v[i] = reinterpret_cast<const float4*>(params.x)[vector];
        w[i] = reinterpret_cast<const float4*>(params.norm)[vector];
      }
    }
#pragma unroll
    for (int i = 0; i < kHeldVectors; ++i) {  // as PartialSumSquares: zeros change nothing
      sum = fmaf(v[i].x, v[i].x, sum);
      sum = fmaf(v[i].y, v[i].y, sum);
      sum = fmaf(v[i].z, v[i].z, sum);
      sum = fmaf(v[i].w, v[i].w, sum);
    }
    sum = WarpSum(sum);
    if (lane == 0) parts[0][warp] = sum;
    __syncthreads();
    const float scale = NormScale(parts[0], cols, params.eps);
#pragma unroll
    for (int i = 0; i < kHeldVectors; ++i) {
      const int vector = begin + i * kWarpLanes;
      if (vector >= end) break;
      const float4 y = {v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z,
                        v[i].w * scale * w[i].w};
      StoreNormalized<Act>(rows, vector, y);
    }
    __syncthreads();
    return;
  }
  for (int row = 0; row < params.num_rows; ++row) {
    const float part = PartialSumSquares(params.x + static_cast<int64_t>(row) * cols, cols, warp, lane);
    if (lane == 0) parts[row][warp] = part;
  }
  __syncthreads();
  for (int row = 0; row < params.num_rows; ++row) {
    const float scale = NormScale(parts[row], cols, params.eps);
    const float* x = params.x + static_cast<int64_t>(row) * cols;
    for (int i = threadIdx.x; i < cols / 4; i += kNarrowThreads) {
      StoreNormalized<Act>(rows + row * stride, i, Normalized(x, params.norm, scale, i));
    }
  }
  __syncthreads();
}

// kWhole: no run has more than kBatch column blocks.
template <typename Act, bool kNorm, bool kUpperRows, int kTiles, int kBatch, bool kWhole>
__global__ __launch_bounds__(kNarrowThreads, 2) void NarrowKernel(LinearParams params, int tile_blocks) {
  static_assert(!(kNorm && kUpperRows), "the norm is fused for at most 8 rows");
  EFLA_DYNAMIC_SHARED(shared);
  __shared__ float sums[kSlices][kTiles][kTileM][kTileN];
  __shared__ float parts[kMaxFusedNormRows][kNormWarps];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int cols = params.cols;

  if (kNorm && static_cast<int>(blockIdx.x) >= tile_blocks) {
    // A block of coefficient columns, one a warp.
    GridDependencyWait();
    GridDependencyTrigger();
    float* rows = reinterpret_cast<float*>(shared);
    NormalizeRows<Act>(params, rows, cols, parts);
    const int column = (static_cast<int>(blockIdx.x) - tile_blocks) * kNormWarps + warp;
    if (column >= params.coef_columns) return;
    const Act* weight = static_cast<const Act*>(params.coef_weight) + static_cast<int64_t>(column) * cols;
    for (int row = 0; row < params.num_rows; ++row) {
      float sum[1];
      CoefDots<Act, 1>(rows + row * cols, cols, weight, cols, lane, sum);
      if (lane == 0) params.coef[row * params.coef_columns + column] = sum[0];
    }
    return;
  }

  const int g = lane / 4, t = lane % 4;
  const int64_t output_begin = static_cast<int64_t>(blockIdx.x) * (kTiles * kTileN);
  const int blocks = (cols + kBlockCols - 1) / kBlockCols;
  const int block_begin = SliceBegin(blocks, warp), block_end = SliceBegin(blocks, warp + 1);
  const Act* weight = static_cast<const Act*>(params.weight);
  const auto load_weights = [&](int block, uint4(&loaded)[kBatch][kTiles]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int k = (block + i) * kBlockCols + t * kVectorCols;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int64_t output = output_begin + tile * kTileN + g;
        const bool valid = block + i < block_end && k < cols && output < params.outputs;
        loaded[i][tile] = valid ? LoadStream16(weight + output * cols + k) : uint4{0, 0, 0, 0};
      }
    }
  };
  uint4 current[kBatch][kTiles];
  load_weights(block_begin, current);  // constants: no need to wait for them

  GridDependencyWait();
  GridDependencyTrigger();
  const Act* y = static_cast<const Act*>(params.y);
  int stride = cols;
  if constexpr (kNorm) {
    Act* rows = reinterpret_cast<Act*>(shared);
    stride = cols + kNarrowRowPad;
    NormalizeRows<Act>(params, rows, stride, parts);
    y = rows;
  }

  float acc[kTiles][4] = {};
  for (int block = block_begin; block < block_end; block += kBatch) {
    uint4 next[kBatch][kTiles];
    if constexpr (!kWhole) load_weights(block + kBatch, next);
    uint4 low[kBatch], high[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int k = (block + i) * kBlockCols + t * kVectorCols;
      const bool valid = block + i < block_end && k < cols;
      low[i] = high[i] = uint4{0, 0, 0, 0};
      if (valid && g < params.num_rows) {
        low[i] = *reinterpret_cast<const uint4*>(y + static_cast<int64_t>(g) * stride + k);
      }
      if (kUpperRows && valid && g + 8 < params.num_rows) {
        high[i] = *reinterpret_cast<const uint4*>(y + static_cast<int64_t>(g + 8) * stride + k);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (block + i >= block_end) break;
      const uint32_t first[4] = {low[i].x, high[i].x, low[i].y, high[i].y};
      const uint32_t second[4] = {low[i].z, high[i].z, low[i].w, high[i].w};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Mma<Act>(acc[tile], first, current[i][tile].x, current[i][tile].y);
        Mma<Act>(acc[tile], second, current[i][tile].z, current[i][tile].w);
      }
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) current[i][tile] = next[i][tile];
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    *reinterpret_cast<float2*>(&sums[warp][tile][g][2 * t]) = {acc[tile][0], acc[tile][1]};
    *reinterpret_cast<float2*>(&sums[warp][tile][g + 8][2 * t]) = {acc[tile][2], acc[tile][3]};
  }
  __syncthreads();
  const auto total = [&](int tile, int row, int column) {
    float sum = 0.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; slice += 2) {
      sum += sums[slice][tile][row][column] + sums[slice + 1][tile][row][column];
    }
    return sum;
  };
  const bool gated = params.output == LinearOutput::kGatedSilu;
  const int store_tiles = gated ? kTiles / 2 : kTiles;
  for (int i = threadIdx.x; i < params.num_rows * store_tiles * kTileN; i += kNarrowThreads) {
    const int column = i % kTileN, tile = i / kTileN % store_tiles, row = i / (kTileN * store_tiles);
    if (gated) {
      const int64_t output = output_begin / 2 + tile * kTileN + column;
      const float gate = total(2 * tile, row, column), up = total(2 * tile + 1, row, column);
      StoreOutput<Act>(params, row, output, Silu(gate) * up);
    } else {
      StoreOutput<Act>(params, row, output_begin + tile * kTileN + column, total(tile, row, column));
    }
  }
}

// As many column blocks at once as the registers hold beside the rows.
constexpr int BatchBlocks(int tiles, bool upper_rows, bool whole) {
  if (!whole) return upper_rows && tiles == 1 ? 4 : 8 / tiles;
  return tiles == 1 ? upper_rows ? 6 : 12 : 4;
}

template <typename Act, bool kNorm, bool kUpperRows, int kTiles>
cudaError_t LaunchBatch(const LaunchContext& context, const LaunchShape& shape, const LinearParams& params,
                        int tile_blocks) {
  const int blocks = (params.cols + kBlockCols - 1) / kBlockCols;
  constexpr int kWholeBlocks = BatchBlocks(kTiles, kUpperRows, true);
  if ((blocks + kSlices - 1) / kSlices <= kWholeBlocks) {
    return Launch(context, shape, NarrowKernel<Act, kNorm, kUpperRows, kTiles, kWholeBlocks, true>, params,
                  tile_blocks);
  }
  return Launch(context, shape,
                NarrowKernel<Act, kNorm, kUpperRows, kTiles, BatchBlocks(kTiles, kUpperRows, false), false>,
                params, tile_blocks);
}

template <typename Act, int kTiles>
cudaError_t LaunchNarrow(const LaunchContext& context, const LinearParams& params) {
  const int64_t tile_outputs = kTiles * kTileN;
  const int tile_blocks = static_cast<int>((params.outputs + tile_outputs - 1) / tile_outputs);
  LaunchShape shape;
  shape.grid = dim3(tile_blocks);
  shape.block = dim3(kNarrowThreads);
  if (params.norm != nullptr) {
    const int coef_blocks = (params.coef_columns + kNormWarps - 1) / kNormWarps;
    shape.grid = dim3(tile_blocks + coef_blocks);
    const size_t row_bytes = coef_blocks > 0 ? params.cols * sizeof(float) : 0;
    const size_t padded_bytes = (params.cols + kNarrowRowPad) * sizeof(Act);
    shape.shared_bytes = params.num_rows * (row_bytes > padded_bytes ? row_bytes : padded_bytes);
    return LaunchBatch<Act, true, false, kTiles>(context, shape, params, tile_blocks);
  }
  if (params.num_rows <= kTileM / 2) {
    return LaunchBatch<Act, false, false, kTiles>(context, shape, params, tile_blocks);
  }
  return LaunchBatch<Act, false, true, kTiles>(context, shape, params, tile_blocks);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const LinearParams& params) {
  const int64_t wave = context.multiprocessors;
  // As many tiles a block as still leave a block for each multiprocessor; gate and up need two.
  constexpr int kWideTiles = 4, kPairTiles = 2;
  if (params.outputs >= wave * kWideTiles * kTileN) return LaunchNarrow<Act, kWideTiles>(context, params);
  if (params.output == LinearOutput::kGatedSilu || params.outputs >= wave * kPairTiles * kTileN) {
    return LaunchNarrow<Act, kPairTiles>(context, params);
  }
  return LaunchNarrow<Act, 1>(context, params);
}

}  // namespace

cudaError_t LaunchLinearNarrow(const LaunchContext& context, const LinearParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
