#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <latch>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

using Kind = ConstraintSpec::Kind;

const ConstraintRig& Rig() {
  static const ConstraintRig rig;
  return rig;
}

constexpr char kSchema[] = R"({"type": "object", "properties": {
    "name": {"type": "string"}, "kind": {"enum": ["a", "ab", 3, null]}, "n": {"type": "integer", "minimum": -12},
    "list": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}, "when": {"format": "date"}},
    "required": ["kind"], "additionalProperties": {"type": "boolean"}})";

std::vector<std::pair<Kind, std::string>> Specs() {
  return {
      {Kind::kRegex, "(the |a )?[a-z]+( [a-zé]{2,6})*[.!]"},
      {Kind::kRegex, "[^\\x00-\\x7f]{1,3}|.*"},
      {Kind::kJsonObject, ""},
      {Kind::kJsonSchema, kSchema},
      {Kind::kGrammar,
       "root ::= stmt+\nstmt ::= call \";\" | call \"=\" e \";\"\ncall ::= id \"(\" e? \")\"\n"
       "e ::= id | call | \"(\" e \")\"\nid ::= [a-z]{1,5}"},
      {Kind::kGrammar, "root ::= a | b\na ::= \"x\" root \"1\" | \"y\"\nb ::= \"x\" root \"2\" | \"yy\""},
  };
}

TEST(ConstraintMasksTest, AreWhatTryingEachTokenSays) {
  std::mt19937 random(17);
  for (const auto& [kind, text] : Specs()) {
    const auto constraint = Rig().Make(kind, text);
    ASSERT_NE(constraint, nullptr);
    for (int walks = 0; walks < 2; ++walks) {
      const bool at_start = walks == 1;
      const WalkResult walk = RandomWalk(Rig(), *constraint, random, 12, 30, at_start);
      for (size_t part = 0; part < 5; ++part) {
        const size_t i = part * walk.tokens.size() / 4;
        const std::vector<TokenId> so_far(walk.tokens.begin(),
                                          walk.tokens.begin() + static_cast<ptrdiff_t>(i));
        const auto matcher = constraint->NewMatcher(at_start);
        for (TokenId token : so_far) ASSERT_TRUE(matcher->Accept(token));
        EXPECT_EQ(Rig().Allowed(*matcher), AllowedByTrial(Rig(), *constraint, so_far, at_start))
            << text << " after " << i;
      }
    }
  }
}

TEST(ConstraintMasksTest, RefusedTokensChangeNothing) {
  const auto constraint = Rig().Make(Kind::kJsonSchema, kSchema);
  ASSERT_NE(constraint, nullptr);
  std::mt19937 random(23);
  const auto matcher = constraint->NewMatcher();
  for (int i = 0; i < 60 && !matcher->MustEnd(); ++i) {
    const std::vector<uint32_t> before = Rig().Mask(*matcher);
    for (int k = 0; k < 300; ++k) {
      const auto token = static_cast<TokenId>(random() % 4096);
      if (!(before[static_cast<size_t>(token) / 32] >> (token % 32) & 1)) {
        EXPECT_FALSE(matcher->Accept(token));
      }
    }
    EXPECT_FALSE(matcher->Accept(-1));
    EXPECT_FALSE(matcher->Accept(4096));
    EXPECT_FALSE(matcher->Accept(Rig().tokenizer.eos_id()));
    EXPECT_EQ(Rig().Mask(*matcher), before);
    std::vector<TokenId> allowed = Rig().Allowed(*matcher);
    std::erase(allowed, Rig().tokenizer.eos_id());
    ASSERT_FALSE(allowed.empty());
    ASSERT_TRUE(matcher->Accept(allowed[random() % allowed.size()]));
  }
}

TEST(ConstraintMasksTest, AtATextsStartTheFirstSpaceIsDropped) {
  const auto constraint = Rig().Choices({"The end"});
  const auto matcher = constraint->NewMatcher(/*at_start=*/true);
  const auto whole = Rig().tokenizer.Encode("The end", false);
  ASSERT_TRUE(whole.ok());
  ASSERT_TRUE(Rig().tokenizer.PieceBytes(whole->front(), false).starts_with(' '));
  EXPECT_FALSE(constraint->NewMatcher(/*at_start=*/false)->Accept(whole->front()));
  for (TokenId token : *whole) EXPECT_TRUE(matcher->Accept(token));
  EXPECT_TRUE(matcher->MustEnd());
  EXPECT_EQ(Rig().tokenizer.Decode(*whole), "The end");
}

