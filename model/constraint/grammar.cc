#include "model/constraint/grammar.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "model/constraint/regex.h"
#include "model/strict_json.h"

namespace efla {
namespace {

constexpr int kMaxGroupDepth = 200;
constexpr size_t kMaxShownName = 60;  // in messages
constexpr std::string_view kRootName = "root";

bool BeginsName(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool InName(char c) { return BeginsName(c) || (c >= '0' && c <= '9') || c == '-'; }

class GrammarParser {
 public:
  explicit GrammarParser(std::string_view text) : text_(text), rest_(text) {}

  absl::StatusOr<Grammar> Parse() {
    grammar_.every_rule_must_end = true;
    SkipSpace();
    while (status_.ok() && !rest_.empty()) TakeRule();
    if (!status_.ok()) return status_;
    // The first name used and not defined, as the text goes.
    const Use* undefined = nullptr;
    for (const auto& [name, use] : uses_) {
      const bool defined = grammar_.rules[static_cast<size_t>(use.rule)].body != nullptr;
      if (!defined && (undefined == nullptr || use.at < undefined->at)) undefined = &use;
    }
    if (undefined != nullptr) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: rule %s is not defined", Place(undefined->at),
          Printable(grammar_.rules[static_cast<size_t>(undefined->rule)].name, kMaxShownName)));
    }
    const auto root = uses_.find(std::string(kRootName));
    if (root == uses_.end()) return absl::InvalidArgumentError("no rule is named root");
    grammar_.root = root->second.rule;
    return std::move(grammar_);
  }

 private:
  struct Use {
    int rule = 0;
    size_t at = 0;  // where the name stands first
  };

  size_t At() const { return text_.size() - rest_.size(); }
  std::string Place(size_t at) const {
    const std::string_view before = text_.substr(0, at);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t line_begin = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
    return absl::StrFormat("line %d, column %d", line, at - line_begin + 1);
  }
  void Fail(size_t at, std::string_view what) {
    if (!status_.ok()) return;
    const std::string_view here = text_.substr(at);
    const std::string near =
        here.empty() ? " (the end)"
                     : absl::StrFormat(" (\"%s\")", Printable(here.substr(0, here.find('\n')), 16));
    status_ = absl::InvalidArgumentError(absl::StrFormat("%s%s: %s", Place(at), near, what));
  }

