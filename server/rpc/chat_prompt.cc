#include "server/rpc/chat_prompt.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/status.h"

namespace efla {
namespace {

absl::Status RenderError(const absl::Status& status) {
  const std::string why(status.message());
  if (absl::IsFailedPrecondition(status)) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrFormat(
            "chat cannot be rendered: the chat template fails: %s; give text or token ids", why)),
        "CHAT_TEMPLATE_FAILED");
  }
  return InvalidField("chat", absl::StrFormat("cannot be rendered by the chat template: %s", why));
}

absl::StatusOr<ChatPrompt> Encoded(RenderedChat chat, bool parse_special, bool continues,
                                   const ServedModel& model, const StillWanted& wanted) {
  absl::StatusOr<std::vector<TokenId>> ids = EncodeChat(chat, parse_special, continues, model, wanted);
  if (!ids.ok()) return ids.status();
  ChatPrompt prompt;
  prompt.text = std::move(chat.text);
  prompt.ids = *std::move(ids);
  return prompt;
}

absl::Status CheckNotEmpty(const ChatPrompt& prompt) {
  if (!prompt.ids.empty()) return absl::OkStatus();
  return InvalidField("chat", "is an empty text by the chat template; a prompt needs a token");
}

// How many of `ids` the text's first `bytes` are, which hold nothing of a message: those at least that do not
// change with what comes after them.
absl::StatusOr<size_t> TokensOf(std::string_view text, size_t bytes, std::span<const TokenId> ids,
                                const ServedModel& model) {
  if (bytes == 0) return size_t{0};
  const absl::StatusOr<std::vector<TokenId>> first =
      model.tokenizer->EncodeMarked(text.substr(0, bytes), {}, /*continues=*/true, {});
  if (!first.ok()) return first.status();
  return static_cast<size_t>(std::mismatch(ids.begin(), ids.end(), first->begin(), first->end()).first -
                             ids.begin());
}

}  // namespace

absl::StatusOr<ChatRequest> ToChatRequest(const v1::Chat& chat, const ServedModel& model) {
  if (model.chat_template == nullptr) {
    return WithReason(absl::FailedPreconditionError(absl::StrFormat(
                          "chat needs a chat template: %s; give text or token ids", model.no_chat_template)),
                      "NO_CHAT_TEMPLATE");
  }
  if (chat.messages().empty()) return InvalidField("chat.messages", "is empty; at least one is needed");
  if (chat.continue_final_message() && chat.add_generation_prompt()) {
    return InvalidField("chat.continue_final_message",
                        "and add_generation_prompt are both set; an answer cannot go on and begin at once");
  }
  ChatRequest request;
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    if (message.role().empty()) return InvalidField(absl::StrFormat("chat.messages[%d].role", i), "is empty");
    request.messages.push_back({message.role(), message.content()});
  }
  request.options.continue_final_message = chat.continue_final_message();
  request.options.add_generation_prompt =
      chat.has_add_generation_prompt() ? chat.add_generation_prompt() : !chat.continue_final_message();
  return request;
}

absl::StatusOr<ChatPrompt> ChatAlone(const ChatRequest& chat, bool parse_special, bool continues,
                                     const ServedModel& model, const StillWanted& wanted) {
  absl::StatusOr<RenderedChat> rendered = model.chat_template->Render(chat.messages, chat.options);
  if (!rendered.ok()) return RenderError(rendered.status());
  absl::StatusOr<ChatPrompt> prompt = Encoded(*std::move(rendered), parse_special, continues, model, wanted);
  if (!prompt.ok()) return prompt;
  if (absl::Status status = CheckNotEmpty(*prompt); !status.ok()) return status;
  return prompt;
}

absl::StatusOr<ChatPrompt> ChatAfterAnswer(const ChatRequest& chat, bool parse_special,
                                           const ServedModel& model, const StillWanted& wanted) {
  absl::StatusOr<ContinuedChat> continued = absl::NotFoundError("an answer goes on");
  if (chat.messages.front().role != "assistant") {
    continued = model.chat_template->RenderAfterAnswer(chat.messages, chat.options);
  }
  if (!continued.ok()) {
    absl::StatusOr<ChatPrompt> prompt = ChatAlone(chat, parse_special, /*continues=*/true, model, wanted);
    if (!prompt.ok()) return prompt;
    if (prompt->ids.front() == model.config->bos_token_id) prompt->ids.erase(prompt->ids.begin());
    if (absl::Status status = CheckNotEmpty(*prompt); !status.ok()) return status;
    return prompt;
  }
  const size_t leading_bytes =
      continued->chat.content.empty() ? continued->chat.text.size() : continued->chat.content.front().begin;
  absl::StatusOr<ChatPrompt> prompt =
      Encoded(std::move(continued->chat), parse_special, /*continues=*/true, model, wanted);
  if (!prompt.ok()) return prompt;
  if (absl::Status status = CheckNotEmpty(*prompt); !status.ok()) return status;
  absl::StatusOr<size_t> closing = TokensOf(prompt->text, continued->closing_bytes, prompt->ids, model);
  if (!closing.ok()) return closing.status();
  absl::StatusOr<size_t> leading = TokensOf(prompt->text, leading_bytes, prompt->ids, model);
  if (!leading.ok()) return leading.status();
  prompt->seam = {.closing_tokens = *closing, .leading_tokens = *leading};
  prompt->alone = false;
  return prompt;
}

size_t ClosedAlready(std::span<const TokenId> ids, const ChatSeam& seam, std::optional<TokenId> last_drawn,
                     const ServedModel& model) {
  if (!last_drawn) return seam.closing_tokens;
  const std::vector<TokenId>& ends = model.config->eos_token_ids;
  const bool is_end = std::find(ends.begin(), ends.end(), *last_drawn) != ends.end() ||
                      (model.tokenizer != nullptr && model.tokenizer->is_control(*last_drawn));
  if (!is_end) return 0;
  const std::span<const TokenId> leading = ids.first(std::min(seam.leading_tokens, ids.size()));
  const auto found = std::find(leading.begin(), leading.end(), *last_drawn);
  return found == leading.end() ? 0 : static_cast<size_t>(found - leading.begin()) + 1;
}

}  // namespace efla
