// Sends generations to a server at a fixed concurrency or rate and records when their tokens arrive.
#ifndef EFLA_CLIENT_LOAD_RUN_H_
#define EFLA_CLIENT_LOAD_RUN_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <vector>

#include "client/load_stats.h"
#include "efla/v1/generation.grpc.pb.h"

namespace efla {

struct LoadPlan {
  // Exactly one of the two is above 0.
  int concurrency = 0;             // closed loop: so many requests in flight, the next when one ends
  double requests_per_second = 0;  // open loop: Poisson arrivals, sent when due whatever is still in flight
  // Sending stops at whichever comes first; 0 is no limit, one is above 0. What is in flight then is waited
  // for.
  uint64_t requests = 0;
  double duration_seconds = 0;

  PromptMix prompts;
  uint32_t vocab_size = 0;
  std::vector<uint32_t> excluded_ids;  // never in a prompt
  uint32_t max_tokens = 128;           // drawn by each request: end-of-text tokens are ignored
  float temperature = 0;
  uint64_t seed = 0;                                 // request i of a plan is the same in every run
  std::optional<std::chrono::milliseconds> timeout;  // of each request
};

struct LoadProgress {
  double seconds = 0;
  uint64_t sent = 0, ended = 0, failed = 0, chunks = 0;
};

// Blocks until the plan has run. A stop cancels what is in flight and returns what there is. `on_progress`
// runs about once a second, from this thread; it may be null. Uses gRPC's callback API: no thread a stream.
std::vector<RequestRecord> RunLoad(v1::Generation::Stub& stub, const LoadPlan& plan, std::stop_token stop,
                                   const std::function<void(const LoadProgress&)>& on_progress);

}  // namespace efla

#endif  // EFLA_CLIENT_LOAD_RUN_H_
