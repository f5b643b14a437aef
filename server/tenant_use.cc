#include "server/tenant_use.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {

using Duration = std::chrono::duration<double>;

void TokenBucket::Set(double per_second, double capacity, Clock::time_point now) {
  if (limits()) {
    Fill(now);
    level_ = std::min(level_, capacity);
  } else {
    level_ = capacity;
  }
  per_second_ = per_second;
  capacity_ = capacity;
  filled_ = now;
}

void TokenBucket::Fill(Clock::time_point now) {
  if (now <= filled_) return;
  level_ = std::min(capacity_, level_ + Duration(now - filled_).count() * per_second_);
  filled_ = now;
}

Duration TokenBucket::Wait(double amount, Clock::time_point now) {
  if (!limits()) return Duration(0);
  Fill(now);
  return Duration(std::max(0.0, (std::min(amount, capacity_) - level_) / per_second_));
}

void TokenBucket::Take(double amount, Clock::time_point now) {
  if (!limits()) return;
  Fill(now);
  level_ = std::min(capacity_, level_ - amount);
}

const char* TenantLimitName(TenantLimit limit) {
  switch (limit) {
    case TenantLimit::kRequests:
      return "requests";
    case TenantLimit::kTokens:
      return "tokens";
    case TenantLimit::kConcurrent:
      return "concurrent";
    case TenantLimit::kQueued:
      return "queued";
  }
  return "";
}

void TenantUse::SetLimits(const TenantLimits& limits, Clock::time_point now) {
  constexpr double kSecondsPerMinute = 60;
  const std::scoped_lock lock(mutex_);
  limits_ = limits;
  requests_.Set(limits.requests_per_second,
                limits.burst > 0 ? limits.burst : std::max(1.0, limits.requests_per_second), now);
  tokens_.Set(limits.tokens_per_minute / kSecondsPerMinute, limits.tokens_per_minute, now);
}

TenantLimits TenantUse::limits() const {
  const std::scoped_lock lock(mutex_);
  return limits_;
}

TenantRefusal TenantUse::Refuse(TenantLimit limit, std::string message, Duration wait) {
  ++counts_.refused[static_cast<size_t>(limit)];
  // Rounded up: whoever waits so long is let in.
  return {limit, std::move(message),
          std::chrono::milliseconds(static_cast<int64_t>(std::ceil(wait.count() * 1e3)) + 1)};
}

// By then one of those under way should have ended.
Duration TenantUse::UntilAnEnd() const {
  constexpr double kShortest = 0.1, kLongest = 10;
  return Duration(std::clamp(mean_seconds_ / std::max(1, counts_.running), kShortest, kLongest));
}

std::optional<TenantRefusal> TenantUse::AdmitCall(Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  if (const Duration wait = requests_.Wait(1, now); wait > Duration(0)) {
    return Refuse(
        TenantLimit::kRequests,
        absl::StrFormat("this tenant has made its %g requests a second", limits_.requests_per_second), wait);
  }
  requests_.Take(1, now);
  ++counts_.calls;
  return std::nullopt;
}

std::optional<TenantRefusal> TenantUse::BeginWork(Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  if (limits_.max_concurrent > 0 && counts_.running >= limits_.max_concurrent) {
    return Refuse(TenantLimit::kConcurrent,
                  absl::StrFormat("%d requests of this tenant are under way; the limit is %d",
                                  counts_.running, limits_.max_concurrent),
                  UntilAnEnd());
  }
  ++counts_.running;
  return std::nullopt;
}

std::optional<TenantRefusal> TenantUse::Queue(int64_t prompt_tokens, Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  if (limits_.max_queued > 0 && counts_.queued >= limits_.max_queued) {
    return Refuse(TenantLimit::kQueued,
                  absl::StrFormat("%d requests of this tenant wait; the limit is %d", counts_.queued,
                                  limits_.max_queued),
                  UntilAnEnd());
  }
  const double amount = static_cast<double>(std::max<int64_t>(prompt_tokens, 1));
  if (const Duration wait = tokens_.Wait(amount, now); wait > Duration(0)) {
    return Refuse(TenantLimit::kTokens,
                  absl::StrFormat("this tenant has used its %g tokens a minute; the prompt has %d",
                                  limits_.tokens_per_minute, prompt_tokens),
                  wait);
  }
  tokens_.Take(static_cast<double>(prompt_tokens), now);
  counts_.tokens += static_cast<uint64_t>(prompt_tokens);
  ++counts_.queued;
  return std::nullopt;
}

void TenantUse::LeaveQueue() {
  const std::scoped_lock lock(mutex_);
  --counts_.queued;
}

void TenantUse::Draw(int64_t tokens, Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  tokens_.Take(static_cast<double>(tokens), now);
  counts_.tokens += static_cast<uint64_t>(std::max<int64_t>(tokens, 0));
}

void TenantUse::EndWork(Duration lasted) {
  constexpr double kWeightOfNew = 0.2;
  const std::scoped_lock lock(mutex_);
  --counts_.running;
  mean_seconds_ =
      mean_seconds_ == 0 ? lasted.count() : mean_seconds_ + kWeightOfNew * (lasted.count() - mean_seconds_);
}

TenantUse::Stats TenantUse::stats() const {
  const std::scoped_lock lock(mutex_);
  Stats stats = counts_;
  stats.tenant = tenant_;
  return stats;
}

}  // namespace efla
