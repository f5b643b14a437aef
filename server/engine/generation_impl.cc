#include "server/engine/generation_impl.h"

#include <iterator>
#include <utility>

#include "kernels/check.h"

namespace efla {

GenerationImpl::GenerationImpl(GenerationOwner& owner, int64_t prompt_tokens, int max_undelivered_tokens,
                               ReadyCallback ready)
    : prompt_tokens_(prompt_tokens),
      max_undelivered_tokens_(max_undelivered_tokens),
      ready_(std::move(ready)),
      owner_(&owner) {}

std::optional<Event> GenerationImpl::TakeEvent() {
  const std::lock_guard lock(mutex_);
  if (accepted_) return *std::exchange(accepted_, std::nullopt);
  if (progress_) return *std::exchange(progress_, std::nullopt);
  if (delta_) {
    // A delta leaves whole, so that what waits drops to nothing.
    Event event = *std::exchange(delta_, std::nullopt);
    if (lagging()) {
      lagging_.store(false, std::memory_order_release);
      if (owner_ != nullptr) owner_->OnCaughtUp(*this);
    }
    return event;
  }
  if (finished_) return *std::exchange(finished_, std::nullopt);
  return std::nullopt;
}

std::optional<absl::Status> GenerationImpl::TakeEnd() {
  const std::lock_guard lock(mutex_);
  if (!end_ || accepted_ || progress_ || delta_ || finished_) return std::nullopt;
  end_taken_.store(true, std::memory_order_release);
  return *end_;
}

std::optional<FinalState> GenerationImpl::TakeFinalState() {
  const std::lock_guard lock(mutex_);
  return std::exchange(final_state_, std::nullopt);
}

void GenerationImpl::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_.store(true, std::memory_order_release);
  if (owner_ != nullptr) owner_->OnCancel(*this);
}

Usage GenerationImpl::usage() const {
  return {.prompt_tokens = prompt_tokens_,
          .cached_tokens = cached_tokens_.load(std::memory_order_relaxed),
          .completion_tokens = completion_tokens_.load(std::memory_order_relaxed)};
}

void GenerationImpl::PushAccepted(const AcceptedEvent& event) {
  const std::lock_guard lock(mutex_);
  accepted_ = event;
}

void GenerationImpl::PushProgress(const ProgressEvent& event) {
  const std::lock_guard lock(mutex_);
  progress_ = event;
}

bool GenerationImpl::PushDelta(DeltaEvent&& event) {
  const std::lock_guard lock(mutex_);
  if (!delta_) {
    delta_ = std::move(event);
  } else {
    delta_->text += event.text;
    delta_->tokens.insert(delta_->tokens.end(), std::make_move_iterator(event.tokens.begin()),
                          std::make_move_iterator(event.tokens.end()));
    delta_->echoed += event.echoed;
    delta_->usage = event.usage;
    delta_->timing = event.timing;
  }
  const bool lags = delta_->tokens.size() > static_cast<size_t>(max_undelivered_tokens_);
  if (lags) lagging_.store(true, std::memory_order_release);
  return lags;
}

void GenerationImpl::PushFinished(FinishedEvent&& event) {
  const std::lock_guard lock(mutex_);
  finished_ = std::move(event);
}

void GenerationImpl::End(absl::Status status, std::optional<FinalState> final_state) {
  const std::lock_guard lock(mutex_);
  EFLA_CHECK(!end_);
  end_ = std::move(status);
  final_state_ = std::move(final_state);
  owner_ = nullptr;
}

}  // namespace efla
