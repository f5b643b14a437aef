// The products of decode and of the head: out[r][n] = sum over k of y[r][k] weight[n][k], with four outputs:
// the act type, float32, float32 added to, and silu(gate) up of interleaved rows.
//
// Shapes: y act [rows, cols] (or x float32 with its norm), weight act [outputs, cols].
//
// Exactness: one order of summation for each output, whatever the number of rows and whichever kernel
// computes it. cols is cut into blocks of 32 and the blocks into kSlices runs; a run is summed by matrix
// instructions in ascending order from zero, 16 columns at a time; the runs' sums are added in ascending
// order in float32. Within a block, lane t of a quad takes columns 8t to 8t + 7 in one 16-byte load: the
// first four for the block's first matrix instruction, the others for its second.
//
// NarrowKernel, up to 16 rows: bound by the weight's bytes. A block owns kTiles 8-row tiles of the weight, a
// warp one run of cols; the weight goes from memory to registers, the first loads before the wait for the
// predecessor. Up to kMaxFusedNormRows rows it can normalise the rows itself, in every block, and further
// blocks compute the coefficient columns. Bytes: outputs * cols * 2, and rows * cols * 2 from L2 for each
// block.
//
// TiledKernel, more rows: a block owns a kTileRows x kTileOutputs tile and walks cols 64 at a time through
// kStages buffers in shared memory. A warp's sums live twice in registers: of the current run, and of the
// finished ones.
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/efla_math.h"

namespace efla::cuda {
namespace {

constexpr int kSlices = 8;
constexpr int kBlockCols = 32;
constexpr int kVectorCols = 8;  // of a 16-byte load
constexpr int kTileN = 8;       // weight rows of a matrix instruction
constexpr int kTileM = 16;      // rows of a matrix instruction

__device__ inline int SliceBegin(int blocks, int slice) { return blocks * slice / kSlices; }

template <typename Act>
__device__ inline void StoreOutput(const LinearParams& params, int row, int64_t output, float sum) {
  if (output >= params.out_columns) return;
  const int64_t index = row * params.out_columns + output;
  switch (params.output) {
    case LinearOutput::kAct:
      static_cast<Act*>(params.out)[index] = FromFloat<Act>(sum);
      break;
    case LinearOutput::kFloat:
      static_cast<float*>(params.out)[index] = sum;
      break;
    case LinearOutput::kAddFloat:
      static_cast<float*>(params.out)[index] += sum;
      break;
    case LinearOutput::kGatedSilu:
      break;  // stored by pairs
  }
}

// --- Up to 16 rows ---

constexpr int kNarrowThreads = kSlices * kWarpLanes;
static_assert(kNarrowThreads == kNormThreads, "the fused norm is computed by the product's warps");
constexpr int kNarrowBatchLoads = 8;  // weight vectors that a lane has in flight
// Rows in shared memory lie this many elements further apart than cols: 8 rows' vectors then meet no bank
// twice.
constexpr int kNarrowRowPad = 32;

// Normalises the rows into shared memory as act (for the product) or float32 (for the coefficients).
template <typename Act, typename Stored>
__device__ void NormalizeRows(const LinearParams& params, Stored* rows, int stride,
                              float (&parts)[kMaxFusedNormRows][kNormWarps]) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int cols = params.cols;
  for (int row = 0; row < params.num_rows; ++row) {
    const float part = PartialSumSquares(params.x + static_cast<int64_t>(row) * cols, cols, warp, lane);
    if (lane == 0) parts[row][warp] = part;
  }
  __syncthreads();
  for (int row = 0; row < params.num_rows; ++row) {
    const float scale = NormScale(parts[row], cols, params.eps);
    const float* x = params.x + static_cast<int64_t>(row) * cols;
    for (int i = threadIdx.x; i < cols / 4; i += kNarrowThreads) {
      const float4 v = Normalized(x, params.norm, scale, i);
      if constexpr (sizeof(Stored) == sizeof(float)) {
        reinterpret_cast<float4*>(rows + row * stride)[i] = v;
      } else {
        const uint2 packed = {PackPair<Act>(v.x, v.y), PackPair<Act>(v.z, v.w)};
        reinterpret_cast<uint2*>(rows + row * stride)[i] = packed;
      }
    }
  }
  __syncthreads();
}

template <typename Act, bool kNorm, bool kUpperRows, int kTiles>
__global__ __launch_bounds__(kNarrowThreads, 2) void NarrowKernel(LinearParams params, int tile_blocks) {
  static_assert(!(kNorm && kUpperRows), "the norm is fused for at most 8 rows");
  // Column blocks; half as many where a lane's registers also hold the upper rows of a single tile.
  constexpr int kBatch = kNarrowBatchLoads / (kUpperRows && kTiles == 1 ? 2 : kTiles);
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
    load_weights(block + kBatch, next);
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
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) current[i][tile] = next[i][tile];
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
    for (int slice = 0; slice < kSlices; ++slice) sum += sums[slice][tile][row][column];
    return sum;
  };
  const bool gated = params.output == LinearOutput::kGatedSilu;
  const int store_tiles = gated ? kTiles / 2 : kTiles;
  for (int i = threadIdx.x; i < params.num_rows * store_tiles * kTileN; i += kNarrowThreads) {
    const int column = i % kTileN, tile = i / kTileN % store_tiles, row = i / (kTileN * store_tiles);
    if (gated) {
      const int64_t output = output_begin / 2 + tile * kTileN + column;
      const float gate = total(2 * tile, row, column), up = total(2 * tile + 1, row, column);
      if (output < params.out_columns) {
        static_cast<Act*>(params.out)[row * params.out_columns + output] = FromFloat<Act>(Silu(gate) * up);
      }
    } else {
      StoreOutput<Act>(params, row, output_begin + tile * kTileN + column, total(tile, row, column));
    }
  }
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
    return Launch(context, shape, NarrowKernel<Act, true, false, kTiles>, params, tile_blocks);
  }
  if (params.num_rows <= kTileM / 2) {
    return Launch(context, shape, NarrowKernel<Act, false, false, kTiles>, params, tile_blocks);
  }
  return Launch(context, shape, NarrowKernel<Act, false, true, kTiles>, params, tile_blocks);
}

