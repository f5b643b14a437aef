#include "server/sessions/session.h"

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

// A session's recorded replies: so many, none longer than that, and together no longer than this.

constexpr size_t kMaxReplyBytes = 256 << 10;
constexpr size_t kMaxAllReplyBytes = 512 << 10;

}  // namespace

const RecordedReply* FindReply(const SessionState& state, RecordedReply::Call call,
                               const std::string& request_id) {
  if (request_id.empty()) return nullptr;
  for (const RecordedReply& reply : state.replies) {
    if (reply.call == call && reply.request_id == request_id) return &reply;
  }
  return nullptr;
}

void RecordReply(SessionState& state, RecordedReply reply) {
  if (reply.request_id.empty()) return;
  state.replies.push_back(std::move(reply));
  if (state.replies.size() > kMaxReplies) state.replies.pop_front();
  size_t bytes = 0;
  for (auto next = state.replies.rbegin(); next != state.replies.rend(); ++next) {
    bytes += next->content.size();
    if (next->content.size() <= kMaxReplyBytes && bytes <= kMaxAllReplyBytes) continue;
    bytes -= next->content.size();
    next->has_content = false;
    next->content = std::string();
  }
}

absl::Status CheckContent(const RecordedReply& reply) {
  if (reply.has_content) return absl::OkStatus();
  return WithSessionError(
      absl::AlreadyExistsError(
          absl::StrFormat("request %s has been carried out and made revision %d; its reply is no longer kept "
                          "(replies above %d bytes, or "
                          "%d bytes together, are not)",
                          reply.request_id, reply.revision, kMaxReplyBytes, kMaxAllReplyBytes)),
      "RESULT_NOT_KEPT");
}

void SetHead(SessionState& state, ContextPtr head) {
  state.head = std::move(head);
  CountChange(state);
  state.head_since = state.revision;
}

absl::Status Lost(const Session& session) {
  return WithSessionError(
      absl::AbortedError(absl::StrFormat("session %s has been %s meanwhile", session.id,
                                         session.life == Session::Life::kDeleted ? "deleted" : "taken over")),
      "SESSION_LOST");
}

}  // namespace efla
