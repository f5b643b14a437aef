// out[r][n] = sum over k of y[r][k] weight[n][k] for up to 16 rows a block, with the outputs of LinearParams,
// and from x float32 with its norm for up to kMaxFusedNormRows.
//
// Shapes: y act [rows, cols] (or x float32 [rows, cols]), weight act [outputs, cols]. Bound by the weight's
// bytes: a block owns kTiles 8-row tiles of the weight, a warp one run of cols (linear.cuh). Each warp keeps
// a ring of stages in shared memory, 64 columns each, filled by asynchronous copies; the weight's first
// stages are asked for before the wait for the predecessor. With the norm, every block normalises the rows
// itself, and further blocks compute the coefficient columns. Bytes: outputs * cols * 2, and rows * cols * 2
// (with the norm, * 4) from L2 for each block.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kNarrowThreads = kSlices * kWarpLanes;
static_assert(kNarrowThreads == kNormThreads, "the fused norm is computed by the product's warps");
constexpr int kRowVectors = kBlockCols / kVectorCols;  // of a row within a column block

// Elements from one normalised row in shared memory to the next: an odd number of 16-byte vectors, so that
// the same vector of 8 rows meets no bank twice, and whole column blocks.
__host__ __device__ inline int NormalizedStride(int cols) {
  return (cols + kBlockCols - 1) / kBlockCols * kBlockCols + kVectorCols;
}

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

template <bool kNorm, bool kUpperRows, int kTiles, int kStages>
struct NarrowShape {
  static constexpr int kInputRows = kNorm ? 0 : kUpperRows ? kTileM : kTileM / 2;
  static constexpr int kStageVectors = (kTiles * kTileN + kInputRows) * kRowVectors;
  static constexpr int kRingVectors = kSlices * kStages * kStageVectors;
};

// kStages: of each warp's ring. Rows kTileM * blockIdx.y and on; with kUpperRows up to 16 of them, else 8.
template <typename Act, bool kNorm, bool kUpperRows, int kTiles, int kStages>
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

  using Shape = NarrowShape<kNorm, kUpperRows, kTiles, kStages>;
  constexpr int kWeightRows = kTiles * kTileN;
  uint4* ring = reinterpret_cast<uint4*>(shared) + warp * (kStages * Shape::kStageVectors);
  const int64_t output_begin = static_cast<int64_t>(blockIdx.x) * kWeightRows;
  const int64_t row_begin = static_cast<int64_t>(blockIdx.y) * kTileM;
  const int num_rows =
      static_cast<int>(params.num_rows - row_begin < kTileM ? params.num_rows - row_begin : kTileM);
  const int blocks = (cols + kBlockCols - 1) / kBlockCols;
  const int block_begin = SliceBegin(blocks, warp), block_end = SliceBegin(blocks, warp + 1);

  // Copies 64 columns of `count` rows. Eight lanes take the vectors of a row; vector v of row r lies at v ^ r
  // % 8, so that the same vector of 8 rows meets no bank twice.
  const int load_row = lane / kRowVectors, load_vector = lane % kRowVectors;
  constexpr int kLoadRows = kWarpLanes / kRowVectors;
  const auto load = [&](uint4* to, const void* matrix, int64_t first, int64_t end, int count, int block) {
    const int k = block * kBlockCols + load_vector * kVectorCols;
    const int64_t left = end - first;
    const int valid_rows = k < cols ? static_cast<int>(left < count ? left : count) : 0;
    const Act* from = static_cast<const Act*>(matrix) + first * cols + k;
#pragma unroll
    for (int i = 0; i < count; i += kLoadRows) {
      const int row = i + load_row;
      const bool valid = row < valid_rows;
      CpAsync16(to + row * kRowVectors + (load_vector ^ row % kRowVectors),
                valid ? from + static_cast<int64_t>(row) * cols : matrix, valid);
    }
  };
  const auto load_weight = [&](int block, int stage) {
    load(ring + stage * Shape::kStageVectors, params.weight, output_begin, params.outputs, kWeightRows,
         block);
  };
  const auto load_input = [&](int block, int stage) {
    if constexpr (!kNorm) {
      load(ring + stage * Shape::kStageVectors + kWeightRows * kRowVectors, params.y, row_begin,
           params.num_rows, Shape::kInputRows, block);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (block_begin + i < block_end) load_weight(block_begin + i, i);  // constants: no need to wait for them
  }
  GridDependencyWait();
  GridDependencyTrigger();
  Act* normalized = reinterpret_cast<Act*>(reinterpret_cast<uint4*>(shared) + Shape::kRingVectors);
  const int stride = NormalizedStride(cols);
  if constexpr (kNorm) {
    // Zeros up to the last column block's end; NormalizeRows ends with a barrier.
    for (int i = threadIdx.x; i < num_rows * (blocks * kBlockCols - cols); i += kNarrowThreads) {
      normalized[i % num_rows * stride + cols + i / num_rows] = FromFloat<Act>(0.0f);
    }
    NormalizeRows<Act>(params, normalized, stride, parts);
  }
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (block_begin + i < block_end) load_input(block_begin + i, i);
    CpAsyncCommit();  // the first group holds all the weights so far
  }

  const int g = lane / 4, t = lane % 4;
  const int matrix_row = lane % 8, matrix = lane / 8;  // LdMatrix4: lane l names a row of matrix l / 8
  float acc[kTiles][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int block = block_begin; block < block_end; ++block) {
    CpAsyncWait<kStages - 1>();
    __syncwarp();
    const uint4* weight = ring + stage * Shape::kStageVectors;
    const uint4* input = weight + kWeightRows * kRowVectors;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 columns: four vectors, two matrix instructions
      const int vector = half * 4 + matrix;
      uint32_t low[4], high[4] = {};
      if constexpr (kNorm) {
        const int row = matrix_row < num_rows ? matrix_row : 0;  // the others' sums are dropped
        LdMatrix4(low, normalized + row * stride + block * kBlockCols + vector * kVectorCols);
      } else {
        LdMatrix4(low, input + matrix_row * kRowVectors + (vector ^ matrix_row));
        if (kUpperRows) LdMatrix4(high, input + (matrix_row + 8) * kRowVectors + (vector ^ matrix_row));
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t w[4];
        LdMatrix4(w, weight + (tile * kTileN + matrix_row) * kRowVectors + (vector ^ matrix_row));
        Mma<Act>(acc[tile], {low[0], high[0], low[1], high[1]}, w[0], w[1]);
        Mma<Act>(acc[tile], {low[2], high[2], low[3], high[3]}, w[2], w[3]);
      }
    }
    if (block + kStages < block_end) {
      __syncwarp();  // everyone has read the stage
      load_weight(block + kStages, stage);
      load_input(block + kStages, stage);
    }
    CpAsyncCommit();
    if (++stage == kStages) stage = 0;
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    *reinterpret_cast<float2*>(&sums[warp][tile][g][2 * t]) = {acc[tile][0], acc[tile][1]};
    *reinterpret_cast<float2*>(&sums[warp][tile][g + 8][2 * t]) = {acc[tile][2], acc[tile][3]};
  }
  __syncthreads();
  const auto total = [&](int tile, int row, int column) {
    const auto quad = [&](int slice) {
      float sum = sums[slice][tile][row][column];
#pragma unroll
      for (int i = 1; i < kSlices / 2; ++i) sum += sums[slice + i][tile][row][column];
      return sum;
    };
    return quad(0) + quad(kSlices / 2);
  };
  const bool gated = params.output == LinearOutput::kGatedSilu;
  const int store_tiles = gated ? kTiles / 2 : kTiles;
  for (int i = threadIdx.x; i < num_rows * store_tiles * kTileN; i += kNarrowThreads) {
    const int column = i % kTileN, tile = i / kTileN % store_tiles, row = i / (kTileN * store_tiles);
    if (gated) {
      const int64_t output = output_begin / 2 + tile * kTileN + column;
      const float gate = total(2 * tile, row, column), up = total(2 * tile + 1, row, column);
      StoreOutput<Act>(params, row_begin + row, output, Silu(gate) * up);
    } else {
      StoreOutput<Act>(params, row_begin + row, output_begin + tile * kTileN + column,
                       total(tile, row, column));
    }
  }
}

