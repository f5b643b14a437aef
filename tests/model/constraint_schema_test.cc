#include <gtest/gtest.h>
#include <re2/re2.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/model/constraint_rig.h"

namespace efla {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr auto kSchema = ConstraintSpec::Kind::kJsonSchema;

const ConstraintRig& Rig() {
  static const ConstraintRig rig;
  return rig;
}

// An independent reading of the keywords that are supported.
class Validator {
 public:
  explicit Validator(const json& root) : root_(root) {}

  bool Meets(const json& value, const json& schema) const {
    if (schema.is_boolean()) return schema.get<bool>();
    for (const auto& [keyword, argument] : schema.items()) {
      if (!MeetsKeyword(value, keyword, argument, schema)) return false;
    }
    return true;
  }

 private:
  static bool IsType(const json& value, const std::string& type) {
    if (type == "integer") return value.is_number() && std::floor(value.get<double>()) == value.get<double>();
    if (type == "number") return value.is_number();
    return type == value.type_name();
  }
  static size_t Length(const std::string& text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
  }

  bool MeetsKeyword(const json& value, const std::string& keyword, const json& argument,
                    const json& schema) const {
    if (keyword == "type") {
      const json types = argument.is_array() ? argument : json::array({argument});
      return std::any_of(types.begin(), types.end(), [&](const json& type) { return IsType(value, type); });
    }
    if (keyword == "enum") return std::find(argument.begin(), argument.end(), value) != argument.end();
    if (keyword == "const") return value == argument;
    if (keyword == "anyOf" || keyword == "oneOf" || keyword == "allOf") {
      const auto met =
          std::count_if(argument.begin(), argument.end(), [&](const json& s) { return Meets(value, s); });
      return keyword == "anyOf"   ? met > 0
             : keyword == "oneOf" ? met == 1
                                  : met == static_cast<ptrdiff_t>(argument.size());
    }
    if (keyword == "$ref")
      return Meets(value, root_.at(json::json_pointer(argument.get<std::string>().substr(1))));
    if (value.is_number()) {
      const double number = value.get<double>();
      if (keyword == "minimum") return number >= argument.get<double>();
      if (keyword == "maximum") return number <= argument.get<double>();
      if (keyword == "exclusiveMinimum") return number > argument.get<double>();
      if (keyword == "exclusiveMaximum") return number < argument.get<double>();
    }
    if (value.is_string()) {
      const std::string text = value.get<std::string>();
      if (keyword == "minLength") return Length(text) >= argument.get<size_t>();
      if (keyword == "maxLength") return Length(text) <= argument.get<size_t>();
      if (keyword == "pattern") return re2::RE2::PartialMatch(text, argument.get<std::string>());
      if (keyword == "format") return MeetsFormat(text, argument);
    }
    if (value.is_array()) {
      if (keyword == "minItems") return value.size() >= argument.get<size_t>();
      if (keyword == "maxItems") return value.size() <= argument.get<size_t>();
      const size_t prefix = schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
      for (size_t i = 0; i < value.size(); ++i) {
        if (keyword == "prefixItems" && i < prefix && !Meets(value[i], argument[i])) return false;
        if (keyword == "items" && i >= prefix && !Meets(value[i], argument)) return false;
      }
    }
    if (value.is_object()) {
      if (keyword == "required") {
        return std::all_of(argument.begin(), argument.end(),
                           [&](const json& name) { return value.contains(name.get<std::string>()); });
      }
      for (const auto& [name, member] : value.items()) {
        const bool listed = schema.contains("properties") && schema["properties"].contains(name);
        if (keyword == "properties" && listed && !Meets(member, argument[name])) return false;
        if (keyword == "additionalProperties" && !listed && !Meets(member, argument)) return false;
      }
    }
    return true;
  }

