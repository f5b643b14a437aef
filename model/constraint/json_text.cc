#include "model/constraint/json_text.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace efla {
namespace {

// What stands for itself in a string.
const CodePointSet& Unescaped() {
  static const CodePointSet unescaped({{0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, kLastCodePoint}});
  return unescaped;
}

struct ShortEscape {
  char32_t character;
  char letter;
};
constexpr ShortEscape kShortEscapes[] = {{'"', '"'},  {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'},
                                         {'\n', 'n'}, {'\r', 'r'},  {'\t', 't'}};

ExpressionPtr Hex(int digits) {
  return Repeat(SetOf(CodePointSet({{'0', '9'}, {'A', 'F'}, {'a', 'f'}})), digits, digits);
}

// A character of a string in any of its spellings; surrogates only in pairs.
ExpressionPtr AnyCharacter() {
  const ExpressionPtr d = SetOf(CodePointSet({{'D', 'D'}, {'d', 'd'}}));
  const ExpressionPtr not_d =
      SetOf(CodePointSet({{'0', '9'}, {'A', 'C'}, {'E', 'F'}, {'a', 'c'}, {'e', 'f'}}));
  const ExpressionPtr high = SetOf(CodePointSet({{'8', '9'}, {'A', 'B'}, {'a', 'b'}}));
  const ExpressionPtr low = SetOf(CodePointSet({{'C', 'F'}, {'c', 'f'}}));
  const ExpressionPtr letters = SetOf(CodePointSet(
      {{'"', '"'}, {'\\', '\\'}, {'/', '/'}, {'b', 'b'}, {'f', 'f'}, {'n', 'n'}, {'r', 'r'}, {'t', 't'}}));
  const ExpressionPtr numbered = Alternate({Concat({not_d, Hex(3)}), Concat({d, Range('0', '7'), Hex(2)}),
                                            Concat({d, high, Hex(2), Literal("\\u"), d, low, Hex(2)})});
  return Alternate(
      {SetOf(Unescaped()), Concat({Literal("\\"), Alternate({letters, Concat({Literal("u"), numbered})})})});
}

ExpressionPtr Quoted(ExpressionPtr text) { return Concat({Literal("\""), std::move(text), Literal("\"")}); }

// One character of `set` as a string holds it.
ExpressionPtr AsWritten(const CodePointSet& set) {
  std::vector<ExpressionPtr> ways;
  if (CodePointSet plain = set.Intersection(Unescaped()); !plain.empty())
    ways.push_back(SetOf(std::move(plain)));
  std::vector<CodePointRange> letters;         // behind a backslash
  std::vector<CodePointRange> last_digits[2];  // behind \u000 and \u001
  for (char32_t c = 0; c <= '\\'; c = c == 0x1F ? U'"' : c == '"' ? U'\\' : c + 1) {
    if (!set.Contains(c)) continue;
    const auto* escape = std::find_if(std::begin(kShortEscapes), std::end(kShortEscapes),
                                      [&](const ShortEscape& e) { return e.character == c; });
    const bool is_short = escape != std::end(kShortEscapes);
    const auto written = static_cast<char32_t>(is_short ? escape->letter : "0123456789abcdef"[c % 16]);
    (is_short ? letters : last_digits[c / 16]).push_back({written, written});
  }
  if (!letters.empty()) ways.push_back(Concat({Literal("\\"), SetOf(CodePointSet(std::move(letters)))}));
  for (const size_t high : {size_t{0}, size_t{1}}) {
    std::vector<CodePointRange>& digits = last_digits[high];
    if (digits.empty()) continue;
    ways.push_back(
        Concat({Literal(high == 0 ? "\\u000" : "\\u001"), SetOf(CodePointSet(std::move(digits)))}));
  }
  return Alternate(std::move(ways));
}

// What has been written already: equal sets and shared parts are written once.
struct Written {
  absl::flat_hash_map<const Expression*, ExpressionPtr> expressions;
  std::map<std::u32string, ExpressionPtr> sets;  // by the ends of their ranges
};
ExpressionPtr AsWritten(const ExpressionPtr& text, Written& written) {
  if (const auto found = written.expressions.find(text.get()); found != written.expressions.end())
    return found->second;
  ExpressionPtr result;
  if (text->kind == Expression::Kind::kSet) {
    std::u32string ends;
    for (const CodePointRange& range : text->set.ranges()) ends.append({range.first, range.last});
    ExpressionPtr& set = written.sets[ends];
    if (set == nullptr) set = AsWritten(text->set);
    result = set;
  } else {
    Expression copy = *text;
    for (ExpressionPtr& part : copy.parts) part = AsWritten(part, written);
    result = std::make_shared<const Expression>(std::move(copy));
  }
  written.expressions.emplace(text.get(), result);
  return result;
}

// Texts of `rest` characters and more that are none of `names`, which are sorted and share what came before.
ExpressionPtr NoneOf(const std::vector<std::u32string>& names, size_t begin, size_t end, size_t depth) {
  static const ExpressionPtr anything = Repeat(SetOf(Unescaped()), 0, kUnbounded);
  static const ExpressionPtr nothing_more = Literal("");
  if (begin == end) return anything;
  std::vector<ExpressionPtr> ways;
  std::vector<CodePointRange> taken;
  const bool is_name = names[begin].size() == depth;
  if (!is_name) ways.push_back(nothing_more);
  for (size_t i = begin + (is_name ? 1 : 0); i < end;) {
    const char32_t c = names[i][depth];
    size_t next = i;
    while (next < end && names[next][depth] == c) ++next;
    taken.push_back({c, c});
    std::string character;
    AppendUtf8(c, character);
    ways.push_back(Concat({Literal(character), NoneOf(names, i, next, depth + 1)}));
    i = next;
  }
  ways.push_back(Concat({SetOf(Unescaped().Minus(CodePointSet(std::move(taken)))), anything}));
  return Alternate(std::move(ways));
}

ExpressionPtr Digit() { return Range('0', '9'); }

// Digits of one length from `min` to `max`.
ExpressionPtr DigitsBetween(std::string_view min, std::string_view max) {
  const auto length = static_cast<int64_t>(min.size());
  if (min.find_first_not_of('0') == std::string_view::npos &&
      max.find_first_not_of('9') == std::string_view::npos) {
    return Repeat(Digit(), length, length);
  }
  const auto low = static_cast<unsigned char>(min.front());
  const auto high = static_cast<unsigned char>(max.front());
  const std::string_view min_rest = min.substr(1), max_rest = max.substr(1);
  if (low == high) return Concat({Literal(std::string(1, min.front())), DigitsBetween(min_rest, max_rest)});
  std::vector<ExpressionPtr> ways;
  ways.push_back(Concat(
      {Literal(std::string(1, min.front())), DigitsBetween(min_rest, std::string(min_rest.size(), '9'))}));
  if (high - low > 1) {
    ways.push_back(Concat({Range(static_cast<char32_t>(low + 1), static_cast<char32_t>(high - 1)),
                           Repeat(Digit(), length - 1, length - 1)}));
  }
  ways.push_back(Concat(
      {Literal(std::string(1, max.front())), DigitsBetween(std::string(max_rest.size(), '0'), max_rest)}));
  return Alternate(std::move(ways));
}

// Without leading zeros; 0 <= min. Nothing where min > max.
ExpressionPtr Naturals(int64_t min, int64_t max) {
  std::vector<ExpressionPtr> ways;
  int64_t power = 1;  // the least number of its length, but that of length 1 is 0
  for (int length = 1; length <= kMaxIntegerDigits; ++length, power *= 10) {
    const int64_t low = std::max(min, length == 1 ? 0 : power);
    const int64_t high = std::min(max, power * 10 - 1);
    if (low <= high) ways.push_back(DigitsBetween(std::to_string(low), std::to_string(high)));
  }
  return Alternate(std::move(ways));
}

constexpr int64_t kMaxInteger = 999'999'999'999'999'999;  // kMaxIntegerDigits

// Decimal numbers from min to max, min >= 0, or above and below them.
ExpressionPtr DecimalsBetween(int64_t min, bool min_excluded, int64_t max, bool max_excluded) {
  constexpr int kDigits = kMaxBoundedFractionDigits;
  if (min > max) return Nothing();
  const auto fraction = [](ExpressionPtr digits) { return Concat({Literal("."), std::move(digits)}); };
  const ExpressionPtr zeros = fraction(Repeat(Literal("0"), 1, kDigits));
  const ExpressionPtr any = fraction(Repeat(Digit(), 1, kDigits));
  std::vector<ExpressionPtr> not_zero;  // k zeros, then another digit
  for (int k = 0; k < kDigits; ++k) {
    not_zero.push_back(
        Concat({Repeat(Literal("0"), k, k), Range('1', '9'), Repeat(Digit(), 0, kDigits - 1 - k)}));
  }
  const auto whole = [](int64_t n) { return Literal(std::to_string(n)); };
  if (min == max) return min_excluded || max_excluded ? Nothing() : Concat({whole(min), Optional(zeros)});
  std::vector<ExpressionPtr> ways;
  ways.push_back(
      Concat({whole(min), min_excluded ? fraction(Alternate(std::move(not_zero))) : Optional(any)}));
  ways.push_back(Concat({Naturals(min + 1, max - 1), Optional(any)}));
  if (!max_excluded) ways.push_back(Concat({whole(max), Optional(zeros)}));
  return Alternate(std::move(ways));
}

}  // namespace

int JsonRules::RuleFor(std::optional<int>& rule, const char* name, ExpressionPtr (JsonRules::*make)()) {
  if (!rule) {
    rule = grammar_.AddRule(name);  // before its body, which may refer to it
    const int id = *rule;
    ExpressionPtr body = (this->*make)();
    grammar_.rules[static_cast<size_t>(id)].body = std::move(body);
  }
  return *rule;
}

ExpressionPtr JsonRules::Value() { return RuleReference(RuleFor(value_, "value", &JsonRules::MakeValue)); }
ExpressionPtr JsonRules::Object() {
  return RuleReference(RuleFor(object_, "object", &JsonRules::MakeObject));
}
ExpressionPtr JsonRules::Array() { return RuleReference(RuleFor(array_, "array", &JsonRules::MakeArray)); }
ExpressionPtr JsonRules::String() {
  return RuleReference(RuleFor(string_, "string", &JsonRules::MakeString));
}
ExpressionPtr JsonRules::Integer() {
  return RuleReference(RuleFor(integer_, "integer", &JsonRules::MakeInteger));
}
ExpressionPtr JsonRules::Number() {
  return RuleReference(RuleFor(number_, "number", &JsonRules::MakeNumber));
}

ExpressionPtr JsonRules::MakeValue() {
  return Alternate(
      {Object(), Array(), String(), Number(), Literal("true"), Literal("false"), Literal("null")});
}

ExpressionPtr JsonRules::MakeObject() {
  Expression members;
  members.kind = Expression::Kind::kMembers;
  members.separator = JsonSeparator();
  members.extra = JsonMember(String(), Value());
  return JsonObjectOf(std::make_shared<const Expression>(std::move(members)));
}

ExpressionPtr JsonRules::MakeArray() { return JsonArrayOf({}, Value(), 0, kUnbounded); }

ExpressionPtr JsonRules::MakeString() { return Quoted(Repeat(AnyCharacter(), 0, kUnbounded)); }

ExpressionPtr JsonRules::MakeInteger() { return JsonIntegerBetween(std::nullopt, std::nullopt); }

ExpressionPtr JsonRules::MakeNumber() {
  const ExpressionPtr sign = SetOf(CodePointSet({{'+', '+'}, {'-', '-'}}));
  return Concat(
      {Optional(Literal("-")),
       Alternate({Literal("0"), Concat({Range('1', '9'), Repeat(Digit(), 0, kMaxIntegerDigits - 1)})}),
       Optional(Concat({Literal("."), Repeat(Digit(), 1, kMaxFractionDigits)})),
       Optional(
           Concat({SetOf(CodePointSet({{'E', 'E'}, {'e', 'e'}})), Optional(sign), Repeat(Digit(), 1, 2)}))});
}

ExpressionPtr JsonSpace() {
  static const ExpressionPtr space =
      Repeat(SetOf(CodePointSet({{'\t', '\n'}, {'\r', '\r'}, {' ', ' '}})), 0, kMaxJsonSpaces);
  return space;
}

ExpressionPtr JsonSeparator() { return Concat({Literal(","), JsonSpace()}); }

ExpressionPtr JsonMember(ExpressionPtr name, ExpressionPtr value) {
  return Concat({std::move(name), JsonSpace(), Literal(":"), JsonSpace(), std::move(value), JsonSpace()});
}

ExpressionPtr JsonObjectOf(ExpressionPtr members) {
  return Concat({Literal("{"), JsonSpace(), std::move(members), Literal("}")});
}

ExpressionPtr JsonArrayOf(const std::vector<ExpressionPtr>& prefix, ExpressionPtr items, int64_t min,
                          int64_t max) {
  const auto item = [](ExpressionPtr value) { return Concat({std::move(value), JsonSpace()}); };
  const ExpressionPtr separator = JsonSeparator();
  const auto num_prefix = static_cast<int64_t>(prefix.size());
  ExpressionPtr rest = Literal("");  // what may follow the prefix
  if (items != nullptr && (max == kUnbounded || max > num_prefix)) {
    const int64_t more_min = std::max<int64_t>(min - num_prefix, 0);
    const int64_t more_max = max == kUnbounded ? kUnbounded : max - num_prefix;
    const ExpressionPtr next = Concat({separator, item(items)});
    if (num_prefix > 0) {
      rest = Repeat(next, more_min, more_max);
    } else {
      rest = Concat({item(items), Repeat(next, std::max<int64_t>(more_min - 1, 0),
                                         more_max == kUnbounded ? kUnbounded : more_max - 1)});
      if (more_min == 0) rest = Optional(std::move(rest));
    }
  } else if (min > num_prefix) {
    rest = Nothing();
  }
  const int64_t used = max == kUnbounded ? num_prefix : std::min(max, num_prefix);
  std::vector<ExpressionPtr> parts;
  for (int64_t i = 0; i < used; ++i) {
    ExpressionPtr here = item(prefix[static_cast<size_t>(i)]);
    parts.push_back(i == 0 ? std::move(here) : Concat({separator, std::move(here)}));
  }
  if (used > 0) {
    parts.back() = Concat({std::move(parts.back()), std::move(rest)});
    rest = Leading(std::move(parts), std::min(min, used));
  }
  return Concat({Literal("["), JsonSpace(), std::move(rest), Literal("]")});
}

ExpressionPtr JsonStringOfLength(int64_t min, int64_t max) {
  std::vector<ExpressionPtr> characters = {SetOf(Unescaped())};
  std::vector<CodePointRange> letters;
  for (const ShortEscape& escape : kShortEscapes) {
    letters.push_back({static_cast<char32_t>(escape.letter), static_cast<char32_t>(escape.letter)});
  }
  characters.push_back(Concat({Literal("\\"), SetOf(CodePointSet(std::move(letters)))}));
  return Quoted(Repeat(Alternate(std::move(characters)), min, max));
}

ExpressionPtr JsonStringOf(const ExpressionPtr& text) {
  Written written;
  return Quoted(AsWritten(text, written));
}

ExpressionPtr JsonStringExcept(std::vector<std::string> names) {
  std::vector<std::u32string> sorted;
  for (const std::string& name : names) {
    std::u32string& characters = sorted.emplace_back();
    for (std::string_view rest = name; !rest.empty();) characters += TakeCodePoint(rest);
    // A name that needs an escape is never written without.
    if (std::any_of(characters.begin(), characters.end(),
                    [](char32_t c) { return !Unescaped().Contains(c); })) {
      sorted.pop_back();
    }
  }
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return Quoted(NoneOf(sorted, 0, sorted.size(), 0));
}

ExpressionPtr JsonIntegerBetween(std::optional<int64_t> min, std::optional<int64_t> max) {
  const int64_t low = min.value_or(-kMaxInteger);
  const int64_t high = max.value_or(kMaxInteger);
  return Alternate({Naturals(std::max<int64_t>(low, 0), high),
                    Concat({Literal("-"), Naturals(std::max<int64_t>(-high, 1), -low)})});
}

ExpressionPtr JsonNumberBetween(const NumberBounds& bounds) {
  const int64_t low = bounds.min.value_or(-kMaxNumberBound);
  const int64_t high = bounds.max.value_or(kMaxNumberBound);
  // -0 is left out: minus nothing but what is above zero.
  const bool negative_excluded = high >= 0 || bounds.max_excluded;
  return Alternate(
      {DecimalsBetween(std::max<int64_t>(low, 0), low >= 0 && bounds.min_excluded, high, bounds.max_excluded),
       Concat({Literal("-"),
               DecimalsBetween(std::max<int64_t>(-high, 0), negative_excluded, -low, bounds.min_excluded)})});
}

}  // namespace efla
