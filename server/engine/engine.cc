#include "server/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/engine/call.h"
#include "server/engine/delivery.h"
#include "server/engine/generation_impl.h"
#include "server/engine/pending_masks.h"
#include "server/engine/prefill_rate.h"
#include "server/engine/prefix_cache.h"
#include "server/engine/request_check.h"
#include "server/engine/resident_state.h"
#include "server/engine/scheduler.h"
#include "server/engine/step_rows.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;

class EngineImpl final : public Engine, public GenerationOwner {
 public:
  EngineImpl(Model& model, StatePool& pool, const Tokenizer* tokenizer, const EngineOptions& options,
             EngineObserver* observer, int max_running);
  ~EngineImpl() override;

  absl::StatusOr<std::shared_ptr<Generation>> Submit(GenerationRequest request, ReadyCallback ready) override;
  absl::StatusOr<QueuePlacesPtr> Reserve(int requests, int64_t prompt_tokens) override;
  void Deliver(const std::shared_ptr<Generation>& generation) override;
  void Drain(std::chrono::milliseconds timeout) override;
  EngineStats stats() const override;
  bool HoldsText(std::span<const TokenId> ids) const override;
  void Wake() override;
  absl::Status CopyOut(const ResidentState& state, std::span<std::byte> to) override;
  absl::StatusOr<ResidentStatePtr> CopyIn(std::span<const std::byte> from) override;
  void SetSlotShortageCallback(std::function<void(int wanted)> callback) override;

 private:
  // Any thread.
  Clock::time_point Now() const { return options_.now ? options_.now() : Clock::now(); }
  // With mutex_ held. `covered`: tokens of the call's prompt that may not have to be computed.
  absl::Status CheckDeadline(const Call& call, int64_t covered, Clock::time_point now) const;
  bool UsesPrefixCache(const GenerationRequest& request) const;
  absl::StatusOr<std::shared_ptr<Generation>> Enqueue(GenerationRequest request, ReadyCallback ready,
                                                      Clock::time_point now);
  void OnCancel(GenerationImpl& generation) override;
  void OnCaughtUp(GenerationImpl& generation) override;
  void OnSlotFreed();
  class Places;
  void GiveBack(const Places& places);

  // Engine thread, with mutex_ held.
  void TakeMasks();
  void CollectEnded(Clock::time_point now);
  int AdmitWaiting();
  void Leave(Call& call);
  void LeaveAll(const absl::Status& status, Outcome outcome);
  void Sleep(std::unique_lock<std::mutex>& lock);

  // Engine thread, without it.
  void Run();
  void FinishLeft();
  bool BeginAdmitted(Clock::time_point now);
  bool GiveBackCached(int slots);
  void PostReady(std::vector<std::shared_ptr<GenerationImpl>>& generations);
  void RunStep();

  Model& model_;
  StatePool& pool_;
  const Tokenizer* const tokenizer_;
  const EngineOptions options_;
  EngineObserver* const observer_;
  std::vector<TokenId> eos_token_ids_;  // sorted; constant once constructed

  PrefixCache cache_;
  // Waiting requests lack slots: whoever frees one wakes the engine. Set before the pool is looked at.
  std::atomic<bool> starved_{false};

  mutable std::mutex mutex_;  // guards what follows, down to idle_, and the fields of calls that call.h names
  Scheduler scheduler_;
  std::vector<std::unique_ptr<Call>> calls_;  // in any order; a call knows its index
  std::function<void(int wanted)> on_slot_shortage_;
  bool changed_ = false;    // something has changed since the engine thread last looked; it must not sleep
  bool attention_ = false;  // a call was cancelled or its reader caught up, or Wake: look at all of them
  bool stopping_ = false;   // the destructor waits
  bool draining_ = false;
  bool cut_ = false;  // the drain's time is up
  bool healthy_ = true;
  int open_places_ = 0;           // what Reserve gave and is still held
  int keeping_states_ = 0;        // of these, those that may keep a state
  bool posting_ = false;          // ended calls have left calls_ and their end is not posted yet
  std::condition_variable wake_;  // something for the engine thread to do
  std::condition_variable idle_;  // calls_ became empty and everything is posted

