// The filters, by the names that templates give them.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/arguments.h"
#include "model/chat_template/json_text.h"
#include "model/chat_template/operations.h"
#include "model/chat_template/runtime.h"
#include "model/chat_template/text_functions.h"

namespace efla::jinja {
namespace {

// ---- Numbers ----

std::string PlainNumber(const Text& text) {
  std::string_view bytes = text.bytes();
  while (!bytes.empty() && IsSpace(CodePoint(bytes))) bytes.remove_prefix(CharacterBytes(bytes));
  while (!bytes.empty() && static_cast<unsigned char>(bytes.back()) < 0x80 &&
         IsSpace(static_cast<unsigned char>(bytes.back()))) {
    bytes.remove_suffix(1);
  }
  std::string plain;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto digit = [&](size_t at) { return at < bytes.size() && bytes[at] >= '0' && bytes[at] <= '9'; };
    if (bytes[i] == '_' && i > 0 && digit(i - 1) && digit(i + 1)) continue;
    plain += bytes[i];
  }
  if (plain.size() > 1 && plain[0] == '+' && plain[1] != '-') plain.erase(0, 1);
  return plain;
}

std::optional<double> ParseFloat(const Text& text) {
  const std::string plain = PlainNumber(text);
  double value = 0;
  const auto [end, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (end != plain.data() + plain.size() || plain.empty()) return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    const bool small = plain.find("e-") != std::string::npos || plain.find("E-") != std::string::npos;
    const double magnitude = small ? 0.0 : std::numeric_limits<double>::infinity();
    return plain[0] == '-' ? -magnitude : magnitude;
  }
  if (error != std::errc() || plain.find('(') != std::string::npos) return std::nullopt;
  return value;
}

std::optional<int64_t> ToWhole(double value) {
  if (!(value > -9.2233720368547758e18 && value < 9.2233720368547758e18)) return std::nullopt;
  return static_cast<int64_t>(value);
}

Value FilterInt(Runtime& run, const Value& subject, Arguments arguments) {
  const Value fallback = arguments[0].value_or(Value(int64_t{0}));
  if (subject.is_undefined()) return run.FailUndefined(subject);
  if (const auto integer = Runtime::AsInteger(subject)) return Value(*integer);
  int64_t base = 10;
  if (arguments[1]) {
    const auto given = NeedInteger(run, *arguments[1], "the base");
    if (!given) return Value();
    if (*given < 2 || *given > 36)
      return run.Fail(absl::StrFormat("the base is %d, and must be from 2 to 36", *given));
    base = *given;
  }
  if (const Text* text = subject.text()) {
    std::string plain = PlainNumber(*text);
    const size_t sign = plain.starts_with('-') ? 1 : 0;
    if (plain.size() > sign + 2 && plain[sign] == '0') {
      const char kind = static_cast<char>(plain[sign + 1] | 0x20);
      if ((base == 16 && kind == 'x') || (base == 8 && kind == 'o') || (base == 2 && kind == 'b')) {
        plain.erase(sign, 2);
      }
    }
    int64_t integer = 0;
    const auto [end, error] =
        std::from_chars(plain.data(), plain.data() + plain.size(), integer, static_cast<int>(base));
    if (end == plain.data() + plain.size() && !plain.empty()) {
      return error == std::errc() ? Value(integer)
                                  : run.Fail(absl::StrFormat("%s is no number of 64 bits", plain));
    }
  }
  const auto real = subject.text() != nullptr ? ParseFloat(*subject.text()) : Runtime::AsNumber(subject);
  if (!real || !std::isfinite(*real)) return fallback;
  const auto whole = ToWhole(*real);
  return whole ? Value(*whole) : run.Fail(absl::StrFormat("%s is no number of 64 bits", FloatText(*real)));
}

Value FilterFloat(Runtime& run, const Value& subject, Arguments arguments) {
  if (subject.is_undefined()) return run.FailUndefined(subject);
  const auto real = subject.text() != nullptr ? ParseFloat(*subject.text()) : Runtime::AsNumber(subject);
  return real ? Value(*real) : arguments[0].value_or(Value(0.0));
}

Value FilterAbs(Runtime& run, const Value& subject, Arguments) {
  if (const double* real = subject.As<double>()) return Value(std::fabs(*real));
  const auto integer = Runtime::AsInteger(subject);
  if (!integer) return run.Fail(absl::StrFormat("a %s has no absolute value", subject.type_name()));
  return *integer < 0 ? run.Negate(subject) : Value(*integer);
}

// ---- Lists, dicts, any value ----

// The value at a path of attributes, "a.b", as filters take it; digits are indices.
Value AtPath(Runtime& run, Value value, const Value& path) {
  if (Runtime::AsInteger(path)) return run.Item(value, path);
  const Text* text = NeedText(run, path, "the attribute");
  if (text == nullptr) return Value();
  std::string_view rest = text->bytes();
  while (run.ok()) {
    const std::string_view part = rest.substr(0, rest.find('.'));
    int64_t index = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index = error == std::errc() && end == part.data() + part.size() && part[0] != '-';
    value = run.Item(value, is_index ? Value(index) : Value::Markup(part));
    if (part.size() == rest.size()) break;
    rest.remove_prefix(part.size() + 1);
  }
  return value;
}

// By what items are sorted or told apart.
Value SortKey(Runtime& run, const Value& item, const Value* attribute, bool case_sensitive) {
  const Value key = attribute != nullptr && !attribute->is_none() ? AtPath(run, item, *attribute) : item;
  return key.text() != nullptr && !case_sensitive ? Lower(run, *key.text()) : key;
}

Value SortBy(Runtime& run, std::vector<Value> items, std::vector<Value> keys, bool reverse) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (!run.ok()) return false;
    return reverse ? run.Compare(keys[b], keys[a]) < 0 : run.Compare(keys[a], keys[b]) < 0;
  });
  std::vector<Value> sorted;
  for (size_t i : order) sorted.push_back(std::move(items[i]));
  return run.Make(std::move(sorted));
}

