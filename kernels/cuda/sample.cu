// One row of logits to a token: the draw or the score, its log-probability, the best alternatives.
//
// The steps and their order are sample.h's (kernels/cpu): adjustments, mask, temperature, top-k, typical-p,
// top-p, min-p, draw. Tokens are ranked by logit, equal ones by lower id.
//
// Shapes: logits float32 [rows, vocab]; results [rows] and top [sum of num_top] in host memory.
// A block owns one row. Nothing is sorted: a cut is found by bisection over the logits' bits, each step one
// pass that counts (or weighs) what lies above, over the row in shared memory where it fits there. Sums run
// in double, in an order that depends on the vocabulary's size alone. Bytes: 4 vocab a row.
// A row with a list, a mask or typical-p draws from a copy of its logits in which banned tokens are -infinity
// and weigh nothing; log-probabilities come from the row itself.
#include "kernels/counter_random.h"
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/logit_math.h"

namespace efla::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr size_t kMaxRowBytes = 200 * 1024;  // of shared memory, for the row

// Bits that order as the floats do.
__device__ inline uint32_t OrderedBits(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 is +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// Larger is better: by logit, then by lower id. Never 0 for a finite logit.
__device__ inline uint64_t RankBits(uint32_t ordered, int id) {
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

struct Scratch {
  double sums[kWarps];
  uint64_t words[kWarps];
};

// Over the block; every thread gets the result. Two barriers each.
__device__ inline double BlockSum(double value, Scratch& scratch) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  __syncthreads();
  if (threadIdx.x % kWarpLanes == 0) scratch.sums[threadIdx.x / kWarpLanes] = value;
  __syncthreads();
  value = scratch.sums[threadIdx.x % kWarpLanes];
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

__device__ inline uint64_t BlockMax(uint64_t value, Scratch& scratch) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (threadIdx.x % kWarpLanes == 0) scratch.words[threadIdx.x / kWarpLanes] = value;
  __syncthreads();
  value = scratch.words[threadIdx.x % kWarpLanes];
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  return value;
}
static_assert(kWarps == kWarpLanes, "one lane for each warp's part");

// Banned tokens' logits are -infinity; `num_allowed` are not.
struct Row {
  const float* logits;
  int vocab_size;
  int num_allowed;
  float max;
  float temperature;

  __device__ float Exponent(int id) const { return (logits[id] - max) / temperature; }
  __device__ float Weight(int id) const { return expf(Exponent(id)); }
};

// What the cuts keep: tokens of more than `threshold`, and of equal ones those up to `last_id`.
struct Kept {
  uint32_t threshold = 0;
  int last_id = 0;
  __device__ bool Holds(uint32_t ordered, int id) const {
    return ordered > threshold || (ordered == threshold && id <= last_id);
  }
};

// How many tokens that `kept` holds have at least `threshold`, and what they weigh.
struct Above {
  int count;
  double weight;
};

__device__ inline Above MeasureFrom(const Row& row, uint32_t threshold, const Kept& kept, bool weigh,
                                    Scratch& scratch) {
  int count = 0;
  double weight = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    const uint32_t ordered = OrderedBits(row.logits[id]);
    if (ordered < threshold || !kept.Holds(ordered, id)) continue;
    ++count;
    if (weigh) weight += static_cast<double>(row.Weight(id));
  }
  const double total = BlockSum(static_cast<double>(count), scratch);  // exact
  return {static_cast<int>(total), weigh ? BlockSum(weight, scratch) : total};
}

// A threshold with measure >= wanted from it on and < wanted from `high` on, with at most one distinct logit,
// or one token, between the two.
struct Bracket {
  uint32_t low, high;
  Above from_low, from_high;
};

// Halves by value, which takes a dozen steps for logits, and by bits once that has had its chance.
__device__ inline Bracket Bisect(const Row& row, Bracket bracket, const Kept& kept, double wanted, bool weigh,
                                 Scratch& scratch) {
  constexpr int kStepsByValue = 24;
  for (int step = 0; bracket.high - bracket.low > 1 && bracket.from_low.count - bracket.from_high.count > 1;
       ++step) {
    uint32_t middle = OrderedBits(0.5f * FromOrderedBits(bracket.low) + 0.5f * FromOrderedBits(bracket.high));
    if (step >= kStepsByValue || middle <= bracket.low || middle >= bracket.high) {
      middle = bracket.low + (bracket.high - bracket.low) / 2;
    }
    const Above above = MeasureFrom(row, middle, kept, weigh, scratch);
    if (above.count > 0 && above.weight >= wanted) {
      bracket.low = middle;
      bracket.from_low = above;
    } else {
      bracket.high = middle;
      bracket.from_high = above;
    }
  }
  return bracket;
}

