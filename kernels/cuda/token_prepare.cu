// From the projection to the operands of token_scan.cu: convolution, activation, norms, coefficients.
//
//   q^ = q / |q| d_k^-1/2, k as the recurrence uses it and v in float32, and (decay, erase, write, k.q^)
//   beside them
//
// Shapes: proj act [tokens, q|k|v|gate], prepared float32 [tokens, q|k|v], scalars [tokens, heads].
// A block owns one head of one chunk, a warp kWarpTokens consecutive tokens of it, a lane d / 32 consecutive
// channels of q, then k, then v, with the convolution's window in registers. Inputs before the segment come
// from the state in its read slot. Bytes: 2 (2 d_k + d_v) a head and token read (and the windows at the runs'
// starts), twice as many written.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kWarpTokens = kChunkTokens / kWarps;

template <int kWidth, typename Act>
__device__ inline void LoadActs(const Act* from, float (&values)[kWidth]) {
  if constexpr (kWidth == 4) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    UnpackPair<Act>(words.x, values[0], values[1]);
    UnpackPair<Act>(words.y, values[2], values[3]);
  } else if constexpr (kWidth == 2) {
    UnpackPair<Act>(*reinterpret_cast<const uint32_t*>(from), values[0], values[1]);
  } else {
    static_assert(kWidth == 1);
    values[0] = ToFloat(from[0]);
  }
}

template <int kWidth>
__device__ inline void StoreValues(float* to, const float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = values[i];
}

template <int kWidth>
__device__ inline float SumSquares(const float (&values)[kWidth]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum = fmaf(values[i], values[i], sum);
  return WarpSum(sum);
}

// What one warp knows of its run of tokens.
template <typename Act>
struct Run {
  const MixLayer& layer;
  const Act* proj;    // row of the run's first token
  const float* tail;  // the segment's convolution state before its first token
  int position;       // of the run's first token in the segment
  int head, lane;

  // Calls use(i, values) with the lane's activated channels of `part` for the run's tokens i < count. kTaps
  // is at least conv_size; the taps that are missing have weight zero.
  template <int kWidth, int kTaps, typename Use>
  __device__ inline void ForEachToken(int part, int count, Use&& use) const {
    const int conv_size = layer.conv_size;
    const int64_t channel = PartChannel(layer, part, head) + lane * kWidth;
    const int64_t row_stride = layer.proj_columns(), tail_stride = layer.conv_channels();
    float weight[kTaps][kWidth];
    float window[kTaps][kWidth];  // window[(i + j) % kTaps] meets weight[j] at token i
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int tap = conv_size - kTaps + j, source = position + j - (kTaps - 1);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        weight[j][c] = conv_size == 0 ? (j == kTaps - 1 ? 1.0f : 0.0f) : 0.0f;
        if (tap >= 0 && conv_size > 0)
          weight[j][c] = PartConv(layer, part, head)[(lane * kWidth + c) * conv_size + tap];
        window[j][c] = 0.0f;
      }
      if (j == kTaps - 1 || tap < 0) continue;
      if (source >= 0) {
        LoadActs<kWidth>(proj + (j - (kTaps - 1)) * row_stride + channel, window[j]);
      } else {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          window[j][c] = tail[(conv_size - 1 + source) * tail_stride + channel + c];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      if (i >= count) break;
      LoadActs<kWidth>(proj + i * row_stride + channel, window[(i + kTaps - 1) % kTaps]);
      float values[kWidth];
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) sum = fmaf(weight[j][c], window[(i + j) % kTaps][c], sum);
        values[c] = Activate(sum, part, layer.qk_activation);
      }
      use(i, values);
    }
  }
};