Value FilterSort(Runtime& run, const Value& subject, Arguments arguments) {
  const Value* const attribute = Given(arguments, 2);
  if (attribute != nullptr && attribute->text() != nullptr &&
      attribute->text()->bytes().find(',') != std::string::npos) {
    return run.Fail("sorting by several attributes is not supported");
  }
  std::vector<Value> items = run.Items(subject), keys;
  for (const Value& item : items) keys.push_back(SortKey(run, item, attribute, Flag(run, arguments, 1)));
  return SortBy(run, std::move(items), std::move(keys), Flag(run, arguments, 0));
}

Value FilterUnique(Runtime& run, const Value& subject, Arguments arguments) {
  return run.MakeGenerator([&](std::vector<Value>& unique) {
    std::vector<Value> keys;
    for (const Value& item : run.Items(subject)) {
      Value key = SortKey(run, item, Given(arguments, 1), Flag(run, arguments, 0));
      if (key.dict() != nullptr || key.type_name() == "list") {
        run.Fail(absl::StrFormat("a %s cannot be told apart by the filter \"unique\"", key.type_name()));
      }
      const bool known =
          std::any_of(keys.begin(), keys.end(), [&](const Value& other) { return run.Equal(other, key); });
      if (!run.ok()) return;
      if (known) continue;
      keys.push_back(std::move(key));
      unique.push_back(item);
    }
  });
}

Value FilterDictsort(Runtime& run, const Value& subject, Arguments arguments) {
  const Dict* const dict = subject.dict();
  if (dict == nullptr)
    return run.Fail(absl::StrFormat("a %s is not sorted by \"dictsort\"", subject.type_name()));
  const std::string by = arguments[1] ? run.Str(*arguments[1]).bytes() : "key";
  if (by != "key" && by != "value") return run.Fail("\"dictsort\" sorts by \"key\" or by \"value\"");
  std::vector<Value> keys;
  for (const auto& [key, value] : dict->entries) {
    keys.push_back(SortKey(run, by == "key" ? key : value, nullptr, Flag(run, arguments, 0)));
  }
  return SortBy(run, run.Entries(*dict), std::move(keys), Flag(run, arguments, 2));
}

