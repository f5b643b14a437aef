// What one session looks like from outside. With its mutex held, all of it.
#ifndef EFLA_SERVER_SESSIONS_SESSION_VIEW_H_
#define EFLA_SERVER_SESSIONS_SESSION_VIEW_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/residency.h"
#include "server/sessions/session.h"
#include "server/sessions/session_manager.h"
#include "server/sessions/session_records.h"

namespace efla {

SessionInfo InfoOf(const Session& session, const Residency& residency, const SessionRecords& records);

// The head, or a mark's where one is named. NOT_FOUND, MARK_NOT_FOUND.
absl::StatusOr<ContextPtr> ContextOf(const Session& session, const std::string& mark);

// INTERNAL, saying which, when its fields contradict one another. For tests.
absl::Status CheckFields(const Session& session, int max_kept_turns, int max_marks);

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_VIEW_H_
