// The tokens of each segment in order, for the head sizes and model types that chunk_scan.cu does not serve:
//
//   p = S^T k, r = S^T q,  u = write v - decay erase p,  S <- decay S + k u^T,  o = decay r + (k.q) u
//
// Shapes: prepared float32 [tokens, q|k|v] and scalars [tokens, heads] of token_prepare.cu; state float32
// [d_k, d_v] a head; mixed float32 [tokens, heads d_v]. A block owns one head of one segment and 32 columns
// of its state, which stay in registers from the first token to the last: a thread 4 columns of kDk / 16
// rows. Bound by the latency of one token (two barriers), not by bytes. Exactness: one token after the other,
// so no cut of a segment can matter.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int kColumns = 32;
constexpr int kVectorColumns = 4;
constexpr int kColumnGroups = kColumns / kVectorColumns;
constexpr int kRowGroups = kThreads / kColumnGroups;

template <int kDk, int kDv>
__global__ __launch_bounds__(kThreads) void TokenScanKernel(ChunkParams params) {
  constexpr int kRows = kDk / kRowGroups;
  constexpr int kBlocksPerHead = kDv / kColumns;
  constexpr int kInputs = 2 * kDk + kColumns;  // of a token: q, k, the block's columns of v
  constexpr int kThreadInputs = (kInputs + kThreads - 1) / kThreads;
  __shared__ float inputs[2][kInputs];
  __shared__ float4 scalars[2];
  __shared__ float sums[2][kWarps][2][kColumns];
  const MixLayer& layer = params.mix.layer;
  const int column_begin = static_cast<int>(blockIdx.x % kBlocksPerHead) * kColumns;
  const int head = static_cast<int>(blockIdx.x / kBlocksPerHead % layer.num_heads);
  const Segment segment =
      params.segments[params.segment_begin + static_cast<int>(blockIdx.x / kBlocksPerHead / layer.num_heads)];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int row_group = threadIdx.x / kColumnGroups, column = threadIdx.x % kColumnGroups * kVectorColumns;
  GridDependencyWait();
  GridDependencyTrigger();

  const StateView& view = params.mix.state;
  const int64_t offset = view.recurrent_offset + static_cast<int64_t>(head) * (kDk * kDv) +
                         row_group * kRows * kDv + column_begin + column;
  const float* read = view.pool + static_cast<int64_t>(segment.read_slot) * view.slot_stride + offset;
  float4 s[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) s[i] = *reinterpret_cast<const float4*>(read + i * kDv);

  // This thread's inputs of the next token are on their way while the current one is computed.
  const int64_t channels = layer.conv_channels();
  const float* prepared = static_cast<const float*>(params.prepared) + segment.token_begin * channels;
  float next[kThreadInputs] = {};
  float4 next_scalars = {};
  const auto fetch = [&](int64_t token) {
#pragma unroll
    for (int i = 0; i < kThreadInputs; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c >= kInputs) break;
      const int part = c < kDk ? kQuery : c < 2 * kDk ? kKey : kValue;
      const int64_t channel =
          PartChannel(layer, part, head) + (part == kValue ? column_begin + c - 2 * kDk : c - part * kDk);
      next[i] = prepared[token * channels + channel];
    }
    if (threadIdx.x == 0)
      next_scalars = params.scalars[(segment.token_begin + token) * layer.num_heads + head];
  };
  fetch(0);
  float* out = params.mixed + static_cast<int64_t>(segment.token_begin) * layer.v_channels() +
               static_cast<int64_t>(head) * kDv + column_begin + column;
  for (int token = 0; token < segment.num_tokens; ++token) {
    const int buffer = token % 2;
#pragma unroll
    for (int i = 0; i < kThreadInputs; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c < kInputs) inputs[buffer][c] = next[i];
    }
    if (threadIdx.x == 0) scalars[buffer] = next_scalars;
    __syncthreads();
    if (token + 1 < segment.num_tokens) fetch(token + 1);

    const float* q = inputs[buffer] + row_group * kRows;
    const float* k = inputs[buffer] + kDk + row_group * kRows;
    float p[kVectorColumns] = {}, r[kVectorColumns] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float values[kVectorColumns] = {s[i].x, s[i].y, s[i].z, s[i].w};
#pragma unroll
      for (int c = 0; c < kVectorColumns; ++c) {
        p[c] = fmaf(k[i], values[c], p[c]);
        r[c] = fmaf(q[i], values[c], r[c]);
      }
    }
#pragma unroll
    for (int distance = kColumnGroups; distance < kWarpLanes; distance *= 2) {
#pragma unroll
      for (int c = 0; c < kVectorColumns; ++c) {
        p[c] += __shfl_xor_sync(kAllLanes, p[c], distance);
        r[c] += __shfl_xor_sync(kAllLanes, r[c], distance);
      }
    }
    if (lane < kColumnGroups) {
      *reinterpret_cast<float4*>(&sums[buffer][warp][0][column]) = {p[0], p[1], p[2], p[3]};
      *reinterpret_cast<float4*>(&sums[buffer][warp][1][column]) = {r[0], r[1], r[2], r[3]};
    }
    __syncthreads();

    const float4 scalar = scalars[buffer];  // decay, erase, write, k.q
    float u[kVectorColumns], o[kVectorColumns];
#pragma unroll
    for (int c = 0; c < kVectorColumns; ++c) {
      float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        key_sum += sums[buffer][w][0][column + c];
        query_sum += sums[buffer][w][1][column + c];
      }
      u[c] = scalar.z * inputs[buffer][2 * kDk + column + c] - scalar.x * scalar.y * key_sum;
      o[c] = scalar.x * query_sum + scalar.w * u[c];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      s[i].x = fmaf(k[i], u[0], scalar.x * s[i].x);
      s[i].y = fmaf(k[i], u[1], scalar.x * s[i].y);
      s[i].z = fmaf(k[i], u[2], scalar.x * s[i].z);
      s[i].w = fmaf(k[i], u[3], scalar.x * s[i].w);
    }
    if (threadIdx.x < kColumnGroups) {
      *reinterpret_cast<float4*>(out + static_cast<int64_t>(token) * layer.v_channels()) = {o[0], o[1], o[2],
                                                                                            o[3]};
    }
  }

  float* write = view.pool + static_cast<int64_t>(segment.write_slot) * view.slot_stride + offset;
#pragma unroll
  for (int i = 0; i < kRows; ++i) *reinterpret_cast<float4*>(write + i * kDv) = s[i];
}

template <int kDk, int kDv>
cudaError_t LaunchHeadSize(const LaunchContext& context, const ChunkParams& params) {
  constexpr int kBlocksPerHead = kDv / kColumns;
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(params.num_segments) * params.mix.layer.num_heads * kBlocksPerHead),
      .block = dim3(kThreads)};
  return Launch(context, shape, TokenScanKernel<kDk, kDv>, params);
}

}  // namespace

cudaError_t LaunchTokenScan(const LaunchContext& context, const ChunkParams& params) {
  const int d_k = params.mix.layer.d_k, d_v = params.mix.layer.d_v;
  if (d_k == 128 && d_v == 128) return LaunchHeadSize<128, 128>(context, params);
  if (d_k == 64 && d_v == 64) return LaunchHeadSize<64, 64>(context, params);
  if (d_k == 32 && d_v == 128) return LaunchHeadSize<32, 128>(context, params);
  if (d_k == 64 && d_v == 128) return LaunchHeadSize<64, 128>(context, params);
  return cudaErrorInvalidValue;
}

}  // namespace efla::cuda