  static bool MeetsFormat(const std::string& text, const std::string& format) {
    if (format == "uuid") return re2::RE2::FullMatch(text, "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}");
    int year = 0, month = 0, day = 0;
    if (format != "date") return false;
    if (!re2::RE2::FullMatch(text, "(\\d{4})-(\\d\\d)-(\\d\\d)", &year, &month, &day)) return false;
    const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    const int days[] = {31, leap ? 29 : 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    return month >= 1 && month <= 12 && day >= 1 && day <= days[month - 1];
  }

  const json& root_;
};

// Every finished walk parses, and meets the schema.
int CheckWalks(const std::string& schema, std::mt19937& random, int walks) {
  const auto constraint = Rig().Make(kSchema, schema);
  if (constraint == nullptr) return 0;
  const json parsed_schema = json::parse(schema);
  const Validator validator(parsed_schema);
  int finished = 0;
  for (int i = 0; i < walks; ++i) {
    const WalkResult walk = RandomWalk(Rig(), *constraint, random, 10 + random() % 20, 400);
    if (!walk.finished) continue;
    ++finished;
    const json value = json::parse(walk.text, nullptr, false);
    EXPECT_FALSE(value.is_discarded()) << schema << "\n" << walk.text;
    if (!value.is_discarded()) {
      EXPECT_TRUE(validator.Meets(value, parsed_schema)) << schema << "\n" << walk.text;
    }
  }
  return finished;
}

TEST(ConstraintSchemaTest, AcceptsWhatItDescribes) {
  struct Case {
    std::string schema;
    std::vector<std::string> accepted, refused;
  };
  const Case cases[] = {
      {R"({"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}},"required":["a"]})",
       {R"({"b":1,"a":"x"})", R"({ "a" : "x" })", "{\n  \"a\": \"é\\u00e9\"\n}"},
       {R"({"b":1})", "{}", R"({"a":"x","b":1})", R"({"a":"x","c":1})", R"({"b":1.5,"a":""})", R"( {"a":""})",
        R"({"a":""} )", R"({"a":"x",})", R"({,"a":"x"})", "{\"a\":\"\n\"}",
        "{\"a\":" + std::string(9, ' ') + "\"\"}"}},
      {R"({"type":"object","properties":{"a":{}, "ab":{}},"additionalProperties":{"type":"null"}})",
       {"{}", R"({"a":[1,{"x":[]}],"ab":2,"abc":null,"":null,"b":null})", R"({"x":null})"},
       {R"({"abc":1})", R"({"x":null,"a":null})", R"({"\u0061":null})"}},
      {R"({"type":"object","required":["x"]})", {R"({"x":1})", R"({"x":{},"y":2})"}, {"{}", R"({"y":1})"}},
      {R"({"type":"object","required":["x"],"properties":{},"additionalProperties":{"type":"boolean"}})",
       {R"({"x":true})", R"({"x":true,"z":false})"},
       {R"({"x":1})"}},
      {R"({"type":["integer","null"]})",
       {"0", "-7", "null", "123456789012345678"},
       {"01", "-0", "1.0", "1234567890123456789", "1e3", ""}},
      {R"({"type":"integer","minimum":-5,"maximum":12})",
       {"-5", "0", "9", "12"},
       {"-6", "13", "20", "-0", "100"}},
      {R"({"type":"integer","exclusiveMinimum":99,"maximum":1000.5})",
       {"100", "999", "1000"},
       {"99", "1001", "10"}},
      {R"({"type":"integer","minimum":-1234,"maximum":-7})",
       {"-7", "-1234", "-99"},
       {"-6", "-1235", "7", "-07"}},
      {R"({"type":"number"})",
       {"0", "-0.5", "1e9", "1.25E-3", "-0"},
       {".5", "1.", "+1", "01", "1e100", "NaN"}},
      {R"({"type":"number","minimum":0,"maximum":1})",
       {"0", "1", "0.5", "1.000", "0.0"},
       {"-0.5", "1.1", "-0", "1e0"}},
      {R"({"type":"number","exclusiveMinimum":-2,"exclusiveMaximum":3})",
       {"-1.999", "2.99", "0", "-0.5"},
       {"-2", "3", "-2.0", "3.0", "-2.5"}},
      {R"({"type":"number","minimum":7,"maximum":7})", {"7", "7.0"}, {"7.1", "6"}},
      {R"({"type":"number","exclusiveMinimum":0})", {"0.1", "1", "0.000001"}, {"0", "0.0", "-1"}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {R"("ab")", R"("é日🙂")", R"("a\n")"},
       {R"("a")", R"("abcd")", R"("\u0061b")"}},
      {R"({"type":"string","pattern":"^a[^b]$"})",
       {R"("ac")", R"("a\"")", R"("a\\")", R"("a\n")", R"("a\u0001")"},
       {R"("ab")", R"("a")", "\"a\"\""}},
      {R"({"pattern":"b"})", {R"("b")", R"("abc")", R"("\n\"b")"}, {R"("ac")", "1"}},
      {R"({"pattern":"^a|b$"})", {R"("ax")", R"("xb")"}, {R"("xa")", R"("bx")"}},
      {R"({"format":"date"})",
       {R"("2024-02-29")", R"("2000-02-29")", R"("2023-12-31")"},
       {R"("2023-02-29")", R"("1900-02-29")", R"("2024-04-31")"}},
      {R"({"format":"date-time"})",
       {R"("2024-01-01T23:59:59.5Z")", R"("2024-01-01T00:00:00+02:00")"},
       {R"("2024-01-01")", R"("2024-01-01T24:00:00Z")"}},
      {R"({"format":"uuid"})",
       {R"("123e4567-e89b-12d3-a456-426614174000")"},
       {R"("123e4567e89b12d3a456426614174000")"}},
      {R"({"format":"ipv4"})", {R"("255.0.10.199")"}, {R"("256.0.0.1")", R"("1.2.3")", R"("01.2.3.4")"}},
      {R"({"enum":["a",1,null,{"k":[1,2]},"\"\n"]})",
       {R"("a")", "1", "null", R"({"k":[1,2]})", R"("\"\n")"},
       {"2", R"("b")", "a"}},
      {R"({"enum":["a",1,2.5],"type":"number"})", {"1", "2.5"}, {R"("a")"}},
      {R"({"const":true})", {"true"}, {"false"}},
      {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":3})",
       {"[true]", "[ true , false,true ]"},
       {"[]", "[true,]", "[1]", "[true,true,true,true]"}},
      {R"({"type":"array","maxItems":0})", {"[]", "[ ]"}, {"[1]"}},
      {R"({"type":"array"})", {"[]", R"([1,"a",[{}]])"}, {"[1,]", "{}"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"items":{"const":3}})",
       {"[]", "[1]", "[1,2]", "[1,2,3,3]"},
       {"[2]", "[1,3]"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"minItems":2})",
       {"[1,2]"},
       {"[1]", "[1,2,3]"}},
      {R"({"type":"array","prefixItems":[{"const":1}],"minItems":3,"maxItems":3})",
       {"[1,2,{}]"},
       {"[1]", "[1,2]", "[1,2,3,4]"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"items":false,"minItems":1})",
       {"[1]", "[1,2]"},
       {"[]", "[1,2,3]"}},
      {R"({"anyOf":[{"type":"integer"},{"type":"string","maxLength":1}]})",
       {"1", R"("a")", R"("")"},
       {R"("ab")", "true"}},
      {R"({"type":"object","properties":{"a":{"type":"integer"}},"anyOf":[{"required":["a"]},{"properties":{"b":{"const":1}},"required":["b"]}]})",
       {R"({"a":1})", R"({"b":1})", R"({"a":1,"b":1})"},
       {"{}", R"({"a":"x"})"}},
      {R"({"oneOf":[{"type":"object","properties":{"t":{"const":"x"},"v":{"type":"integer"}},"required":["t","v"]},
                    {"type":"object","properties":{"t":{"const":"y"}},"required":["t"]}]})",
       {R"({"t":"x","v":3})", R"({"t":"y"})"},
       {R"({"t":"x"})", R"({"t":"y","v":3})"}},
      {R"({"allOf":[{"type":["integer","string"],"minimum":3},{"type":"number","maximum":5}]})",
       {"3", "5"},
       {"2", "6", R"("a")", "4.5"}},
      {R"({"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},{"properties":{"a":{"minimum":10},"b":{"const":0}}}],"type":"object","additionalProperties":true})",
       {R"({"a":10,"b":0})", R"({"a":12,"c":1})"},
       {R"({"a":9})", R"({"b":0})"}},
      {R"({"$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["v","next"]}},"$ref":"#/$defs/node"})",
       {R"({"v":1,"next":{"v":2,"next":null}})"},
       {R"({"v":1,"next":{"v":2}})"}},
      {R"({"$defs":{"node":{"type":"object","properties":{"next":{"oneOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["next"]}},"allOf":[{"$ref":"#/$defs/node"}],"description":"d"})",
       {R"({"next":{"next":null}})"},
       {"{}"}},
      {R"({"type":"array","items":{"$ref":"#"}})", {"[]", "[[],[[]]]"}, {"[1]"}},
      {R"({"definitions":{"a/b~c":{"const":1}},"$ref":"#/definitions/a~1b~0c"})", {"1"}, {"2"}},
      {R"({"title":"t","description":"d","default":1,"examples":[2],"$schema":"https://json-schema.org/draft/2020-12/schema","$comment":"c","type":"null"})",
       {"null"},
       {"1"}},
      {R"({})", {"1", R"("x")", "[]", R"({"a":null})", "false"}, {"", "tru"}},
      {R"({"type":"object","properties":{"no":false,"yes":{"type":"null"}}})",
       {"{}", R"({"yes":null})"},
       {R"({"no":1})"}},
  };
  for (const Case& c : cases) {
    const auto constraint = Rig().Make(kSchema, c.schema);
    ASSERT_NE(constraint, nullptr);
    for (const std::string& text : c.accepted)
      EXPECT_TRUE(Rig().Accepts(*constraint, text)) << c.schema << ": " << text;
    for (const std::string& text : c.refused)
      EXPECT_FALSE(Rig().Accepts(*constraint, text)) << c.schema << ": " << text;
  }
}

