// UTF-8: finding bytes that are not, and replacing them as a stream goes by.
#ifndef EFLA_MODEL_UTF8_H_
#define EFLA_MODEL_UTF8_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace efla {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Where the first byte lies that does not belong to a well-formed character.
std::optional<size_t> FindInvalidUtf8(std::string_view text);

// Makes any byte stream well-formed: each maximal run of bytes that begins a character but cannot be
// finished, and each byte that can begin none, becomes one U+FFFD (the practice of the WHATWG encoding
// standard). Copyable; the same bytes give the same text however they are cut.
class Utf8Repair {
 public:
  // Offers one byte. Appends to `out` what is now certain: a whole character or one U+FFFD. False when that
  // U+FFFD stands for the bytes before and the byte itself must be offered again.
  bool Push(char byte, std::string& out);
  // The stream is over: an unfinished character becomes one U+FFFD.
  void Finish(std::string& out);
  // The unfinished character, at most 3 bytes.
  std::string_view pending() const { return {pending_, pending_bytes_}; }

 private:
  char pending_[4] = {};
  size_t pending_bytes_ = 0;
  size_t wanted_bytes_ = 0;                           // of the character that pending begins
  unsigned char next_low_ = 0x80, next_high_ = 0xBF;  // what its next byte may be
};

}  // namespace efla

#endif  // EFLA_MODEL_UTF8_H_
