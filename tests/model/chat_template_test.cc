#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/chat_template/template.h"
#include "tests/model/scratch.h"

namespace efla::jinja {
namespace {

using Json = nlohmann::ordered_json;

// 2024-02-09 13:05:59 UTC, as in make_golden.py.
const auto kNow = std::chrono::system_clock::from_time_t(1707483959);

Value FromJson(const Json& json) {
  if (json.is_null()) return Value::OfNone();
  if (json.is_boolean()) return Value(json.get<bool>());
  if (json.is_number_integer()) return Value(json.get<int64_t>());
  if (json.is_number_float()) return Value(json.get<double>());
  if (json.is_string()) return Value(Text::Content(json.get<std::string>()));
  if (json.is_array()) {
    std::vector<Value> items;
    for (const Json& item : json) items.push_back(FromJson(item));
    return Value::OfItems(std::move(items));
  }
  std::vector<std::pair<Value, Value>> entries;
  for (const auto& [key, value] : json.items()) entries.emplace_back(Value::Markup(key), FromJson(value));
  return Value::OfEntries(std::move(entries));
}

Variables AllOf(const Json& json) {
  Variables variables;
  for (const auto& [key, value] : json.items()) variables.emplace_back(key, FromJson(value));
  return variables;
}

absl::StatusOr<Text> Render(const std::string& source, const Variables& variables = {},
                            RenderOptions options = {.now = kNow}) {
  absl::StatusOr<Template> parsed = Template::Parse(source);
  return parsed.ok() ? parsed->Render(variables, options) : parsed.status();
}

std::string TextOf(const absl::StatusOr<Text>& rendered) {
  return rendered.ok() ? rendered->bytes() : "error: " + std::string(rendered.status().message());
}

std::string ErrorOf(const std::string& source, const Variables& variables = {}, RenderOptions options = {}) {
  const absl::StatusOr<Text> rendered = Render(source, variables, options);
  EXPECT_FALSE(rendered.ok()) << source;
  if (rendered.ok()) return "";
  EXPECT_TRUE(absl::IsInvalidArgument(rendered.status()) || absl::IsFailedPrecondition(rendered.status()))
      << source << rendered.status();
  return std::string(rendered.status().message());
}

class ChatTemplateGoldenTest : public ::testing::Test {
 protected:
  ChatTemplateGoldenTest() {
    setenv("TZ", "UTC", 1);
    tzset();
  }
  static Json Read(const std::string& name) {
    return Json::parse(ReadWhole(SourcePath("tests/model/chat_golden/" + name)));
  }
  // True where the outcome is that of the reference.
  static void Check(const Json& expected, const absl::StatusOr<Text>& rendered, const std::string& what) {
    if (expected.contains("text")) {
      ASSERT_TRUE(rendered.ok()) << what << "\n" << rendered.status();
      ASSERT_EQ(rendered->bytes(), expected["text"].get<std::string>()) << what;
    } else {
      ASSERT_FALSE(rendered.ok()) << what << "\nrenders " << rendered->bytes() << "\nbut should fail with "
                                  << expected["error"];
    }
  }
};

TEST_F(ChatTemplateGoldenTest, ConversationsAreThoseOfTheReference) {
  int texts = 0;
  for (const Json& one : Read("conversations.json")) {
    const std::string file = one["template"];
    const auto parsed = Template::Parse(ReadWhole(SourcePath("tests/model/chat_golden/templates/" + file)));
    ASSERT_TRUE(parsed.ok()) << file << ": " << parsed.status();
    const auto rendered = parsed->Render(AllOf(one["variables"]), {.now = kNow});
    Check(one["expected"], rendered, file + ", " + one["conversation"].get<std::string>());
    texts += rendered.ok();
  }
  EXPECT_GE(texts, 200);
}

TEST_F(ChatTemplateGoldenTest, ExpressionsAndRandomTemplatesAreThoseOfTheReference) {
  const Json golden = Read("expressions.json");
  const Variables variables = AllOf(golden["variables"]);
  int texts = 0;
  for (const Json& one : golden["cases"]) {
    const std::string source = one["template"];
    const auto rendered = Render(source, variables);
    Check(one["expected"], rendered, source);
    texts += rendered.ok();
  }
  EXPECT_GE(texts, 1000);
}

// Content of letters that no template writes: what is marked must be just these, wherever they ended up.
TEST_F(ChatTemplateGoldenTest, ContentIsMarkedByteForByte) {
  const std::string letters = "\xD1\x8F";  // U+044F
  int templates = 0;
  for (const char* file : {"chatml", "inst", "headers", "turns", "bars", "spaces", "generation", "last_only",
                           "whitespace", "tools", "parts"}) {
    Json messages = Json::array();
    for (const char* role : {"user", "assistant", "user"}) {
      messages.push_back({{"role", role}, {"content", " " + letters + " <s>\n" + letters + letters}});
    }
    const auto parsed = Template::Parse(
        ReadWhole(SourcePath(std::string("tests/model/chat_golden/templates/") + file + ".jinja")));
    ASSERT_TRUE(parsed.ok()) << file << parsed.status();
    Variables variables = AllOf({{"messages", messages}, {"add_generation_prompt", true}});
    variables.emplace_back("bos_token", Value::Markup("<s>"));
    variables.emplace_back("eos_token", Value::Markup("</s>"));
    const auto rendered = parsed->Render(variables, {.now = kNow});
    ASSERT_TRUE(rendered.ok()) << file << rendered.status();
    std::vector<bool> marked(rendered->size());
    for (const Text::Range& range : rendered->content()) {
      ASSERT_LT(range.begin, range.end);
      ASSERT_LE(range.end, rendered->size());
      for (size_t i = range.begin; i < range.end; ++i) marked[i] = true;
    }
    int found = 0;
    for (size_t at = 0; (at = rendered->bytes().find(letters, at)) != std::string::npos; at += 2, ++found) {
      EXPECT_TRUE(marked[at] && marked[at + 1]) << file << " at " << at;
    }
    EXPECT_GE(found, 3) << file;
    for (const std::string markup : {"<|im_start|>", "<|im_end|>", "[INST]", "<start_of_turn>", "<|user|>",
                                     "<User>", "<|eot_id|>", "</s:"}) {
      for (size_t at = 0; (at = rendered->bytes().find(markup, at)) != std::string::npos; ++at) {
        EXPECT_FALSE(marked[at] || marked[at + markup.size() - 1]) << file << ": " << markup;
      }
    }
    // "<s>" of the contents is marked, the template's own is not.
    for (size_t at = 0; (at = rendered->bytes().find("<s>", at)) != std::string::npos; ++at) {
      const bool of_content = at > 0 && rendered->bytes()[at - 1] == ' ' && rendered->bytes()[at + 3] == '\n';
      EXPECT_EQ(marked[at], of_content) << file << " at " << at;
    }
    ++templates;
  }
  EXPECT_EQ(templates, 11);
}

TEST(ChatTemplateTest, OperationsKeepTheMarksOrMarkEverything) {
  const Variables variables = {{"c", Value(Text::Content("ab c"))}};
  const auto ranges = [&](const std::string& source) {
    const auto rendered = Render(source, variables);
    EXPECT_TRUE(rendered.ok()) << source << rendered.status();
    std::string marks(rendered->size(), '.');
    for (const Text::Range& range : rendered->content()) {
      marks.replace(range.begin, range.end - range.begin, range.end - range.begin, '#');
    }
    return rendered->bytes() + "|" + marks;
  };
  EXPECT_EQ(ranges("x{{ c }}y"), "xab cy|.####.");
  EXPECT_EQ(ranges("{{ 'x' + c[1:] + 'y' }}"), "xb cy|.###.");
  EXPECT_EQ(ranges("{{ ('-' ~ c ~ '-') | upper }}"), "-AB C-|.####.");
  EXPECT_EQ(ranges("{{ c.split(' ') | join('+') }}"), "ab+c|##.#");
  EXPECT_EQ(ranges("{{ c | replace('b', '<s>') }}"), "a<s> c|#...##");
  EXPECT_EQ(ranges("{{ 'x_y' | replace('_', c) }}"), "xab cy|.####.");
  EXPECT_EQ(ranges("{{ ['x', c] }}"), "['x', 'ab c']|.......####..");
  EXPECT_EQ(ranges("{{ {'k': c} | tojson }}"), "{\"k\": \"ab c\"}|.......####..");
  EXPECT_EQ(ranges("{{ c[::-1] }}{% for x in c %}{{ x }}.{% endfor %}"), "c baa.b. .c.|#####.#.#.#.");
  EXPECT_EQ(ranges("{% set b %}<{{ c }}>{% endset %}{{ b | trim }}"), "<ab c>|.####.");
  EXPECT_EQ(ranges("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(c) }}"), "<ab c>|.####.");
  EXPECT_EQ(ranges("{{ c.title() }}{{ ' x ' ~ c | trim }}"), "Ab C x ab c|####...####");
  EXPECT_EQ(ranges("{{ c | indent(1, true) }}"), " ab c|.####");
}

TEST(ChatTemplateTest, WhatIsNotSupportedIsRefusedWhenLoadedWithItsLine) {
  const struct {
    const char *source, *error;
  } cases[] = {
      {"\n{% include 'x' %}", "line 2: the statement \"include\" is not supported"},
      {"{% raw %}{{ x }}{% endraw %}", "line 1: the statement \"raw\" is not supported"},
      {"a\nb\n{{ x | wordwrap(3) }}", "line 3: the filter \"wordwrap\" is not supported"},
      {"{{ x is sameas y }}", "line 1: the test \"sameas\" is not supported"},
      {"{{ x.format(1) }}", "line 1: the method \"format\" is not supported"},
      {"{{ 'a%s' % x }}", "line 1: formatting a string with % is not supported"},
      {"{% for x in y recursive %}{% endfor %}", "line 1: a recursive for is not supported"},
      {"{{ cycler(1, 2) }}", "line 1: the function \"cycler\" is not supported"},
      {"{% for x in y %}{% macro f() %}{% endmacro %}{% endfor %}",
       "line 1: a macro inside a for, a macro or a set is not supported"},
      {"{{ f(*x) }}", "line 1: arguments with * are not supported"},
      {"{{ x['f']() }}",
       "line 1: calling anything but a function, a macro or a method by its name is not supported"},
      {"{{ x | map('wordwrap') }}", "line 1: the filter \"wordwrap\" is not supported"},
      {"{{ x | selectattr('a', y) }}", "line 1: the name of a test is not a literal, which is not supported"},
      {"{{ x | selectattr('a', 'eq') }}", "line 1: the test \"eq\" needs the argument \"other\""},
      {"{{ x | replace('a') }}", "line 1: the filter \"replace\" needs the argument \"new\""},
      {"{{ x | trim(1, 2) }}", "line 1: the filter \"trim\" takes 1 arguments at most here, and has 2"},
      {"{{ x | tojson(cls=1) }}", "line 1: the argument \"cls\" of the filter \"tojson\" is not supported"},
      {"{{ 99999999999999999999 }}", "line 1: 99999999999999999999 is no number of 64 bits"},
      {"{{ \"\\N{DASH}\" }}", "line 1: characters by name (\\N{...}) are not supported"},
      {"x\n{% if a %}\ny", "line 2: there is no \"endif\" for what begins here"},
      {"{{ a b }}", "line 1: \"b\" stands where \"}}\" should"},
      {"{# never", "line 1: the comment has no end"},
      {"{{ a", "line 1: the tag has no end"},
      {"{{ a ? b }}", "line 1: the character \"?\" does not belong into a tag"},
      {"{% macro f() %}{{ caller() }}{% endmacro %}", "line 1: \"caller\" in a macro is not supported"},
  };
  for (const auto& one : cases) {
    const auto parsed = Template::Parse(one.source);
    ASSERT_FALSE(parsed.ok()) << one.source;
    EXPECT_EQ(parsed.status().message(), one.error) << one.source;
  }
}

TEST(ChatTemplateTest, ErrorsOfARunNameTheLine) {
  EXPECT_EQ(ErrorOf("a\n{{ raise_exception('no such role: ' ~ 'x') }}"), "line 2: no such role: x");
  EXPECT_EQ(ErrorOf("\n\n{{ m.role }}"), "line 3: \"m\" is undefined");
  EXPECT_EQ(ErrorOf("{% set x = {'a': 1} %}\n{{ x.b.c }}"), "line 2: dict has no attribute \"b\"");
  EXPECT_EQ(ErrorOf("{{ 'a' + 1 }}"), "line 1: str + int cannot be computed");
  EXPECT_EQ(ErrorOf("{{ 9223372036854775807 + 1 }}"),
            "line 1: 9223372036854775807 + 1 is no number of 64 bits");
  EXPECT_EQ(ErrorOf("{{ strftime_now('%Y' * 400) }}"), "line 1: strftime_now() of more than 1000 bytes");
  EXPECT_EQ(ErrorOf("{{ range(3) }}"), "line 1: writing a range is not supported");
}

TEST(ChatTemplateTest, RunsAreBounded) {
  EXPECT_NE(
      ErrorOf("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}").find("steps"),
      std::string::npos);
  EXPECT_NE(ErrorOf("{{ range(100001) | length }}").find("more than 100000 numbers"), std::string::npos);
  EXPECT_NE(ErrorOf("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").find("macros inside one another"),
            std::string::npos);
  EXPECT_NE(
      ErrorOf(
          "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}")
          .find("bytes"),
      std::string::npos);
  EXPECT_NE(ErrorOf("{{ 'abc' * 99999999999 }}").find("bytes"), std::string::npos);
  EXPECT_NE(ErrorOf("{{ [1] * 99999999999 }}").find("items"), std::string::npos);
  EXPECT_NE(
      ErrorOf(
          "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}")
          .find("levels of lists"),
      std::string::npos);
  EXPECT_NE(
      ErrorOf(
          "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
          "{{ ns.x | tojson }}")
          .find("steps"),
      std::string::npos);
  RenderOptions small;
  small.max_output_bytes = 10;
  EXPECT_NE(ErrorOf("0123456789a", {}, small).find("more than 10 bytes"), std::string::npos);
  const auto nested = [](int levels) {
    return "{{ " + std::string(static_cast<size_t>(levels), '(') + "1" +
           std::string(static_cast<size_t>(levels), ')') + " }}";
  };
  EXPECT_EQ(TextOf(Render(nested(40))), "1");
  EXPECT_NE(ErrorOf(nested(5000)).find("levels of nesting"), std::string::npos);
  std::string chain = "{{ 1";
  for (int i = 0; i < 5000; ++i) chain += " + 1";
  EXPECT_NE(ErrorOf(chain + " }}").find("operators in a row"), std::string::npos);
}

// Whatever a namespace holds, itself too, is gone with the run (the address sanitizer tells).
TEST(ChatTemplateTest, CyclesAreNoLeaks) {
  EXPECT_EQ(TextOf(Render("{% set ns = namespace() %}{% set ns.self = ns %}{% set ns.f = [ns] %}{{ "
                          "ns.self.self.f[0] == ns }}")),
            "True");
}

// Cut, doubled and scrambled templates: an error or a text, never a crash.
TEST(ChatTemplateTest, DamagedTemplatesAreRefusedOrRendered) {
  const std::string source = ReadWhole(SourcePath("tests/model/chat_golden/templates/tools.jinja")) +
                             ReadWhole(SourcePath("tests/model/chat_golden/templates/loops.jinja"));
  uint64_t state = 1;
  const auto random = [&](size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % below;
  };
  const std::string tokens[] = {"{{", "}}", "{%", "%}",     "(", ")",  "[", "]", "|",
                                ".",  "'",  "if", " else ", "-", "{#", "*", ","};
  int errors = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = source;
    for (size_t edits = 1 + random(4); edits > 0; --edits) {
      const size_t at = random(damaged.size());
      switch (random(3)) {
        case 0:
          damaged.erase(at, 1 + random(8));
          break;
        case 1:
          damaged.insert(at, tokens[random(std::size(tokens))]);
          break;
        default:
          damaged.insert(at, damaged.substr(random(damaged.size()), random(30)));
      }
      if (damaged.empty()) damaged.push_back(' ');
    }
    const auto rendered = Render(damaged, {{"messages", Value::OfItems({})}, {"tools", Value::OfNone()}});
    errors += !rendered.ok();
    if (!rendered.ok()) {
      ASSERT_TRUE(rendered.status().message().substr(0, 5) == "line ") << rendered.status();
    }
  }
  EXPECT_GT(errors, 500);
}

}  // namespace
}  // namespace efla::jinja
