// The chunkwise form, for one (segment, head) at a time, chunks of kChunkTokens tokens in order. With S the
// state before a chunk, g_t = log decay_t and G_t = g_1 + ... + g_t:
//
//   L_ti = erase_t exp(G_t - G_i) (k_t . k_i)      i < t
//   (I + L) U = diag(write) V - diag(erase exp(G)) K S
//   O = diag(exp(G)) Q S + A U                     A_ti = exp(G_t - G_i) (q_t . k_i), i <= t
//   S = exp(G_C) S + (diag(exp(G_C - G)) K)^T U
//
// A chunk of fewer tokens is the same with fewer rows. Everything a chunk needs lies in the thread's scratch
// (0.3 MB for heads of 128), float32; G is kept in double, since only its differences are small.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/coefficients.h"
#include "kernels/cpu/mix.h"
#include "kernels/cpu/short_conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mix_chunk.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h.
#include "kernels/cpu/short_conv-inl.h"
#include "kernels/cpu/small_matmul-inl.h"

#ifndef EFLA_MIX_CHUNK_ONCE
#define EFLA_MIX_CHUNK_ONCE
namespace efla {

struct ChunkTask {
  const MixLayer* layer;
  int head;
  int64_t num_tokens;
  const float* proj;  // the segment's first row of q|k|v|gate
  const float* coef;  // its first row of b|a
  const float* taps;  // [conv_size, conv_channels]
  const float *read_state, *read_conv;
  float *write_state, *write_conv;
  float* scratch;
  float* out;  // the head's part of the first row
};

// A thread's scratch. Rows are padded to whole vectors; what lies in the padding is never read into a real
// column.
struct ChunkScratch {
  static constexpr int64_t kTokens = kChunkTokens;
  int64_t k_stride, v_stride;
  float* state;         // [d_k, v_stride]
  float *q, *k;         // [kTokens, k_stride]
  float* k_transposed;  // [d_k, kTokens]
  float* u;             // [kTokens, v_stride]: V, then the solution U
  float* from_state;    // [kTokens, v_stride]: K S
  float* o;             // [kTokens, v_stride]
  float *kk, *qk;       // [kTokens, kTokens]: L and A
  float* history;       // [conv_size - 1, 2 k_stride + v_stride]
  size_t num_floats;

  ChunkScratch(const MixLayer& layer, float* memory) {
    constexpr int64_t kPad = 16;
    k_stride = (layer.d_k + kPad - 1) / kPad * kPad;
    v_stride = (layer.d_v + kPad - 1) / kPad * kPad;
    float* next = memory;
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    state = take(layer.d_k * v_stride);
    q = take(kTokens * k_stride);
    k = take(kTokens * k_stride);
    k_transposed = take(layer.d_k * kTokens);
    u = take(kTokens * v_stride);
    from_state = take(kTokens * v_stride);
    o = take(kTokens * v_stride);
    kk = take(kTokens * kTokens);
    qk = take(kTokens * kTokens);
    history = take(std::max(layer.conv_size - 1, 0) * (2 * k_stride + v_stride));
    num_floats = static_cast<size_t>(next - memory);
  }
};

}  // namespace efla
#endif  // EFLA_MIX_CHUNK_ONCE

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

// Rows of a triangle that are multiplied together; their products stop at the group's last column.
constexpr int64_t kTriangleRows = 12;

// One run of a head's channels: where it lies in a row of proj and in the scratch history.
struct Run {
  int64_t channel;  // in proj and in the conv state
  int64_t history;  // in a row of ChunkScratch::history
  int64_t size;
  QkActivation activation;
};

// Convolves tokens [begin, begin + count) of the segment.
void ConvTokens(const ChunkTask& task, const ChunkScratch& scratch, const Run& run, int64_t begin,
                int64_t count, float* to, int64_t to_stride) {
  const MixLayer& layer = *task.layer;
  const int size = layer.conv_size;
  const int64_t columns = layer.proj_columns();
  const int64_t history_stride = 2 * scratch.k_stride + scratch.v_stride;
  const float* input[kMaxConvSize];
  for (int64_t t = 0; t < count; ++t) {
    input[0] = task.proj + (begin + t) * columns + run.channel;
    for (int j = 0; j < size; ++j) {
      const int64_t token = begin + t - (size - 1 - j);
      input[j] = token >= 0 ? task.proj + token * columns + run.channel
                            : scratch.history + (token + size - 1) * history_stride + run.history;
    }
    ConvToken(input, size, task.taps + run.channel, layer.conv_channels(), run.size, run.activation,
              to + t * to_stride);
  }
}

