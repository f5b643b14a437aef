#include "model/chat_template/parser.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/lexer.h"

namespace efla::jinja {
namespace {

// Bounds of what an evaluation has to descend into.
constexpr int kMaxNesting = 100;
constexpr int kMaxChain = 200;  // operators and postfixes, one after the other

using ExpressionPointer = std::unique_ptr<Expression>;
using StatementPointer = std::unique_ptr<Statement>;

// After the first error the rest of the words is the end, and what is returned does not matter.
class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  absl::StatusOr<Statements> Run() {
    Statements body = Body({});
    if (!error_.ok()) return error_;
    return body;
  }

 private:
  // --- words
  const Token& Now() const { return tokens_[at_]; }
  const Token& Following() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  bool Is(TokenKind kind) const { return Now().kind == kind; }
  bool IsOperator(std::string_view word) const { return Is(TokenKind::kOperator) && Now().text == word; }
  bool IsName(std::string_view word) const { return Is(TokenKind::kName) && Now().text == word; }
  Token Take() {
    Token token = Now();
    if (!Is(TokenKind::kEnd)) ++at_;
    return token;
  }
  bool Skip(bool matches) {
    if (matches) Take();
    return matches;
  }
  void FailAt(int line, std::string_view what) {
    if (error_.ok()) error_ = absl::InvalidArgumentError(absl::StrFormat("line %d: %s", line, what));
    at_ = tokens_.size() - 1;
  }
  void Expected(std::string_view what) {
    if (Is(TokenKind::kEnd)) return FailAt(Now().line, absl::StrFormat("%s is missing at the end", what));
    FailAt(Now().line, absl::StrFormat("\"%s\" stands where %s should", Now().text, what));
  }
  void ExpectOperator(std::string_view word) {
    if (!Skip(IsOperator(word))) Expected(absl::StrFormat("\"%s\"", word));
  }
  void ExpectName(std::string_view word) {
    if (!Skip(IsName(word))) Expected(absl::StrFormat("\"%s\"", word));
  }
  std::string ExpectAnyName(std::string_view what) {
    if (Is(TokenKind::kName)) return Take().text;
    Expected(what);
    return "";
  }
  void ExpectBlockEnd() {
    if (!Skip(Is(TokenKind::kBlockEnd))) Expected("the end of the tag");
  }

