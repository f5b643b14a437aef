// out[r][n] = sum over k of y[r][k] weight[n][k] for more rows than linear_narrow.cu takes, with the outputs
// of LinearParams.
//
// Shapes: y act [rows, cols], weight act [outputs, cols]. A cluster of kCluster blocks owns a kTileRows x
// kTileOutputs tile; a block sums kSlices / kCluster consecutive runs of cols for it (linear.cuh), 64 columns
// at a time through kStages buffers in shared memory. Then the blocks leave their sums in shared memory, and
// each adds up its share of the tile's rows from all of them. So neither the tile nor the cluster changes how
// an output is summed.
//
// A warp's sums lie in registers: of the current run, of the even run before it (a block that owns all the
// runs keeps that one in shared memory), and of the pairs that are finished.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kStageBlocks = 2;  // column blocks of a stage
constexpr int kStageCols = kStageBlocks * kBlockCols;
constexpr int kStageVectors = kStageCols / kVectorCols;
constexpr int kRowVectors = kBlockCols / kVectorCols;  // of a row within a column block

// A number as a type, for a lambda's parameter.
template <int kNumber>
struct Constant {
  static constexpr int kValue = kNumber;
};

template <int kRows, int kOutputs, int kWarpsAlongRows, int kWarpsAlongOutputs, int kNumStages>
struct TileShape {
  static constexpr int kTileRows = kRows, kTileOutputs = kOutputs;
  static constexpr int kWarpsM = kWarpsAlongRows, kWarpsN = kWarpsAlongOutputs;
  static constexpr int kStages = kNumStages;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpLanes;
  static constexpr int kTilesM = kTileRows / (kWarpsM * kTileM);
  static constexpr int kTilesN = kTileOutputs / (kWarpsN * kTileN);
  static_assert(kTilesM >= 1 && kTilesN >= 2 && kTilesN % 2 == 0, "gate and up tiles stay with one thread");
  static constexpr int kLoadRows = kThreads / kStageVectors;  // rows that the block's threads load at once
  static_assert(kTileRows % kLoadRows == 0 && kTileOutputs % kLoadRows == 0);
  static constexpr int kVectorsY = kTileRows * kStageVectors, kVectorsW = kTileOutputs * kStageVectors;
  static constexpr int kSumStride = kTileOutputs + 8;  // keeps the stores of a warp in different banks

  static constexpr size_t kPipelineBytes = static_cast<size_t>(kStages) * (kVectorsY + kVectorsW) * 16;
  // Behind the pipeline: the even run of a block that owns all.
  static constexpr size_t kEvenBytes = sizeof(float) * kTileRows * kTileOutputs;
  // In place of the pipeline: the block's sums, for its cluster.
  static constexpr size_t kSumBytes = sizeof(float) * kTileRows * kSumStride;
  static constexpr size_t SharedBytes(int cluster) {
    return cluster == 1                 ? kPipelineBytes + kEvenBytes
           : kPipelineBytes > kSumBytes ? kPipelineBytes
                                        : kSumBytes;
  }
};

