// What all kinds of constraints become first: rules of expressions over characters.
#ifndef EFLA_MODEL_CONSTRAINT_EXPRESSION_H_
#define EFLA_MODEL_CONSTRAINT_EXPRESSION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/constraint/code_points.h"

namespace efla {

struct Expression;
using ExpressionPtr = std::shared_ptr<const Expression>;  // parts may be shared

struct Expression {
  enum class Kind { kSet, kLiteral, kConcat, kAlternate, kRepeat, kLeading, kRule, kMembers };
  Kind kind = Kind::kConcat;
  CodePointSet set;                  // kSet: one character of it
  std::string literal;               // kLiteral: this text, valid UTF-8
  std::vector<ExpressionPtr> parts;  // kConcat, kAlternate, kLeading, kMembers: in order; kRepeat: one
  int64_t min = 0, max = 0;          // kRepeat; min of kLeading: that many of the parts, or more
  int rule = 0;                      // kRule
  // kMembers: parts in this order, any that is not required left out, each behind the text `opening`; then
  // any number of `extra`, unless null. Between all of them `separator`.
  std::vector<bool> required;
  std::string opening;
  ExpressionPtr separator, extra;
};

inline constexpr int64_t kUnbounded = -1;  // Expression::max

ExpressionPtr SetOf(CodePointSet set);
ExpressionPtr Range(char32_t first, char32_t last);
ExpressionPtr Literal(std::string text);
ExpressionPtr Concat(std::vector<ExpressionPtr> parts);
ExpressionPtr Alternate(std::vector<ExpressionPtr> parts);  // none: matches nothing
ExpressionPtr Repeat(ExpressionPtr part, int64_t min, int64_t max);
ExpressionPtr Leading(std::vector<ExpressionPtr> parts, int64_t min);
ExpressionPtr Optional(ExpressionPtr part);
ExpressionPtr RuleReference(int rule);
ExpressionPtr Nothing();  // not even the empty text
// Parts that are shared count wherever they stand.
size_t NumExpressions(const Expression& expression);

struct Grammar {
  struct Rule {
    std::string name;  // for messages
    ExpressionPtr body;
    int64_t line = 0;  // where it stands in the specification; 0: that has no lines
  };
  std::vector<Rule> rules;
  int root = 0;
  // How many rules may be open at once, apart from those whose end is the end of the one that they are in.
  int max_depth = 256;
  bool every_rule_must_end = false;  // a rule that can never be finished is an error, not left out

  int AddRule(std::string name, ExpressionPtr body = nullptr);
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_EXPRESSION_H_
