// One token of many sequences, everything between the projection and o_proj in one launch:
//
//   q, k, v = act(conv(proj)), q L2-normalised and scaled by d_k^-1/2, k L2-normalised in the DeltaNet types
//   p = S^T k, r = S^T q                                  one pass over the state
//   u = write v - decay erase p
//   S <- decay S + k u^T,  o = decay r + (k.q) u
//   out = rms_norm(o; o_norm) (* silu(gate))
//
// Shapes: proj act [rows, q|k|v|gate], state float32 [d_k, d_v] a head in the pool's slots, out act [rows,
// heads d_v]. A cluster of kDv / kColumns blocks owns one (row, head), a block kColumns columns of its state,
// which lie in registers from the first instruction on: a thread 4 columns of kDk / kRowGroups consecutive
// rows. Everything else a block reads is copied to shared memory meanwhile, all of it before any is used, so
// that a block waits for the memory twice: for its slot's number, then for the rest. Every block of a cluster
// computes q and k of the head anew; the sums of squares for the output norm cross the cluster in its shared
// memory. Bytes: 8 d_k d_v a head for the state, and 8 (conv_size - 1) (2 d_k + d_v).
//
// Exactness: p and r are summed over rows, and the squares over columns, as fixed trees over groups that
// every tile is made of: kDk / kGroupsOfRows rows, kNormColumns columns. Nothing depends on other rows.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kGroupsOfRows = 32;  // that the state's rows are cut into; each is summed in order
constexpr int kVectorColumns = 4;  // of a thread
constexpr int kNormColumns = 16;   // whose squares are summed first
constexpr int kAnyConvSize = -1;   // conv_size is read from the layer

template <typename Act, int kDk, int kDv, int kColumns, int kRowGroups>
struct Tile {
  static constexpr int kSplit = kDv / kColumns;
  static constexpr int kColumnGroups = kColumns / kVectorColumns;
  static constexpr int kThreads = kRowGroups * kColumnGroups;
  static constexpr int kWarps = kThreads / kWarpLanes;
  static constexpr int kRows = kDk / kRowGroups;
  static constexpr int kGroupRows = kDk / kGroupsOfRows;
  static constexpr int kChannels = 2 * kDk + kColumns;  // that the block computes: q, k, its columns of v
  static_assert(kDk % kGroupsOfRows == 0 && kRows % kGroupRows == 0 && kDk % kSplit == 0);
  static_assert(kColumns % kNormColumns == 0 && kColumnGroups <= kWarpLanes && kThreads % kWarpLanes == 0);

  struct Shared {
    float sums[kWarps][2][kColumns];
    float channels[kChannels];  // activated q, k, v
    float o_norm[kColumns];
    float squares[kDv / kNormColumns];
    alignas(16) Act proj[kChannels];
    alignas(16) Act gate[kColumns];
  };
  // Behind it, float: the convolution's older inputs [conv_size - 1][kChannels], its weights
  // [kChannels][conv_size].
};

// The sum of values[0 .. kCount) as a binary tree over neighbours.
template <int kCount>
__device__ inline float4 TreeSum(const float* values, int stride) {
  if constexpr (kCount == 1) {
    return *reinterpret_cast<const float4*>(values);
  } else {
    const float4 low = TreeSum<kCount / 2>(values, stride);
    const float4 high = TreeSum<kCount / 2>(values + kCount / 2 * stride, stride);
    return {low.x + high.x, low.y + high.y, low.z + high.z, low.w + high.w};
  }
}

// weights[0 .. kCount) . states[0 .. kCount): runs of kRun in order, the runs as a binary tree.
template <int kCount, int kRun>
__device__ inline float4 TreeDot(const float* weights, const float4* states) {
  if constexpr (kCount == kRun) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum.x = fmaf(weights[i], states[i].x, sum.x);
      sum.y = fmaf(weights[i], states[i].y, sum.y);
      sum.z = fmaf(weights[i], states[i].z, sum.z);
      sum.w = fmaf(weights[i], states[i].w, sum.w);
    }
    return sum;
  } else {
    const float4 low = TreeDot<kCount / 2, kRun>(weights, states);
    const float4 high = TreeDot<kCount / 2, kRun>(weights + kCount / 2, states + kCount / 2);
    return {low.x + high.x, low.y + high.y, low.z + high.z, low.w + high.w};
  }
}

__device__ inline float4 AddFromLane(float4 value, int distance) {
  return {value.x + __shfl_xor_sync(kAllLanes, value.x, distance),
          value.y + __shfl_xor_sync(kAllLanes, value.y, distance),
          value.z + __shfl_xor_sync(kAllLanes, value.z, distance),
          value.w + __shfl_xor_sync(kAllLanes, value.w, distance)};
}

