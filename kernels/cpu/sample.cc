#include "kernels/cpu/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/counter_random.h"
#include "kernels/cpu/softmax.h"
#include "kernels/logit_math.h"

namespace efla {
namespace {

// Ranks are sorted in growing prefixes: a nucleus is usually small.
constexpr int64_t kFirstPrefix = 64;
constexpr int64_t kPrefixGrowth = 8;

struct RankBefore {
  const float* logits;
  bool operator()(TokenId a, TokenId b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

// The best row.num_top tokens by insertion: one comparison for nearly every logit.
void FindTop(const float* logits, int64_t vocab_size, int num_top, double log_sum, TokenLogprob* top) {
  int held = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (held == num_top && !(logits[id] > top[held - 1].logprob)) continue;
    int place = held < num_top ? held++ : held - 1;
    for (; place > 0 && logits[id] > top[place - 1].logprob; --place) top[place] = top[place - 1];
    top[place] = {static_cast<TokenId>(id), logits[id]};
  }
  for (int i = 0; i < held; ++i) {
    top[i].logprob = static_cast<float>(static_cast<double>(top[i].logprob) - log_sum);
  }
  std::fill(top + held, top + num_top, TokenLogprob{-1, -std::numeric_limits<float>::infinity()});
}

// How many of order[0, count), by `before`, it takes for the weights to reach `share` of all of them: at
// least one. Sorts no more than that takes; `sorted`: all of it is.
template <typename Before>
int64_t CountToShare(const float* weights, float share, bool sorted, const Before& before, TokenId* order,
                     int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(weights[order[i]]);
  const double wanted = static_cast<double>(share) * total;
  double sum = 0;
  for (int64_t begin = 0, end = std::min(kFirstPrefix, count);;
       begin = end, end = std::min(end * kPrefixGrowth, count)) {
    if (!sorted) {
      if (end < count) std::nth_element(order + begin, order + end, order + count, before);
      std::sort(order + begin, order + end, before);
    }
    for (int64_t i = begin; i < end; ++i) {
      sum += static_cast<double>(weights[order[i]]);
      if (sum >= wanted || i + 1 == count) return i + 1;
    }
  }
}

// The last rank that top-k and top-p keep; null when they keep everything. `order` is scratch.
const TokenId* FindLastKept(const SampleRow& row, const float* logits, const float* weights,
                            int64_t vocab_size, TokenId* order) {
  const bool cut_k = row.top_k > 0 && row.top_k < vocab_size;
  const bool cut_p = row.top_p < 1.0f;
  if (!cut_k && !cut_p) return nullptr;
  const RankBefore before{logits};
  std::iota(order, order + vocab_size, TokenId{0});
  int64_t kept = vocab_size;
  if (cut_k) {
    kept = row.top_k;
    std::nth_element(order, order + kept - 1, order + vocab_size, before);
    if (!cut_p) return order + kept - 1;
    std::sort(order, order + kept, before);  // so that the sum has one order
  }
  return order + CountToShare(weights, row.top_p, cut_k, before, order, kept) - 1;
}

// Sets the weights of what top-k and top-p cut off to zero.
void CutRanks(const SampleRow& row, const float* logits, int64_t vocab_size, const SampleScratch& scratch) {
  const TokenId* last = FindLastKept(row, logits, scratch.weights, vocab_size, scratch.order);
  if (last == nullptr) return;
  const RankBefore before{logits};
  const TokenId last_kept = *last;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (before(last_kept, static_cast<TokenId>(id))) scratch.weights[id] = 0.0f;
  }
}

TokenId Draw(const SampleRow& row, const float* logits, int64_t vocab_size, float max,
             const SampleScratch& scratch) {
  if (row.temperature == 0.0f) {
    return static_cast<TokenId>(std::find(logits, logits + vocab_size, max) - logits);
  }
  TemperatureWeights(logits, vocab_size, max, row.temperature, scratch.weights);
  CutRanks(row, logits, vocab_size, scratch);
  double total = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (scratch.weights[id] < row.min_p) scratch.weights[id] = 0.0f;  // the best one's weight is 1
    total += static_cast<double>(scratch.weights[id]);
  }
  const double target = CounterUniform(row.seed, row.position) * total;
  double sum = 0;
  TokenId drawn = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (scratch.weights[id] == 0.0f) continue;
    drawn = static_cast<TokenId>(id);
    sum += static_cast<double>(scratch.weights[id]);
    if (sum > target) break;
  }
  return drawn;
}

