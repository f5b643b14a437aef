// Text that remembers which of its bytes came from a message, and characters as Python counts them.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_TEXT_H_
#define EFLA_MODEL_CHAT_TEMPLATE_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace efla::jinja {

// Well-formed UTF-8. A byte is content or markup: content came from a message, markup was written by the
// template.
class Text {
 public:
  struct Range {
    size_t begin = 0, end = 0;  // bytes
    bool operator==(const Range&) const = default;
  };

  Text() = default;
  static Text Markup(std::string bytes);
  static Text Content(std::string bytes);
  // Bytes made of `from` in a way that cannot be followed byte for byte: all content if any of it was.
  static Text MadeOf(const Text& from, std::string bytes);

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  const std::vector<Range>& content() const { return content_; }  // ascending, none empty, none touch

  void Append(const Text& other);
  void Append(std::string_view markup) { bytes_ += markup; }
  Text Slice(size_t begin, size_t end) const;  // bytes

 private:
  void AddContent(size_t begin, size_t end);

  std::string bytes_;
  std::vector<Range> content_;
};

// The length in bytes of the character that `text` begins with; `text` is not empty.
size_t CharacterBytes(std::string_view text);
// Its code point.
char32_t CodePoint(std::string_view text);
void AppendCodePoint(char32_t code_point, std::string& text);
size_t CountCharacters(std::string_view text);
// Where the character with that number begins; the end of the text where there are fewer.
size_t CharacterOffset(std::string_view text, size_t number);

bool IsSpace(char32_t code_point);    // as Python's str.isspace
bool IsLineEnd(char32_t code_point);  // as Python's str.splitlines
bool IsLetter(char32_t code_point);
bool IsPrintable(char32_t code_point);
// One character for one: Unicode's simple mappings.
char32_t ToUpper(char32_t code_point);
char32_t ToLower(char32_t code_point);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_TEXT_H_
