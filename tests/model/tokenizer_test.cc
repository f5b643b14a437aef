#include "model/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "model/sentencepiece_adapter.h"
#include "model/text_stream.h"
#include "model/utf8.h"
#include "tests/model/scratch.h"

namespace efla {
namespace {

const std::string& ModelFile() {
  static const std::string path = SourcePath("model/demo/tokenizer.model");
  return path;
}

const Tokenizer& Demo() {
  static const auto tokenizer = Tokenizer::Open(ModelFile());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return **tokenizer;
}

std::string Streamed(const std::vector<TokenId>& ids, bool continues, bool skip_special_tokens = true) {
  TextStream stream(&Demo(), {}, continues, false, skip_special_tokens);
  std::string text;
  for (TokenId id : ids) text += stream.Add(id).text;
  return text + stream.Finish().text;
}

TEST(TokenizerTest, AgreesWithEveryExpectedCase) {
  const auto expected = nlohmann::json::parse(ReadWhole(SourcePath("model/demo/expected.json")));
  int cases = 0;
  for (const auto& wanted : expected["tokenizer"]) {
    const std::string text = wanted["text"];
    const auto ids = Demo().Encode(text, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, wanted["ids"].get<std::vector<TokenId>>()) << text;
    EXPECT_EQ(Demo().Decode(*ids), wanted["decoded"].get<std::string>());
    EXPECT_EQ(Streamed(*ids, false), wanted["decoded"].get<std::string>());
    ++cases;
  }
  EXPECT_GE(cases, 15);
}

TEST(TokenizerTest, PiecesAreBytes) {
  EXPECT_EQ(Demo().vocab_size(), 4096);
  EXPECT_EQ(Demo().bos_id(), 1);
  EXPECT_EQ(Demo().eos_id(), 2);
  EXPECT_TRUE(Demo().is_control(1));
  EXPECT_TRUE(Demo().is_control(2));
  EXPECT_FALSE(Demo().is_control(0));
  EXPECT_EQ(Demo().PieceBytes(2, false), "");
  for (int byte = 0; byte < 256; ++byte) {  // byte pieces follow the three special ones
    EXPECT_EQ(Demo().PieceBytes(3 + byte, false), std::string(1, static_cast<char>(byte)));
    EXPECT_EQ(Demo().PieceBytes(3 + byte, true), std::string(1, static_cast<char>(byte)));
  }
  EXPECT_EQ(Demo().Piece(3 + 10), "<0x0A>");
  EXPECT_EQ(Demo().Piece(385), "\xE2\x96\x81H");
  EXPECT_EQ(Demo().PieceBytes(385, false), " H");
  EXPECT_EQ(Demo().PieceBytes(385, true), "H");
}

TEST(TokenizerTest, IdsOutsideTheVocabularyAddNothing) {
  for (TokenId id : {-1, 4096, std::numeric_limits<TokenId>::max(), std::numeric_limits<TokenId>::min()}) {
    EXPECT_EQ(Demo().PieceBytes(id, false), "");
    EXPECT_EQ(Demo().Piece(id), "");
    EXPECT_FALSE(Demo().is_control(id));
  }
}

TEST(TokenizerTest, SpecialTokensInTextArePlainUnlessAskedFor) {
  const std::string text = "Hello</s>World<s>";
  const auto plain = *Demo().Encode(text, false);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 2), 0);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 1), 0);
  EXPECT_EQ(Demo().Decode(plain), text);

  const auto special = *Demo().Encode(text, true);
  EXPECT_EQ(std::count(special.begin(), special.end(), 2), 1);
  EXPECT_EQ(special.back(), 1);
  EXPECT_EQ(Demo().Decode(special), "HelloWorld");  // no space where the token stood
  EXPECT_EQ(Streamed(special, false, /*skip_special_tokens=*/false), text);
  // The first text takes the dummy prefix, even after a control token.
  const auto led = *Demo().Encode("<s>Hello", true);
  auto hello = *Demo().Encode("Hello", false);
  hello.insert(hello.begin(), 1);
  EXPECT_EQ(led, hello);
  EXPECT_EQ(Demo().Encode("</s>", true)->size(), 1u);
  EXPECT_EQ(*Demo().Encode("</s <s", true), *Demo().Encode("</s <s", false));
}

