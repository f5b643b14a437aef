// The recurrent form, for one (row, head) at a time:
//
//   p = S^T k,  r = S^T q                      one pass of reads over S [d_k, d_v]
//   u = write v - decay erase p
//   S = decay S + k u^T                        one pass of reads and writes, from the nearest cache
//   o = decay r + (k . q) u
//
// A lane owns a column of S, so sums over d_k are chains in a fixed order. Memory moved: S read once, written
// once.
#include <algorithm>

#include "kernels/cpu/coefficients.h"
#include "kernels/cpu/mix.h"
#include "kernels/cpu/short_conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mix_recurrent.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h.
#include "kernels/cpu/short_conv-inl.h"

#ifndef EFLA_MIX_RECURRENT_ONCE
#define EFLA_MIX_RECURRENT_ONCE
namespace efla {

// One (row, head): pointers to the row, and to its slots' layer state.
struct RecurrentTask {
  const MixLayer* layer;
  int head;
  const float* proj;  // the row's q|k|v|gate
  const float* coef;  // the row's b|a
  const float* taps;  // [conv_size, conv_channels]
  const float *read_state, *read_conv;
  float *write_state, *write_conv;
  float* scratch;
  float* out;  // the head's part of the row
};

}  // namespace efla
#endif  // EFLA_MIX_RECURRENT_ONCE

HWY_BEFORE_NAMESPACE();
namespace efla {
namespace HWY_NAMESPACE {

struct HeadStep {
  const float *q, *k, *v;
  int64_t d_k, d_v;
  float decay, decay_erase, write, kq;
  const float* read_state;
  float* write_state;
  float* o;
};

// Columns [column, column + kVectors * lanes of D).
template <int kVectors, class D>
HWY_INLINE void StepColumns(D d, const HeadStep& step, int64_t column) {
  constexpr int64_t kWidth = hn::MaxLanes(D());
  using V = hn::Vec<D>;
  V p[kVectors], r[kVectors];
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) p[c] = r[c] = hn::Zero(d);
  const float* read = step.read_state + column;
  for (int64_t i = 0; i < step.d_k; ++i, read += step.d_v) {
    const V k = hn::Set(d, step.k[i]), q = hn::Set(d, step.q[i]);
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      const V s = hn::LoadU(d, read + c * kWidth);
      p[c] = hn::MulAdd(k, s, p[c]);
      r[c] = hn::MulAdd(q, s, r[c]);
    }
  }
  const V decay = hn::Set(d, step.decay);
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    const int64_t at = column + c * kWidth;
    const V written = hn::Mul(hn::Set(d, step.write), hn::LoadU(d, step.v + at));
    p[c] = hn::NegMulAdd(hn::Set(d, step.decay_erase), p[c], written);  // u
    hn::StoreU(hn::MulAdd(hn::Set(d, step.kq), p[c], hn::Mul(decay, r[c])), d, step.o + at);
  }
  read = step.read_state + column;
  float* write = step.write_state + column;
  for (int64_t i = 0; i < step.d_k; ++i, read += step.d_v, write += step.d_v) {
    const V k = hn::Set(d, step.k[i]);
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      const V s = hn::LoadU(d, read + c * kWidth);
      hn::StoreU(hn::MulAdd(k, p[c], hn::Mul(decay, s)), d, write + c * kWidth);
    }
  }
}

void StepAllColumns(const HeadStep& step) {
  const FloatTag d;
  const HalfTag half;
  const OneTag one;
  constexpr int kWide = kManyRegisters ? 8 : 4;
  int64_t column = 0;
  const auto left = [&] { return step.d_v - column; };
  constexpr int64_t kWidth = kLanes;
  for (; left() >= kWide * kWidth; column += kWide * kWidth) StepColumns<kWide>(d, step, column);
  for (; left() >= 4 * kWidth; column += 4 * kWidth) StepColumns<4>(d, step, column);
  for (; left() >= kWidth; column += kWidth) StepColumns<1>(d, step, column);
  if constexpr (kWidth > 8) {
    for (; left() >= 8; column += 8) StepColumns<1>(half, step, column);
  }
  for (; left() > 0; ++column) StepColumns<1>(one, step, column);
}