// Threads that a multiprocessor must hold for enough bytes in flight: 4 blocks of 256, 32 KB each, are four
// times what the memory's latency asks for.
constexpr int kMinThreads = 1024;

template <typename Act, int kDk, int kDv, int kColumns, int kRowGroups, int kConvSize>
__global__ __launch_bounds__(Tile<Act, kDk, kDv, kColumns, kRowGroups>::kThreads,
                             kColumns < kDv
                                 ? kMinThreads / Tile<Act, kDk, kDv, kColumns, kRowGroups>::kThreads
                                 : 1) void RecurrentKernel(RecurrentParams params) {
  using T = Tile<Act, kDk, kDv, kColumns, kRowGroups>;
  constexpr int kSplit = T::kSplit;
  EFLA_DYNAMIC_SHARED(raw);
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(raw);

  const MixLayer& layer = params.mix.layer;
  const int conv_size = kConvSize == kAnyConvSize ? layer.conv_size : kConvSize;
  const int older_inputs = conv_size > 0 ? conv_size - 1 : 0;
  float* older = reinterpret_cast<float*>(raw + sizeof(typename T::Shared));
  float* taps = older + older_inputs * T::kChannels;

  const int rank = static_cast<int>(blockIdx.x % kSplit);
  const int head = static_cast<int>(blockIdx.x / kSplit % layer.num_heads);
  const int row = static_cast<int>(blockIdx.x / kSplit / layer.num_heads);
  // The slots of padding rows are there to be read as well: three loads at once.
  const int active_rows = *params.active_rows;
  const int32_t read_slot = params.read_slot[row], write_slot = params.write_slot[row];
  if constexpr (kSplit > 1) ClusterArriveRelaxed();  // that this block runs

  // Channel c of the block, 0 <= c < kChannels, is of this part, and this one among the q|k|v channels.
  const auto part_of = [](int c) { return c < kDk ? kQuery : c < 2 * kDk ? kKey : kValue; };
  const auto channel_of = [&](int c) {
    const int part = part_of(c);
    return static_cast<int>(PartChannel(layer, part, head)) + c - part * kDk +
           (part == kValue ? rank * kColumns : 0);
  };
  // A part's channels lie side by side everywhere, a multiple of 4 of them.
  for (int i = 4 * threadIdx.x; i < T::kChannels * conv_size; i += 4 * T::kThreads) {
    const int part = i < kDk * conv_size ? kQuery : i < 2 * kDk * conv_size ? kKey : kValue;
    const int skipped = (part == kValue ? rank * kColumns - 2 * kDk : -part * kDk) * conv_size;
    CpAsync16Cached(taps + i, PartConv(layer, part, head) + skipped + i);
  }
  for (int i = 4 * threadIdx.x; i < kColumns; i += 4 * T::kThreads) {
    CpAsync16Cached(shared.o_norm + i, layer.o_norm + rank * kColumns + i);
  }
  if (row >= active_rows) {  // the same in the whole cluster
    CpAsyncCommit();
    CpAsyncWait<0>();
    GridDependencyWait();
    if constexpr (kSplit > 1) ClusterWait();
    return;
  }

  const StateView& state = params.mix.state;
  const float* read = state.pool + static_cast<int64_t>(read_slot) * state.slot_stride;
  const int row_group = threadIdx.x / T::kColumnGroups, column_group = threadIdx.x % T::kColumnGroups;
  const int column = column_group * kVectorColumns;  // within the block
  const int tile_offset = head * (kDk * kDv) + row_group * T::kRows * kDv + rank * kColumns + column;
  float4 s[T::kRows];
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    s[i] = *reinterpret_cast<const float4*>(read + state.recurrent_offset + tile_offset + i * kDv);
  }
  const int conv_channels = layer.conv_channels();
  for (int i = 4 * threadIdx.x; i < T::kChannels * older_inputs; i += 4 * T::kThreads) {
    const int tap = i / T::kChannels;
    CpAsync16(older + i,
              read + state.conv_offset + static_cast<int64_t>(tap) * conv_channels +
                  channel_of(i - tap * T::kChannels),
              true);
  }

  GridDependencyWait();
  GridDependencyTrigger();
  const Act* proj =
      static_cast<const Act*>(params.mix.proj) + static_cast<int64_t>(row) * layer.proj_columns();
  constexpr int kActVector = 16 / sizeof(Act);
  for (int i = kActVector * threadIdx.x; i < T::kChannels; i += kActVector * T::kThreads) {
    CpAsync16(shared.proj + i, proj + channel_of(i), true);
  }
  if (layer.use_gate) {
    for (int i = kActVector * threadIdx.x; i < kColumns; i += kActVector * T::kThreads) {
      CpAsync16(shared.gate + i, proj + conv_channels + head * kDv + rank * kColumns + i, true);
    }
  }
  CpAsyncCommit();
  // What HeadScalars does, as far as it does not need the key.
  const float* coef = params.mix.coef + static_cast<int64_t>(row) * layer.coef_columns();
  float b = layer.allow_neg_eigval ? 2.0f : 1.0f, log_a = 0.0f;
  if (layer.use_beta) b = WriteStrength(coef[head], layer.allow_neg_eigval);
  if (IsGated(layer.type)) {
    log_a = LogForget(coef[(layer.use_beta ? layer.num_heads : 0) + head], layer.a_log[head],
                      layer.dt_bias[head]);
  }
  CpAsyncWait<0>();
  __syncthreads();