TEST(ConstraintSchemaTest, RefusesWithThePlace) {
  struct Case {
    std::string schema, error;
  };
  const Case cases[] = {
      {"", "is empty"},
      {"{", "the schema: not JSON at line 1, column 2: syntax error"},
      {"{\"type\":\n 1e999}", "the schema: not JSON at byte 15: number overflow"},
      {"[]", "the schema: holds a JSON array; an object is needed"},
      {R"({"type":"object","type":"array"})", "the schema: the key \"type\" is there twice"},
      {R"({"not":{}})", "/not: this keyword is not supported"},
      {R"({"properties":{"a":{"if":{}}}})", "/properties/a/if: this keyword is not supported"},
      {R"({"properties":{"a/b":{"items":{"multipleOf":3}}}})",
       "/properties/a~1b/items/multipleOf: this keyword is not supported"},
      {R"({"patternProperties":{}})", "/patternProperties: this keyword is not supported"},
      {R"({"uniqueItems":true})", "/uniqueItems: this keyword is not supported"},
      {R"({"type":"strin"})",
       "/type: \"strin\" is no type; types are object, array, string, number, integer, boolean and null"},
      {R"({"items":[{}]})", "/items: a list is not supported; write prefixItems"},
      {R"({"properties":{"a":3}})", "/properties/a: a schema is an object or a boolean, not number"},
      {R"({"required":"a"})", "/required: a list of names is needed"},
      {R"({"minLength":-1})", "/minLength: is -1; an integer from 0 to 1000000 is needed"},
      {R"({"minLength":1,"pattern":"a"})",
       "at the root: pattern, format and lengths of one string are not supported together"},
      {R"x({"pattern":"(?=a)"})x", "/pattern: at byte 0 (\"(?=a)\"): look-ahead is not supported"},
      {R"({"format":"email"})",
       "/format: \"email\" is not supported; date, time, date-time, uuid and ipv4 are"},
      {R"({"type":"number","minimum":0.5})",
       "/minimum: bounds of numbers that are not integers themselves are not supported"},
      {R"({"type":"number","maximum":1e12})",
       "/maximum: is 1000000000000.0; a number from -999999999 to 999999999 is needed"},
      {R"({"enum":[]})", "/enum: a list of values is needed"},
      {R"({"enum":[1],"minimum":0})", "/minimum: is not supported beside enum or const"},
      {R"({"$ref":"other.json"})", "/$ref: \"other.json\" is not in this schema; references begin with #/"},
      {R"({"$ref":"#/$defs/x"})", "/$ref: \"#/$defs/x\" names nothing"},
      {R"({"items":{"$ref":3}})", "/items/$ref: a string is needed"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})",
       "/oneOf: 0 and 1 are not known to exclude each other (by type, const, enum or a required property's); "
       "anyOf would do"},
      {R"({"anyOf":[{"type":"integer"},{"not":{}}]})", "/anyOf/1/not: this keyword is not supported"},
      {R"({"allOf":[{"pattern":"a"},{"pattern":"b"}]})",
       "/allOf/1/pattern: cannot be merged with what it stands beside"},
      {R"({"type":"integer","minimum":3,"maximum":2})",
       "cannot be met: no text of this vocabulary's characters is what it asks for"},
      {R"({"type":"object","properties":{"a":false},"required":["a"]})",
       "cannot be met: no text of this vocabulary's characters is what it asks for"},
      {R"({"allOf":[{"type":"string"},{"type":"null"}]})",
       "cannot be met: no text of this vocabulary's characters is what it asks for"},
      {R"({"$defs":{"n":{"type":"array","items":{"$ref":"#/$defs/n"},"minItems":1}},"$ref":"#/$defs/n"})",
       "cannot be met: no text of this vocabulary's characters is what it asks for"},
      {R"({"$ref":"#"})", "left recursion: schema \"#\" -> schema \"#\" begins with itself"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(Rig().Error(kSchema, c.schema).substr(0, c.error.size()), c.error) << c.schema;
  }
}