template <typename Act, typename Shape, int kCluster>
__global__ __launch_bounds__(Shape::kThreads) void TiledKernel(LinearParams params) {
  static_assert(kCluster == 1 || kCluster == kSlices / 2 || kCluster == kSlices);
  constexpr int kTileRows = Shape::kTileRows, kTileOutputs = Shape::kTileOutputs;
  constexpr int kTilesM = Shape::kTilesM, kTilesN = Shape::kTilesN, kThreads = Shape::kThreads;
  constexpr int kStages = Shape::kStages;
  EFLA_DYNAMIC_SHARED(shared);
  uint4* stage_y = reinterpret_cast<uint4*>(shared);  // [kStages][kStageBlocks][kTileRows][kRowVectors]
  uint4* stage_w =
      stage_y + kStages * Shape::kVectorsY;  // [kStages][kStageBlocks][kTileOutputs][kRowVectors]

  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = warp % Shape::kWarpsM * (kTilesM * kTileM);
  const int warp_output = warp / Shape::kWarpsM * (kTilesN * kTileN);
  const int rank = static_cast<int>(blockIdx.x % kCluster);
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x / kCluster) * kTileRows;
  const int64_t output_begin = static_cast<int64_t>(blockIdx.y) * kTileOutputs;
  const int cols = params.cols;
  const int blocks = (cols + kBlockCols - 1) / kBlockCols;
  constexpr int kOwnSlices = kSlices / kCluster;
  int slice = rank * kOwnSlices;
  const int slice_last = slice + kOwnSlices;  // exclusive
  const int block_begin = SliceBegin(blocks, slice), block_end = SliceBegin(blocks, slice_last);
  const int stages = (block_end - block_begin + kStageBlocks - 1) / kStageBlocks;
  const int k_end = cols < block_end * kBlockCols ? cols : block_end * kBlockCols;

  // Copies a stage of one operand. Eight threads take the vectors of a row; where a column block is odd,
  // neighbouring rows lie swapped, so that the eight meet no bank twice.
  const int load_row = threadIdx.x / kStageVectors, load_vector = threadIdx.x % kStageVectors;
  const int load_block = load_vector / kRowVectors;
  const auto load = [&](const void* matrix, int64_t first, int64_t end, auto tile_rows, uint4* buffer,
                        int index) {
    constexpr int kMatrixRows = decltype(tile_rows)::kValue;
    const int k = block_begin * kBlockCols + index * kStageCols + load_vector * kVectorCols;
    const int64_t left = end - first;
    const int rows = k < k_end ? static_cast<int>(left < kMatrixRows ? left : kMatrixRows) : 0;
    const Act* from = static_cast<const Act*>(matrix) + (first + load_row) * cols + k;
    uint4* to = buffer + (load_block * kMatrixRows + (load_row ^ load_block)) * kRowVectors +
                load_vector % kRowVectors;
#pragma unroll
    for (int i = 0; i < kMatrixRows; i += Shape::kLoadRows) {
      const bool valid = load_row + i < rows;
      CpAsync16(to + i * kRowVectors, valid ? from + static_cast<int64_t>(i) * cols : matrix, valid);
    }
  };
  const auto load_y = [&](int index) {
    load(params.y, row_begin, params.num_rows, Constant<kTileRows>(),
         stage_y + index % kStages * Shape::kVectorsY, index);
  };
  const auto load_w = [&](int index) {
    load(params.weight, output_begin, params.outputs, Constant<kTileOutputs>(),
         stage_w + index % kStages * Shape::kVectorsW, index);
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

  constexpr bool kEvenInShared = kCluster == 1, kEvenInRegisters = kCluster == kSlices / 2;
  constexpr int kKept = kEvenInShared || kEvenInRegisters ? kTilesM : 0;
  float run[kTilesM][kTilesN][4] = {};
  // Of the finished pairs where a block owns all the runs; the even run where it owns two.
  float kept[kKept == 0 ? 1 : kKept][kTilesN][4] = {};
  float4* even = reinterpret_cast<float4*>(shared + Shape::kPipelineBytes) + threadIdx.x;
  // Of the runs that end before `block`.
  int slice_end = SliceBegin(blocks, slice + 1);
  const auto finish_runs = [&](int block) {
    if constexpr (kCluster < kSlices) {
      for (; slice < slice_last && slice_end == block; slice_end = SliceBegin(blocks, ++slice + 1)) {
        const bool odd = slice % 2 != 0;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) {
            float(&r)[4] = run[m][n];
            float(&k)[4] = kept[m][n];
            float4* place = even + (m * kTilesN + n) * kThreads;
            if (kEvenInRegisters) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                if (odd) {
                  r[i] = k[i] + r[i];
                } else {
                  k[i] = r[i];
                  r[i] = 0.0f;
                }
              }
            } else {
              if (odd) {
                const float4 e = *place;
                k[0] += e.x + r[0];
                k[1] += e.y + r[1];
                k[2] += e.z + r[2];
                k[3] += e.w + r[3];
              } else {
                *place = {r[0], r[1], r[2], r[3]};
              }
              r[0] = r[1] = r[2] = r[3] = 0.0f;
            }
          }
        }
      }
    }
  };
  finish_runs(block_begin);
