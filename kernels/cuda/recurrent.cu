// One token of many sequences, everything between the projection and o_proj in one launch:
//
//   q, k, v = act(conv(proj)), q L2-normalised and scaled by d_k^-1/2, k L2-normalised in the DeltaNet types
//   p = S^T k, r = S^T q                                  one pass over the state
//   u = write v - decay erase p
//   S <- decay S + k u^T,  o = decay r + (k.q) u
//   out = rms_norm(o; o_norm) (* silu(gate))
//
// Shapes: proj act [rows, q|k|v|gate], state float32 [d_k, d_v] a head in the pool's slots, out act [rows,
// heads d_v]. kSplit blocks, a cluster, own one (row, head); a block kDv / kSplit columns of its state, which
// lie in registers from the first instruction on: a thread 4 columns of kDk / kRowGroups consecutive rows,
// all loaded (16 bytes each) before any is used. Every block of a cluster computes q and k of the head anew;
// the sums of squares for the output norm cross the cluster in its shared memory. Bytes: 8 d_k d_v a head for
// the state, and 8 (conv_size - 1) (2 d_k + d_v).
//
// Exactness: p and r are summed over rows as a fixed binary tree whatever kSplit is; nothing depends on other
// rows.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kRowGroups = 16;     // that the state's rows are cut into, one a thread
constexpr int kVectorColumns = 4;  // of a thread
constexpr int kNormColumns = 32;   // whose squares are summed first

template <int kDk, int kDv, int kSplit>
struct Tile {
  static constexpr int kColumns = kDv / kSplit;
  static constexpr int kColumnGroups = kColumns / kVectorColumns;
  static constexpr int kThreads = kRowGroups * kColumnGroups;
  static constexpr int kWarps = kThreads / kWarpLanes;
  static constexpr int kRows = kDk / kRowGroups;
  static constexpr int kChannels = 2 * kDk + kColumns;  // that the block computes: q, k, its columns of v
  static_assert(kColumns % kNormColumns == 0 && kColumnGroups <= kWarpLanes && kThreads % kWarpLanes == 0);
  static_assert(kDk % kWarpLanes == 0 && kDk % kSplit == 0);

  struct Shared {
    float sums[kWarps][2][kColumns];
    float channels[kChannels];  // activated q, k, v
    float squares[kDv / kNormColumns];
  };
  // Behind it: float inputs[conv_size][kChannels], the convolution's window.
};

// The sum of values[0 .. kCount) as a binary tree over neighbours.
template <int kCount>
__device__ inline float TreeSum(const float* values, int stride) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return TreeSum<kCount / 2>(values, stride) + TreeSum<kCount / 2>(values + kCount / 2 * stride, stride);
  }
}

// Blocks that a multiprocessor must hold for enough bytes in flight: 8 blocks of 16 KB are four times what
// the memory's latency asks for.
constexpr int kMinSplitBlocks = 8;

