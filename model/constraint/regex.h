// Regular expressions to expressions.
#ifndef EFLA_MODEL_CONSTRAINT_REGEX_H_
#define EFLA_MODEL_CONSTRAINT_REGEX_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/constraint/code_points.h"
#include "model/constraint/expression.h"

namespace efla {

inline constexpr int64_t kMaxRegexCount = 1000;  // in {m,n}

// Where the two differ in what `.` and \s are. Only \s, \S and `.` depend on it.
enum class RegexDialect { kRe2, kEcma };

// One of the alternatives that the whole expression is made of.
struct RegexAlternative {
  ExpressionPtr body;
  bool at_begin = false, at_end = false;  // it had ^ in front, $ behind
};

// `text` is valid UTF-8. INVALID_ARGUMENT: "at byte 3: ...".
absl::StatusOr<std::vector<RegexAlternative>> ParseRegex(std::string_view text, RegexDialect dialect);

// The parts of a regular expression that grammars have too. `text` begins where the part does; what was read
// is taken off it. Errors have no place: it is where `text` then begins.
absl::StatusOr<CodePointSet> TakeCharacterClass(std::string_view& text, RegexDialect dialect);  // after '['
// {m}, {m,} or {m,n} without the opening brace.
struct RepeatCount {
  int64_t min = 0, max = 0;  // kUnbounded
};
absl::StatusOr<RepeatCount> TakeRepeatCount(std::string_view& text);

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_REGEX_H_
