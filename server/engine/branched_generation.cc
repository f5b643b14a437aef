#include "server/engine/branched_generation.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <span>
#include <utility>
#include <variant>

#include "kernels/check.h"
#include "kernels/types.h"
#include "server/engine/logit_adjuster.h"

namespace efla {
namespace {

using Outcome = EngineObserver::Outcome;

// A state that waits for its branches counts against the pool's share of such states until the last of them
// has read it.
struct KeptState {
  QueuePlacesPtr places;
  ResidentStatePtr state;
};

ResidentStatePtr CountedState(QueuePlacesPtr places, ResidentStatePtr state) {
  auto kept = std::make_shared<KeptState>(KeptState{std::move(places), std::move(state)});
  return ResidentStatePtr(kept, kept->state.get());
}

int64_t AllPromptTokens(const GenerationRequest& request, const std::vector<Branch>& branches) {
  int64_t tokens = std::ssize(request.prompt);
  for (const Branch& branch : branches) tokens += std::ssize(branch.continuation);
  return tokens;
}

Outcome OutcomeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kResourceExhausted:
      return Outcome::kCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return Outcome::kDeadline;
    case absl::StatusCode::kUnavailable:
      return Outcome::kUnavailable;
    default:
      return Outcome::kError;
  }
}

bool HasContinuations(const std::vector<Branch>& branches) {
  return std::any_of(branches.begin(), branches.end(),
                     [](const Branch& branch) { return !branch.continuation.empty(); });
}

// Whether the branches' draws look at one index of the prompt: those of continuations have other texts before
// them.
bool SharesNgrams(const GenerationRequest& request, const std::vector<Branch>& branches) {
  return request.sampling.no_repeat_ngram_size > 0 && request.stopping.max_tokens > 0 &&
         !HasContinuations(branches);
}

// Of the prompt's last tokens, so many are looked at by an echo or a draw, beside what `shares_ngrams` says.
int64_t PromptTokensLookedAt(const GenerationRequest& request, bool shares_ngrams) {
  const int64_t prompt_tokens = std::ssize(request.prompt);
  const SamplingParams& sampling = request.sampling;
  if (sampling.no_repeat_ngram_size > 0 && !shares_ngrams) return prompt_tokens;
  const int64_t window = sampling.repetition_penalty != 1.0f ? sampling.penalty_window : 0;
  return std::min(prompt_tokens, std::max(window, request.echo_tokens));
}

bool IsStop(FinishReason reason) {
  return reason != FinishReason::kMaxTokens && reason != FinishReason::kTimeBudget;
}

}  // namespace

size_t BranchedGeneration::JobBytes(const GenerationRequest& request, const std::vector<Branch>& branches) {
  const int64_t looked_at = PromptTokensLookedAt(request, SharesNgrams(request, branches));
  int64_t tokens = 0;
  for (const Branch& branch : branches) tokens += looked_at + std::ssize(branch.continuation);
  return static_cast<size_t>(tokens) * sizeof(TokenId);
}

absl::StatusOr<std::shared_ptr<BranchedGeneration>> BranchedGeneration::Submit(
    Engine& engine, GenerationRequest request, std::vector<Branch> branches, Post post,
    EngineObserver* observer, ReadyCallback ready) {
  EFLA_CHECK(!branches.empty());
  const std::shared_ptr<BranchedGeneration> generation(new BranchedGeneration(
      engine, std::move(request), std::move(branches), std::move(post), observer, std::move(ready)));
  if (absl::Status status = generation->Start(); !status.ok()) return status;
  return generation;
}

BranchedGeneration::BranchedGeneration(Engine& engine, GenerationRequest request,
                                       std::vector<Branch> branches, Post post, EngineObserver* observer,
                                       ReadyCallback ready)
    : engine_(engine),
      request_(std::move(request)),
      prompt_tokens_(std::ssize(request_.prompt)),
      all_prompt_tokens_(AllPromptTokens(request_, branches)),
      seed_(request_.sampling.seed),
      arrived_(request_.arrived.value_or(Clock::now())),
      post_(std::move(post)),
      observer_(observer),
      ready_(std::move(ready)),
      branches_(std::move(branches)) {
  request_.arrived = arrived_;
  request_.is_part = true;
}

