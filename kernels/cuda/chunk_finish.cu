// After the segments' recurrence: out = rms_norm(mixed; o_norm) (* silu(gate)), and the convolution's new
// windows.
//
// Shapes: mixed float32 [tokens, heads d_v], gate columns of proj, out act [tokens, heads d_v].
// FinishKernel: a block owns one head of one chunk, a warp every eighth of its tokens, a lane d_v / 32
// consecutive columns. Bytes: 6 d_v a head and token (8 with a gate). WindowKernel: a thread owns one channel
// of one segment: the last conv_size - 1 inputs, of the segment or, where it was shorter than that, of the
// window it began with. Both may lie in one slot, so it runs after every reader.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/ptx.cuh"

namespace efla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;

template <typename Act, int kDv>
__global__ __launch_bounds__(kThreads) void FinishKernel(ChunkParams params) {
  constexpr int kWidth = kDv / kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const MixLayer& layer = params.mix.layer;
  const int head = static_cast<int>(blockIdx.x % layer.num_heads);
  const Chunk chunk = params.chunks[params.chunk_begin + blockIdx.x / layer.num_heads];
  const int64_t channel = static_cast<int64_t>(head) * kDv + lane * kWidth;
  GridDependencyWait();
  GridDependencyTrigger();
  for (int i = warp; i < chunk.num_tokens; i += kWarps) {
    const int64_t token = chunk.token_begin + i;
    const float* mixed = params.mixed + token * layer.v_channels() + channel;
    const Act* gate = static_cast<const Act*>(params.mix.proj) + token * layer.proj_columns() +
                      layer.conv_channels() + channel;
    Act* out = static_cast<Act*>(params.mix.out) + token * layer.v_channels() + channel;
    float values[kWidth];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      values[c] = mixed[c];
      squares = fmaf(values[c], values[c], squares);
    }
    const float scale = RmsNormScale(WarpSum(squares) / static_cast<float>(kDv), layer.norm_eps);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      values[c] = values[c] * scale * layer.o_norm[lane * kWidth + c];
      if (layer.use_gate) values[c] *= Silu(ToFloat(gate[c]));
    }
#pragma unroll
    for (int c = 0; c < kWidth; c += 2) {
      *reinterpret_cast<uint32_t*>(out + c) = PackPair<Act>(values[c], values[c + 1]);
    }
  }
}

template <typename Act>
__global__ __launch_bounds__(kThreads) void WindowKernel(ChunkParams params, int blocks_per_segment) {
  const MixLayer& layer = params.mix.layer;
  const Segment segment = params.segments[params.segment_begin + blockIdx.x / blocks_per_segment];
  const int64_t channels = layer.conv_channels();
  const int64_t channel = static_cast<int64_t>(blockIdx.x % blocks_per_segment) * kThreads + threadIdx.x;
  GridDependencyWait();
  GridDependencyTrigger();
  if (channel >= channels) return;
  const StateView& view = params.mix.state;
  const float* read =
      view.pool + static_cast<int64_t>(segment.read_slot) * view.slot_stride + view.conv_offset;
  float* write = view.pool + static_cast<int64_t>(segment.write_slot) * view.slot_stride + view.conv_offset;
  const Act* proj = static_cast<const Act*>(params.mix.proj) +
                    static_cast<int64_t>(segment.token_begin) * layer.proj_columns() + channel;
  const int inputs = layer.conv_size - 1;
  float window[kMaxConvSize - 1];
#pragma unroll
  for (int j = 0; j < kMaxConvSize - 1; ++j) {
    if (j >= inputs) break;
    const int64_t position = static_cast<int64_t>(segment.num_tokens) - inputs + j;
    window[j] = position >= 0 ? ToFloat(proj[position * layer.proj_columns()])
                              : read[(inputs + position) * channels + channel];
  }
#pragma unroll
  for (int j = 0; j < kMaxConvSize - 1; ++j) {
    if (j >= inputs) break;
    write[j * channels + channel] = window[j];
  }
}

template <typename Act, int kDv>
cudaError_t LaunchValueSize(const LaunchContext& context, const ChunkParams& params) {
  const MixLayer& layer = params.mix.layer;
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(params.num_chunks) * layer.num_heads),
                             .block = dim3(kThreads)};
  const cudaError_t error = Launch(context, shape, FinishKernel<Act, kDv>, params);
  if (error != cudaSuccess || layer.conv_size <= 1) return error;
  const int blocks = (layer.conv_channels() + kThreads - 1) / kThreads;
  const LaunchShape windows = {.grid = dim3(static_cast<unsigned>(params.num_segments) * blocks),
                               .block = dim3(kThreads)};
  return Launch(context, windows, WindowKernel<Act>, params, blocks);
}

template <typename Act>
cudaError_t LaunchTyped(const LaunchContext& context, const ChunkParams& params) {
  switch (params.mix.layer.d_v) {
    case 64:
      return LaunchValueSize<Act, 64>(context, params);
    case 128:
      return LaunchValueSize<Act, 128>(context, params);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchChunkFinish(const LaunchContext& context, const ChunkParams& params) {
  return context.act == ActType::kF16 ? LaunchTyped<__half>(context, params)
                                      : LaunchTyped<__nv_bfloat16>(context, params);
}

}  // namespace efla::cuda
