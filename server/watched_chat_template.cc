#include "server/watched_chat_template.h"

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

using Clock = std::chrono::steady_clock;
using Messages = std::span<const ChatMessage>;

constexpr char kPlainContent[] = "Hello";

// The roles, with nothing that a client has written.
std::vector<ChatMessage> Plain(Messages messages) {
  std::vector<ChatMessage> plain;
  for (const ChatMessage& message : messages) {
    std::string role = "user";
    for (const char* known : {"system", "assistant", "tool"}) {
      if (message.role == known) role = known;
    }
    plain.push_back({std::move(role), kPlainContent});
  }
  return plain;
}

class WatchedChatTemplate final : public ChatTemplate {
 public:
  WatchedChatTemplate(std::unique_ptr<const ChatTemplate> inner, const Log& log,
                      std::function<Clock::time_point()> now)
      : inner_(std::move(inner)), log_(log), now_(std::move(now)) {}

  absl::StatusOr<RenderedChat> Render(Messages messages, const ChatOptions& options) const override {
    return Watched(messages, [&](Messages some) { return inner_->Render(some, options); });
  }
  absl::StatusOr<ContinuedChat> RenderAfterAnswer(Messages messages,
                                                  const ChatOptions& options) const override {
    return Watched(messages, [&](Messages some) { return inner_->RenderAfterAnswer(some, options); });
  }

 private:
  template <typename RenderThem>
  auto Watched(Messages messages, const RenderThem& render) const -> decltype(render(messages)) {
    auto rendered = render(messages);
    if (!absl::IsFailedPrecondition(rendered.status())) return rendered;
    // What comes of plain messages, too, holds nothing of these.
    absl::Status error = rendered.status();
    if (render(Plain(messages)).status() != error) {
      const std::string_view why(error.message().data(), error.message().size());
      error = absl::FailedPreconditionError(
          absl::StrFormat("%s: something in the messages", why.substr(0, why.find(':'))));
    }
    LogFailure(error, messages.size());
    return error;
  }

  void LogFailure(const absl::Status& error, size_t messages) const {
    int64_t suppressed = 0;
    {
      const std::lock_guard lock(mutex_);
      const Clock::time_point time = now_();
      if (time < next_line_) {
        ++suppressed_;
        return;
      }
      next_line_ = time + kChatTemplateLogInterval;
      suppressed = std::exchange(suppressed_, 0);
    }
    log_.Warning(
        "chat_template_failed", "the chat template has failed",
        {{"error", std::string(error.message())}, {"messages", messages}, {"suppressed", suppressed}});
  }

  const std::unique_ptr<const ChatTemplate> inner_;
  const Log& log_;
  const std::function<Clock::time_point()> now_;
  mutable std::mutex mutex_;  // guards what follows
  mutable Clock::time_point next_line_{};
  mutable int64_t suppressed_ = 0;
};

// Whether there is a text; logs why not.
absl::Status Try(const ChatTemplate& chat_template, const Log& log, std::string_view conversation,
                 const std::vector<ChatMessage>& messages) {
  absl::Status status = chat_template.Render(messages, {}).status();
  if (status.ok()) return status;
  const std::string why(status.message());
  if (absl::IsFailedPrecondition(status)) {
    log.Warning("chat_template_failed", "the chat template fails for a conversation of the simplest kind",
                {{"conversation", conversation}, {"error", why}});
  } else {
    log.Info("chat_template_refuses", "the chat template refuses a kind of conversation",
             {{"conversation", conversation}, {"reason", why}});
  }
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ChatTemplate>> WatchChatTemplate(
    std::unique_ptr<const ChatTemplate> chat_template, const Log& log,
    std::function<Clock::time_point()> now) {
  const std::vector<ChatMessage> user = {{"user", kPlainContent}};
  const std::vector<ChatMessage> system = {{"system", kPlainContent}, {"user", kPlainContent}};
  const absl::Status alone = Try(*chat_template, log, "a user message", user);
  const absl::Status both = Try(*chat_template, log, "a system and a user message", system);
  if (absl::IsFailedPrecondition(alone) && absl::IsFailedPrecondition(both)) return alone;
  if (alone.ok()) {
    const absl::Status after = chat_template->RenderAfterAnswer(user, {}).status();
    if (!after.ok()) {
      log.Warning("chat_template_alone", "chats in sessions are rendered turn by turn, each on its own",
                  {{"error", std::string(after.message())}});
    }
  }
  return std::make_unique<const WatchedChatTemplate>(std::move(chat_template), log, std::move(now));
}

}  // namespace efla
