#include "client/chat_file.h"

#include "gtest/gtest.h"

namespace efla {
namespace {

std::string ErrorOf(std::string_view json) {
  const absl::StatusOr<v1::Chat> chat = ParseChat("f", json);
  EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument) << json;
  return std::string(chat.status().message());
}

TEST(ChatFileTest, AListIsTheMessages) {
  const auto chat =
      ParseChat("f", R"([{"role": "user", "content": "Hé"}, {"content": "", "role": "assistant"}])");
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_EQ(chat->messages_size(), 2);
  EXPECT_EQ(chat->messages(0).role(), "user");
  EXPECT_EQ(chat->messages(0).content(), "Hé");
  EXPECT_EQ(chat->messages(1).role(), "assistant");
  EXPECT_FALSE(chat->has_add_generation_prompt());
}

TEST(ChatFileTest, AnObjectSaysHowTheyAreContinued) {
  const auto chat =
      ParseChat("f", R"({"messages": [], "add_generation_prompt": false, "continue_final_message": true})");
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->messages_size(), 0);
  EXPECT_TRUE(chat->has_add_generation_prompt());
  EXPECT_FALSE(chat->add_generation_prompt());
  EXPECT_TRUE(chat->continue_final_message());
}

TEST(ChatFileTest, ErrorsNameThePlace) {
  EXPECT_EQ(ErrorOf("[{"), "f: it is neither a list of messages nor an object with messages, in JSON");
  EXPECT_EQ(ErrorOf("{}"), "f: it has no messages");
  EXPECT_EQ(ErrorOf(R"({"messages": 5})"), "f: messages is no list");
  EXPECT_EQ(ErrorOf(R"({"messages": [], "tools": []})"), "f: \"tools\" is not known");
  EXPECT_EQ(ErrorOf(R"({"messages": [], "add_generation_prompt": 1})"),
            "f: add_generation_prompt is no boolean");
  EXPECT_EQ(ErrorOf("[1]"), "f: messages[0] is no object");
  EXPECT_EQ(ErrorOf(R"([{"role": "user"}])"), "f: messages[0] has no content");
  EXPECT_EQ(ErrorOf(R"([{"role": "user", "content": "a"}, {"role": "user", "content": ["a"]}])"),
            "f: messages[1].content is no string");
  EXPECT_EQ(ErrorOf(R"([{"role": "user", "content": "a", "name": "x"}])"),
            "f: messages[0] has \"name\"; a message has role and content");
}

TEST(ChatFileTest, AFileThatIsNotThereIsNamed) {
  EXPECT_NE(ReadChat("/nonexistent/chat.json").status().message().find("/nonexistent/chat.json"),
            absl::string_view::npos);
}

}  // namespace
}  // namespace efla
