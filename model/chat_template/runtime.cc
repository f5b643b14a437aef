#include "model/chat_template/runtime.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"

namespace efla::jinja {
namespace {

constexpr int kMaxDepth = 100;  // of containers in containers
constexpr size_t kItemBytes = 64;

// Attributes that Python's types have: what stands behind them is a method, not an entry of that name.
bool IsMethodName(const Value& object, std::string_view name) {
  constexpr std::array<std::string_view, 11> kDict = {"clear",      "copy",   "fromkeys", "get",
                                                      "items",      "keys",   "pop",      "popitem",
                                                      "setdefault", "update", "values"};
  constexpr std::array<std::string_view, 11> kList = {
      "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"};
  constexpr std::array<std::string_view, 47> kText = {
      "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
      "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
      "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
      "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
      "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
      "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
      "swapcase",   "title",        "translate",    "upper",   "zfill"};
  const auto is_in = [&](const auto& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (object.dict() != nullptr) return is_in(kDict);
  if (object.text() != nullptr) return is_in(kText);
  if (const Sequence* items = object.sequence()) {
    if (items->form == Sequence::Form::kList) return is_in(kList);
    if (items->form == Sequence::Form::kTuple) return name == "count" || name == "index";
  }
  return false;
}

bool IsNumber(const Value& value) { return Runtime::AsNumber(value).has_value(); }

int Order(double a, double b) { return a < b ? -1 : a > b ? 1 : 0; }
int Order(int64_t a, int64_t b) { return a < b ? -1 : a > b ? 1 : 0; }

}  // namespace

std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 64> buffer;
  const auto scientific =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  std::string text(buffer.data(), scientific.ptr);
  const size_t e = text.find('e');
  int exponent = 0;
  const char* const digits = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(digits, text.data() + text.size(), exponent);
  if (exponent < -4 || exponent >= 16) return text;
  const auto fixed =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed);
  text.assign(buffer.data(), fixed.ptr);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

Value Runtime::Fail(std::string_view what) {
  if (error_.ok()) error_ = absl::FailedPreconditionError(absl::StrFormat("line %d: %s", line_, what));
  return Value();
}

Value Runtime::FailBound(std::string_view what) {
  beyond_bounds_ = true;
  return Refuse(what);
}

Value Runtime::Refuse(std::string_view what) {
  if (error_.ok()) error_ = absl::InvalidArgumentError(absl::StrFormat("line %d: %s", line_, what));
  return Value();
}

Value Runtime::FailUndefined(const Value& value) {
  const auto& what = value.As<Value::Undefined>()->what;
  return Fail(what == nullptr ? "a value is undefined" : *what);
}

bool Runtime::Charge(size_t steps) {
  if (!ok()) return false;
  steps_ += steps;
  if (steps_ <= options_.max_steps) return true;
  FailBound(absl::StrFormat("the template takes more than %d steps", options_.max_steps));
  return false;
}

Value Runtime::Make(Text text) {
  bytes_made_ += text.size();
  if (bytes_made_ > options_.max_made_bytes || text.size() > options_.max_output_bytes) {
    return FailBound(
        absl::StrFormat("the template makes a text of more than %d bytes, or more than %d bytes of them",
                        options_.max_output_bytes, options_.max_made_bytes));
  }
  return Value(std::move(text));
}

Value Runtime::Make(std::vector<Value> items, Sequence::Form form) {
  if (!Charge(items.size())) return Value();
  bytes_made_ += items.size() * kItemBytes;
  Value value = Value::OfItems(std::move(items), form);
  if (bytes_made_ > options_.max_made_bytes) {
    return FailBound(
        absl::StrFormat("the template makes lists of more than %d bytes", options_.max_made_bytes));
  }
  if (value.depth() > kMaxDepth) return FailBound(absl::StrFormat("more than %d levels of lists", kMaxDepth));
  return value;
}

Value Runtime::Make(std::vector<std::pair<Value, Value>> entries) {
  if (!Charge(entries.size())) return Value();
  Value value = Value::OfEntries(std::move(entries));
  if (value.depth() > kMaxDepth) return FailBound(absl::StrFormat("more than %d levels of dicts", kMaxDepth));
  return value;
}

Value Runtime::MakeNamespace(Namespace attributes) {
  if (!Charge(attributes.attributes.size())) return Value();
  namespaces_.push_back(std::move(attributes));
  return Value(&namespaces_.back());
}

Value Runtime::MakeGenerator(const std::function<void(std::vector<Value>& items)>& fill) {
  if (!ok()) return Value();
  std::vector<Value> items;
  fill(items);
  std::string error;
  if (!ok() && !beyond_bounds_) {
    error = std::string(error_.message());
    error_ = absl::OkStatus();
  }
  const Value generator = Make(std::move(items), Sequence::Form::kGenerator);
  if (Sequence* sequence = generator.sequence()) sequence->error = std::move(error);
  return generator;
}

std::optional<Value> Runtime::Next(Sequence& generator) {
  if (!Charge()) return std::nullopt;
  if (generator.next < generator.items.size()) return generator.items[generator.next++];
  if (!generator.error.empty()) error_ = absl::FailedPreconditionError(std::exchange(generator.error, ""));
  return std::nullopt;
}

std::optional<int64_t> Runtime::AsInteger(const Value& value) {
  if (const bool* boolean = value.As<bool>()) return *boolean ? 1 : 0;
  if (const int64_t* integer = value.As<int64_t>()) return *integer;
  return std::nullopt;
}

std::optional<double> Runtime::AsNumber(const Value& value) {
  if (const double* real = value.As<double>()) return *real;
  if (const auto integer = AsInteger(value)) return static_cast<double>(*integer);
  return std::nullopt;
}

bool Runtime::Truthy(const Value& value) const {
  if (value.is_undefined() || value.is_none()) return false;
  if (const auto number = AsNumber(value)) return *number != 0;
  if (const Text* text = value.text()) return text->size() > 0;
  if (const Dict* dict = value.dict()) return !dict->entries.empty();
  if (const Sequence* items = value.sequence()) {
    return items->form == Sequence::Form::kGenerator || !items->items.empty();
  }
  return true;
}

bool Runtime::Equal(const Value& a, const Value& b) {
  if (!Charge()) return false;
  const auto integer_a = AsInteger(a), integer_b = AsInteger(b);
  if (integer_a && integer_b) return *integer_a == *integer_b;
  const auto number_a = AsNumber(a), number_b = AsNumber(b);
  if (number_a && number_b) return *number_a == *number_b;
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.text() != nullptr && b.text() != nullptr) return a.text()->bytes() == b.text()->bytes();
  if (const Sequence* x = a.sequence(), *y = b.sequence(); x != nullptr && y != nullptr) {
    if (x == y) return true;
    if (x->form != y->form || x->form == Sequence::Form::kGenerator || x->items.size() != y->items.size())
      return false;
    for (size_t i = 0; i < x->items.size(); ++i) {
      if (!Equal(x->items[i], y->items[i])) return false;
    }
    return true;
  }
  if (const Dict* x = a.dict(), *y = b.dict(); x != nullptr && y != nullptr) {
    if (x->entries.size() != y->entries.size()) return false;
    for (const auto& [key, value] : x->entries) {
      const Value* const other = Find(*y, key);
      if (other == nullptr || !Equal(value, *other)) return false;
    }
    return true;
  }
  if (a.Is<Namespace*>() && b.Is<Namespace*>()) return *a.As<Namespace*>() == *b.As<Namespace*>();
  if (a.Is<Value::Macro>() && b.Is<Value::Macro>()) return *a.As<Value::Macro>() == *b.As<Value::Macro>();
  if (a.Is<Builtin>() && b.Is<Builtin>()) return *a.As<Builtin>() == *b.As<Builtin>();
  return false;
}