// The id of the `nth` (from 1) token whose logit has these bits, in the order of ids.
__device__ inline int NthEqual(const Row& row, uint32_t ordered, int nth, Scratch& scratch) {
  int low = -1, high = row.vocab_size - 1;  // fewer than nth up to low, at least nth up to high
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    int count = 0;
    for (int id = threadIdx.x; id <= middle; id += kThreads) count += OrderedBits(row.logits[id]) == ordered;
    if (BlockSum(static_cast<double>(count), scratch) >= nth) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return high;
}

__device__ inline Kept Cut(const Row& row, int top_k, float top_p, Scratch& scratch) {
  Kept kept = {.threshold = 0, .last_id = row.vocab_size};
  const bool cut_k = top_k > 0 && top_k < row.num_allowed;
  if (!cut_k && top_p >= 1.0f) return kept;
  uint64_t least = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    if (row.logits[id] == -INFINITY) continue;
    const uint64_t inverse = 0xffffffffu - OrderedBits(row.logits[id]);
    least = inverse > least ? inverse : least;
  }
  kept.threshold = 0xffffffffu - static_cast<uint32_t>(BlockMax(least, scratch));
  const uint32_t above_all = OrderedBits(row.max) + 1;
  if (cut_k) {
    const Bracket whole = {
        kept.threshold, above_all, {row.num_allowed, static_cast<double>(row.num_allowed)}, {0, 0.0}};
    const Bracket cut = Bisect(row, whole, kept, top_k, false, scratch);
    kept.threshold = cut.low;
    // More than top_k from here on: equal logits, of which the first few are kept.
    if (cut.from_low.count > top_k)
      kept.last_id = NthEqual(row, cut.low, top_k - cut.from_high.count, scratch);
  }
  if (top_p < 1.0f) {
    const Above all = MeasureFrom(row, kept.threshold, kept, true, scratch);
    const double wanted = static_cast<double>(top_p) * all.weight;
    const Bracket whole = {kept.threshold, above_all, all, {0, 0.0}};
    const Bracket cut = Bisect(row, whole, kept, wanted, true, scratch);
    if (cut.low != kept.threshold) kept = {.threshold = cut.low, .last_id = row.vocab_size};
    // Equal logits have equal weights: as many of them as the share still needs.
    const int available = cut.from_low.count - cut.from_high.count;
    if (available > 1) {
      const double weight = static_cast<double>(expf((FromOrderedBits(cut.low) - row.max) / row.temperature));
      int needed = 1;
      for (double sum = cut.from_high.weight + weight; sum < wanted && needed < available; sum += weight)
        ++needed;
      if (needed < available) kept.last_id = NthEqual(row, cut.low, needed, scratch);
    }
  }
  return kept;
}

