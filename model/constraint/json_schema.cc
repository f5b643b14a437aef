#include "model/constraint/json_schema.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "model/constraint/disjoint_schemas.h"
#include "model/constraint/flat_schemas.h"
#include "model/constraint/json_text.h"
#include "model/constraint/regex.h"
#include "model/strict_json.h"

namespace efla {
namespace {

// Alternatives that are rules of their own, so that a text may have as many readings until it tells them
// apart. A matcher keeps 32 of these.
constexpr size_t kMaxRuleAlternatives = 24;
constexpr size_t kMaxShownPointer = 40;  // in rules' names
constexpr size_t kMaxExcludedName = 256;
constexpr size_t kMaxExpressions = 1 << 18;  // some 70 MB
constexpr size_t kStepsOfExpression = 8;
constexpr size_t kExpressionsOfMember = 8;        // or of an item, its value apart
constexpr size_t kExpressionsOfExcludedByte = 5;  // of a name that others must not be

// Dates of the Gregorian calendar as RFC 3339 writes them, times without leap seconds.
constexpr std::string_view kDate =
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
constexpr std::string_view kTime =
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+\\-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
constexpr std::string_view kUuid = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";
constexpr std::string_view kByte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

std::optional<std::string> FormatRegex(const std::string& format) {
  if (format == "date") return std::string(kDate);
  if (format == "time") return std::string(kTime);
  if (format == "date-time") return std::string(kDate) + "T" + std::string(kTime);
  if (format == "uuid") return std::string(kUuid);
  if (format == "ipv4") return absl::StrFormat("%s\\.%s\\.%s\\.%s", kByte, kByte, kByte, kByte);
  return std::nullopt;
}

class SchemaCompiler {
 public:
  SchemaCompiler(const Json& root, WorkCheck& work) : schemas_(root, work), json_(grammar_) {
    grammar_.max_depth = kMaxJsonDepth;
  }

  absl::StatusOr<Grammar> Compile() {
    grammar_.root = RuleAt("", schemas_.root());
    // References wait here, so that a chain of them does not become a chain of calls.
    while (schemas_.ok() && !waiting_.empty()) {
      const Waiting next = waiting_.back();
      waiting_.pop_back();
      ExpressionPtr body = Value(*next.schema, next.pointer);
      grammar_.rules[static_cast<size_t>(next.rule)].body = std::move(body);
    }
    if (!schemas_.ok()) return schemas_.status();
    return std::move(grammar_);
  }

 private:
  struct Waiting {
    int rule;
    const Json* schema;
    std::string pointer;
  };

  ExpressionPtr Fail(const std::string& pointer, std::string_view what) {
    schemas_.Fail(pointer, what);
    return Nothing();
  }

  static std::string RuleName(const std::string& pointer) {
    return absl::StrFormat("schema \"#%s\"", Printable(pointer, kMaxShownPointer));
  }

  int RuleAt(const std::string& pointer, const Json& schema) {
    const auto [rule, is_new] = rules_.try_emplace(pointer, 0);
    if (is_new) {
      rule->second = grammar_.AddRule(RuleName(pointer));
      waiting_.push_back({rule->second, &schema, pointer});
    }
    return rule->second;
  }

  // The texts of the values that meet `schema`.
  ExpressionPtr Value(const Json& schema, const std::string& pointer) {
    if (!schemas_.ok()) return Nothing();
    if (!Enter(pointer)) return Nothing();
    ExpressionPtr value = NestedValue(schema, pointer);
    --depth_;
    return value;
  }

  bool Enter(const std::string& pointer) {
    if (depth_ < kMaxSchemaDepth) return ++depth_, true;
    Fail(pointer,
         absl::StrFormat("schemas are nested deeper than %d; one that contains itself must do so by a "
                         "$ref with nothing beside it",
                         kMaxSchemaDepth));
    return false;
  }

  // Before or after so many expressions are made; false after an error.
  bool CountExpressions(size_t num_expressions, const std::string& pointer) {
    num_expressions_ += num_expressions;
    if (num_expressions_ > kMaxExpressions)
      Fail(pointer, absl::StrFormat("is too large: with it, the schemas take more than %d expressions",
                                    kMaxExpressions));
    schemas_.AskCheck(num_expressions * kStepsOfExpression);
    return schemas_.ok();
  }
  ExpressionPtr Counted(ExpressionPtr value, const std::string& pointer) {
    CountExpressions(NumExpressions(*value), pointer);
    return value;
  }

