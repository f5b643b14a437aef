// Times of constraints: compiling, the first mask at a place, and the same mask again.
//
// Vocabularies: the demonstration model's, and one of 32,000 pieces made of random syllables, with all bytes.
// Outputs are drawn from the masks; each line is over all places of 20 of them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = ConstraintSpec::Kind;

double Microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

std::vector<std::string> SyllablePieces(size_t size) {
  std::vector<std::string> pieces = {"</s>"};
  for (int byte = 0; byte < 256; ++byte) pieces.emplace_back(1, static_cast<char>(byte));
  const std::string consonants = "bcdfghklmnprstvw", vowels = "aeiou";
  const std::vector<std::string> marks = {"\": \"", "\",", "\"}", "{\"", "\": ", ", ",
                                          "},",     "[]",  "\\n", ": {", "  ",   "\n  "};
  std::set<std::string> words(marks.begin(), marks.end());
  std::mt19937 random(1);
  while (words.size() + pieces.size() < size) {
    std::string word = random() % 2 == 0 ? " " : "";
    for (size_t n = 1 + random() % 4; n > 0; --n) {
      word += consonants[random() % consonants.size()];
      word += vowels[random() % vowels.size()];
      if (random() % 3 == 0) word += consonants[random() % consonants.size()];
    }
    words.insert(word);
  }
  pieces.insert(pieces.end(), words.begin(), words.end());
  return pieces;
}

struct Times {
  std::vector<double> microseconds;
  double At(double part) {
    std::sort(microseconds.begin(), microseconds.end());
    return microseconds.empty()
               ? 0
               : microseconds[static_cast<size_t>(part * static_cast<double>(microseconds.size() - 1))];
  }
};

void Measure(const char* vocabulary, const ConstraintRig& rig, const char* name, Kind kind,
             const std::string& text) {
  constexpr int kWalks = 20;
  const auto begin = Clock::now();
  const auto constraint = rig.Compile(kind, text);
  const double compile = Microseconds(Clock::now() - begin);
  if (!constraint.ok()) {
    std::printf("%-8s %-8s %s\n", vocabulary, name, constraint.status().ToString().c_str());
    return;
  }
  Times first, again, accept;
  std::mt19937 random(7);
  for (int walk = 0; walk < kWalks; ++walk) {
    const WalkResult drawn = RandomWalk(rig, **rig.Compile(kind, text), random, 40, 120);
    const auto matcher = (*constraint)->NewMatcher();
    std::vector<uint32_t> mask(rig.words());
    for (TokenId token : drawn.tokens) {
      auto at = Clock::now();
      matcher->FillMask(mask);
      first.microseconds.push_back(Microseconds(Clock::now() - at));
      at = Clock::now();
      matcher->FillMask(mask);
      again.microseconds.push_back(Microseconds(Clock::now() - at));
      at = Clock::now();
      matcher->Accept(token);
      accept.microseconds.push_back(Microseconds(Clock::now() - at));
    }
  }
  std::printf(
      "%-8s %-8s compile %8.0f us   mask median %6.1f  p99 %7.1f  longest %7.1f   again p99 %5.1f   accept "
      "p99 %5.1f\n",
      vocabulary, name, compile, first.At(0.5), first.At(0.99), first.At(1), again.At(0.99), accept.At(0.99));
}

void MeasureAll(const char* vocabulary, const Tokenizer& tokenizer) {
  const auto begin = Clock::now();
  const ConstraintRig rig(tokenizer);
  std::printf("%-8s vocabulary of %d pieces %8.0f us\n", vocabulary, tokenizer.vocab_size(),
              Microseconds(Clock::now() - begin));
  Measure(vocabulary, rig, "regex", Kind::kRegex, "( [a-z]+){2,12}[.!?]");
  Measure(vocabulary, rig, "json", Kind::kJsonObject, "");
  Measure(
      vocabulary, rig, "schema", Kind::kJsonSchema,
      R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":120},
              "tags":{"type":"array","items":{"type":"string","maxLength":20},"maxItems":5},
              "at":{"type":"string","format":"date-time"},"kind":{"enum":["a","b","c"]},
              "next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["name","age"]})");
  Measure(vocabulary, rig, "grammar", Kind::kGrammar,
          "root ::= sum\nsum ::= term ((\" + \" | \" - \") term)*\nterm ::= factor ((\" * \" | \" / \") "
          "factor)*\n"
          "factor ::= [0-9]{1,4} | [a-z]+ | \"(\" sum \")\"");
}

int Run() {
  MeasureAll("demo", DemoTokenizer());
  const PieceTokenizer large(SyllablePieces(32'000));
  MeasureAll("32k", large);
  return 0;
}

}  // namespace
}  // namespace efla

int main() { return efla::Run(); }