template <typename Act, int kDk, int kDv, int kSplit>
__global__ __launch_bounds__(Tile<kDk, kDv, kSplit>::kThreads,
                             kSplit > 1 ? kMinSplitBlocks : 1) void RecurrentKernel(RecurrentParams params) {
  using T = Tile<kDk, kDv, kSplit>;
  EFLA_DYNAMIC_SHARED(raw);
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(raw);
  float* inputs = reinterpret_cast<float*>(raw + sizeof(typename T::Shared));

  const MixLayer& layer = params.mix.layer;
  const int rank = static_cast<int>(blockIdx.x % kSplit);
  const int head = static_cast<int>(blockIdx.x / kSplit % layer.num_heads);
  const int row = static_cast<int>(blockIdx.x / kSplit / layer.num_heads);
  if (row >= *params.active_rows) {  // the same in the whole cluster
    GridDependencyWait();
    return;
  }
  if constexpr (kSplit > 1) ClusterArriveRelaxed();  // that this block runs

  const StateView& state = params.mix.state;
  const float* read = state.pool + static_cast<int64_t>(params.read_slot[row]) * state.slot_stride;
  float* write = state.pool + static_cast<int64_t>(params.write_slot[row]) * state.slot_stride;
  const int row_group = threadIdx.x / T::kColumnGroups, column_group = threadIdx.x % T::kColumnGroups;
  const int column = column_group * kVectorColumns;  // within the block
  const int64_t tile_offset = state.recurrent_offset + static_cast<int64_t>(head) * (kDk * kDv) +
                              row_group * T::kRows * kDv + rank * T::kColumns + column;
  float4 s[T::kRows];
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) s[i] = *reinterpret_cast<const float4*>(read + tile_offset + i * kDv);

  // The window's older inputs. A channel's window is written and read by one thread.
  const int conv_size = layer.conv_size, window = conv_size > 0 ? conv_size : 1;
  const int64_t conv_channels = layer.conv_channels();
  const auto part_of = [](int c) { return c < kDk ? kQuery : c < 2 * kDk ? kKey : kValue; };
  const auto channel_of = [&](int c) {  // among the q|k|v channels
    const int part = part_of(c);
    return PartChannel(layer, part, head) +
           (part == kValue ? rank * T::kColumns + c - 2 * kDk : c - part * kDk);
  };
  for (int c = threadIdx.x; c < T::kChannels; c += T::kThreads) {
    const float* tail = read + state.conv_offset + channel_of(c);
    for (int j = 0; j < window - 1; ++j) inputs[j * T::kChannels + c] = tail[j * conv_channels];
  }

  GridDependencyWait();
  GridDependencyTrigger();
  const Act* proj =
      static_cast<const Act*>(params.mix.proj) + static_cast<int64_t>(row) * layer.proj_columns();
  for (int c = threadIdx.x; c < T::kChannels; c += T::kThreads) {
    const int part = part_of(c);
    const int64_t channel = channel_of(c);
    float x = ToFloat(proj[channel]);
    inputs[(window - 1) * T::kChannels + c] = x;
    if (conv_size > 0) {
      const float* weight =
          PartConv(layer, part, head) + (channel - PartChannel(layer, part, head)) * conv_size;
      x = 0.0f;
      for (int j = 0; j < conv_size; ++j) x = fmaf(weight[j], inputs[j * T::kChannels + c], x);
    }
    shared.channels[c] = Activate(x, part, layer.qk_activation);
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
  qq = WarpSum(qq);
  kk = WarpSum(kk);
  kq = WarpSum(kq);
  const float* coef = params.mix.coef + static_cast<int64_t>(row) * layer.coef_columns();
  const MixScalars scalars = HeadScalars(layer, coef, head, kk);
  const float q_scale = L2NormScale(qq) / sqrtf(static_cast<float>(kDk));
  const float k_scale = NormalizesKey(layer.type) ? L2NormScale(kk) : 1.0f;
  const float decay = expf(scalars.log_decay);

  float p[kVectorColumns] = {}, r[kVectorColumns] = {};
#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    const float ki = k[row_group * T::kRows + i], qi = q[row_group * T::kRows + i];
    const float values[kVectorColumns] = {s[i].x, s[i].y, s[i].z, s[i].w};
#pragma unroll
    for (int c = 0; c < kVectorColumns; ++c) {
      p[c] = fmaf(ki, values[c], p[c]);
      r[c] = fmaf(qi, values[c], r[c]);
    }
  }
#pragma unroll
  for (int distance = T::kColumnGroups; distance < kWarpLanes; distance *= 2) {
#pragma unroll
    for (int c = 0; c < kVectorColumns; ++c) {
      p[c] += __shfl_xor_sync(kAllLanes, p[c], distance);
      r[c] += __shfl_xor_sync(kAllLanes, r[c], distance);
    }
  }
  if (lane < T::kColumnGroups) {
    *reinterpret_cast<float4*>(&shared.sums[warp][0][column]) = {p[0], p[1], p[2], p[3]};
    *reinterpret_cast<float4*>(&shared.sums[warp][1][column]) = {r[0], r[1], r[2], r[3]};
  }
  __syncthreads();

  float u[kVectorColumns], o[kVectorColumns];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kVectorColumns; ++c) {
    constexpr int kStride = 2 * T::kColumns;
    const float key_sum = TreeSum<T::kWarps>(&shared.sums[0][0][column + c], kStride) * k_scale;
    const float query_sum = TreeSum<T::kWarps>(&shared.sums[0][1][column + c], kStride) * q_scale;
    u[c] = scalars.write * shared.channels[2 * kDk + column + c] - decay * scalars.erase * key_sum;
    o[c] = decay * query_sum + kq * k_scale * q_scale * u[c];
    squares = fmaf(o[c], o[c], squares);
  }

  // The head's sum of squares: over 4 columns, 8 threads, then the groups of kNormColumns in order.