// Every sequence of the keys a, b, c and x against every choice of required ones.
TEST(ConstraintSchemaTest, MembersComeInOrderOnceAndAreThereWhereRequired) {
  const std::string keys = "abcx";
  for (int required = 0; required < 8; ++required) {
    for (const bool open : {false, true}) {
      json schema = {{"type", "object"}, {"required", json::array()}, {"additionalProperties", false}};
      for (int i = 0; i < 3; ++i) {
        const std::string key(1, keys[static_cast<size_t>(i)]);
        schema["properties"][key] = {{"type", "null"}};
        if (required >> i & 1) schema["required"].push_back(key);
      }
      if (open) schema["additionalProperties"] = {{"type", "null"}};
      const auto constraint = Rig().Make(kSchema, schema.dump());
      ASSERT_NE(constraint, nullptr);
      std::vector<std::string> sequences = {""};
      for (size_t at = 0; at < sequences.size(); ++at) {
        const std::string sequence = sequences[at];
        std::string text = "{";
        int found = 0;
        bool meets = true;
        for (size_t i = 0; i < sequence.size(); ++i) {
          text += std::string(i > 0 ? ", " : "") + "\"" + sequence[i] + "\": null";
          const char before = i > 0 ? sequence[i - 1] : '\0';
          meets &= sequence[i] == 'x' ? open : before < sequence[i];
          if (sequence[i] != 'x') found |= 1 << (sequence[i] - 'a');
        }
        meets &= (found & required) == required;
        EXPECT_EQ(Rig().Accepts(*constraint, text + "}"), meets) << schema << " " << text;
        if (sequence.size() == 5) continue;
        for (char key : keys) sequences.push_back(sequence + key);
      }
    }
  }
}

