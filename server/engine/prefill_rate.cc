#include "server/engine/prefill_rate.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/op_args.h"

namespace efla {

void PrefillRate::Note(int tokens, Clock::duration took) {
  // Falls by half in some seventy steps, so that one lucky measurement does not last.
  constexpr double kFade = 0.99;
  if (tokens < kChunkTokens) return;
  const double rate = tokens / Seconds(took);
  const double best = tokens_per_second_.load(std::memory_order_relaxed) * kFade;
  tokens_per_second_.store(std::max(rate, best), std::memory_order_relaxed);
}

absl::Status PrefillRate::CheckDeadline(int64_t own, int64_t ahead, Clock::duration left) const {
  const double rate = tokens_per_second_.load(std::memory_order_relaxed);
  if (rate <= 0) return absl::OkStatus();
  const double needed = static_cast<double>(ahead + own) / rate;
  if (needed <= Seconds(left)) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrFormat(
      "the deadline is in %.3f s; %d prompt tokens of this request and %d that wait before it "
      "need %.3f s at least",
      Seconds(left), own, ahead, needed));
}

}  // namespace efla