  // One level of nesting for as long as it lives.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) {
        parser_.FailAt(parser_.Now().line, absl::StrFormat("more than %d levels of nesting", kMaxNesting));
      }
    }
    ~Level() { --parser_.nesting_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& parser_;
  };

  // --- statements

  // Until a block begins with one of `ends`, whose name is the next word then.
  Statements Body(std::initializer_list<std::string_view> ends) {
    const Level level(*this);
    const int line = at_ > 0 ? tokens_[at_ - 1].line : 1;  // of the tag before
    Statements body;
    while (!Is(TokenKind::kEnd)) {
      if (Is(TokenKind::kData)) {
        auto text = Make(StatementKind::kText);
        text->text = Value::Markup(Take().text);
        body.push_back(std::move(text));
      } else if (Skip(Is(TokenKind::kVariableBegin))) {
        auto print = Make(StatementKind::kPrint);
        print->value = ExpressionOrTuple(/*with_condition=*/true);
        if (!Skip(Is(TokenKind::kVariableEnd))) Expected("\"}}\"");
        body.push_back(std::move(print));
      } else {
        Take();  // the beginning of a block
        if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return IsName(end); }))
          return body;
        body.push_back(Block());
      }
    }
    if (ends.size() > 0)
      FailAt(line, absl::StrFormat("there is no \"%s\" for what begins here", *(ends.end() - 1)));
    return body;
  }

  StatementPointer Make(StatementKind kind) const {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = Now().line;
    return statement;
  }

  StatementPointer Block() {
    const int line = Now().line;
    const std::string name = ExpectAnyName("the name of a statement");
    if (name == "if") return If();
    if (name == "for") return For();
    if (name == "set") return Set();
    if (name == "macro") return Macro();
    if (name == "break" || name == "continue") return Leave(name);
    if (name == "generation") {
      auto scope = Make(StatementKind::kScope);
      ExpectBlockEnd();
      const bool outer_loop = std::exchange(in_loop_, false);
      const bool outer_top = std::exchange(at_top_, false);
      scope->body = Body({"endgeneration"});
      in_loop_ = outer_loop;
      at_top_ = outer_top;
      Take();
      ExpectBlockEnd();
      return scope;
    }
    FailAt(line, absl::StrFormat("the statement \"%s\" is not supported", name));
    return Make(StatementKind::kText);
  }

  StatementPointer If() {
    auto statement = Make(StatementKind::kIf);
    for (bool more = true; more;) {
      Branch branch;
      branch.condition = ExpressionOrTuple(/*with_condition=*/false);
      ExpectBlockEnd();
      branch.body = Body({"elif", "else", "endif"});
      statement->branches.push_back(std::move(branch));
      more = Take().text == "elif";
    }
    if (tokens_[at_ - 1].text == "else") {
      Branch branch;
      ExpectBlockEnd();
      branch.body = Body({"endif"});
      statement->branches.push_back(std::move(branch));
      Take();
    }
    ExpectBlockEnd();
    return statement;
  }

  StatementPointer For() {
    auto statement = Make(StatementKind::kFor);
    statement->target = TargetTuple();
    if (!statement->target.attribute.empty()) FailAt(statement->line, "a for cannot assign to an attribute");
    ExpectName("in");
    statement->value = ExpressionOrTuple(/*with_condition=*/false);
    if (Skip(IsName("if"))) statement->condition = Condition();
    if (IsName("recursive")) FailAt(Now().line, "a recursive for is not supported");
    ExpectBlockEnd();
    const bool outer_loop = std::exchange(in_loop_, true);
    const bool outer_top = std::exchange(at_top_, false);
    statement->body = Body({"else", "endfor"});
    in_loop_ = outer_loop;
    if (Take().text == "else") {
      ExpectBlockEnd();
      statement->otherwise = Body({"endfor"});
      Take();
    }
    at_top_ = outer_top;
    ExpectBlockEnd();
    return statement;
  }

  StatementPointer Set() {
    auto statement = Make(StatementKind::kSet);
    statement->target = TargetTuple();
    if (Skip(IsOperator("="))) {
      statement->value = ExpressionOrTuple(/*with_condition=*/true);
      ExpectBlockEnd();
      return statement;
    }
    statement->kind = StatementKind::kSetBlock;
    if (IsOperator("|")) {
      ExpressionPointer block = Node(ExpressionKind::kName);
      block->name = kBlockName;
      int chain = 0;
      while (IsOperator("|")) block = Filter(std::move(block), chain);
      statement->value = std::move(block);
    }
    ExpectBlockEnd();
    const bool outer_loop = std::exchange(in_loop_, false);
    const bool outer_top = std::exchange(at_top_, false);
    statement->body = Body({"endset"});
    in_loop_ = outer_loop;
    at_top_ = outer_top;
    Take();
    ExpectBlockEnd();
    return statement;
  }

  StatementPointer Macro() {
    auto statement = Make(StatementKind::kMacro);
    if (!at_top_) FailAt(statement->line, "a macro inside a for, a macro or a set is not supported");
    statement->name = ExpectAnyName("the macro's name");
    ExpectOperator("(");
    while (!IsOperator(")") && error_.ok()) {
      if (!statement->parameters.empty()) {
        ExpectOperator(",");
        if (IsOperator(")")) break;
      }
      Parameter parameter;
      parameter.name = ExpectAnyName("a parameter's name");
      if (Skip(IsOperator("="))) {
        parameter.fallback = Condition();
      } else if (!statement->parameters.empty() && statement->parameters.back().fallback) {
        FailAt(Now().line,
               absl::StrFormat("the parameter \"%s\" needs a default, as the one before it has one",
                               parameter.name));
      }
      statement->parameters.push_back(std::move(parameter));
    }
    ExpectOperator(")");
    ExpectBlockEnd();
    const bool outer_loop = std::exchange(in_loop_, false);
    at_top_ = false;
    in_macro_ = true;
    statement->body = Body({"endmacro"});
    in_macro_ = false;
    at_top_ = true;
    in_loop_ = outer_loop;
    Take();
    if (Is(TokenKind::kName)) Take();  // the macro's name may be repeated
    ExpectBlockEnd();
    return statement;
  }

  StatementPointer Leave(const std::string& name) {
    auto statement = Make(name == "break" ? StatementKind::kBreak : StatementKind::kContinue);
    if (!in_loop_) FailAt(statement->line, absl::StrFormat("\"%s\" stands outside a for", name));
    ExpectBlockEnd();
    return statement;
  }

  // `a`, `a, b`, `(a, b)`, `a.b`.
  Target TargetTuple() {
    Target first = OneTarget();
    if (!IsOperator(",")) return first;
    Target tuple;
    tuple.parts.push_back(std::move(first));
    while (Skip(IsOperator(",")) && !IsOperator("=") && !IsName("in")) tuple.parts.push_back(OneTarget());
    return tuple;
  }

  Target OneTarget() {
    const Level level(*this);
    Target target;
    if (!error_.ok()) return target;
    if (Skip(IsOperator("("))) {
      target = TargetTuple();
      ExpectOperator(")");
      return target;
    }
    target.name = ExpectAnyName("a name");
    if (IsConstantName(target.name))
      FailAt(Now().line, absl::StrFormat("%s cannot be assigned to", target.name));
    if (Skip(IsOperator("."))) target.attribute = ExpectAnyName("an attribute's name");
    return target;
  }

  static bool IsConstantName(std::string_view name) {
    constexpr std::array<std::string_view, 6> kConstants = {"true", "false", "none", "True", "False", "None"};
    return std::find(kConstants.begin(), kConstants.end(), name) != kConstants.end();
  }

  // --- expressions, from the loosest to the tightest

  ExpressionPointer Node(ExpressionKind kind) const {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->line = Now().line;
    return node;
  }
  template <typename... Children>
  ExpressionPointer Node(ExpressionKind kind, int line, Children... children) const {
    ExpressionPointer node = Node(kind);
    node->line = line;
    (node->children.push_back(std::move(children)), ...);
    return node;
  }
  // Counts what is wrapped around an expression on one level.
  void Count(int& chain) {
    if (++chain > kMaxChain)
      FailAt(Now().line, absl::StrFormat("more than %d operators in a row", kMaxChain));
  }

  bool AtTupleEnd() const {
    return Is(TokenKind::kVariableEnd) || Is(TokenKind::kBlockEnd) || Is(TokenKind::kEnd) ||
           IsOperator(")") || IsName("recursive");
  }

  // Commas make a tuple.
  ExpressionPointer ExpressionOrTuple(bool with_condition) {
    const int line = Now().line;
    ExpressionPointer first = with_condition ? Condition() : Or();
    if (!IsOperator(",")) return first;
    ExpressionPointer tuple = Node(ExpressionKind::kTuple, line, std::move(first));
    while (Skip(IsOperator(",")) && !AtTupleEnd())
      tuple->children.push_back(with_condition ? Condition() : Or());
    return tuple;
  }

  ExpressionPointer Condition() {
    const Level level(*this);
    ExpressionPointer value = Or();
    for (int chain = 0; IsName("if"); Count(chain)) {
      const int line = Take().line;
      ExpressionPointer condition = Or();
      ExpressionPointer otherwise;
      if (Skip(IsName("else"))) otherwise = Condition();
      value = Node(ExpressionKind::kCondition, line, std::move(condition), std::move(value),
                   std::move(otherwise));
    }
    return value;
  }

  ExpressionPointer Or() {
    ExpressionPointer left = And();
    for (int chain = 0; IsName("or"); Count(chain)) {
      const int line = Take().line;
      left = Node(ExpressionKind::kOr, line, std::move(left), And());
    }
    return left;
  }

  ExpressionPointer And() {
    ExpressionPointer left = Not();
    for (int chain = 0; IsName("and"); Count(chain)) {
      const int line = Take().line;
      left = Node(ExpressionKind::kAnd, line, std::move(left), Not());
    }
    return left;
  }

  ExpressionPointer Not() {
    if (!IsName("not")) return Compare();
    const Level level(*this);
    const int line = Take().line;
    return Node(ExpressionKind::kNot, line, Not());
  }

  ExpressionPointer Compare() {
    ExpressionPointer first = Sum();
    const int line = Now().line;
    std::vector<ExpressionPointer> operands;
    std::vector<std::string> words;
    for (int chain = 0;; Count(chain)) {
      if (IsOperator("==") || IsOperator("!=") || IsOperator("<") || IsOperator("<=") || IsOperator(">") ||
          IsOperator(">=") || IsName("in")) {
        words.push_back(Take().text);
      } else if (IsName("not") && Following().kind == TokenKind::kName && Following().text == "in") {
        Take();
        Take();
        words.push_back("not in");
      } else {
        break;
      }
      operands.push_back(Sum());
    }
    if (words.empty()) return first;
    ExpressionPointer node = Node(ExpressionKind::kCompare, line, std::move(first));
    for (ExpressionPointer& operand : operands) node->children.push_back(std::move(operand));
    node->words = std::move(words);
    return node;
  }

  ExpressionPointer Sum() {
    ExpressionPointer left = Concat();
    for (int chain = 0; IsOperator("+") || IsOperator("-"); Count(chain)) {
      const Token word = Take();
      left = Node(ExpressionKind::kBinary, word.line, std::move(left), Concat());
      left->name = word.text;
    }
    return left;
  }

  ExpressionPointer Concat() {
    ExpressionPointer first = Product();
    if (!IsOperator("~")) return first;
    ExpressionPointer node = Node(ExpressionKind::kConcat, Now().line, std::move(first));
    while (Skip(IsOperator("~"))) node->children.push_back(Product());
    return node;
  }

  ExpressionPointer Product() {
    ExpressionPointer left = Power();
    for (int chain = 0; IsOperator("*") || IsOperator("/") || IsOperator("//") || IsOperator("%");
         Count(chain)) {
      const Token word = Take();
      if (word.text == "%" && left && left->kind == ExpressionKind::kConstant &&
          left->constant.text() != nullptr) {
        FailAt(word.line, "formatting a string with % is not supported");
      }
      left = Node(ExpressionKind::kBinary, word.line, std::move(left), Power());
      left->name = word.text;
    }
    return left;
  }

  ExpressionPointer Power() {
    ExpressionPointer left = Unary(/*with_filters=*/true);
    for (int chain = 0; IsOperator("**"); Count(chain)) {
      const Token word = Take();
      left = Node(ExpressionKind::kBinary, word.line, std::move(left), Unary(true));
      left->name = word.text;
    }
    return left;
  }

  // Filters and tests are applied to the signed value: -1|abs is 1.
  ExpressionPointer Unary(bool with_filters) {
    const Level level(*this);
    ExpressionPointer node;
    if (IsOperator("-") || IsOperator("+")) {
      const Token sign = Take();
      node =
          Node(sign.text == "-" ? ExpressionKind::kNegate : ExpressionKind::kPlus, sign.line, Unary(false));
    } else {
      node = Primary();
    }
    int chain = 0;
    node = Postfix(std::move(node), chain);
    while (with_filters) {
      if (IsOperator("|")) {
        node = Filter(std::move(node), chain);
      } else if (IsName("is")) {
        node = Test(std::move(node));
        Count(chain);
      } else if (IsOperator("(")) {
        node = Call(std::move(node));
        Count(chain);
      } else {
        break;
      }
    }
    return node;
  }

  ExpressionPointer Primary() {
    ExpressionPointer node = Node(ExpressionKind::kConstant);
    switch (Now().kind) {
      case TokenKind::kName: {
        const std::string name = Take().text;
        if (name == "true" || name == "True") {
          node->constant = Value(true);
        } else if (name == "false" || name == "False") {
          node->constant = Value(false);
        } else if (name == "none" || name == "None") {
          node->constant = Value::OfNone();
        } else {
          CheckName(name, node->line);
          node->kind = ExpressionKind::kName;
          node->name = name;
        }
        return node;
      }
      case TokenKind::kString: {
        std::string text;
        while (Is(TokenKind::kString)) text += Take().text;
        node->constant = Value::Markup(text);
        return node;
      }
      case TokenKind::kInteger:
        node->constant = Value(Take().integer);
        return node;
      case TokenKind::kFloat:
        node->constant = Value(Take().real);
        return node;
      default:
        break;
    }
    if (IsOperator("(")) return Parenthesis();
    if (IsOperator("[")) return List();
    if (IsOperator("{")) return Dict();
    Expected("an expression");
    return node;
  }

  // Names that mean something elsewhere and nothing here.
  void CheckName(const std::string& name, int line) {
    if (name == "lipsum" || name == "cycler" || name == "joiner") {
      if (IsOperator("(")) FailAt(line, absl::StrFormat("the function \"%s\" is not supported", name));
    }
    if (in_macro_ && (name == "varargs" || name == "kwargs" || name == "caller")) {
      FailAt(line, absl::StrFormat("\"%s\" in a macro is not supported", name));
    }
  }

  ExpressionPointer Parenthesis() {
    const int line = Take().line;
    if (Skip(IsOperator(")"))) return Node(ExpressionKind::kTuple, line);
    ExpressionPointer inside = ExpressionOrTuple(/*with_condition=*/true);
    ExpectOperator(")");
    return inside;
  }

  ExpressionPointer List() {
    ExpressionPointer list = Node(ExpressionKind::kList);
    Take();
    while (!IsOperator("]") && error_.ok()) {
      if (!list->children.empty()) {
        ExpectOperator(",");
        if (IsOperator("]")) break;
      }
      list->children.push_back(Condition());
    }
    ExpectOperator("]");
    return list;
  }

  ExpressionPointer Dict() {
    ExpressionPointer dict = Node(ExpressionKind::kDict);
    Take();
    while (!IsOperator("}") && error_.ok()) {
      if (!dict->children.empty()) {
        ExpectOperator(",");
        if (IsOperator("}")) break;
      }
      dict->children.push_back(Condition());
      ExpectOperator(":");
      dict->children.push_back(Condition());
    }
    ExpectOperator("}");
    return dict;
  }

  ExpressionPointer Postfix(ExpressionPointer node, int& chain) {
    for (; error_.ok(); Count(chain)) {
      if (IsOperator(".")) {
        node = AfterDot(std::move(node));
      } else if (IsOperator("[")) {
        node = Subscript(std::move(node));
      } else if (IsOperator("(")) {
        node = Call(std::move(node));
      } else {
        break;
      }
    }
    return node;
  }

  ExpressionPointer AfterDot(ExpressionPointer object) {
    const int line = Take().line;
    if (Is(TokenKind::kInteger)) {
      ExpressionPointer key = Node(ExpressionKind::kConstant);
      key->constant = Value(Take().integer);
      return Node(ExpressionKind::kItem, line, std::move(object), std::move(key));
    }
    const std::string name = ExpectAnyName("an attribute's name");
    if (IsOperator("(")) return Method(std::move(object), name, line);
    ExpressionPointer node = Node(ExpressionKind::kAttribute, line, std::move(object));
    node->name = name;
    return node;
  }

  ExpressionPointer Subscript(ExpressionPointer object) {
    const int line = Take().line;
    std::array<ExpressionPointer, 3> parts;
    size_t part = 0;
    bool slice = false;
    while (!IsOperator("]") && error_.ok()) {
      if (Skip(IsOperator(":"))) {
        slice = true;
        if (++part == parts.size()) Expected("\"]\"");
      } else if (parts[part % parts.size()]) {
        if (IsOperator(",")) FailAt(Now().line, "a subscript of several parts is not supported");
        Expected("\"]\"");
      } else {
        parts[part % parts.size()] = Condition();
      }
    }
    ExpectOperator("]");
    if (slice) {
      return Node(ExpressionKind::kSlice, line, std::move(object), std::move(parts[0]), std::move(parts[1]),
                  std::move(parts[2]));
    }
    if (!parts[0]) Expected("an expression");
    return Node(ExpressionKind::kItem, line, std::move(object), std::move(parts[0]));
  }

  // --- calls

  struct CallArguments {
    std::vector<ExpressionPointer> positional, named;
    std::vector<std::string> names;
  };

  CallArguments TakeArguments() {
    const Level level(*this);
    CallArguments arguments;
    ExpectOperator("(");
    for (bool first = true; !IsOperator(")") && error_.ok(); first = false) {
      if (!first) {
        ExpectOperator(",");
        if (IsOperator(")")) break;
      }
      if (IsOperator("*") || IsOperator("**")) {
        FailAt(Now().line, absl::StrFormat("arguments with %s are not supported", Now().text));
      } else if (Is(TokenKind::kName) && Following().kind == TokenKind::kOperator &&
                 Following().text == "=") {
        const Token name = Take();
        if (std::find(arguments.names.begin(), arguments.names.end(), name.text) != arguments.names.end()) {
          FailAt(name.line, absl::StrFormat("the argument \"%s\" is given twice", name.text));
        }
        arguments.names.push_back(name.text);
        Take();
        arguments.named.push_back(Condition());
      } else {
        if (!arguments.named.empty())
          FailAt(Now().line, "an argument without a name follows one with a name");
        arguments.positional.push_back(Condition());
      }
    }
    ExpectOperator(")");
    return arguments;
  }

  // The arguments in the places of the operation's parameters. `what` is for errors: "filter", "test",
  // "method".
  ExpressionPointer Apply(std::string_view what, const Operation* operation, const std::string& name,
                          int line, ExpressionPointer subject, CallArguments arguments) {
    ExpressionPointer node = Node(ExpressionKind::kOperation, line, std::move(subject));
    if (!error_.ok()) return node;
    if (operation == nullptr) {
      FailAt(line, absl::StrFormat("the %s \"%s\" is not supported", what, name));
      return node;
    }
    node->operation = operation;
    const auto& parameters = operation->parameters;
    if (arguments.positional.size() > parameters.size()) {
      FailAt(line, absl::StrFormat("the %s \"%s\" takes %d arguments at most here, and has %d", what, name,
                                   parameters.size(), arguments.positional.size()));
      return node;
    }
    node->children.resize(1 + parameters.size());
    for (size_t i = 0; i < arguments.positional.size(); ++i) {
      node->children[1 + i] = std::move(arguments.positional[i]);
    }
    for (size_t i = 0; i < arguments.named.size(); ++i) {
      const auto found = std::find(parameters.begin(), parameters.end(), arguments.names[i]);
      const auto place = static_cast<size_t>(1 + (found - parameters.begin()));
      if (found == parameters.end() || node->children[place]) {
        FailAt(line, absl::StrFormat("the argument \"%s\" of the %s \"%s\" is %s", arguments.names[i], what,
                                     name, found == parameters.end() ? "not supported" : "given twice"));
        return node;
      }
      node->children[place] = std::move(arguments.named[i]);
    }
    for (size_t i = 0; i < operation->required; ++i) {
      if (!node->children[1 + i]) {
        FailAt(line, absl::StrFormat("the %s \"%s\" needs the argument \"%s\"", what, name, parameters[i]));
      }
    }
    CheckOperationName(*node, operation->filter_parameter, FindFilter, "filter");
    CheckOperationName(*node, operation->test_parameter, FindTest, "test");
    return node;
  }

  void CheckOperationName(const Expression& node, int parameter, const Operation* (*find)(std::string_view),
                          std::string_view what) {
    if (parameter < 0 || !node.children[static_cast<size_t>(1 + parameter)]) return;
    const Expression& argument = *node.children[static_cast<size_t>(1 + parameter)];
    const Text* name = argument.kind == ExpressionKind::kConstant ? argument.constant.text() : nullptr;
    if (name == nullptr) {
      return FailAt(node.line,
                    absl::StrFormat("the name of a %s is not a literal, which is not supported", what));
    }
    const Operation* const found = find(name->bytes());
    if (found == nullptr) {
      return FailAt(node.line, absl::StrFormat("the %s \"%s\" is not supported", what, name->bytes()));
    }
    const size_t given = what == "test" && node.children.back() ? 1 : 0;
    if (found->required > given) {
      FailAt(node.line, absl::StrFormat("the %s \"%s\" needs the argument \"%s\"", what, name->bytes(),
                                        found->parameters[0]));
    }
  }

  ExpressionPointer Filter(ExpressionPointer subject, int& chain) {
    const int line = Take().line;
    const std::string name = DottedName("a filter's name");
    CallArguments arguments;
    if (IsOperator("(")) arguments = TakeArguments();
    Count(chain);
    return Apply("filter", FindFilter(name), name, line, std::move(subject), std::move(arguments));
  }

  ExpressionPointer Test(ExpressionPointer subject) {
    const int line = Take().line;
    const bool negated = Skip(IsName("not"));
    const std::string name = DottedName("a test's name");
    CallArguments arguments;
    if (IsOperator("(")) {
      arguments = TakeArguments();
    } else if (BeginsTestArgument()) {
      int chain = 0;
      arguments.positional.push_back(Postfix(Primary(), chain));
    }
    ExpressionPointer node =
        Apply("test", FindTest(name), name, line, std::move(subject), std::move(arguments));
    return negated ? Node(ExpressionKind::kNot, line, std::move(node)) : std::move(node);
  }

  bool BeginsTestArgument() {
    if (Is(TokenKind::kString) || Is(TokenKind::kInteger) || Is(TokenKind::kFloat)) return true;
    if (IsOperator("[") || IsOperator("{")) return true;
    if (!Is(TokenKind::kName) || IsName("else") || IsName("or") || IsName("and")) return false;
    if (IsName("is")) FailAt(Now().line, "tests cannot follow one another with is");
    return true;
  }

  std::string DottedName(std::string_view what) {
    std::string name = ExpectAnyName(what);
    while (Skip(IsOperator("."))) name += "." + ExpectAnyName(what);
    return name;
  }

  ExpressionPointer Method(ExpressionPointer object, const std::string& name, int line) {
    CallArguments arguments = TakeArguments();
    if (name == "cycle" && arguments.named.empty()) {
      ExpressionPointer node = Node(ExpressionKind::kCycle, line, std::move(object));
      for (ExpressionPointer& value : arguments.positional) node->children.push_back(std::move(value));
      return node;
    }
    return Apply("method", FindMethod(name), name, line, std::move(object), std::move(arguments));
  }

  ExpressionPointer Call(ExpressionPointer callee) {
    const int line = Now().line;
    if (callee->kind != ExpressionKind::kName) {
      FailAt(line, "calling anything but a function, a macro or a method by its name is not supported");
      return callee;
    }
    CallArguments arguments = TakeArguments();
    ExpressionPointer node = Node(ExpressionKind::kCall, line, std::move(callee));
    for (ExpressionPointer& value : arguments.positional) node->children.push_back(std::move(value));
    for (ExpressionPointer& value : arguments.named) node->children.push_back(std::move(value));
    node->words = std::move(arguments.names);
    return node;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  bool in_loop_ = false;  // break may stand here
  bool at_top_ = true;    // a macro may stand here
  bool in_macro_ = false;
  absl::Status error_;
};

}  // namespace

absl::StatusOr<Statements> Parse(std::string_view source) {
  absl::StatusOr<std::vector<Token>> tokens = Lex(source);
  if (!tokens.ok()) return tokens.status();
  return Parser(*std::move(tokens)).Run();
}

}  // namespace efla::jinja