  ExpressionPtr NestedValue(const Json& schema, const std::string& pointer) {
    // A reference that stands alone is a call: schemas may contain themselves.
    if (const Json* reference = OnlyKeyword(schema, "$ref")) {
      std::string target;
      const Json* referred = schemas_.Resolve(*reference, pointer, target);
      return referred == nullptr ? Nothing() : RuleReference(RuleAt(target, *referred));
    }
    const Json* all = OnlyKeyword(schema, "allOf");
    if (all != nullptr && all->is_array() && all->size() == 1)
      return Value(all->front(), pointer + "/allOf/0");
    return FlatValue(schemas_.Flatten(schema, pointer, 0), pointer);
  }

  ExpressionPtr FlatValue(const Json& schema, const std::string& pointer) {
    const bool inlines = std::exchange(inlines_next_, false);
    if (!schemas_.ok() || schema.is_boolean()) return Nothing();
    for (const char* keyword : {"anyOf", "oneOf"}) {
      if (!schema.contains(keyword)) continue;
      if (!Enter(pointer)) return Nothing();
      ExpressionPtr value = AnyOf(schema, keyword, pointer);
      --depth_;
      return value;
    }
    if (schema.contains("enum") || schema.contains("const")) return Counted(Listed(schema, pointer), pointer);
    std::vector<std::string> types;
    if (schema.contains("type")) {
      types = schemas_.Types(schema["type"], pointer);
    } else {
      types = TypesSpokenOf(schema);
      if (types.empty()) return json_.Value();
    }
    CheckShapes(schema, pointer);
    std::vector<ExpressionPtr> ways;
    for (const std::string& type : types) {
      if (schemas_.ok()) ways.push_back(OfType(type, schema, pointer, inlines));
    }
    return Alternate(std::move(ways));
  }

  // Keywords of types that are not asked for are read too, so that a mistake in them is an error.
  void CheckShapes(const Json& schema, const std::string& pointer) {
    for (const char* name : {"minItems", "maxItems", "minLength", "maxLength"}) Count(schema, name, pointer);
    for (const char* name : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      if (schema.contains(name) && !schema[name].is_number())
        Fail(pointer + "/" + name, "a number is needed");
    }
    for (const char* name : {"pattern", "format"}) {
      if (schema.contains(name) && !schema[name].is_string())
        Fail(pointer + "/" + name, "a string is needed");
    }
    if (schema.contains("properties") && !schema["properties"].is_object())
      Fail(pointer + "/properties", "an object is needed");
    if (schema.contains("prefixItems") && !schema["prefixItems"].is_array()) {
      Fail(pointer + "/prefixItems", "a list of schemas is needed");
    }
    if (schema.contains("items") && schema["items"].is_array())
      Fail(pointer + "/items", "a list is not supported; write prefixItems");
    if (schema.contains("required")) {
      const Json& required = schema["required"];
      const bool names =
          required.is_array() &&
          std::all_of(required.begin(), required.end(), [](const Json& name) { return name.is_string(); });
      if (!names) Fail(pointer + "/required", "a list of names is needed");
    }
  }

  // `inlines`: no rule of its own for an object or array.
  ExpressionPtr OfType(const std::string& type, const Json& schema, const std::string& pointer,
                       bool inlines) {
    if (type == "object") return Object(schema, pointer, inlines);
    if (type == "array") return Array(schema, pointer, inlines);
    if (type == "string") return Counted(String(schema, pointer), pointer);
    if (type == "number") return Counted(Number(schema, pointer), pointer);
    if (type == "integer") return Counted(Integer(schema, pointer), pointer);
    if (type == "null") return Literal("null");
    return Alternate({Literal("true"), Literal("false")});
  }

  ExpressionPtr AnyOf(const Json& schema, const std::string& keyword, const std::string& pointer) {
    const std::string at = pointer + "/" + keyword;
    const Json& listed = schema[keyword];
    if (!listed.is_array() || listed.empty()) return Fail(at, "a list of schemas is needed");
    Json beside = schema;
    beside.erase(keyword);
    const auto branch_at = [&](size_t i) { return absl::StrFormat("%s/%d", at, i); };
    std::vector<Json> branches;
    if (!beside.empty() || keyword == "oneOf") {
      for (size_t i = 0; i < listed.size() && schemas_.ok(); ++i) {
        branches.push_back(
            schemas_.Merge(beside, schemas_.Flatten(listed[i], branch_at(i), 0), branch_at(i)));
      }
      if (keyword == "oneOf") CheckDisjoint(schemas_, branches, at);
    }
    const bool inlines = listed.size() > kMaxRuleAlternatives;
    std::vector<ExpressionPtr> ways;
    for (size_t i = 0; i < listed.size() && schemas_.ok(); ++i) {
      inlines_next_ = inlines;
      ways.push_back(!beside.empty() ? FlatValue(branches[i], branch_at(i))
                     : inlines       ? InlineValue(listed[i], branch_at(i))
                                     : Value(listed[i], branch_at(i)));
      inlines_next_ = false;
    }
    return inlines ? NewRule(at, Alternate(std::move(ways))) : Alternate(std::move(ways));
  }

