// Log lines of session stores that fail: one of a kind in a while, however often it fails.
#ifndef EFLA_SERVER_STORE_FAILURE_LOG_H_
#define EFLA_SERVER_STORE_FAILURE_LOG_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "server/log.h"
#include "server/sessions/observed_store.h"

namespace efla {

// Thread-safe.
class StoreFailureLog {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kInterval{
      10};  // between lines of one store, operation and status code

  // `log` outlives it. `now`: for tests.
  explicit StoreFailureLog(const Log& log, std::function<Clock::time_point()> now = Clock::now)
      : log_(log), now_(std::move(now)) {}
  void Write(const StoreFailure& failure);

 private:
  struct Kind {
    Clock::time_point next_line;
    int64_t suppressed = 0;  // since the last line
  };
  const Log& log_;
  const std::function<Clock::time_point()> now_;
  std::mutex mutex_;
  std::map<std::tuple<std::string, std::string, absl::StatusCode>, Kind> kinds_;
};

}  // namespace efla

#endif  // EFLA_SERVER_STORE_FAILURE_LOG_H_
