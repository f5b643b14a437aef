#include "server/watched_chat_template.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace efla {
namespace {

using Messages = std::span<const ChatMessage>;
using Clock = std::chrono::steady_clock;

// Answers with a status; OK: an empty text.
class StandInTemplate final : public ChatTemplate {
 public:
  using Answer = std::function<absl::Status(Messages messages, bool after_answer)>;
  explicit StandInTemplate(Answer answer) : answer_(std::move(answer)) {}
  absl::StatusOr<RenderedChat> Render(Messages messages, const ChatOptions&) const override {
    if (absl::Status status = answer_(messages, false); !status.ok()) return status;
    return RenderedChat();
  }
  absl::StatusOr<ContinuedChat> RenderAfterAnswer(Messages messages, const ChatOptions&) const override {
    if (absl::Status status = answer_(messages, true); !status.ok()) return status;
    return ContinuedChat();
  }

 private:
  const Answer answer_;
};

class WatchedChatTemplateTest : public ::testing::Test {
 protected:
  // What it logs.
  std::string Watch(StandInTemplate::Answer answer) {
    return Logged([&] {
      watched_ = WatchChatTemplate(std::make_unique<StandInTemplate>(std::move(answer)), log_,
                                   [this] { return now_; });
    });
  }
  static std::string Logged(const std::function<void()>& work) {
    testing::internal::CaptureStderr();
    work();
    return testing::internal::GetCapturedStderr();
  }
  static bool Has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  const Log log_{LogLevel::kInfo, LogFormat::kJson};
  Clock::time_point now_ = Clock::now();
  absl::StatusOr<std::unique_ptr<const ChatTemplate>> watched_ = absl::UnknownError("not watched");
};

TEST_F(WatchedChatTemplateTest, ATemplateThatRendersAllIsNoLineWorth) {
  EXPECT_EQ(Watch([](Messages, bool) { return absl::OkStatus(); }), "");
  ASSERT_TRUE(watched_.ok());
  const std::vector<ChatMessage> user = {{"user", "a"}};
  EXPECT_EQ(Logged([&] {
              EXPECT_TRUE((*watched_)->Render(user, {}).ok());
              EXPECT_TRUE((*watched_)->RenderAfterAnswer(user, {}).ok());
            }),
            "");
}

TEST_F(WatchedChatTemplateTest, OneThatFailsForAllIsOfNoUse) {
  const auto error = absl::FailedPreconditionError("line 1: \"foo\" is undefined");
  const std::string log = Watch([&](Messages, bool) { return error; });
  EXPECT_EQ(watched_.status(), error);
  for (const char* part : {"chat_template_failed", "\"warning\"", "a user message",
                           "a system and a user message", "foo", "line 1"}) {
    EXPECT_TRUE(Has(log, part)) << part << log;
  }
}

TEST_F(WatchedChatTemplateTest, OneThatFailsOrRefusesSometimesIsUsed) {
  std::string log = Watch([](Messages messages, bool) {
    return messages.size() > 1 ? absl::FailedPreconditionError("line 2: no") : absl::OkStatus();
  });
  EXPECT_TRUE(watched_.ok());
  EXPECT_TRUE(Has(log, "chat_template_failed") && !Has(log, "\"a user message\"")) << log;

  log = Watch([](Messages messages, bool) {
    return messages[0].role == "system" ? absl::InvalidArgumentError("line 2: no system") : absl::OkStatus();
  });
  EXPECT_TRUE(watched_.ok());
  EXPECT_TRUE(Has(log, "chat_template_refuses") && Has(log, "no system") && !Has(log, "warning")) << log;

  log = Watch([](Messages, bool after_answer) {
    return after_answer ? absl::NotFoundError("no answers") : absl::OkStatus();
  });
  EXPECT_TRUE(watched_.ok());
  EXPECT_TRUE(Has(log, "chat_template_alone") && Has(log, "no answers")) << log;
}

TEST_F(WatchedChatTemplateTest, LaterFailuresAreLoggedOnceInAWhile) {
  Watch([](Messages messages, bool) {
    return messages.size() > 2 ? absl::FailedPreconditionError("line 3: too many") : absl::OkStatus();
  });
  ASSERT_TRUE(watched_.ok());
  const std::vector<ChatMessage> three = {{"user", "a"}, {"assistant", "b"}, {"user", "c"}};
  const auto fail = [&] {
    EXPECT_EQ((*watched_)->Render(three, {}).status(), absl::FailedPreconditionError("line 3: too many"));
  };
  const std::string first = Logged(fail);
  EXPECT_TRUE(Has(first, "line 3: too many") && Has(first, "\"messages\":3") && Has(first, "warning"))
      << first;
  EXPECT_EQ(Logged(fail), "");
  EXPECT_EQ(Logged([&] { EXPECT_FALSE((*watched_)->RenderAfterAnswer(three, {}).ok()); }), "");
  now_ += kChatTemplateLogInterval;
  const std::string next = Logged(fail);
  EXPECT_TRUE(Has(next, "\"suppressed\":2")) << next;
}

TEST_F(WatchedChatTemplateTest, WhatComesOfTheMessagesIsNotTold) {
  Watch([](Messages messages, bool) {
    return messages[0].content == "secret" ? absl::FailedPreconditionError("line 4: secret is no number")
                                           : absl::OkStatus();
  });
  ASSERT_TRUE(watched_.ok());
  const std::vector<ChatMessage> messages = {{"user", "secret"}};
  const std::string log = Logged([&] {
    EXPECT_EQ((*watched_)->Render(messages, {}).status(),
              absl::FailedPreconditionError("line 4: something in the messages"));
  });
  EXPECT_TRUE(Has(log, "line 4")) << log;
  EXPECT_FALSE(Has(log, "secret")) << log;
}

TEST_F(WatchedChatTemplateTest, RefusalsAreTheClientsAndNotLogged) {
  Watch([](Messages messages, bool) {
    return messages.size() > 2 ? absl::InvalidArgumentError("line 1: roles must alternate")
                               : absl::OkStatus();
  });
  ASSERT_TRUE(watched_.ok());
  const std::vector<ChatMessage> three(3, ChatMessage{"user", "a"});
  EXPECT_EQ(Logged([&] {
              EXPECT_EQ((*watched_)->Render(three, {}).status().message(), "line 1: roles must alternate");
            }),
            "");
}

}  // namespace
}  // namespace efla