  std::atomic<uint64_t> steps_{0};
  PrefillRate prefill_rate_;
  std::atomic<Clock::rep> last_step_;  // Clock::time_point of the last step's results

  // Engine thread only; vectors are reused from step to step.
  std::vector<std::unique_ptr<Call>> left_;  // out of calls_, to be finished
  StepEffects effects_;                      // of the last step, until they have been seen to
  std::vector<std::shared_ptr<GenerationImpl>> ready_;
  std::vector<Sequence*> admitted_, expired_;
  std::vector<SlotHandle> free_slots_;  // taken for those about to be admitted
  StepPlan plan_;
  Clock::time_point busy_since_;  // the engine's own work since then

  Delivery delivery_;
  PendingMasks masks_;
  StepRows rows_;
  std::thread thread_;
};

Scheduler::Options SchedulerOptions(const EngineOptions& options, int max_running, int max_samples) {
  return {.max_batch_tokens = options.max_batch_tokens,
          .max_running = max_running,
          .max_samples = max_samples,
          .max_queue = options.max_queue,
          .max_queued_tokens = options.max_queued_tokens};
}

EngineImpl::EngineImpl(Model& model, StatePool& pool, const Tokenizer* tokenizer,
                       const EngineOptions& options, EngineObserver* observer, int max_running)
    : model_(model),
      pool_(pool),
      tokenizer_(tokenizer),
      options_(options),
      observer_(observer),
      eos_token_ids_(model.config().eos_token_ids),
      cache_(options.prefix_cache_slots),
      scheduler_(SchedulerOptions(options, max_running, model.limits().max_samples)),
      last_step_(Now().time_since_epoch().count()),
      masks_(mutex_,
             [this] {
               changed_ = true;
               wake_.notify_one();
             }),
      rows_(pool, cache_, masks_, observer) {
  eos_token_ids_.insert(eos_token_ids_.end(), options.eos_token_ids.begin(), options.eos_token_ids.end());
  std::sort(eos_token_ids_.begin(), eos_token_ids_.end());
  pool_.SetFreedCallback([this] { OnSlotFreed(); });
  thread_ = std::thread([this] { Run(); });
}

EngineImpl::~EngineImpl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = changed_ = true;
  }
  wake_.notify_one();
  thread_.join();
  pool_.SetFreedCallback(nullptr);
}

// Of Reserve.
class EngineImpl::Places final : public QueuePlaces {
 public:
  Places(EngineImpl& engine, int requests, int64_t tokens, bool keeps_state)
      : keeps_state_(keeps_state), requests_(requests), tokens_(tokens), engine_(engine) {}
  ~Places() override { engine_.GiveBack(*this); }
  bool may_keep_state() const override { return keeps_state_; }

  // With the engine's lock held.
  int requests() const { return requests_; }
  int64_t tokens() const { return tokens_; }
  void Take(Call& call) {
    engine_.scheduler_.EnqueueReserved(call);
    const int requests = std::min(requests_, 1);
    // The last one takes what the others have left.
    const int64_t tokens =
        requests_ <= 1 ? tokens_ : std::min(tokens_, call.prompt_tokens - call.prompt_done);
    engine_.scheduler_.Release(requests, tokens);
    requests_ -= requests;
    tokens_ -= tokens;
  }

 private:
  const bool keeps_state_;
  int requests_;    // not submitted yet
  int64_t tokens_;  // theirs
  EngineImpl& engine_;
};

// ---- Any thread ----

absl::Status EngineImpl::CheckDeadline(const Call& call, int64_t covered, Clock::time_point now) const {
  if (!call.request().deadline || !prefill_rate_.is_known()) return absl::OkStatus();
  return prefill_rate_.CheckDeadline(call.prompt_tokens - covered, scheduler_.TokensAhead(call),
                                     *call.request().deadline - now);
}

bool EngineImpl::UsesPrefixCache(const GenerationRequest& request) const {
  return cache_.enabled() && request.use_prefix_cache && request.start == nullptr;
}

absl::StatusOr<std::shared_ptr<Generation>> EngineImpl::Submit(GenerationRequest request,
                                                               ReadyCallback ready) {
  const Clock::time_point now = Now();
  const Usage usage{.prompt_tokens = static_cast<int64_t>(request.prompt.size())};
  const bool is_counted = observer_ != nullptr && !request.is_part;
  absl::StatusOr<std::shared_ptr<Generation>> generation = Enqueue(std::move(request), std::move(ready), now);
  if (!generation.ok() && is_counted) observer_->OnEnd(Outcome::kRejected, usage, Timing{});
  return generation;
}