// The last conv_size - 1 inputs of the segment, or of the history where the segment is shorter.
void WriteConvState(const ChunkTask& task, const ChunkScratch& scratch, const Run& run) {
  const int64_t past = task.layer->conv_size - 1;
  const int64_t history_stride = 2 * scratch.k_stride + scratch.v_stride;
  for (int64_t j = 0; j < past; ++j) {
    const int64_t token = task.num_tokens - past + j;
    const float* from = token >= 0 ? task.proj + token * task.layer->proj_columns() + run.channel
                                   : scratch.history + (token + past) * history_stride + run.history;
    std::copy_n(from, run.size, task.write_conv + j * task.layer->conv_channels() + run.channel);
  }
}

void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
               int64_t to_stride) {
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

// exp(G_t - G_i) for i <= t, into row[i].
void RelativeDecay(const double* log_decay_sum, int64_t t, float* row) {
  for (int64_t i = 0; i <= t; ++i) row[i] = static_cast<float>(log_decay_sum[t] - log_decay_sum[i]);
  ForEachVector(t + 1, [&](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Exp(d, hn::Max(hn::LoadU(d, row + i), hn::Set(d, -104.0f))), d, row + i);
  });
}

// u = u - l u by forward substitution, l strictly lower: columns [col, col + kVectors kLanes).
template <int kVectors>
HWY_INLINE void SolveColumns(const float* l, int64_t count, float* u, int64_t stride) {
  const FloatTag d;
  for (int64_t t = 0; t < count; ++t) {
    hn::Vec<FloatTag> sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::LoadU(d, u + t * stride + v * kLanes);
    for (int64_t i = 0; i < t; ++i) {
      const auto factor = hn::Set(d, l[t * kChunkTokens + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = hn::NegMulAdd(factor, hn::LoadU(d, u + i * stride + v * kLanes), sum[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[v], d, u + t * stride + v * kLanes);
  }
}

void Solve(const float* l, int64_t count, float* u, int64_t stride) {
  constexpr int64_t kWidth = kLanes;
  int64_t col = 0;
  for (; col + 8 * kWidth <= stride; col += 8 * kWidth) SolveColumns<8>(l, count, u + col, stride);
  for (; col + 4 * kWidth <= stride; col += 4 * kWidth) SolveColumns<4>(l, count, u + col, stride);
  for (; col < stride; col += kWidth) SolveColumns<1>(l, count, u + col, stride);
}

struct ChunkScalars {
  float erase[kChunkTokens], write[kChunkTokens];
  double log_decay_sum[kChunkTokens];  // G
};

// kk becomes L, qk becomes A.
void ScoreTokens(const ChunkScratch& s, const ChunkScalars& scalars, bool gated, int64_t d_k, int64_t count) {
  constexpr int64_t kTokens = kChunkTokens;
  Transpose(s.k, s.k_stride, count, d_k, s.k_transposed, kTokens);
  SmallProduct product = {.a = s.k,
                          .a_row = s.k_stride,
                          .a_depth = 1,
                          .b = s.k_transposed,
                          .b_stride = kTokens,
                          .c = s.kk,
                          .c_stride = kTokens};
  const auto multiply_lower = [&] {
    for (int64_t row = 0; row < count; row += kTriangleRows) {
      const int64_t end = std::min(row + kTriangleRows, count);
      MultiplyRows(product, row, end, (end + kLanes - 1) / kLanes * kLanes, d_k);
    }
  };
  multiply_lower();
  product.a = s.q;
  product.c = s.qk;
  multiply_lower();
  float relative[kTokens];
  for (int64_t t = 0; t < count; ++t) {
    float* kk = s.kk + t * kTokens;
    float* qk = s.qk + t * kTokens;
    ScaleVector(kk, scalars.erase[t], t);
    if (gated) {
      RelativeDecay(scalars.log_decay_sum, t, relative);
      ForEachVector(t + 1, [&](auto d, size_t i) HWY_ATTR {
        const auto decay = hn::LoadU(d, relative + i);
        hn::StoreU(hn::Mul(hn::LoadU(d, kk + i), decay), d, kk + i);
        hn::StoreU(hn::Mul(hn::LoadU(d, qk + i), decay), d, qk + i);
      });
    }
    std::fill(qk + t + 1, qk + kTokens, 0.0f);
  }
}

// The chunk's outputs into s.o, the state after it into s.state; q, k and u (holding V) are prepared.
void MixOneChunk(const ChunkScratch& s, const ChunkScalars& scalars, const MixLayer& layer, int64_t count) {
  const bool gated = IsGated(layer.type);
  const int64_t d_k = layer.d_k;
  const double* sum = scalars.log_decay_sum;
  ScoreTokens(s, scalars, gated, d_k, count);
  MultiplyRows({.a = s.k,
                .a_row = s.k_stride,
                .a_depth = 1,
                .b = s.state,
                .b_stride = s.v_stride,
                .c = s.from_state,
                .c_stride = s.v_stride},
               0, count, s.v_stride, d_k);
  MultiplyRows({.a = s.q,
                .a_row = s.k_stride,
                .a_depth = 1,
                .b = s.state,
                .b_stride = s.v_stride,
                .c = s.o,
                .c_stride = s.v_stride},
               0, count, s.v_stride, d_k);
  for (int64_t t = 0; t < count; ++t) {
    const float decay = gated ? expf(static_cast<float>(sum[t])) : 1.0f;
    float* u = s.u + t * s.v_stride;
    const float* from_state = s.from_state + t * s.v_stride;
    ForEachVector(s.v_stride, [&](auto d, size_t i) HWY_ATTR {
      const auto written = hn::Mul(hn::Set(d, scalars.write[t]), hn::LoadU(d, u + i));
      hn::StoreU(hn::NegMulAdd(hn::Set(d, scalars.erase[t] * decay), hn::LoadU(d, from_state + i), written),
                 d, u + i);
    });
    if (gated) ScaleVector(s.o + t * s.v_stride, decay, s.v_stride);
  }
  Solve(s.kk, count, s.u, s.v_stride);
  for (int64_t row = 0; row < count; row += kTriangleRows) {
    const int64_t end = std::min(row + kTriangleRows, count);
    MultiplyRows({.a = s.qk,
                  .a_row = kChunkTokens,
                  .a_depth = 1,
                  .b = s.u,
                  .b_stride = s.v_stride,
                  .c = s.o,
                  .c_stride = s.v_stride,
                  .init = 1},
                 row, end, s.v_stride, end);
  }
  float last_decay = 1.0f;
  if (gated) {
    for (int64_t t = 0; t < count; ++t) {
      ScaleVector(s.k + t * s.k_stride, expf(static_cast<float>(sum[count - 1] - sum[t])), d_k);
    }
    last_decay = expf(static_cast<float>(sum[count - 1]));
  }
  MultiplyRows({.a = s.k,
                .a_row = 1,
                .a_depth = s.k_stride,
                .b = s.u,
                .b_stride = s.v_stride,
                .c = s.state,
                .c_stride = s.v_stride,
                .init = last_decay},
               0, d_k, s.v_stride, count);
}

void MixSegmentHead(const ChunkTask& task) {
  const MixLayer& layer = *task.layer;
  const ChunkScratch s(layer, task.scratch);
  const int64_t d_k = layer.d_k, d_v = layer.d_v;
  const HeadChannels channel(layer, task.head);
  const Run runs[3] = {{channel.q, 0, d_k, layer.qk_activation},
                       {channel.k, s.k_stride, d_k, layer.qk_activation},
                       {channel.v, 2 * s.k_stride, d_v, QkActivation::kSilu}};
  for (int64_t j = 0; j + 1 < layer.conv_size; ++j) {
    for (const Run& run : runs) {
      std::copy_n(task.read_conv + j * layer.conv_channels() + run.channel, run.size,
                  s.history + j * (2 * s.k_stride + s.v_stride) + run.history);
    }
  }
  const float* read_state = task.read_state + task.head * d_k * d_v;
  for (int64_t i = 0; i < d_k; ++i) std::copy_n(read_state + i * d_v, d_v, s.state + i * s.v_stride);

  ChunkScalars scalars;
  for (int64_t begin = 0; begin < task.num_tokens; begin += kChunkTokens) {
    const int64_t count = std::min<int64_t>(kChunkTokens, task.num_tokens - begin);
    ConvTokens(task, s, runs[0], begin, count, s.q, s.k_stride);
    ConvTokens(task, s, runs[1], begin, count, s.k, s.k_stride);
    ConvTokens(task, s, runs[2], begin, count, s.u, s.v_stride);
    double log_decay_sum = 0;
    for (int64_t t = 0; t < count; ++t) {
      const float key_norm_squared = NormalizeQueryAndKey(layer, s.q + t * s.k_stride, s.k + t * s.k_stride);
      const float* coef = task.coef + (begin + t) * layer.coef_columns();
      const MixScalars token = TokenScalars(layer, coef, task.head, key_norm_squared);
      log_decay_sum += static_cast<double>(token.log_decay);
      scalars.erase[t] = token.erase;
      scalars.write[t] = token.write;
      scalars.log_decay_sum[t] = log_decay_sum;
    }
    MixOneChunk(s, scalars, layer, count);
    for (int64_t t = 0; t < count; ++t) {
      const float* row = task.proj + (begin + t) * layer.proj_columns();
      const float* gate = layer.use_gate ? row + layer.conv_channels() + task.head * d_v : nullptr;
      FinishHead(s.o + t * s.v_stride, layer.o_norm, layer.norm_eps, gate, d_v,
                 task.out + (begin + t) * layer.v_channels());
    }
  }

  float* write_state = task.write_state + task.head * d_k * d_v;
  for (int64_t i = 0; i < d_k; ++i) std::copy_n(s.state + i * s.v_stride, d_v, write_state + i * d_v);
  for (const Run& run : runs) WriteConvState(task, s, run);
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/check.h"

namespace efla {
namespace {
HWY_EXPORT(MixSegmentHead);
}

size_t ChunkScratchFloats(const MixLayer& layer) { return ChunkScratch(layer, nullptr).num_floats; }

void MixChunkSegments(const Step& step, const MixArgs& args, const MixWorkspace& workspace,
                      ThreadPool& pool) {
  const MixLayer& layer = *args.layer;
  const int64_t heads = layer.num_heads;
  EFLA_CHECK(layer.conv_size <= kMaxConvSize);
  if (layer.conv_size > 0) TransposeTaps(layer, workspace.taps);
  const auto mix = [&](size_t segment_index, int head, int thread) {
    const Segment& segment = step.segments[segment_index];
    const int64_t row = segment.token_begin;
    const float* read = args.state.pool + segment.read_slot * args.state.slot_stride;
    float* write = args.state.pool + segment.write_slot * args.state.slot_stride;
    HWY_DYNAMIC_DISPATCH(MixSegmentHead)
    ({.layer = &layer,
      .head = head,
      .num_tokens = segment.num_tokens,
      .proj = static_cast<const float*>(args.proj) + row * layer.proj_columns(),
      .coef = args.coef + row * layer.coef_columns(),
      .taps = workspace.taps,
      .read_state = read + args.state.recurrent_offset,
      .read_conv = read + args.state.conv_offset,
      .write_state = write + args.state.recurrent_offset,
      .write_conv = write + args.state.conv_offset,
      .scratch = workspace.scratch + thread * workspace.scratch_stride,
      .out =
          static_cast<float*>(args.out) + row * layer.v_channels() + static_cast<int64_t>(head) * layer.d_v});
  };
  // Segments that do not wait for each other, together.
  for (size_t begin = 0; begin < step.segments.size();) {
    size_t end = begin + 1;
    while (end < step.segments.size() && step.segments[end].follows < static_cast<int32_t>(begin)) ++end;
    pool.ParallelFor(static_cast<int64_t>(end - begin) * heads, [&](int64_t index, int thread) {
      mix(begin + static_cast<size_t>(index / heads), static_cast<int>(index % heads), thread);
    });
    begin = end;
  }
}

}  // namespace efla
#endif  // HWY_ONCE
