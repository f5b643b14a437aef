#include "model/chat_template/text.h"

#include <algorithm>
#include <clocale>
#include <cwctype>

namespace efla::jinja {
namespace {

// Unicode's tables as the C library has them; null where it has not.
locale_t UnicodeTables() {
  static const locale_t tables = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  return tables;
}

}  // namespace

Text Text::Markup(std::string bytes) {
  Text text;
  text.bytes_ = std::move(bytes);
  return text;
}

Text Text::Content(std::string bytes) {
  Text text = Markup(std::move(bytes));
  text.AddContent(0, text.size());
  return text;
}

Text Text::MadeOf(const Text& from, std::string bytes) {
  return from.content_.empty() ? Markup(std::move(bytes)) : Content(std::move(bytes));
}

void Text::AddContent(size_t begin, size_t end) {
  if (begin == end) return;
  if (!content_.empty() && content_.back().end == begin) {
    content_.back().end = end;
  } else {
    content_.push_back({begin, end});
  }
}

void Text::Append(const Text& other) {
  const size_t offset = size();
  bytes_ += other.bytes_;
  for (const Range& range : other.content_) AddContent(offset + range.begin, offset + range.end);
}

Text Text::Slice(size_t begin, size_t end) const {
  Text part = Markup(bytes_.substr(begin, end - begin));
  for (const Range& range : content_) {
    const size_t from = std::max(range.begin, begin), to = std::min(range.end, end);
    if (from < to) part.AddContent(from - begin, to - begin);
  }
  return part;
}

size_t CharacterBytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const size_t bytes = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  return std::min(bytes, text.size());
}

char32_t CodePoint(std::string_view text) {
  const size_t bytes = CharacterBytes(text);
  const auto lead = static_cast<unsigned char>(text.front());
  if (bytes == 1) return lead;
  char32_t code_point = lead & (0xFFu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i)
    code_point = code_point << 6 | (static_cast<unsigned char>(text[i]) & 0x3F);
  return code_point;
}

void AppendCodePoint(char32_t code_point, std::string& text) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code_point >> shift & 0x3F)); };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xC0 | code_point >> 6);
    tail(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xE0 | code_point >> 12);
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0 | code_point >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

size_t CountCharacters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

size_t CharacterOffset(std::string_view text, size_t number) {
  size_t at = 0;
  for (; number > 0 && at < text.size(); --number) at += CharacterBytes(text.substr(at));
  return at;
}

bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsLineEnd(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool IsLetter(char32_t c) {
  if (c < 0x80) return (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
  return UnicodeTables() != nullptr && iswalpha_l(static_cast<wint_t>(c), UnicodeTables()) != 0;
}

bool IsPrintable(char32_t c) {
  if (c < 0x80) return c >= 0x20 && c != 0x7F;
  if (c <= 0xA0 || c == 0xAD || IsSpace(c)) return false;
  return UnicodeTables() == nullptr || iswprint_l(static_cast<wint_t>(c), UnicodeTables()) != 0;
}

char32_t ToUpper(char32_t c) {
  if (c < 0x80) return c >= 'a' && c <= 'z' ? c - 0x20 : c;
  return UnicodeTables() == nullptr
             ? c
             : static_cast<char32_t>(towupper_l(static_cast<wint_t>(c), UnicodeTables()));
}

char32_t ToLower(char32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 0x20 : c;
  return UnicodeTables() == nullptr
             ? c
             : static_cast<char32_t>(towlower_l(static_cast<wint_t>(c), UnicodeTables()));
}

}  // namespace efla::jinja
