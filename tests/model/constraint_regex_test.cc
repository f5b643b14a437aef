#include <gtest/gtest.h>
#include <re2/re2.h>

#include <random>
#include <string>
#include <vector>

#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

constexpr auto kRegex = ConstraintSpec::Kind::kRegex;

const ConstraintRig& Rig() {
  static const ConstraintRig rig;
  return rig;
}

TEST(ConstraintRegexTest, AcceptsWhatItDescribes) {
  struct Case {
    std::string regex;
    std::vector<std::string> accepted, refused;
  };
  const Case cases[] = {
      {"abc", {"abc"}, {"", "ab", "abcd", "abd"}},
      {"a|bc|", {"a", "bc", ""}, {"b", "abc", "c"}},
      {"a*b+c?", {"b", "aabbc"}, {"", "a", "ac", "bcc"}},
      {"(ab){2,3}", {"abab", "ababab"}, {"ab", "abababab"}},
      {"(?:x|y){0}z", {"z"}, {"xz", ""}},
      {"a{2,}", {"aa", "aaaaa"}, {"a", ""}},
      {"a*?b??", {"", "aab"}, {"abb"}},
      {"[a-cx]", {"a", "c", "x"}, {"d", "-", "ab"}},
      {"[^a-c]", {"d", "\n", "é", "🙂"}, {"a", "\xc3", ""}},
      {"[-a]|[b-]", {"-", "a", "b"}, {"c"}},
      {".", {"a", "é", "日", "🙂", "\r"}, {"\n", "ab", "\xe6\x97"}},
      {"\\d\\D\\w\\W\\s\\S", {"1a_-\nx", "0éA \tß"}, {"aa_- x", "1a-- x"}},
      {"\\.\\\\\\n\\t\\x41\\u00e9\\u{1F642}", {".\\\n\tAé🙂"}, {".\\\n\tAe🙂"}},
      {"\\ud83d\\ude42", {"🙂"}, {"x"}},
      {"^abc$", {"abc"}, {"abcd"}},
      {"^a$|^b", {"a", "b"}, {"ab"}},
      {"(?P<year>\\d{4})-(?<month>\\d\\d)", {"2024-05"}, {"24-05"}},
      {"{\"a\": [0-9]}", {"{\"a\": 7}"}, {"{\"a\": }"}},
      {"(a*)*b", {"b", "aaab"}, {"a"}},
      {"(|a|(b|))c", {"c", "ac", "bc"}, {"abc"}},
      {"[é-ü]+", {"éêü"}, {"a", "ý"}},
  };
  for (const Case& c : cases) {
    const auto constraint = Rig().Make(kRegex, c.regex);
    ASSERT_NE(constraint, nullptr);
    for (const std::string& text : c.accepted)
      EXPECT_TRUE(Rig().Accepts(*constraint, text)) << c.regex << ": " << text;
    for (const std::string& text : c.refused)
      EXPECT_FALSE(Rig().Accepts(*constraint, text)) << c.regex << ": " << text;
  }
}

