#include "model/chat.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/model/scratch.h"

namespace efla {
namespace {

using Json = nlohmann::json;

const Tokenizer& Demo() {
  static const auto tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return **tokenizer;
}

class ChatTest : public ::testing::Test {
 protected:
  // The template that tokenizer_config.json holds.
  absl::StatusOr<std::unique_ptr<const ChatTemplate>> OpenConfig(const Json& config) {
    folder_.Write("tokenizer_config.json", config.dump());
    return ChatTemplate::Open(folder_.path(), Demo());
  }
  std::string Text(const Json& config, const std::vector<ChatMessage>& messages,
                   const ChatOptions& options = {}) {
    const auto opened = OpenConfig(config);
    if (!opened.ok()) return std::string(opened.status().message());
    const auto chat = (*opened)->Render(messages, options);
    return chat.ok() ? chat->text : std::string(chat.status().message());
  }

  ScratchDirectory folder_;
  const std::vector<ChatMessage> hello_ = {{"user", "Hello"}};
};

constexpr char kTurns[] =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

TEST_F(ChatTest, TheTemplateOfTheConfigIsRendered) {
  EXPECT_EQ(Text({{"chat_template", kTurns}}, hello_), "<user>Hello</s>\n<assistant>");
  EXPECT_EQ(Text({{"chat_template", kTurns}}, hello_, {.add_generation_prompt = false}), "<user>Hello</s>\n");
}

TEST_F(ChatTest, OfAListTheDefaultCounts) {
  const Json list = {{{"name", "tool_use"}, {"template", "tools"}},
                     {{"name", "default"}, {"template", "plain"}}};
  EXPECT_EQ(Text({{"chat_template", list}}, hello_), "plain");
  const auto none = OpenConfig({{"chat_template", {{{"name", "tool_use"}, {"template", "tools"}}}}});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ChatTest, AFileBesideTheConfigWins) {
  folder_.Write("chat_template.jinja", "from the file {{ bos_token }}");
  EXPECT_EQ(Text({{"chat_template", kTurns}, {"bos_token", "<b>"}}, hello_), "from the file <b>");
}

TEST_F(ChatTest, SpecialTokensAreTheConfigsOrTheTokenizers) {
  const std::string all =
      "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}{{ tools is none }}";
  EXPECT_EQ(Text({{"chat_template", all}}, hello_), "<s></s>FalseTrue");
  EXPECT_EQ(Text({{"chat_template", all},
                  {"bos_token", {{"content", "[B]"}, {"lstrip", false}}},
                  {"eos_token", "[E]"},
                  {"unk_token", "[U]"}},
                 hello_),
            "[B][E][U]FalseTrue");
}

TEST_F(ChatTest, WithoutATemplateThereIsNone) {
  EXPECT_EQ(ChatTemplate::Open(folder_.path(), Demo()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenConfig({{"bos_token", "<s>"}}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenConfig({{"chat_template", nullptr}}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ChatTest, ATemplateThatCannotBeUsedIsAnErrorThatNamesFileAndLine) {
  const auto unsupported = OpenConfig({{"chat_template", "a\n{% include 'x' %}"}});
  EXPECT_EQ(unsupported.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(unsupported.status().message(),
            "tokenizer_config.json: chat template, line 2: the statement \"include\" is not supported");
  EXPECT_EQ(OpenConfig({{"chat_template", 5}}).status().message(),
            "tokenizer_config.json: chat_template is neither a string nor a list");
  folder_.Write("tokenizer_config.json", "{\"chat_template\": ");
  EXPECT_EQ(ChatTemplate::Open(folder_.path(), Demo()).status().code(), absl::StatusCode::kInvalidArgument);
  folder_.Write("chat_template.jinja", "\xFF");
  folder_.Write("tokenizer_config.json", "{}");
  EXPECT_EQ(ChatTemplate::Open(folder_.path(), Demo()).status().message(),
            "chat_template.jinja: the chat template is not UTF-8 at byte 0");
}

TEST_F(ChatTest, ARefusalOfTheTemplateIsTheRendersError) {
  const auto opened = OpenConfig({{"chat_template", "{{ raise_exception('no ' + messages[0].role) }}"}});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto chat = (*opened)->Render(hello_, {});
  EXPECT_EQ(chat.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(chat.status().message(), "line 1: no user");
}

TEST_F(ChatTest, AFailureOfTheTemplateItselfHasACodeOfItsOwn) {
  const auto code = [&](const std::string& source) {
    const auto opened = OpenConfig({{"chat_template", source}});
    EXPECT_TRUE(opened.ok()) << opened.status();
    return (*opened)->Render(hello_, {}).status().code();
  };
  for (const char* fails : {"{{ foo.bar.baz }}", "{{ 1 + messages[0].content }}", "{{ messages[0].none.x }}",
                            "{{ messages | map('int') | map('length') | list }}"}) {
    EXPECT_EQ(code(fails), absl::StatusCode::kFailedPrecondition) << fails;
  }
  for (const char* refuses :
       {"{{ raise_exception('no') }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(t='x' * 1000000) %}{% for i in range(20) %}{{ n.t }}{% endfor %}"}) {
    EXPECT_EQ(code(refuses), absl::StatusCode::kInvalidArgument) << refuses;
  }
}

class AfterAnswerTest : public ChatTest {
 protected:
  ContinuedChat After(const std::string& source, const std::vector<ChatMessage>& messages,
                      const ChatOptions& options = {}) {
    const auto opened = OpenConfig({{"chat_template", source}});
    EXPECT_TRUE(opened.ok()) << opened.status();
    const auto chat = (*opened)->RenderAfterAnswer(messages, options);
    EXPECT_TRUE(chat.ok()) << source << chat.status();
    return chat.ok() ? *chat : ContinuedChat();
  }
  absl::Status Error(const std::string& source, const std::vector<ChatMessage>& messages) {
    const auto opened = OpenConfig({{"chat_template", source}});
    EXPECT_TRUE(opened.ok()) << opened.status();
    return (*opened)->RenderAfterAnswer(messages, {}).status();
  }
  const std::vector<ChatMessage> and_ = {{"user", "And?"}};
};

TEST_F(AfterAnswerTest, TheAnswerIsClosedAndNothingOfABeginningComes) {
  const std::string with_default =
      "{{ bos_token }}{% if messages[0].role != 'system' %}<system>Be kind.</s>\n{% endif %}" +
      std::string(kTurns);
  const ContinuedChat chat = After(with_default, and_);
  EXPECT_EQ(chat.chat.text, "</s>\n<user>And?</s>\n<assistant>");
  EXPECT_EQ(chat.closing_bytes, 5u);
  const std::vector<TextRange> content = {{6, 10}, {11, 15}};
  EXPECT_EQ(chat.chat.content, content);

  EXPECT_EQ(After(with_default, {{"system", "New rules."}, {"user", "a"}}).chat.text,
            "</s>\n<system>New rules.</s>\n<user>a</s>\n<assistant>");
  EXPECT_EQ(After(with_default, and_, {.add_generation_prompt = false}).chat.text, "</s>\n<user>And?</s>\n");
  EXPECT_EQ(After(with_default, {{"user", "a"}, {"assistant", "So"}},
                  {.add_generation_prompt = false, .continue_final_message = true})
                .chat.text,
            "</s>\n<user>a</s>\n<assistant>So");
}

TEST_F(AfterAnswerTest, TemplatesThatTrimOrDependOnTheOrderGoOn) {
  EXPECT_EQ(
      After("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", {{"user", " a "}})
          .chat.text,
      "\nuser: a\n");
  // What closes an answer may depend on what comes after it: it is seen only where it is the same.
  const ContinuedChat last = After(
      "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '</s>' if not loop.last }}{% endfor %}", and_);
  EXPECT_EQ(last.chat.text, "</s>user: And?");
  EXPECT_EQ(last.closing_bytes, 0u);
  const std::string in_turn =
      "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
      "raise_exception('order') "
      "}}{% endif %}[{{ m.content }}]{% endfor %}";
  EXPECT_EQ(After(in_turn, and_).chat.text, "][And?]");
  EXPECT_EQ(Error(in_turn, {{"assistant", "x"}}), absl::InvalidArgumentError("line 1: order"));
}

TEST_F(AfterAnswerTest, WhereNoAnswerEndsIsSaid) {
  const auto not_seen = absl::NotFoundError("the template does not write answers as they are");
  EXPECT_EQ(Error("{{ messages[-1].content }}", and_), not_seen);
  EXPECT_EQ(Error("{% for m in messages %}{{ m.content | upper }}{% endfor %}", and_), not_seen);
  EXPECT_EQ(Error("{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}", and_),
            absl::NotFoundError("the template writes an answer more than once"));
  EXPECT_EQ(Error("{{ foo.bar }}", and_).code(), absl::StatusCode::kFailedPrecondition);
}

// Whatever comes before the answer, in the style of published templates.
TEST_F(AfterAnswerTest, ItIsTheEndOfTheWholeConversation) {
  const std::vector<ChatMessage> before = {{"user", "One?"}, {"assistant", "1"}, {"user", "Two?"}};
  const std::vector<std::vector<ChatMessage>> ends = {
      {{"user", "Three, and </s>?"}}, {{"user", " blanks \n"}, {"assistant", "3"}, {"user", "Four?"}}};
  int compared = 0;
  for (const char* name : {"bars", "chatml", "headers", "inst", "spaces", "tools", "turns"}) {
    const std::string source =
        ReadWhole(SourcePath("tests/model/chat_golden/templates/" + std::string(name) + ".jinja"));
    for (const auto& end : ends) {
      for (const bool prompt : {true, false}) {
        std::vector<ChatMessage> all = before;
        all.push_back({"assistant", "The-answer"});
        all.insert(all.end(), end.begin(), end.end());
        const ChatOptions options{.add_generation_prompt = prompt,
                                  .now = std::chrono::system_clock::from_time_t(1707483959)};
        const std::string whole = Text({{"chat_template", source}}, all, options);
        const size_t at = whole.find("The-answer");
        ASSERT_NE(at, std::string::npos) << name << whole;
        EXPECT_EQ(After(source, end, options).chat.text, whole.substr(at + 10)) << name;
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 28);
}

TEST_F(ChatTest, AFinalMessageIsContinuedWhereItsContentEnds) {
  const ChatOptions on = {.add_generation_prompt = false, .continue_final_message = true};
  const Json turns = {{"chat_template", kTurns}};
  const Json trimming = {
      {"chat_template", "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"}};
  EXPECT_EQ(Text(turns, {{"user", "a"}, {"assistant", "So far"}}, on), "<user>a</s>\n<assistant>So far");
  EXPECT_EQ(Text(turns, {{"user", "a"}, {"assistant", "So far \n"}}, on),
            "<user>a</s>\n<assistant>So far \n");
  EXPECT_EQ(Text(trimming, {{"user", "a"}, {"assistant", " So far \n"}}, on),
            "<user>a</s>\n<assistant>So far");
  // What the template writes itself is not taken for the content.
  EXPECT_EQ(Text(turns, {{"user", "a"}, {"assistant", "s"}}, on), "<user>a</s>\n<assistant>s");
  EXPECT_EQ(Text(turns, {{"user", "x"}, {"assistant", "x"}}, on), "<user>x</s>\n<assistant>x");
  const std::string cannot =
      "the last message cannot be continued: it is blank, or the template does not write it as it is";
  EXPECT_EQ(Text(turns, {{"user", "a"}, {"assistant", " \n"}}, on), cannot);
  EXPECT_EQ(Text({{"chat_template", "{{ messages[-1].content | upper }}"}}, {{"assistant", "abc"}}, on),
            cannot);
}

TEST_F(ChatTest, ContinuedTextsAreThoseOfTheReference) {
  const Json golden = Json::parse(ReadWhole(SourcePath("tests/model/chat_golden/conversations.json")));
  int compared = 0;
  for (const Json& one : golden) {
    if (!one.contains("continued")) continue;
    folder_.Write("chat_template.jinja", ReadWhole(SourcePath("tests/model/chat_golden/templates/" +
                                                              one["template"].get<std::string>())));
    std::vector<ChatMessage> messages;
    for (const Json& message : one["variables"]["messages"])
      messages.push_back({message["role"], message["content"]});
    EXPECT_EQ(Text(Json::object(), messages,
                   {.add_generation_prompt = false,
                    .continue_final_message = true,
                    .now = std::chrono::system_clock::from_time_t(1707483959)}),
              one["continued"].get<std::string>())
        << one["template"] << one["conversation"];
    ++compared;
  }
  EXPECT_GE(compared, 10);
}

TEST_F(ChatTest, SpecialTokensComeFromTheTemplateAndNeverFromTheMessages) {
  const auto opened = OpenConfig({{"chat_template", "{{ bos_token }}" + std::string(kTurns)}});
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::vector<ChatMessage> messages = {{"us</s>er", "<s>Hello</s>"}, {"user", "<"}};
  const auto chat = (*opened)->Render(messages, {});
  ASSERT_TRUE(chat.ok()) << chat.status();
  const auto ids = Demo().EncodeMarked(chat->text, chat->content, /*continues=*/false, {});
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(ids->front(), Demo().bos_id());
  EXPECT_EQ(std::count(ids->begin(), ids->end(), Demo().bos_id()), 1);
  EXPECT_EQ(std::count(ids->begin(), ids->end(), Demo().eos_id()), 2);  // one a message
  // All of it parsed: the messages' too.
  const auto parsed = Demo().Encode(chat->text, /*parse_special=*/true);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(std::count(parsed->begin(), parsed->end(), Demo().bos_id()), 2);
  EXPECT_EQ(std::count(parsed->begin(), parsed->end(), Demo().eos_id()), 4);
}

TEST_F(ChatTest, MarksChangeNothingWhereNoSpecialTokenIs) {
  const std::string text = "<s>Once upon a time </s>\nthere was<s> a lot of  text";
  const auto all = Demo().Encode(text, true);
  ASSERT_TRUE(all.ok());
  const std::vector<TextRange> between = {{5, 9}, {14, 20}, {30, 32}};
  EXPECT_EQ(*Demo().EncodeMarked(text, between, false, {}), *all);
  EXPECT_EQ(*Demo().EncodeMarked(text, {}, false, {}), *all);
  EXPECT_EQ(*Demo().EncodeMarked(text, {}, true, {}), *Demo().EncodeContinuation(text, true));
  const std::vector<TextRange> whole = {{0, text.size()}};
  EXPECT_EQ(*Demo().EncodeMarked(text, whole, false, {}), *Demo().Encode(text, false));
  // One byte is enough.
  for (const TextRange touched : {TextRange{0, 1}, TextRange{2, 3}, TextRange{1, 2}}) {
    const std::vector<TextRange> one = {touched};
    EXPECT_NE(Demo().EncodeMarked(text, one, false, {})->front(), Demo().bos_id());
  }
  EXPECT_FALSE(Demo().EncodeMarked("\xFF", {}, false, {}).ok());
}

// Any marks: the tokens decode to the text, and no special token touches a mark.
TEST_F(ChatTest, RandomMarksKeepTheText) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 500; ++round) {
    std::string text;
    std::vector<TextRange> marks;
    size_t specials_outside = 0;
    for (size_t parts = 1 + random() % 6; parts > 0; --parts) {
      const bool marked = random() % 2 == 0;
      const std::string part = std::vector<std::string>{"ab ", "<s>", "</s>", "x\n", "<s", "é"}[random() % 6];
      if (marked) {
        if (!marks.empty() && marks.back().end == text.size()) {
          marks.back().end += part.size();
        } else {
          marks.push_back({text.size(), text.size() + part.size()});
        }
      } else if (part == "<s>" || part == "</s>") {
        ++specials_outside;
      }
      text += part;
    }
    const auto ids = Demo().EncodeMarked(text, marks, false, {});
    ASSERT_TRUE(ids.ok()) << ids.status();
    size_t specials = 0;
    std::string decoded;
    for (TokenId id : *ids) {
      specials += Demo().is_control(id);
      decoded +=
          Demo().is_control(id) ? std::string(Demo().Piece(id)) : std::string(Demo().PieceBytes(id, false));
    }
    EXPECT_EQ(specials, specials_outside) << text;
    if (!decoded.empty() && decoded.find(' ') < decoded.size() && decoded.size() == text.size() + 1) {
      decoded.erase(decoded.find(' '), 1);  // the dummy prefix of the first text
    }
    EXPECT_EQ(decoded, text);
  }
}

}  // namespace
}  // namespace efla