std::string ManyProperties(int n, const std::string& schema) {
  std::string text = R"({"type":"object","properties":{)";
  for (int i = 0; i < n; ++i) text += absl::StrFormat(R"(%s"p%d":%s)", i > 0 ? "," : "", i, schema);
  return text + "}}";
}

TEST(ConstraintSchemaTest, HundredsOfOptionalPropertiesCompile) {
  const auto constraint = Rig().Make(kSchema, ManyProperties(500, R"({"type":"string"})"));
  ASSERT_NE(constraint, nullptr);
  EXPECT_TRUE(Rig().Accepts(*constraint, R"({"p0": "", "p250": "a", "p499": "b"})"));
  EXPECT_FALSE(Rig().Accepts(*constraint, R"({"p250": "a", "p0": ""})"));
  EXPECT_TRUE(Rig().Error(kSchema, ManyProperties(3000, "{}")).starts_with("is too large"));
}

TEST(ConstraintSchemaTest, HundredsOfBranchesAreToldApartByOneProperty) {
  const auto one_of = [](int n, const char* kind) {
    std::string text = R"({"oneOf":[)";
    for (int i = 0; i < n; ++i) {
      text += absl::StrFormat(R"(%s{"type":"object","properties":{"v":{"type":"string"},"kind":)",
                              i > 0 ? "," : "");
      text += absl::StrFormat(absl::ParsedFormat<'d'>(kind), i) + R"(},"required":["v","kind"]})";
    }
    return text + "]}";
  };
  for (const char* kind : {R"({"const":"k%d"})", R"({"enum":["k%d"]})", R"({"const":%d})"}) {
    EXPECT_EQ(Rig().Error(kSchema, one_of(300, kind)), "OK") << kind;
  }
  const auto constraint = Rig().Make(kSchema, one_of(300, R"({"const":"k%d"})"));
  ASSERT_NE(constraint, nullptr);
  for (const char* kind : {"k0", "k63", "k299"}) {
    EXPECT_TRUE(Rig().Accepts(*constraint, absl::StrFormat(R"({"v":"","kind":"%s"})", kind))) << kind;
  }
  EXPECT_FALSE(Rig().Accepts(*constraint, R"({"v":"","kind":"k300"})"));
  // The same by references, whose schemas may contain the whole.
  std::string referred = R"({"$defs":{)", references = R"(},"oneOf":[)";
  for (int i = 0; i < 100; ++i) {
    referred += absl::StrFormat(
        R"(%s"d%d":{"type":"object","properties":{"in":{"$ref":"#"},"kind":{"const":%d}},"required":["kind"]})",
        i > 0 ? "," : "", i, i);
    references += absl::StrFormat(R"(%s{"$ref":"#/$defs/d%d"})", i > 0 ? "," : "", i);
  }
  const auto recursive = Rig().Make(kSchema, referred + references + "]}");
  ASSERT_NE(recursive, nullptr);
  EXPECT_TRUE(Rig().Accepts(*recursive, R"({"in":{"in":{"kind":3},"kind":99},"kind":98})"));
  EXPECT_FALSE(Rig().Accepts(*recursive, R"({"in":{"kind":100},"kind":98})"));
  // Numbers that are written differently may be equal: these are compared in pairs.
  EXPECT_EQ(Rig().Error(kSchema, one_of(20, R"({"const":%d.5})")), "OK");
  EXPECT_EQ(
      Rig().Error(kSchema, R"({"oneOf":[{"const":1},{"const":"a"},{"enum":[2,1.0]}]})"),
      "/oneOf: 0 and 2 are not known to exclude each other (by type, const, enum or a required property's); "
      "anyOf would do");
  std::string twice = one_of(300, R"({"const":"k%d"})");
  twice.replace(twice.find("k299"), 4, "k7");
  EXPECT_EQ(Rig().Error(kSchema, twice),
            "/oneOf: 7 and 299 are not known to exclude each other (by type, const, enum or a required "
            "property's); anyOf would do");
  std::string floats = R"({"oneOf":[)";
  for (int i = 0; i < 400; ++i) floats += absl::StrFormat(R"(%s{"const":%d.5})", i > 0 ? "," : "", i);
  EXPECT_EQ(
      Rig().Error(kSchema, floats + "]}"),
      "/oneOf: more than 32768 pairs of its schemas would have to be compared; a property that all require, "
      "with a const of its own in each, tells them apart at once");
}

TEST(ConstraintSchemaTest, MessagesShowNoMoreThanTheBeginningOfAName) {
  const std::string name(9000, 'n');
  const std::string error = Rig().Error(
      kSchema, R"({"$defs":{")" + name + R"(":{"$ref":"#/$defs/)" + name +
                   R"("}},"type":"object","properties":{"a":{"$ref":"#/$defs/)" + name + R"("}}})");
  EXPECT_TRUE(error.starts_with("left recursion: schema \"#/$defs/nnn")) << error;
  EXPECT_LT(error.size(), 200u) << error;
}

