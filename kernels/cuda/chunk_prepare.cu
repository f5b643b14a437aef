// From the projection to the operands of the chunk kernels: convolution, activation, norms, coefficients.
//
//   q^ = q / |q| d_k^-1/2, k' = sqrt(erase) k, v' = sqrt(erase) v (no decay, write = erase); then
//   S <- (I - k' k'^T) S + k' v'^T, and |k'| < 1 whatever the key's norm was
//
// Shapes: proj act [tokens, q|k|v|gate], prepared float16 [tokens, q|k|v].
// A block owns kTokens consecutive tokens of one head of one chunk. Two warps have q, two k, two v: a half
// warp kRun consecutive tokens of its part, a lane 8 of the 128 channels, whose inputs are all on their way
// before it computes. v waits for the roots of k's warps. Inputs before the segment come from the
// state in its read slot. Bytes: 2 * 384 a head and token read (and the windows at the runs' starts, from
// the cache), as many written.
#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kHeadSize = 128;
constexpr int kVector = 8;                      // channels of a lane
constexpr int kRunLanes = kHeadSize / kVector;  // of a run: half a warp
constexpr int kRuns = 4;                        // of a block
constexpr int kPartThreads = kRuns * kRunLanes;
constexpr int kThreads = 3 * kPartThreads;
constexpr int kBatch = 4;  // tokens whose norms are summed together
constexpr float kLog2E = 1.4426950408889634f;

// Silu(x) to within a few units in the last place of float32: half of the kernel's instructions are this.
__device__ inline float QuickSilu(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -kLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return x * inverse;
}

template <bool kAllSilu>
__device__ inline float ActivateChannel(float x, int part, QkActivation qk_activation) {
  return kAllSilu || part == kValue ? QuickSilu(x) : Activate(x, part, qk_activation);
}

// The sums over the lanes of each run, the same bits in each of them.
__device__ inline void RunSums(float (&sums)[kBatch]) {
#pragma unroll
  for (int distance = kRunLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
  }
}

// weight[j][c] of channel c meets the input kTaps - 1 - j tokens back; missing taps are zero.
template <int kTaps>
__device__ inline void LoadWeights(const MixLayer& layer, const float* conv,
                                   float (&weight)[kTaps][kVector]) {
  if (kTaps == 4 && layer.conv_size == kTaps) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float4 taps = reinterpret_cast<const float4*>(conv)[c];
      weight[0][c] = taps.x;
      weight[1][c] = taps.y;
      weight[2][c] = taps.z;
      weight[3][c] = taps.w;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    const int tap = layer.conv_size - kTaps + j;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      // Without a convolution: the input itself.
      weight[j][c] = layer.conv_size == 0 && j == kTaps - 1 ? 1.0f : 0.0f;
      if (tap >= 0 && layer.conv_size > 0) weight[j][c] = conv[c * layer.conv_size + tap];
    }
  }
}

template <typename Act, int kRun, int kTaps, bool kAllSilu>
__global__ __launch_bounds__(kThreads) void PrepareKernel(ChunkParams params) {
  constexpr int kTokens = kRun * kRuns;
  constexpr int kBlocksPerChunk = kChunkTokens / kTokens;
  static_assert(kChunkTokens % kTokens == 0 && kRun % kBatch == 0);
  __shared__ float roots[kTokens];  // sqrt(erase)
  const MixLayer& layer = params.mix.layer;
  const int head = static_cast<int>(blockIdx.x % layer.num_heads);
  const int piece = static_cast<int>(blockIdx.x / layer.num_heads % kBlocksPerChunk);
  const Chunk chunk = params.chunks[params.chunk_begin + blockIdx.x / layer.num_heads / kBlocksPerChunk];
  const int part = threadIdx.x / kPartThreads;
  const int run = threadIdx.x % kPartThreads / kRunLanes, lane = threadIdx.x % kRunLanes;
  const int first = piece * kTokens + run * kRun;  // in the chunk
  const int count = chunk.num_tokens - first;      // of the run's tokens, at most kRun of them, are there
  if (chunk.num_tokens <= piece * kTokens) return;
  const Segment segment = params.segments[chunk.segment];
  const int64_t token = chunk.token_begin + first;
  const int position = static_cast<int>(token - segment.token_begin);
  const int64_t channel = PartChannel(layer, part, head) + lane * kVector;
  const int64_t row_stride = layer.proj_columns(), channels = layer.conv_channels();
  float weight[kTaps][kVector];
  LoadWeights<kTaps>(layer, PartConv(layer, part, head) + lane * kVector * layer.conv_size, weight);
  GridDependencyWait();
  GridDependencyTrigger();

  const Act* proj = static_cast<const Act*>(params.mix.proj) + token * row_stride + channel;
  uint4 rows[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    rows[i] = i < count ? *reinterpret_cast<const uint4*>(proj + i * row_stride) : uint4{};
  }
  float window[kTaps][kVector];  // window[(i + j) % kTaps] meets weight[j] at token i
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    const int back = kTaps - 1 - j, source = position - back;
#pragma unroll
    for (int c = 0; c < kVector; ++c) window[j][c] = 0.0f;
    if (count <= 0 || back >= layer.conv_size) continue;
    if (source >= 0) {
      Unpack8<Act>(*reinterpret_cast<const uint4*>(proj - back * row_stride), window[j]);
    } else {
      const float* tail = params.mix.state.pool +
                          static_cast<int64_t>(segment.read_slot) * params.mix.state.slot_stride +
                          params.mix.state.conv_offset + (layer.conv_size - 1 + source) * channels + channel;
#pragma unroll
      for (int c = 0; c < kVector; ++c) window[j][c] = tail[c];
    }
  }

  __half* out = static_cast<__half*>(params.prepared) + token * channels + channel;
  if (part == kValue) __syncthreads();  // the roots are there