constexpr float kBanned = -std::numeric_limits<float>::infinity();

// top-k and then typical-p: what they cut off is banned. With x = log p + const, a token's surprise is off
// the expected one by |mean of x - x|.
void KeepTypical(const SampleRow& row, float* logits, int64_t vocab_size, float max,
                 const SampleScratch& scratch) {
  TemperatureWeights(logits, vocab_size, max, row.temperature, scratch.weights);
  CutRanks({.top_k = row.top_k}, logits, vocab_size, scratch);
  const auto x = [&](int64_t id) { return static_cast<double>((logits[id] - max) / row.temperature); };
  double total = 0, mean = 0;
  int64_t count = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (scratch.weights[id] == 0.0f) continue;
    total += static_cast<double>(scratch.weights[id]);
    mean += static_cast<double>(scratch.weights[id]) * x(id);
    scratch.order[count++] = static_cast<TokenId>(id);
  }
  mean /= total;
  const auto distance = [&](int64_t id) { return std::abs(mean - x(id)); };
  const auto nearer = [&](TokenId a, TokenId b) {
    const double at_a = distance(a), at_b = distance(b);
    return at_a < at_b || (at_a == at_b && a < b);
  };
  const int64_t kept =
      CountToShare(scratch.weights, row.typical_p, /*sorted=*/false, nearer, scratch.order, count);
  const double reach = distance(scratch.order[kept - 1]);
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (scratch.weights[id] == 0.0f || distance(id) > reach) logits[id] = kBanned;
  }
}

// The draw of a row that DrawsReshaped; -1 when everything is banned.
TokenId DrawReshaped(const SampleRow& row, const DrawShape& shape, const float* logits, int64_t vocab_size,
                     const SampleScratch& scratch) {
  float* const reshaped = scratch.reshaped;
  std::copy_n(logits, vocab_size, reshaped);
  for (const LogitAdjustment& adjustment : shape.adjustments) {
    reshaped[adjustment.token] = AdjustedLogit(reshaped[adjustment.token], adjustment);
  }
  if (shape.mask != nullptr) {
    for (int64_t id = 0; id < vocab_size; ++id) {
      if ((shape.mask[id / 32] >> (id % 32) & 1) == 0) reshaped[id] = kBanned;
    }
  }
  float max = *std::max_element(reshaped, reshaped + vocab_size);
  if (max == kBanned) return -1;
  SampleRow rest = row;
  if (row.temperature != 0.0f && row.typical_p < 1.0f) {
    KeepTypical(row, reshaped, vocab_size, max, scratch);
    max = *std::max_element(reshaped, reshaped + vocab_size);
    rest.top_k = 0;
  }
  return Draw(rest, reshaped, vocab_size, max, scratch);
}

}  // namespace

SampleResult SampleToken(const SampleRow& row, const DrawShape& shape, const float* logits,
                         int64_t vocab_size, const SampleScratch& scratch, TokenLogprob* top) {
  const LogitRange range = FindLogitRange(logits, vocab_size);
  if (!range.finite) {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
    std::fill(top, top + row.num_top, TokenLogprob{-1, kNaN});
    return {.token = std::max(row.target, 0), .logprob = kNaN, .finite = 0, .top_begin = 0};
  }
  const double log_sum =
      static_cast<double>(range.max) + std::log(SumExponentials(logits, vocab_size, range.max));
  TokenId token = row.target;
  if (DrawsReshaped(row)) {
    token = DrawReshaped(row, shape, logits, vocab_size, scratch);
  } else if (token < 0) {
    token = Draw(row, logits, vocab_size, range.max, scratch);
  }
  if (row.num_top > 0) FindTop(logits, vocab_size, row.num_top, log_sum, top);
  if (token < 0) return {.token = -1, .logprob = kBanned, .finite = 1, .top_begin = 0};
  return {.token = token,
          .logprob = static_cast<float>(static_cast<double>(logits[token]) - log_sum),
          .finite = 1,
          .top_begin = 0};
}

}  // namespace efla