absl::StatusOr<std::shared_ptr<Generation>> EngineImpl::Enqueue(GenerationRequest request,
                                                                ReadyCallback ready, Clock::time_point now) {
  if (absl::Status status =
          CheckRequest(request, options_, model_.config().vocab_size, tokenizer_ != nullptr, pool_);
      !status.ok()) {
    return status;
  }
  if (request.deadline && *request.deadline <= now) {
    return absl::DeadlineExceededError("the deadline had passed before the request was queued");
  }
  const QueuePlacesPtr places = std::move(request.places);
  auto generation = std::make_shared<GenerationImpl>(
      *this, static_cast<int64_t>(request.prompt.size()),
      options_.max_undelivered_tokens + static_cast<int>(request.echo_tokens), std::move(ready));
  std::vector<PrefixCache::BlockHash> blocks;
  if (UsesPrefixCache(request)) blocks = PrefixCache::Hash(request.prompt, request.prefix_cache_salt);
  const int64_t covered = cache_.MayCover(blocks) + request.prompt_in_start;
  const Clock::time_point arrived = request.arrived.value_or(now);
  auto call = std::make_unique<Call>(std::move(request), std::move(blocks), generation, tokenizer_,
                                     eos_token_ids_, model_.config().vocab_size, arrived);
  {
    const std::lock_guard lock(mutex_);
    if (!healthy_) return absl::UnavailableError("the device has failed; the server must be restarted");
    if ((draining_ && places == nullptr) || cut_ || stopping_) {
      return absl::UnavailableError("the server is shutting down");
    }
    if (absl::Status status = CheckDeadline(*call, covered, now); !status.ok()) return status;
    if (places != nullptr) {
      static_cast<Places&>(*places).Take(*call);
    } else if (absl::Status status = scheduler_.Enqueue(*call); !status.ok()) {
      return status;
    }
    generation->call = call.get();
    call->index = calls_.size();
    calls_.push_back(std::move(call));
    changed_ = true;
  }
  wake_.notify_one();
  return generation;
}

absl::StatusOr<QueuePlacesPtr> EngineImpl::Reserve(int requests, int64_t prompt_tokens) {
  EFLA_CHECK(requests >= 0 && prompt_tokens >= 0);
  constexpr int kKeptShare = 4;  // sessions may take a half: a quarter of the slots is left to run in
  const std::lock_guard lock(mutex_);
  if (!healthy_) return absl::UnavailableError("the device has failed; the server must be restarted");
  if (draining_ || stopping_) return absl::UnavailableError("the server is shutting down");
  if (absl::Status status = scheduler_.Reserve(requests, prompt_tokens); !status.ok()) return status;
  const bool keeps_state = keeping_states_ < pool_.counts().total / kKeptShare;
  keeping_states_ += keeps_state ? 1 : 0;
  ++open_places_;
  return QueuePlacesPtr(std::make_shared<Places>(*this, requests, prompt_tokens, keeps_state));
}

void EngineImpl::GiveBack(const Places& places) {
  const std::lock_guard lock(mutex_);
  scheduler_.Release(places.requests(), places.tokens());
  keeping_states_ -= places.may_keep_state() ? 1 : 0;
  --open_places_;
  idle_.notify_all();
}

void EngineImpl::Deliver(const std::shared_ptr<Generation>& generation) {
  delivery_.Enqueue(std::static_pointer_cast<GenerationImpl>(generation));
}

bool EngineImpl::HoldsText(std::span<const TokenId> ids) const {
  return tokenizer_ == nullptr ||
         std::any_of(ids.begin(), ids.end(), [this](TokenId id) { return !tokenizer_->is_control(id); });
}

void EngineImpl::OnCancel(GenerationImpl& generation) {
  {
    const std::lock_guard lock(mutex_);
    // Out of the queue at once; the engine thread posts the end. A running call leaves before the next step.
    if (generation.call != nullptr && generation.call->phase == Sequence::Phase::kWaiting) {
      scheduler_.Remove(*generation.call);
    }
    attention_ = changed_ = true;
  }
  wake_.notify_one();
}

