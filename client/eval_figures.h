// How texts and questions are evaluated, apart from the calls: which tokens a request scores, and the
// figures.
#ifndef EFLA_CLIENT_EVAL_FIGURES_H_
#define EFLA_CLIENT_EVAL_FIGURES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace efla {

// One request's part of a document: tokens [begin, end), of which [first_scored, end) count.
struct EvalWindow {
  size_t begin = 0, end = 0, first_scored = 0;
  bool operator==(const EvalWindow&) const = default;
};

// Windows of `window` tokens, each `stride` further (1 to window - 1), that score every token of `tokens` but
// the first once, with as much context as a window has. `window` 0, or a document that fits: one window.
std::vector<EvalWindow> EvalWindows(size_t tokens, size_t window, size_t stride);

// Words as lm-evaluation-harness counts them, len(re.split(r"\s+", text)): the runs of Unicode white space
// and one, so that a line's end at the text's end counts. `text` is UTF-8.
uint64_t CountWords(std::string_view text);

struct TextFigures {
  double sum_logprob = 0;  // natural logs
  uint64_t tokens = 0;     // scored
  uint64_t bytes = 0, words = 0;

  void Add(const TextFigures& other);
  double perplexity() const;       // exp(-sum / tokens)
  double bits_per_byte() const;    // -sum / ln 2 / bytes
  double byte_perplexity() const;  // exp(-sum / bytes)
  double word_perplexity() const;  // exp(-sum / words)
};

struct Question {
  std::string context;
  std::vector<std::string> choices;  // each as it follows the context, its space included
  size_t answer = 0;                 // index of the right one
};
// One JSON object a line: {"context": "...", "choices": ["...", ...], "answer": 0}; empty lines are passed
// over. Errors name the line.
absl::StatusOr<std::vector<Question>> ParseQuestions(std::string_view lines);

// Which choice the model takes: the most probable one, and the one of the highest log-probability a byte. The
// first among equals. Not empty.
struct Choice {
  double logprob = 0;
  uint64_t bytes = 0;
};
size_t MostProbable(std::span<const Choice> choices);
size_t MostProbableByByte(std::span<const Choice> choices);

struct ChoiceFigures {
  uint64_t questions = 0, right = 0, right_by_byte = 0;

  double accuracy() const;
  double accuracy_by_byte() const;
  // Of an accuracy: the sample standard deviation of the answers over the root of their number.
  double standard_error(double accuracy) const;
};

}  // namespace efla

#endif  // EFLA_CLIENT_EVAL_FIGURES_H_
