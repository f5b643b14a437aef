// Every operation of kernels/device.h in plain double precision, one token at a time: slow, simple, and
// written from the formulas rather than from the kernels.
#ifndef EFLA_TESTS_KERNELS_REFERENCE_H_
#define EFLA_TESTS_KERNELS_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/op_args.h"
#include "kernels/types.h"

namespace efla::reference {

using Vector = std::vector<double>;

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double Silu(double x) { return x * Sigmoid(x); }

inline double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline Vector RmsNorm(const Vector& x, const Vector& weight, double eps) {
  const double scale = 1 / std::sqrt(Dot(x, x) / static_cast<double>(x.size()) + eps);
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

// weight: [rows, x.size()], row-major.
inline Vector Linear(const Vector& weight, const Vector& x) {
  Vector y(weight.size() / x.size(), 0.0);
  for (size_t row = 0; row < y.size(); ++row) {
    for (size_t k = 0; k < x.size(); ++k) y[row] += weight[row * x.size() + k] * x[k];
  }
  return y;
}

inline Vector SwiGlu(const Vector& gate, const Vector& up) {
  Vector y(gate.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = Silu(gate[i]) * up[i];
  return y;
}

inline Vector LogSoftmax(const Vector& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - max);
  Vector result;
  for (const double logit : logits) result.push_back(logit - max - std::log(sum));
  return result;
}

struct Scalars {
  double decay, erase, write;
};

// Table of the recurrence; `squared` is |k|^2 of the raw key.
inline Scalars CoefficientsOf(ModelType type, double squared, double b, double log_a) {
  const double lambda = std::max(squared, 1e-12);
  const double a = std::exp(log_a);
  switch (type) {
    case ModelType::kEfla:
      return {1, -std::expm1(-b * lambda) / lambda, -std::expm1(-b * lambda) / lambda};
    case ModelType::kGatedEfla: {
      const double n = -std::expm1(log_a) + a * b * lambda;
      return {std::exp(std::expm1(log_a)), -std::expm1(-a * b * lambda) / lambda,
              n < 1e-300 ? b : b * -std::expm1(-n) / n};
    }
    case ModelType::kDeltaNet:
      return {1, b, b};
    case ModelType::kGatedDeltaNet:
      return {a, b, b};
  }
  return {};
}

// A layer with its parameters as doubles; `layer` gives shapes and switches, its pointers are not read.
struct Mix {
  MixLayer layer;
  Vector q_conv, k_conv, v_conv, a_log, dt_bias, o_norm;
};

// The state of one sequence in one layer, laid out as in op_args.h.
struct MixState {
  Vector recurrent;  // [heads, d_k, d_v]
  Vector conv;       // [conv_size - 1, channels]
  // Of the last token: the greatest |S| |q| / |S^T q| of its heads. RMSNorm makes every output of one size,
  // so rounding errors in S and q come out this much larger.
  double amplification = 1;
};

inline double ActivateQk(QkActivation activation, double x) {
  switch (activation) {
    case QkActivation::kSilu:
      return Silu(x);
    case QkActivation::kRelu:
      return std::max(x, 0.0);
    case QkActivation::kElu:
      return x > 0 ? x + 1 : std::exp(x);
    case QkActivation::kIdentity:
      return x;
  }
  return x;
}

inline Vector L2Norm(const Vector& x) {
  Vector y = x;
  for (double& value : y) value /= std::sqrt(Dot(x, x) + 1e-6);
  return y;
}

// q|k|v after convolution and activation; advances the conv state.
inline Vector ConvolveToken(const Mix& mix, const Vector& proj, MixState& state) {
  const MixLayer& layer = mix.layer;
  const int channels = layer.conv_channels(), q_channels = layer.q_channels(), size = layer.conv_size;
  Vector result(channels);
  for (int c = 0; c < channels; ++c) {
    double sum = proj[c];
    if (size > 0) {
      const Vector& weight = c < q_channels ? mix.q_conv : c < 2 * q_channels ? mix.k_conv : mix.v_conv;
      const int row = c < 2 * q_channels ? c % q_channels : c - 2 * q_channels;
      sum *= weight[row * size + size - 1];
      for (int j = 0; j < size - 1; ++j) sum += weight[row * size + j] * state.conv[j * channels + c];
      for (int j = 0; j < size - 2; ++j) state.conv[j * channels + c] = state.conv[(j + 1) * channels + c];
      if (size > 1) state.conv[(size - 2) * channels + c] = proj[c];
    }
    result[c] = c < 2 * q_channels ? ActivateQk(layer.qk_activation, sum) : Silu(sum);
  }
  return result;
}

// One token through the layer: out [heads * d_v]; the state advances.
inline Vector MixToken(const Mix& mix, const Vector& proj, const Vector& coef, MixState& state) {
  const MixLayer& layer = mix.layer;
  const int d_k = layer.d_k, d_v = layer.d_v;
  const Vector qkv = ConvolveToken(mix, proj, state);
  Vector out;
  state.amplification = 1;
  for (int head = 0; head < layer.num_heads; ++head) {
    const auto q_begin = qkv.begin() + head * d_k, k_begin = q_begin + layer.q_channels();
    const auto v_begin = qkv.begin() + 2 * layer.q_channels() + head * d_v;
    Vector q = L2Norm(Vector(q_begin, q_begin + d_k)), k(k_begin, k_begin + d_k);
    const Vector v(v_begin, v_begin + d_v);
    const double squared = Dot(k, k);
    if (NormalizesKey(layer.type)) k = L2Norm(k);
    const double b = (layer.use_beta ? Sigmoid(coef[head]) : 1.0) * (layer.allow_neg_eigval ? 2 : 1);
    double log_a = 0;
    if (IsGated(layer.type)) {
      const double x = coef[head + (layer.use_beta ? layer.num_heads : 0)] + mix.dt_bias[head];
      log_a = -std::exp(mix.a_log[head]) * (x > 30 ? x : std::log1p(std::exp(x)));
    }
    const Scalars scalars = CoefficientsOf(layer.type, squared, b, log_a);
    double* s = state.recurrent.data() + static_cast<size_t>(head) * d_k * d_v;
    Vector o(d_v, 0.0);
    for (int c = 0; c < d_v; ++c) {
      double key_state = 0;
      for (int i = 0; i < d_k; ++i) key_state += k[i] * s[i * d_v + c];
      for (int i = 0; i < d_k; ++i) {
        double& element = s[i * d_v + c];
        element = scalars.decay * (element - scalars.erase * k[i] * key_state) + scalars.write * k[i] * v[c];
        o[c] += element * q[i] / std::sqrt(static_cast<double>(d_k));
      }
    }
    const Vector head_state(s, s + static_cast<size_t>(d_k) * d_v);
    const double greatest = std::sqrt(Dot(head_state, head_state) * Dot(q, q) / d_k);
    state.amplification = std::max(state.amplification, greatest / std::sqrt(Dot(o, o) + 1e-300));
    o = RmsNorm(o, mix.o_norm, static_cast<double>(layer.norm_eps));
    for (int c = 0; c < d_v; ++c) {
      if (layer.use_gate) o[c] *= Silu(proj[layer.conv_channels() + head * d_v + c]);
      out.push_back(o[c]);
    }
  }
  return out;
}

}  // namespace efla::reference

#endif  // EFLA_TESTS_KERNELS_REFERENCE_H_