template <typename Act, bool kNorm, bool kUpperRows, int kTiles>
cudaError_t LaunchStages(const LaunchContext& context, LaunchShape shape, const LinearParams& params,
                         int tile_blocks, size_t norm_bytes) {
  // The ring: short runs whole, of long ones what two blocks a multiprocessor need to keep the memory busy.
  constexpr int kLong = kTiles == 4 ? 3 : kTiles == 2 ? 4 : 6, kShort = 2;
  const int blocks = (params.cols + kBlockCols - 1) / kBlockCols;
  const auto launch = [&](auto shape_type, auto kernel) {
    shape.shared_bytes = decltype(shape_type)::kRingVectors * sizeof(uint4) + norm_bytes;
    return Launch(context, shape, kernel, params, tile_blocks);
  };
  if (blocks <= kSlices * kShort) {
    return launch(NarrowShape<kNorm, kUpperRows, kTiles, kShort>(),
                  NarrowKernel<Act, kNorm, kUpperRows, kTiles, kShort>);
  }
  return launch(NarrowShape<kNorm, kUpperRows, kTiles, kLong>(),
                NarrowKernel<Act, kNorm, kUpperRows, kTiles, kLong>);
}

template <typename Act, int kTiles>
cudaError_t LaunchNarrow(const LaunchContext& context, const LinearParams& params) {
  const int64_t tile_outputs = kTiles * kTileN;
  const int tile_blocks = static_cast<int>((params.outputs + tile_outputs - 1) / tile_outputs);
  LaunchShape shape;
  shape.grid = dim3(tile_blocks, (params.num_rows + kTileM - 1) / kTileM);
  shape.block = dim3(kNarrowThreads);
  if (params.norm != nullptr) {
    const int coef_blocks = (params.coef_columns + kNormWarps - 1) / kNormWarps;
    shape.grid = dim3(tile_blocks + coef_blocks);
    // The coefficients' blocks keep the rows as float32, in place of the ring.
    const size_t float_bytes = coef_blocks > 0 ? params.cols * sizeof(float) : 0;
    const size_t act_bytes = NormalizedStride(params.cols) * sizeof(Act);
    return LaunchStages<Act, true, false, kTiles>(
        context, shape, params, tile_blocks,
        params.num_rows * (float_bytes > act_bytes ? float_bytes : act_bytes));
  }
  if (params.num_rows <= kTileM / 2) {
    return LaunchStages<Act, false, false, kTiles>(context, shape, params, tile_blocks, 0);
  }
  return LaunchStages<Act, false, true, kTiles>(context, shape, params, tile_blocks, 0);
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