#pragma unroll 1
  for (int index = 0; index < stages; ++index) {
    CpAsyncWait<kStages - 2>();
    __syncthreads();  // stage `index` has arrived, and everyone is done with the one before it
    if (index + kStages - 1 < stages) {
      load_w(index + kStages - 1);
      load_y(index + kStages - 1);
    }
    CpAsyncCommit();
    const uint4* y = stage_y + index % kStages * Shape::kVectorsY;
    const uint4* w = stage_w + index % kStages * Shape::kVectorsW;
    const int block = block_begin + index * kStageBlocks;
#pragma unroll
    for (int b = 0; b < kStageBlocks; ++b) {
      if (block + b >= block_end) break;
      uint4 wv[kTilesN];
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        wv[n] = w[(b * kTileOutputs + warp_output + n * kTileN + (g ^ b)) * kRowVectors + t];
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const int tile_row = b * kTileRows + warp_row + m * kTileM + (g ^ b);
        const uint4 low = y[tile_row * kRowVectors + t];
        const uint4 high = y[(tile_row + 8) * kRowVectors + t];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y};
        const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) Mma<Act>(run[m][n], first, wv[n].x, wv[n].y);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) Mma<Act>(run[m][n], second, wv[n].z, wv[n].w);
      }
      finish_runs(block + b + 1);
    }
  }
  CpAsyncWait<0>();

  const bool gated = params.output == LinearOutput::kGatedSilu;
  if constexpr (kCluster == 1) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = row_begin + warp_row + m * kTileM + half * 8 + g;
        if (row >= params.num_rows) continue;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          const float values[2] = {kept[m][n][2 * half], kept[m][n][2 * half + 1]};
          const int64_t output = output_begin + warp_output + n * kTileN;
          if (!gated) {
            StoreOutputs<Act, 2>(params, row, output + 2 * t, values);
          } else if (n % 2 == 0) {
            const float* up = &kept[m][n + 1][2 * half];
            StoreOutputs<Act, 2>(params, row, output / 2 + 2 * t,
                                 {Silu(values[0]) * up[0], Silu(values[1]) * up[1]});
          }
        }
      }
    }
  } else {
    // The block's sums, to be read by the cluster.
    float* sums = reinterpret_cast<float*>(shared);  // [kTileRows][kSumStride]
    __syncthreads();                                 // the pipeline's buffers are free
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        float* place =
            sums + (warp_row + m * kTileM + g) * Shape::kSumStride + warp_output + n * kTileN + 2 * t;
        *reinterpret_cast<float2*>(place) = {run[m][n][0], run[m][n][1]};
        *reinterpret_cast<float2*>(place + 8 * Shape::kSumStride) = {run[m][n][2], run[m][n][3]};
      }
    }
    ClusterArrive();
    ClusterWait();
    const auto total = [&](int row, int output, float(&sum)[4]) {
      float4 parts[kCluster];
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        parts[i] = LoadFromCluster(sums + row * Shape::kSumStride + output, i);
      }
      sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      constexpr int kPerPair = 2 * kCluster / kSlices;  // blocks that share a pair of runs
#pragma unroll
      for (int i = 0; i < kCluster; i += kPerPair) {
        float4 pair = parts[i];
        if constexpr (kPerPair == 2) {
          const float4 odd = parts[i + 1];
          pair = {pair.x + odd.x, pair.y + odd.y, pair.z + odd.z, pair.w + odd.w};
        }
        sum[0] += pair.x;
        sum[1] += pair.y;
        sum[2] += pair.z;
        sum[3] += pair.w;
      }
    };
    constexpr int kShareRows = kTileRows / kCluster;
    static_assert(kTileRows % kCluster == 0);
    // A thread takes four neighbouring results.
    const int row_quads = gated ? kTileOutputs / 8 : kTileOutputs / 4;
    for (int i = threadIdx.x; i < kShareRows * row_quads; i += kThreads) {
      const int tile_row = rank * kShareRows + i / row_quads, quad = i % row_quads;
      const int64_t row = row_begin + tile_row;
      if (row >= params.num_rows) break;
      float sum[4];
      if (gated) {
        const int gate_output = quad / 2 * (2 * kGateUpGroup) + quad % 2 * 4;
        float up[4];
        total(tile_row, gate_output, sum);
        total(tile_row, gate_output + kGateUpGroup, up);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = Silu(sum[j]) * up[j];
        StoreOutputs<Act, 4>(params, row, output_begin / 2 + quad * 4, sum);
      } else {
        total(tile_row, quad * 4, sum);
        StoreOutputs<Act, 4>(params, row, output_begin + quad * 4, sum);
      }
    }
    // No block leaves while another reads its sums.
    __syncwarp();
    ClusterArrive();
    ClusterWait();
  }
}