int Runtime::Compare(const Value& a, const Value& b) {
  if (!Charge()) return 0;
  if (a.is_undefined()) return FailUndefined(a), 0;
  if (b.is_undefined()) return FailUndefined(b), 0;
  const auto integer_a = AsInteger(a), integer_b = AsInteger(b);
  if (integer_a && integer_b) return Order(*integer_a, *integer_b);
  const auto number_a = AsNumber(a), number_b = AsNumber(b);
  if (number_a && number_b) return Order(*number_a, *number_b);
  // The order of UTF-8's bytes is that of the code points.
  if (a.text() != nullptr && b.text() != nullptr) return a.text()->bytes().compare(b.text()->bytes());
  const Sequence *x = a.sequence(), *y = b.sequence();
  if (x != nullptr && y != nullptr && x->form == y->form &&
      (x->form == Sequence::Form::kList || x->form == Sequence::Form::kTuple)) {
    const size_t common = std::min(x->items.size(), y->items.size());
    for (size_t i = 0; i < common; ++i) {
      if (!Equal(x->items[i], y->items[i])) return Compare(x->items[i], y->items[i]);
    }
    return Order(static_cast<int64_t>(x->items.size()), static_cast<int64_t>(y->items.size()));
  }
  Fail(absl::StrFormat("%s and %s have no order", a.type_name(), b.type_name()));
  return 0;
}

