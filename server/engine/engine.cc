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
#include "server/engine/prefix_cache.h"
#include "server/engine/resident_state.h"
#include "server/engine/scheduler.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

absl::Status AtLeast(const char* name, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %d; the least is %d", name, value, least));
}

class EngineImpl final : public Engine, public GenerationOwner {
 public:
  EngineImpl(Model& model, StatePool& pool, const Tokenizer* tokenizer, const EngineOptions& options,
             EngineObserver* observer, int max_running);
  ~EngineImpl() override;

  absl::StatusOr<std::shared_ptr<Generation>> Submit(GenerationRequest request, ReadyCallback ready) override;
  void Deliver(const std::shared_ptr<Generation>& generation) override;
  void Drain(std::chrono::milliseconds timeout) override;
  EngineStats stats() const override;
  void Wake() override;
  absl::Status CopyOut(const ResidentState& state, std::span<std::byte> to) override;
  absl::StatusOr<ResidentStatePtr> CopyIn(std::span<const std::byte> from) override;
  void SetSlotShortageCallback(std::function<void(int wanted)> callback) override;

 private:
  // Any thread.
  Clock::time_point Now() const { return options_.now ? options_.now() : Clock::now(); }
  absl::Status Check(const GenerationRequest& request) const;
  absl::Status CheckStart(const GenerationRequest& request) const;
  bool UsesPrefixCache(const GenerationRequest& request) const;
  absl::StatusOr<std::shared_ptr<Generation>> Enqueue(GenerationRequest request, ReadyCallback ready,
                                                      Clock::time_point now);
  void OnCancel(GenerationImpl& generation) override;
  void OnCaughtUp(GenerationImpl& generation) override;
  void OnSlotFreed();
  absl::StatusOr<SlotHandle> AcquireSlot();

  // Engine thread, with mutex_ held.
  void CollectEnded(Clock::time_point now);
  int AdmitWaiting();
  void Leave(Call& call);
  void LeaveAll(const absl::Status& status, Outcome outcome);
  void Sleep(std::unique_lock<std::mutex>& lock);

  // Engine thread, without it.
  void Run();
  void FinishLeft();
  void LookUpPrefixes();
  bool GiveBackCached(int slots);
  void RunStep();
  void BuildStep(Clock::time_point now);
  void AddRecurrentRow(Call& call, Clock::time_point now);
  void BeginCall(Call& call, Clock::time_point now);
  void SaveState(Call& call, int64_t position);
  void TakeResults(const StepOutput& output, Clock::time_point now);
  void TakePromptEnd(Call& call, const StepOutput& output, size_t row, Clock::time_point now);
  std::span<const TokenLogprob> TopOf(const StepOutput& output, size_t row) const {
    return output.top.subspan(output.rows[row].top_begin, samples_[row].num_top);
  }
  void TakeDraw(Call& call, const StepOutput& output, size_t row, Clock::time_point now);

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
  bool posting_ = false;          // ended calls have left calls_ and their end is not posted yet
  std::condition_variable wake_;  // something for the engine thread to do
  std::condition_variable idle_;  // calls_ became empty and everything is posted

  std::atomic<uint64_t> steps_{0};
  std::atomic<Clock::rep> last_step_;  // Clock::time_point of the last step's results

  // Engine thread only; vectors are reused from step to step.
  std::vector<std::unique_ptr<Call>> left_;  // out of calls_, to be finished
  std::vector<Call*> due_;                   // their end was decided by the last step
  std::vector<Call*> lagging_;               // to be parked
  std::vector<std::shared_ptr<GenerationImpl>> ready_;
  std::vector<Sequence*> admitted_, expired_;
  std::vector<SlotHandle> free_slots_;  // taken for those about to be admitted
  StepPlan plan_;
  std::vector<TokenId> tokens_;
  std::vector<int32_t> read_slots_, write_slots_;  // of the recurrent rows
  std::vector<Segment> segments_;
  std::vector<SampleRow> samples_;
  Clock::time_point busy_since_;  // the engine's own work since then

