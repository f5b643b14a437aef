#include "client/prompt.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iostream>

#include "absl/strings/str_format.h"

namespace efla {

InputFile::InputFile(const std::string& path, size_t max_bytes) : path_(path), max_bytes_(max_bytes) {
  if (path == "-") return;
  file_.open(path, std::ios::binary);
  if (!file_)
    opened_ = absl::NotFoundError(absl::StrFormat("cannot open %s: %s", path, std::strerror(errno)));
}

absl::StatusOr<std::string> InputFile::Next() {
  constexpr size_t kPartBytes = size_t{1} << 20;
  if (!opened_.ok()) return opened_;
  std::istream& input = path_ == "-" ? std::cin : file_;
  std::string part(kPartBytes, '\0');
  input.read(part.data(), static_cast<std::streamsize>(part.size()));
  if (input.bad()) {
    return absl::InvalidArgumentError(absl::StrFormat("cannot read %s: %s", path_, std::strerror(errno)));
  }
  part.resize(static_cast<size_t>(input.gcount()));
  bytes_ += part.size();
  if (bytes_ > max_bytes_) {
    return absl::InvalidArgumentError(absl::StrFormat("%s has more than %d bytes, the most that are read",
                                                      path_ == "-" ? "standard input" : path_, max_bytes_));
  }
  return part;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  InputFile file(path, kMaxTextBytes);
  std::string bytes;
  for (;;) {
    absl::StatusOr<std::string> part = file.Next();
    if (!part.ok()) return part;
    if (part->empty()) return bytes;
    bytes += *part;
  }
}

// Unicode's table of well-formed byte sequences: no overlong forms, no surrogates, none above U+10FFFF.
std::optional<size_t> FirstInvalidUtf8(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  for (size_t at = 0; at < text.size();) {
    const uint8_t lead = byte(at);
    const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (length > 1) {
      if (lead < 0xC2 || lead > 0xF4) return at;
      const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
      const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
      if (byte(at + 1) < low || byte(at + 1) > high) return at;
    }
    for (size_t i = 2; i < length; ++i) {
      if ((byte(at + i) & 0xC0) != 0x80) return at;
    }
    at += length;
  }
  return std::nullopt;
}

absl::Status CheckUtf8(std::string_view name, std::string_view text) {
  const std::optional<size_t> at = FirstInvalidUtf8(text);
  if (!at) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is not UTF-8: byte 0x%02x at offset %d", name,
                                                    static_cast<uint8_t>(text[*at]), *at));
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text;
  if (absl::Status status = CheckUtf8(path == "-" ? "standard input" : path, *text); !status.ok()) {
    return status;
  }
  return text;
}

absl::StatusOr<TokenIdList> ParseTokenIds(std::string_view ids) {
  constexpr std::string_view kBlanks = " \t\r\n", kSeparators = ", \t\r\n";
  std::string from_file;
  if (!ids.empty() && ids.front() == '@') {
    absl::StatusOr<std::string> read = ReadFile(std::string(ids.substr(1)));
    if (!read.ok()) return read.status();
    from_file = *std::move(read);
    ids = from_file;
  }
  TokenIdList parsed;
  size_t begin = std::min(ids.find_first_not_of(kBlanks), ids.size());
  for (;;) {
    size_t end = std::min(ids.find_first_of(kSeparators, begin), ids.size());
    if (begin == end) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the token id at position %d is empty", parsed.size()));
    }
    uint32_t id = 0;
    auto [stopped, error] = std::from_chars(ids.data() + begin, ids.data() + end, id);
    if (error != std::errc() || stopped != ids.data() + end) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token id \"%s\" at position %d is not a number from 0 to 4294967295",
                          ids.substr(begin, end - begin), parsed.size()));
    }
    parsed.push_back(id);
    begin = std::min(ids.find_first_not_of(kBlanks, end), ids.size());
    if (begin == ids.size()) break;
    if (ids[begin] == ',') begin = std::min(ids.find_first_not_of(kBlanks, begin + 1), ids.size());
  }
  return parsed;
}

absl::StatusOr<Prompt> ReadPrompt(const PromptFlags& flags) {
  const int given = flags.text.has_value() + flags.file.has_value() + flags.token_ids.has_value();
  if (given != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d of text, file and token ids are given; a prompt is one of them", given));
  }
  if (flags.text) return Prompt(*flags.text);
  if (flags.file) {
    absl::StatusOr<std::string> text = ReadTextFile(*flags.file);
    if (!text.ok()) return text.status();
    return Prompt(*std::move(text));
  }
  absl::StatusOr<TokenIdList> ids = ParseTokenIds(*flags.token_ids);
  if (!ids.ok()) return ids.status();
  return Prompt(*std::move(ids));
}

}  // namespace efla