const Value* Runtime::Find(const Dict& dict, const Value& key) {
  for (const auto& [known, value] : dict.entries) {
    if (Equal(known, key)) return &value;
  }
  return nullptr;
}

bool Runtime::Contains(const Value& container, const Value& item) {
  if (const Text* text = container.text()) {
    if (item.text() == nullptr) {
      Fail(absl::StrFormat("%s is searched for in a str", item.type_name()));
      return false;
    }
    return Charge(1 + text->size() / 64) && text->bytes().find(item.text()->bytes()) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) {
    if (item.sequence() != nullptr || item.dict() != nullptr) {
      if (item.type_name() != "tuple") Fail(absl::StrFormat("%s is no key of a dict", item.type_name()));
      return false;
    }
    return Find(*dict, item) != nullptr;
  }
  if (!IsIterable(container)) {
    Fail(absl::StrFormat("%s cannot be searched", container.type_name()));
    return false;
  }
  if (Sequence* items = container.sequence(); items != nullptr && items->form == Sequence::Form::kGenerator) {
    while (const std::optional<Value> one = Next(*items)) {
      if (Equal(*one, item)) return true;
    }
    return false;
  }
  for (const Value& one : Items(container)) {
    if (Equal(one, item)) return true;
  }
  return false;
}

std::optional<size_t> Runtime::Length(const Value& value) const {
  if (value.is_undefined()) return 0;
  if (const Text* text = value.text()) return CountCharacters(text->bytes());
  if (const Dict* dict = value.dict()) return dict->entries.size();
  if (const Sequence* items = value.sequence();
      items != nullptr && items->form != Sequence::Form::kGenerator) {
    return items->items.size();
  }
  if (const auto* loop = value.As<Value::LoopPointer>()) return (*loop)->items->items.size();
  return std::nullopt;
}

bool Runtime::IsIterable(const Value& value) const {
  return value.is_undefined() || value.text() != nullptr || value.dict() != nullptr ||
         value.sequence() != nullptr;
}

std::vector<Value> Runtime::Entries(const Dict& dict) {
  std::vector<Value> pairs;
  for (const auto& [key, value] : dict.entries) {
    pairs.push_back(Make(std::vector<Value>{key, value}, Sequence::Form::kTuple));
  }
  return pairs;
}

