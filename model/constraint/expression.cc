#include "model/constraint/expression.h"

#include <utility>

namespace efla {

ExpressionPtr SetOf(CodePointSet set) {
  Expression expression;
  expression.kind = Expression::Kind::kSet;
  expression.set = std::move(set);
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Range(char32_t first, char32_t last) { return SetOf(CodePointSet({{first, last}})); }

ExpressionPtr Literal(std::string text) {
  Expression expression;
  expression.kind = Expression::Kind::kLiteral;
  expression.literal = std::move(text);
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Concat(std::vector<ExpressionPtr> parts) {
  if (parts.size() == 1) return parts.front();
  Expression expression;
  expression.kind = Expression::Kind::kConcat;
  expression.parts = std::move(parts);
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Alternate(std::vector<ExpressionPtr> parts) {
  if (parts.size() == 1) return parts.front();
  Expression expression;
  expression.kind = Expression::Kind::kAlternate;
  expression.parts = std::move(parts);
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Repeat(ExpressionPtr part, int64_t min, int64_t max) {
  Expression expression;
  expression.kind = Expression::Kind::kRepeat;
  expression.parts.push_back(std::move(part));
  expression.min = min;
  expression.max = max;
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Leading(std::vector<ExpressionPtr> parts, int64_t min) {
  Expression expression;
  expression.kind = Expression::Kind::kLeading;
  expression.parts = std::move(parts);
  expression.min = min;
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Optional(ExpressionPtr part) { return Repeat(std::move(part), 0, 1); }

ExpressionPtr RuleReference(int rule) {
  Expression expression;
  expression.kind = Expression::Kind::kRule;
  expression.rule = rule;
  return std::make_shared<const Expression>(std::move(expression));
}

ExpressionPtr Nothing() { return Alternate({}); }

size_t NumExpressions(const Expression& expression) {
  size_t count = 1;
  for (const ExpressionPtr& part : expression.parts) count += NumExpressions(*part);
  return count;
}

int Grammar::AddRule(std::string name, ExpressionPtr body) {
  rules.push_back({std::move(name), std::move(body), 0});
  return static_cast<int>(rules.size()) - 1;
}

}  // namespace efla