#pragma unroll
  for (int c = threadIdx.x; c < T::kChannels; c += T::kThreads) {
    float x = ToFloat(shared.proj[c]);
    if (conv_size > 0) {
      const float current = x;
      x = 0.0f;
#pragma unroll
      for (int j = 0; j + 1 < conv_size; ++j) {
        x = fmaf(taps[c * conv_size + j], older[j * T::kChannels + c], x);
      }
      x = fmaf(taps[c * conv_size + conv_size - 1], current, x);
    }
    shared.channels[c] = Activate(x, part_of(c), layer.qk_activation);
  }
  __syncthreads();

  // Every warp sums the head's squares for itself.
  const float* q = shared.channels;
  const float* k = shared.channels + kDk;
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  float qq = 0.0f, kk = 0.0f, kq = 0.0f;
#pragma unroll
  for (int i = lane; i < kDk; i += kWarpLanes) {
    qq = fmaf(q[i], q[i], qq);
    kk = fmaf(k[i], k[i], kk);
    kq = fmaf(k[i], q[i], kq);
  }
  float4 p = TreeDot<T::kRows, T::kGroupRows>(k + row_group * T::kRows, s);
  float4 r = TreeDot<T::kRows, T::kGroupRows>(q + row_group * T::kRows, s);
#pragma unroll
  for (int distance = T::kColumnGroups; distance < kWarpLanes; distance *= 2) {
    p = AddFromLane(p, distance);
    r = AddFromLane(r, distance);
  }
  if (lane < T::kColumnGroups) {
    *reinterpret_cast<float4*>(&shared.sums[warp][0][column]) = p;
    *reinterpret_cast<float4*>(&shared.sums[warp][1][column]) = r;
  }
  qq = WarpSum(qq);
  kk = WarpSum(kk);
  kq = WarpSum(kq);
  const MixScalars scalars = EflaScalars(layer.type, kk, b, log_a);
  const float q_scale = L2NormScale(qq) / sqrtf(static_cast<float>(kDk));
  const float k_scale = NormalizesKey(layer.type) ? L2NormScale(kk) : 1.0f;
  const float decay = expf(scalars.log_decay);
  __syncthreads();

  // The fused operations are spelt out: every instantiation must round alike.
  constexpr int kSumStride = 2 * kColumns;
  const float4 key_sums = TreeSum<T::kWarps>(&shared.sums[0][0][column], kSumStride);
  const float4 query_sums = TreeSum<T::kWarps>(&shared.sums[0][1][column], kSumStride);
  const float key_sum[kVectorColumns] = {key_sums.x, key_sums.y, key_sums.z, key_sums.w};
  const float query_sum[kVectorColumns] = {query_sums.x, query_sums.y, query_sums.z, query_sums.w};
  const float erased = decay * scalars.erase * k_scale, overlap = kq * k_scale * q_scale;
  const float kept = decay * q_scale;
  float u[kVectorColumns], o[kVectorColumns];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kVectorColumns; ++c) {
    u[c] = fmaf(-erased, key_sum[c], scalars.write * shared.channels[2 * kDk + column + c]);
    o[c] = fmaf(overlap, u[c], kept * query_sum[c]);
    squares = fmaf(o[c], o[c], squares);
  }

  // The head's sum of squares: over 4 columns, 4 threads, then the groups of kNormColumns in order.
  constexpr int kGroupThreads = kNormColumns / kVectorColumns;
#pragma unroll
  for (int distance = 1; distance < kGroupThreads; distance *= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, distance);
  }
  if constexpr (kSplit > 1) ClusterWait();  // every block of the cluster runs
  if (threadIdx.x < T::kColumnGroups && threadIdx.x % kGroupThreads == 0) {
    float* place = &shared.squares[rank * (kColumns / kNormColumns) + threadIdx.x / kGroupThreads];
    if constexpr (kSplit > 1) {
#pragma unroll
      for (int block = 0; block < kSplit; ++block) StoreToCluster(place, block, squares);
    } else {
      *place = squares;
    }
  }
  if constexpr (kSplit > 1) ClusterArrive();

  float* write = state.pool + static_cast<int64_t>(write_slot) * state.slot_stride;
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    const float ki = k[row_group * T::kRows + i] * k_scale;
    s[i].x = fmaf(ki, u[0], decay * s[i].x);
    s[i].y = fmaf(ki, u[1], decay * s[i].y);
    s[i].z = fmaf(ki, u[2], decay * s[i].z);
    s[i].w = fmaf(ki, u[3], decay * s[i].w);
    *reinterpret_cast<float4*>(write + state.recurrent_offset + tile_offset + i * kDv) = s[i];
  }
  if constexpr (kSplit > 1) {
    ClusterWait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x < T::kColumnGroups) {
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kDv / kNormColumns; ++group) sum += shared.squares[group];
    const float scale = RmsNormScale(sum / static_cast<float>(kDv), layer.norm_eps);