std::vector<Value> Runtime::Items(const Value& value) {
  std::vector<Value> items;
  if (!ok() || value.is_undefined()) return items;
  if (const Text* text = value.text()) {
    if (!Charge(text->size())) return items;
    for (size_t at = 0; at < text->size();) {
      const size_t end = at + CharacterBytes(std::string_view(text->bytes()).substr(at));
      items.push_back(Make(text->Slice(at, end)));
      at = end;
    }
  } else if (const Dict* dict = value.dict()) {
    if (!Charge(dict->entries.size())) return items;
    for (const auto& entry : dict->entries) items.push_back(entry.first);
  } else if (Sequence* sequence = value.sequence()) {
    if (sequence->form == Sequence::Form::kGenerator) {
      while (std::optional<Value> item = Next(*sequence)) items.push_back(*std::move(item));
    } else if (Charge(sequence->items.size())) {
      items = sequence->items;
    }
  } else {
    Fail(absl::StrFormat("%s cannot be iterated over", value.type_name()));
  }
  return items;
}

Text Runtime::Str(const Value& value) {
  if (value.is_undefined()) return Text();
  if (const Text* text = value.text()) return *text;
  return Repr(value);
}

Text Runtime::Repr(const Value& value) {
  Text text;
  AppendRepr(value, text);
  return text;
}

void Runtime::AppendItems(const Sequence& items, Text& out) {
  for (size_t i = 0; i < items.items.size() && ok(); ++i) {
    if (i > 0) out.Append(", ");
    AppendRepr(items.items[i], out);
  }
}

void Runtime::AppendRepr(const Value& value, Text& out) {
  if (!Charge()) return;
  if (out.size() > options_.max_output_bytes) {
    FailBound(absl::StrFormat("the template makes a text of more than %d bytes", options_.max_output_bytes));
    return;
  }
  if (value.is_undefined()) return out.Append("Undefined");
  if (value.is_none()) return out.Append("None");
  if (const bool* boolean = value.As<bool>()) return out.Append(*boolean ? "True" : "False");
  if (const int64_t* integer = value.As<int64_t>()) return out.Append(absl::StrFormat("%d", *integer));
  if (const double* real = value.As<double>()) return out.Append(FloatText(*real));
  if (const Text* text = value.text()) {
    const std::string& bytes = text->bytes();
    if (!Charge(bytes.size() / 16)) return;
    const bool has_single = bytes.find('\'') != std::string::npos;
    const char quote = has_single && bytes.find('"') == std::string::npos ? '"' : '\'';
    out.Append(std::string(1, quote));
    for (size_t at = 0; at < bytes.size();) {
      const std::string_view rest = std::string_view(bytes).substr(at);
      const size_t length = CharacterBytes(rest);
      const char32_t c = CodePoint(rest);
      std::string escaped;
      if (c == '\\' || c == static_cast<char32_t>(quote)) {
        escaped = std::string("\\") + static_cast<char>(c);
      } else if (c == '\n' || c == '\r' || c == '\t') {
        escaped.append(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
      } else if (!IsPrintable(c)) {
        const auto code = static_cast<uint32_t>(c);
        escaped = code < 0x100     ? absl::StrFormat("\\x%02x", code)
                  : code < 0x10000 ? absl::StrFormat("\\u%04x", code)
                                   : absl::StrFormat("\\U%08x", code);
      }
      if (escaped.empty()) {
        out.Append(text->Slice(at, at + length));
      } else {
        out.Append(Text::MadeOf(text->Slice(at, at + length), std::move(escaped)));
      }
      at += length;
    }
    out.Append(std::string(1, quote));
    return;
  }
  if (const Dict* dict = value.dict()) {
    out.Append("{");
    for (size_t i = 0; i < dict->entries.size() && ok(); ++i) {
      if (i > 0) out.Append(", ");
      AppendRepr(dict->entries[i].first, out);
      out.Append(": ");
      AppendRepr(dict->entries[i].second, out);
    }
    return out.Append("}");
  }
  const Sequence* items = value.sequence();
  if (items != nullptr && items->form == Sequence::Form::kList) {
    out.Append("[");
    AppendItems(*items, out);
    return out.Append("]");
  }
  if (items != nullptr && items->form == Sequence::Form::kTuple) {
    out.Append("(");
    AppendItems(*items, out);
    return out.Append(items->items.size() == 1 ? ",)" : ")");
  }
  Fail(absl::StrFormat("writing a %s is not supported", value.type_name()));
}

Value Runtime::Attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) return FailUndefined(object);
  if (const auto* space = object.As<Namespace*>()) {
    const auto found = (*space)->attributes.find(name);
    if (found != (*space)->attributes.end()) return found->second;
  }
  if (const auto* pointer = object.As<Value::LoopPointer>()) {
    const Loop& loop = **pointer;
    const auto index = static_cast<int64_t>(loop.index),
               length = static_cast<int64_t>(loop.items->items.size());
    if (name == "index") return Value(index + 1);
    if (name == "index0") return Value(index);
    if (name == "revindex") return Value(length - index);
    if (name == "revindex0") return Value(length - index - 1);
    if (name == "first") return Value(index == 0);
    if (name == "last") return Value(index + 1 == length);
    if (name == "length") return Value(length);
    if (name == "depth") return Value(int64_t{1});
    if (name == "depth0") return Value(int64_t{0});
    if (name == "previtem" && index > 0) return loop.items->items[loop.index - 1];
    if (name == "nextitem" && index + 1 < length) return loop.items->items[loop.index + 1];
  }
  if (IsMethodName(object, name)) return Value(Builtin::kMethod);
  if (const Dict* dict = object.dict()) {
    if (const Value* found = Find(*dict, Value::Markup(name))) return *found;
  }
  return Value::OfUndefined(absl::StrFormat("%s has no attribute \"%s\"", object.type_name(), name));
}

