// The methods of strings, dicts and lists, by the names that templates give them.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/arguments.h"
#include "model/chat_template/operations.h"
#include "model/chat_template/runtime.h"
#include "model/chat_template/text_functions.h"

namespace efla::jinja {
namespace {

// The text or dict whose method is called; an error for what has none of that name.
template <auto kKind>
auto SubjectOf(Runtime& run, const Value& subject, std::string_view method) {
  if (subject.is_undefined()) {
    run.FailUndefined(subject);
  } else if ((subject.*kKind)() == nullptr) {
    run.Fail(absl::StrFormat("a %s has no method \"%s\"", subject.type_name(), method));
  }
  return (subject.*kKind)();
}
constexpr auto TextOf = SubjectOf<&Value::text>;
constexpr auto DictOf = SubjectOf<&Value::dict>;

// ---- Of strings ----

// A word begins behind all but letters; for the filter of that name, elsewhere.
Value TitleLetters(Runtime& run, const Text& text) {
  bool first = true;
  return MakeMapped(run, text,
                    [&](char32_t c) { return std::exchange(first, !IsLetter(c)) ? ToUpper(c) : ToLower(c); });
}

Value Split(Runtime& run, const Text& text, const Value* separator, int64_t most) {
  std::vector<Value> parts;
  const std::string_view bytes = text.bytes();
  int64_t left = most < 0 ? std::numeric_limits<int64_t>::max() : most;
  if (!run.Charge(bytes.size() / 16)) return Value();
  if (separator != nullptr && !separator->is_none()) {
    const Text* word = NeedText(run, *separator, "the separator");
    if (word == nullptr) return Value();
    if (word->size() == 0) return run.Fail("the separator is empty");
    size_t at = 0;
    for (; left > 0 && run.Charge(); --left) {
      const size_t found = bytes.find(word->bytes(), at);
      if (found == std::string_view::npos) break;
      parts.push_back(run.Make(text.Slice(at, found)));
      at = found + word->size();
    }
    parts.push_back(run.Make(text.Slice(at, bytes.size())));
    return run.Make(std::move(parts));
  }
  const auto space_at = [&](size_t at) { return IsSpace(CodePoint(bytes.substr(at))); };
  const auto next = [&](size_t at) { return at + CharacterBytes(bytes.substr(at)); };
  for (size_t at = 0; run.Charge();) {
    while (at < bytes.size() && space_at(at)) at = next(at);
    if (at == bytes.size()) break;
    size_t end = at;
    while (end < bytes.size() && (left == 0 || !space_at(end))) end = next(end);
    parts.push_back(run.Make(text.Slice(at, end)));
    at = end;
    --left;
  }
  return run.Make(std::move(parts));
}

Value Find(Runtime& run, const Text& text, Arguments arguments, bool last) {
  const Text* word = NeedText(run, *arguments[0], "what is to be found");
  if (word == nullptr || !run.Charge(text.size() / 16)) return Value();
  const auto length = static_cast<int64_t>(CountCharacters(text.bytes()));
  int64_t bounds[2] = {0, length};
  for (size_t i = 0; i < 2; ++i) {
    if (!arguments[1 + i] || arguments[1 + i]->is_none()) continue;
    const auto given = NeedInteger(run, *arguments[1 + i], "a bound");
    if (!given) return Value();
    bounds[i] = *given < 0 ? std::max<int64_t>(0, *given + length) : *given;
  }
  bounds[1] = std::min(bounds[1], length);
  if (bounds[0] > bounds[1]) return Value(int64_t{-1});
  const size_t begin = CharacterOffset(text.bytes(), static_cast<size_t>(bounds[0]));
  const size_t end = CharacterOffset(text.bytes(), static_cast<size_t>(bounds[1]));
  const std::string_view part = std::string_view(text.bytes()).substr(begin, end - begin);
  const size_t found = last ? part.rfind(word->bytes()) : part.find(word->bytes());
  if (found == std::string_view::npos) return Value(int64_t{-1});
  return Value(bounds[0] + static_cast<int64_t>(CountCharacters(part.substr(0, found))));
}

// A prefix or suffix, or a tuple of them.
Value HasEnd(Runtime& run, const Text& text, const Value& words, bool at_start) {
  const auto has = [&](const Text& word) {
    return at_start ? text.bytes().starts_with(word.bytes()) : text.bytes().ends_with(word.bytes());
  };
  if (words.text() != nullptr) return Value(has(*words.text()));
  if (words.type_name() != "tuple") {
    NeedText(run, words, at_start ? "the prefix" : "the suffix");
    return Value();
  }
  bool any = false;
  for (const Value& word : run.Items(words)) {
    const Text* one = NeedText(run, word, at_start ? "the prefix" : "the suffix");
    if (one == nullptr) return Value();
    any = any || has(*one);
  }
  return Value(any);
}

template <Side kSide>
Value MethodStrip(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "strip");
  return text == nullptr ? Value() : Strip(run, *text, Given(arguments, 0), kSide);
}

template <Value (*kMap)(Runtime&, const Text&)>
Value MethodCase(Runtime& run, const Value& subject, Arguments) {
  const Text* const text = TextOf(run, subject, "upper, lower, title or capitalize");
  return text == nullptr ? Value() : kMap(run, *text);
}

template <bool kAtStart>
Value MethodHasEnd(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, kAtStart ? "startswith" : "endswith");
  return text == nullptr ? Value() : HasEnd(run, *text, *arguments[0], kAtStart);
}

