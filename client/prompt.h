// A prompt as the command line gives it: text, a file, or token ids.
#ifndef EFLA_CLIENT_PROMPT_H_
#define EFLA_CLIENT_PROMPT_H_

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace efla {

using TokenIdList = std::vector<uint32_t>;
using Prompt = std::variant<std::string, TokenIdList>;

struct PromptFlags {
  std::optional<std::string> text;       // --prompt
  std::optional<std::string> file;       // --prompt-file; "-" is standard input
  std::optional<std::string> token_ids;  // --token-ids

  bool given() const { return text || file || token_ids; }
};

inline constexpr size_t kMaxTextBytes = size_t{256} << 20;
inline constexpr size_t kMaxSnapshotBytes = size_t{4} << 30;

// A file read part by part; "-" is standard input.
class InputFile {
 public:
  explicit InputFile(const std::string& path, size_t max_bytes);
  // At most 1 MiB, nothing at the end; an error where it cannot be read or has more than `max_bytes`.
  absl::StatusOr<std::string> Next();

 private:
  const std::string path_;
  const size_t max_bytes_;
  size_t bytes_ = 0;
  absl::Status opened_;
  std::ifstream file_;
};

// The bytes of a file as they are, kMaxTextBytes at most; "-" reads standard input to its end.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Offset of the first byte that no UTF-8 text has there; nothing when all are UTF-8.
std::optional<size_t> FirstInvalidUtf8(std::string_view text);

// INVALID_ARGUMENT unless `text` is UTF-8. The message begins with `name`, a file or where the text is from.
absl::Status CheckUtf8(std::string_view name, std::string_view text);

// A file's text, as above, which must be UTF-8.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// "1,2,3", or "@FILE" for such a list in a file (blanks and line ends separate too), "@-" from standard
// input. At least one id.
absl::StatusOr<TokenIdList> ParseTokenIds(std::string_view ids);

// INVALID_ARGUMENT unless exactly one of the flags is given.
absl::StatusOr<Prompt> ReadPrompt(const PromptFlags& flags);

// Puts the prompt into a GenerateRequest or ScoreRequest.
template <typename Request>
void SetPrompt(Prompt prompt, Request& request) {
  if (std::string* text = std::get_if<std::string>(&prompt)) {
    request.set_text(std::move(*text));
  } else {
    const TokenIdList& ids = std::get<TokenIdList>(prompt);
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
  }
}

}  // namespace efla

#endif  // EFLA_CLIENT_PROMPT_H_