template <typename Act, int kDk, int kDv, int kTaps>
__global__ __launch_bounds__(kWarps* kWarpLanes) void PrepareKernel(ChunkParams params) {
  constexpr int kKeyWidth = kDk / kWarpLanes, kValueWidth = kDv / kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const MixLayer& layer = params.mix.layer;
  const int head = static_cast<int>(blockIdx.x % layer.num_heads);
  const Chunk chunk = params.chunks[params.chunk_begin + blockIdx.x / layer.num_heads];
  GridDependencyWait();
  GridDependencyTrigger();
  const int first = warp * kWarpTokens;  // in the chunk
  const int count = min(kWarpTokens, chunk.num_tokens - first);
  if (count <= 0) return;
  const Segment segment = params.segments[chunk.segment];
  const int64_t token = chunk.token_begin + first;
  const Run<Act> run = {layer,
                        static_cast<const Act*>(params.mix.proj) + token * layer.proj_columns(),
                        params.mix.state.pool +
                            static_cast<int64_t>(segment.read_slot) * params.mix.state.slot_stride +
                            params.mix.state.conv_offset,
                        static_cast<int>(token - segment.token_begin),
                        head,
                        lane};
  const int64_t channels = layer.conv_channels();
  float* prepared = static_cast<float*>(params.prepared) + token * channels;
  const float* coef = params.mix.coef + token * layer.coef_columns();
  const float query_scale = 1.0f / sqrtf(static_cast<float>(kDk));

  float query[kWarpTokens][kKeyWidth];  // kept for k.q
  float* query_out = prepared + PartChannel(layer, kQuery, head) + lane * kKeyWidth;
  run.template ForEachToken<kKeyWidth, kTaps>(kQuery, count, [&](int i, float(&values)[kKeyWidth]) {
    const float scale = L2NormScale(SumSquares(values)) * query_scale;
#pragma unroll
    for (int c = 0; c < kKeyWidth; ++c) {
      values[c] *= scale;
      query[i][c] = values[c];
    }
    StoreValues<kKeyWidth>(query_out + i * channels, values);
  });

  float* key_out = prepared + PartChannel(layer, kKey, head) + lane * kKeyWidth;
  run.template ForEachToken<kKeyWidth, kTaps>(kKey, count, [&](int i, float(&values)[kKeyWidth]) {
    const float norm_squared = SumSquares(values);
    const MixScalars scalars = HeadScalars(layer, coef + i * layer.coef_columns(), head, norm_squared);
    if (NormalizesKey(layer.type)) {
      const float scale = L2NormScale(norm_squared);
#pragma unroll
      for (int c = 0; c < kKeyWidth; ++c) values[c] *= scale;
    }
    StoreValues<kKeyWidth>(key_out + i * channels, values);
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < kKeyWidth; ++c) dot = fmaf(values[c], query[i][c], dot);
    dot = WarpSum(dot);
    if (lane == 0) {
      params.scalars[(token + i) * layer.num_heads + head] = {expf(scalars.log_decay), scalars.erase,
                                                              scalars.write, dot};
    }
  });

  float* value_out = prepared + PartChannel(layer, kValue, head) + lane * kValueWidth;
  run.template ForEachToken<kValueWidth, kTaps>(kValue, count, [&](int i, float(&values)[kValueWidth]) {
    StoreValues<kValueWidth>(value_out + i * channels, values);
  });
}

template <typename Act, int kDk, int kDv>
cudaError_t LaunchHeadSize(const LaunchContext& context, const ChunkParams& params) {
  constexpr int kUsualTaps = 4;
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(params.num_chunks) * params.mix.layer.num_heads),
      .block = dim3(kWarps * kWarpLanes)};
  if (params.mix.layer.conv_size <= kUsualTaps) {
    return Launch(context, shape, PrepareKernel<Act, kDk, kDv, kUsualTaps>, params);
  }
  return Launch(context, shape, PrepareKernel<Act, kDk, kDv, kMaxConvSize>, params);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const ChunkParams& params) {
  return LaunchForHeadSize(params.mix.layer.d_k, params.mix.layer.d_v,
                           [&]<int kDk, int kDv> { return LaunchHeadSize<Act, kDk, kDv>(context, params); });
}

}  // namespace

cudaError_t LaunchTokenPrepare(const LaunchContext& context, const ChunkParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