Value Runtime::Item(const Value& object, const Value& key) {
  if (object.is_undefined()) return FailUndefined(object);
  if (const Dict* dict = object.dict()) {
    if (const Value* found = Find(*dict, key)) return *found;
    if (key.text() != nullptr && IsMethodName(object, key.text()->bytes())) return Value(Builtin::kMethod);
  } else if (key.text() != nullptr) {
    return Attribute(object, key.text()->bytes());
  }
  const auto index = AsInteger(key);
  const Sequence* items = object.sequence();
  const bool has_places =
      items != nullptr && items->form != Sequence::Form::kView && items->form != Sequence::Form::kGenerator;
  if (index && (has_places || object.text() != nullptr)) {
    const auto length = static_cast<int64_t>(*Length(object));
    const int64_t place = *index < 0 ? *index + length : *index;
    if (place >= 0 && place < length) {
      if (items != nullptr) return items->items[static_cast<size_t>(place)];
      const std::string& bytes = object.text()->bytes();
      if (!Charge(bytes.size() / 64)) return Value();
      const size_t begin = CharacterOffset(bytes, static_cast<size_t>(place));
      return Make(object.text()->Slice(begin, begin + CharacterBytes(std::string_view(bytes).substr(begin))));
    }
  }
  if (key.is_undefined()) return Value::OfUndefined("an undefined value is no index");
  const std::string name = key.text() != nullptr || index ? Repr(key).bytes() : std::string(key.type_name());
  return Value::OfUndefined(absl::StrFormat("%s has no element %s", object.type_name(), name));
}