void EngineImpl::OnCaughtUp(GenerationImpl& generation) { Wake(); }

void EngineImpl::Wake() {
  {
    const std::lock_guard lock(mutex_);
    attention_ = changed_ = true;
  }
  wake_.notify_one();
}

void EngineImpl::OnSlotFreed() {
  if (!starved_.load()) return;
  {
    const std::lock_guard lock(mutex_);
    changed_ = true;
  }
  wake_.notify_one();
}

absl::Status EngineImpl::CopyOut(const ResidentState& state, std::span<std::byte> to) {
  const int64_t bytes = pool_.layout().state_bytes();
  if (static_cast<int64_t>(to.size()) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d bytes are given for a state; the model's have %d", to.size(), bytes));
  }
  if (!state.IsIn(pool_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state to be copied lies in slot %d of another pool", state.slot().slot));
  }
  return pool_.CopyOut(state.slot(), to);
}

absl::StatusOr<ResidentStatePtr> EngineImpl::CopyIn(std::span<const std::byte> from) {
  const int64_t bytes = pool_.layout().state_bytes();
  if (static_cast<int64_t>(from.size()) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a state of %d bytes is given; the model's have %d", from.size(), bytes));
  }
  const absl::StatusOr<SlotHandle> slot = cache_.AcquireSlot(pool_);
  if (!slot.ok()) return slot.status();
  auto state = std::make_shared<const ResidentState>(pool_, *slot);
  if (absl::Status status = pool_.CopyIn(*slot, from); !status.ok()) return status;
  return state;
}

void EngineImpl::SetSlotShortageCallback(std::function<void(int wanted)> callback) {
  const std::lock_guard lock(mutex_);
  on_slot_shortage_ = std::move(callback);
}

void EngineImpl::Drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto idle = [this] { return calls_.empty() && !posting_ && open_places_ == 0; };
  if (idle_.wait_for(lock, timeout, idle)) return;
  cut_ = changed_ = true;
  wake_.notify_one();
  idle_.wait(lock, idle);
}

EngineStats EngineImpl::stats() const {
  const Clock::time_point now = Now();
  EngineStats stats;
  stats.slots = pool_.counts();
  const PrefixCache::Stats cache = cache_.stats();
  stats.prefix_cache_lookups = cache.lookups;
  stats.prefix_cache_hits = cache.hits;
  stats.prefix_cache_hit_tokens = cache.hit_tokens;
  stats.prefix_cache_slots = cache.states;
  stats.steps = steps_.load(std::memory_order_relaxed);
  stats.seconds_since_step =
      Seconds(now - Clock::time_point(Clock::duration(last_step_.load(std::memory_order_relaxed))));
  const std::lock_guard lock(mutex_);
  stats.waiting = scheduler_.waiting() + scheduler_.reserved();
  stats.running = scheduler_.running();
  stats.parked = scheduler_.parked();
  stats.queued_prompt_tokens = scheduler_.queued_tokens();
  if (const Sequence* oldest = scheduler_.oldest_waiting()) {
    stats.oldest_wait_seconds = Seconds(now - oldest->submitted);
  }
  stats.healthy = healthy_;
  stats.draining = draining_;
  return stats;
}

// ---- Engine thread, mutex_ held ----

void EngineImpl::Leave(Call& call) {
  scheduler_.Remove(call);
  call.generation()->call = nullptr;
  if (call.constraint() != nullptr) call.constraint()->call = nullptr;
  const size_t index = call.index;
  left_.push_back(std::move(calls_[index]));
  if (index + 1 != calls_.size()) {
    calls_[index] = std::move(calls_.back());
    calls_[index]->index = index;
  }
  calls_.pop_back();
  posting_ = true;
}

void EngineImpl::LeaveAll(const absl::Status& status, Outcome outcome) {
  while (!calls_.empty()) {
    Call& call = *calls_.back();
    if (!call.end) call.end = Call::End{status, outcome, std::nullopt};
    Leave(call);
  }
}

void EngineImpl::TakeMasks() {
  masks_.TakeDone([this](ConstraintProgress& progress) {
    if (progress.call == nullptr) return;
    Call& call = *progress.call;
    call.TakeMask();
    if (call.end) Leave(call);
  });
}

