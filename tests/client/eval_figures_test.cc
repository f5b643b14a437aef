#include "client/eval_figures.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace efla {
namespace {

TEST(EvalWindowsTest, AWholeDocumentIsOneWindow) {
  EXPECT_EQ(EvalWindows(10, 0, 0), (std::vector<EvalWindow>{{0, 10, 1}}));
  EXPECT_EQ(EvalWindows(10, 10, 5), (std::vector<EvalWindow>{{0, 10, 1}}));
  EXPECT_TRUE(EvalWindows(1, 0, 0).empty()) << "a BOS alone has nothing to be scored";
  EXPECT_TRUE(EvalWindows(0, 0, 0).empty());
}

TEST(EvalWindowsTest, WindowsMoveByTheStride) {
  EXPECT_EQ(EvalWindows(10, 4, 3), (std::vector<EvalWindow>{{0, 4, 1}, {3, 7, 4}, {6, 10, 7}}));
  EXPECT_EQ(EvalWindows(9, 4, 3), (std::vector<EvalWindow>{{0, 4, 1}, {3, 7, 4}, {6, 9, 7}}));
}

TEST(EvalWindowsTest, EachTokenButTheFirstIsScoredOnceWithSomethingBeforeIt) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    const size_t tokens = 2 + random() % 200, window = 2 + random() % 50,
                 stride = 1 + random() % (window - 1);
    size_t scored = 1;
    for (const EvalWindow& part : EvalWindows(tokens, window, stride)) {
      ASSERT_EQ(part.first_scored, scored);
      ASSERT_GT(part.first_scored, part.begin);
      ASSERT_LE(part.end - part.begin, window < tokens ? window : tokens);
      scored = part.end;
    }
    ASSERT_EQ(scored, tokens);
  }
}

// The expected numbers are len(re.split(r"\s+", text)) in Python.
TEST(CountWordsTest, CountsAsAPythonSplitDoes) {
  EXPECT_EQ(CountWords(""), 1u);
  EXPECT_EQ(CountWords("one"), 1u);
  EXPECT_EQ(CountWords("one two"), 2u);
  EXPECT_EQ(CountWords("one  two\n\nthree"), 3u);
  EXPECT_EQ(CountWords(" one "), 3u);
  EXPECT_EQ(CountWords("line\n"), 2u);
  EXPECT_EQ(CountWords("a\xC2\xA0"
                       "b\xE2\x80\xA9"
                       "c\xE3\x80\x80"
                       "d"),
            4u)
      << "no-break, paragraph, ideographic";
  EXPECT_EQ(CountWords("a\x1C"
                       "b\xC2\x85"
                       "c"),
            3u);
  EXPECT_EQ(CountWords("a\xE2\x80\x8B"
                       "b\xF0\x9F\x99\x82"
                       "c"),
            1u)
      << "a zero-width space is none";
}

TEST(TextFiguresTest, FollowTheirFormulas) {
  TextFigures figures{.sum_logprob = -20, .tokens = 10, .bytes = 40, .words = 8};
  figures.Add({.sum_logprob = -10, .tokens = 5, .bytes = 10, .words = 2});
  EXPECT_DOUBLE_EQ(figures.perplexity(), std::exp(2.0));
  EXPECT_DOUBLE_EQ(figures.bits_per_byte(), 30 / std::log(2.0) / 50);
  EXPECT_DOUBLE_EQ(figures.byte_perplexity(), std::exp(0.6));
  EXPECT_DOUBLE_EQ(figures.word_perplexity(), std::exp(3.0));
}

TEST(ParseQuestionsTest, OneAnObjectALine) {
  const auto questions = ParseQuestions(
      "{\"context\": \"The sky is\", \"choices\": [\" blue\", \" loud\"], \"answer\": 0}\r\n\n"
      "{\"context\": \"\", \"choices\": [\"a\"], \"answer\": 0, \"source\": \"ignored\"}");
  ASSERT_TRUE(questions.ok()) << questions.status();
  ASSERT_EQ(questions->size(), 2u);
  EXPECT_EQ((*questions)[0].context, "The sky is");
  EXPECT_EQ((*questions)[0].choices, (std::vector<std::string>{" blue", " loud"}));
  EXPECT_EQ((*questions)[1].answer, 0u);
}

TEST(ParseQuestionsTest, WhatIsWrongIsNamedWithItsLine) {
  const std::string good = "{\"context\": \"c\", \"choices\": [\"a\"], \"answer\": 0}\n";
  const std::pair<std::string, std::string> cases[] = {
      {"nonsense", "line 2 is no JSON object"},
      {"[]", "line 2 is no JSON object"},
      {R"({"choices": ["a"], "answer": 0})", "line 2 has no string \"context\""},
      {R"({"context": "c", "answer": 0})", "line 2 has no list \"choices\""},
      {R"({"context": "c", "choices": [], "answer": 0})", "line 2 has no list \"choices\""},
      {R"({"context": "c", "choices": ["a", ""], "answer": 0})",
       "line 2 has a choice 1 that is no string or empty"},
      {R"({"context": "c", "choices": ["a", 3], "answer": 0})", "line 2 has a choice 1"},
      {R"({"context": "c", "choices": ["a"], "answer": 1})", "line 2 has no number \"answer\" from 0 to 0"},
      {R"({"context": "c", "choices": ["a"], "answer": -1})", "line 2 has no number \"answer\""},
      {R"({"context": "c", "choices": ["a"]})", "line 2 has no number \"answer\""}};
  for (const auto& [line, message] : cases) {
    const absl::Status status = ParseQuestions(good + line).status();
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
  EXPECT_FALSE(ParseQuestions("\n\n").ok());
}

TEST(ChoiceTest, TheMostProbableOneOfAllOrOfBytes) {
  const Choice choices[] = {
      {.logprob = -4, .bytes = 2}, {.logprob = -6, .bytes = 12}, {.logprob = -4, .bytes = 3}};
  EXPECT_EQ(MostProbable(choices), 0u) << "the first among equals";
  EXPECT_EQ(MostProbableByByte(choices), 1u);
}

TEST(ChoiceFiguresTest, AccuracyAndItsError) {
  const ChoiceFigures figures{.questions = 101, .right = 50, .right_by_byte = 101};
  EXPECT_DOUBLE_EQ(figures.accuracy(), 50.0 / 101);
  EXPECT_DOUBLE_EQ(figures.accuracy_by_byte(), 1);
  EXPECT_DOUBLE_EQ(figures.standard_error(0.5), 0.05);
  EXPECT_DOUBLE_EQ(figures.standard_error(1), 0);
}

}  // namespace
}  // namespace efla
