// The words of a template: text between tags, and what stands in tags.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_LEXER_H_
#define EFLA_MODEL_CHAT_TEMPLATE_LEXER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace efla::jinja {

enum class TokenKind {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,  // its text is what the literal stands for
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  int line = 1;
  std::string text;
  int64_t integer = 0;
  double real = 0;
};

// White space around tags is cut as with trim_blocks and lstrip_blocks. The last token is kEnd.
// INVALID_ARGUMENT "line N: ..." for what is no token, an open tag or comment.
absl::StatusOr<std::vector<Token>> Lex(std::string_view source);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_LEXER_H_