// Takes out of calls_ what has ended: by its last token, cancelled, expired, or all at a shutdown.
void EngineImpl::CollectEnded(Clock::time_point now) {
  for (Call* call : effects_.lagging) {
    if (!call->end) scheduler_.Park(*call, now + options_.slow_reader_timeout);
  }
  effects_.lagging.clear();
  for (Call* call : effects_.ended) Leave(*call);
  effects_.ended.clear();
  TakeMasks();

  if (std::exchange(attention_, false)) {
    for (size_t i = 0; i < calls_.size();) {
      Call& call = *calls_[i];
      if (call.generation()->cancelled()) {
        call.EndCancelled();
        Leave(call);  // another call takes its index
        continue;
      }
      if (call.phase == Sequence::Phase::kParked && !call.generation()->lagging()) scheduler_.CatchUp(call);
      ++i;
    }
  }

  expired_.clear();
  scheduler_.TakeExpired(now, expired_);
  for (Sequence* sequence : expired_) {
    Call& call = AsCall(sequence);
    call.EndExpired(now, options_);
    Leave(call);
  }
  if (stopping_ || cut_) {
    LeaveAll(absl::UnavailableError("the server is shutting down"), Outcome::kUnavailable);
  }
}

// Lets in as many as there are slots for; how many slots the others lack.
int EngineImpl::AdmitWaiting() {
  const int wanted = scheduler_.admissible();
  starved_.store(wanted > 0);
  while (static_cast<int>(free_slots_.size()) < wanted) {
    const absl::StatusOr<SlotHandle> slot = pool_.Acquire();
    if (!slot.ok()) break;
    free_slots_.push_back(*slot);
  }
  scheduler_.Admit(static_cast<int>(free_slots_.size()), admitted_);
  EFLA_CHECK(admitted_.size() == free_slots_.size());
  for (size_t i = 0; i < admitted_.size(); ++i) AsCall(admitted_[i]).slot = free_slots_[i];
  free_slots_.clear();
  const int missing = wanted - static_cast<int>(admitted_.size());
  if (missing == 0) starved_.store(false);
  return missing;
}

void EngineImpl::Sleep(std::unique_lock<std::mutex>& lock) {
  const Clock::time_point expiry = scheduler_.next_expiry();
  if (expiry == Clock::time_point::max()) {
    wake_.wait(lock);
  } else {
    // Not wait_until: the engine's clock may be another than the machine's. An hour bounds a far deadline.
    wake_.wait_for(lock, std::min<Clock::duration>(expiry - Now(), std::chrono::hours(1)));
  }
}

// ---- Engine thread ----

void EngineImpl::Run() {
  busy_since_ = Now();
  for (;;) {
    const Clock::time_point now = Now();
    int missing_slots = 0;
    admitted_.clear();
    {
      std::unique_lock lock(mutex_);
      masks_.Await(lock, wake_);
      changed_ = false;
      CollectEnded(now);
      if (left_.empty()) {
        posting_ = false;
        if (calls_.empty()) {
          idle_.notify_all();
          if (stopping_) return;
        }
        missing_slots = AdmitWaiting();
      }
    }
    if (!left_.empty()) {
      FinishLeft();
      continue;
    }
    if (!BeginAdmitted(now)) continue;
    if (missing_slots > 0 && GiveBackCached(missing_slots)) continue;
    {
      std::unique_lock lock(mutex_);
      scheduler_.Next(plan_);
      if (plan_.empty() && !changed_) Sleep(lock);
    }
    if (plan_.empty()) {
      busy_since_ = Now();
    } else {
      RunStep();
    }
  }
}

// Looks up what the newly admitted need not compute. False: some of them must not enter a step as they are,
// as their first draw has ended them or their readers lag.
bool EngineImpl::BeginAdmitted(Clock::time_point now) {
  for (Sequence* sequence : admitted_) {
    Call& call = AsCall(sequence);
    if (call.request().first_draw) {
      rows_.TakeFirstDraw(call, now, effects_);
      continue;
    }
    if (call.constraint() != nullptr) masks_.Post(call.constraint());
    if (call.blocks().empty()) continue;
    // Scores are wanted of all positions, so all must be computed.
    PrefixCache::Plan found = cache_.Look(call.blocks(), /*use=*/!call.request().prompt_logprobs);
    call.base = std::move(found.state);
    call.save_points = found.saves;
    if (found.position > 0) call.SkipCached(found.position);
  }
  PostReady(effects_.news);
  return effects_.ended.empty() && effects_.lagging.empty();
}