Value FilterReverse(Runtime& run, const Value& subject, Arguments) {
  if (subject.text() != nullptr) return run.Slice(subject, Value(), Value(), Value(int64_t{-1}));
  std::vector<Value> items = run.Items(subject);
  std::reverse(items.begin(), items.end());
  // What cannot be gone through backwards becomes a list.
  const Sequence* const sequence = subject.sequence();
  const bool is_generator = sequence != nullptr && sequence->form == Sequence::Form::kGenerator;
  return run.Make(std::move(items), is_generator ? Sequence::Form::kList : Sequence::Form::kGenerator);
}

Value FilterFirst(Runtime& run, const Value& subject, Arguments) {
  if (Sequence* items = subject.sequence(); items != nullptr && items->form == Sequence::Form::kGenerator) {
    return run.Next(*items).value_or(Value::OfUndefined("there is no first item"));
  }
  if (const Text* text = subject.text(); text != nullptr && text->size() > 0) {
    return run.Make(text->Slice(0, CharacterBytes(text->bytes())));
  }
  const std::vector<Value> items = run.Items(subject);
  return items.empty() ? Value::OfUndefined("there is no first item") : items.front();
}

Value FilterLast(Runtime& run, const Value& subject, Arguments) {
  if (const Sequence* items = subject.sequence();
      items != nullptr && items->form == Sequence::Form::kGenerator) {
    return run.Fail("a generator has no last item");
  }
  if (subject.text() != nullptr) {
    const Value last = run.Item(subject, Value(int64_t{-1}));
    return last.is_undefined() ? Value::OfUndefined("there is no last item") : last;
  }
  const std::vector<Value> items = run.Items(subject);
  return items.empty() ? Value::OfUndefined("there is no last item") : items.back();
}

Value FilterLength(Runtime& run, const Value& subject, Arguments) {
  const auto length = run.Length(subject);
  if (!length) return run.Fail(absl::StrFormat("a %s has no length", subject.type_name()));
  return Value(static_cast<int64_t>(*length));
}

Value FilterDefault(Runtime& run, const Value& subject, Arguments arguments) {
  const bool replaces = subject.is_undefined() || (Flag(run, arguments, 1) && !run.Truthy(subject));
  return replaces ? arguments[0].value_or(Value::Markup("")) : subject;
}

Value FilterMap(Runtime& run, const Value& subject, Arguments arguments) {
  const Value* const attribute = Given(arguments, 1);
  if ((Given(arguments, 0) != nullptr) == (attribute != nullptr)) {
    return run.Fail("the filter \"map\" needs a filter or an attribute");
  }
  const Operation* const filter = attribute != nullptr ? nullptr : FindFilter(arguments[0]->text()->bytes());
  return run.MakeGenerator([&](std::vector<Value>& mapped) {
    if (!run.Truthy(subject)) return;
    for (const Value& item : run.Items(subject)) {
      if (!run.Charge()) return;
      Value value;
      if (filter != nullptr) {
        const std::vector<std::optional<Value>> none(filter->parameters.size());
        value = filter->apply(run, item, none);
      } else {
        value = AtPath(run, item, *attribute);
        if (value.is_undefined() && arguments[2]) value = *arguments[2];
      }
      if (!run.ok()) return;
      mapped.push_back(std::move(value));
    }
  });
}

