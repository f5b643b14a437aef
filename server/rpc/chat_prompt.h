// Chats of requests as ids: at the start of a context, and after an answer in a session.
//
// Errors: INVALID_ARGUMENT naming the field, also for what the template refuses; FAILED_PRECONDITION without
// a chat template (NO_CHAT_TEMPLATE) and where it fails by itself (CHAT_TEMPLATE_FAILED).
#ifndef EFLA_SERVER_RPC_CHAT_PROMPT_H_
#define EFLA_SERVER_RPC_CHAT_PROMPT_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "efla/v1/generation.pb.h"
#include "server/rpc/request_validation.h"
#include "server/served_model.h"

namespace efla {

// The messages and how they are to be rendered.
struct ChatRequest {
  std::vector<ChatMessage> messages;  // at least one
  ChatOptions options;
};
absl::StatusOr<ChatRequest> ToChatRequest(const v1::Chat& chat, const ServedModel& model);

struct ChatPrompt {
  std::string text;          // as the template writes it
  std::vector<TokenId> ids;  // not empty; special tokens are those that the template wrote
  ChatSeam seam;             // after an answer
  bool alone = true;         // the messages are all that the template saw
};

// The messages as a conversation of their own. `parse_special`: the messages' special tokens are some, too.
// `continues`: text has been before, so that no space is put in front.
absl::StatusOr<ChatPrompt> ChatAlone(const ChatRequest& chat, bool parse_special, bool continues,
                                     const ServedModel& model, const StillWanted& wanted);
// The messages as the template goes on with them after an answer. Alone, without the BOS that they may begin
// with, where the template's text does not show where an answer ends, where it refuses such a conversation,
// and where the messages begin with an answer, which goes on with what is there.
absl::StatusOr<ChatPrompt> ChatAfterAnswer(const ChatRequest& chat, bool parse_special,
                                           const ServedModel& model, const StillWanted& wanted);

// How many of the first ids of a ChatAfterAnswer are there already, in a session that ends with the token
// `last_drawn` of an answer, or with something else. All that closes an answer where there is none to be
// closed; what comes up to the end token, where the model drew it.
size_t ClosedAlready(std::span<const TokenId> ids, const ChatSeam& seam, std::optional<TokenId> last_drawn,
                     const ServedModel& model);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_CHAT_PROMPT_H_
