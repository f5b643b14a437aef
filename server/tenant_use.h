// What a tenant uses at the moment, held to its limits.
#ifndef EFLA_SERVER_TENANT_USE_H_
#define EFLA_SERVER_TENANT_USE_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "server/credentials.h"
#include "server/engine/generation.h"

namespace efla {

// Fills at a steady rate up to what it holds; may be overdrawn. Time is passed in.
class TokenBucket {
 public:
  // Begins full. A change keeps what is in it.
  void Set(double per_second, double capacity, Clock::time_point now);
  bool limits() const { return per_second_ > 0; }
  // How long until it holds `amount`, or all it can where that is less; zero: it does.
  std::chrono::duration<double> Wait(double amount, Clock::time_point now);
  void Take(double amount, Clock::time_point now);

 private:
  void Fill(Clock::time_point now);
  double per_second_ = 0, capacity_ = 0, level_ = 0;
  Clock::time_point filled_;
};

enum class TenantLimit { kRequests, kTokens, kConcurrent, kQueued };
inline constexpr int kNumTenantLimits = 4;
// As in metrics: "requests".
const char* TenantLimitName(TenantLimit limit);

struct TenantRefusal {
  TenantLimit limit;
  std::string message;              // names the limit and its bound
  std::chrono::milliseconds retry;  // exact for the rates; for the others by the length of the tenant's calls
};

// Any thread.
class TenantUse {
 public:
  explicit TenantUse(std::string tenant) : tenant_(std::move(tenant)) {}

  void SetLimits(const TenantLimits& limits, Clock::time_point now);
  TenantLimits limits() const;

  // A call, of whatever kind, or why not.
  std::optional<TenantRefusal> AdmitCall(Clock::time_point now);
  // A call that will use the engine. Ends with EndWork.
  std::optional<TenantRefusal> BeginWork(Clock::time_point now);
  // Its prompt is about to be queued, until LeaveQueue. The prompt's tokens are taken now, drawn ones by
  // Draw.
  std::optional<TenantRefusal> Queue(int64_t prompt_tokens, Clock::time_point now);
  void LeaveQueue();
  void Draw(int64_t tokens, Clock::time_point now);
  // The tokens of a prompt that was not computed after all.
  void Refund(int64_t prompt_tokens, Clock::time_point now) { Draw(-prompt_tokens, now); }
  void EndWork(std::chrono::duration<double> lasted);

  struct Stats {
    std::string tenant;
    uint64_t calls = 0, tokens = 0;
    uint64_t refused[kNumTenantLimits] = {};
    int running = 0, queued = 0;
  };
  Stats stats() const;

 private:
  TenantRefusal Refuse(TenantLimit limit, std::string message, std::chrono::duration<double> wait);
  std::chrono::duration<double> UntilAnEnd() const;

  const std::string tenant_;
  mutable std::mutex mutex_;  // guards what follows
  TenantLimits limits_;
  TokenBucket requests_, tokens_;
  Stats counts_;
  double mean_seconds_ = 0;  // of its calls of late; 0: none has ended yet
};

}  // namespace efla

#endif  // EFLA_SERVER_TENANT_USE_H_