absl::Status BranchedGeneration::Start() {
  const int num_branches = static_cast<int>(branches_.size());
  const int64_t last_grid_point =
      prompt_tokens_ == 0 ? 0 : (prompt_tokens_ - 1) / kChunkTokens * kChunkTokens;
  draws_in_stem_ = prompt_tokens_ > 0 && request_.stopping.max_tokens > 0 && !request_.prompt_logprobs &&
                   num_branches <= kChunkTokens && !HasContinuations(branches_);
  const int64_t shared = draws_in_stem_ ? prompt_tokens_ : last_grid_point;
  int64_t tokens = shared;  // to be computed
  for (const Branch& branch : branches_) tokens += prompt_tokens_ - shared + std::ssize(branch.continuation);
  absl::StatusOr<QueuePlacesPtr> places = engine_.Reserve(num_branches, tokens);
  if (!places.ok()) return places.status();
  places_ = *std::move(places);
  if (SharesNgrams(request_, branches_)) {
    request_.prompt_ngrams =
        std::make_shared<const NgramIndex>(request_.sampling.no_repeat_ngram_size, request_.prompt);
  }
  stem_tokens_ = places_->may_keep_state() ? shared : 0;
  if (stem_tokens_ == 0) {
    draws_in_stem_ = false;
    phase_ = Phase::kSubmitting;
    SubmitBranches();
    const std::lock_guard lock(mutex_);
    // All or nothing: where none could be submitted, that is the answer.
    if (parts_.empty()) {
      end_taken_ = true;
      return failure_;
    }
    return absl::OkStatus();
  }
  const std::lock_guard lock(mutex_);
  phase_ = Phase::kStem;
  absl::StatusOr<std::shared_ptr<Generation>> submitted = engine_.Submit(StemRequest(), PartReady());
  if (!submitted.ok()) {
    end_taken_ = true;
    return submitted.status();
  }
  stem_ = *std::move(submitted);
  return absl::OkStatus();
}

GenerationRequest BranchedGeneration::StemRequest() const {
  GenerationRequest stem = request_;
  stem.prompt.resize(static_cast<size_t>(stem_tokens_));
  stem.keep_state = true;
  stem.prompt_logprobs = false;
  stem.echo_tokens = 0;
  stem.places = places_;  // one of the branches' places: they are not there yet
  if (draws_in_stem_) {
    for (const Branch& branch : branches_) stem.first_draw_seeds.push_back(branch.seed);
  } else {
    stem.sampling = SamplingParams();
    stem.stopping = StopParams();
    stem.stopping.max_tokens = 0;
    stem.constraint = nullptr;
    stem.logprobs = false;
    stem.top_logprobs = 0;
  }
  return stem;
}

ReadyCallback BranchedGeneration::PartReady() {
  // The parts belong to this: their callbacks may not own it.
  return [weak = weak_from_this()](Generation&) {
    if (const auto self = weak.lock()) self->Ready();
  };
}

template <typename Body>
auto BranchedGeneration::Locked(Body body) {
  std::unique_lock lock(mutex_);
  auto result = body();
  Todo todo = std::exchange(todo_, {});
  lock.unlock();
  Do(std::move(todo));
  return result;
}

void BranchedGeneration::Ready() {
  const bool is_awaited = Locked([this] {
    // Whether the reader asks or not: what the stem holds, its state and its places, waits for no reader.
    if (phase_ == Phase::kStem) AdvanceStem();
    return !end_taken_;
  });
  if (is_awaited) ready_(*this);
}

void BranchedGeneration::Do(Todo todo) {
  if (todo.submits_branches) {
    post_([self = shared_from_this()] {
      self->SubmitBranches();
      self->Deliver();
    });
  }
  if (todo.end) observer_->OnEnd(todo.end->outcome, todo.end->usage, todo.end->timing);
}

GenerationRequest BranchedGeneration::CommonRequest() {
  GenerationRequest common = std::move(request_);
  common.places = places_;
  if (base_ == nullptr) return common;
  common.start = std::move(base_);
  const int64_t looked_at = PromptTokensLookedAt(common, /*shares_ngrams=*/common.prompt_ngrams != nullptr);
  left_out_ = std::min(stem_tokens_, prompt_tokens_ - looked_at);
  if (left_out_ < stem_tokens_) left_out_ -= left_out_ % kChunkTokens;  // the grid stays where it is
  const auto rest = common.prompt.begin() + left_out_;
  common.continues_text = common.continues_text || engine_.HoldsText(std::span(common.prompt.begin(), rest));
  common.prompt.erase(common.prompt.begin(), rest);
  common.prompt_in_start = stem_tokens_ - left_out_;
  return common;
}

