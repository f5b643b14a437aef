// What filters and methods alike do with texts. Bytes that came from messages stay marked.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_TEXT_FUNCTIONS_H_
#define EFLA_MODEL_CHAT_TEMPLATE_TEXT_FUNCTIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/chat_template/runtime.h"
#include "model/chat_template/text.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

// `map` gives each character what stands for it, from its code point; it is called once for each, in their
// order.
template <typename Map>
Text MapCharacters(const Text& text, Map map) {
  Text mapped;
  const std::string_view bytes = text.bytes();
  for (size_t at = 0; at < bytes.size();) {
    const size_t length = CharacterBytes(bytes.substr(at));
    std::string character;
    AppendCodePoint(map(CodePoint(bytes.substr(at))), character);
    mapped.Append(Text::MadeOf(text.Slice(at, at + length), std::move(character)));
    at += length;
  }
  return mapped;
}

template <typename Map>
Value MakeMapped(Runtime& run, const Text& text, Map map) {
  if (!run.Charge(text.size() / 4)) return Value();
  return run.Make(MapCharacters(text, map));
}

Value Upper(Runtime& run, const Text& text);
Value Lower(Runtime& run, const Text& text);
Value Capitalize(Runtime& run, const Text& text);

enum class Side { kBoth, kLeft, kRight };
// `characters` null or none: white space goes.
Value Strip(Runtime& run, const Text& text, const Value* characters, Side side);

// The first `count`, or all where it is negative.
Value Replace(Runtime& run, const Text& text, const Text& from, const Text& to, int64_t count);

// `only_texts`: an error where a part is something else.
Value Join(Runtime& run, const std::vector<Value>& parts, const Text& between, bool only_texts);

std::vector<Text> Lines(const Text& text, bool keep_ends);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_TEXT_FUNCTIONS_H_
