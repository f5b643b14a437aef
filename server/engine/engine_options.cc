// What of EngineOptions goes together, and what they ask of a model.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/op_args.h"
#include "server/engine/engine.h"

namespace efla {
namespace {

absl::Status AtLeast(const char* name, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %d; the least is %d", name, value, least));
}

}  // namespace

absl::Status EngineOptions::Validate() const {
  if (max_batch_tokens < kChunkTokens || max_batch_tokens % kChunkTokens != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_batch_tokens is %d; it must be a positive multiple of %d", max_batch_tokens, kChunkTokens));
  }
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"max_running", max_running},
                                    {"max_queue", max_queue},
                                    {"max_prompt_tokens", max_prompt_tokens},
                                    {"max_queued_tokens", max_queued_tokens},
                                    {"max_undelivered_tokens", max_undelivered_tokens}}) {
    if (absl::Status status = AtLeast(name, value, 1); !status.ok()) return status;
  }
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"max_new_tokens", max_new_tokens},
                                    {"prefix_cache_slots", prefix_cache_slots}}) {
    if (absl::Status status = AtLeast(name, value, 0); !status.ok()) return status;
  }
  return AtLeast("slow_reader_timeout in ms", slow_reader_timeout.count(), 0);
}

ModelLimits EngineOptions::RequiredLimits() const {
  const int most = std::max(max_batch_tokens, max_running + kChunkTokens);
  return {.max_tokens = most, .max_decode = max_running, .max_samples = most};
}

}  // namespace efla