  bool Take(std::string_view token) {
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }
  void SkipSpace() {
    for (;;) {
      const size_t space = std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size());
      rest_.remove_prefix(space);
      if (!rest_.starts_with('#')) return;
      rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
    }
  }
  std::string_view PeekName() const {
    if (rest_.empty() || !BeginsName(rest_.front())) return {};
    size_t end = 1;
    while (end < rest_.size() && InName(rest_[end])) ++end;
    return rest_.substr(0, end);
  }
  // A rule goes on until the next one's head.
  bool AtRuleHead() const {
    const std::string_view name = PeekName();
    if (name.empty()) return false;
    const std::string_view after = rest_.substr(name.size());
    return after.substr(std::min(after.find_first_not_of(" \t"), after.size())).starts_with("::=");
  }

  int RuleOf(std::string_view name, size_t at) {
    const auto [use, is_new] = uses_.try_emplace(std::string(name), Use{0, at});
    if (is_new) use->second.rule = grammar_.AddRule(std::string(name));
    return use->second.rule;
  }

  void TakeRule() {
    const size_t at = At();
    if (!AtRuleHead()) return Fail(at, "a rule is needed: name ::= ...");
    const std::string_view name = PeekName();
    const auto rule = static_cast<size_t>(RuleOf(name, at));
    if (grammar_.rules[rule].body != nullptr) {
      return Fail(at, absl::StrFormat("rule %s is defined twice", Printable(name, kMaxShownName)));
    }
    line_ += std::count(text_.begin() + static_cast<ptrdiff_t>(line_at_),
                        text_.begin() + static_cast<ptrdiff_t>(at), '\n');
    line_at_ = at;
    grammar_.rules[rule].line = line_;
    rest_.remove_prefix(name.size());
    SkipSpace();
    Take("::=");
    SkipSpace();
    ExpressionPtr body = TakeAlternatives(0);
    grammar_.rules[rule].body = std::move(body);
    if (status_.ok() && !rest_.empty() && !AtRuleHead()) Fail(At(), "this does not belong here");
  }

  ExpressionPtr TakeAlternatives(int depth) {
    std::vector<ExpressionPtr> alternatives;
    do {
      SkipSpace();
      std::vector<ExpressionPtr> parts;
      while (status_.ok() && !rest_.empty() && rest_.front() != '|' && rest_.front() != ')' &&
             !AtRuleHead()) {
        parts.push_back(TakeRepeated(depth));
        SkipSpace();
      }
      alternatives.push_back(Concat(std::move(parts)));
    } while (status_.ok() && Take("|"));
    return Alternate(std::move(alternatives));
  }

  bool AtQuantifier() const {
    return !rest_.empty() && std::string_view("*+?{").find(rest_.front()) != std::string_view::npos;
  }

  ExpressionPtr TakeRepeated(int depth) {
    ExpressionPtr atom = TakeAtom(depth);
    if (!status_.ok() || !AtQuantifier()) return atom;
    const size_t at = At();
    RepeatCount count;
    if (Take("*")) {
      count = {0, kUnbounded};
    } else if (Take("+")) {
      count = {1, kUnbounded};
    } else if (Take("?")) {
      count = {0, 1};
    } else {
      Take("{");
      const absl::StatusOr<RepeatCount> taken = TakeRepeatCount(rest_);
      if (!taken.ok()) Fail(at, std::string(taken.status().message()));
      count = taken.value_or(RepeatCount{});
    }
    if (AtQuantifier()) Fail(At(), "a quantifier follows a quantifier; use a group");
    return Repeat(std::move(atom), count.min, count.max);
  }

  ExpressionPtr TakeAtom(int depth) {
    const size_t at = At();
    if (Take("(")) {
      if (depth >= kMaxGroupDepth) {
        Fail(at, absl::StrFormat("groups are nested deeper than %d", kMaxGroupDepth));
        return Nothing();
      }
      ExpressionPtr inside = TakeAlternatives(depth + 1);
      if (status_.ok() && !Take(")")) Fail(at, "the group has no )");
      return inside;
    }
    if (Take("\"")) return TakeString(at);
    if (Take("[")) {
      absl::StatusOr<CodePointSet> set = TakeCharacterClass(rest_, RegexDialect::kRe2);
      if (set.ok()) return SetOf(*std::move(set));
      Fail(At(), std::string(set.status().message()));
      return Nothing();
    }
    if (Take(".")) return SetOf(CodePointSet::All());
    if (const std::string_view name = PeekName(); !name.empty()) {
      rest_.remove_prefix(name.size());
      return RuleReference(RuleOf(name, at));
    }
    Fail(at, AtQuantifier() ? "there is nothing to repeat"
                            : "a string, a class, a group or a rule's name is needed");
    return Nothing();
  }

  std::optional<char32_t> TakeHex(size_t digits) {
    char32_t value = 0;
    if (rest_.size() < digits) return std::nullopt;
    for (size_t i = 0; i < digits; ++i) {
      const size_t digit = std::string_view("0123456789abcdef").find(static_cast<char>(rest_[i] | 0x20));
      const bool is_hex = digit != std::string_view::npos && (rest_[i] >= '0');
      if (!is_hex) return std::nullopt;
      value = value << 4 | static_cast<char32_t>(digit);
    }
    rest_.remove_prefix(digits);
    return value;
  }

  // After the opening quote.
  ExpressionPtr TakeString(size_t begin) {
    std::string literal;
    while (!rest_.starts_with('"')) {
      const size_t at = At();
      if (rest_.empty() || rest_.front() == '\n') {
        Fail(begin, "the string has no closing quote on its line");
        return Nothing();
      }
      if (!Take("\\")) {
        AppendUtf8(TakeCodePoint(rest_), literal);
        continue;
      }
      const char escape = rest_.empty() ? '\0' : rest_.front();
      rest_.remove_prefix(rest_.empty() ? 0 : 1);
      const size_t kind = std::string_view("nrt\\\"'[]").find(escape);
      if (escape != '\0' && kind != std::string_view::npos) {
        literal += std::string_view("\n\r\t\\\"'[]")[kind];
        continue;
      }
      const size_t digits = escape == 'x' ? 2 : escape == 'u' ? 4 : escape == 'U' ? 8 : 0;
      const std::optional<char32_t> value = digits > 0 ? TakeHex(digits) : std::nullopt;
      if (!value || *value > kLastCodePoint || (*value >= 0xD800 && *value < 0xE000)) {
        Fail(at,
             "escapes in strings are \\n \\r \\t \\\\ \\\" \\' \\[ \\] and \\xHH \\uHHHH \\UHHHHHHHH of a "
             "character");
        return Nothing();
      }
      AppendUtf8(*value, literal);
    }
    Take("\"");
    return Literal(std::move(literal));
  }

  const std::string_view text_;
  std::string_view rest_;
  absl::Status status_;
  Grammar grammar_;
  size_t line_at_ = 0;  // of the last rule's head
  int64_t line_ = 1;    // which is in this line
  std::map<std::string, Use> uses_;
};

}  // namespace

absl::StatusOr<Grammar> ParseGrammar(std::string_view text) { return GrammarParser(text).Parse(); }

}  // namespace efla