TEST(ConstraintSchemaTest, WalksMeetTheSchema) {
  std::mt19937 random(41);
  const std::string schemas[] = {
      R"({"type":"object","properties":{"id":{"type":"integer","minimum":-3,"maximum":2000},"name":{"type":"string","minLength":1,"maxLength":12},
          "tags":{"type":"array","items":{"type":"string","pattern":"^[a-z]{1,3}\\d$"},"maxItems":4},"day":{"format":"date"},"uid":{"format":"uuid"},
          "ratio":{"type":"number","minimum":0,"exclusiveMaximum":1}},"required":["id","day"]})",
      R"({"$defs":{"tree":{"type":"object","properties":{"v":{"enum":["x",2,null]},"kids":{"type":"array","items":{"$ref":"#/$defs/tree"}}},"required":["v"]}},"$ref":"#/$defs/tree"})",
      R"({"type":"object","additionalProperties":{"type":["number","array"],"items":{"type":"boolean"}},"properties":{"a":{"type":"null"}}})",
      R"({"anyOf":[{"type":"array","prefixItems":[{"type":"string"},{"type":"integer","exclusiveMinimum":10}],"minItems":2},{"type":"string","maxLength":5}]})",
      R"({"type":"object"})"};
  int finished = 0;
  for (const std::string& schema : schemas) finished += CheckWalks(schema, random, 25);
  EXPECT_GT(finished, 100);
}