  // Value, with what a reference names in its place, where that is not inside of another one that is.
  ExpressionPtr InlineValue(const Json& schema, const std::string& pointer) {
    const Json* reference = OnlyKeyword(schema, "$ref");
    if (reference == nullptr || inside_reference_) return Value(schema, pointer);
    std::string target;
    const Json* referred = schemas_.Resolve(*reference, pointer, target);
    if (referred == nullptr) return Nothing();
    inside_reference_ = true;
    ExpressionPtr value = Value(*referred, target);
    inside_reference_ = false;
    return value;
  }

  // enum and const. The other keywords but `type` would have to be checked value by value.
  ExpressionPtr Listed(const Json& schema, const std::string& pointer) {
    for (const auto& [name, value] : schema.items()) {
      if (name == "enum" || name == "const" || name == "type") continue;
      return Fail(pointer + "/" + PointerToken(name), "is not supported beside enum or const");
    }
    Json values = Json::array();
    if (schema.contains("const")) values.push_back(schema["const"]);
    if (schema.contains("enum")) {
      const Json& listed = schema["enum"];
      if (!listed.is_array() || listed.empty()) return Fail(pointer + "/enum", "a list of values is needed");
      if (schema.contains("const")) {
        if (std::find(listed.begin(), listed.end(), schema["const"]) == listed.end()) values.clear();
      } else {
        values = listed;
      }
    }
    std::vector<std::string> types;
    if (schema.contains("type")) types = schemas_.Types(schema["type"], pointer);
    std::vector<ExpressionPtr> ways;
    for (const Json& value : values) {
      const bool fits =
          types.empty() || std::any_of(types.begin(), types.end(),
                                       [&](const std::string& type) { return HasType(value, type); });
      if (fits) ways.push_back(Literal(value.dump()));
    }
    return Alternate(std::move(ways));
  }

  ExpressionPtr NewRule(const std::string& pointer, ExpressionPtr body) {
    return RuleReference(grammar_.AddRule(RuleName(pointer), std::move(body)));
  }

  ExpressionPtr Object(const Json& schema, const std::string& pointer, bool inlines) {
    const bool plain = !schema.contains("properties") && !schema.contains("required") &&
                       !schema.contains("additionalProperties");
    if (plain) return json_.Object();
    std::set<std::string> required;
    for (const Json& name : schema.value("required", Json::array())) required.insert(name.get<std::string>());
    std::vector<std::string> names;
    Expression members;
    members.kind = Expression::Kind::kMembers;
    members.separator = JsonSeparator();
    members.opening = "\"";  // of a name
    const auto add = [&](const std::string& name, ExpressionPtr value, bool is_required) {
      if (!CountExpressions(kExpressionsOfMember, pointer)) return;
      names.push_back(name);
      members.parts.push_back(JsonMember(Literal(Json(name).dump().substr(1)), std::move(value)));
      members.required.push_back(is_required);
    };
    const Json properties = schema.value("properties", Json::object());
    for (const auto& [name, property] : properties.items()) {
      add(name, Value(property, pointer + "/properties/" + PointerToken(name)), required.contains(name));
    }
    // Where properties are listed, others are written only if asked for.
    const bool asked = schema.contains("additionalProperties");
    const Json additional = asked ? schema["additionalProperties"] : Json(true);
    const std::string additional_at = pointer + "/additionalProperties";
    ExpressionPtr additional_value;
    const auto value_of_additional = [&] {
      if (additional_value == nullptr) additional_value = Value(additional, additional_at);
      return additional_value;
    };
    std::set<std::string> listed(names.begin(), names.end());
    for (const Json& item : schema.value("required", Json::array())) {
      const std::string name = item.get<std::string>();
      if (listed.insert(name).second) add(name, value_of_additional(), true);
    }
    const bool open = asked ? additional != false : !schema.contains("properties");
    if (open) {
      for (const std::string& name : names) {
        if (!CountExpressions(name.size() * kExpressionsOfExcludedByte, additional_at)) return Nothing();
        if (name.size() <= kMaxExcludedName) continue;
        return Fail(additional_at,
                    absl::StrFormat("a property's name has %d bytes; beside additional ones the limit is %d",
                                    name.size(), kMaxExcludedName));
      }
      members.extra = JsonMember(NewRule(additional_at, JsonStringExcept(names)), value_of_additional());
    }
    ExpressionPtr object = JsonObjectOf(std::make_shared<const Expression>(std::move(members)));
    return inlines ? object : NewRule(pointer, std::move(object));
  }