Value Runtime::Slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) return FailUndefined(object);
  const Sequence* items = object.sequence();
  const bool has_places =
      items != nullptr && items->form != Sequence::Form::kView && items->form != Sequence::Form::kGenerator;
  if (!has_places && object.text() == nullptr) {
    return Fail(absl::StrFormat("%s cannot be sliced", object.type_name()));
  }
  for (const Value* bound : {&start, &stop, &step}) {
    if (bound->is_undefined() || bound->is_none() || AsInteger(*bound)) continue;
    return Fail(absl::StrFormat("%s is no bound of a slice", bound->type_name()));
  }
  const int64_t by = AsInteger(step).value_or(1);
  if (by == 0) return Fail("the step of a slice is 0");
  const auto length = static_cast<int64_t>(*Length(object));
  const int64_t low = by > 0 ? 0 : -1, high = by > 0 ? length : length - 1;
  const auto place = [&](const Value& bound, int64_t fallback) {
    const auto given = AsInteger(bound);
    if (!given) return fallback;
    return std::clamp(*given < 0 ? *given + length : *given, low, high);
  };
  const int64_t from = place(start, by > 0 ? low : high), to = place(stop, by > 0 ? high : low);
  if (const Text* text = object.text()) {
    if (!Charge(by == 1 ? text->size() / 16 : text->size())) return Value();
    if (by == 1) {
      const size_t begin = CharacterOffset(text->bytes(), static_cast<size_t>(from));
      return Make(
          text->Slice(begin, CharacterOffset(text->bytes(), static_cast<size_t>(std::max(from, to)))));
    }
  }
  std::vector<size_t> places;
  for (int64_t i = from; by > 0 ? i < to : i > to;) {
    places.push_back(static_cast<size_t>(i));
    if (by > 0 ? by >= to - i : by <= to - i) break;
    i += by;
  }
  if (items != nullptr) {
    std::vector<Value> part;
    for (size_t i : places) part.push_back(items->items[i]);
    return Make(std::move(part), items->form);
  }
  const std::string& bytes = object.text()->bytes();
  std::vector<size_t> offsets;  // of each character
  for (size_t at = 0; at < bytes.size(); at += CharacterBytes(std::string_view(bytes).substr(at)))
    offsets.push_back(at);
  offsets.push_back(bytes.size());
  Text picked;
  for (size_t i : places) picked.Append(object.text()->Slice(offsets[i], offsets[i + 1]));
  return Make(std::move(picked));
}

Value Runtime::Arithmetic(std::string_view op, int64_t a, int64_t b) {
  const auto too_large = [&] { return Fail(absl::StrFormat("%d %s %d is no number of 64 bits", a, op, b)); };
  int64_t result = 0;
  if (op == "+") return __builtin_add_overflow(a, b, &result) ? too_large() : Value(result);
  if (op == "-") return __builtin_sub_overflow(a, b, &result) ? too_large() : Value(result);
  if (op == "*") return __builtin_mul_overflow(a, b, &result) ? too_large() : Value(result);
  if (op == "**") {
    if (b < 0) return Arithmetic(op, static_cast<double>(a), static_cast<double>(b));
    result = 1;
    for (int64_t i = 0; i < b; ++i) {
      if (a == 0 || a == 1 || a == -1)
        return Value(a == 0 ? int64_t{0} : a == 1 || b % 2 == 0 ? int64_t{1} : int64_t{-1});
      if (__builtin_mul_overflow(result, a, &result)) return too_large();
    }
    return Value(result);
  }
  if (b == 0) return Fail("division by zero");
  if (op == "/") return Value(static_cast<double>(a) / static_cast<double>(b));
  if (b == -1) return op == "%" ? Value(int64_t{0}) : Arithmetic("-", int64_t{0}, a);
  const int64_t remainder = a % b;
  const bool rounds_down = remainder != 0 && (remainder < 0) != (b < 0);
  if (op == "//") return Value(a / b - (rounds_down ? 1 : 0));
  return Value(remainder + (rounds_down ? b : 0));
}