TEST(ConstraintMasksTest, OneConstraintServesManyThreads) {
  for (const auto& [kind, text] : Specs()) {
    const auto constraint = Rig().Make(kind, text);
    ASSERT_NE(constraint, nullptr);
    std::vector<std::string> texts(8);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < texts.size(); ++i) {
      threads.emplace_back([&, i] {
        std::mt19937 random(static_cast<unsigned>(i % 2));
        texts[i] = RandomWalk(Rig(), *constraint, random, 10, 40).text;
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 2; i < texts.size(); ++i) EXPECT_EQ(texts[i], texts[i - 2]);
  }
}

// A vocabulary without single bytes: "qu" is there and "q" is not, and "é" is one token.
TEST(ConstraintVocabularyTest, WhatCannotBeWrittenIsRefusedOrLeftOut) {
  const PieceTokenizer tokenizer(
      {"<unk>", "</s>", "a", "b", "u", "qu", "é", "ab", " ", "\xc3", "c\xc3", "日本"});
  const ConstraintRig rig(tokenizer);
  EXPECT_EQ(rig.Error(Kind::kRegex, "[xyz]"),
            "cannot be met: no text of this vocabulary's characters is what it asks for");
  EXPECT_EQ(rig.Error(Kind::kRegex, "aq"), rig.Error(Kind::kRegex, "[xyz]"));
  EXPECT_EQ(std::string(CompileConstraint({.kind = Kind::kChoices, .text = "", .choices = {"ab", "bq"}},
                                          rig.vocabulary)
                            .status()
                            .message()),
            "choice 1 cannot be written: the vocabulary has no U+0071");
  EXPECT_EQ(rig.Error(Kind::kGrammar, "root ::= \"a\" | x\nx ::= \"q\""),
            "line 2: rule x can never be finished with this vocabulary's characters");
  const auto constraint = rig.Make(Kind::kRegex, "(aq|[ab]é|é日?本?)b{2}");
  ASSERT_NE(constraint, nullptr);
  std::mt19937 random(1);
  for (int i = 0; i < 50; ++i) {
    const WalkResult walk = RandomWalk(rig, *constraint, random);
    EXPECT_TRUE(walk.finished);
    EXPECT_TRUE(walk.text == "aébb" || walk.text == "bébb" || walk.text == "ébb") << walk.text;
  }
}

TEST(ConstraintVocabularyTest, WithoutAnEndTokenTheMaskMayBeEmpty) {
  const PieceTokenizer tokenizer({"a", "b", "ab"});
  const std::shared_ptr<const ConstraintVocabulary> vocabulary = MakeConstraintVocabulary(tokenizer, {});
  const auto constraint = CompileConstraint({.kind = Kind::kRegex, .text = "ab?", .choices = {}}, vocabulary);
  ASSERT_TRUE(constraint.ok());
  const auto matcher = (*constraint)->NewMatcher();
  std::vector<uint32_t> mask(1);
  matcher->FillMask(mask);
  EXPECT_EQ(mask[0], 0b101U);
  EXPECT_TRUE(matcher->Accept(2));
  EXPECT_TRUE(matcher->CanEnd() && matcher->MustEnd());
  matcher->FillMask(mask);
  EXPECT_EQ(mask[0], 0U);
}

TEST(ConstraintCompilerTest, KeepsWhatItCompiledAndWhatItRefused) {
  const std::array<TokenId, 1> end = {DemoTokenizer().eos_id()};
  const ConstraintCompiler compiler(DemoTokenizer(), end);
  const ConstraintSpec good{.kind = Kind::kRegex, .text = "[a-z]+", .choices = {}};
  EXPECT_FALSE(compiler.Find(good));
  const CompiledOrError compiled = compiler.Compile(good);
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  EXPECT_EQ(**compiler.Find(good), *compiled);
  EXPECT_EQ(*compiler.Compile(good), *compiled);

  const ConstraintSpec bad{.kind = Kind::kRegex, .text = "(.*a){1000}", .choices = {}};
  EXPECT_FALSE(compiler.Find(bad));
  int checks = 0;
  const CompiledOrError refused = compiler.Compile(bad, [&] {
    ++checks;
    return absl::OkStatus();
  });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_GT(checks, 0);
  ASSERT_TRUE(compiler.Find(bad));
  EXPECT_EQ(compiler.Find(bad)->status(), refused.status());

  const ConstraintSpec large{.kind = Kind::kRegex, .text = std::string(70000, 'a'), .choices = {}};
  ASSERT_TRUE(compiler.Find(large)) << "what its size refuses is known at once";
  EXPECT_EQ(compiler.Find(large)->status().message(), "has 70000 bytes; the limit is 65536");
}

TEST(ConstraintCompilerTest, WhatIsNotWantedAnyMoreIsGivenUpAndNotKept) {
  const std::array<TokenId, 1> end = {DemoTokenizer().eos_id()};
  const ConstraintCompiler compiler(DemoTokenizer(), end);
  const ConstraintSpec spec{.kind = Kind::kRegex, .text = "(.*a){1000}", .choices = {}};
  int checks = 0;
  const CompiledOrError ended =
      compiler.Compile(spec, [&] { return ++checks == 2 ? absl::CancelledError("gone") : absl::OkStatus(); });
  EXPECT_EQ(ended.status(), absl::CancelledError("gone"));
  EXPECT_EQ(checks, 2);
  EXPECT_FALSE(compiler.Find(spec));
  EXPECT_EQ(compiler.Compile(spec).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ConstraintCompilerTest, ThreadsThatAskForTheSameAtOnceCompileItOnce) {
  const std::array<TokenId, 1> end = {DemoTokenizer().eos_id()};
  const ConstraintCompiler compiler(DemoTokenizer(), end);
  const ConstraintSpec spec{.kind = Kind::kRegex, .text = ".*a.{9}", .choices = {}};
  std::latch begin(4);
  std::vector<std::shared_ptr<const Constraint>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&] {
      begin.arrive_and_wait();
      result = *compiler.Compile(spec);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, results.front());
  EXPECT_NE(results.front(), nullptr);
}

// Nothing crashes, nothing takes long, and what compiles can be walked through.
TEST(ConstraintFuzzTest, RandomSpecifications) {
  const std::string seeds[] = {
      kSchema, "(the |a )?[a-z]+( [a-z\\d]{2,6})*[.!]$",
      "root ::= stmt+ # c\nstmt ::= call \";\" | (call \"=\")? e{1,3}\ncall ::= [^a-z\\n]* e\ne ::= \"x\" | "
      "\"(\" e \")\"",
      R"({"$defs":{"a":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/a"}]}},"oneOf":[{"const":1},{"type":["string","array"],"minLength":2,"prefixItems":[{},true]}],"allOf":[{"$ref":"#/$defs/a"}]})"};
  std::mt19937 random(29);
  int compiled = 0;
  std::chrono::steady_clock::duration longest{};
  for (int i = 0; i < 3000; ++i) {
    std::string text = seeds[random() % std::size(seeds)];
    for (size_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % (text.size() + 1);
      const std::string other = seeds[random() % std::size(seeds)];
      const size_t from = random() % other.size();
      switch (random() % 4) {
        case 0:
          text.insert(at, 1, static_cast<char>(random() % 4 == 0 ? random() % 256 : 32 + random() % 95));
          break;
        case 1:
          text.erase(at, 1 + random() % 5);
          break;
        case 2:
          text.insert(at, other.substr(from, random() % 12));
          break;
        default:
          text.insert(at, text.substr(std::min(from, text.size()), random() % 20));
          break;
      }
    }
    const Kind kinds[] = {Kind::kRegex, Kind::kJsonSchema, Kind::kGrammar};
    for (Kind kind : kinds) {
      const auto begin = std::chrono::steady_clock::now();
      const auto constraint = Rig().Compile(kind, text);
      longest = std::max(longest, std::chrono::steady_clock::now() - begin);
      if (!constraint.ok()) {
        EXPECT_EQ(constraint.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_FALSE(constraint.status().message().empty());
        continue;
      }
      if (++compiled % 8 == 0) RandomWalk(Rig(), **constraint, random, 5, 20);
    }
  }
  EXPECT_GT(compiled, 500);
  EXPECT_LT(longest, std::chrono::seconds(4));
}