#pragma unroll
    for (int c = 0; c < kVectorColumns; ++c) {
      o[c] = o[c] * scale * shared.o_norm[column + c];
      if (layer.use_gate) o[c] *= Silu(ToFloat(shared.gate[column + c]));
    }
    Act* out = static_cast<Act*>(params.mix.out) + static_cast<int64_t>(row) * layer.v_channels() +
               head * kDv + rank * kColumns + column;
    *reinterpret_cast<uint2*>(out) = {PackPair<Act>(o[0], o[1]), PackPair<Act>(o[2], o[3])};
  }
  // The window moves on by one input. q and k are shared by the cluster's blocks, which have all read them by
  // now: each writes its share.
  if (older_inputs == 0) return;
  for (int c = threadIdx.x; c < T::kChannels; c += T::kThreads) {
    if (c < 2 * kDk && c % kDk / (kDk / kSplit) != rank) continue;
    float* tail = write + state.conv_offset + channel_of(c);
    for (int j = 0; j + 1 < older_inputs; ++j) {
      tail[static_cast<int64_t>(j) * conv_channels] = older[(j + 1) * T::kChannels + c];
    }
    tail[static_cast<int64_t>(older_inputs - 1) * conv_channels] = ToFloat(shared.proj[c]);
  }
}

template <typename Act, int kDk, int kDv, int kColumns, int kRowGroups, int kConvSize>
cudaError_t LaunchConv(const LaunchContext& context, const RecurrentParams& params) {
  using T = Tile<Act, kDk, kDv, kColumns, kRowGroups>;
  const int conv_size = params.mix.layer.conv_size;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.num_rows) * params.mix.layer.num_heads * T::kSplit);
  shape.block = dim3(T::kThreads);
  shape.shared_bytes = sizeof(typename T::Shared);
  if (conv_size > 0) shape.shared_bytes += sizeof(float) * (2 * conv_size - 1) * T::kChannels;
  shape.cluster = T::kSplit;
  return Launch(context, shape, RecurrentKernel<Act, kDk, kDv, kColumns, kRowGroups, kConvSize>, params);
}

template <typename Act, int kDk, int kDv, int kColumns, int kRowGroups>
cudaError_t LaunchTile(const LaunchContext& context, const RecurrentParams& params) {
  constexpr int kUsualConvSize = 4;
  return params.mix.layer.conv_size == kUsualConvSize
             ? LaunchConv<Act, kDk, kDv, kColumns, kRowGroups, kUsualConvSize>(context, params)
             : LaunchConv<Act, kDk, kDv, kColumns, kRowGroups, kAnyConvSize>(context, params);
}

template <typename Act, int kDk, int kDv>
cudaError_t LaunchHeadSize(const LaunchContext& context, const RecurrentParams& params) {
  if (!context.hopper) return LaunchTile<Act, kDk, kDv, kDv, 16>(context, params);
  // Narrow tiles of few rows a thread while they make less than two blocks for each multiprocessor.
  const int64_t narrow_blocks = static_cast<int64_t>(params.num_rows) * params.mix.layer.num_heads * kDv / 16;
  if (narrow_blocks <= 2 * context.multiprocessors) {
    return LaunchTile<Act, kDk, kDv, 16, 32>(context, params);
  }
  // Half a head a block: half of what the blocks of a head compute anew, and still four blocks a
  // multiprocessor.
  return LaunchTile<Act, kDk, kDv, kDv / 2, 16>(context, params);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const RecurrentParams& params) {
  return LaunchForHeadSize(params.mix.layer.d_k, params.mix.layer.d_v,
                           [&]<int kDk, int kDv> { return LaunchHeadSize<Act, kDk, kDv>(context, params); });
}

}  // namespace

bool HeadSizeSupported(int d_k, int d_v) {
  return LaunchForHeadSize(d_k, d_v, []<int kDk, int kDv> {
           return kDk > 0 && kDv > 0 ? cudaSuccess : cudaErrorInvalidValue;
         }) == cudaSuccess;
}

cudaError_t LaunchRecurrent(const LaunchContext& context, const RecurrentParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
