// A chat template that is tried before it is used, and whose failures afterwards are seen in the log.
#ifndef EFLA_SERVER_WATCHED_CHAT_TEMPLATE_H_
#define EFLA_SERVER_WATCHED_CHAT_TEMPLATE_H_

#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "model/chat.h"
#include "server/log.h"

namespace efla {

inline constexpr std::chrono::seconds kChatTemplateLogInterval{10};

// Renders small conversations and logs what `chat_template` does not do: as warnings where it fails by itself
// and where sessions' turns will be rendered on their own, else as what it refuses. FAILED_PRECONDITION with
// its error where it fails even for a user's message, with and without a system message: no chat can be
// rendered.
//
// Of the template that is given back, a failure of its own is a warning, one in kChatTemplateLogInterval, and
// the errors of these tell nothing of the messages. `log` outlives it. `now`: for tests.
absl::StatusOr<std::unique_ptr<const ChatTemplate>> WatchChatTemplate(
    std::unique_ptr<const ChatTemplate> chat_template, const Log& log,
    std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now);

}  // namespace efla

#endif  // EFLA_SERVER_WATCHED_CHAT_TEMPLATE_H_