// One run of `n` channels: convolves the new input with the conv state, and writes the state shifted by one.
void ConvStep(const RecurrentTask& task, int64_t channel, size_t n, QkActivation activation, float* to) {
  const MixLayer& layer = *task.layer;
  const int size = layer.conv_size;
  const int64_t channels = layer.conv_channels();
  const float* x = task.proj + channel;
  if (size == 0) return ConvToken(&x, 0, nullptr, 0, n, activation, to);
  const float* taps = task.taps + channel;
  const float* read = task.read_conv + channel;
  float* write = task.write_conv + channel;
  ForEachVector(n, [&](auto d, size_t i) HWY_ATTR {
    const auto newest = hn::LoadU(d, x + i);
    auto sum = hn::Zero(d);
    for (int j = 0; j + 1 < size; ++j) {
      const auto past = hn::LoadU(d, read + j * channels + i);
      const auto tap = hn::LoadU(d, taps + j * channels + i);
      sum = j == 0 ? hn::Mul(past, tap) : hn::MulAdd(tap, past, sum);
      if (j > 0) hn::StoreU(past, d, write + (j - 1) * channels + i);
    }
    const auto tap = hn::LoadU(d, taps + (size - 1) * channels + i);
    sum = size == 1 ? hn::Mul(newest, tap) : hn::MulAdd(tap, newest, sum);
    if (size > 1) hn::StoreU(newest, d, write + (size - 2) * channels + i);
    hn::StoreU(Activate(d, activation, sum), d, to + i);
  });
}

void StepHead(const RecurrentTask& task) {
  const MixLayer& layer = *task.layer;
  const HeadChannels channel(layer, task.head);
  const int64_t d_k = layer.d_k, d_v = layer.d_v;
  float* q = task.scratch;
  float* k = q + d_k;
  float* v = k + d_k;
  float* o = v + d_v;
  ConvStep(task, channel.q, d_k, layer.qk_activation, q);
  ConvStep(task, channel.k, d_k, layer.qk_activation, k);
  ConvStep(task, channel.v, d_v, QkActivation::kSilu, v);
  const float key_norm_squared = NormalizeQueryAndKey(layer, q, k);
  const MixScalars scalars = TokenScalars(layer, task.coef, task.head, key_norm_squared);
  const float decay = IsGated(layer.type) ? expf(scalars.log_decay) : 1.0f;
  StepAllColumns({.q = q,
                  .k = k,
                  .v = v,
                  .d_k = d_k,
                  .d_v = d_v,
                  .decay = decay,
                  .decay_erase = decay * scalars.erase,
                  .write = scalars.write,
                  .kq = Dot(k, q, d_k),
                  .read_state = task.read_state + task.head * d_k * d_v,
                  .write_state = task.write_state + task.head * d_k * d_v,
                  .o = o});
  const float* gate = layer.use_gate ? task.proj + layer.conv_channels() + task.head * d_v : nullptr;
  FinishHead(o, layer.o_norm, layer.norm_eps, gate, d_v, task.out);
}

}  // namespace HWY_NAMESPACE
}  // namespace efla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla {
namespace {
HWY_EXPORT(StepHead);
}

size_t RecurrentScratchFloats(const MixLayer& layer) {
  return 2 * static_cast<size_t>(layer.d_k + layer.d_v);
}

void MixRecurrentRows(const Step& step, const MixArgs& args, const MixWorkspace& workspace,
                      ThreadPool& pool) {
  const MixLayer& layer = *args.layer;
  const int64_t heads = layer.num_heads;
  if (layer.conv_size > 0) TransposeTaps(layer, workspace.taps);
  pool.ParallelFor(step.num_decode() * heads, [&](int64_t index, int thread) {
    const int64_t row = index / heads;
    const int head = static_cast<int>(index % heads);
    const float* read = args.state.pool + step.decode_read_slot[row] * args.state.slot_stride;
    float* write = args.state.pool + step.decode_write_slot[row] * args.state.slot_stride;
    HWY_DYNAMIC_DISPATCH(StepHead)
    ({.layer = &layer,
      .head = head,
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
  });
}

}  // namespace efla
#endif  // HWY_ONCE
