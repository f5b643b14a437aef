// out[r][n] = sum over k of y[r][k] weight[n][k] for more rows than linear_narrow.cu takes, with the outputs
// of LinearParams, on the warpgroup matrix units.
//
// Shapes: y act [rows, cols], weight act [outputs, cols]. A cluster of kCluster blocks owns a kTileOutputs x
// kTileRows tile of the transposed product; a block sums kSlices / kCluster consecutive runs of cols for it
// (linear.cuh), 64 columns at a time. One warp keeps a ring of stages filled through the copy engine, the
// weight's before the wait for the predecessor; each warpgroup multiplies its 64 outputs. Then the blocks
// leave their sums in shared memory, and each adds up its share of the tile's rows from all of them. So
// neither the tile nor the cluster changes how an output is summed.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_mma.cuh"

namespace efla::cuda {
namespace {

constexpr int kGroupOutputs = 64;  // of a warpgroup
constexpr int kGroupThreads = 128;
constexpr int kColumnBytes = kTileCols * 2;  // of a tile's row
constexpr int kTileAlignment = 1024;
constexpr int kMostStages = 8;
constexpr int kQuadSlices = 4;  // runs that are added up one after the other
static_assert(kBlockCols == kTileCols && kSlices == 2 * kQuadSlices);

template <int kGroups, int kRows>
struct WideShape {
  static constexpr int kTileOutputs = kGroups * kGroupOutputs, kTileRows = kRows;
  static constexpr int kConsumers = kGroups * kGroupThreads;  // threads
  // Two warpgroups with 64 sums a set have a whole warpgroup beside them, whose registers they take over.
  static constexpr bool kTakesRegisters = kGroups > 1 && kRows > 64;
  static constexpr int kThreads = kConsumers + (kTakesRegisters ? kGroupThreads : kWarpLanes);
  static constexpr int kSums = kRows / 2;  // of a thread
  static constexpr int kWeightBytes = kTileOutputs * kColumnBytes, kInputBytes = kTileRows * kColumnBytes;
  static constexpr int kStageBytes = kWeightBytes + kInputBytes;
  static constexpr int kSumStride = kTileOutputs + 4;  // keeps the stores of a warp in different banks
  static constexpr size_t kSumBytes = sizeof(float) * kTileRows * kSumStride;
  static_assert(kWeightBytes % kTileAlignment == 0 && kInputBytes % kTileAlignment == 0);

  static constexpr bool kStash = kSums >= 64;  // WideKernel's, behind the ring
  static constexpr size_t kStashBytes = sizeof(float) * kTileOutputs * kTileRows;

