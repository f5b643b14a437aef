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
  EXPECT_EQ(*ParseTokenIds(""), TokenIdList{});
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