TEST(ConstraintFuzzTest, HostileSpecificationsAreRefusedInTime) {
  const std::pair<Kind, std::string> hostile[] = {
      {Kind::kRegex, "(.*a){1000}"},
      {Kind::kRegex, "((a?){1000}){1000}"},
      {Kind::kRegex, "(((){1000}){1000}){1000}"},
      {Kind::kRegex, "(a|b|ab|ba|aab|[ab]{1,30}){1,200}"},
      {Kind::kRegex, std::string(30000, '(')},
      {Kind::kGrammar, "root ::= " + std::string(30000, '(')},
      {Kind::kJsonSchema, std::string(30000, '[')},
      {Kind::kJsonSchema, R"({"$ref":"#"})"},
      {Kind::kJsonSchema, R"({"allOf":[{"$ref":"#"},{"type":"object"}]})"},
      {Kind::kJsonSchema, R"({"properties":{"a":{"allOf":[{"$ref":"#"},{"required":["b"]}]}}})"},
      {Kind::kJsonSchema, R"({"type":"string","minLength":1000000})"},
      {Kind::kJsonSchema, R"({"type":"array","minItems":1000000})"},
      {Kind::kJsonSchema,
       R"({"$defs":{"a":{"allOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/b"}]},"b":{"allOf":[{"$ref":"#/$defs/c"},{"$ref":"#/$defs/c"}]},
         "c":{"allOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"})"},
  };
  // Merging doubles it 13 times over.
  std::string doubled = R"({"$defs":{"d0":{"type":"object","properties":{"p":{})";
  for (int i = 1; i < 2000; ++i) doubled += ",\"p" + std::to_string(i) + "\":{}";
  doubled += "}}";
  for (int i = 1; i <= 13; ++i) {
    const std::string below = R"({"$ref":"#/$defs/d)" + std::to_string(i - 1) + "\"}";
    doubled += ",\"d" + std::to_string(i) + R"(":{"allOf":[)" + below + "," + below + "]}";
  }
  doubled += R"(},"allOf":[{"$ref":"#/$defs/d13"},{"type":"object"}]})";
  EXPECT_NE(Rig().Error(Kind::kJsonSchema, doubled).find("takes more than 524288 values"), std::string::npos);
  for (const auto& [kind, text] : hostile) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_NE(Rig().Error(kind, text), "OK") << text.substr(0, 80);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4)) << text.substr(0, 80);
  }
}

}  // namespace
}  // namespace efla
