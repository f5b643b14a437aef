#include <gtest/gtest.h>

#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

constexpr auto kGrammar = ConstraintSpec::Kind::kGrammar;

const ConstraintRig& Rig() {
  static const ConstraintRig rig;
  return rig;
}

constexpr char kArithmetic[] = R"x(
# sums of products
root   ::= term (("+" | "-") term)*
term   ::= factor ( [*/] factor )*
factor ::= number | "(" root ")"
number ::= [0-9]{1,4}
           ("." [0-9]+)?   # a rule may go on on the next line
)x";

TEST(ConstraintGrammarTest, AcceptsWhatItDescribes) {
  struct Case {
    std::string grammar;
    std::vector<std::string> accepted, refused;
  };
  const Case cases[] = {
      {kArithmetic, {"1", "1+2*3", "((1))", "(1+2)*(3-4.5)", "12.75"}, {"", "1+", "(1", "12345", "1.", "()"}},
      {"root ::= \"a\" root \"b\" | \"\"", {"", "ab", "aaabbb"}, {"a", "aab", "abb", "ba"}},
      {"root::=item(\",\"item)*\nitem::=\"x\"|[0-9]", {"x", "1,x,2"}, {",", "x,", "xx"}},
      {"root ::= \"\\\"\" [^\"\\\\]* \"\\\"\"", {"\"é\n\"", "\"\""}, {"\"", "\"\\\""}},
      {"root ::= \"\\x41\\u00e9\\U0001F642\\n\\t\\\\\"", {"Aé🙂\n\t\\"}, {"A"}},
      {"root ::= . . ", {"é🙂", "\n\n"}, {"a", "abc"}},
      {"root ::= (a | b)? c{2}\na ::= \"1\" d\nb ::= \"1\" d \"3\"\nd ::= \"2\"\nc ::= \"z\"",
       {"zz", "12zz", "123zz"},
       {"1zz", "12z", "z"}},
      {"root ::= opt opt \"x\"\nopt ::= \"o\"?", {"x", "ox", "oox"}, {"ooox", "o"}},
      {"root ::= list\nlist ::= \"i\" list | \"i\"", {"i", std::string(3000, 'i')}, {""}},
      {"root ::= e*\ne ::= \"a\" |", {"", "aaa"}, {"b"}},
  };
  for (const Case& c : cases) {
    const auto constraint = Rig().Make(kGrammar, c.grammar);
    ASSERT_NE(constraint, nullptr);
    for (const std::string& text : c.accepted)
      EXPECT_TRUE(Rig().Accepts(*constraint, text)) << c.grammar << ": " << text;
    for (const std::string& text : c.refused)
      EXPECT_FALSE(Rig().Accepts(*constraint, text)) << c.grammar << ": " << text;
  }
}

TEST(ConstraintGrammarTest, RefusesWithThePlace) {
  struct Case {
    std::string grammar, error;
  };
  const Case cases[] = {
      {"", "is empty"},
      {"# nothing\n", "no rule is named root"},
      {"start ::= \"a\"", "no rule is named root"},
      {"root ::= a b\na ::= \"1\"", "line 1, column 12: rule b is not defined"},
      {"root ::= \"a\"\n\nroot ::= \"b\"",
       "line 3, column 1 (\"root ::= \"b\"\"): rule root is defined twice"},
      {"root = \"a\"", "line 1, column 1 (\"root = \"a\"\"): a rule is needed: name ::= ..."},
      {"root ::= \"a", "line 1, column 10 (\"\"a\"): the string has no closing quote on its line"},
      {"root ::= \"\\q\"",
       "line 1, column 11 (\"\\q\"\"): escapes in strings are \\n \\r \\t \\\\ \\\" \\' \\[ \\] and "
       "\\xHH \\uHHHH \\UHHHHHHHH of a character"},
      {"root ::= (\"a\"\n", "line 1, column 10 (\"(\"a\"\"): the group has no )"},
      {"root ::= \"a\")", "line 1, column 13 (\")\"): this does not belong here"},
      {"root ::= *", "line 1, column 10 (\"*\"): there is nothing to repeat"},
      {"root ::= \"a\"**", "line 1, column 14 (\"*\"): a quantifier follows a quantifier; use a group"},
      {"root ::= \"a\"{2,1}", "line 1, column 13 (\"{2,1}\"): a repetition's counts are in the wrong order"},
      {"root ::= [z-a]", "line 1, column 12 (\"-a]\"): the range's ends are in the wrong order"},
      {"root ::= 'a'", "line 1, column 10 (\"'a'\"): a string, a class, a group or a rule's name is needed"},
      {"root ::= root \"a\" | \"b\"", "line 1: left recursion: root -> root begins with itself"},
      {"root ::= \"(\" expr \")\"\nexpr ::= term \"+\" | \"x\"\nterm ::= ws? expr\nws ::= \" \"*",
       "line 2: left recursion: expr -> term -> expr begins with itself"},
      {"root ::= \"a\" | loop\nloop ::= \"b\" loop",
       "line 2: rule loop can never be finished with this vocabulary's characters"},
      {"root ::= \"a\" none\nnone ::= [^\\x00-\\u{10ffff}]",
       "line 1: rule root can never be finished with this vocabulary's characters"},
  };
  for (const Case& c : cases) EXPECT_EQ(Rig().Error(kGrammar, c.grammar), c.error) << c.grammar;
  // 300 rules that must all be open at once.
  std::string deep = "root ::= \"(\" r0 \")\"\n";
  for (int i = 0; i < 300; ++i) {
    std::ostringstream rule;
    rule << "r" << i << " ::= \"(\" r" << i + 1 << " \")\"\n";
    deep += rule.str();
  }
  deep += "r300 ::= \"x\"\n";
  EXPECT_EQ(Rig().Error(kGrammar, deep), "needs 301 rules open at once; the limit is 256");
}

