#include "model/constraint/regex.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/strict_json.h"

namespace efla {
namespace {

constexpr int kMaxGroupDepth = 200;

absl::Status Error(std::string_view what) { return absl::InvalidArgumentError(absl::StrFormat("%s", what)); }

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsPunctuation(char c) { return c > ' ' && c < 0x7F && !IsDigit(c) && !IsLetter(c); }

int HexValue(char c) {
  if (IsDigit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::optional<char32_t> TakeHex(std::string_view& text, size_t digits) {
  if (text.size() < digits) return std::nullopt;
  char32_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    const int digit = HexValue(text[i]);
    if (digit < 0) return std::nullopt;
    value = value << 4 | static_cast<char32_t>(digit);
  }
  text.remove_prefix(digits);
  return value;
}

CodePointSet Digits() { return CodePointSet({{'0', '9'}}); }
CodePointSet WordCharacters() { return CodePointSet({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}); }
CodePointSet Spaces(RegexDialect dialect) {
  if (dialect == RegexDialect::kRe2) return CodePointSet({{'\t', '\n'}, {'\f', '\r'}, {' ', ' '}});
  return CodePointSet({{'\t', '\r'},
                       {' ', ' '},
                       {0xA0, 0xA0},
                       {0x1680, 0x1680},
                       {0x2000, 0x200A},
                       {0x2028, 0x2029},
                       {0x202F, 0x202F},
                       {0x205F, 0x205F},
                       {0x3000, 0x3000},
                       {0xFEFF, 0xFEFF}});
}
CodePointSet AnyButLineEnds(RegexDialect dialect) {
  if (dialect == RegexDialect::kRe2) return CodePointSet({{'\n', '\n'}}).Complement();
  return CodePointSet({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}).Complement();
}

CodePointSet Single(char32_t c) { return CodePointSet({{c, c}}); }

// \u1234, \u{12345}, \x12, \x{12345}, after the u or x. Two \u of a surrogate pair are one character.
absl::StatusOr<char32_t> TakeNumbered(std::string_view& text, char kind) {
  std::optional<char32_t> value;
  if (text.starts_with('{')) {
    const size_t end = text.find('}');
    if (end == std::string_view::npos || end < 2 || end > 7) {
      return Error("\\x{...} and \\u{...} take 1 to 6 hexadecimal digits");
    }
    std::string_view digits = text.substr(1, end - 1);
    value = TakeHex(digits, digits.size());
    if (!value || *value > kLastCodePoint)
      return Error("\\x{...} and \\u{...} take a number up to 10FFFF in hexadecimal");
    text.remove_prefix(end + 1);
  } else {
    value = TakeHex(text, kind == 'u' ? 4 : 2);
    if (!value)
      return Error(kind == 'u' ? "\\u takes four hexadecimal digits" : "\\x takes two hexadecimal digits");
    if (*value >= 0xD800 && *value < 0xDC00 && text.starts_with("\\u")) {
      std::string_view after = text.substr(2);
      const std::optional<char32_t> low = TakeHex(after, 4);
      if (low && *low >= 0xDC00 && *low < 0xE000) {
        text = after;
        return 0x10000 + ((*value - 0xD800) << 10) + (*low - 0xDC00);
      }
    }
  }
  if (*value >= 0xD800 && *value < 0xE000) return Error("half of a surrogate pair is no character");
  return *value;
}

// After the backslash.
absl::StatusOr<CodePointSet> TakeEscape(std::string_view& text, RegexDialect dialect) {
  if (text.empty()) return Error("a backslash is the last character; \\\\ stands for it");
  const char c = text.front();
  switch (c) {
    case 'b':
    case 'B':
      return Error("word boundaries (\\b, \\B) are not supported");
    case 'A':
    case 'z':
    case 'Z':
    case 'G':
      return Error(
          absl::StrFormat("the anchor \\%c is not supported; the expression is of the whole text anyway", c));
    case 'k':
      return Error("back references (\\k) are not supported");
    case 'p':
    case 'P':
      return Error("Unicode properties (\\p) are not supported");
    case 'Q':
    case 'E':
      return Error("quoting (\\Q...\\E) is not supported");
    default:
      break;
  }
  if (c >= '1' && c <= '9') return Error(absl::StrFormat("back references (\\%c) are not supported", c));
  if (c == '0' && text.size() > 1 && IsDigit(text[1]))
    return Error("octal numbers are not supported; write \\x00");
  if (!IsPunctuation(c) && std::string_view("dDwWsSntrfv0xu").find(c) == std::string_view::npos) {
    if (!IsLetter(c)) return Error("only ASCII letters and punctuation can be escaped");
    return Error(absl::StrFormat("the escape \\%c is unknown", c));
  }
  text.remove_prefix(1);
  switch (c) {
    case 'd':
      return Digits();
    case 'D':
      return Digits().Complement();
    case 'w':
      return WordCharacters();
    case 'W':
      return WordCharacters().Complement();
    case 's':
      return Spaces(dialect);
    case 'S':
      return Spaces(dialect).Complement();
    case 'n':
      return Single('\n');
    case 't':
      return Single('\t');
    case 'r':
      return Single('\r');
    case 'f':
      return Single('\f');
    case 'v':
      return Single('\v');
    case '0':
      return Single(0);
    case 'x':
    case 'u': {
      absl::StatusOr<char32_t> value = TakeNumbered(text, c);
      if (!value.ok()) return value.status();
      return Single(*value);
    }
    default:
      return Single(static_cast<unsigned char>(c));
  }
}

bool IsOne(const CodePointSet& set) {
  return set.ranges().size() == 1 && set.ranges().front().first == set.ranges().front().last;
}

class RegexParser {
 public:
  RegexParser(std::string_view text, RegexDialect dialect) : text_(text), rest_(text), dialect_(dialect) {}

  absl::StatusOr<std::vector<RegexAlternative>> Parse() {
    std::vector<RegexAlternative> alternatives = TakeAlternatives(0);
    if (status_.ok() && !rest_.empty()) status_ = Error("a ) without its (");
    if (status_.ok()) return alternatives;
    return absl::InvalidArgumentError(absl::StrFormat("at byte %d%s: %s", text_.size() - rest_.size(), Here(),
                                                      std::string(status_.message())));
  }

 private:
  std::string Here() const {
    if (rest_.empty()) return " (the end)";
    return absl::StrFormat(" (\"%s\")", Printable(rest_, 12));
  }

  bool Take(std::string_view token) {
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    return true;
  }
  void Fail(std::string_view what) {
    if (status_.ok()) status_ = Error(what);
  }
  template <typename T>
  T ValueOr(absl::StatusOr<T> value, T otherwise) {
    if (value.ok()) return *std::move(value);
    if (status_.ok()) status_ = value.status();
    return otherwise;
  }

  // Up to the end or a ')'.
  std::vector<RegexAlternative> TakeAlternatives(int depth) {
    std::vector<RegexAlternative> alternatives;
    do {
      RegexAlternative alternative;
      if (depth == 0 && Take("^")) alternative.at_begin = true;
      std::vector<ExpressionPtr> parts;
      while (status_.ok() && !rest_.empty() && rest_.front() != '|' && rest_.front() != ')') {
        if (rest_.front() == '$' && depth == 0 && (rest_.size() == 1 || rest_[1] == '|')) {
          rest_.remove_prefix(1);
          alternative.at_end = true;
          break;
        }
        parts.push_back(TakeQuantified(depth));
      }
      alternative.body = Concat(std::move(parts));
      alternatives.push_back(std::move(alternative));
    } while (status_.ok() && Take("|"));
    return alternatives;
  }

  ExpressionPtr TakeQuantified(int depth) {
    ExpressionPtr atom = TakeAtom(depth);
    if (!status_.ok() || rest_.empty()) return atom;
    RepeatCount count;
    if (rest_.front() == '*') {
      count = {0, kUnbounded};
    } else if (rest_.front() == '+') {
      count = {1, kUnbounded};
    } else if (rest_.front() == '?') {
      count = {0, 1};
    } else if (!BeginsCount()) {
      return atom;
    }
    const bool braces = rest_.front() == '{';
    rest_.remove_prefix(1);
    if (braces) count = ValueOr(TakeRepeatCount(rest_), RepeatCount{});
    if (!status_.ok()) return atom;
    Take("?");  // not greedy: the same texts
    if (rest_.starts_with('+')) {
      Fail("possessive quantifiers are not supported");
    } else if (rest_.starts_with('*') || rest_.starts_with('?') || BeginsCount()) {
      Fail("a quantifier follows a quantifier; use a group");
    }
    return Repeat(std::move(atom), count.min, count.max);
  }

  bool BeginsCount() {
    if (rest_.size() < 2 || rest_.front() != '{') return false;
    if (rest_[1] == ',') {
      Fail("{,n} means different things to different engines; write {0,n}, or \\{ for the character");
      return false;
    }
    return IsDigit(rest_[1]);
  }

  ExpressionPtr TakeAtom(int depth) {
    switch (rest_.front()) {
      case '(':
        return TakeGroup(depth);
      case '[':
        rest_.remove_prefix(1);
        return SetOf(ValueOr(TakeCharacterClass(rest_, dialect_), CodePointSet()));
      case '.':
        rest_.remove_prefix(1);
        return SetOf(AnyButLineEnds(dialect_));
      case '\\': {
        std::string_view after = rest_.substr(1);
        CodePointSet set = ValueOr(TakeEscape(after, dialect_), CodePointSet());
        if (status_.ok()) rest_ = after;
        return SetOf(std::move(set));
      }
      case '^':
      case '$':
        Fail("anchors are supported only at the ends of the expression or of its outermost alternatives");
        return Nothing();
      case '*':
      case '+':
      case '?':
        Fail("there is nothing to repeat");
        return Nothing();
      default:
        if (BeginsCount()) Fail("there is nothing to repeat");
        if (!status_.ok()) return Nothing();
        return SetOf(Single(TakeCodePoint(rest_)));
    }
  }

  ExpressionPtr TakeGroup(int depth) {
    const std::string_view begin = rest_;
    if (depth >= kMaxGroupDepth) Fail(absl::StrFormat("groups are nested deeper than %d", kMaxGroupDepth));
    if (rest_.starts_with("(?=") || rest_.starts_with("(?!")) Fail("look-ahead is not supported");
    if (rest_.starts_with("(?<=") || rest_.starts_with("(?<!")) Fail("look-behind is not supported");
    if (!status_.ok()) return Nothing();
    if (Take("(?P<") || Take("(?<")) {
      const size_t end = rest_.find('>');
      if (end == std::string_view::npos || end == 0) {
        Fail("a group's name ends with >");
        return Nothing();
      }
      rest_.remove_prefix(end + 1);
    } else if (rest_.starts_with("(?") && !rest_.starts_with("(?:")) {
      Fail("flags and special groups are not supported; (?: is");
      return Nothing();
    } else if (!Take("(?:")) {
      Take("(");
    }
    std::vector<ExpressionPtr> bodies;
    for (RegexAlternative& alternative : TakeAlternatives(depth + 1))
      bodies.push_back(std::move(alternative.body));
    if (status_.ok() && !Take(")")) {
      rest_ = begin;
      Fail("the group has no )");
    }
    return Alternate(std::move(bodies));
  }

  const std::string_view text_;
  std::string_view rest_;
  const RegexDialect dialect_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<CodePointSet> TakeCharacterClass(std::string_view& text, RegexDialect dialect) {
  std::vector<CodePointRange> ranges;
  const bool negated = text.starts_with('^');
  if (negated) text.remove_prefix(1);
  if (text.starts_with(']')) return Error("a class is empty, or begins with ]; write \\] for the character");
  // One member: a character or, from an escape, several.
  const auto take = [&]() -> absl::StatusOr<CodePointSet> {
    if (text.starts_with("[:")) return Error("POSIX classes ([:name:]) are not supported");
    if (!text.starts_with('\\')) return Single(TakeCodePoint(text));
    std::string_view after = text.substr(1);
    absl::StatusOr<CodePointSet> set =
        after.starts_with('b') ? absl::StatusOr<CodePointSet>(Error("\\b is not supported; write \\x08"))
                               : TakeEscape(after, dialect);
    if (set.ok()) text = after;
    return set;
  };
  while (!text.starts_with(']')) {
    if (text.empty()) return Error("the class has no ]");
    absl::StatusOr<CodePointSet> first = take();
    if (!first.ok()) return first.status();
    if (text.size() < 2 || text.front() != '-' || text[1] == ']') {
      ranges.insert(ranges.end(), first->ranges().begin(), first->ranges().end());
      continue;
    }
    const std::string_view dash = text;
    text.remove_prefix(1);
    absl::StatusOr<CodePointSet> last = take();
    if (!last.ok()) return last.status();
    if (!IsOne(*first) || !IsOne(*last)) {
      text = dash;
      return Error("the end of a range is a class; write \\- for the character");
    }
    const CodePointRange range{first->ranges().front().first, last->ranges().front().first};
    if (range.first > range.last) {
      text = dash;
      return Error("the range's ends are in the wrong order");
    }
    ranges.push_back(range);
  }
  text.remove_prefix(1);
  CodePointSet set(std::move(ranges));
  return negated ? set.Complement() : set;
}

absl::StatusOr<RepeatCount> TakeRepeatCount(std::string_view& text) {
  const auto take_number = [&]() -> std::optional<int64_t> {
    if (text.empty() || !IsDigit(text.front())) return std::nullopt;
    int64_t value = 0;
    while (!text.empty() && IsDigit(text.front())) {
      value = std::min<int64_t>(value * 10 + (text.front() - '0'), kMaxRegexCount + 1);
      text.remove_prefix(1);
    }
    return value;
  };
  const std::optional<int64_t> min = take_number();
  if (!min) return Error("a repetition is {m}, {m,} or {m,n}");
  RepeatCount count{*min, *min};
  if (text.starts_with(',')) {
    text.remove_prefix(1);
    count.max = take_number().value_or(kUnbounded);
  }
  if (!text.starts_with('}')) return Error("a repetition is {m}, {m,} or {m,n}");
  text.remove_prefix(1);
  if (count.min > kMaxRegexCount || count.max > kMaxRegexCount) {
    return Error(absl::StrFormat("a repetition's count is above the limit of %d", kMaxRegexCount));
  }
  if (count.max != kUnbounded && count.max < count.min)
    return Error("a repetition's counts are in the wrong order");
  return count;
}

absl::StatusOr<std::vector<RegexAlternative>> ParseRegex(std::string_view text, RegexDialect dialect) {
  return RegexParser(text, dialect).Parse();
}

}  // namespace efla