  // A block with half of four runs leaves two sums where they are the second half: they are added one by one.
  static constexpr size_t SharedBytes(int stages, int cluster) {
    const size_t ring =
        static_cast<size_t>(stages) * kStageBytes + (cluster == 1 && kStash ? kStashBytes : 0);
    const size_t sums = (cluster == 4 ? 2 : 1) * kSumBytes;
    return kTileAlignment + (ring > sums ? ring : sums);
  }
  // What a block may take: as much as gives two blocks a multiprocessor where the tile is small.
  static constexpr int MaxStages(int cluster) {
    const int bytes = (kSums * kGroups >= 128 ? 200 : 100) * 1024 -
                      static_cast<int>(cluster == 1 && kStash ? kStashBytes : 0);
    const int stages = bytes / kStageBytes;
    return stages < kMostStages ? stages : kMostStages;
  }
};

[[maybe_unused]] __device__ inline float4 Add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

template <typename Act, typename Shape, int kCluster>
__global__ __launch_bounds__(Shape::kThreads) void WideKernel(const __grid_constant__ CUtensorMap weight_map,
                                                              const __grid_constant__ CUtensorMap input_map,
                                                              LinearParams params, int stages) {
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4 || kCluster == 8);
#if __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kOwnSlices = kSlices / kCluster;
  constexpr int kSums = Shape::kSums;
  // Whether a run is added up while the next one is multiplied; else between the two, which takes fewer
  // registers.
  constexpr bool kOverlap = kOwnSlices > 1 && kSums < 64;
  static_assert(kCluster != 4 || kOverlap, "the second half's last run stays in registers of its own");
  EFLA_DYNAMIC_SHARED(shared_base);
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  unsigned char* shared =
      shared_base + (kTileAlignment - SharedAddress(shared_base) % kTileAlignment) % kTileAlignment;
  // [stages], each the weight's tile and then the input's.
  const auto weight_tile = [&](int stage) { return shared + stage * Shape::kStageBytes; };
  const auto input_tile = [&](int stage) { return weight_tile(stage) + Shape::kWeightBytes; };

  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int row_begin = static_cast<int>(blockIdx.x) / kCluster * Shape::kTileRows;
  const int output_begin = static_cast<int>(blockIdx.y) * Shape::kTileOutputs;
  const int blocks = (params.cols + kBlockCols - 1) / kBlockCols;
  const int first_slice = rank * kOwnSlices;
  const int block_begin = SliceBegin(blocks, first_slice),
            block_end = SliceBegin(blocks, first_slice + kOwnSlices);
  const int num_blocks = block_end - block_begin;

  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      BarrierInit(&full[i], 1);
      BarrierInit(&empty[i], Shape::kConsumers / kWarpLanes);  // a warp each
    }
    BarrierInitFence();
  }
  __syncthreads();

  float* sums = reinterpret_cast<float*>(shared);  // [kTileRows][kSumStride], in place of the ring
  const auto load_weight = [&](int i, int stage) {
    BarrierArriveExpect(&full[stage], Shape::kStageBytes);
    CopyTile(weight_tile(stage), &weight_map, (block_begin + i) * kBlockCols, output_begin, &full[stage]);
  };
  const auto load_input = [&](int i, int stage) {
    CopyTile(input_tile(stage), &input_map, (block_begin + i) * kBlockCols, row_begin, &full[stage]);
  };
  const bool loads = threadIdx.x == Shape::kConsumers;
  const int ahead = num_blocks < stages ? num_blocks : stages;
  if (loads) {
    for (int i = 0; i < ahead; ++i) load_weight(i, i);
  }
  GridDependencyWait();
  GridDependencyTrigger();
  if (threadIdx.x >= Shape::kConsumers) {
    if constexpr (Shape::kTakesRegisters) DropRegisters<40>();
    if (loads) {
      for (int i = 0; i < ahead; ++i) load_input(i, i);
      int stage = 0;
      uint32_t parity = 0;
      for (int i = ahead; i < num_blocks; ++i) {
        BarrierWait(&empty[stage], parity);
        load_weight(i, stage);
        load_input(i, stage);
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    if constexpr (Shape::kTakesRegisters) TakeRegisters<232>();
    const int group = threadIdx.x / kGroupThreads;
    // Sums of the run under way, of the one before it, of the finished runs of four, and of the first four. A
    // block with all the runs keeps the last in shared memory where registers do not hold them.
    float runs[kOverlap ? 2 : 1][kSums];
    float quad[kOwnSlices > 1 ? kSums : 1];
    float first_quad[kCluster == 1 && !Shape::kStash ? kSums : 1];
    float4* stash = reinterpret_cast<float4*>(shared + stages * Shape::kStageBytes) + threadIdx.x;
    const uint64_t weight_base = TileDescriptor(weight_tile(0) + group * (kGroupOutputs * kColumnBytes), 0);
    const uint64_t input_base = TileDescriptor(input_tile(0), 0);
    int stage = 0, released = 0;  // the next block's; the next to be given back
    uint32_t parity = 0;
    const auto release = [&] {
      if (lane == 0) BarrierArrive(&empty[released]);
      if (++released == stages) released = 0;
    };
    // The run before slice s is complete: adds it up.
    const auto add_run = [&](int s, const float(&run)[kSums]) {
      if (s % kQuadSlices == 0) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) quad[i] = run[i];
      } else {
#pragma unroll
        for (int i = 0; i < kSums; ++i) quad[i] += run[i];
      }
      if constexpr (kCluster == 1) {
        if (s == kQuadSlices - 1) {
#pragma unroll
          for (int i = 0; i < kSums; i += 4) {
            if constexpr (Shape::kStash) {
              stash[i / 4 * Shape::kConsumers] = {quad[i], quad[i + 1], quad[i + 2], quad[i + 3]};
            } else {
              first_quad[i] = quad[i], first_quad[i + 1] = quad[i + 1];
              first_quad[i + 2] = quad[i + 2], first_quad[i + 3] = quad[i + 3];
            }
          }
        }
      }
    };
    // Starts the next block's products.
    const auto multiply = [&](float(&run)[kSums], bool first) {
      BarrierWait(&full[stage], parity);
      WarpgroupFence();
#pragma unroll
      for (int step = 0; step < kBlockCols / kTileM; ++step) {
        const uint64_t offset = stage * (Shape::kStageBytes / 16) + step * 2;
        WarpgroupMma<Act>(run, weight_base + offset, input_base + offset, !first || step > 0);
      }
      WarpgroupCommit();
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    };
    // Multiplies slice s into `run`, and adds up the slice before it, in `before`, once the first products
    // are under way.
    const auto do_slice = [&](int s, float(&run)[kSums], const float(&before)[kSums]) {
      const int begin = SliceBegin(blocks, first_slice + s), end = SliceBegin(blocks, first_slice + s + 1);
      multiply(run, true);
      WarpgroupWait<1>();
      if (s > 0) {
        release();
        add_run(s - 1, before);
      }
#pragma unroll 1
      for (int block = begin + 1; block < end; ++block) {
        multiply(run, false);
        WarpgroupWait<1>();
        release();
      }
    };
    if constexpr (kOverlap) {
      // Unrolled: the compiler has to see which products are complete wherever their sums are read.
#pragma unroll
      for (int s = 0; s < kOwnSlices; s += 2) {
        do_slice(s, runs[0], runs[1]);
        do_slice(s + 1, runs[1], runs[0]);
      }
      WarpgroupWait<0>();
      if (kCluster != 4 || rank % 2 == 0)
        add_run(kOwnSlices - 1, runs[1]);  // in a second half the last stays apart
    } else {
#pragma unroll 1
      for (int s = 0; s < kOwnSlices; ++s) {
        const int begin = SliceBegin(blocks, first_slice + s), end = SliceBegin(blocks, first_slice + s + 1);
        multiply(runs[0], true);
#pragma unroll 1
        for (int block = begin + 1; block < end; ++block) {
          multiply(runs[0], false);
          WarpgroupWait<1>();
          release();
        }
        WarpgroupWait<0>();
        release();
        if constexpr (kOwnSlices > 1) add_run(s, runs[0]);
      }
    }
    if constexpr (kCluster == 1) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        if constexpr (Shape::kStash) {
          const float4 first = stash[i / 4 * Shape::kConsumers];
          quad[i] = first.x + quad[i], quad[i + 1] = first.y + quad[i + 1];
          quad[i + 2] = first.z + quad[i + 2], quad[i + 3] = first.w + quad[i + 3];
        } else {
          quad[i] = first_quad[i] + quad[i], quad[i + 1] = first_quad[i + 1] + quad[i + 1];
          quad[i + 2] = first_quad[i + 2] + quad[i + 2], quad[i + 3] = first_quad[i + 3] + quad[i + 3];
        }
      }
    }
    // Every stage has been read: the last wait of each warpgroup came after its last product.
    asm volatile("bar.sync 1, %0;" ::"n"(Shape::kConsumers) : "memory");
    const int g = lane / 4, t = lane % 4;
    float* place = sums + 2 * t * Shape::kSumStride + group * kGroupOutputs + warp % 4 * kTileM + g;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      place[(i / 4 * 8 + i % 2) * Shape::kSumStride + i / 2 % 2 * 8] = kOwnSlices > 1 ? quad[i] : runs[0][i];
    }
    if constexpr (kCluster == 4) {
      if (rank % 2 == 1) {
        place += Shape::kTileRows * Shape::kSumStride;
#pragma unroll
        for (int i = 0; i < kSums; ++i)
          place[(i / 4 * 8 + i % 2) * Shape::kSumStride + i / 2 % 2 * 8] = runs[1][i];
      }
    }
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    ClusterArrive();
    ClusterWait();
  }

  // Four neighbouring outputs of a row: from the blocks of the cluster, in the order of their runs.
  const auto total = [&](int row, int output) {
    const float* place = sums + row * Shape::kSumStride + output;
    if constexpr (kCluster == 1) {
      return *reinterpret_cast<const float4*>(place);
    } else if constexpr (kCluster == 2) {
      return Add(LoadFromCluster(place, 0), LoadFromCluster(place, 1));
    } else if constexpr (kCluster == 4) {
      const float* last = place + Shape::kTileRows * Shape::kSumStride;
      float4 parts[2][3];
#pragma unroll
      for (int quad = 0; quad < 2; ++quad) {
        parts[quad][0] = LoadFromCluster(place, 2 * quad);
        parts[quad][1] = LoadFromCluster(place, 2 * quad + 1);
        parts[quad][2] = LoadFromCluster(last, 2 * quad + 1);
      }
      return Add(Add(Add(parts[0][0], parts[0][1]), parts[0][2]),
                 Add(Add(parts[1][0], parts[1][1]), parts[1][2]));
    } else {
      float4 parts[kSlices];
#pragma unroll
      for (int i = 0; i < kSlices; ++i) parts[i] = LoadFromCluster(place, i);
#pragma unroll
      for (int quad = 0; quad < kSlices; quad += kQuadSlices) {
#pragma unroll
        for (int i = 1; i < kQuadSlices; ++i) parts[quad] = Add(parts[quad], parts[quad + i]);
      }
      return Add(parts[0], parts[kQuadSlices]);
    }
  };
  // A block's share is a few rows of the tile. A thread keeps to four columns, and takes kBatch rows at a
  // time so that their loads overlap.
  constexpr int kShareRows = Shape::kTileRows / kCluster;
  static_assert(Shape::kTileRows % kCluster == 0);
  const int first_row = rank * kShareRows;
  const int rows_left = params.num_rows - row_begin - first_row;
  const int share_rows = rows_left < kShareRows ? rows_left : kShareRows;
  const auto store_share = [&](auto kind) {
    constexpr LinearOutput kKind = decltype(kind)::value;
    constexpr bool kIsAct = kKind == LinearOutput::kAct || kKind == LinearOutput::kGatedSilu;
    constexpr int kOutputs =
        kKind == LinearOutput::kGatedSilu ? Shape::kTileOutputs / 2 : Shape::kTileOutputs;
    constexpr int kRowQuads = kOutputs / 4, kStep = Shape::kConsumers / kRowQuads;
    constexpr int kBatch = kShareRows / kStep < 4 ? kShareRows / kStep < 1 ? 1 : kShareRows / kStep : 4;
    using Quad = std::conditional_t<kIsAct, uint2, float4>;
    const int quad = threadIdx.x % kRowQuads;
    const int output = static_cast<int>(blockIdx.y) * kOutputs + quad * 4;
    if (output >= params.out_columns) return;
    const int tile_output =
        kKind == LinearOutput::kGatedSilu ? quad / 2 * (2 * kGateUpGroup) + quad % 2 * 4 : quad * 4;
    using Element = std::conditional_t<kIsAct, Act, float>;
    Element* out = static_cast<Element*>(params.out) + (row_begin + first_row) * params.out_columns + output;
#pragma unroll 1
    for (int row = threadIdx.x / kRowQuads; row < share_rows; row += kBatch * kStep) {
      float4 old[kBatch], sum[kBatch];
      Quad* to[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        to[i] = reinterpret_cast<Quad*>(out + (row + i * kStep) * params.out_columns);
        if constexpr (kKind == LinearOutput::kAddFloat) {
          old[i] = row + i * kStep < share_rows ? *to[i] : float4{};
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {  // rows beyond the share hold sums too
        const int tile_row = (first_row + row + i * kStep) % Shape::kTileRows;
        sum[i] = total(tile_row, tile_output);
        if constexpr (kKind == LinearOutput::kGatedSilu) {
          const float4 up = total(tile_row, tile_output + kGateUpGroup);
          sum[i] = {Silu(sum[i].x) * up.x, Silu(sum[i].y) * up.y, Silu(sum[i].z) * up.z,
                    Silu(sum[i].w) * up.w};
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row + i * kStep >= share_rows) break;
        if constexpr (kIsAct) {
          *to[i] = {PackPair<Act>(sum[i].x, sum[i].y), PackPair<Act>(sum[i].z, sum[i].w)};
        } else if constexpr (kKind == LinearOutput::kAddFloat) {
          *to[i] = Add(old[i], sum[i]);
        } else {
          *to[i] = sum[i];
        }
      }
    }
  };
  if (threadIdx.x < Shape::kConsumers) {
    switch (params.output) {  // one loop each, so that only one is fetched
      case LinearOutput::kAct:
        store_share(std::integral_constant<LinearOutput, LinearOutput::kAct>());
        break;
      case LinearOutput::kGatedSilu:
        store_share(std::integral_constant<LinearOutput, LinearOutput::kGatedSilu>());
        break;
      case LinearOutput::kFloat:
        store_share(std::integral_constant<LinearOutput, LinearOutput::kFloat>());
        break;
      case LinearOutput::kAddFloat:
        store_share(std::integral_constant<LinearOutput, LinearOutput::kAddFloat>());
        break;
    }
  }
  if constexpr (kCluster > 1) {
    // No block leaves while another reads its sums.
    __syncwarp();
    ClusterArrive();
    ClusterWait();
  }
#endif
}

template <typename Act, typename Shape, int kCluster>
cudaError_t LaunchShaped(const LaunchContext& context, const LinearParams& params) {
  CUtensorMap weight_map, input_map;
  cudaError_t error =
      MakeTensorMap(params.weight, context.act, params.outputs, params.cols, Shape::kTileOutputs, weight_map);
  if (error != cudaSuccess) return error;
  error = MakeTensorMap(params.y, context.act, params.num_rows, params.cols, Shape::kTileRows, input_map);
  if (error != cudaSuccess) return error;
  const int blocks = (params.cols + kBlockCols - 1) / kBlockCols;
  const int own_blocks = (blocks + kCluster - 1) / kCluster + (kCluster > 1 ? 1 : 0);
  const int stages = own_blocks < Shape::MaxStages(kCluster) ? own_blocks : Shape::MaxStages(kCluster);
  LaunchShape shape;
  shape.grid = dim3(kCluster * ((params.num_rows + Shape::kTileRows - 1) / Shape::kTileRows),
                    static_cast<unsigned>((params.outputs + Shape::kTileOutputs - 1) / Shape::kTileOutputs));
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = Shape::SharedBytes(stages, kCluster);
  shape.cluster = kCluster;
  return Launch(context, shape, WideKernel<Act, Shape, kCluster>, weight_map, input_map, params, stages);
}

using Launcher = cudaError_t (*)(const LaunchContext&, const LinearParams&);

struct Candidate {
  int tile_outputs, tile_rows, cluster;
  // Of a block, microseconds: its start and end, 64 columns; and how many of them a multiprocessor runs at
  // once.
  double block_us, columns_us, blocks_at_once;
  Launcher launch;
};

template <typename Act, int kGroups, int kRows, int kCluster>
constexpr Candidate MakeCandidate(double block_us, double columns_us, double blocks_at_once) {
  using Shape = WideShape<kGroups, kRows>;
  return {Shape::kTileOutputs,
          kRows,
          kCluster,
          block_us,
          columns_us,
          blocks_at_once,
          LaunchShaped<Act, Shape, kCluster>};
}

// The times are fitted to measurements of ten products on an H200.
template <typename Act>
constexpr Candidate kCandidates[] = {
    MakeCandidate<Act, 1, 32, 1>(1.0, 0.19, 1.5),  MakeCandidate<Act, 1, 32, 2>(1.0, 0.19, 1.5),
    MakeCandidate<Act, 1, 32, 4>(1.0, 0.19, 1.5),  MakeCandidate<Act, 1, 32, 8>(1.0, 0.19, 1.5),
    MakeCandidate<Act, 2, 32, 1>(2.5, 0.27, 1.5),  MakeCandidate<Act, 1, 64, 1>(1.45, 0.24, 1.0),
    MakeCandidate<Act, 1, 64, 2>(1.45, 0.24, 1.0), MakeCandidate<Act, 1, 64, 8>(1.45, 0.24, 1.0),
    MakeCandidate<Act, 2, 64, 1>(2.6, 0.36, 1.0),  MakeCandidate<Act, 1, 128, 2>(2.0, 0.32, 1.0),
    MakeCandidate<Act, 2, 128, 1>(6.5, 0.32, 1.0), MakeCandidate<Act, 2, 128, 2>(6.5, 0.32, 1.0),
};

// Microseconds that a product takes, roughly: as many rounds of blocks as the multiprocessors need (whole
// ones while they are few), and the exchange within clusters. Within 3 % of the best candidate on average.
double EstimatedTime(const Candidate& candidate, const LaunchContext& context, const LinearParams& params) {
  const int64_t row_tiles = (params.num_rows + candidate.tile_rows - 1) / candidate.tile_rows;
  const int64_t output_tiles = (params.outputs + candidate.tile_outputs - 1) / candidate.tile_outputs;
  const double blocks = static_cast<double>(row_tiles * output_tiles * candidate.cluster);
  const double rounds = blocks / (context.multiprocessors * candidate.blocks_at_once);
  constexpr double kFewRounds = 2;
  const int columns = (params.cols + kBlockCols - 1) / kBlockCols;
  const double exchange_us = candidate.cluster == 1 ? 0.0 : candidate.cluster == 2 ? 0.7 : 2.0;
  return (rounds < kFewRounds ? std::ceil(rounds) : rounds) *
             (candidate.block_us + candidate.columns_us * columns / candidate.cluster) +
         exchange_us;
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const LinearParams& params) {
  const Candidate* best = nullptr;
  double best_time = 0;
  for (const Candidate& candidate : kCandidates<Act>) {
    const double time = EstimatedTime(candidate, context, params);
    if (best != nullptr && time >= best_time) continue;
    best = &candidate;
    best_time = time;
  }
  return best->launch(context, params);
}

}  // namespace

bool HasHopperCode() {
  cudaFuncAttributes attributes;
  const void* kernel = reinterpret_cast<const void*>(WideKernel<__half, WideShape<1, 32>, 1>);
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  constexpr int kHopper = 90;
  return attributes.ptxVersion == kHopper && attributes.binaryVersion == kHopper;
}

cudaError_t LaunchLinearWide(const LaunchContext& context, const LinearParams& params) {
  // Rows of odd lengths are stored one value at a time, and runs may be empty, only in the other kernel.
  if (params.out_columns % 4 != 0 || params.cols <= (kSlices - 1) * kBlockCols) {
    return LaunchLinearNarrow(context, params);
  }
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
