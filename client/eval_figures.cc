#include "client/eval_figures.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/prompt.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

// What Python's \s matches in a str.
bool IsSpace(uint32_t character) {
  return (character >= 0x09 && character <= 0x0D) || (character >= 0x1C && character <= 0x20) ||
         character == 0x85 || character == 0xA0 || character == 0x1680 ||
         (character >= 0x2000 && character <= 0x200A) || character == 0x2028 || character == 0x2029 ||
         character == 0x202F || character == 0x205F || character == 0x3000;
}

// Takes the first character of a UTF-8 text off it.
uint32_t TakeCharacter(std::string_view& text) {
  const auto lead = static_cast<unsigned char>(text.front());
  const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint32_t character = length == 1 ? lead : lead & (0x7Fu >> length);
  for (size_t i = 1; i < std::min(length, text.size()); ++i) {
    character = character << 6 | (static_cast<unsigned char>(text[i]) & 0x3F);
  }
  text.remove_prefix(std::min(length, text.size()));
  return character;
}

absl::Status BadLine(int line, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrFormat("line %d %s", line, what));
}

absl::StatusOr<Question> ParseQuestion(std::string_view text, int line) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) return BadLine(line, "is no JSON object");
  const auto context = json.find("context"), choices = json.find("choices"), answer = json.find("answer");
  if (context == json.end() || !context->is_string()) return BadLine(line, "has no string \"context\"");
  if (choices == json.end() || !choices->is_array() || choices->empty()) {
    return BadLine(line, "has no list \"choices\" of at least one string");
  }
  Question question;
  question.context = context->get<std::string>();
  for (const nlohmann::json& choice : *choices) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty()) {
      return BadLine(line,
                     absl::StrFormat("has a choice %d that is no string or empty", question.choices.size()));
    }
    question.choices.push_back(choice.get<std::string>());
  }
  if (answer == json.end() || !answer->is_number_unsigned() ||
      answer->get<uint64_t>() >= question.choices.size()) {
    return BadLine(line, absl::StrFormat("has no number \"answer\" from 0 to %d, the last choice",
                                         question.choices.size() - 1));
  }
  question.answer = answer->get<size_t>();
  return question;
}

template <typename Value>
size_t IndexOfLargest(std::span<const Choice> choices, Value value) {
  return static_cast<size_t>(
      std::max_element(choices.begin(), choices.end(),
                       [&](const Choice& a, const Choice& b) { return value(a) < value(b); }) -
      choices.begin());
}

double Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::vector<EvalWindow> EvalWindows(size_t tokens, size_t window, size_t stride) {
  std::vector<EvalWindow> windows;
  if (tokens < 2) return windows;
  if (window == 0 || window >= tokens) return {{.begin = 0, .end = tokens, .first_scored = 1}};
  size_t scored = 1;
  for (size_t begin = 0; scored < tokens; begin += stride) {
    const size_t end = std::min(begin + window, tokens);
    windows.push_back({.begin = begin, .end = end, .first_scored = scored});
    scored = end;
  }
  return windows;
}

uint64_t CountWords(std::string_view text) {
  uint64_t words = 1;
  bool in_space = false;
  while (!text.empty()) {
    const bool is_space = IsSpace(TakeCharacter(text));
    words += is_space && !in_space ? 1 : 0;
    in_space = is_space;
  }
  return words;
}

void TextFigures::Add(const TextFigures& other) {
  sum_logprob += other.sum_logprob;
  tokens += other.tokens;
  bytes += other.bytes;
  words += other.words;
}

double TextFigures::perplexity() const { return std::exp(-sum_logprob / static_cast<double>(tokens)); }
double TextFigures::bits_per_byte() const {
  return -sum_logprob / std::log(2.0) / static_cast<double>(bytes);
}
double TextFigures::byte_perplexity() const { return std::exp(-sum_logprob / static_cast<double>(bytes)); }
double TextFigures::word_perplexity() const { return std::exp(-sum_logprob / static_cast<double>(words)); }

absl::StatusOr<std::vector<Question>> ParseQuestions(std::string_view lines) {
  std::vector<Question> questions;
  for (int line = 1; !lines.empty(); ++line) {
    const std::string_view text = lines.substr(0, lines.find('\n'));
    lines.remove_prefix(std::min(text.size() + 1, lines.size()));
    if (text.find_first_not_of(" \t\r") == text.npos) continue;
    absl::StatusOr<Question> question = ParseQuestion(text, line);
    if (!question.ok()) return question.status();
    questions.push_back(*std::move(question));
  }
  if (questions.empty()) return absl::InvalidArgumentError("holds no question");
  return questions;
}

size_t MostProbable(std::span<const Choice> choices) {
  return IndexOfLargest(choices, [](const Choice& choice) { return choice.logprob; });
}

size_t MostProbableByByte(std::span<const Choice> choices) {
  return IndexOfLargest(choices, [](const Choice& choice) {
    return choice.logprob / static_cast<double>(std::max<uint64_t>(choice.bytes, 1));
  });
}

double ChoiceFigures::accuracy() const { return Share(right, questions); }
double ChoiceFigures::accuracy_by_byte() const { return Share(right_by_byte, questions); }
double ChoiceFigures::standard_error(double accuracy) const {
  return questions < 2 ? 0 : std::sqrt(accuracy * (1 - accuracy) / static_cast<double>(questions - 1));
}

}  // namespace efla
