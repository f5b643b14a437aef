// Expressions for parts of JSON texts.
#ifndef EFLA_MODEL_CONSTRAINT_JSON_TEXT_H_
#define EFLA_MODEL_CONSTRAINT_JSON_TEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/constraint/expression.h"

namespace efla {

inline constexpr int kMaxJsonSpaces = 8;  // blanks and line ends in a row
inline constexpr int kMaxJsonDepth = 64;  // of objects and arrays in each other
inline constexpr int kMaxIntegerDigits = 18;
inline constexpr int kMaxFractionDigits = 17;
// Where a number has bounds it has fewer digits in all than a double tells apart, so that comparing as
// doubles and as decimals is the same.
inline constexpr int64_t kMaxNumberBound = 999'999'999;
inline constexpr int kMaxBoundedFractionDigits = 6;

// Rules that several values share; each is made when it is first asked for.
class JsonRules {
 public:
  explicit JsonRules(Grammar& grammar) : grammar_(grammar) {}

  ExpressionPtr Value();
  ExpressionPtr Object();
  ExpressionPtr Array();
  ExpressionPtr String();
  ExpressionPtr Integer();
  ExpressionPtr Number();

 private:
  int RuleFor(std::optional<int>& rule, const char* name, ExpressionPtr (JsonRules::*make)());
  ExpressionPtr MakeValue();
  ExpressionPtr MakeObject();
  ExpressionPtr MakeArray();
  ExpressionPtr MakeString();
  ExpressionPtr MakeInteger();
  ExpressionPtr MakeNumber();

  Grammar& grammar_;
  std::optional<int> value_, object_, array_, string_, integer_, number_;
};

ExpressionPtr JsonSpace();      // at most kMaxJsonSpaces
ExpressionPtr JsonSeparator();  // a comma, and space after it
// Space, a colon and space between `name` and `value`, space after both. `name` without its first quote where
// that is the members' opening.
ExpressionPtr JsonMember(ExpressionPtr name, ExpressionPtr value);
// `members` is a kMembers of JsonMembers with JsonSeparator, and maybe the quote as their opening.
ExpressionPtr JsonObjectOf(ExpressionPtr members);
// `prefix` one by one, then `items`, null for no more; together min to max of them.
ExpressionPtr JsonArrayOf(const std::vector<ExpressionPtr>& prefix, ExpressionPtr items, int64_t min,
                          int64_t max);

// Strings of min to max characters. Characters are not written as numbers (\u00e9).
ExpressionPtr JsonStringOfLength(int64_t min, int64_t max);
// Strings whose text `text` matches, written with as few escapes as can be. No rules and literals in it.
ExpressionPtr JsonStringOf(const ExpressionPtr& text);
// Strings written without escapes that are none of `names`.
ExpressionPtr JsonStringExcept(std::vector<std::string> names);

// Integers from min to max, which have at most kMaxIntegerDigits digits; nullopt: down or up to that many.
ExpressionPtr JsonIntegerBetween(std::optional<int64_t> min, std::optional<int64_t> max);
// Decimal numbers; bounds within +-kMaxNumberBound. Neither bound: Number().
struct NumberBounds {
  std::optional<int64_t> min, max;
  bool min_excluded = false, max_excluded = false;
};
ExpressionPtr JsonNumberBetween(const NumberBounds& bounds);

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_JSON_TEXT_H_