  Delivery delivery_;
  std::thread thread_;
};

Scheduler::Options SchedulerOptions(const EngineOptions& options, int max_running, int max_samples) {
  return {.max_batch_tokens = options.max_batch_tokens,
          .max_running = max_running,
          .max_samples = max_samples,
          .max_queue = options.max_queue,
          .max_queued_tokens = options.max_queued_tokens};
}

// Every prompt token but the last is followed by one that can be scored.
int NumScores(const StepPlan::Piece& piece) {
  return piece.sequence->scores_prompt ? piece.num_tokens - (piece.last() ? 1 : 0) : 0;
}

Call& AsCall(Sequence* sequence) { return static_cast<Call&>(*sequence); }

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
      last_step_(Now().time_since_epoch().count()) {
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

// ---- Any thread ----

absl::Status EngineImpl::Check(const GenerationRequest& request) const {
  const int64_t vocab_size = model_.config().vocab_size;
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  if (absl::Status status = CheckStart(request); !status.ok()) return status;
  if (prompt_tokens == 0 && !request.pending_token) {
    return absl::InvalidArgumentError("the prompt is empty; it needs at least 1 token");
  }
  if (prompt_tokens > options_.max_prompt_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("the prompt has %d tokens; the limit is %d",
                                                      prompt_tokens, options_.max_prompt_tokens));
  }
  for (int64_t i = 0; i < prompt_tokens; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrFormat("token %d of the prompt is %d; ids are 0 to %d", i,
                                                        request.prompt[i], vocab_size - 1));
    }
  }
  if (absl::Status status = request.sampling.Validate(); !status.ok()) return status;
  if (absl::Status status = request.stopping.Validate(vocab_size); !status.ok()) return status;
  if (request.stopping.max_tokens > options_.max_new_tokens) {
    return absl::InvalidArgumentError(absl::StrFormat("max_tokens is %d; the limit is %d",
                                                      request.stopping.max_tokens, options_.max_new_tokens));
  }
  if (tokenizer_ == nullptr && !request.stopping.stop.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d stop strings are given, but the model has no tokenizer and so no text; use stop_token_ids",
        request.stopping.stop.size()));
  }
  const int64_t most_top = std::min<int64_t>(kMaxTopLogprobs, vocab_size);
  if (request.top_logprobs < 0 || request.top_logprobs > most_top) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %d; it must be 0 to %d", request.top_logprobs, most_top));
  }
  if (request.top_logprobs > 0 && !request.logprobs && !request.prompt_logprobs) {
    return absl::InvalidArgumentError(
        absl::StrFormat("top_logprobs is %d, but no log-probabilities are asked for", request.top_logprobs));
  }
  if (request.time_budget && request.time_budget->count() <= 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("time_budget is %d us; it must be above 0", request.time_budget->count()));
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::CheckStart(const GenerationRequest& request) const {
  const int64_t vocab_size = model_.config().vocab_size;
  if (request.pending_token && request.start == nullptr) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "pending token %d is given without the state that it follows", *request.pending_token));
  }
  if (request.pending_token && (*request.pending_token < 0 || *request.pending_token >= vocab_size)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the pending token is %d; ids are 0 to %d", *request.pending_token, vocab_size - 1));
  }
  if (request.start == nullptr) return absl::OkStatus();
  const SlotHandle slot = request.start->slot();
  if (!request.start->IsIn(pool_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state to start from lies in slot %d of another pool", slot.slot));
  }
  if (!pool_.IsLive(slot)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the state to start from was in slot %d, which has been freed", slot.slot));
  }
  return absl::OkStatus();
}

bool EngineImpl::UsesPrefixCache(const GenerationRequest& request) const {
  return cache_.enabled() && request.use_prefix_cache && request.start == nullptr;
}