// --- More rows ---

constexpr int kStageBlocks = 2;  // column blocks of a stage
constexpr int kStageCols = kStageBlocks * kBlockCols;
constexpr int kStageVectors = kStageCols / kVectorCols;
constexpr int kStages = 4;

template <typename Act, int kTileRows, int kTileOutputs, int kWarpsM, int kWarpsN>
__global__ __launch_bounds__(kWarpsM* kWarpsN* kWarpLanes) void TiledKernel(LinearParams params) {
  constexpr int kThreads = kWarpsM * kWarpsN * kWarpLanes;
  constexpr int kTilesM = kTileRows / (kWarpsM * kTileM);
  constexpr int kTilesN = kTileOutputs / (kWarpsN * kTileN);
  static_assert(kTilesM >= 1 && kTilesN >= 2 && kTilesN % 2 == 0, "gate and up tiles stay with one thread");
  constexpr int kRowVectors = kBlockCols / kVectorCols;  // of a row within a column block
  constexpr int kVectorsY = kStageBlocks * kTileRows * kRowVectors;
  constexpr int kVectorsW = kStageBlocks * kTileOutputs * kRowVectors;
  static_assert(kVectorsY % kThreads == 0 && kVectorsW % kThreads == 0);
  EFLA_DYNAMIC_SHARED(shared);
  uint4* stage_y = reinterpret_cast<uint4*>(shared);  // [kStages][kStageBlocks][kTileRows][kRowVectors]
  uint4* stage_w = stage_y + kStages * kVectorsY;     // [kStages][kStageBlocks][kTileOutputs][kRowVectors]

  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = warp % kWarpsM * (kTilesM * kTileM), warp_output = warp / kWarpsM * (kTilesN * kTileN);
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t output_begin = static_cast<int64_t>(blockIdx.y) * kTileOutputs;
  const int cols = params.cols;
  const int blocks = (cols + kBlockCols - 1) / kBlockCols;
  const int stages = (blocks + kStageBlocks - 1) / kStageBlocks;

  // Copies stage `index` of one operand: consecutive threads take consecutive vectors of a row.
  const auto load = [&](const Act* matrix, int64_t first, int64_t end, int tile_rows, uint4* buffer,
                        int index) {
    for (int i = threadIdx.x; i < tile_rows * kStageVectors; i += kThreads) {
      const int row = i / kStageVectors, vector = i % kStageVectors;
      const int k = index * kStageCols + vector * kVectorCols;
      const bool valid = first + row < end && k < cols;
      const Act* from = valid ? matrix + (first + row) * cols + k : matrix;
      CpAsync16(buffer + ((vector / kRowVectors) * tile_rows + row) * kRowVectors + vector % kRowVectors,
                from, valid);
    }
  };
  const auto load_y = [&](int index) {
    load(static_cast<const Act*>(params.y), row_begin, params.num_rows, kTileRows,
         stage_y + index % kStages * kVectorsY, index);
  };
  const auto load_w = [&](int index) {
    load(static_cast<const Act*>(params.weight), output_begin, params.outputs, kTileOutputs,
         stage_w + index % kStages * kVectorsW, index);
  };

#pragma unroll
  for (int index = 0; index < kStages - 1; ++index) {
    if (index < stages) load_w(index);
  }
  GridDependencyWait();
  GridDependencyTrigger();
#pragma unroll
  for (int index = 0; index < kStages - 1; ++index) {
    if (index < stages) load_y(index);
    CpAsyncCommit();  // the first group holds all the weights so far
  }

  float run[kTilesM][kTilesN][4] = {}, sum[kTilesM][kTilesN][4] = {};
  int slice = 0;
  while (slice < kSlices - 1 && SliceBegin(blocks, slice + 1) == 0) ++slice;
  int slice_end = SliceBegin(blocks, slice + 1);
  for (int index = 0; index < stages; ++index) {
    CpAsyncWait<kStages - 2>();
    __syncthreads();  // stage `index` has arrived, and everyone is done with the one before it
    if (index + kStages - 1 < stages) {
      load_w(index + kStages - 1);
      load_y(index + kStages - 1);
    }
    CpAsyncCommit();
    const uint4* y = stage_y + index % kStages * kVectorsY;
    const uint4* w = stage_w + index % kStages * kVectorsW;
#pragma unroll
    for (int b = 0; b < kStageBlocks; ++b) {
      const int block = index * kStageBlocks + b;
      if (block >= blocks) break;
      uint4 wv[kTilesN];
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        wv[n] = w[(b * kTileOutputs + warp_output + n * kTileN + g) * kRowVectors + t];
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const uint4 low = y[(b * kTileRows + warp_row + m * kTileM + g) * kRowVectors + t];
        const uint4 high = y[(b * kTileRows + warp_row + m * kTileM + g + 8) * kRowVectors + t];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y};
        const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          Mma<Act>(run[m][n], first, wv[n].x, wv[n].y);
          Mma<Act>(run[m][n], second, wv[n].z, wv[n].w);
        }
      }
      if (block + 1 == slice_end) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sum[m][n][i] += run[m][n][i];
              run[m][n][i] = 0.0f;
            }
          }
        }
        while (slice < kSlices - 1 && slice_end == block + 1) slice_end = SliceBegin(blocks, ++slice + 1);
      }
    }
  }

  const bool gated = params.output == LinearOutput::kGatedSilu;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row_begin + warp_row + m * kTileM + half * 8 + g;
      if (row >= params.num_rows) continue;
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        const int64_t output = output_begin + warp_output + n * kTileN + 2 * t;
        const float* values = &sum[m][n][2 * half];
        if (gated) {
          if (n % 2 != 0) continue;
          const float* up = &sum[m][n + 1][2 * half];
          const int64_t column = (output_begin + warp_output + n * kTileN) / 2 + 2 * t;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (column + i < params.out_columns) {
              static_cast<Act*>(params.out)[row * params.out_columns + column + i] =
                  FromFloat<Act>(Silu(values[i]) * up[i]);
            }
          }
        } else if (params.output == LinearOutput::kAct && params.out_columns % 2 == 0) {
          if (output < params.out_columns) {
            *reinterpret_cast<uint32_t*>(static_cast<Act*>(params.out) + row * params.out_columns + output) =
                PackPair<Act>(values[0], values[1]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) StoreOutput<Act>(params, static_cast<int>(row), output + i, values[i]);
        }
      }
    }
  }
}

