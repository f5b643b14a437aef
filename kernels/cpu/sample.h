// From one row of logits to a token: the draw or the score, and the best alternatives.
#ifndef EFLA_KERNELS_CPU_SAMPLE_H_
#define EFLA_KERNELS_CPU_SAMPLE_H_

#include <cstdint>
#include <span>

#include "kernels/op_args.h"

namespace efla {

// Scratch of one thread, [vocab_size] each.
struct SampleScratch {
  float* weights;
  TokenId* order;
  float* reshaped;  // logits of a row that DrawsReshaped
};

// What a row draws with beside its own fields.
struct DrawShape {
  std::span<const LogitAdjustment> adjustments;
  const uint32_t* mask = nullptr;  // [MaskWords(vocab_size)]; null: everything may be drawn
};

// Steps, in order: adjustments, mask, temperature, top-k, typical-p, top-p, min-p, draw. Tokens are ranked by
// logit, equal ones by lower id; banned ones are out of all that follows.
//   top-k      keeps the k first ranks;
//   typical-p  keeps, of what is kept, the tokens whose surprise -log p is nearest the expected one: as far
//              as it takes for their share to reach typical_p; those equally near stay together;
//   top-p      keeps the fewest first ranks of those whose share of the kept probability reaches top_p;
//   min-p      keeps those of at least min_p times the probability of the best that is kept;
//   draw       inverts the cumulative distribution of what is kept, in the order of ids, at
//              CounterUniform(seed, position).
// With temperature 0, the first rank of what is not banned. `top` receives row.num_top entries; entries past
// the vocabulary hold token -1 and logprob -infinity. `top_begin` of the result is the caller's to set.
SampleResult SampleToken(const SampleRow& row, const DrawShape& shape, const float* logits,
                         int64_t vocab_size, const SampleScratch& scratch, TokenLogprob* top);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_SAMPLE_H_
