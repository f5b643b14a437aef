// From one row of logits to a token: the draw or the score, and the best alternatives.
#ifndef EFLA_KERNELS_CPU_SAMPLE_H_
#define EFLA_KERNELS_CPU_SAMPLE_H_

#include <cstdint>

#include "kernels/op_args.h"

namespace efla {

// Scratch of one thread, [vocab_size] each.
struct SampleScratch {
  float* weights;
  TokenId* order;
};

// Steps, in order: temperature, top-k, top-p, min-p, draw. Tokens are ranked by logit, equal ones by lower
// id.
//   top-k  keeps the k first ranks;
//   top-p  keeps the fewest first ranks of those whose share of the kept probability reaches top_p;
//   min-p  keeps those of at least min_p times the best one's probability;
//   draw   inverts the cumulative distribution of what is kept, in the order of ids, at
//          CounterUniform(seed, position).
// `top` receives row.num_top entries; entries past the vocabulary hold token -1 and logprob -infinity.
// `top_begin` of the result is the caller's to set.
SampleResult SampleToken(const SampleRow& row, const float* logits, int64_t vocab_size,
                         const SampleScratch& scratch, TokenLogprob* top);

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_SAMPLE_H_
