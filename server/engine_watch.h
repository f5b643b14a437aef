// Whether the engine lives, told from readings of its statistics.
#ifndef EFLA_SERVER_ENGINE_WATCH_H_
#define EFLA_SERVER_ENGINE_WATCH_H_

#include <chrono>
#include <cstdint>

#include "server/engine/engine.h"

namespace efla {

// One thread.
class EngineWatch {
 public:
  // Sequences that could run and no step for longer than this: the device hangs.
  static constexpr std::chrono::seconds kStalled{60};
  // A server whose engine has failed says so for so long, then ends: whoever started it starts it again.
  static constexpr std::chrono::seconds kGrace{10};

  enum class Health { kHealthy, kDeviceFailed, kStalled };

  explicit EngineWatch(Clock::time_point now) : moved_at_(now), healthy_at_(now) {}

  // Readings come in the order of their times, a few a second.
  Health Look(const EngineStats& stats, Clock::time_point now) {
    // Nothing to step is as good as a step: all that run are parked, or nothing runs.
    if (stats.steps != steps_ || stats.running == stats.parked) {
      steps_ = stats.steps;
      moved_at_ = now;
    }
    const Health health = now - moved_at_ > kStalled ? Health::kStalled
                          : stats.healthy            ? Health::kHealthy
                                                     : Health::kDeviceFailed;
    if (health == Health::kHealthy) healthy_at_ = now;
    ends_ = now - healthy_at_ > kGrace;
    return health;
  }

  // At the last reading: the grace is over.
  bool ends() const { return ends_; }

 private:
  uint64_t steps_ = 0;
  Clock::time_point moved_at_;    // when the engine last made a step or had none to make
  Clock::time_point healthy_at_;  // when it last was
  bool ends_ = false;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_WATCH_H_