TEST(ConstraintRegexTest, RefusesWithThePlace) {
  struct Case {
    std::string regex, error;
  };
  const Case cases[] = {
      {"", "is empty"},
      {"ab\\1", "at byte 2 (\"\\1\"): back references (\\1) are not supported"},
      {"(a)\\k<x>", "at byte 3 (\"\\k<x>\"): back references (\\k) are not supported"},
      {"a(?=b)", "at byte 1 (\"(?=b)\"): look-ahead is not supported"},
      {"a(?!b)", "at byte 1 (\"(?!b)\"): look-ahead is not supported"},
      {"(?<=a)b", "at byte 0 (\"(?<=a)b\"): look-behind is not supported"},
      {"a\\bc", "at byte 1 (\"\\bc\"): word boundaries (\\b, \\B) are not supported"},
      {"(?i)a", "at byte 0 (\"(?i)a\"): flags and special groups are not supported; (?: is"},
      {"a$b",
       "at byte 1 (\"$b\"): anchors are supported only at the ends of the expression or of its outermost "
       "alternatives"},
      {"(^a)",
       "at byte 1 (\"^a)\"): anchors are supported only at the ends of the expression or of its outermost "
       "alternatives"},
      {"*a", "at byte 0 (\"*a\"): there is nothing to repeat"},
      {"a**", "at byte 2 (\"*\"): a quantifier follows a quantifier; use a group"},
      {"a*+", "at byte 2 (\"+\"): possessive quantifiers are not supported"},
      {"a{3,2}", "at byte 6 (the end): a repetition's counts are in the wrong order"},
      {"a{1001}", "at byte 7 (the end): a repetition's count is above the limit of 1000"},
      {"a{,3}",
       "at byte 1 (\"{,3}\"): {,n} means different things to different engines; write {0,n}, or \\{ for the "
       "character"},
      {"(ab", "at byte 0 (\"(ab\"): the group has no )"},
      {"ab)", "at byte 2 (\")\"): a ) without its ("},
      {"[ab", "at byte 3 (the end): the class has no ]"},
      {"[]a]", "at byte 1 (\"]a]\"): a class is empty, or begins with ]; write \\] for the character"},
      {"[z-a]", "at byte 2 (\"-a]\"): the range's ends are in the wrong order"},
      {"[\\d-z]", "at byte 3 (\"-z]\"): the end of a range is a class; write \\- for the character"},
      {"[[:alpha:]]", "at byte 1 (\"[:alpha:]]\"): POSIX classes ([:name:]) are not supported"},
      {"\\p{L}", "at byte 0 (\"\\p{L}\"): Unicode properties (\\p) are not supported"},
      {"\\y", "at byte 0 (\"\\y\"): the escape \\y is unknown"},
      {"\\xg0", "at byte 0 (\"\\xg0\"): \\x takes two hexadecimal digits"},
      {"\\ud800", "at byte 0 (\"\\ud800\"): half of a surrogate pair is no character"},
      {"a\\", "at byte 1 (\"\\\"): a backslash is the last character; \\\\ stands for it"},
      {"a\xff", "is not UTF-8 at byte 1"},
      {"(((a{1000}){1000}){1000})", "is too large: its automaton has more than 262144 nodes"},
      {"[a-z]*a[a-z]{20}", "is too large: its automaton has more than 65536 states"},
      {"a[^\\x00-\\x{10ffff}]", "cannot be met: no text of this vocabulary's characters is what it asks for"},
  };
  for (const Case& c : cases) EXPECT_EQ(Rig().Error(kRegex, c.regex), c.error) << c.regex;
  EXPECT_EQ(Rig().Error(kRegex, std::string(65537, 'a')), "has 65537 bytes; the limit is 65536");
  EXPECT_EQ(Rig().Error(kRegex, std::string(65536, 'a')),
            "is too large: its automaton has more than 65536 states");
  std::string nested = "a";
  for (int i = 0; i < 201; ++i) nested = "(" + nested + ")";
  EXPECT_EQ(Rig().Error(kRegex, nested),
            "at byte 200 (\"(a))))))))))...\"): groups are nested deeper than 200");
}

// Expressions over a, b, é and digits.
std::string RandomRegex(std::mt19937& random, int depth) {
  static const char* const kAtoms[] = {"a",      "b", "é", "\\d", "[ab]", "[^a]",
                                       "[a-bé]", ".", "0", "\\w", "\\s"};
  switch (depth == 0 ? 0 : random() % 6) {
    case 1:
      return RandomRegex(random, depth - 1) + RandomRegex(random, depth - 1);
    case 2:
      return "(" + RandomRegex(random, depth - 1) + "|" + RandomRegex(random, depth - 1) + ")";
    case 3: {
      static const char* const kCounts[] = {"*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"};
      return "(?:" + RandomRegex(random, depth - 1) + ")" + kCounts[random() % std::size(kCounts)];
    }
    case 4:
      return "(" + RandomRegex(random, depth - 1) + ")";
    default:
      return kAtoms[random() % std::size(kAtoms)];
  }
}

