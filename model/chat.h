// Conversations as prompts: the checkpoint's own chat template.
#ifndef EFLA_MODEL_CHAT_H_
#define EFLA_MODEL_CHAT_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer.h"

namespace efla {

struct ChatMessage {
  std::string role, content;  // UTF-8
};

struct ChatOptions {
  bool add_generation_prompt = true;    // the text that begins an answer follows the messages
  bool continue_final_message = false;  // the text ends with the last message's content, which is not blank
  std::chrono::system_clock::time_point now = std::chrono::system_clock::now();  // for templates with dates
};

struct RenderedChat {
  std::string text;
  // What came from the messages: no special token is read from it. Ascending, apart.
  std::vector<TextRange> content;
};

// The text that closes an answer, then messages that come after it.
struct ContinuedChat {
  RenderedChat chat;
  size_t closing_bytes = 0;  // of the text: what closes an answer whatever comes after it
};

// Immutable; safe to use from any thread.
class ChatTemplate {
 public:
  // That of the checkpoint in `folder`: chat_template.jinja, else "chat_template" in tokenizer_config.json, a
  // string or a list in which the one named "default" counts. NOT_FOUND where there is none;
  // INVALID_ARGUMENT, naming the file and the line, for what is no template or is not supported. The special
  // tokens that it may write are those of tokenizer_config.json, and where these are absent the tokenizer's.
  static absl::StatusOr<std::unique_ptr<const ChatTemplate>> Open(const std::string& folder,
                                                                  const Tokenizer& tokenizer);
  virtual ~ChatTemplate() = default;

  // INVALID_ARGUMENT with the template's line and reason where it refuses the messages, or needs too much for
  // them; FAILED_PRECONDITION where it fails by itself.
  virtual absl::StatusOr<RenderedChat> Render(std::span<const ChatMessage> messages,
                                              const ChatOptions& options) const = 0;
  // The messages as the template writes them later in a conversation, after an answer: without what it puts
  // at the beginning of one (a BOS, a system message of its own). NOT_FOUND where it does not write an answer
  // once and as it is, so that it cannot be seen where the answer ends; else as Render.
  virtual absl::StatusOr<ContinuedChat> RenderAfterAnswer(std::span<const ChatMessage> messages,
                                                          const ChatOptions& options) const = 0;
};

}  // namespace efla

#endif  // EFLA_MODEL_CHAT_H_
