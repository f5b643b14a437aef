// A parsed template. Expressions are trees of one node type, statements of another.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_AST_H_
#define EFLA_MODEL_CHAT_TEMPLATE_AST_H_

#include <memory>
#include <string>
#include <vector>

#include "model/chat_template/operations.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

// What each kind holds in `children`, in this order; "maybe" may be null.
enum class ExpressionKind {
  kConstant,   // `constant`
  kName,       // `name`
  kList,       // items
  kTuple,      // items
  kDict,       // key, value, key, value
  kAttribute,  // object; `name`
  kItem,       // object, key
  kSlice,      // object, maybe start, maybe stop, maybe step
  kNegate,     // operand
  kPlus,       // operand
  kNot,        // operand
  kAnd,        // left, right
  kOr,         // left, right
  kBinary,     // left, right; `name` is the operator
  kConcat,     // parts
  kCompare,    // n + 1 operands; `words` are the n operators
  kCondition,  // condition, then, maybe else
  kOperation,  // subject, maybe arguments; `operation` is a filter, test or method
  kCall,       // callee, positional arguments, named ones; `words` are the names
  kCycle,      // loop, values
};

struct Expression {
  ExpressionKind kind = ExpressionKind::kConstant;
  int line = 0;
  std::vector<std::unique_ptr<Expression>> children;
  std::string name;
  std::vector<std::string> words;
  Value constant;
  const Operation* operation = nullptr;
};

// What is assigned to: a name, an attribute of a namespace, or a tuple of targets.
struct Target {
  std::string name, attribute;
  std::vector<Target> parts;  // not empty: a tuple
};

enum class StatementKind {
  kText,      // `text`
  kPrint,     // `value`
  kIf,        // `branches`
  kFor,       // for `target` in `value` if `condition`: `body`; `otherwise` where there was no item
  kSet,       // `target` = `value`
  kSetBlock,  // `target` = what `body` writes, through `value`, filters of kBlockName, where given
  kMacro,     // `name`, `parameters`, `body`
  kScope,     // `body`
  kBreak,
  kContinue,
};

struct Statement;
using Statements = std::vector<std::unique_ptr<Statement>>;

struct Branch {
  std::unique_ptr<Expression> condition;  // null: else
  Statements body;
};

struct Parameter {
  std::string name;
  std::unique_ptr<Expression> fallback;  // null: undefined
};

struct Statement {
  StatementKind kind = StatementKind::kText;
  int line = 0;
  Value text;
  std::unique_ptr<Expression> value, condition;
  Target target;
  Statements body, otherwise;
  std::vector<Branch> branches;
  std::string name;
  std::vector<Parameter> parameters;
};

// The name under which a kSetBlock's filters find what they are applied to: no template can write it.
inline constexpr char kBlockName[] = "(block)";

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_AST_H_