// Items for which the test's outcome is `wanted`. `attribute` null: of the items themselves.
Value Select(Runtime& run, const Value& subject, const Value* attribute, const Value* test,
             const Value* argument, bool wanted) {
  const Operation* const operation = test == nullptr ? nullptr : FindTest(test->text()->bytes());
  return run.MakeGenerator([&](std::vector<Value>& selected) {
    if (!run.Truthy(subject)) return;
    for (const Value& item : run.Items(subject)) {
      if (!run.Charge()) return;
      const Value value = attribute == nullptr ? item : AtPath(run, item, *attribute);
      bool outcome = run.Truthy(value);
      if (operation != nullptr && run.ok()) {
        std::vector<std::optional<Value>> arguments(operation->parameters.size());
        if (argument != nullptr && arguments.empty()) {
          run.Fail(absl::StrFormat("the test \"%s\" takes no argument", operation->name));
        } else if (argument != nullptr) {
          arguments[0] = *argument;
        }
        if (run.ok()) outcome = run.Truthy(operation->apply(run, value, arguments));
      }
      if (!run.ok()) return;
      if (outcome == wanted) selected.push_back(item);
    }
  });
}

Value FilterItems(Runtime& run, const Value& subject, Arguments) {
  return run.MakeGenerator([&](std::vector<Value>& items) {
    if (subject.is_undefined()) return;
    if (subject.dict() == nullptr) {
      run.Fail(absl::StrFormat("a %s has no items", subject.type_name()));
    } else {
      items = run.Entries(*subject.dict());
    }
  });
}

template <bool kWanted>
Value FilterSelect(Runtime& run, const Value& subject, Arguments arguments) {
  return Select(run, subject, nullptr, Given(arguments, 0), Given(arguments, 1), kWanted);
}

template <bool kWanted>
Value FilterSelectAttr(Runtime& run, const Value& subject, Arguments arguments) {
  return Select(run, subject, Given(arguments, 0), Given(arguments, 1), Given(arguments, 2), kWanted);
}

Value FilterList(Runtime& run, const Value& subject, Arguments) { return run.Make(run.Items(subject)); }

// ---- Texts ----

// A word begins behind white space and some signs; for the method of that name, elsewhere.
Value TitleWords(Runtime& run, const Text& text) {
  bool first = true;
  return MakeMapped(run, text, [&](char32_t c) {
    const bool between = IsSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    return std::exchange(first, between) ? ToUpper(c) : ToLower(c);
  });
}

template <Value (*kMap)(Runtime&, const Text&)>
Value FilterCase(Runtime& run, const Value& subject, Arguments) {
  return kMap(run, run.Str(subject));
}

Value FilterString(Runtime& run, const Value& subject, Arguments) { return run.Make(run.Str(subject)); }

Value FilterTrim(Runtime& run, const Value& subject, Arguments arguments) {
  return Strip(run, run.Str(subject), Given(arguments, 0), Side::kBoth);
}

Value FilterReplace(Runtime& run, const Value& subject, Arguments arguments) {
  return Replace(run, run.Str(subject), run.Str(*arguments[0]), run.Str(*arguments[1]),
                 CountOr(run, arguments, 2));
}

Value FilterJoin(Runtime& run, const Value& subject, Arguments arguments) {
  std::vector<Value> parts = run.Items(subject);
  if (arguments[1] && !arguments[1]->is_none()) {
    for (Value& part : parts) part = AtPath(run, part, *arguments[1]);
  }
  const bool joins = arguments[0] && parts.size() > 1;
  return Join(run, parts, joins ? run.Str(*arguments[0]) : Text(), /*only_texts=*/false);
}

Value FilterIndent(Runtime& run, const Value& subject, Arguments arguments) {
  Text indent = Text::Markup("    ");
  if (arguments[0]) {
    if (const Text* mark = arguments[0]->text()) {
      indent = *mark;
    } else {
      const auto width = NeedInteger(run, *arguments[0], "the width");
      if (!width) return Value();
      const Value spaces = run.Binary("*", Value::Markup(" "), Value(*width));
      if (spaces.text() == nullptr) return Value();
      indent = *spaces.text();
    }
  }
  const bool first = Flag(run, arguments, 1), blank = Flag(run, arguments, 2);
  if (subject.is_undefined()) return run.FailUndefined(subject);
  const Text* const given = NeedText(run, subject, "what is indented");
  if (given == nullptr) return Value();
  Text text = *given;
  text.Append("\n");
  const std::vector<Text> lines = Lines(text, /*keep_ends=*/false);
  Text indented;
  for (size_t i = 0; i < lines.size() && run.Charge(); ++i) {
    if (i > 0) indented.Append("\n");
    if (i == 0 ? first : blank || lines[i].size() > 0) indented.Append(indent);
    indented.Append(lines[i]);
    if (indented.size() > run.options().max_output_bytes) break;  // Make refuses it
  }
  return run.Make(std::move(indented));
}

