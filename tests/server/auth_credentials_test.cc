// The auth file: what it may hold, and how a changed one is taken up.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/credentials.h"

namespace efla {
namespace {

std::string Hash(const std::string& token) { return ToHex(HashToken(token)); }

std::string Entry(const std::string& name, const std::string& token, const std::string& more = "") {
  return absl::StrFormat(R"({"name": "%s", "sha256": "%s", "tenant": "acme", "roles": ["user"]%s})", name,
                         Hash(token), more);
}

std::string File(const std::string& entries, const std::string& tenants = "{}") {
  return absl::StrFormat(R"({"tenants": %s, "tokens": [%s]})", tenants, entries);
}

TEST(CredentialsTest, HashIsSha256) {
  // FIPS 180-2, B.1.
  EXPECT_EQ(Hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(CredentialsTest, FindsTheTokensOfTheFileAndNoOthers) {
  const auto read = Credentials::Parse(
      File(Entry("web", "one", R"(, "max_priority": 3, "expires": "2030-01-31T00:00:00Z")") + "," +
           Entry("batch", "two")));
  ASSERT_TRUE(read.ok()) << read.status();
  const Credential* web = read->Find("one");
  ASSERT_NE(web, nullptr);
  EXPECT_EQ(web->name, "web");
  EXPECT_EQ(web->tenant, "acme");
  EXPECT_TRUE(web->user);
  EXPECT_FALSE(web->admin);
  EXPECT_EQ(web->max_priority, 3);
  ASSERT_TRUE(web->expires);
  EXPECT_EQ(std::chrono::system_clock::to_time_t(*web->expires), 1896048000);  // date -ud 2030-01-31 +%s
  ASSERT_NE(read->Find("two"), nullptr);
  EXPECT_FALSE(read->Find("two")->expires);
  for (const std::string& other : {std::string(), std::string("one "), std::string("three"), Hash("one")}) {
    EXPECT_EQ(read->Find(other), nullptr) << other;
  }
}

TEST(CredentialsTest, ReadsLimitsAndKnowsTenantsWithoutAny) {
  const auto read = Credentials::Parse(File(
      Entry("web", "one"),
      R"({"other": {"requests_per_second": 2.5, "burst": 7, "tokens_per_minute": 600, "max_concurrent": 1,
                    "max_queued": 2, "max_sessions": 3}})"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->tenants().size(), 2u);
  EXPECT_EQ(read->tenants().at("acme"), TenantLimits{});
  const TenantLimits expected{.requests_per_second = 2.5,
                              .burst = 7,
                              .tokens_per_minute = 600,
                              .max_concurrent = 1,
                              .max_queued = 2,
                              .max_sessions = 3};
  EXPECT_EQ(read->tenants().at("other"), expected);
}

TEST(CredentialsTest, WhatIsWrongIsNamedByItsPlaceAndNeverRepeatsASecret) {
  const std::string good = Entry("web", "one");
  const std::pair<std::string, const char*> cases[] = {
      {"", "no JSON"},
      {"[]", "no JSON object"},
      {"{}", "no list \"tokens\""},
      {R"({"tokens": [], "colour": 1})", "\"colour\""},
      {File(R"({"name": "a", "sha256": "my-secret", "tenant": "t", "roles": ["user"]})"),
       "tokens[0] has no \"sha256\""},
      {File(good + "," + Entry("web", "two")), "tokens[1] has the name \"web\" a second time"},
      {File(good + "," + Entry("other", "one")), "tokens[1] has a hash that another entry has"},
      {File(Entry("a b", "one")), "\"name\""},
      {File(Entry("web", "one", R"(, "tenant2": 1)")), "\"tenant2\""},
      {File(Entry("web", "one", R"(, "max_priority": 9)")), "\"max_priority\""},
      {File(Entry("web", "one", R"(, "max_priority": 1.5)")), "\"max_priority\""},
      {File(Entry("web", "one", R"(, "expires": "tomorrow")")), "\"expires\""},
      {File(Entry("web", "one", R"(, "expires": "2030-13-31T00:00:00Z")")), "\"expires\""},
      {File(absl::StrFormat(R"({"name": "a", "sha256": "%s", "tenant": "a~b", "roles": ["user"]})",
                            Hash("x"))),
       "\"tenant\""},
      {File(absl::StrFormat(R"({"name": "a", "sha256": "%s", "tenant": "t", "roles": []})", Hash("x"))),
       "\"roles\""},
      {File(absl::StrFormat(R"({"name": "a", "sha256": "%s", "tenant": "t", "roles": ["root"]})", Hash("x"))),
       "\"roles\""},
      {File(Entry("web", "one", R"(, "roles": ["admin"])")), "the key \"roles\" is there twice"},
      {File(good, R"({"t": {"burst": 1}, "t": {}})"), "the key \"t\" is there twice"},
      {File(good, R"({"t": {"requests_per_second": 0}})"), "tenants[\"t\"]"},
      {File(good, R"({"t": {"requests_per_second": -1}})"), "\"requests_per_second\""},
      {File(good, R"({"t": {"burst": 5}})"), "\"burst\" and no \"requests_per_second\""},
      {File(good, R"({"t": {"max_concurrent": 0}})"), "\"max_concurrent\""},
      {File(good, R"({"t": {"max_sessions": 99999999999999999999}})"), "\"max_sessions\""},
      {File(good, R"({"t": {"max_sesions": 1}})"), "\"max_sesions\""},
      {File(good, R"({"a/b": {}})"), "tenants[\"a/b\"]"},
  };
  for (const auto& [text, part] : cases) {
    const auto read = Credentials::Parse(text);
    ASSERT_FALSE(read.ok()) << text;
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(read.status().message().find(part), absl::string_view::npos) << read.status() << "\n" << text;
    EXPECT_EQ(read.status().message().find("my-secret"), absl::string_view::npos) << read.status();
  }
}

class AuthFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "efla_auth.XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ / "auth.json";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  // A new file under the name, as editors and operators make it.
  void Replace(const std::string& text) {
    std::ofstream(folder_ / "new") << text;
    std::filesystem::rename(folder_ / "new", path_);
  }

  std::filesystem::path folder_, path_;
};

TEST_F(AuthFileTest, AMissingOrBrokenFileIsRefusedAtTheStart) {
  EXPECT_NE(AuthFile::Open(path_).status().message().find(path_.string()), absl::string_view::npos);
  Replace("{");
  const auto file = AuthFile::Open(path_);
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(file.status().message().find(path_.string()), absl::string_view::npos) << file.status();
}

TEST_F(AuthFileTest, AChangedFileIsTakenUpAndABrokenOneLeavesTheOldInForce) {
  Replace(File(Entry("web", "one")));
  const auto opened = AuthFile::Open(path_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  AuthFile& file = **opened;
  EXPECT_EQ(*file.Reload(false), false) << "nothing has changed";
  EXPECT_EQ(*file.Reload(true), true);

  Replace(File(Entry("web", "two")));
  EXPECT_EQ(*file.Reload(false), true);
  EXPECT_EQ(file.current()->Find("one"), nullptr);
  EXPECT_NE(file.current()->Find("two"), nullptr);

  Replace("{ not json");
  EXPECT_FALSE(file.Reload(false).ok());
  EXPECT_NE(file.current()->Find("two"), nullptr);
  EXPECT_EQ(*file.Reload(false), false) << "it has been told";
  std::filesystem::remove(path_);
  EXPECT_FALSE(file.Reload(false).ok());
  EXPECT_NE(file.current()->Find("two"), nullptr);

  Replace(File(Entry("web", "three")));
  EXPECT_EQ(*file.Reload(false), true);
  EXPECT_NE(file.current()->Find("three"), nullptr);
}

}  // namespace
}  // namespace efla