json RandomSchema(std::mt19937& random, int depth) {
  const auto number = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  switch (depth == 0 ? random() % 6 : random() % 10) {
    case 0:
      return {{"type", "boolean"}};
    case 1: {
      json schema = {{"type", "integer"}};
      const int low = number(-300, 300);
      if (random() % 2 == 0) schema[random() % 2 == 0 ? "minimum" : "exclusiveMinimum"] = low;
      if (random() % 2 == 0)
        schema[random() % 2 == 0 ? "maximum" : "exclusiveMaximum"] = low + 2 + number(0, 2000);
      return schema;
    }
    case 2: {
      json schema = {{"type", "number"}};
      const int low = number(-20, 20);
      if (random() % 2 == 0) schema[random() % 2 == 0 ? "minimum" : "exclusiveMinimum"] = low;
      if (random() % 2 == 0) schema[random() % 2 == 0 ? "maximum" : "exclusiveMaximum"] = low + number(1, 30);
      return schema;
    }
    case 3: {
      json schema = {{"type", "string"}};
      const int low = number(0, 4);
      if (random() % 2 == 0) schema["minLength"] = low;
      if (random() % 2 == 0) schema["maxLength"] = low + number(0, 5);
      return schema;
    }
    case 4:
      return {{"enum", {"a", "b\"", number(0, 99), nullptr, {{"k", number(0, 3)}}}}};
    case 5:
      return {{"type", "string"}, {"pattern", random() % 2 == 0 ? "^[a-f]+[0-9]{2}" : "(xy|z)$"}};
    case 6:
    case 7: {
      json schema = {{"type", "object"}, {"properties", json::object()}, {"required", json::array()}};
      for (const char* name : {"a", "ab", "b c", "é", "q\"\n"}) {
        if (random() % 2 == 0) continue;
        schema["properties"][name] = RandomSchema(random, depth - 1);
        if (random() % 2 == 0) schema["required"].push_back(name);
      }
      if (random() % 3 == 0) schema["additionalProperties"] = false;
      if (random() % 3 == 0) schema["additionalProperties"] = RandomSchema(random, 0);
      if (random() % 6 == 0 && schema.value("additionalProperties", json(true)) != false)
        schema["required"].push_back("other");
      return schema;
    }
    case 8: {
      json schema = {{"type", "array"}};
      const int low = number(0, 2);
      if (random() % 3 != 0) schema["items"] = RandomSchema(random, depth - 1);
      if (random() % 3 == 0)
        schema["prefixItems"] = {RandomSchema(random, depth - 1), RandomSchema(random, depth - 1)};
      if (random() % 2 == 0) schema["minItems"] = low;
      if (random() % 2 == 0) schema["maxItems"] = low + number(0, 3);
      return schema;
    }
    default:
      return {{random() % 3 == 0 ? "allOf" : "anyOf",
               {RandomSchema(random, depth - 1), RandomSchema(random, depth - 1)}}};
  }
}