// Inverts the cumulative distribution. Warp w sums a run of ids, 32 at a time; the warp that holds the target
// then walks its run again.
__device__ inline int Draw(const Row& row, const Kept& kept, float min_p, double uniform, Scratch& scratch,
                           int& drawn) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int groups = (row.vocab_size + kWarpLanes - 1) / kWarpLanes;
  const int begin = groups * warp / kWarps * kWarpLanes;
  const int end = min(groups * (warp + 1) / kWarps * kWarpLanes, row.vocab_size);
  const auto weight = [&](int id) {
    if (id >= end || !kept.Holds(OrderedBits(row.logits[id]), id)) return 0.0;
    const float w = row.Weight(id);
    return w < min_p ? 0.0 : static_cast<double>(w);
  };
  const auto warp_sum = [](double value) {
#pragma unroll
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    return value;
  };
  double sum = 0;
  for (int id = begin; id < end; id += kWarpLanes) sum += warp_sum(weight(id + lane));
  __syncthreads();
  if (lane == 0) scratch.sums[warp] = sum;
  __syncthreads();
  double total = 0;
  for (int w = 0; w < kWarps; ++w) total += scratch.sums[w];
  const double target = uniform * total;
  // The first warp whose run passes the target, else the last with any weight.
  double before = 0, passed = 0;
  int holder = 0;
  for (int w = 0; w < kWarps; ++w) {
    const double run = scratch.sums[w];
    if (run == 0.0) continue;
    holder = w;
    before = passed;
    passed += run;
    if (passed > target) break;
  }
  if (warp == holder) {
    int found = begin;
    double walked = before;
    for (int id = begin; id < end; id += kWarpLanes) {
      const double own = weight(id + lane);
      const double group = warp_sum(own);
      if (group == 0.0) continue;
      // Inclusive sums over the lanes, in the order of ids.
      double upto = own;
#pragma unroll
      for (int distance = 1; distance < kWarpLanes; distance *= 2) {
        const double other = __shfl_up_sync(kAllLanes, upto, distance);
        if (lane >= distance) upto += other;
      }
      const unsigned weighted = __ballot_sync(kAllLanes, own > 0.0);
      const unsigned passing = __ballot_sync(kAllLanes, own > 0.0 && walked + upto > target);
      found = id + (passing != 0 ? __ffs(passing) - 1 : kWarpLanes - 1 - __clz(weighted));
      if (passing != 0) break;
      walked += group;
    }
    if (lane == 0) drawn = found;
  }
  __syncthreads();
  return drawn;
}

// What is not banned: the best rank (0: nothing) and how many there are.
struct Allowed {
  uint64_t best;
  int count;
};

// A list, and a mask or null, applied to the row's copy in `logits`.
__device__ inline Allowed Adjust(const LogitAdjustment* list, int num_adjust, const uint32_t* mask,
                                 int vocab_size, float* logits, Scratch& scratch) {
  __syncthreads();  // the copy is whole
  for (int i = threadIdx.x; i < num_adjust; i += kThreads) {
    const LogitAdjustment adjustment = list[i];
    logits[adjustment.token] = AdjustedLogit(logits[adjustment.token], adjustment);
  }
  __syncthreads();
  uint64_t best = 0;
  int count = 0;
  for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
    if (mask != nullptr && (mask[id / 32] >> (id % 32) & 1) == 0) logits[id] = -INFINITY;
    if (logits[id] == -INFINITY) continue;
    ++count;
    const uint64_t rank = RankBits(OrderedBits(logits[id]), id);
    best = rank > best ? rank : best;
  }
  best = BlockMax(best, scratch);  // its barriers also publish what has been written
  return {best, static_cast<int>(BlockSum(static_cast<double>(count), scratch))};
}

// typical-p of what `kept` holds: bans everything else. With x the logit over the temperature, a token's
// surprise is off the expected one by |mean of x - x|; the reach is found by bisection as in Bisect.
__device__ inline Allowed KeepTypical(const Row& row, const Kept& kept, float typical_p, float* logits,
                                      Scratch& scratch) {
  double weight = 0, weighted = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    const float w = row.Weight(id);
    if (w == 0.0f || !kept.Holds(OrderedBits(row.logits[id]), id)) continue;
    weight += static_cast<double>(w);
    weighted += static_cast<double>(w) * static_cast<double>(row.Exponent(id));
  }
  const double total = BlockSum(weight, scratch);
  const float mean = static_cast<float>(BlockSum(weighted, scratch) / total);
  // INFINITY for what is out already. Bits of floats >= 0 order as the floats do.
  const auto distance = [&](int id) {
    const bool in = row.Weight(id) != 0.0f && kept.Holds(OrderedBits(row.logits[id]), id);
    return in ? fabsf(mean - row.Exponent(id)) : INFINITY;
  };
  const auto measure_within = [&](uint32_t reach) -> Above {
    int count = 0;
    double within = 0;
    for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
      if (!(distance(id) <= __uint_as_float(reach))) continue;
      ++count;
      within += static_cast<double>(row.Weight(id));
    }
    return {static_cast<int>(BlockSum(static_cast<double>(count), scratch)), BlockSum(within, scratch)};
  };
  const double wanted = static_cast<double>(typical_p) * total;
  uint64_t farthest = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    const float d = distance(id);
    const uint64_t bits = d == INFINITY ? 0 : __float_as_uint(d);
    farthest = bits > farthest ? bits : farthest;
  }
  // `low` does not reach `wanted`, unless it is 0; `high` does.
  uint32_t low = 0, high = static_cast<uint32_t>(BlockMax(farthest, scratch));
  Above to_low = measure_within(low), to_high = measure_within(high);
  if (to_low.count > 0 && to_low.weight >= wanted) high = low;
  constexpr int kStepsByValue = 24;
  for (int step = 0; high > low + 1 && to_high.count - to_low.count > 1; ++step) {
    uint32_t middle = __float_as_uint(0.5f * __uint_as_float(low) + 0.5f * __uint_as_float(high));
    if (step >= kStepsByValue || middle <= low || middle >= high) middle = low + (high - low) / 2;
    const Above within = measure_within(middle);
    if (within.count > 0 && within.weight >= wanted) {
      high = middle;
      to_high = within;
    } else {
      low = middle;
      to_low = within;
    }
  }
  const float reach = __uint_as_float(high);
  uint64_t best = 0;
  int count = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    if (!(distance(id) <= reach)) {
      logits[id] = -INFINITY;
      continue;
    }
    ++count;
    const uint64_t rank = RankBits(OrderedBits(logits[id]), id);
    best = rank > best ? rank : best;
  }
  best = BlockMax(best, scratch);
  return {best, static_cast<int>(BlockSum(static_cast<double>(count), scratch))};
}

