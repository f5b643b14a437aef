// A conversation as the command line gives it.
#ifndef EFLA_CLIENT_CHAT_FILE_H_
#define EFLA_CLIENT_CHAT_FILE_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "efla/v1/generation.pb.h"

namespace efla {

// Of JSON: a list of {"role": ..., "content": ...}, or an object with such "messages" and, where wanted, the
// booleans "add_generation_prompt" and "continue_final_message". Errors begin with `name`, a file or where
// the text is from; what the messages may be is for the server to say.
absl::StatusOr<v1::Chat> ParseChat(std::string_view name, std::string_view json);

// The same of a file; "-" reads standard input to its end.
absl::StatusOr<v1::Chat> ReadChat(const std::string& path);

}  // namespace efla

#endif  // EFLA_CLIENT_CHAT_FILE_H_
