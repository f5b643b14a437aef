#include "server/sessions/session_view.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "absl/strings/str_format.h"
#include "kernels/op_args.h"
#include "server/sessions/session_checks.h"

namespace efla {

SessionInfo InfoOf(const Session& session, const Residency& residency, const SessionRecords& records) {
  const SessionState& state = session.state;
  SessionInfo info;
  info.session_id = session.id;
  info.revision = state.revision;
  info.durable_revision = std::min(session.durable_revision, state.revision);
  info.epoch = session.epoch;
  info.tokens = state.head->total_tokens();
  info.waiting_tokens = state.head->waiting.size();
  if (state.head->residence != nullptr) {
    info.damaged = !residency.Damage(*state.head->residence).ok();
    switch (residency.tier(*state.head->residence)) {
      case Residency::Tier::kNone:
        break;
      case Residency::Tier::kDevice:
        info.tier = SessionTier::kDevice;
        break;
      case Residency::Tier::kHost:
        info.tier = SessionTier::kHost;
        break;
      case Residency::Tier::kDisk:
        info.tier = SessionTier::kDisk;
        break;
      case Residency::Tier::kShared:
        info.tier = SessionTier::kShared;
        break;
    }
  }
  info.busy = session.writer == Session::Writer::kTurn;
  for (const auto& [name, mark] : state.marks)
    info.marks.push_back({name, mark.since, mark.context->total_tokens()});
  for (const SessionState::KeptTurn& turn : state.turns) info.turns.push_back(turn.since);
  info.created_unix_ms = state.created_unix_ms;
  info.expires_unix_ms = records.UnixMs(session.last_use) + state.ttl_ms;
  return info;
}

absl::StatusOr<ContextPtr> ContextOf(const Session& session, const std::string& mark) {
  if (mark.empty()) return session.state.head;
  const auto found = session.state.marks.find(mark);
  if (found != session.state.marks.end()) return found->second.context;
  return MarkNotFound(session.id, mark);
}

absl::Status CheckFields(const Session& session, int max_kept_turns, int max_marks) {
  const SessionState& state = session.state;
  const auto wrong = [&](const char* what) {
    return absl::InternalError(
        absl::StrFormat("session %s, revision %d: %s", session.id, state.revision, what));
  };
  if (state.head == nullptr) return wrong("it has no head");
  if (state.head_since > state.revision) return wrong("its head is newer than itself");
  if (session.durable_revision > state.revision) return wrong("more is durable than there is");
  if (session.written_changes > session.changes) return wrong("more is written than there is");
  if (std::ssize(state.turns) > max_kept_turns) return wrong("it keeps too many turns");
  if (std::ssize(state.marks) > max_marks) return wrong("it has too many marks");
  if (state.replies.size() > kMaxReplies) return wrong("it keeps too many replies");
  uint64_t until = 0;
  for (const SessionState::KeptTurn& turn : state.turns) {
    if (turn.context == nullptr || turn.since > turn.until || turn.since <= until)
      return wrong("its turns are in disorder");
    until = turn.until;
  }
  if (until >= state.head_since && until > 0) return wrong("its last kept turn is newer than its head");
  for (const auto& [name, mark] : state.marks) {
    if (mark.context == nullptr || mark.since > state.revision) return wrong("a mark is in disorder");
  }
  const auto waits = [](const Context& context) {
    return context.waiting.pending_prompt.size() <= kChunkTokens &&
           (context.residence != nullptr || !context.waiting.pending_token);
  };
  if (!waits(*state.head)) return wrong("too much waits to be fed");
  return absl::OkStatus();
}

}  // namespace efla