TEST(ConstraintGrammarTest, MessagesShowNoMoreThanTheBeginningOfANameOrOfACycle) {
  const std::string name(9000, 'n');
  EXPECT_EQ(Rig().Error(kGrammar, "root ::= " + name),
            "line 1, column 10: rule " + std::string(60, 'n') + "... is not defined");
  EXPECT_EQ(Rig().Error(kGrammar, "root ::= \"a\"\n" + name + " ::= \"a\"\n" + name + " ::= \"a\""),
            "line 3, column 1 (\"" + std::string(16, 'n') + "...\"): rule " + std::string(60, 'n') +
                "... is defined twice");
  EXPECT_EQ(Rig().Error(kGrammar, "root ::= \"a\"\n\n" + name + " ::= " + name),
            "line 3: left recursion: " + std::string(60, 'n') + "... -> " + std::string(60, 'n') +
                "... begins with itself");
  EXPECT_EQ(
      Rig().Error(kGrammar, "root ::= \"a\" | " + name + "\n" + name + " ::= \"b\" " + name),
      "line 2: rule " + std::string(60, 'n') + "... can never be finished with this vocabulary's characters");
  std::string cycle = "root ::= \"a\"\n";
  for (int i = 0; i < 500; ++i) {
    cycle.append("r").append(std::to_string(i)).append(" ::= r").append(std::to_string((i + 1) % 500)) +=
        '\n';
  }
  EXPECT_EQ(Rig().Error(kGrammar, cycle),
            "line 2: left recursion: r0 -> r1 -> r2 -> r3 -> r4 -> r5 -> 494 more -> r0 begins with itself");
}

// Where nesting has to end, what would go deeper is not allowed and a way out always is.
TEST(ConstraintGrammarTest, NestingIsBoundedWithoutDeadEnds) {
  const auto constraint = Rig().Make(kGrammar, "root ::= \"(\" pair \")\" | \"x\"\npair ::= root \",\" root");
  ASSERT_NE(constraint, nullptr);
  const auto matcher = constraint->NewMatcher();
  const TokenId open = Rig().bytes['('];
  int depth = 0;
  while (matcher->Accept(open)) ++depth;
  EXPECT_GT(depth, 100);
  EXPECT_LT(depth, 300);
  const std::vector<uint32_t> mask = Rig().Mask(*matcher);
  EXPECT_FALSE(mask[static_cast<size_t>(open) / 32] >> (open % 32) & 1);
  for (int i = 0; i < depth; ++i) {
    for (char c : std::string("x,x)").substr(i == 0 ? 0 : 1)) {
      ASSERT_TRUE(matcher->Accept(Rig().bytes[static_cast<unsigned char>(c)])) << i << c;
    }
  }
  EXPECT_TRUE(matcher->MustEnd());
}

// Every text has 2^n readings.
TEST(ConstraintGrammarTest, AmbiguityIsBounded) {
  const auto constraint =
      Rig().Make(kGrammar, "root ::= a | b\na ::= \"x\" root \"1\" | \"y\"\nb ::= \"x\" root \"2\" | \"y\"");
  ASSERT_NE(constraint, nullptr);
  std::mt19937 random(5);
  int finished = 0;
  for (int i = 0; i < 20; ++i) {
    const WalkResult walk = RandomWalk(Rig(), *constraint, random, 0, 120);
    if (!walk.finished) continue;
    ++finished;
    const size_t xs = walk.text.find('y');
    ASSERT_NE(xs, std::string::npos);
    EXPECT_EQ(walk.text.size(), 2 * xs + 1) << walk.text;
    EXPECT_EQ(walk.text.find_first_not_of("12", xs + 1), std::string::npos) << walk.text;
  }
  EXPECT_GT(finished, 5);
}

// The grammar is the oracle's too: a recursive descent parser of arithmetic.
struct Arithmetic {
  std::string_view rest;
  bool Take(std::string_view characters) {
    if (rest.empty() || characters.find(rest.front()) == std::string_view::npos) return false;
    rest.remove_prefix(1);
    return true;
  }
  bool Number() {
    int digits = 0;
    while (Take("0123456789")) ++digits;
    if (digits < 1 || digits > 4) return false;
    if (!Take(".")) return true;
    digits = 0;
    while (Take("0123456789")) ++digits;
    return digits > 0;
  }
  bool Factor() { return Take("(") ? Sum() && Take(")") : Number(); }
  bool Term() {
    if (!Factor()) return false;
    while (Take("*/")) {
      if (!Factor()) return false;
    }
    return true;
  }
  bool Sum() {
    if (!Term()) return false;
    while (Take("+-")) {
      if (!Term()) return false;
    }
    return true;
  }
};

TEST(ConstraintGrammarTest, WalksGiveWhatAnotherParserAccepts) {
  const auto constraint = Rig().Make(kGrammar, kArithmetic);
  ASSERT_NE(constraint, nullptr);
  std::mt19937 random(11);
  int finished = 0;
  for (int i = 0; i < 200; ++i) {
    const WalkResult walk = RandomWalk(Rig(), *constraint, random, 8, 60);
    if (!walk.finished) continue;
    ++finished;
    Arithmetic parser{walk.text};
    EXPECT_TRUE(parser.Sum() && parser.rest.empty()) << walk.text;
  }
  EXPECT_GT(finished, 100);
  // And what it accepts or not, both do.
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (size_t n = random() % 8; n > 0; --n) text += "12.+*()"[random() % 7];
    Arithmetic parser{text};
    EXPECT_EQ(Rig().Accepts(*constraint, text), parser.Sum() && parser.rest.empty()) << text;
  }
}

}  // namespace
}  // namespace efla