Value FilterToJson(Runtime& run, const Value& subject, Arguments arguments) {
  JsonStyle style;
  style.ascii_only = Flag(run, arguments, 0);
  style.sort_keys = Flag(run, arguments, 3);
  if (arguments[1] && !arguments[1]->is_none()) {
    if (arguments[1]->text() != nullptr) {
      style.indent = arguments[1]->text()->bytes();
    } else {
      const auto width = NeedInteger(run, *arguments[1], "the indent");
      if (!width) return Value();
      if (*width > 80) return run.Fail(absl::StrFormat("the indent is %d; at most 80 are supported", *width));
      style.indent = std::string(static_cast<size_t>(std::max<int64_t>(0, *width)), ' ');
    }
    style.item_separator.assign(1, ',');
  }
  if (arguments[2] && !arguments[2]->is_none()) {
    const std::vector<Value> pair = run.Items(*arguments[2]);
    if (pair.size() != 2 || pair[0].text() == nullptr || pair[1].text() == nullptr) {
      return run.Fail("the separators of \"tojson\" are not two strs");
    }
    style.item_separator = pair[0].text()->bytes();
    style.key_separator = pair[1].text()->bytes();
  }
  return run.Make(ToJson(run, subject, style));
}

const std::vector<Operation>& Filters() {
  static const std::vector<Operation> filters = {
      {"trim", {"chars"}, 0, FilterTrim},
      {"length", {}, 0, FilterLength},
      {"count", {}, 0, FilterLength},
      {"upper", {}, 0, FilterCase<Upper>},
      {"lower", {}, 0, FilterCase<Lower>},
      {"capitalize", {}, 0, FilterCase<Capitalize>},
      {"title", {}, 0, FilterCase<TitleWords>},
      {"replace", {"old", "new", "count"}, 2, FilterReplace},
      {"join", {"d", "attribute"}, 0, FilterJoin},
      {"first", {}, 0, FilterFirst},
      {"last", {}, 0, FilterLast},
      {"default", {"default_value", "boolean"}, 0, FilterDefault},
      {"d", {"default_value", "boolean"}, 0, FilterDefault},
      {"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0, FilterToJson},
      {"string", {}, 0, FilterString},
      {"safe", {}, 0, FilterString},
      {"int", {"default", "base"}, 0, FilterInt},
      {"float", {"default"}, 0, FilterFloat},
      {"abs", {}, 0, FilterAbs},
      {"list", {}, 0, FilterList},
      {"items", {}, 0, FilterItems},
      {"map", {"filter", "attribute", "default"}, 0, FilterMap, 0},
      {"select", {"test", "argument"}, 0, FilterSelect<true>, -1, 0},
      {"reject", {"test", "argument"}, 0, FilterSelect<false>, -1, 0},
      {"selectattr", {"attribute", "test", "argument"}, 1, FilterSelectAttr<true>, -1, 1},
      {"rejectattr", {"attribute", "test", "argument"}, 1, FilterSelectAttr<false>, -1, 1},
      {"reverse", {}, 0, FilterReverse},
      {"sort", {"reverse", "case_sensitive", "attribute"}, 0, FilterSort},
      {"unique", {"case_sensitive", "attribute"}, 0, FilterUnique},
      {"dictsort", {"case_sensitive", "by", "reverse"}, 0, FilterDictsort},
      {"indent", {"width", "first", "blank"}, 0, FilterIndent},
  };
  return filters;
}

}  // namespace

const Operation* FindFilter(std::string_view name) { return FindByName(Filters(), name); }

}  // namespace efla::jinja