absl::StatusOr<std::shared_ptr<Generation>> EngineImpl::Submit(GenerationRequest request,
                                                               ReadyCallback ready) {
  const Clock::time_point now = Now();
  const Usage usage{.prompt_tokens = static_cast<int64_t>(request.prompt.size())};
  absl::StatusOr<std::shared_ptr<Generation>> generation = Enqueue(std::move(request), std::move(ready), now);
  if (!generation.ok() && observer_ != nullptr) observer_->OnEnd(Outcome::kRejected, usage, Timing{});
  return generation;
}

absl::StatusOr<std::shared_ptr<Generation>> EngineImpl::Enqueue(GenerationRequest request,
                                                                ReadyCallback ready, Clock::time_point now) {
  if (absl::Status status = Check(request); !status.ok()) return status;
  if (request.deadline && *request.deadline <= now) {
    return absl::DeadlineExceededError("the deadline had passed before the request was queued");
  }
  auto generation = std::make_shared<GenerationImpl>(*this, static_cast<int64_t>(request.prompt.size()),
                                                     options_.max_undelivered_tokens, std::move(ready));
  std::vector<PrefixCache::BlockHash> blocks;
  if (UsesPrefixCache(request)) blocks = PrefixCache::Hash(request.prompt, request.prefix_cache_salt);
  auto call = std::make_unique<Call>(std::move(request), std::move(blocks), generation, tokenizer_,
                                     eos_token_ids_, now);
  {
    const std::lock_guard lock(mutex_);
    if (!healthy_) return absl::UnavailableError("the device has failed; the server must be restarted");
    if (draining_ || stopping_) return absl::UnavailableError("the server is shutting down");
    if (absl::Status status = scheduler_.Enqueue(*call); !status.ok()) return status;
    generation->call = call.get();
    call->index = calls_.size();
    calls_.push_back(std::move(call));
    changed_ = true;
  }
  wake_.notify_one();
  return generation;
}

