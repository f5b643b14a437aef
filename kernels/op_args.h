// Arguments of the device operations: plain structs over device pointers, standard library only, so that
// nvcc and modules opened at run time can use them.
//
// Shapes are row-major. "act" is the device's activation type: float32 on the CPU, a 16-bit type on CUDA
// (Device::activation_bytes). The residual stream, coefficients, states and logits are always float32.
#ifndef EFLA_KERNELS_OP_ARGS_H_
#define EFLA_KERNELS_OP_ARGS_H_

#include <cstdint>
#include <span>

#include "kernels/types.h"

namespace efla {

class Matrix;  // device.h

// A run of prompt tokens of one sequence, computed in the chunkwise form from the state in read_slot; the
// state after it goes to write_slot (the two may be the same). A segment starts on the chunk grid.
struct Segment {
  int32_t token_begin;  // first of its tokens in the step
  int32_t num_tokens;   // >= 1
  int32_t read_slot;
  int32_t write_slot;
  // Which earlier segment of the step, by its index, has written read_slot and is computed first; -1: none.
  int32_t follows = -1;
};

// A change of one token's logit z before the draw: z + bias, then divided by `scale` where that is positive
// and multiplied by it where not, then less `penalty` (logit_math.h). A bias of -infinity bans the token.
struct LogitAdjustment {
  TokenId token = 0;
  float bias = 0.0f;     // finite or -infinity
  float scale = 1.0f;    // > 0
  float penalty = 0.0f;  // finite
};

// Words of a mask over a vocabulary: bit id % 32 of word id / 32 says whether a token may be drawn.
constexpr int64_t MaskWords(int64_t vocab_size) { return (vocab_size + 31) / 32; }

// One row of logits to be computed after the layers, and what to do with it. sample.h has the order.
struct SampleRow {
  int32_t token_row = 0;     // which token of the step the logits follow
  TokenId target = -1;       // >= 0: draw nothing, report this token's log-probability
  float temperature = 1.0f;  // 0: the most probable token, the lowest id among equals
  int32_t top_k = 0;         // 0: off
  float typical_p = 1.0f;    // 1: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  uint64_t seed = 0;         // the draw is a function of (seed, position, logits) and of nothing else
  uint64_t position = 0;     // index of the drawn token in its generation
  int32_t num_top = 0;       // alternatives to report, 0 to kMaxTopLogprobs
  // Its list is adjustments[adjust_begin, adjust_begin + num_adjust) of the step, no token twice in it; at
  // most kMaxAdjustments. Of the rows that draw only.
  int32_t adjust_begin = 0, num_adjust = 0;
  int32_t mask = -1;  // which mask of the step says what may be drawn; -1: none. Of the rows that draw only
};

// Whether the row draws from something else than its logits divided by the temperature and cut by rank.
constexpr bool DrawsReshaped(const SampleRow& row) {
  return row.target < 0 && (row.num_adjust > 0 || row.mask >= 0 || row.typical_p < 1.0f);
}

// Log-probabilities are natural logs of the model's own distribution, before adjustments, masks, temperature
// and cuts.
struct TokenLogprob {
  TokenId token;
  float logprob;
};

struct SampleResult {
  TokenId token;      // the drawn token, or the target; -1: finite logits, but every token is banned
  float logprob;      // of `token`
  int32_t finite;     // 0: the row's logits held NaN or infinity; token and logprob mean nothing then
  int32_t top_begin;  // its num_top alternatives start here in StepOutput::top, best first
};

// One step's input, host memory. Tokens [0, num_decode) belong to one sequence each and take the recurrent
// form; the segments' tokens follow in order and take the chunkwise form. No slot may be written twice, or
// written by one sequence and read by another, in one step; Segment::follows is the one exception to the
// latter.
struct StepInput {
  std::span<const TokenId> tokens;  // [num_tokens], each < vocab
  int num_decode = 0;
  std::span<const int32_t> decode_read_slot, decode_write_slot;  // [num_decode]
  std::span<const Segment> segments;
  std::span<const SampleRow> samples;
  // What rows of `samples` refer to: lists for at most max(max_decode, 1) rows, and as many masks.
  std::span<const LogitAdjustment> adjustments = {};
  std::span<const uint32_t> masks = {};  // [masks, MaskWords(vocab)]
};

// One step's results, host memory, valid until the next step begins.
struct StepOutput {
  std::span<const SampleResult> rows;  // one for each SampleRow, in its order
  std::span<const TokenLogprob> top;
};

// Where one layer's state lies in the pool. Offsets and strides count floats and are 64-bit: a pool is
// larger than 2^31 floats. In a slot, the layer's recurrent state is [num_heads, d_k, d_v] at
// recurrent_offset and its convolution state [conv_size - 1, q|k|v channels], oldest input first, at
// conv_offset.
struct StateView {
  float* pool = nullptr;
  int64_t slot_stride = 0;
  int64_t recurrent_offset = 0;
  int64_t conv_offset = 0;
};

// x[t] = table[tokens[t]] for the step's tokens.
struct EmbedArgs {
  const Matrix* table = nullptr;  // [vocab, hidden]
  float* x = nullptr;             // [num_tokens, hidden]
};

// y = rms_norm(x; norm), out = y weight^T, coef_out = y coef_weight^T.
struct ProjectArgs {
  int num_tokens = 0;
  const float* x = nullptr;     // [num_tokens, weight.cols]
  const float* norm = nullptr;  // [weight.cols]
  float norm_eps = 0;
  const Matrix* weight = nullptr;       // rows q|k|v|gate
  void* out = nullptr;                  // act [num_tokens, weight.rows]
  const Matrix* coef_weight = nullptr;  // rows b|a; null when the model has neither
  float* coef_out = nullptr;            // float32 [num_tokens, coef_weight.rows]
};

// One layer's token mixing: short convolution, activation, coefficients, recurrence, output norm and gate.
struct MixLayer {
  ModelType type = ModelType::kEfla;
  QkActivation qk_activation = QkActivation::kSilu;
  int num_heads = 0, d_k = 0, d_v = 0;
  int conv_size = 0;              // 0: no short convolution
  bool use_beta = true;           // false: b = 1 and coef holds no b columns
  bool allow_neg_eigval = false;  // b doubled
  bool use_gate = false;          // out *= silu(gate), per channel
  float norm_eps = 0;
  const float* q_conv = nullptr;   // [num_heads * d_k, conv_size]; the last tap meets the current input
  const float* k_conv = nullptr;   // [num_heads * d_k, conv_size]
  const float* v_conv = nullptr;   // [num_heads * d_v, conv_size]
  const float* a_log = nullptr;    // [num_heads], gated types
  const float* dt_bias = nullptr;  // [num_heads], gated types
  const float* o_norm = nullptr;   // [d_v]