template <typename Act, int kTileRows, int kTileOutputs, int kWarpsM, int kWarpsN>
cudaError_t LaunchTiled(const LaunchContext& context, const LinearParams& params) {
  LaunchShape shape;
  shape.grid = dim3((params.num_rows + kTileRows - 1) / kTileRows,
                    static_cast<unsigned>((params.outputs + kTileOutputs - 1) / kTileOutputs));
  shape.block = dim3(kWarpsM * kWarpsN * kWarpLanes);
  shape.shared_bytes = static_cast<size_t>(kStages) * (kTileRows + kTileOutputs) * kStageCols * sizeof(Act);
  return Launch(context, shape, TiledKernel<Act, kTileRows, kTileOutputs, kWarpsM, kWarpsN>, params);
}

int64_t NumTiles(const LinearParams& params, int tile_rows, int tile_outputs) {
  return (params.num_rows + tile_rows - 1) / tile_rows * ((params.outputs + tile_outputs - 1) / tile_outputs);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const LinearParams& params) {
  const int64_t wave = context.multiprocessors;
  if (params.num_rows <= kTileM) {
    // More tiles a block where that still leaves two blocks for each multiprocessor; gate and up need two.
    constexpr int kWideTiles = 4, kPairTiles = 2;
    if (params.outputs >= 2 * wave * kWideTiles * kTileN)
      return LaunchNarrow<Act, kWideTiles>(context, params);
    if (params.output == LinearOutput::kGatedSilu || params.outputs >= 3 * wave * kPairTiles * kTileN) {
      return LaunchNarrow<Act, kPairTiles>(context, params);
    }
    return LaunchNarrow<Act, 1>(context, params);
  }
  // The largest tile that still fills the device.
  if (NumTiles(params, 128, 128) >= wave) return LaunchTiled<Act, 128, 128, 2, 4>(context, params);
  if (params.num_rows > 64 && NumTiles(params, 128, 64) >= wave)
    return LaunchTiled<Act, 128, 64, 4, 2>(context, params);
  if (params.num_rows > 32 && NumTiles(params, 64, 64) >= wave)
    return LaunchTiled<Act, 64, 64, 2, 2>(context, params);
  if (params.num_rows > 32) return LaunchTiled<Act, 64, 32, 4, 1>(context, params);
  return LaunchTiled<Act, 32, 32, 2, 2>(context, params);
}

