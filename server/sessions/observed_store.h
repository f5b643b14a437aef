// Tells somebody of each call in which a store fails.
#ifndef EFLA_SERVER_SESSIONS_OBSERVED_STORE_H_
#define EFLA_SERVER_SESSIONS_OBSERVED_STORE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/sessions/session_store.h"

namespace efla {

struct StoreFailure {
  std::string store;              // SessionStore::kind()
  const char* operation = "";     // of SessionStore: "PutSnapshot"
  const char* subject_kind = "";  // "session", "snapshot", "owner"; empty: the call is about none
  std::string subject;            // its name
  absl::Status status;
  std::string session = "";  // of a snapshot: which session it was made for; empty: not known
};

// `on_failure` is called by the calling threads, before the call returns. What a store answers is no failure
// of it: NOT_FOUND, ABORTED, INVALID_ARGUMENT.
std::unique_ptr<SessionStore> ObserveFailures(std::unique_ptr<SessionStore> store,
                                              std::function<void(const StoreFailure&)> on_failure);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_OBSERVED_STORE_H_
