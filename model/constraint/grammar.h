// Grammars in the notation of README.md.
#ifndef EFLA_MODEL_CONSTRAINT_GRAMMAR_H_
#define EFLA_MODEL_CONSTRAINT_GRAMMAR_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "model/constraint/expression.h"

namespace efla {

// `text` is valid UTF-8. INVALID_ARGUMENT: "line 2, column 5: ...".
absl::StatusOr<Grammar> ParseGrammar(std::string_view text);

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_GRAMMAR_H_