__device__ inline int IdOf(uint64_t rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

__device__ inline float LogitOf(uint64_t rank) { return FromOrderedBits(static_cast<uint32_t>(rank >> 32)); }

// Everything up to typical-p of a row that DrawsReshaped, on its copy. A function of its own, so that the
// registers it takes cost other rows nothing.
__device__ __noinline__ Allowed Reshape(const SampleRow* sample, const LogitAdjustment* adjustments,
                                        const uint32_t* masks, int vocab_size, float* logits,
                                        Scratch& scratch) {
  const uint32_t* mask = sample->mask < 0 ? nullptr : masks + sample->mask * MaskWords(vocab_size);
  const Allowed allowed =
      Adjust(adjustments + sample->adjust_begin, sample->num_adjust, mask, vocab_size, logits, scratch);
  const float typical_p = sample->typical_p, temperature = sample->temperature;
  if (allowed.best == 0 || typical_p >= 1.0f || temperature == 0.0f) return allowed;
  const Row row = {logits, vocab_size, allowed.count, LogitOf(allowed.best), temperature};
  return KeepTypical(row, Cut(row, sample->top_k, 1.0f, scratch), typical_p, logits, scratch);
}

template <bool kRowInShared>
__global__ __launch_bounds__(kThreads, 1) void SampleKernel(SampleParams params) {
  EFLA_DYNAMIC_SHARED(shared);
  __shared__ Scratch scratch;
  __shared__ int drawn;
  GridDependencyWait();
  GridDependencyTrigger();
  const int index = blockIdx.x;
  if (index >= *params.active_rows) return;
  const SampleRow sample = params.rows[index];
  const int vocab_size = params.vocab_size;
  const float* logits = params.logits + static_cast<int64_t>(index) * vocab_size;
  // A thread's elements, in ascending order: vectors of 4 where every row is aligned for them.
  const int width = vocab_size % 4 == 0 ? 4 : 1;
  float most = -INFINITY;
  int most_id = 0;
  bool finite = true;
  const auto take = [&](int id, float logit) {
    finite = finite && isfinite(logit);
    if (logit > most) {
      most = logit;
      most_id = id;
    }
  };
  if (width == 4) {
    constexpr int kInFlight = 4;
    const int vectors = vocab_size / 4;
    for (int begin = threadIdx.x; begin < vectors; begin += kInFlight * kThreads) {
      float4 loaded[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int vector = begin + i * kThreads;
        if (vector < vectors) loaded[i] = reinterpret_cast<const float4*>(logits)[vector];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int vector = begin + i * kThreads;
        if (vector >= vectors) break;
        if (kRowInShared) reinterpret_cast<float4*>(shared)[vector] = loaded[i];
        take(4 * vector, loaded[i].x);
        take(4 * vector + 1, loaded[i].y);
        take(4 * vector + 2, loaded[i].z);
        take(4 * vector + 3, loaded[i].w);
      }
    }
  } else {
    for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
      const float logit = logits[id];
      if (kRowInShared) reinterpret_cast<float*>(shared)[id] = logit;
      take(id, logit);
    }
  }
  // 0 of a thread without elements, which loses.
  uint64_t best = most == -INFINITY ? 0 : RankBits(OrderedBits(most), most_id);
  const bool all_finite = __syncthreads_and(finite) != 0;
  const int top_begin = params.top_begin[index];
  TokenLogprob* top = params.top + top_begin;
  if (!all_finite) {
    const float nan = __uint_as_float(0x7fc00000u);
    if (threadIdx.x < sample.num_top) top[threadIdx.x] = {-1, nan};
    if (threadIdx.x == 0) params.results[index] = {sample.target > 0 ? sample.target : 0, nan, 0, top_begin};
    return;
  }
  best = BlockMax(best, scratch);
  if (kRowInShared) logits = reinterpret_cast<const float*>(shared);
  Row row = {logits, vocab_size, vocab_size, LogitOf(best), sample.temperature};

  double sum = 0;
  for (int id = width * threadIdx.x; id < vocab_size; id += width * kThreads) {
    if (width == 4) {
      const float4 v = *reinterpret_cast<const float4*>(logits + id);
      sum += static_cast<double>(expf(v.x - row.max)) + static_cast<double>(expf(v.y - row.max)) +
             static_cast<double>(expf(v.z - row.max)) + static_cast<double>(expf(v.w - row.max));
    } else {
      sum += static_cast<double>(expf(logits[id] - row.max));
    }
  }
  const double log_sum = static_cast<double>(row.max) + log(BlockSum(sum, scratch));

  uint64_t next_best = best;
  for (int i = 0; i < sample.num_top; ++i) {
    if (threadIdx.x == 0) {
      const int id = IdOf(next_best);
      top[i] = next_best == 0
                   ? TokenLogprob{-1, __uint_as_float(0xff800000u)}
                   : TokenLogprob{id, static_cast<float>(static_cast<double>(logits[id]) - log_sum)};
    }
    uint64_t next = 0;
    for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
      const uint64_t rank = RankBits(OrderedBits(logits[id]), id);
      if (rank < next_best && rank > next) next = rank;
    }
    if (i + 1 < sample.num_top) next_best = BlockMax(next, scratch);
  }

  int top_k = sample.top_k;
  if (DrawsReshaped(sample)) {
    __syncthreads();  // nobody reads the row itself any more
    float* reshaped = kRowInShared ? reinterpret_cast<float*>(shared)
                                   : params.reshaped + static_cast<int64_t>(index) * vocab_size;
    if (!kRowInShared) {
      for (int id = threadIdx.x; id < vocab_size; id += kThreads) reshaped[id] = logits[id];
    }
    const Allowed allowed =
        Reshape(params.rows + index, params.adjustments, params.masks, vocab_size, reshaped, scratch);
    if (allowed.best == 0) {
      if (threadIdx.x == 0) params.results[index] = {-1, __uint_as_float(0xff800000u), 1, top_begin};
      return;
    }
    row = {reshaped, vocab_size, allowed.count, LogitOf(allowed.best), sample.temperature};
    if (sample.typical_p < 1.0f) top_k = 0;  // it has come before
    best = allowed.best;
  }
  int token = IdOf(best);
  if (sample.target >= 0) {
    token = sample.target;
  } else if (sample.temperature != 0.0f) {
    const Kept kept = Cut(row, top_k, sample.top_p, scratch);
    token = Draw(row, kept, sample.min_p, CounterUniform(sample.seed, sample.position), scratch, drawn);
  }
  if (threadIdx.x == 0) {
    const float* raw =
        DrawsReshaped(sample) ? params.logits + static_cast<int64_t>(index) * vocab_size : logits;
    params.results[index] = {token, static_cast<float>(static_cast<double>(raw[token]) - log_sum), 1,
                             top_begin};
  }
}

}  // namespace

bool SampleFitsShared(int vocab_size) { return sizeof(float) * vocab_size <= kMaxRowBytes; }

cudaError_t LaunchSample(const LaunchContext& context, const SampleParams& params) {
  LaunchShape shape;
  shape.grid = dim3(params.num_rows);
  shape.block = dim3(kThreads);
  if (!SampleFitsShared(params.vocab_size)) return Launch(context, shape, SampleKernel<false>, params);
  shape.shared_bytes = sizeof(float) * params.vocab_size;
  return Launch(context, shape, SampleKernel<true>, params);
}

}  // namespace efla::cuda
