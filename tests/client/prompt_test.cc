#include "client/prompt.h"

#include <cstdio>
#include <fstream>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace efla {
namespace {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes) : path_(::testing::TempDir() + "efla_prompt_test.txt") {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

TEST(ParseTokenIdsTest, NumbersApart) {
  EXPECT_EQ(*ParseTokenIds("1,2,3"), (TokenIdList{1, 2, 3}));
  EXPECT_EQ(*ParseTokenIds("0, 4294967295"), (TokenIdList{0, 4294967295}));
  EXPECT_EQ(*ParseTokenIds(" 7 8 ,9\n"), (TokenIdList{7, 8, 9}));
}

TEST(ParseTokenIdsTest, RefusesAnEmptyPlaceAndSaysWhere) {
  for (const auto& [text, position] : {std::pair("", 0), {" ", 0}, {",1", 0}, {"1,2,,3", 2}, {"1, 2,", 2}}) {
    absl::StatusOr<TokenIdList> ids = ParseTokenIds(text);
    ASSERT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(ids.status().message().find(absl::StrFormat("position %d is empty", position)),
              absl::string_view::npos)
        << ids.status();
  }
}

TEST(FirstInvalidUtf8Test, FindsTheFirstBadByte) {
  for (const std::string_view good :
       {"", "plain", "\xc3\xa9", "\xe2\x82\xac", "\xed\x9f\xbf", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(FirstInvalidUtf8(good), std::nullopt) << good;
  }
  for (const std::string_view bad :
       {"ab\x80", "ab\xff", "ab\xc0\xaf", "ab\xc3", "ab\xe2\x82", "ab\xe2\x82z", "ab\xe0\x9f\xbf",
        "ab\xed\xa0\x80", "ab\xf0\x8f\xbf\xbf", "ab\xf4\x90\x80\x80", "ab\xf0\x9f\x98"}) {
    EXPECT_EQ(FirstInvalidUtf8(bad), std::optional<size_t>(2)) << bad;
  }
}

TEST(ReadPromptTest, AFileThatIsNotUtf8IsNamedWithTheOffset) {
  TemporaryFile file("abc\xff");
  const absl::Status status = ReadPrompt({.text = {}, .file = file.path(), .token_ids = {}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(file.path() + " is not UTF-8: byte 0xff at offset 3"),
            absl::string_view::npos)
      << status;
}

TEST(ParseTokenIdsTest, FromAFile) {
  TemporaryFile file("1, 2\n3\n");
  EXPECT_EQ(*ParseTokenIds("@" + file.path()), (TokenIdList{1, 2, 3}));
}

TEST(ParseTokenIdsTest, RefusesWhatIsNoIdAndNamesIt) {
  for (const std::string bad : {"x", "-2", "4294967296", "2.5", "2x"}) {
    absl::StatusOr<TokenIdList> ids = ParseTokenIds("1," + bad);
    ASSERT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(ids.status().message().find(absl::StrFormat("\"%s\" at position 1", bad)),
              absl::string_view::npos)
        << ids.status();
  }
}

TEST(ReadFileTest, BytesAsTheyAre) {
  const std::string bytes("a\r\n\0\xff b", 7);
  EXPECT_EQ(*ReadFile(TemporaryFile(bytes).path()), bytes);
}

TEST(InputFileTest, EndlessInputEndsAtTheLimit) {
  InputFile file("/dev/zero", 3 << 20);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(file.Next()->size(), size_t{1} << 20);
  const absl::Status status = file.Next().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("/dev/zero has more than 3145728 bytes"), absl::string_view::npos)
      << status;
}

TEST(ReadFileTest, MissingFilesAndFoldersAreErrors) {
  EXPECT_EQ(ReadFile("/no/such/file").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadFile("/").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReadPromptTest, TakesExactlyOneSource) {
  EXPECT_EQ(std::get<std::string>(*ReadPrompt({.text = "hi", .file = {}, .token_ids = {}})), "hi");
  EXPECT_EQ(std::get<std::string>(*ReadPrompt({.text = "", .file = {}, .token_ids = {}})), "");
  EXPECT_EQ(std::get<TokenIdList>(*ReadPrompt({.text = {}, .file = {}, .token_ids = "5"})), TokenIdList{5});
  EXPECT_EQ(ReadPrompt({}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadPrompt({.text = "a", .file = {}, .token_ids = "1"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace efla