Value Runtime::Arithmetic(std::string_view op, double a, double b) {
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "**") {
    if (a == 0 && b < 0) return Fail("division by zero");
    if (a < 0 && b != std::floor(b)) return Fail("a root of a negative number is not supported");
    const double power = std::pow(a, b);
    if (std::isinf(power) && std::isfinite(a) && std::isfinite(b)) return Fail("the power is too large");
    return Value(power);
  }
  if (b == 0) return Fail("division by zero");
  if (op == "/") return Value(a / b);
  double remainder = std::fmod(a, b);
  double quotient = (a - remainder) / b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) {
    remainder += b;
    quotient -= 1;
  } else if (remainder == 0) {
    remainder = std::copysign(0.0, b);
  }
  if (op == "%") return Value(remainder);
  if (quotient == 0) return Value(std::copysign(0.0, a / b));
  const double floor = std::floor(quotient);
  return Value(quotient - floor > 0.5 ? floor + 1 : floor);
}

Value Runtime::Repeat(const Value& sequence, int64_t times) {
  const size_t count = times < 0 ? 0 : static_cast<size_t>(times);
  if (const Text* text = sequence.text()) {
    if (text->size() > 0 && count > options_.max_output_bytes / text->size()) {
      return FailBound(
          absl::StrFormat("a text is repeated to more than %d bytes", options_.max_output_bytes));
    }
    if (!Charge(count)) return Value();
    Text repeated;
    for (size_t i = 0; text->size() > 0 && i < count; ++i) repeated.Append(*text);
    return Make(std::move(repeated));
  }
  const Sequence& items = *sequence.sequence();
  if (!items.items.empty() && count > options_.max_steps / items.items.size()) {
    return FailBound(absl::StrFormat("a list is repeated to more than %d items", options_.max_steps));
  }
  std::vector<Value> repeated;
  for (size_t i = 0; !items.items.empty() && i < count; ++i) {
    repeated.insert(repeated.end(), items.items.begin(), items.items.end());
  }
  return Make(std::move(repeated), items.form);
}

Value Runtime::Binary(std::string_view op, const Value& a, const Value& b) {
  if (a.is_undefined()) return FailUndefined(a);
  if (b.is_undefined()) return FailUndefined(b);
  const auto integer_a = AsInteger(a), integer_b = AsInteger(b);
  if (integer_a && integer_b) return Arithmetic(op, *integer_a, *integer_b);
  if (IsNumber(a) && IsNumber(b)) return Arithmetic(op, *AsNumber(a), *AsNumber(b));
  const auto is_list = [](const Value& value) {
    const Sequence* items = value.sequence();
    return items != nullptr &&
           (items->form == Sequence::Form::kList || items->form == Sequence::Form::kTuple);
  };
  if (op == "+" && a.text() != nullptr && b.text() != nullptr) {
    Text joined = *a.text();
    joined.Append(*b.text());
    return Make(std::move(joined));
  }
  if (op == "+" && is_list(a) && is_list(b) && a.sequence()->form == b.sequence()->form) {
    std::vector<Value> joined = a.sequence()->items;
    joined.insert(joined.end(), b.sequence()->items.begin(), b.sequence()->items.end());
    return Make(std::move(joined), a.sequence()->form);
  }
  if (op == "*" && (a.text() != nullptr || is_list(a)) && integer_b) return Repeat(a, *integer_b);
  if (op == "*" && (b.text() != nullptr || is_list(b)) && integer_a) return Repeat(b, *integer_a);
  if (op == "%" && a.text() != nullptr) return Fail("formatting a string with % is not supported");
  return Fail(absl::StrFormat("%s %s %s cannot be computed", a.type_name(), op, b.type_name()));
}

Value Runtime::Negate(const Value& value) {
  if (value.is_undefined()) return FailUndefined(value);
  if (const double* real = value.As<double>()) return Value(-*real);
  if (const auto integer = AsInteger(value)) return Arithmetic("-", int64_t{0}, *integer);
  return Fail(absl::StrFormat("-%s cannot be computed", value.type_name()));
}

Value Runtime::Plus(const Value& value) {
  if (value.is_undefined()) return FailUndefined(value);
  if (value.Is<double>()) return value;
  if (const auto integer = AsInteger(value)) return Value(*integer);
  return Fail(absl::StrFormat("+%s cannot be computed", value.type_name()));
}

}  // namespace efla::jinja