template <typename Act, typename Shape, int kCluster>
cudaError_t LaunchShaped(const LaunchContext& context, const LinearParams& params) {
  LaunchShape shape;
  shape.grid = dim3(kCluster * ((params.num_rows + Shape::kTileRows - 1) / Shape::kTileRows),
                    static_cast<unsigned>((params.outputs + Shape::kTileOutputs - 1) / Shape::kTileOutputs));
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = Shape::SharedBytes(kCluster);
  shape.cluster = kCluster;
  return Launch(context, shape, TiledKernel<Act, Shape, kCluster>, params);
}

using Launcher = cudaError_t (*)(const LaunchContext&, const LinearParams&);

struct Candidate {
  int tile_rows, tile_outputs, cluster;
  Launcher launch;
};

template <typename Act, typename Shape, int kCluster>
constexpr Candidate MakeCandidate() {
  return {Shape::kTileRows, Shape::kTileOutputs, kCluster, LaunchShaped<Act, Shape, kCluster>};
}

using Tile32x64 = TileShape<32, 64, 2, 2, 6>;
using Tile32x128 = TileShape<32, 128, 2, 4, 4>;
using Tile64x64 = TileShape<64, 64, 2, 2, 5>;
using Tile64x96 = TileShape<64, 96, 2, 2, 4>;
using Tile128x64 = TileShape<128, 64, 4, 2, 4>;
using Tile128x96 = TileShape<128, 96, 4, 2, 4>;
using Tile128x128 = TileShape<128, 128, 2, 4, 4>;

template <typename Act>
constexpr Candidate kCandidates[] = {
    MakeCandidate<Act, Tile32x64, 1>(),  MakeCandidate<Act, Tile32x64, 4>(),
    MakeCandidate<Act, Tile32x64, 8>(),  MakeCandidate<Act, Tile32x128, 1>(),
    MakeCandidate<Act, Tile64x64, 1>(),  MakeCandidate<Act, Tile64x64, 4>(),
    MakeCandidate<Act, Tile64x64, 8>(),  MakeCandidate<Act, Tile64x96, 1>(),
    MakeCandidate<Act, Tile128x64, 1>(), MakeCandidate<Act, Tile128x64, 4>(),
    MakeCandidate<Act, Tile128x96, 1>(), MakeCandidate<Act, Tile128x128, 1>(),
};

// Nanoseconds that a product takes, roughly: what the busiest multiprocessor loads, at the rate at which it
// loads from L2 (the matrix units keep up with that); each block's start and end; the exchange.
double EstimatedTime(const Candidate& candidate, const LaunchContext& context, const LinearParams& params) {
  constexpr double kBytesPerNs = 40, kBlockNs = 300, kExchangeNs = 1000;
  const int64_t row_tiles = (params.num_rows + candidate.tile_rows - 1) / candidate.tile_rows;
  const int64_t output_tiles = (params.outputs + candidate.tile_outputs - 1) / candidate.tile_outputs;
  const int64_t blocks = row_tiles * output_tiles * candidate.cluster;
  const int64_t busiest = (blocks + context.multiprocessors - 1) / context.multiprocessors;
  double bytes = 2.0 * (candidate.tile_rows + candidate.tile_outputs) * params.cols / candidate.cluster;
  // Each block reads a tile's worth of sums, and has been written one.
  if (candidate.cluster > 1) bytes += 2.0 * sizeof(float) * candidate.tile_rows * candidate.tile_outputs;
  return static_cast<double>(busiest) * (kBlockNs + bytes / kBytesPerNs) +
         (candidate.cluster > 1 ? kExchangeNs : 0.0);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const LinearParams& params) {
  const Candidate* best = nullptr;
  double best_time = 0;
  for (const Candidate& candidate : kCandidates<Act>) {
    if (candidate.cluster > 1 && !context.clusters) continue;
    const double time = EstimatedTime(candidate, context, params);
    if (best != nullptr && time >= best_time) continue;
    best = &candidate;
    best_time = time;
  }
  return best->launch(context, params);
}

}  // namespace

cudaError_t LaunchLinearTiled(const LaunchContext& context, const LinearParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