#pragma unroll
  for (int begin = 0; begin < kRun; begin += kBatch) {
    float values[kBatch][kVector], scale[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = begin + b;
      Unpack8<Act>(rows[i], window[(i + kTaps - 1) % kTaps]);
      scale[b] = 0.0f;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) sum = fmaf(weight[j][c], window[(i + j) % kTaps][c], sum);
        values[b][c] = ActivateChannel<kAllSilu>(sum, part, layer.qk_activation);
        scale[b] = fmaf(values[b][c], values[b][c], scale[b]);
      }
    }
    if (part == kValue) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) scale[b] = roots[run * kRun + begin + b];
    } else {
      RunSums(scale);
      if (part == kQuery) {
        const float query_scale = 1.0f / sqrtf(static_cast<float>(kHeadSize));
#pragma unroll
        for (int b = 0; b < kBatch; ++b) scale[b] = L2NormScale(scale[b]) * query_scale;
      } else {
        // A lane computes the scalars of one of the batch's tokens.
        const int mine = lane % kBatch;
        float norm_squared = scale[0];
#pragma unroll
        for (int b = 1; b < kBatch; ++b) norm_squared = mine == b ? scale[b] : norm_squared;
        float root = 0.0f, key_scale = 0.0f;
        if (begin + mine < count) {
          const float* coef = params.mix.coef + (token + begin + mine) * layer.coef_columns();
          root = sqrtf(HeadScalars(layer, coef, head, norm_squared).erase);
          key_scale = NormalizesKey(layer.type) ? L2NormScale(norm_squared) * root : root;
          if (lane < kBatch) roots[run * kRun + begin + mine] = root;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) scale[b] = __shfl_sync(kAllLanes, key_scale, b, kRunLanes);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (begin + b >= count) continue;
      uint4 packed;
      uint32_t* words = &packed.x;
#pragma unroll
      for (int c = 0; c < kVector; c += 2) {
        words[c / 2] = PackHalves(values[b][c] * scale[b], values[b][c + 1] * scale[b]);
      }
      *reinterpret_cast<uint4*>(out + (begin + b) * channels) = packed;
    }
  }
  if (part != kValue) __syncthreads();
}

template <typename Act, int kRun>
cudaError_t LaunchRun(const LaunchContext& context, const ChunkParams& params) {
  const MixLayer& layer = params.mix.layer;
  constexpr int kUsualTaps = 4;
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(params.num_chunks) * layer.num_heads *
                                          (kChunkTokens / (kRun * kRuns))),
                             .block = dim3(kThreads)};
  if (layer.conv_size > kUsualTaps) {
    return Launch(context, shape, PrepareKernel<Act, kRun, kMaxConvSize, false>, params);
  }
  return layer.qk_activation == QkActivation::kSilu
             ? Launch(context, shape, PrepareKernel<Act, kRun, kUsualTaps, true>, params)
             : Launch(context, shape, PrepareKernel<Act, kRun, kUsualTaps, false>, params);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const ChunkParams& params) {
  // Short runs while there are too few blocks for every multiprocessor.
  constexpr int kLongRun = 8, kShortRun = 4;
  return params.num_chunks * params.mix.layer.num_heads >= 2 * context.multiprocessors
             ? LaunchRun<Act, kLongRun>(context, params)
             : LaunchRun<Act, kShortRun>(context, params);
}

}  // namespace

bool ChunkFormSupported(const MixLayer& layer) {
  return layer.d_k == kHeadSize && layer.d_v == kHeadSize && !IsGated(layer.type);
}

cudaError_t LaunchChunkPrepare(const LaunchContext& context, const ChunkParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
