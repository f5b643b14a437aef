#include "client/prompt.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>

#include "absl/strings/str_format.h"

namespace efla {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    if (!file) return absl::NotFoundError(absl::StrFormat("cannot open %s: %s", path, std::strerror(errno)));
  }
  std::istream& input = path == "-" ? std::cin : file;
  std::string bytes;
  char buffer[1 << 16];
  while (input.read(buffer, sizeof(buffer)) || input.gcount() > 0) bytes.append(buffer, input.gcount());
  if (input.bad())
    return absl::InvalidArgumentError(absl::StrFormat("cannot read %s: %s", path, std::strerror(errno)));
  return bytes;
}

absl::StatusOr<TokenIdList> ParseTokenIds(std::string_view ids) {
  constexpr std::string_view kSeparators = ", \t\r\n";
  std::string from_file;
  if (!ids.empty() && ids.front() == '@') {
    absl::StatusOr<std::string> read = ReadFile(std::string(ids.substr(1)));
    if (!read.ok()) return read.status();
    from_file = *std::move(read);
    ids = from_file;
  }
  TokenIdList parsed;
  for (size_t begin = 0; (begin = ids.find_first_not_of(kSeparators, begin)) != ids.npos;) {
    size_t end = std::min(ids.find_first_of(kSeparators, begin), ids.size());
    uint32_t id = 0;
    auto [stopped, error] = std::from_chars(ids.data() + begin, ids.data() + end, id);
    if (error != std::errc() || stopped != ids.data() + end) {
      return absl::InvalidArgumentError(
          absl::StrFormat("token id \"%s\" at position %d is not a number from 0 to 4294967295",
                          ids.substr(begin, end - begin), parsed.size()));
    }
    parsed.push_back(id);
    begin = end;
  }
  return parsed;
}

absl::StatusOr<Prompt> ReadPrompt(const PromptFlags& flags) {
  int given = flags.text.has_value() + flags.file.has_value() + flags.token_ids.has_value();
  if (given != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d prompts are given; give one of --prompt, --prompt-file and --token-ids", given));
  }
  if (flags.text) return Prompt(*flags.text);
  if (flags.file) {
    absl::StatusOr<std::string> text = ReadFile(*flags.file);
    if (!text.ok()) return text.status();
    return Prompt(*std::move(text));
  }
  absl::StatusOr<TokenIdList> ids = ParseTokenIds(*flags.token_ids);
  if (!ids.ok()) return ids.status();
  return Prompt(*std::move(ids));
}

}  // namespace efla