TEST(TokenizerTest, ControlTokensAreFoundBySpelling) {
  EXPECT_EQ(Demo().ControlId("</s>"), 2);
  EXPECT_EQ(Demo().ControlId("<s>"), 1);
  EXPECT_EQ(Demo().ControlId("</s"), -1);
  EXPECT_EQ(Demo().ControlId("<0x0A>"), -1);
  EXPECT_EQ(Demo().ControlId(""), -1);
}

TEST(TokenizerTest, AContinuationHasNoDummyPrefix) {
  for (const char* text : {"cd", " cd", "  cd", "\xE6\x97\xA5", "\n\nx", ""}) {
    const auto ids = Demo().EncodeContinuation(text, false);
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(Streamed(*ids, true), text);
  }
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8) {
  const auto ids = Demo().Encode("fine\xE2\x82", false);
  ASSERT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(ids.status().message()).find("byte 4"), std::string::npos) << ids.status();
}

TEST(TokenizerTest, RandomIdsDecodeAsTheyStream) {
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    std::vector<TokenId> ids(random() % 60);
    std::string bytes;
    bool at_start = true;
    for (TokenId& id : ids) {
      id = static_cast<TokenId>(random() % 2 == 0 ? random() % 4096 : random() % 300);
      bytes += Demo().PieceBytes(id, at_start);
      at_start = at_start && Demo().PieceBytes(id, false).empty();
    }
    const std::string text = Demo().Decode(ids);
    EXPECT_EQ(Streamed(ids, false), text);
    EXPECT_EQ(FindInvalidUtf8(text), std::nullopt);
    if (!FindInvalidUtf8(bytes)) {
      EXPECT_EQ(text, bytes);
    }
  }
}

// Pieces of a book among characters that meet the tokenizer's edges.
std::string RandomText(std::mt19937& random, size_t bytes, bool with_space_marks) {
  static const std::string book = ReadWhole(SourcePath("model/demo/eval.txt"));
  const std::vector<std::string> odd = {with_space_marks ? "\xE2\x96\x81" : "_",
                                        std::string(1, '\0'),
                                        " ",
                                        "  ",
                                        "\n",
                                        "\n\n",
                                        "\t",
                                        " \n",
                                        "x",
                                        "<",
                                        "</s>",
                                        "\xC3\xA9",
                                        "\xE6\x97\xA5\xE6\x9C\xAC",
                                        "\xF0\x9F\x99\x82"};
  std::string text;
  while (text.size() < bytes) {
    if (random() % 3 == 0) {
      for (int i = 0; i < 8; ++i) text += odd[random() % odd.size()];
    } else {
      size_t begin = random() % (book.size() - 200), end = begin + random() % 200;
      while (begin < end && (static_cast<unsigned char>(book[begin]) & 0xC0) == 0x80) ++begin;
      while (end > begin && (static_cast<unsigned char>(book[end]) & 0xC0) == 0x80) --end;
      text += book.substr(begin, end - begin);
    }
  }
  return text;
}

// Long texts are encoded in parts: the ids must be those of the whole.
TEST(TokenizerTest, PartsEncodeAsTheWhole) {
  std::string error;
  const auto library = SentencePieceAdapter::Load(ReadWhole(ModelFile()), error);
  ASSERT_NE(library, nullptr) << error;
  std::mt19937 random(6);
  for (int round = 0; round < 60; ++round) {
    const std::string text = RandomText(random, 600 + random() % 8000, true);
    std::vector<int32_t> whole;
    ASSERT_TRUE(library->Encode(text, true, whole, error)) << error;
    ASSERT_EQ(*Demo().Encode(text, false), whole) << text;
  }
}

TEST(TokenizerTest, TextComesBackByteForByte) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const std::string text = RandomText(random, 500, false);
    EXPECT_EQ(Demo().Decode(*Demo().Encode(text, false)), text);
    EXPECT_EQ(Streamed(*Demo().EncodeContinuation(text, false), true), text);
  }
}

TEST(TokenizerTest, ManyThreadsMayEncode) {
  const std::string text = ReadWhole(SourcePath("model/demo/eval.txt")).substr(0, 4000);
  const auto expected = *Demo().Encode(text, true);
  std::vector<std::thread> threads;
  std::vector<int> agreed(4);
  for (size_t t = 0; t < agreed.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) agreed[t] += *Demo().Encode(text, true) == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int count : agreed) EXPECT_EQ(count, 10);
}

