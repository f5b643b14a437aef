// The layer's convolution weights in the order that vector loops over channels read them.
#ifndef EFLA_KERNELS_CPU_SHORT_CONV_H_
#define EFLA_KERNELS_CPU_SHORT_CONV_H_

#include <cstdint>

#include "kernels/op_args.h"

namespace efla {

// taps[j][channel], channels q|k|v, from the layer's [channel][j]. A copy of a few kilobytes a call, so that
// no cache has to be kept true to the weights.
inline void TransposeTaps(const MixLayer& layer, float* taps) {
  const int64_t channels = layer.conv_channels();
  const int size = layer.conv_size;
  const auto transpose = [&](const float* weight, int64_t count, float* to) {
    for (int64_t c = 0; c < count; ++c) {
      for (int j = 0; j < size; ++j) to[j * channels + c] = weight[c * size + j];
    }
  };
  transpose(layer.q_conv, layer.q_channels(), taps);
  transpose(layer.k_conv, layer.q_channels(), taps + layer.q_channels());
  transpose(layer.v_conv, layer.v_channels(), taps + 2 * static_cast<int64_t>(layer.q_channels()));
}

// The three runs of a head's channels in a row of q|k|v.
struct HeadChannels {
  int64_t q, k, v;
  HeadChannels(const MixLayer& layer, int head)
      : q(static_cast<int64_t>(head) * layer.d_k),
        k(layer.q_channels() + q),
        v(2 * static_cast<int64_t>(layer.q_channels()) + static_cast<int64_t>(head) * layer.d_v) {}
};

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_SHORT_CONV_H_