  // A count; nullopt where it is absent, or after an error.
  std::optional<int64_t> Count(const Json& schema, const char* name, const std::string& pointer) {
    constexpr int64_t kMaxCount = 1'000'000;
    if (!schema.contains(name)) return std::nullopt;
    const Json& value = schema[name];
    const double number = value.is_number() ? value.get<double>() : -1;
    if (number < 0 || number > kMaxCount || std::trunc(number) != number) {
      Fail(pointer + "/" + name, absl::StrFormat("is %s; an integer from 0 to %d is needed",
                                                 Printable(value.dump(), 40), kMaxCount));
      return std::nullopt;
    }
    return static_cast<int64_t>(number);
  }

  ExpressionPtr Array(const Json& schema, const std::string& pointer, bool inlines) {
    const int64_t min = Count(schema, "minItems", pointer).value_or(0);
    const int64_t max = Count(schema, "maxItems", pointer).value_or(kUnbounded);
    if (max != kUnbounded && max < min) return Nothing();
    const bool has_items = schema.contains("items");
    if (!has_items && !schema.contains("prefixItems") && min == 0 && max == kUnbounded) return json_.Array();
    std::vector<ExpressionPtr> prefix;
    for (const Json& item : schema.value("prefixItems", Json::array())) {
      if (!CountExpressions(kExpressionsOfMember, pointer)) return Nothing();
      prefix.push_back(Value(item, absl::StrFormat("%s/prefixItems/%d", pointer, prefix.size())));
    }
    // After a prefix, items that no schema is given for come only where minItems asks for them.
    ExpressionPtr items;
    if (has_items) {
      items = schema["items"] == false ? nullptr : Value(schema["items"], pointer + "/items");
    } else if (prefix.empty() || min > static_cast<int64_t>(prefix.size())) {
      items = json_.Value();
    }
    ExpressionPtr array = JsonArrayOf(prefix, std::move(items), min, max);
    return inlines ? array : NewRule(pointer, std::move(array));
  }

  ExpressionPtr String(const Json& schema, const std::string& pointer) {
    const bool has_length = schema.contains("minLength") || schema.contains("maxLength");
    const bool has_pattern = schema.contains("pattern"), has_format = schema.contains("format");
    if (static_cast<int>(has_length) + static_cast<int>(has_pattern) + static_cast<int>(has_format) > 1) {
      return Fail(pointer, "pattern, format and lengths of one string are not supported together");
    }
    if (has_length) {
      const int64_t min = Count(schema, "minLength", pointer).value_or(0);
      const int64_t max = Count(schema, "maxLength", pointer).value_or(kUnbounded);
      return max != kUnbounded && max < min ? Nothing() : JsonStringOfLength(min, max);
    }
    if (has_format) {
      const std::string format = schema["format"].get<std::string>();
      const std::optional<std::string> regex = FormatRegex(format);
      if (!regex) {
        return Fail(pointer + "/format",
                    absl::StrFormat("\"%s\" is not supported; date, time, date-time, uuid and ipv4 are",
                                    Printable(format, 40)));
      }
      ExpressionPtr& text = formats_[format];
      if (text == nullptr) text = Pattern(*regex, /*whole=*/true, pointer + "/format");
      return text;
    }
    if (has_pattern)
      return Pattern(schema["pattern"].get<std::string>(), /*whole=*/false, pointer + "/pattern");
    return json_.String();
  }

  // A pattern matches anywhere unless it has anchors.
  ExpressionPtr Pattern(const std::string& regex, bool whole, const std::string& pointer) {
    const absl::StatusOr<std::vector<RegexAlternative>> alternatives = ParseRegex(regex, RegexDialect::kEcma);
    if (!alternatives.ok()) return Fail(pointer, std::string(alternatives.status().message()));
    const ExpressionPtr anything = Repeat(SetOf(CodePointSet::All()), 0, kUnbounded);
    std::vector<ExpressionPtr> ways;
    for (const RegexAlternative& alternative : *alternatives) {
      std::vector<ExpressionPtr> parts;
      if (!whole && !alternative.at_begin) parts.push_back(anything);
      parts.push_back(alternative.body);
      if (!whole && !alternative.at_end) parts.push_back(anything);
      ways.push_back(Concat(std::move(parts)));
    }
    return JsonStringOf(Alternate(std::move(ways)));
  }