TEST(ConstraintSchemaTest, RandomSchemas) {
  std::mt19937 random(43);
  int compiled = 0, finished = 0;
  for (int i = 0; i < 150; ++i) {
    const std::string schema = RandomSchema(random, 3).dump();
    const auto constraint = Rig().Compile(kSchema, schema);
    if (!constraint.ok()) {  // allOf of what excludes each other, or cannot be merged
      EXPECT_NE(schema.find("allOf"), std::string::npos) << schema << constraint.status();
      continue;
    }
    ++compiled;
    finished += CheckWalks(schema, random, 4);
  }
  EXPECT_GT(compiled, 120);
  EXPECT_GT(finished, 3 * compiled);
}

TEST(ConstraintJsonObjectTest, WalksAreObjects) {
  const auto constraint = Rig().Make(ConstraintSpec::Kind::kJsonObject, "");
  ASSERT_NE(constraint, nullptr);
  for (const char* text :
       {"{}", "{ }", R"({"a":{"b":[1,2.5e3,"\ud83d\ude42",null,true,[]]}})", "{\n\t\"é\" : false\r\n}"}) {
    EXPECT_TRUE(Rig().Accepts(*constraint, text)) << text;
  }
  for (const char* text : {"", "[]", "1", " {}", "{}\n", "{\"a\"}", "{\"a\":1,}", "{\"a\":01}",
                           R"({"a":"\ud83d"})", "{\"a\":\"\t\"}", "{         }"}) {
    EXPECT_FALSE(Rig().Accepts(*constraint, text)) << text;
  }
  std::mt19937 random(47);
  int finished = 0;
  for (int i = 0; i < 60; ++i) {
    const WalkResult walk = RandomWalk(Rig(), *constraint, random, 5 + random() % 40, 500);
    if (!walk.finished) continue;
    ++finished;
    const json value = json::parse(walk.text, nullptr, false);
    EXPECT_TRUE(value.is_object()) << walk.text;
  }
  EXPECT_GT(finished, 50);
  std::string deep, end;
  for (int i = 0; i < 64; ++i) {
    deep += "{\"a\":";
    end += "}";
  }
  EXPECT_TRUE(Rig().Accepts(*constraint, deep + "1" + end));
  EXPECT_FALSE(Rig().Accepts(*constraint, deep + "{\"a\":{\"a\":1}}" + end));
}

}  // namespace
}  // namespace efla