void EngineImpl::Deliver(const std::shared_ptr<Generation>& generation) {
  delivery_.Enqueue(std::static_pointer_cast<GenerationImpl>(generation));
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

absl::StatusOr<SlotHandle> EngineImpl::AcquireSlot() {
  absl::StatusOr<SlotHandle> slot = pool_.Acquire();
  while (!slot.ok() && cache_.GiveBack()) slot = pool_.Acquire();
  return slot;
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
  const absl::StatusOr<SlotHandle> slot = AcquireSlot();
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
  const auto idle = [this] { return calls_.empty() && !posting_; };
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
  stats.waiting = scheduler_.waiting();
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

// Takes out of calls_ what has ended: by its last token, cancelled, expired, or all at a shutdown.
void EngineImpl::CollectEnded(Clock::time_point now) {
  for (Call* call : lagging_) {
    if (!call->end) scheduler_.Park(*call, now + options_.slow_reader_timeout);
  }
  lagging_.clear();
  for (Call* call : due_) Leave(*call);
  due_.clear();

  if (std::exchange(attention_, false)) {
    for (size_t i = 0; i < calls_.size();) {
      Call& call = *calls_[i];
      if (call.generation()->cancelled()) {
        call.end =
            Call::End{absl::CancelledError("the call was cancelled"), Outcome::kCancelled, std::nullopt};
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
    if (call.request().deadline && *call.request().deadline <= now) {
      call.end = Call::End{absl::DeadlineExceededError(absl::StrFormat(
                               "the deadline passed after %d of %d tokens", call.usage().completion_tokens,
                               call.request().stopping.max_tokens)),
                           Outcome::kDeadline, std::nullopt};
    } else if (call.expires <= now) {
      call.end = Call::End{absl::OkStatus(), Outcome::kLength, FinishReason::kTimeBudget};
    } else {
      call.end = Call::End{absl::ResourceExhaustedError(absl::StrFormat(
                               "more than %d tokens waited to be read for longer than %d ms",
                               options_.max_undelivered_tokens, options_.slow_reader_timeout.count())),
                           Outcome::kCancelled, std::nullopt};
    }
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
      const std::lock_guard lock(mutex_);
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
    LookUpPrefixes();
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

// What the newly admitted need not compute.
void EngineImpl::LookUpPrefixes() {
  for (Sequence* sequence : admitted_) {
    Call& call = AsCall(sequence);
    if (call.blocks().empty()) continue;
    // Scores are wanted of all positions, so all must be computed.
    PrefixCache::Plan found = cache_.Look(call.blocks(), /*use=*/!call.request().prompt_logprobs);
    call.base = std::move(found.state);
    call.cuts = found.saves;
    if (found.position > 0) call.SkipCached(found.position);
  }
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
    if (observer_ != nullptr) observer_->OnEnd(call->end->outcome, call->usage(), call->TimingAt(now));
    call->Finish(now, std::move(state));
    ready_.push_back(call->generation());
  }
  left_.clear();
  delivery_.Enqueue(ready_);
  ready_.clear();
}

void EngineImpl::RunStep() {
  const Clock::time_point start = Now();
  BuildStep(start);
  const Clock::time_point submitted = Now();
  model_.Submit({.tokens = tokens_,
                 .num_decode = static_cast<int>(write_slots_.size()),
                 .decode_read_slot = read_slots_,
                 .decode_write_slot = write_slots_,
                 .segments = segments_,
                 .samples = samples_},
                pool_);
  const absl::StatusOr<StepOutput> output = model_.Wait();
  const Clock::time_point now = Now();
  last_step_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  steps_.fetch_add(1, std::memory_order_relaxed);
  if (observer_ != nullptr) {
    observer_->OnStep({.decode_rows = static_cast<int>(write_slots_.size()),
                       .prefill_tokens = plan_.prefill_tokens,
                       .sample_rows = static_cast<int>(samples_.size()),
                       .seconds = Seconds(now - submitted),
                       .host_seconds = Seconds(submitted - busy_since_)});
  }
  busy_since_ = now;
  if (!output.ok()) {
    const std::lock_guard lock(mutex_);
    healthy_ = false;
    LeaveAll(
        absl::InternalError(absl::StrFormat("the device failed: %s", std::string(output.status().message()))),
        Outcome::kError);
    return;  // Run finishes them
  }
  TakeResults(*output, now);
}

void EngineImpl::BeginCall(Call& call, Clock::time_point now) {
  if (call.begun()) return;
  call.Begin(now);
  ready_.push_back(call.generation());
}

void EngineImpl::AddRecurrentRow(Call& call, Clock::time_point now) {
  tokens_.push_back(call.next_token());
  read_slots_.push_back(call.read_slot());
  write_slots_.push_back(call.slot.slot);
  BeginCall(call, now);
}

// The state that the call's prompt has reached goes to the prefix cache, to be published when it has proved
// good, and the call goes on in another slot. Nothing is kept when there is none, or when requests wait for
// one.
void EngineImpl::SaveState(Call& call, int64_t position) {
  if (!call.computed || starved_.load()) return;
  const absl::StatusOr<SlotHandle> next = AcquireSlot();
  if (!next.ok()) return;
  EFLA_CHECK(!pool_.IsShared(call.slot));
  call.base = std::make_shared<const ResidentState>(pool_, std::exchange(call.slot, *next));
  if (const uint64_t id = cache_.Add(call.block_before(position), position, call.base); id != 0) {
    call.saves.push_back({position, id});
  }
}

void EngineImpl::BuildStep(Clock::time_point now) {
  tokens_.clear();
  read_slots_.clear();
  write_slots_.clear();
  segments_.clear();
  samples_.clear();
  for (Sequence* sequence : plan_.decode) {
    Call& call = AsCall(sequence);
    samples_.push_back(call.DrawRow(static_cast<int>(tokens_.size())));
    AddRecurrentRow(call, now);
  }
  for (Sequence* sequence : plan_.pending) AddRecurrentRow(AsCall(sequence), now);
  for (const StepPlan::Piece& piece : plan_.prefill) {
    Call& call = AsCall(piece.sequence);
    const std::vector<TokenId>& prompt = call.request().prompt;
    const int first_row = static_cast<int>(tokens_.size());
    if (piece.begin > 0 && std::find(call.cuts.begin(), call.cuts.end(), piece.begin) != call.cuts.end()) {
      SaveState(call, piece.begin);
    }
    segments_.push_back({.token_begin = first_row,
                         .num_tokens = piece.num_tokens,
                         .read_slot = call.read_slot(),
                         .write_slot = call.slot.slot});
    tokens_.insert(tokens_.end(), prompt.begin() + piece.begin,
                   prompt.begin() + piece.begin + piece.num_tokens);
    for (int i = 0, scores = NumScores(piece); i < scores; ++i) {
      samples_.push_back(call.ScoreRow(first_row + i, piece.begin + i + 1));
    }
    if (piece.last() && call.draws) samples_.push_back(call.DrawRow(first_row + piece.num_tokens - 1));
    BeginCall(call, now);
  }
  EFLA_CHECK(static_cast<int>(samples_.size()) == plan_.sample_rows);
  delivery_.Enqueue(ready_);
  ready_.clear();
}

void EngineImpl::TakeDraw(Call& call, const StepOutput& output, size_t row, Clock::time_point now) {
  const SampleResult& result = output.rows[row];
  if (!call.AddToken(result, TopOf(output, row), now)) lagging_.push_back(&call);
  if (observer_ == nullptr || !result.finite) return;
  if (const std::optional<double> gap = call.token_gap_seconds()) {
    observer_->OnTokenGap(*gap);
  } else {
    observer_->OnFirstToken(Seconds(now - call.submitted));
  }
}

// The last token before the first draw has been computed; `row` is its row, if the call draws.
void EngineImpl::TakePromptEnd(Call& call, const StepOutput& output, size_t row, Clock::time_point now) {
  if (call.draws && !call.wants_tokens()) call.AddCheck(output.rows[row]);
  // Finite logits came from finite states, those of the prompt's beginning too: what is not finite stays so.
  if (call.draws && !call.end && output.rows[row].finite && !call.generation()->cancelled()) {
    for (const Call::Save& save : call.saves) cache_.Publish(call.block_before(save.position), save.id);
  }
  if (!call.end) call.AddPromptPiece(now);
  if (!call.end) TakeDraw(call, output, row, now);
}

// The rows come in BuildStep's order. Text and stop strings are matched here, while the device has nothing to
// do: a token's successor cannot be computed before it is known whether there is one.
void EngineImpl::TakeResults(const StepOutput& output, Clock::time_point now) {
  const auto settle = [this](Call& call) {
    call.base = nullptr;
    call.computed = true;
    if (call.end) {
      due_.push_back(&call);
    } else if (call.TakeHasNews()) {
      ready_.push_back(call.generation());
    }
  };
  size_t row = 0;
  for (Sequence* sequence : plan_.decode) {
    Call& call = AsCall(sequence);
    if (call.computed) {
      TakeDraw(call, output, row++, now);
    } else {
      TakePromptEnd(call, output, row++, now);  // its pending token, and there was no prompt
    }
    settle(call);
  }
  for (Sequence* sequence : plan_.pending) {
    Call& call = AsCall(sequence);
    if (call.prompt_tokens == 0) call.AddPromptPiece(now);  // nothing is drawn either: that was all
    settle(call);
  }
  for (const StepPlan::Piece& piece : plan_.prefill) {
    Call& call = AsCall(piece.sequence);
    for (int i = NumScores(piece); i > 0; --i, ++row) call.AddScore(output.rows[row], TopOf(output, row));
    if (piece.last()) {
      TakePromptEnd(call, output, row, now);
      row += call.draws ? 1 : 0;
    } else if (!call.end) {
      call.AddPromptPiece(now);
    }
    settle(call);
  }
  delivery_.Enqueue(ready_);
  ready_.clear();
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