TEST(ConstraintRegexTest, AgreesWithRe2) {
  std::mt19937 random(7);
  static const char* const kCharacters[] = {"a", "b", "é", "0", "5", " ", "x", "\n"};
  int finished = 0, matching = 0;
  for (int i = 0; i < 300; ++i) {
    const std::string regex = RandomRegex(random, 4);
    const re2::RE2 re2(regex);
    ASSERT_TRUE(re2.ok()) << regex;
    const auto constraint = Rig().Make(kRegex, regex);
    ASSERT_NE(constraint, nullptr);
    for (int k = 0; k < 30; ++k) {
      std::string text;
      for (size_t length = random() % 6; length > 0; --length)
        text += kCharacters[random() % std::size(kCharacters)];
      const bool matches = re2::RE2::FullMatch(text, re2);
      matching += matches ? 1 : 0;
      EXPECT_EQ(Rig().Accepts(*constraint, text), matches) << regex << " on " << text;
    }
    for (int k = 0; k < 3; ++k) {
      const WalkResult walk = RandomWalk(Rig(), *constraint, random, 12, 100);
      finished += walk.finished ? 1 : 0;
      if (walk.finished) {
        EXPECT_TRUE(re2::RE2::FullMatch(walk.text, re2)) << regex << " on " << walk.text;
      }
    }
  }
  EXPECT_GT(finished, 850);
  EXPECT_GT(matching, 500);
}

TEST(ConstraintChoicesTest, AreExact) {
  const std::vector<std::string> choices = {"yes", "no", " yes please", "nothing", "né", "no"};
  const auto constraint = Rig().Choices(choices);
  ASSERT_NE(constraint, nullptr);
  for (const std::string& choice : choices) EXPECT_TRUE(Rig().Accepts(*constraint, choice));
  for (const char* text : {"", "y", "yesno", "n", "noth", " yes", "ne"})
    EXPECT_FALSE(Rig().Accepts(*constraint, text));
  std::mt19937 random(3);
  std::vector<int> drawn(choices.size());
  for (int i = 0; i < 300; ++i) {
    const WalkResult walk = RandomWalk(Rig(), *constraint, random);
    const auto found = std::find(choices.begin(), choices.end(), walk.text);
    ASSERT_TRUE(walk.finished && found != choices.end()) << walk.text;
    ++drawn[static_cast<size_t>(found - choices.begin())];
  }
  for (size_t i = 0; i + 1 < choices.size(); ++i) EXPECT_GT(drawn[i], 0) << choices[i];
}

TEST(ConstraintChoicesTest, AreRefusedByNumber) {
  const auto error = [](std::vector<std::string> choices) {
    return std::string(
        CompileConstraint({.kind = ConstraintSpec::Kind::kChoices, .text = "", .choices = std::move(choices)},
                          Rig().vocabulary)
            .status()
            .message());
  };
  EXPECT_EQ(error({}), "has 0 choices; 1 to 1024 are needed");
  EXPECT_EQ(error(std::vector<std::string>(1025, "a")), "has 1025 choices; 1 to 1024 are needed");
  EXPECT_EQ(error({"a", ""}), "choice 1 is empty");
  EXPECT_EQ(error({"a\x80"}), "choice 0 is not UTF-8 at byte 1");
  EXPECT_EQ(error(std::vector<std::string>(1024, std::string(65, 'a'))),
            "has more than 65536 bytes in all its choices");
  EXPECT_EQ(error(std::vector<std::string>(1024, std::string(64, 'a'))), "");
}

}  // namespace
}  // namespace efla
