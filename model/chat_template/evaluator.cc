#include "model/chat_template/evaluator.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/runtime.h"

namespace efla::jinja {
namespace {

// Expressions, statements and macros inside one another; each level takes some hundreds of bytes of stack.
constexpr int kMaxDepth = 500;
constexpr int kMaxMacroDepth = 50;
constexpr size_t kMaxRange = 100'000;

// The variables of one part of a template; those of the parts around it are seen through it.
struct Scope {
  const Scope* outer = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables;

  void Set(std::string_view name, Value value) {
    for (auto& [known, held] : variables) {
      if (known == name) {
        held = std::move(value);
        return;
      }
    }
    variables.emplace_back(name, std::move(value));
  }
  const Value* Find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->outer) {
      for (const auto& [known, value] : scope->variables) {
        if (known == name) return &value;
      }
    }
    return nullptr;
  }
};

enum class Flow { kOn, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(const Variables& variables, const RenderOptions& options) : run_(options) {
    globals_.Set("range", Value(Builtin::kRange));
    globals_.Set("namespace", Value(Builtin::kNamespace));
    globals_.Set("dict", Value(Builtin::kDict));
    globals_.Set("raise_exception", Value(Builtin::kRaiseException));
    globals_.Set("strftime_now", Value(Builtin::kStrftimeNow));
    for (const auto& [name, value] : variables) globals_.Set(name, value);
    top_.outer = &globals_;
  }

  absl::StatusOr<Text> Run(const Statements& body) {
    Execute(body, top_);
    if (!run_.ok()) return run_.error();
    return std::move(output_);
  }

 private:
  // One level of depth for as long as it lives; false: too deep.
  class Level {
   public:
    explicit Level(Evaluator& evaluator) : evaluator_(evaluator) { ++evaluator_.depth_; }
    ~Level() { --evaluator_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    bool ok() const {
      if (evaluator_.depth_ <= kMaxDepth) return true;
      evaluator_.run_.Fail(absl::StrFormat("more than %d levels of depth", kMaxDepth));
      return false;
    }

   private:
    Evaluator& evaluator_;
  };

  // --- statements