// Gives waiting requests slots of the prefix cache; false when it has none to give, and tells who may have
// some.
bool EngineImpl::GiveBackCached(int slots) {
  bool any = false;
  while (slots-- > 0 && cache_.GiveBack()) any = true;
  if (!any && on_slot_shortage_) on_slot_shortage_(slots + 1);
  return any;
}

// Frees the slots first: whoever sees a call's end finds its slots free, but for a state that it is to get.
void EngineImpl::FinishLeft() {
  const Clock::time_point now = Now();
  for (const std::unique_ptr<Call>& call : left_) {
    call->base = nullptr;
    for (const Call::Save& save : call->saves) cache_.Drop(call->block_before(save.position), save.id);
    if (call->slot.slot >= 0 && !call->keeps_slot()) pool_.Release(call->slot);
  }
  for (const std::unique_ptr<Call>& call : left_) {
    ResidentStatePtr state;
    if (call->keeps_slot()) state = std::make_shared<const ResidentState>(pool_, call->slot);
    if (observer_ != nullptr && !call->request().is_part) {
      observer_->OnEnd(call->end->outcome, call->usage(), call->TimingAt(now));
    }
    call->Finish(now, std::move(state));
    ready_.push_back(call->generation());
  }
  left_.clear();
  PostReady(ready_);
}

void EngineImpl::PostReady(std::vector<std::shared_ptr<GenerationImpl>>& generations) {
  delivery_.Enqueue(generations);
  generations.clear();
}

void EngineImpl::RunStep() {
  const Clock::time_point start = Now();
  rows_.Build(plan_, /*may_save=*/!starved_.load(), start, ready_);
  PostReady(ready_);
  const Clock::time_point submitted = Now();
  model_.Submit(rows_.input(), pool_);
  const absl::StatusOr<StepOutput> output = model_.Wait();
  const Clock::time_point now = Now();
  rows_.Finish();
  last_step_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  steps_.fetch_add(1, std::memory_order_relaxed);
  if (observer_ != nullptr) {
    observer_->OnStep({.decode_rows = rows_.decode_rows(),
                       .prefill_tokens = plan_.prefill_tokens,
                       .sample_rows = rows_.sample_rows(),
                       .seconds = Seconds(now - submitted),
                       .host_seconds = Seconds(submitted - busy_since_)});
  }
  prefill_rate_.Note(plan_.prefill_tokens, now - start);
  busy_since_ = now;
  masks_.NoteStep(now - submitted);
  if (!output.ok()) {
    const std::lock_guard lock(mutex_);
    healthy_ = false;
    LeaveAll(
        absl::InternalError(absl::StrFormat("the device failed: %s", std::string(output.status().message()))),
        Outcome::kError);
    return;  // Run finishes them
  }
  rows_.TakeResults(*output, now, effects_);
  PostReady(effects_.news);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Start(Model& model, StatePool& pool,
                                                      const Tokenizer* tokenizer,
                                                      const EngineOptions& options,
                                                      EngineObserver* observer) {
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  EngineOptions bounded = options;
  bounded.max_running = std::min(options.max_running, pool.counts().total);
  const ModelLimits required = bounded.RequiredLimits();
  const ModelLimits& limits = model.limits();
  const struct {
    const char* name;
    int has, needs;
  } bounds[] = {{"max_tokens", limits.max_tokens, required.max_tokens},
                {"max_decode", limits.max_decode, required.max_decode},
                {"max_samples", limits.max_samples, bounded.max_running + kChunkTokens}};
  for (const auto& bound : bounds) {
    if (bound.has >= bound.needs) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("the model was loaded with %s %d; max_batch_tokens %d and max_running %d need %d",
                        bound.name, bound.has, bounded.max_batch_tokens, bounded.max_running, bound.needs));
  }
  return std::make_unique<EngineImpl>(model, pool, tokenizer, options, observer, bounded.max_running);
}

}  // namespace efla
