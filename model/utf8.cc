#include "model/utf8.h"

namespace efla {

bool Utf8Repair::Push(char byte, std::string& out) {
  const auto value = static_cast<unsigned char>(byte);
  if (pending_bytes_ == 0) {
    if (value < 0x80) {
      out += byte;
      return true;
    }
    // Table 3-7 of the Unicode standard: the second byte's range keeps out overlong forms, surrogates and
    // everything beyond U+10FFFF.
    next_low_ = value == 0xE0 ? 0xA0 : value == 0xF0 ? 0x90 : 0x80;
    next_high_ = value == 0xED ? 0x9F : value == 0xF4 ? 0x8F : 0xBF;
    wanted_bytes_ = value < 0xC2 ? 0 : value < 0xE0 ? 2 : value < 0xF0 ? 3 : value < 0xF5 ? 4 : 0;
    if (wanted_bytes_ == 0) {
      out += kReplacementCharacter;
    } else {
      pending_[pending_bytes_++] = byte;
    }
    return true;
  }
  if (value < next_low_ || value > next_high_) {
    Finish(out);
    return false;
  }
  next_low_ = 0x80;
  next_high_ = 0xBF;
  pending_[pending_bytes_++] = byte;
  if (pending_bytes_ == wanted_bytes_) {
    out.append(pending_, pending_bytes_);
    pending_bytes_ = 0;
  }
  return true;
}

void Utf8Repair::Finish(std::string& out) {
  if (pending_bytes_ > 0) out += kReplacementCharacter;
  pending_bytes_ = 0;
}

std::optional<size_t> FindInvalidUtf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    Utf8Repair repair;
    std::string character;
    const size_t begin = at;
    while (at < text.size() && character.empty()) repair.Push(text[at++], character);
    if (character.empty() || character != text.substr(begin, at - begin)) return begin;
  }
  return std::nullopt;
}

}  // namespace efla
