// One row of logits to a token: the draw or the score, its log-probability, the best alternatives.
//
// Steps, in order: temperature, top-k, top-p, min-p, draw. Tokens are ranked by logit, equal ones by lower
// id.
//   top-k  keeps the k first ranks;
//   top-p  keeps the fewest first ranks whose share of the kept probability reaches top_p;
//   min-p  keeps those of at least min_p times the best one's probability;
//   draw   inverts the cumulative distribution of what is kept, in the order of ids, at CounterUniform(seed,
//   position).
//
// Shapes: logits float32 [rows, vocab]; results [rows] and top [sum of num_top] in host memory.
// A block owns one row. Nothing is sorted: a cut is found by bisection over the logits' bits, each step one
// pass that counts (or weighs) what lies above, over the row in shared memory where it fits there. Sums run
// in double, in an order that depends on the vocabulary's size alone. Bytes: 4 vocab a row.
#include "kernels/counter_random.h"
#include "kernels/cuda/act.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/ptx.cuh"

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

struct Row {
  const float* logits;
  int vocab_size;
  float max;
  float temperature;

  __device__ float Weight(int id) const { return expf((logits[id] - max) / temperature); }
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
  const bool cut_k = top_k > 0 && top_k < row.vocab_size;
  if (!cut_k && top_p >= 1.0f) return kept;
  uint64_t least = 0;
  for (int id = threadIdx.x; id < row.vocab_size; id += kThreads) {
    const uint64_t inverse = 0xffffffffu - OrderedBits(row.logits[id]);
    least = inverse > least ? inverse : least;
  }
  kept.threshold = 0xffffffffu - static_cast<uint32_t>(BlockMax(least, scratch));
  const uint32_t above_all = OrderedBits(row.max) + 1;
  if (cut_k) {
    const Bracket whole = {
        kept.threshold, above_all, {row.vocab_size, static_cast<double>(row.vocab_size)}, {0, 0.0}};
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
  const Row row = {logits, vocab_size, FromOrderedBits(static_cast<uint32_t>(best >> 32)),
                   sample.temperature};

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

  int token = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
  if (sample.target >= 0) {
    token = sample.target;
  } else if (sample.temperature != 0.0f) {
    const Kept kept = Cut(row, sample.top_k, sample.top_p, scratch);
    token = Draw(row, kept, sample.min_p, CounterUniform(sample.seed, sample.position), scratch, drawn);
  }
  for (int i = 0; i < sample.num_top; ++i) {
    if (threadIdx.x == 0) {
      const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
      top[i] = best == 0 ? TokenLogprob{-1, __uint_as_float(0xff800000u)}
                         : TokenLogprob{id, static_cast<float>(static_cast<double>(logits[id]) - log_sum)};
    }
    uint64_t next = 0;
    for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
      const uint64_t rank = RankBits(OrderedBits(logits[id]), id);
      if (rank < best && rank > next) next = rank;
    }
    if (i + 1 < sample.num_top) best = BlockMax(next, scratch);
  }
  if (threadIdx.x == 0) {
    params.results[index] = {token, static_cast<float>(static_cast<double>(logits[token]) - log_sum), 1,
                             top_begin};
  }
}

}  // namespace

cudaError_t LaunchSample(const LaunchContext& context, const SampleParams& params) {
  LaunchShape shape;
  shape.grid = dim3(params.num_rows);
  shape.block = dim3(kThreads);
  const size_t row_bytes = sizeof(float) * params.vocab_size;
  if (row_bytes > kMaxRowBytes) return Launch(context, shape, SampleKernel<false>, params);
  shape.shared_bytes = row_bytes;
  return Launch(context, shape, SampleKernel<true>, params);
}

}  // namespace efla::cuda