template <bool kLast>
Value MethodFind(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "find");
  return text == nullptr ? Value() : Find(run, *text, arguments, kLast);
}

Value MethodSplit(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "split");
  return text == nullptr ? Value() : Split(run, *text, Given(arguments, 0), CountOr(run, arguments, 1));
}

Value MethodSplitlines(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "splitlines");
  if (text == nullptr || !run.Charge(text->size() / 16)) return Value();
  std::vector<Value> lines;
  for (Text& line : Lines(*text, Flag(run, arguments, 0))) lines.push_back(run.Make(std::move(line)));
  return run.Make(std::move(lines));
}

Value MethodReplace(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "replace");
  const Text* const from = text == nullptr ? nullptr : NeedText(run, *arguments[0], "what is to be replaced");
  const Text* const to = from == nullptr ? nullptr : NeedText(run, *arguments[1], "the replacement");
  return to == nullptr ? Value() : Replace(run, *text, *from, *to, CountOr(run, arguments, 2));
}

Value MethodCount(Runtime& run, const Value& subject, Arguments arguments) {
  if (subject.type_name() == "list" || subject.type_name() == "tuple") {
    int64_t equal = 0;
    for (const Value& item : run.Items(subject)) equal += run.Equal(item, *arguments[0]);
    return Value(equal);
  }
  const Text* const text = TextOf(run, subject, "count");
  const Text* const word = text == nullptr ? nullptr : NeedText(run, *arguments[0], "what is counted");
  if (word == nullptr) return Value();
  if (word->size() == 0) return Value(static_cast<int64_t>(CountCharacters(text->bytes()) + 1));
  int64_t count = 0;
  for (size_t at = 0; run.Charge() && (at = text->bytes().find(word->bytes(), at)) != std::string::npos;
       ++count) {
    at += word->size();
  }
  return Value(count);
}

Value MethodJoin(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, "join");
  return text == nullptr ? Value() : Join(run, run.Items(*arguments[0]), *text, /*only_texts=*/true);
}

template <bool kPrefix>
Value MethodRemove(Runtime& run, const Value& subject, Arguments arguments) {
  const Text* const text = TextOf(run, subject, kPrefix ? "removeprefix" : "removesuffix");
  const Text* const word = text == nullptr ? nullptr : NeedText(run, *arguments[0], "what is to be removed");
  if (word == nullptr) return Value();
  if (kPrefix) {
    return run.Make(text->bytes().starts_with(word->bytes()) ? text->Slice(word->size(), text->size())
                                                             : *text);
  }
  return run.Make(text->bytes().ends_with(word->bytes()) ? text->Slice(0, text->size() - word->size())
                                                         : *text);
}

Value MethodItems(Runtime& run, const Value& subject, Arguments) {
  const Dict* const dict = DictOf(run, subject, "items");
  return dict == nullptr ? Value() : run.Make(run.Entries(*dict), Sequence::Form::kView);
}

template <bool kKeys>
Value MethodSides(Runtime& run, const Value& subject, Arguments) {
  const Dict* const dict = DictOf(run, subject, kKeys ? "keys" : "values");
  if (dict == nullptr) return Value();
  std::vector<Value> side;
  for (const auto& [key, value] : dict->entries) side.push_back(kKeys ? key : value);
  return run.Make(std::move(side), Sequence::Form::kView);
}

Value MethodGet(Runtime& run, const Value& subject, Arguments arguments) {
  const Dict* const dict = DictOf(run, subject, "get");
  if (dict == nullptr) return Value();
  const Value* const found = run.Find(*dict, *arguments[0]);
  return found != nullptr ? *found : arguments[1].value_or(Value::OfNone());
}

const std::vector<Operation>& Methods() {
  static const std::vector<Operation> methods = {
      {"strip", {"chars"}, 0, MethodStrip<Side::kBoth>},
      {"lstrip", {"chars"}, 0, MethodStrip<Side::kLeft>},
      {"rstrip", {"chars"}, 0, MethodStrip<Side::kRight>},
      {"split", {"sep", "maxsplit"}, 0, MethodSplit},
      {"splitlines", {"keepends"}, 0, MethodSplitlines},
      {"startswith", {"prefix"}, 1, MethodHasEnd<true>},
      {"endswith", {"suffix"}, 1, MethodHasEnd<false>},
      {"upper", {}, 0, MethodCase<Upper>},
      {"lower", {}, 0, MethodCase<Lower>},
      {"title", {}, 0, MethodCase<TitleLetters>},
      {"capitalize", {}, 0, MethodCase<Capitalize>},
      {"replace", {"old", "new", "count"}, 2, MethodReplace},
      {"find", {"sub", "start", "end"}, 1, MethodFind<false>},
      {"rfind", {"sub", "start", "end"}, 1, MethodFind<true>},
      {"count", {"sub"}, 1, MethodCount},
      {"join", {"iterable"}, 1, MethodJoin},
      {"removeprefix", {"prefix"}, 1, MethodRemove<true>},
      {"removesuffix", {"suffix"}, 1, MethodRemove<false>},
      {"items", {}, 0, MethodItems},
      {"keys", {}, 0, MethodSides<true>},
      {"values", {}, 0, MethodSides<false>},
      {"get", {"key", "default"}, 1, MethodGet},
  };
  return methods;
}

}  // namespace

const Operation* FindMethod(std::string_view name) { return FindByName(Methods(), name); }

}  // namespace efla::jinja