TEST(TokenizerTest, RefusesFilesThatAreNoModel) {
  const ScratchDirectory scratch;
  EXPECT_EQ(Tokenizer::Open(scratch.File("none")).status().code(), absl::StatusCode::kNotFound);
  const std::string good = ReadWhole(ModelFile());
  const std::string bad[] = {"", "text", std::string(1000, '\0'), good.substr(0, good.size() / 2),
                             "\x0a\xff\xff"};
  for (const std::string& contents : bad) {
    scratch.Write("tokenizer.model", contents);
    const auto tokenizer = Tokenizer::Open(scratch.File("tokenizer.model"));
    ASSERT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument) << contents.size();
    EXPECT_NE(std::string(tokenizer.status().message()).find("tokenizer.model"), std::string::npos);
  }
  EXPECT_EQ(Tokenizer::Open(scratch.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerTest, FingerprintIsTheFilesSha256) {
  EXPECT_EQ(Demo().fingerprint().size(), 64u);
  const ScratchDirectory scratch;
  // A second normalizer_spec without the dummy prefix: the same pieces, another file, another behaviour.
  scratch.Write("tokenizer.model", ReadWhole(ModelFile()) + std::string("\x1a\x02\x18\x00", 4));
  const auto other = Tokenizer::Open(scratch.File("tokenizer.model"));
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE((*other)->fingerprint(), Demo().fingerprint());
  EXPECT_EQ((*other)->PieceBytes(385, true), " H");
  EXPECT_EQ(*(*other)->Encode("cd", false), *Demo().EncodeContinuation("cd", false));
}

TEST(TokenizerTest, StretchesThatCannotBeSplitHaveALimit) {
  const std::string stretch(3000, 'a');
  const auto encode = [](const std::string& text, bool parse_special, size_t limit) {
    return Demo().EncodeWithin(text, parse_special, false, {.max_stretch_bytes = limit});
  };
  // A part has 512 bytes and more, to the next space.
  const std::string words = stretch + " " + stretch + " " + stretch;
  const auto whole = encode(words, false, 3001);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(*whole, *Demo().Encode(words, false));
  const absl::Status status = encode(words, false, 3000).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("3001 bytes have no place to split them"), std::string::npos) << status;
  EXPECT_NE(status.ToString().find("the limit is 3000"), std::string::npos) << status;
  EXPECT_FALSE(encode("word " + stretch, false, 3000).ok());
  // Special tokens split a text, where they are looked for.
  const std::string special = stretch + "</s>" + stretch;
  EXPECT_TRUE(encode(special, true, 3000).ok());
  EXPECT_FALSE(encode(special, false, 3000).ok());
  EXPECT_FALSE(encode(special, true, 2999).ok());
}

TEST(TokenizerTest, LimitsChangeNoIdAndEndWhatIsTooLong) {
  std::mt19937 random(8);
  ASSERT_GT(Demo().max_token_bytes(), 4u);
  for (int round = 0; round < 40; ++round) {
    const std::string text = RandomText(random, 1 + random() % 4000, true);
    const bool continues = round % 2 == 0;
    const std::vector<TokenId> ids =
        continues ? *Demo().EncodeContinuation(text, false) : *Demo().Encode(text, false);
    const auto count = static_cast<int64_t>(ids.size());
    EXPECT_LE(text.size(), ids.size() * Demo().max_token_bytes()) << text;
    int asked = 0;
    EncodeLimits limits{.max_tokens = count, .check = [&] {
                          ++asked;
                          return absl::OkStatus();
                        }};
    const auto within = Demo().EncodeWithin(text, false, continues, limits);
    ASSERT_TRUE(within.ok()) << within.status();
    EXPECT_EQ(*within, ids);
    EXPECT_GE(asked, 1);
    limits.max_tokens = count - 1;
    EXPECT_EQ(Demo().EncodeWithin(text, false, continues, limits).status().code(),
              absl::StatusCode::kOutOfRange);
    limits.check = [] { return absl::CancelledError("gone"); };
    limits.max_tokens = count;
    EXPECT_EQ(Demo().EncodeWithin(text, false, continues, limits).status().code(),
              absl::StatusCode::kCancelled);
  }
  // Every piece, alone and as it is written, is no longer than the longest.
  for (TokenId id = 0; id < Demo().vocab_size(); ++id) {
    EXPECT_LE(Demo().PieceBytes(id, false).size(), Demo().max_token_bytes());
  }
  const absl::Status status =
      Demo().EncodeWithin(std::string(1 << 20, 'x'), false, false, {.max_tokens = 1000}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
}

}  // namespace
}  // namespace efla
