#include "server/store_failure_log.h"

#include <string_view>
#include <utility>
#include <vector>

namespace efla {

void StoreFailureLog::Write(const StoreFailure& failure) {
  int64_t suppressed = 0;
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = now_();
    const auto [entry, is_new] =
        kinds_.try_emplace({failure.store, failure.operation, failure.status.code()}, Kind{});
    Kind& kind = entry->second;
    if (!is_new && now < kind.next_line) {
      ++kind.suppressed;
      return;
    }
    kind.next_line = now + kInterval;
    suppressed = std::exchange(kind.suppressed, 0);
  }
  const std::string code = absl::StatusCodeToString(failure.status.code());
  const std::string error(failure.status.message());
  const char* const subject_kind = *failure.subject_kind == '\0' ? "subject" : failure.subject_kind;
  std::vector<LogField> fields = {{"store", failure.store},
                                  {"operation", std::string_view(failure.operation)},
                                  {subject_kind, failure.subject}};
  if (!failure.session.empty()) fields.emplace_back("session", failure.session);
  fields.insert(fields.end(), {{"code", code}, {"error", error}, {"suppressed", suppressed}});
  log_.Write(LogLevel::kWarning, "session_store_failed", "a session store failed", fields);
}

}  // namespace efla
