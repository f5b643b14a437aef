// From a template's source to its tree.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_PARSER_H_
#define EFLA_MODEL_CHAT_TEMPLATE_PARSER_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "model/chat_template/ast.h"

namespace efla::jinja {

// INVALID_ARGUMENT "line N: ..." for what is no template, and for what this library does not support.
absl::StatusOr<Statements> Parse(std::string_view source);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_PARSER_H_