  // A bound as an integer, rounded inwards for integers; nullopt where it is absent, or after an error.
  struct Bound {
    int64_t value = 0;
    bool whole = true;  // it was an integer
  };
  std::optional<Bound> ReadBound(const Json& schema, const char* name, int64_t limit, bool is_lower,
                                 const std::string& pointer) {
    if (!schema.contains(name)) return std::nullopt;
    const Json& value = schema[name];
    const double number = value.is_number() ? value.get<double>() : NAN;
    if (!(std::abs(number) <= static_cast<double>(limit))) {
      Fail(pointer + "/" + name, absl::StrFormat("is %s; a number from %d to %d is needed",
                                                 Printable(value.dump(), 40), -limit, limit));
      return std::nullopt;
    }
    if (value.is_number_integer()) return Bound{value.get<int64_t>(), true};
    const double rounded = is_lower ? std::ceil(number) : std::floor(number);
    return Bound{static_cast<int64_t>(rounded), rounded == number};
  }

  ExpressionPtr Integer(const Json& schema, const std::string& pointer) {
    constexpr int64_t kLimit = 100'000'000'000'000'000;  // 17 digits, so that one more is an integer still
    std::optional<int64_t> min, max;
    const auto raise = [&](const std::optional<Bound>& bound, bool excluded) {
      if (bound) min = std::max(min.value_or(INT64_MIN), bound->value + (excluded && bound->whole ? 1 : 0));
    };
    const auto lower = [&](const std::optional<Bound>& bound, bool excluded) {
      if (bound) max = std::min(max.value_or(INT64_MAX), bound->value - (excluded && bound->whole ? 1 : 0));
    };
    raise(ReadBound(schema, "minimum", kLimit, true, pointer), false);
    raise(ReadBound(schema, "exclusiveMinimum", kLimit, true, pointer), true);
    lower(ReadBound(schema, "maximum", kLimit, false, pointer), false);
    lower(ReadBound(schema, "exclusiveMaximum", kLimit, false, pointer), true);
    return min || max ? JsonIntegerBetween(min, max) : json_.Integer();
  }

  ExpressionPtr Number(const Json& schema, const std::string& pointer) {
    NumberBounds bounds;
    const auto read = [&](const char* name, bool is_lower) {
      const std::optional<Bound> bound = ReadBound(schema, name, kMaxNumberBound, is_lower, pointer);
      if (bound && !bound->whole)
        Fail(pointer + "/" + name, "bounds of numbers that are not integers themselves are not supported");
      return bound ? std::optional<int64_t>(bound->value) : std::nullopt;
    };
    bounds.min = read("minimum", true);
    bounds.max = read("maximum", false);
    if (const auto above = read("exclusiveMinimum", true); above && (!bounds.min || *above >= *bounds.min)) {
      bounds.min = above;
      bounds.min_excluded = true;
    }
    if (const auto below = read("exclusiveMaximum", false); below && (!bounds.max || *below <= *bounds.max)) {
      bounds.max = below;
      bounds.max_excluded = true;
    }
    return bounds.min || bounds.max ? JsonNumberBetween(bounds) : json_.Number();
  }

  FlatSchemas schemas_;
  Grammar grammar_;
  JsonRules json_;
  std::map<std::string, int> rules_;  // of schemas that are referred to, by pointer
  std::vector<Waiting> waiting_;
  bool inlines_next_ = false;      // for the next FlatValue
  bool inside_reference_ = false;  // of InlineValue
  int depth_ = 0;                  // of Value() and AnyOf() in each other
  size_t num_expressions_ = 0;
  std::map<std::string, ExpressionPtr> formats_;
};

}  // namespace

absl::StatusOr<Grammar> ParseJsonSchema(const std::string& text, WorkCheck& work) {
  if (const auto checked = ParseJsonObject(text, "the schema"); !checked.ok()) return checked.status();
  const Json schema = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return SchemaCompiler(schema, work).Compile();
}

Grammar AnyJsonObject() {
  Grammar grammar;
  grammar.max_depth = kMaxJsonDepth;
  const ExpressionPtr object = JsonRules(grammar).Object();
  grammar.root = object->rule;
  return grammar;
}

}  // namespace efla