void BranchedGeneration::SubmitBranches() {
  std::vector<Part> parts;
  absl::Status failure;
  GenerationRequest common = CommonRequest();
  for (size_t i = 0; i < branches_.size(); ++i) {
    GenerationRequest request = common;
    request.sampling.seed = branches_[i].seed;
    request.prompt.insert(request.prompt.end(), branches_[i].continuation.begin(),
                          branches_[i].continuation.end());
    request.progress = common.progress && i == 0;
    if (!first_draws_.empty()) request.first_draw = std::move(first_draws_[i]);
    absl::StatusOr<std::shared_ptr<Generation>> part = engine_.Submit(std::move(request), PartReady());
    if (!part.ok()) {
      failure = part.status();
      break;
    }
    parts.push_back({.generation = *std::move(part), .ended = false, .reason = std::nullopt});
  }
  const QueuePlacesPtr places = std::move(places_);
  const std::lock_guard lock(mutex_);
  branches_.clear();
  parts_ = std::move(parts);
  phase_ = Phase::kBranches;
  if (!failure.ok()) {
    Fail(failure);
  } else if (cancelled_) {
    for (const Part& part : parts_) part.generation->Cancel();
  }
}

std::optional<Event> BranchedGeneration::TakeEvent() {
  return Locked([this] { return NextEvent(); });
}

std::optional<Event> BranchedGeneration::NextEvent() {
  if (phase_ == Phase::kStem) AdvanceStem();
  if (stem_accepted_) return *std::exchange(stem_accepted_, std::nullopt);
  if (stem_progress_) return *std::exchange(stem_progress_, std::nullopt);
  if (phase_ == Phase::kBranches) return TakeFromBranches();
  return std::nullopt;
}

void BranchedGeneration::AdvanceStem() {
  if (stem_ == nullptr) return;  // Submit has not returned
  while (std::optional<Event> event = stem_->TakeEvent()) {
    if (auto* accepted = std::get_if<AcceptedEvent>(&*event)) {
      accepted->prompt_tokens = prompt_tokens_;
      accepted->seed = seed_;
      accepted_ = true;
      stem_accepted_ = std::move(*accepted);
    } else if (auto* progress = std::get_if<ProgressEvent>(&*event)) {
      progress->prompt_tokens_total = prompt_tokens_;
      stem_progress_ = std::move(*progress);
    } else if (auto* finished = std::get_if<FinishedEvent>(&*event)) {
      stem_finished_ = std::move(*finished);
    }
  }
  if (const std::optional<absl::Status> end = stem_->TakeEnd()) EndStem(*end);
}

void BranchedGeneration::EndStem(const absl::Status& status) {
  if (!status.ok()) return End(status);
  EFLA_CHECK(stem_finished_.has_value());
  std::optional<FinalState> state = stem_->TakeFinalState();
  // Where the time budget has ended the stem, it ends the branches before they compute anything.
  if (stem_finished_->reason != FinishReason::kTimeBudget) {
    EFLA_CHECK(state && state->state != nullptr);
    base_ = CountedState(places_, std::move(state->state));
    first_draws_ = std::move(state->first_draws);
  }
  phase_ = Phase::kSubmitting;
  todo_.submits_branches = true;
}

std::optional<Event> BranchedGeneration::TakeFromBranches() {
  for (size_t asked = 0; asked < parts_.size(); ++asked) {
    const size_t i = next_part_;
    Part& part = parts_[i];
    while (!part.ended) {
      std::optional<Event> event = part.generation->TakeEvent();
      if (!event) break;
      if (Fix(static_cast<int>(i), *event)) {
        next_part_ = (i + 1) % parts_.size();
        return event;
      }
    }
    next_part_ = (i + 1) % parts_.size();
  }
  TakeEnds();
  return std::nullopt;
}

void BranchedGeneration::TakeEnds() {
  for (Part& part : parts_) {
    if (part.ended) continue;
    const std::optional<absl::Status> end = part.generation->TakeEnd();
    if (!end) continue;
    part.ended = true;
    if (!end->ok()) Fail(*end);
  }
  if (std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.ended; })) End(failure_);
}