  Flow Execute(const Statements& body, Scope& scope) {
    const Level level(*this);
    if (!level.ok()) return Flow::kOn;
    for (const auto& statement : body) {
      run_.set_line(statement->line);
      if (!run_.Charge()) return Flow::kOn;
      const Flow flow = ExecuteOne(*statement, scope);
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Flow ExecuteOne(const Statement& statement, Scope& scope) {
    switch (statement.kind) {
      case StatementKind::kText:
        Write(*statement.text.text());
        break;
      case StatementKind::kPrint:
        Print(statement, scope);
        break;
      case StatementKind::kIf:
        for (const Branch& branch : statement.branches) {
          if (branch.condition == nullptr || run_.Truthy(Compute(*branch.condition, scope))) {
            return run_.ok() ? Execute(branch.body, scope) : Flow::kOn;
          }
        }
        break;
      case StatementKind::kFor:
        ExecuteFor(statement, scope);
        break;
      case StatementKind::kSet:
        Assign(statement.target, Compute(*statement.value, scope), scope);
        break;
      case StatementKind::kSetBlock:
        ExecuteSetBlock(statement, scope);
        break;
      case StatementKind::kMacro:
        scope.Set(statement.name, Value(&statement));
        break;
      case StatementKind::kScope: {
        Scope inner{.outer = &scope, .variables = {}};
        Execute(statement.body, inner);
        break;
      }
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kOn;
  }

  void Write(const Text& text) {
    output_.Append(text);
    if (output_.size() > run_.options().max_output_bytes) {
      run_.FailBound(absl::StrFormat("the output has more than %d bytes", run_.options().max_output_bytes));
    }
  }

  void Print(const Statement& statement, Scope& scope) {
    const Value value = Compute(*statement.value, scope);
    run_.set_line(statement.line);
    if (run_.ok()) Write(run_.Str(value));
  }

  void ExecuteFor(const Statement& statement, Scope& scope) {
    std::vector<Value> items = run_.Items(Compute(*statement.value, scope));
    if (statement.condition != nullptr) {
      std::vector<Value> kept;
      for (Value& item : items) {
        if (!run_.Charge()) return;
        Scope inner{.outer = &scope, .variables = {}};
        Assign(statement.target, item, inner);
        if (run_.Truthy(Compute(*statement.condition, inner))) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (!run_.ok()) return;
    if (items.empty()) {
      Scope inner{.outer = &scope, .variables = {}};
      Execute(statement.otherwise, inner);
      return;
    }
    const Value all = run_.Make(std::move(items));
    if (!run_.ok()) return;
    const auto shared = *all.As<Value::SequencePointer>();
    auto loop = std::make_shared<Loop>();
    loop->items = shared;
    for (; loop->index < shared->items.size() && run_.Charge(); ++loop->index) {
      Scope inner{.outer = &scope, .variables = {}};
      inner.Set("loop", Value(loop));
      Assign(statement.target, shared->items[loop->index], inner);
      if (Execute(statement.body, inner) == Flow::kBreak) break;
    }
  }

  void ExecuteSetBlock(const Statement& statement, Scope& scope) {
    Scope inner{.outer = &scope, .variables = {}};
    Value value = run_.Make(Captured(statement.body, inner));
    if (statement.value != nullptr) {
      Scope with_block{.outer = &scope, .variables = {}};
      with_block.Set(kBlockName, value);
      value = Compute(*statement.value, with_block);
    }
    Assign(statement.target, std::move(value), scope);
  }

  Text Captured(const Statements& body, Scope& scope) {
    Text outer = std::exchange(output_, Text());
    Execute(body, scope);
    return std::exchange(output_, std::move(outer));
  }

  void Assign(const Target& target, Value value, Scope& scope) {
    if (!run_.ok()) return;
    if (!target.parts.empty()) {
      const std::vector<Value> items = run_.Items(value);
      if (run_.ok() && items.size() != target.parts.size()) {
        run_.Fail(absl::StrFormat("%d values are assigned to %d names", items.size(), target.parts.size()));
      }
      for (size_t i = 0; i < target.parts.size() && run_.ok(); ++i) Assign(target.parts[i], items[i], scope);
    } else if (!target.attribute.empty()) {
      const Value* const found = scope.Find(target.name);
      const auto* const space = found == nullptr ? nullptr : found->As<Namespace*>();
      if (space == nullptr) {
        run_.Fail(absl::StrFormat("%s is no namespace: its attributes cannot be set", target.name));
      } else {
        (*space)->attributes[target.attribute] = std::move(value);
      }
    } else {
      scope.Set(target.name, std::move(value));
    }
  }

  // --- expressions

  Value Compute(const Expression& node, const Scope& scope) {
    const Level level(*this);
    if (!level.ok() || !run_.Charge()) return Value();
    const int outer_line = run_.line();
    run_.set_line(node.line);
    Value value = ComputeNode(node, scope);
    run_.set_line(outer_line);
    return value;
  }
  Value Child(const Expression& node, size_t i, const Scope& scope) {
    return Compute(*node.children[i], scope);
  }
  // Undefined where there is no such child.
  Value MaybeChild(const Expression& node, size_t i, const Scope& scope) {
    return node.children[i] == nullptr ? Value() : Child(node, i, scope);
  }

  Value ComputeNode(const Expression& node, const Scope& scope) {
    switch (node.kind) {
      case ExpressionKind::kConstant:
        return node.constant;
      case ExpressionKind::kName: {
        const Value* const found = scope.Find(node.name);
        return found != nullptr ? *found
                                : Value::OfUndefined(absl::StrFormat("\"%s\" is undefined", node.name));
      }
      case ExpressionKind::kList:
        return run_.Make(Children(node, 0, scope));
      case ExpressionKind::kTuple:
        return run_.Make(Children(node, 0, scope), Sequence::Form::kTuple);
      case ExpressionKind::kDict:
        return ComputeDict(node, scope);
      case ExpressionKind::kAttribute:
        return run_.Attribute(Child(node, 0, scope), node.name);
      case ExpressionKind::kItem: {
        const Value object = Child(node, 0, scope);
        return run_.Item(object, Child(node, 1, scope));
      }
      case ExpressionKind::kSlice: {
        const Value object = Child(node, 0, scope), start = MaybeChild(node, 1, scope);
        const Value stop = MaybeChild(node, 2, scope);
        return run_.Slice(object, start, stop, MaybeChild(node, 3, scope));
      }
      case ExpressionKind::kNegate:
        return run_.Negate(Child(node, 0, scope));
      case ExpressionKind::kPlus:
        return run_.Plus(Child(node, 0, scope));
      case ExpressionKind::kNot:
        return Value(!run_.Truthy(Child(node, 0, scope)));
      case ExpressionKind::kAnd: {
        Value left = Child(node, 0, scope);
        return run_.Truthy(left) ? Child(node, 1, scope) : left;
      }
      case ExpressionKind::kOr: {
        Value left = Child(node, 0, scope);
        return run_.Truthy(left) ? left : Child(node, 1, scope);
      }
      case ExpressionKind::kBinary: {
        const Value left = Child(node, 0, scope);
        return run_.Binary(node.name, left, Child(node, 1, scope));
      }
      case ExpressionKind::kConcat: {
        Text text;
        for (const Value& part : Children(node, 0, scope)) text.Append(run_.Str(part));
        return run_.Make(std::move(text));
      }
      case ExpressionKind::kCompare:
        return ComputeComparison(node, scope);
      case ExpressionKind::kCondition: {
        if (run_.Truthy(Child(node, 0, scope))) return Child(node, 1, scope);
        if (node.children[2] != nullptr) return Child(node, 2, scope);
        return Value::OfUndefined("an if without else has no value");
      }
      case ExpressionKind::kOperation:
        return ComputeOperation(node, scope);
      case ExpressionKind::kCall:
        return ComputeCall(node, scope);
      case ExpressionKind::kCycle:
        return ComputeCycle(node, scope);
    }
    return Value();
  }

  std::vector<Value> Children(const Expression& node, size_t from, const Scope& scope) {
    std::vector<Value> values;
    values.reserve(node.children.size() - from);
    for (size_t i = from; i < node.children.size(); ++i) values.push_back(Child(node, i, scope));
    return values;
  }

  Value ComputeDict(const Expression& node, const Scope& scope) {
    std::vector<std::pair<Value, Value>> entries;
    for (size_t i = 0; i < node.children.size() && run_.ok(); i += 2) {
      Value key = Child(node, i, scope), value = Child(node, i + 1, scope);
      if (key.sequence() != nullptr || key.dict() != nullptr) {
        return run_.Fail(absl::StrFormat("a %s as a key of a dict is not supported", key.type_name()));
      }
      const auto same = std::find_if(entries.begin(), entries.end(),
                                     [&](const auto& entry) { return run_.Equal(entry.first, key); });
      if (same != entries.end()) {
        same->second = std::move(value);
      } else {
        entries.emplace_back(std::move(key), std::move(value));
      }
    }
    return run_.Make(std::move(entries));
  }

  Value ComputeComparison(const Expression& node, const Scope& scope) {
    Value left = Child(node, 0, scope);
    for (size_t i = 0; i < node.words.size() && run_.ok(); ++i) {
      Value right = Child(node, i + 1, scope);
      if (!run_.ok() || !Holds(node.words[i], left, right)) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  bool Holds(std::string_view word, const Value& left, const Value& right) {
    if (word == "==") return run_.Equal(left, right);
    if (word == "!=") return !run_.Equal(left, right);
    if (word == "in") return run_.Contains(right, left);
    if (word == "not in") return !run_.Contains(right, left);
    const int order = run_.Compare(left, right);
    if (word == "<") return order < 0;
    if (word == "<=") return order <= 0;
    return word == ">" ? order > 0 : order >= 0;
  }

  Value ComputeOperation(const Expression& node, const Scope& scope) {
    const Value subject = Child(node, 0, scope);
    std::vector<std::optional<Value>> arguments(node.children.size() - 1);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (node.children[i + 1] != nullptr) arguments[i] = Child(node, i + 1, scope);
    }
    return run_.ok() ? node.operation->apply(run_, subject, arguments) : Value();
  }

  Value ComputeCycle(const Expression& node, const Scope& scope) {
    const Value subject = Child(node, 0, scope);
    const auto* const loop = subject.As<Value::LoopPointer>();
    if (loop == nullptr)
      return run_.Fail(absl::StrFormat("a %s has no method \"cycle\"", subject.type_name()));
    const std::vector<Value> values = Children(node, 1, scope);
    return values.empty() ? run_.Fail("cycle() has no values") : values[(*loop)->index % values.size()];
  }

  // --- calls

  Value ComputeCall(const Expression& node, const Scope& scope) {
    const Value callee = Child(node, 0, scope);
    std::vector<Value> positional = Children(node, 1, scope);
    std::vector<std::pair<std::string, Value>> named;
    const size_t first_named = positional.size() - node.words.size();
    for (size_t i = 0; i < node.words.size(); ++i) {
      named.emplace_back(node.words[i], std::move(positional[first_named + i]));
    }
    positional.resize(first_named);
    if (!run_.ok()) return Value();
    const std::string& name = node.children[0]->name;
    if (callee.is_undefined()) return run_.FailUndefined(callee);
    if (const auto* macro = callee.As<Value::Macro>()) return CallMacro(**macro, positional, named);
    if (const auto* builtin = callee.As<Builtin>()) return CallBuiltin(*builtin, name, positional, named);
    return run_.Fail(absl::StrFormat("\"%s\" is a %s and cannot be called", name, callee.type_name()));
  }

  Value CallMacro(const Statement& macro, std::vector<Value>& positional,
                  std::vector<std::pair<std::string, Value>>& named) {
    const auto& parameters = macro.parameters;
    if (positional.size() > parameters.size()) {
      return run_.Fail(absl::StrFormat("the macro \"%s\" takes %d arguments and is called with %d",
                                       macro.name, parameters.size(), positional.size()));
    }
    std::vector<std::optional<Value>> given(parameters.size());
    for (size_t i = 0; i < positional.size(); ++i) given[i] = std::move(positional[i]);
    for (auto& [name, value] : named) {
      const auto found = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const Parameter& parameter) { return parameter.name == name; });
      if (found == parameters.end() || given[static_cast<size_t>(found - parameters.begin())]) {
        return run_.Fail(absl::StrFormat("the macro \"%s\" %s \"%s\"", macro.name,
                                         found == parameters.end() ? "has no parameter" : "is given twice",
                                         name));
      }
      given[static_cast<size_t>(found - parameters.begin())] = std::move(value);
    }
    if (++macro_depth_ > kMaxMacroDepth) {
      run_.Fail(absl::StrFormat("more than %d macros inside one another", kMaxMacroDepth));
    }
    Scope scope{.outer = &top_, .variables = {}};
    for (size_t i = 0; i < parameters.size() && run_.ok(); ++i) {
      Value value =
          given[i] ? *std::move(given[i])
          : parameters[i].fallback != nullptr
              ? Compute(*parameters[i].fallback, scope)
              : Value::OfUndefined(absl::StrFormat("the parameter \"%s\" was not given", parameters[i].name));
      scope.Set(parameters[i].name, std::move(value));
    }
    Value result = run_.ok() ? run_.Make(Captured(macro.body, scope)) : Value();
    --macro_depth_;
    return result;
  }

  Value CallBuiltin(Builtin builtin, const std::string& name, std::vector<Value>& positional,
                    std::vector<std::pair<std::string, Value>>& named) {
    const bool takes_named = builtin == Builtin::kNamespace || builtin == Builtin::kDict;
    if (!named.empty() && !takes_named) {
      return run_.Fail(absl::StrFormat("the function \"%s\" has no parameter \"%s\"", name, named[0].first));
    }
    const auto needs = [&](size_t low, size_t high) {
      if (positional.size() >= low && positional.size() <= high) return true;
      run_.Fail(absl::StrFormat("the function \"%s\" takes %d to %d arguments and is called with %d", name,
                                low, high, positional.size()));
      return false;
    };
    switch (builtin) {
      case Builtin::kRange:
        return needs(1, 3) ? Range(positional) : Value();
      case Builtin::kNamespace:
      case Builtin::kDict:
        return needs(0, 1) ? Entries(builtin, positional, named) : Value();
      case Builtin::kRaiseException:
        return needs(1, 1) ? run_.Refuse(run_.Str(positional[0]).bytes()) : Value();
      case Builtin::kStrftimeNow:
        return needs(1, 1) ? Now(positional[0]) : Value();
      case Builtin::kMethod:
        break;
    }
    return run_.Fail(absl::StrFormat("calling \"%s\" by another name is not supported", name));
  }

  Value Range(const std::vector<Value>& arguments) {
    std::array<int64_t, 3> bounds = {0, 0, 1};
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto bound = Runtime::AsInteger(arguments[i]);
      if (!bound) return run_.Fail(absl::StrFormat("a bound of range() is a %s", arguments[i].type_name()));
      bounds[arguments.size() == 1 ? 1 : i] = *bound;
    }
    const auto [start, stop, step] = bounds;
    if (step == 0) return run_.Fail("the step of range() is 0");
    std::vector<Value> numbers;
    for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
      if (numbers.size() == kMaxRange)
        return run_.Fail(absl::StrFormat("range() of more than %d numbers", kMaxRange));
      numbers.push_back(Value(i));
      if (__builtin_add_overflow(i, step, &i)) break;
    }
    return run_.Make(std::move(numbers), Sequence::Form::kRange);
  }

  Value Entries(Builtin builtin, const std::vector<Value>& positional,
                std::vector<std::pair<std::string, Value>>& named) {
    std::vector<std::pair<Value, Value>> entries;
    if (!positional.empty()) {
      if (positional[0].dict() == nullptr) {
        return run_.Fail(
            absl::StrFormat("dict() and namespace() of a %s are not supported", positional[0].type_name()));
      }
      entries = positional[0].dict()->entries;
    }
    for (auto& [name, value] : named) {
      const auto same = std::find_if(entries.begin(), entries.end(), [&, &key = name](const auto& entry) {
        return entry.first.text() != nullptr && entry.first.text()->bytes() == key;
      });
      if (same != entries.end()) {
        same->second = std::move(value);
      } else {
        entries.emplace_back(Value::Markup(name), std::move(value));
      }
    }
    if (builtin == Builtin::kDict) return run_.Make(std::move(entries));
    Namespace space;
    for (auto& [key, value] : entries) {
      if (key.text() != nullptr) space.attributes.emplace(key.text()->bytes(), std::move(value));
    }
    return run_.MakeNamespace(std::move(space));
  }

  Value Now(const Value& format) {
    if (format.text() == nullptr) return run_.Fail("the format of strftime_now() is no str");
    const std::time_t seconds = std::chrono::system_clock::to_time_t(run_.options().now);
    std::tm local{};
    localtime_r(&seconds, &local);
    std::array<char, 1024> buffer;
    // A format of its own end mark: what formats to nothing is told from what does not fit.
    const std::string with_mark = format.text()->bytes() + "$";
    const size_t size = std::strftime(buffer.data(), buffer.size(), with_mark.c_str(), &local);
    if (size == 0) return run_.Fail("strftime_now() of more than 1000 bytes");
    return run_.Make(Text::MadeOf(*format.text(), std::string(buffer.data(), size - 1)));
  }

  Runtime run_;
  Scope globals_, top_;
  Text output_;
  int depth_ = 0, macro_depth_ = 0;
};

}  // namespace

absl::StatusOr<Text> Evaluate(const Statements& body, const Variables& variables,
                              const RenderOptions& options) {
  return Evaluator(variables, options).Run(body);
}

}  // namespace efla::jinja