// --- For products that another library computes ---

constexpr int kElementThreads = 256;

// A thread owns one group: 8 gates, 8 ups, 8 results. Bytes: 6 a result.
template <typename Act>
__global__ __launch_bounds__(kElementThreads) void GatedSiluKernel(const Act* gate_up, int64_t groups_per_row,
                                                                   int64_t columns, Act* out) {
  GridDependencyWait();
  GridDependencyTrigger();
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (group >= groups_per_row) return;
  const uint4* from =
      reinterpret_cast<const uint4*>(gate_up + (row * groups_per_row + group) * (2 * kGateUpGroup));
  float gate[kGateUpGroup], up[kGateUpGroup];
  Unpack8<Act>(from[0], gate);
  Unpack8<Act>(from[1], up);
  const int64_t column = group * kGateUpGroup;
  Act* to = out + row * columns + column;
#pragma unroll
  for (int i = 0; i < kGateUpGroup; ++i) gate[i] = Silu(gate[i]) * up[i];
  if (columns % kGateUpGroup == 0) {
    *reinterpret_cast<uint4*>(to) = {PackPair<Act>(gate[0], gate[1]), PackPair<Act>(gate[2], gate[3]),
                                     PackPair<Act>(gate[4], gate[5]), PackPair<Act>(gate[6], gate[7])};
    return;
  }
  for (int i = 0; i < kGateUpGroup && column + i < columns; ++i) to[i] = FromFloat<Act>(gate[i]);
}

__global__ __launch_bounds__(kElementThreads) void CompareRowsKernel(const uint32_t* rows, int64_t row_words,
                                                                     const uint32_t* expected,
                                                                     int expected_rows, int32_t* mismatches) {
  const uint32_t* row = rows + static_cast<int64_t>(blockIdx.x) * row_words;
  expected += static_cast<int64_t>(blockIdx.x % expected_rows) * row_words;
  int32_t different = 0;
  for (int64_t i = threadIdx.x; i < row_words; i += kElementThreads) different += row[i] != expected[i];
  if (different > 0) atomicAdd(mismatches, different);
}

constexpr int kMaxGridY = 65535;

template <typename Act>
cudaError_t LaunchGatedSiluTyped(const LaunchContext& context, const void* gate_up, int num_rows,
                                 int64_t columns, void* out) {
  const int64_t groups = (columns + kGateUpGroup - 1) / kGateUpGroup;
  for (int row = 0; row < num_rows; row += kMaxGridY) {
    const int rows = num_rows - row < kMaxGridY ? num_rows - row : kMaxGridY;
    const LaunchShape shape = {.grid = dim3((groups + kElementThreads - 1) / kElementThreads, rows),
                               .block = dim3(kElementThreads)};
    const cudaError_t error = Launch(context, shape, GatedSiluKernel<Act>,
                                     static_cast<const Act*>(gate_up) + row * groups * (2 * kGateUpGroup),
                                     groups, columns, static_cast<Act*>(out) + row * columns);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchLinear(const LaunchContext& context, const LinearParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

cudaError_t LaunchGatedSilu(const LaunchContext& context, const void* gate_up, int num_rows, int64_t columns,
                            void* out) {
  return context.act == ActType::kF16
             ? LaunchGatedSiluTyped<__half>(context, gate_up, num_rows, columns, out)
             : LaunchGatedSiluTyped<__nv_bfloat16>(context, gate_up, num_rows, columns, out);
}

cudaError_t LaunchCompareRows(const LaunchContext& context, const void* rows, int num_rows, int64_t row_words,
                              const void* expected, int expected_rows, int32_t* mismatches) {
  LaunchContext ordered = context;
  ordered.overlap = false;
  return Launch(ordered, {.grid = dim3(num_rows), .block = dim3(kElementThreads)}, CompareRowsKernel,
                static_cast<const uint32_t*>(rows), row_words, static_cast<const uint32_t*>(expected),
                expected_rows, mismatches);
}

}  // namespace efla::cuda
