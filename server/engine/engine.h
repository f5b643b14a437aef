// Continuous batching over one device. One thread of its own drives the device; another delivers events.
#ifndef EFLA_SERVER_ENGINE_ENGINE_H_
#define EFLA_SERVER_ENGINE_ENGINE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "model/tokenizer.h"
#include "server/engine/generation.h"
#include "server/engine/resident_state.h"

namespace efla {

struct EngineOptions {
  int max_batch_tokens = 512;  // token budget of a step; a multiple of kChunkTokens
  int max_running = 32;        // sequences in the batch; the pool's slots bound them as well
  int max_queue = 256;         // requests that wait for a slot
  int64_t max_prompt_tokens = 1 << 20;
  int64_t max_queued_tokens = 1 << 22;  // prompt tokens that wait, over all requests
  int64_t max_new_tokens = 1 << 20;
  int max_undelivered_tokens = 512;  // a stream that holds more is parked until its reader catches up
  std::chrono::milliseconds slow_reader_timeout{30'000};  // parked longer: RESOURCE_EXHAUSTED
  // Slots that the prefix cache may hold at most; they are given back whenever requests need them. 0: none.
  int prefix_cache_slots = 0;
  std::vector<TokenId> eos_token_ids = {};  // end tokens beside the config's (generation_config.json)
  // The engine's time; null: Clock::now. With a clock that does not run by itself, call Engine::Wake after
  // moving it.
  std::function<Clock::time_point()> now = nullptr;

  // INVALID_ARGUMENT naming the option, the value and the bound.
  absl::Status Validate() const;
  // What the model has to be loaded with: a step holds at most max(max_batch_tokens, max_running +
  // kChunkTokens) tokens, since a full batch still lets one chunk of a prompt through.
  ModelLimits RequiredLimits() const;
};

// What happens, as it happens, for metrics. Called from the engine thread, and for refusals from the thread
// that called Submit; must be quick and must not call back into the engine.
class EngineObserver {
 public:
  // kStop: an end token, stop token or stop string, or a constraint's end; kLength: max_tokens or the time
  // budget; kCancelled: by its client, or since its reader was too slow for too long; kRejected: Submit
  // returned an error, whichever; kUnavailable: cut by a shutdown; kError: the device failed or the logits
  // were not finite; kUnsatisfiable: bans and constraint left no token to draw.
  enum class Outcome {
    kStop,
    kLength,
    kCancelled,
    kDeadline,
    kRejected,
    kUnavailable,
    kError,
    kUnsatisfiable
  };
  struct Step {
    int decode_rows = 0, prefill_tokens = 0, sample_rows = 0;
    double seconds = 0;       // submit to results
    double host_seconds = 0;  // the engine's own work since the last step, without the time it slept
  };
  virtual ~EngineObserver() = default;
  virtual void OnStep(const Step& step) {}
  virtual void OnFirstToken(double seconds_since_submit) {}
  virtual void OnTokenGap(double seconds) {}
  // Exactly one for each request that reached Submit, refused ones (kRejected) included and parts of a call
  // left out, and before its end can be taken.
  virtual void OnEnd(Outcome outcome, const Usage& usage, const Timing& timing) {}
};

// A reading of the moment; any thread.
struct EngineStats {
  int waiting = 0, running = 0, parked = 0;
  int64_t queued_prompt_tokens = 0;
  double oldest_wait_seconds = 0;
  StatePool::Counts slots;
  uint64_t steps = 0;
  double seconds_since_step = 0;  // since the last step's results, or since the start
  // Of the prefix cache, since the start: prompts that asked it, those that found something, tokens found.
  uint64_t prefix_cache_lookups = 0, prefix_cache_hits = 0, prefix_cache_hit_tokens = 0;
  int prefix_cache_slots = 0;  // held now
  bool healthy = true;         // false after a device error: no request will be taken any more
  bool draining = false;
};

class Engine {
 public:
  // References must outlive the engine; `tokenizer` and `observer` may be null. INVALID_ARGUMENT when an
  // option is out of its range or the model was loaded with less than options.RequiredLimits().
  static absl::StatusOr<std::unique_ptr<Engine>> Start(Model& model, StatePool& pool,
                                                       const Tokenizer* tokenizer,
                                                       const EngineOptions& options,
                                                       EngineObserver* observer);
  // Ends what is left with UNAVAILABLE, runs the callbacks for it and joins the engine's threads. No other
  // call into the engine may be under way; generations may live on.
  virtual ~Engine() = default;

  // Any thread; never blocks on the device. Checks the request (INVALID_ARGUMENT), then admits it to the
  // queue: RESOURCE_EXHAUSTED when the queue is full, DEADLINE_EXCEEDED when the deadline has passed or will
  // have before the prompts ahead and this one can be computed at the best speed of late, UNAVAILABLE when
  // draining or unhealthy. `ready` may be called from the delivery thread before Submit has returned; it is
  // dropped without a call when Submit fails, and after its last call otherwise.
  //
  // A generation ends by the first of: an end token of the model (unless ignore_eos), a stop token or a stop
  // string that spells exactly one control token (kStopToken), a stop string in the text, the end of its
  // constraint, max_tokens, the time budget. The end or stop token counts in the usage and is among the
  // finished event's tokens; it adds to the text only without skip_special_tokens.
  virtual absl::StatusOr<std::shared_ptr<Generation>> Submit(GenerationRequest request,
                                                             ReadyCallback ready) = 0;
  // Any thread. Keeps places in the queue for `requests` (>= 0) requests with GenerationRequest::places, of
  // `prompt_tokens` altogether: they count as waiting from now on, until each is submitted.
  // RESOURCE_EXHAUSTED when the queue has not so many left, UNAVAILABLE when draining or unhealthy.
  virtual absl::StatusOr<QueuePlacesPtr> Reserve(int requests, int64_t prompt_tokens) = 0;
  // Any thread. Runs `ready` again on the delivery thread: a writer that was busy is free again.
  virtual void Deliver(const std::shared_ptr<Generation>& generation) = 0;

  // Any thread. Refuses new requests and waits until the admitted ones, queued ones and those that have
  // places kept included, have ended or `timeout` has passed, then ends the rest with UNAVAILABLE.
  virtual void Drain(std::chrono::milliseconds timeout) = 0;
  virtual EngineStats stats() const = 0;
  // Any thread. Whether the ids have text, which what follows them goes on.
  virtual bool HoldsText(std::span<const TokenId> ids) const = 0;
  // Any thread. Has the engine look at its clock and at the pool.
  virtual void Wake() = 0;

  // ---- States that outlive their calls ----

  // Any thread; block for the copy but never hold up a step. `bytes`: StateLayout::state_bytes.
  // RESOURCE_EXHAUSTED when no slot is free, INVALID_ARGUMENT when the size is not the model's.
  virtual absl::Status CopyOut(const ResidentState& state, std::span<std::byte> to) = 0;
  virtual absl::StatusOr<ResidentStatePtr> CopyIn(std::span<const std::byte> from) = 0;
  // Called on the engine thread, before every step and sleep, while waiting requests lack `wanted` slots and
  // the prefix cache has none to give back; must be quick. States that are then let go of, on any thread, let
  // the requests in by themselves. Set before the first Submit.
  virtual void SetSlotShortageCallback(std::function<void(int wanted)> callback) = 0;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_ENGINE_H_