#pragma unroll
  for (int distance = 1; distance < kNormColumns / kVectorColumns; distance *= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, distance);
  }
  constexpr int kGroupThreads = kNormColumns / kVectorColumns;
  if constexpr (kSplit > 1) ClusterWait();  // every block of the cluster runs
  if (threadIdx.x < T::kColumnGroups && threadIdx.x % kGroupThreads == 0) {
    float* place = &shared.squares[rank * (T::kColumns / kNormColumns) + threadIdx.x / kGroupThreads];
    if constexpr (kSplit > 1) {
      for (int block = 0; block < kSplit; ++block) StoreToCluster(place, block, squares);
    } else {
      *place = squares;
    }
  }
  if constexpr (kSplit > 1) ClusterArrive();

#pragma unroll
  for (int i = 0; i < T::kRows; ++i) {
    const float ki = k[row_group * T::kRows + i] * k_scale;
    s[i].x = fmaf(ki, u[0], decay * s[i].x);
    s[i].y = fmaf(ki, u[1], decay * s[i].y);
    s[i].z = fmaf(ki, u[2], decay * s[i].z);
    s[i].w = fmaf(ki, u[3], decay * s[i].w);
    *reinterpret_cast<float4*>(write + tile_offset + i * kDv) = s[i];
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
    const int head_column = rank * T::kColumns + column;
    const int64_t out_column = static_cast<int64_t>(head) * kDv + head_column;
    const Act* gate = proj + conv_channels + out_column;
#pragma unroll
    for (int c = 0; c < kVectorColumns; ++c) {
      o[c] = o[c] * scale * layer.o_norm[head_column + c];
      if (layer.use_gate) o[c] *= Silu(ToFloat(gate[c]));
    }
    Act* out =
        static_cast<Act*>(params.mix.out) + static_cast<int64_t>(row) * layer.v_channels() + out_column;
    *reinterpret_cast<uint2*>(out) = {PackPair<Act>(o[0], o[1]), PackPair<Act>(o[2], o[3])};
  }
  // The window moves on by one input. q and k are shared by the cluster's blocks, which have all read them by
  // now: each writes its share.
  for (int c = threadIdx.x; c < T::kChannels; c += T::kThreads) {
    if (c < 2 * kDk && c % kDk / (kDk / kSplit) != rank) continue;
    float* tail = write + state.conv_offset + channel_of(c);
    for (int j = 0; j + 1 < window; ++j) tail[j * conv_channels] = inputs[(j + 1) * T::kChannels + c];
  }
}

template <typename Act, int kDk, int kDv, int kSplit>
cudaError_t LaunchSplit(const LaunchContext& context, const RecurrentParams& params) {
  using T = Tile<kDk, kDv, kSplit>;
  const int window = params.mix.layer.conv_size > 0 ? params.mix.layer.conv_size : 1;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(params.num_rows) * params.mix.layer.num_heads * kSplit);
  shape.block = dim3(T::kThreads);
  shape.shared_bytes = sizeof(typename T::Shared) + sizeof(float) * window * T::kChannels;
  shape.cluster = kSplit;
  return Launch(context, shape, RecurrentKernel<Act, kDk, kDv, kSplit>, params);
}

template <typename Act, int kDk, int kDv>
cudaError_t LaunchHeadSize(const LaunchContext& context, const RecurrentParams& params) {
  if (context.clusters) return LaunchSplit<Act, kDk, kDv, kDv / kNormColumns>(context, params);
  return LaunchSplit<Act, kDk, kDv, 1>(context, params);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const RecurrentParams& params) {
  const int d_k = params.mix.layer.d_k, d_v = params.mix.layer.d_v;
  if (d_k == 128 && d_v == 128) return LaunchHeadSize<Act, 128, 128>(context, params);
  if (d_k == 64 && d_v == 64) return LaunchHeadSize<Act, 64, 64>(context, params);
  if (d_k == 32 && d_v == 128) return LaunchHeadSize<Act, 32, 128>(context, params);
  if (d_k == 64 && d_v == 128) return LaunchHeadSize<Act, 64, 128>(context, params);
  return cudaErrorInvalidValue;
}

}  // namespace

bool HeadSizeSupported(int d_k, int d_v) {
  return (d_k == 128 && d_v == 128) || (d_k == 64 && d_v == 64) || (d_k == 32 && d_v == 128) ||
         (d_k == 64 && d_v == 128);
}

cudaError_t LaunchRecurrent(const LaunchContext& context, const RecurrentParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
