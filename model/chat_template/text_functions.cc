#include "model/chat_template/text_functions.h"

#include <limits>

#include "model/chat_template/arguments.h"

namespace efla::jinja {

Value Upper(Runtime& run, const Text& text) { return MakeMapped(run, text, ToUpper); }
Value Lower(Runtime& run, const Text& text) { return MakeMapped(run, text, ToLower); }

Value Capitalize(Runtime& run, const Text& text) {
  bool first = true;
  return MakeMapped(run, text,
                    [&](char32_t c) { return std::exchange(first, false) ? ToUpper(c) : ToLower(c); });
}

Value Strip(Runtime& run, const Text& text, const Value* characters, Side side) {
  const Text* set = nullptr;
  if (characters != nullptr && !characters->is_none()) {
    set = NeedText(run, *characters, "what is to be stripped");
    if (set == nullptr) return Value();
  }
  const std::string_view bytes = text.bytes();
  const auto goes = [&](std::string_view character) {
    if (set == nullptr) return IsSpace(CodePoint(character));
    const std::string_view all = set->bytes();
    for (size_t at = 0; at < all.size(); at += CharacterBytes(all.substr(at))) {
      if (all.substr(at, CharacterBytes(all.substr(at))) == character) return true;
    }
    return false;
  };
  size_t begin = 0, end = bytes.size();
  while (side != Side::kRight && begin < end) {
    const size_t length = CharacterBytes(bytes.substr(begin));
    if (!goes(bytes.substr(begin, length)) || !run.Charge()) break;
    begin += length;
  }
  while (side != Side::kLeft && begin < end) {
    size_t last = end - 1;
    while (last > begin && (bytes[last] & 0xC0) == 0x80) --last;
    if (!goes(bytes.substr(last, end - last)) || !run.Charge()) break;
    end = last;
  }
  return run.Make(text.Slice(begin, end));
}

Value Replace(Runtime& run, const Text& text, const Text& from, const Text& to, int64_t count) {
  Text replaced;
  size_t at = 0;
  const std::string_view bytes = text.bytes();
  int64_t left = count < 0 ? std::numeric_limits<int64_t>::max() : count;
  while (left-- > 0 && run.Charge()) {
    if (replaced.size() > run.options().max_output_bytes) break;  // Make refuses it
    if (from.size() == 0) {                                       // between all characters, and at both ends
      replaced.Append(to);
      if (at == bytes.size()) return run.Make(std::move(replaced));
      const size_t length = CharacterBytes(bytes.substr(at));
      replaced.Append(text.Slice(at, at + length));
      at += length;
    } else {
      const size_t found = bytes.find(from.bytes(), at);
      if (found == std::string_view::npos) break;
      replaced.Append(text.Slice(at, found));
      replaced.Append(to);
      at = found + from.size();
    }
  }
  replaced.Append(text.Slice(at, bytes.size()));
  return run.Make(std::move(replaced));
}

Value Join(Runtime& run, const std::vector<Value>& parts, const Text& between, bool only_texts) {
  Text joined;
  for (size_t i = 0; i < parts.size() && run.Charge(); ++i) {
    if (i > 0) joined.Append(between);
    if (only_texts && NeedText(run, parts[i], "what is joined") == nullptr) return Value();
    joined.Append(run.Str(parts[i]));
    if (joined.size() > run.options().max_output_bytes) break;  // Make refuses it
  }
  return run.Make(std::move(joined));
}

std::vector<Text> Lines(const Text& text, bool keep_ends) {
  std::vector<Text> lines;
  const std::string_view bytes = text.bytes();
  for (size_t begin = 0, at = 0; at < bytes.size();) {
    size_t end = at + CharacterBytes(bytes.substr(at));
    if (IsLineEnd(CodePoint(bytes.substr(at)))) {
      if (bytes[at] == '\r' && end < bytes.size() && bytes[end] == '\n') ++end;
      lines.push_back(text.Slice(begin, keep_ends ? end : at));
      begin = end;
    } else if (end == bytes.size()) {
      lines.push_back(text.Slice(begin, end));
    }
    at = end;
  }
  return lines;
}

}  // namespace efla::jinja