  constexpr int q_channels() const { return num_heads * d_k; }
  constexpr int v_channels() const { return num_heads * d_v; }
  constexpr int conv_channels() const { return 2 * q_channels() + v_channels(); }
  constexpr int proj_columns() const { return conv_channels() + (use_gate ? v_channels() : 0); }
  constexpr int coef_columns() const { return (use_beta ? num_heads : 0) + (IsGated(type) ? num_heads : 0); }
};

struct MixArgs {
  const MixLayer* layer = nullptr;
  const void* proj = nullptr;   // act [num_tokens, q|k|v|gate columns], ProjectArgs::out
  const float* coef = nullptr;  // [num_tokens, b|a columns], ProjectArgs::coef_out
  StateView state;
  void* out = nullptr;  // act [num_tokens, num_heads * d_v]
};

// x += in weight^T.
struct AddLinearArgs {
  int num_tokens = 0;
  const void* in = nullptr;  // act [num_tokens, weight.cols]
  const Matrix* weight = nullptr;
  float* x = nullptr;  // [num_tokens, weight.rows]
};

// y = rms_norm(x; norm), out = silu(y gate^T) * (y up^T).
struct GatedMlpArgs {
  int num_tokens = 0;
  const float* x = nullptr;  // [num_tokens, gate_up.cols]
  const float* norm = nullptr;
  float norm_eps = 0;
  const Matrix* gate_up = nullptr;  // loaded as MatrixUse::kGateUp from gate (first) and up
  void* out = nullptr;              // act [num_tokens, gate_up.rows / 2]
};

// For each SampleRow of the step: logits = rms_norm(x[token_row]; norm) head^T, then its draw or score.
struct HeadArgs {
  const float* x = nullptr;  // [num_tokens, head.cols]
  const float* norm = nullptr;
  float norm_eps = 0;
  const Matrix* head = nullptr;  // [vocab, hidden]
};

}  // namespace efla

#endif  // EFLA_KERNELS_OP_ARGS_H_
