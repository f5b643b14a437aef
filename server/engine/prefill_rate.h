// How fast prompts are computed at best, and so which deadlines cannot be kept.
#ifndef EFLA_SERVER_ENGINE_PREFILL_RATE_H_
#define EFLA_SERVER_ENGINE_PREFILL_RATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "server/engine/generation.h"

namespace efla {

class PrefillRate {
 public:
  // One thread. A step has computed `tokens` prompt tokens; one with less than a chunk tells nothing.
  void Note(int tokens, Clock::duration took);
  // Any thread. DEADLINE_EXCEEDED when `own` tokens behind `ahead` ones take longer than `left`, at the best
  // speed of late; OK while none is known.
  absl::Status CheckDeadline(int64_t own, int64_t ahead, Clock::duration left) const;
  bool is_known() const { return tokens_per_second_.load(std::memory_order_relaxed) > 0; }

 private:
  std::atomic<double> tokens_per_second_{0};  // 0: not known yet
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_PREFILL_RATE_H_
