#include "model/chat_template/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/text.h"

namespace efla::jinja {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// Every kind of line end is "\n"; the last one of the template does not count.
std::string WithPlainLineEnds(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      if (i + 1 < source.size() && source[i + 1] == '\n') continue;
      text += '\n';
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

std::string_view WithoutTrailingSpace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && (text[begin] & 0xC0) == 0x80) --begin;
    if (!IsSpace(CodePoint(text.substr(begin)))) break;
    end = begin;
  }
  return text.substr(0, end);
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(WithPlainLineEnds(source)) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (error_.ok() && at_ < source_.size()) TextAndTag();
    if (!error_.ok()) return error_;
    Add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view Rest() const { return std::string_view(source_).substr(at_); }
  bool At(std::string_view word) const { return Rest().starts_with(word); }

  void Advance(size_t bytes) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                         source_.begin() + static_cast<ptrdiff_t>(at_ + bytes), '\n'));
    at_ += bytes;
  }
  void SkipSpace() {
    while (at_ < source_.size() && IsSpace(CodePoint(Rest()))) Advance(CharacterBytes(Rest()));
  }
  void Add(TokenKind kind, std::string text) {
    tokens_.push_back(Token{.kind = kind, .line = line_, .text = std::move(text)});
  }
  void Fail(std::string_view what) {
    if (error_.ok()) error_ = absl::InvalidArgumentError(absl::StrFormat("line %d: %s", line_, what));
  }

  // The text before the next tag, and the tag.
  void TextAndTag() {
    size_t tag = at_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 == source_.size()) {
        Add(TokenKind::kData, std::string(Rest()));
        Advance(Rest().size());
        return;
      }
      const char next = source_[tag + 1];
      if (next == '%' || next == '{' || next == '#') break;
    }
    const char type = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    std::string_view text = Rest().substr(0, tag - at_);
    if (sign == '-') {
      text = WithoutTrailingSpace(text);
    } else if (sign != '+' && type != '{') {
      // A tag alone at the beginning of its line takes the space before it along.
      const size_t line_begin = text.rfind('\n') + 1;  // npos + 1 is 0
      if ((line_begin > 0 || line_starts_) && WithoutTrailingSpace(text).size() <= line_begin) {
        text = text.substr(0, line_begin);
      }
    }
    if (!text.empty()) Add(TokenKind::kData, std::string(text));
    Advance(tag - at_ + 2 + (sign == '-' || sign == '+' ? 1 : 0));
    if (type == '#') {
      Comment();
    } else {
      Tag(type == '%');
    }
    line_starts_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  // Past the end of a tag whose last two characters are next.
  void EndTag(char sign, bool trims_line_end) {
    Advance(2);
    if (sign == '-') SkipSpace();
    if (sign == '\0' && trims_line_end && At("\n")) Advance(1);
  }

  void Comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) return Fail("the comment has no end");
    const char last = end > at_ ? source_[end - 1] : '\0';
    Advance(end - at_);
    EndTag(last == '-' || last == '+' ? last : '\0', /*trims_line_end=*/true);
  }

  void Tag(bool block) {
    Add(block ? TokenKind::kBlockBegin : TokenKind::kVariableBegin, block ? "{%" : "{{");
    const int begin_line = line_;
    int open = 0;  // brackets
    const std::string_view end = block ? "%}" : "}}";
    while (error_.ok()) {
      SkipSpace();
      if (at_ == source_.size()) {
        line_ = begin_line;
        return Fail("the tag has no end");
      }
      if (open == 0) {
        const char sign =
            (At("-") || (block && At("+"))) && Rest().substr(1).starts_with(end) ? source_[at_] : '\0';
        if (sign != '\0') Advance(1);
        if (sign != '\0' || At(end)) {
          Add(block ? TokenKind::kBlockEnd : TokenKind::kVariableEnd, std::string(end));
          return EndTag(sign, block);
        }
      }
      Word(open);
    }
  }

  void Word(int& open) {
    const char first = source_[at_];
    if (IsNameStart(first)) {
      size_t bytes = 1;
      while (at_ + bytes < source_.size() && (IsNameStart(Rest()[bytes]) || IsDigit(Rest()[bytes]))) ++bytes;
      Add(TokenKind::kName, std::string(Rest().substr(0, bytes)));
      Advance(bytes);
    } else if (IsDigit(first)) {
      Number();
    } else if (first == '"' || first == '\'') {
      String(first);
    } else {
      constexpr std::array<std::string_view, 27> kOperators = {
          "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]",
          "(",  ")",  "{",  "}",  ">",  "<",  "=", ".", ":", "|", ",", ";", "!"};
      const auto found =
          std::find_if(kOperators.begin(), kOperators.end(), [&](std::string_view word) { return At(word); });
      if (found == kOperators.end() || *found == "!") {
        return Fail(absl::StrFormat("the character \"%s\" does not belong into a tag",
                                    std::string(Rest().substr(0, CharacterBytes(Rest())))));
      }
      if (*found == "(" || *found == "[" || *found == "{") ++open;
      if (*found == ")" || *found == "]" || *found == "}") open = std::max(0, open - 1);
      Add(TokenKind::kOperator, std::string(*found));
      Advance(found->size());
    }
  }

  // Digits of that base, single underscores between them left out.
  std::string Digits(size_t& bytes, int base) const {
    const auto is_digit = [&](char c) {
      const char low = static_cast<char>(c | 0x20);
      return base == 16 ? IsDigit(c) || (low >= 'a' && low <= 'f') : c >= '0' && c < '0' + base;
    };
    std::string digits;
    const std::string_view rest = Rest();
    while (bytes < rest.size()) {
      if (is_digit(rest[bytes])) {
        digits += rest[bytes++];
      } else if (rest[bytes] == '_' && bytes + 1 < rest.size() && is_digit(rest[bytes + 1])) {
        ++bytes;
      } else {
        break;
      }
    }
    return digits;
  }

  void Number() {
    const std::string_view rest = Rest();
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    int base = 10;
    size_t bytes = 0;
    if (rest.size() > 2 && rest[0] == '0') {
      const char kind = static_cast<char>(rest[1] | 0x20);
      base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
      if (base != 10) bytes = 2;
    }
    std::string digits = Digits(bytes, base);
    bool real = false;
    if (base == 10 && !after_dot) {
      if (bytes + 1 < rest.size() && rest[bytes] == '.' && IsDigit(rest[bytes + 1])) {
        digits += '.';
        ++bytes;
        digits += Digits(bytes, 10);
        real = true;
      }
      size_t exponent = bytes + 1;
      if (bytes < rest.size() && (rest[bytes] | 0x20) == 'e') {
        if (exponent < rest.size() && (rest[exponent] == '+' || rest[exponent] == '-')) ++exponent;
        if (exponent < rest.size() && IsDigit(rest[exponent])) {
          digits += 'e';
          if (rest[exponent - 1] == '-') digits += '-';
          bytes = exponent;
          digits += Digits(bytes, 10);
          real = true;
        }
      }
    }
    Add(real ? TokenKind::kFloat : TokenKind::kInteger, std::string(rest.substr(0, bytes)));
    const char* const last = digits.data() + digits.size();
    const auto [end, error] = real ? std::from_chars(digits.data(), last, tokens_.back().real)
                                   : std::from_chars(digits.data(), last, tokens_.back().integer, base);
    if (error != std::errc() || end != last) {
      return Fail(absl::StrFormat("%s is no number of 64 bits", tokens_.back().text));
    }
    if (!real && base == 10 && digits.size() > 1 && digits[0] == '0' && tokens_.back().integer != 0) {
      return Fail(absl::StrFormat("the number %s begins with 0", tokens_.back().text));
    }
    Advance(bytes);
  }

  void String(char quote) {
    const int line = line_;
    std::string text;
    size_t at = at_ + 1;
    while (at < source_.size() && source_[at] != quote) {
      if (source_[at] != '\\') {
        text += source_[at++];
        continue;
      }
      if (at + 1 == source_.size()) break;
      if (!Escape(at, text)) return;
    }
    if (at >= source_.size()) return Fail("the string has no end");
    Advance(at + 1 - at_);
    tokens_.push_back(Token{.kind = TokenKind::kString, .line = line, .text = std::move(text)});
  }

  // Takes the escape at `at`, a backslash that is not the template's last character.
  bool Escape(size_t& at, std::string& text) {
    constexpr std::string_view kLetters = "abfnrtv\\'\"", kMeanings = "\a\b\f\n\r\t\v\\'\"";
    const char letter = source_[at + 1];
    if (letter == '\n') {
      at += 2;
    } else if (const size_t known = kLetters.find(letter); known != std::string_view::npos) {
      text += kMeanings[known];
      at += 2;
    } else if (letter == 'x' || letter == 'u' || letter == 'U') {
      const size_t digits = letter == 'x' ? 2 : letter == 'u' ? 4 : 8;
      return Numbered(at, 2, digits, digits, 16, text);
    } else if (letter >= '0' && letter <= '7') {
      return Numbered(at, 1, 1, 3, 8, text);
    } else if (letter == 'N') {
      Fail("characters by name (\\N{...}) are not supported");
      return false;
    } else {
      text += '\\';
      ++at;
    }
    return true;
  }

  bool Numbered(size_t& at, size_t prefix, size_t min_digits, size_t max_digits, int base,
                std::string& text) {
    const char* const begin = source_.data() + at + prefix;
    const char* const last = begin + std::min(max_digits, source_.size() - at - prefix);
    uint32_t code_point = 0;
    const auto [end, error] = std::from_chars(begin, last, code_point, base);
    if (error != std::errc() || static_cast<size_t>(end - begin) < min_digits || code_point > 0x10FFFF ||
        (code_point >= 0xD800 && code_point <= 0xDFFF)) {
      Fail(absl::StrFormat("\"%s\" is no character",
                           std::string(source_.substr(at, prefix + static_cast<size_t>(last - begin)))));
      return false;
    }
    AppendCodePoint(code_point, text);
    at += prefix + static_cast<size_t>(end - begin);
    return true;
  }

  const std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starts_ = true;  // nothing but tags that took their line end along stands before, on this line
  std::vector<Token> tokens_;
  absl::Status error_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Lex(std::string_view source) { return Lexer(source).Run(); }

}  // namespace efla::jinja