// Makes a part's event one of the whole; false: it is none.
bool BranchedGeneration::Fix(int branch, Event& event) {
  if (!failure_.ok()) return false;
  if (auto* accepted = std::get_if<AcceptedEvent>(&event)) {
    if (std::exchange(accepted_, true)) return false;
    accepted->prompt_tokens = prompt_tokens_;
    accepted->seed = seed_;
  } else if (auto* progress = std::get_if<ProgressEvent>(&event)) {
    progress->prompt_tokens_total = prompt_tokens_;
    progress->prompt_tokens_done = std::min(progress->prompt_tokens_done + left_out_, prompt_tokens_);
  } else if (auto* delta = std::get_if<DeltaEvent>(&event)) {
    delta->branch = branch;
    FixCounts(delta->usage, delta->timing);
    if (!first_timing_) first_timing_ = delta->timing;
  } else if (auto* finished = std::get_if<FinishedEvent>(&event)) {
    finished->branch = branch;
    parts_[static_cast<size_t>(branch)].reason = finished->reason;
    FixCounts(finished->usage, finished->timing);
    if (!first_timing_) first_timing_ = finished->timing;
  }
  return true;
}

// A branch's own times begin with the arrival, so that its wait holds the stem's whole life: the wait was the
// stem's, and the rest is work at the prompt.
void BranchedGeneration::FixCounts(Usage& usage, Timing& timing) const {
  if (!stem_finished_) return;
  usage.prompt_tokens += left_out_;
  usage.cached_tokens = stem_finished_->usage.cached_tokens;
  const int64_t queue_us = stem_finished_->timing.queue_us;
  if (draws_in_stem_) {
    timing.prefill_us = stem_finished_->timing.prefill_us;
  } else if (timing.prefill_us > 0) {
    timing.prefill_us += timing.queue_us - queue_us;
  }
  timing.queue_us = queue_us;
}

void BranchedGeneration::Fail(const absl::Status& status) {
  if (!failure_.ok()) return;
  failure_ = status;
  for (const Part& part : parts_) {
    if (!part.ended) part.generation->Cancel();
  }
}

void BranchedGeneration::End(const absl::Status& status) {
  phase_ = Phase::kEnded;
  end_ = status;
  places_ = nullptr;
  if (observer_ == nullptr) return;
  const Usage usage = UsageSoFar();
  const bool all_stopped = std::all_of(parts_.begin(), parts_.end(),
                                       [](const Part& part) { return part.reason && IsStop(*part.reason); });
  Timing timing;
  if (first_timing_) {
    timing.queue_us = first_timing_->queue_us;
    timing.prefill_us = first_timing_->prefill_us;
  } else if (stem_finished_) {
    timing = stem_finished_->timing;
  }
  timing.total_us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - arrived_).count();
  todo_.end = {.outcome = status.ok() ? (all_stopped ? Outcome::kStop : Outcome::kLength) : OutcomeOf(status),
               .usage = usage,
               .timing = timing};
}

std::optional<absl::Status> BranchedGeneration::TakeEnd() {
  return Locked([this] {
    if (phase_ == Phase::kBranches) TakeEnds();
    end_taken_ = end_.has_value();
    return end_;
  });
}

void BranchedGeneration::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (stem_ != nullptr && phase_ == Phase::kStem) stem_->Cancel();
  for (const Part& part : parts_) {
    if (!part.ended) part.generation->Cancel();
  }
}

Usage BranchedGeneration::usage() const {
  const std::lock_guard lock(mutex_);
  return UsageSoFar();
}

Usage BranchedGeneration::UsageSoFar() const {
  Usage usage{.prompt_tokens = all_prompt_tokens_, .cached_tokens = 0, .completion_tokens = 0};
  if (stem_ != nullptr) {
    usage.cached_tokens = stem_->usage().cached_tokens;
  } else if (!parts_.empty()) {
    usage.cached_tokens = parts_.front().generation->usage().cached_tokens;
  }
  for (const Part& part : parts_) usage.completion_tokens += part.generation->usage().completion_tokens;
  return usage;
}

void BranchedGeneration::Deliver() {
  std::shared_ptr<Generation> live;
  {
    const std::lock_guard lock(mutex_);
    if (end_taken_ || phase_ == Phase::kSubmitting) return;  // its job delivers
    if (phase_ == Phase::kStem) live = stem_;
    for (const Part& part : parts_) {
      if (!part.ended) live = part.generation;
    }
  }
  if (live != nullptr) return engine_.Deliver(live);
  post_([self = shared_from_this()] { self->Ready(); });
}

}  // namespace efla
