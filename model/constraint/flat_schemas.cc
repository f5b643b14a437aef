#include "model/constraint/flat_schemas.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/strict_json.h"

namespace efla {
namespace {

constexpr int kMaxSchemas = 8192;         // visited
constexpr size_t kMaxCopied = 1 << 19;    // JSON values, while schemas are merged
constexpr size_t kTextBytesAsValue = 32;  // of strings, which are copied too
constexpr size_t kStepsOfCopy = 16;       // of a value
constexpr size_t kMaxCompared = 1 << 23;  // pairs of values

constexpr const char* kTypes[] = {"object", "array", "string", "number", "integer", "boolean", "null"};

// A keyword that asks something of values, and what type it speaks of.
struct Keyword {
  const char* name;
  const char* type;  // "": no type
};
constexpr Keyword kAssertions[] = {
    {"type", ""},
    {"enum", ""},
    {"const", ""},
    {"properties", "object"},
    {"required", "object"},
    {"additionalProperties", "object"},
    {"items", "array"},
    {"prefixItems", "array"},
    {"minItems", "array"},
    {"maxItems", "array"},
    {"minLength", "string"},
    {"maxLength", "string"},
    {"pattern", "string"},
    {"format", "string"},
    {"minimum", "number"},
    {"maximum", "number"},
    {"exclusiveMinimum", "number"},
    {"exclusiveMaximum", "number"},
    {"anyOf", ""},
    {"oneOf", ""},
    {"allOf", ""},
    {"$ref", ""},
};
constexpr const char* kAnnotations[] = {"title",   "description", "default",  "examples", "$comment",
                                        "$schema", "deprecated",  "readOnly", "writeOnly"};
constexpr const char* kDefinitions[] = {"$defs", "definitions"};

const Keyword* FindAssertion(const std::string& name) {
  const auto* found = std::find_if(std::begin(kAssertions), std::end(kAssertions),
                                   [&](const Keyword& keyword) { return keyword.name == name; });
  return found == std::end(kAssertions) ? nullptr : found;
}
template <size_t n>
bool IsOneOf(const std::string& name, const char* const (&names)[n]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Adds to a list that `one` is already, so that merging one after the other makes nothing deeper.
Json Both(const Json& one, const Json& other) {
  const bool is_list = one.is_object() && one.size() == 1 && one.contains("allOf") && one["allOf"].is_array();
  Json both = is_list ? one : Json::object({{"allOf", Json::array({one})}});
  both["allOf"].push_back(other);
  return both;
}

size_t NumValues(const Json& value) {
  if (value.is_string()) return 1 + value.get_ref<const std::string&>().size() / kTextBytesAsValue;
  size_t count = 1;
  if (value.is_object()) {
    for (const auto& [name, part] : value.items()) count += NumValues(part) + name.size() / kTextBytesAsValue;
  } else if (value.is_array()) {
    for (const Json& part : value) count += NumValues(part);
  }
  return count;
}

// An ordered object's own search is linear.
std::map<std::string, const Json*> ByName(const Json& object) {
  std::map<std::string, const Json*> by_name;
  for (const auto& [name, value] : object.items()) by_name.emplace(name, &value);
  return by_name;
}

}  // namespace

std::string PointerToken(std::string_view name) {
  std::string token;
  for (char c : name) {
    if (c == '~') {
      token += "~0";
    } else if (c == '/') {
      token += "~1";
    } else {
      token += c;
    }
  }
  return token;
}

bool HasType(const Json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "number") return value.is_number();
  return value.is_number_integer() ||
         (value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>());
}

const Json* OnlyKeyword(const Json& schema, const char* keyword) {
  if (!schema.is_object() || !schema.contains(keyword)) return nullptr;
  for (const auto& [name, value] : schema.items()) {
    if (name == keyword || IsOneOf(name, kAnnotations)) continue;
    if (IsOneOf(name, kDefinitions) && value.is_object()) continue;
    return nullptr;
  }
  return &schema[keyword];
}

std::vector<std::string> TypesSpokenOf(const Json& schema) {
  std::vector<std::string> types;
  for (const auto& [name, value] : schema.items()) {
    const char* type = FindAssertion(name)->type;
    if (*type != '\0' && std::find(types.begin(), types.end(), type) == types.end()) types.emplace_back(type);
  }
  return types;
}

void FlatSchemas::Fail(const std::string& pointer, std::string_view what) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(
      absl::StrFormat("%s: %s", pointer.empty() ? "at the root" : Printable(pointer, 200), what));
}

const Json* FlatSchemas::Resolve(const Json& reference, const std::string& pointer, std::string& target) {
  const std::string at = pointer + "/$ref";
  if (!reference.is_string()) return Fail(at, "a string is needed"), nullptr;
  const std::string text = reference.get<std::string>();
  if (text != "#" && !text.starts_with("#/")) {
    Fail(at, absl::StrFormat("\"%s\" is not in this schema; references begin with #/", Printable(text)));
    return nullptr;
  }
  target.clear();
  const Json* schema = &root_;
  for (size_t begin = 1; begin < text.size();) {
    const size_t end = std::min(text.find('/', begin + 1), text.size());
    std::string token;
    for (size_t i = begin + 1; i < end; ++i) {
      if (text[i] == '~' && i + 1 < end && (text[i + 1] == '0' || text[i + 1] == '1')) {
        token += text[++i] == '0' ? '~' : '/';
      } else if (text[i] == '%') {
        return Fail(at, "percent signs in references are not supported"), nullptr;
      } else {
        token += text[i];
      }
    }
    const bool is_index =
        !token.empty() && token.size() < 6 && token.find_first_not_of("0123456789") == std::string::npos;
    if (schema->is_object() && schema->contains(token)) {
      schema = &(*schema)[token];
    } else if (schema->is_array() && is_index && std::stoul(token) < schema->size()) {
      schema = &(*schema)[std::stoul(token)];
    } else {
      Fail(at, absl::StrFormat("\"%s\" names nothing", Printable(text)));
      return nullptr;
    }
    target += '/';
    target += PointerToken(token);
    begin = end;
  }
  return schema;
}

Json FlatSchemas::Flatten(const Json& schema, const std::string& pointer, int depth) {
  if (!status_.ok()) return false;
  if (++num_schemas_ > kMaxSchemas)
    return Fail(pointer, absl::StrFormat("more than %d schemas are visited", kMaxSchemas)), false;
  if (depth > kMaxSchemaDepth) {
    return Fail(pointer, absl::StrFormat("references and allOf are nested deeper than %d, or without end",
                                         kMaxSchemaDepth)),
           false;
  }
  if (schema.is_boolean()) return schema.get<bool>() ? Json(Json::object()) : Json(false);
  if (!schema.is_object())
    return Fail(pointer, absl::StrFormat("a schema is an object or a boolean, not %s", schema.type_name())),
           false;
  Json said = Json::object();
  for (const auto& [name, value] : schema.items()) {
    if (IsOneOf(name, kAnnotations)) continue;
    if (IsOneOf(name, kDefinitions)) {
      if (!value.is_object()) return Fail(pointer + "/" + name, "an object is needed"), false;
      continue;
    }
    if (name == "$id" && pointer.empty() && value.is_string()) continue;
    if (name == "uniqueItems" && value == false) continue;
    if (FindAssertion(name) == nullptr) {
      return Fail(pointer + "/" + PointerToken(name), "this keyword is not supported"), false;
    }
    if (name == "$ref" || name == "allOf") continue;
    if (!MayCopy(value, pointer)) return false;
    said[name] = value;
  }
  Json merged = std::move(said);
  if (const auto all = schema.find("allOf"); all != schema.end()) {
    if (!all->is_array() || all->empty())
      return Fail(pointer + "/allOf", "a list of schemas is needed"), false;
    for (size_t i = 0; i < all->size(); ++i) {
      const std::string at = absl::StrFormat("%s/allOf/%d", pointer, i);
      merged = Merge(merged, Flatten((*all)[i], at, depth + 1), at);
    }
  }
  if (const auto reference = schema.find("$ref"); reference != schema.end()) {
    std::string target;
    const Json* referred = Resolve(*reference, pointer, target);
    if (referred == nullptr) return false;
    merged = Merge(Flatten(*referred, target, depth + 1), merged, pointer + "/$ref");
  }
  return merged;
}

bool FlatSchemas::MayCopy(const Json& value, const std::string& pointer) {
  const size_t num_values = NumValues(value);
  num_copied_ += num_values;
  if (num_copied_ > kMaxCopied)
    Fail(pointer, absl::StrFormat("merging its schemas takes more than %d values", kMaxCopied));
  AskCheck(num_values * kStepsOfCopy);
  return ok();
}

bool FlatSchemas::MayCompare(size_t num_pairs, const std::string& pointer) {
  num_compared_ += num_pairs;
  if (num_compared_ > kMaxCompared)
    Fail(pointer, absl::StrFormat("telling its schemas apart takes more than %d comparisons", kMaxCompared));
  AskCheck(num_pairs);
  return ok();
}

Json FlatSchemas::Merge(const Json& a, const Json& b, const std::string& pointer) {
  if (!status_.ok() || a.is_boolean() || b.is_boolean()) return false;
  if (a.empty()) return b;
  if (!MayCopy(a, pointer) || !MayCopy(b, pointer)) return false;
  Json merged = a;
  for (const auto& [name, value] : b.items()) {
    const auto found = a.find(name);
    if (name == "properties" || name == "additionalProperties") continue;
    if (found == a.end() || *found == value) {
      merged[name] = value;
    } else if (name == "type") {
      merged[name] = CommonTypes(*found, value, pointer);
    } else if (name == "required") {
      if (!found->is_array() || !value.is_array())
        return Fail(pointer + "/required", "a list of names is needed"), false;
      const std::set<Json> ours(found->begin(), found->end());
      Json& all = merged[name];
      for (const Json& property : value) {
        if (!ours.contains(property)) all.push_back(property);
      }
    } else if (name == "minimum" || name == "exclusiveMinimum" || name == "minLength" || name == "minItems") {
      if (!found->is_number() || !value.is_number())
        return Fail(pointer + "/" + name, "a number is needed"), false;
      merged[name] = *found < value ? value : *found;
    } else if (name == "maximum" || name == "exclusiveMaximum" || name == "maxLength" || name == "maxItems") {
      if (!found->is_number() || !value.is_number())
        return Fail(pointer + "/" + name, "a number is needed"), false;
      merged[name] = value < *found ? value : *found;
    } else if (name == "enum") {
      if (!found->is_array() || !value.is_array())
        return Fail(pointer + "/enum", "a list of values is needed"), false;
      const std::set<Json> theirs(value.begin(), value.end());
      Json common = Json::array();
      for (const Json& one : *found) {
        if (theirs.contains(one)) common.push_back(one);
      }
      if (common.empty()) return false;
      merged[name] = std::move(common);
    } else if (name == "const") {
      return false;  // they differ
    } else if (name == "items") {
      merged[name] = Both(*found, value);
    } else {
      return Fail(pointer + "/" + name, "cannot be merged with what it stands beside"), false;
    }
  }
  if (a.contains("prefixItems") != b.contains("prefixItems") &&
      (a.contains("items") || b.contains("items"))) {
    return Fail(pointer, "prefixItems cannot be merged with items of another schema"), false;
  }
  MergeProperties(a, b, merged, pointer);
  if (!merged.contains("type") || !merged["type"].is_array() || !merged["type"].empty()) return merged;
  return false;
}

Json FlatSchemas::CommonTypes(const Json& a, const Json& b, const std::string& pointer) {
  const std::vector<std::string> ours = Types(a, pointer), theirs = Types(b, pointer);
  Json common = Json::array();
  const auto has = [](const std::vector<std::string>& types, const std::string& type) {
    return std::find(types.begin(), types.end(), type) != types.end() ||
           (type == "integer" && std::find(types.begin(), types.end(), "number") != types.end());
  };
  for (const char* type : kTypes) {
    const bool repeats = std::string_view(type) == "integer" &&
                         std::find(common.begin(), common.end(), "number") != common.end();
    if (has(ours, type) && has(theirs, type) && !repeats) common.push_back(type);
  }
  return common;
}

void FlatSchemas::MergeProperties(const Json& a, const Json& b, Json& merged, const std::string& pointer) {
  static const Json kNoProperties = Json::object();
  const auto listed = [&](const Json& schema) -> const Json& {
    return schema.contains("properties") ? schema["properties"] : kNoProperties;
  };
  const Json &ours = listed(a), &theirs = listed(b);
  if (!ours.is_object() || !theirs.is_object()) {
    Fail(pointer + "/properties", "an object is needed");
    return;
  }
  if (a.contains("properties") || b.contains("properties")) {
    const std::map<std::string, const Json*> our_names = ByName(ours), their_names = ByName(theirs);
    Json::object_t properties;  // appended to without a search: no name comes twice
    const auto add = [&](const std::string& name, const Json& schema, const Json& other) {
      properties.emplace_back(name, other.contains("additionalProperties")
                                        ? Both(schema, other["additionalProperties"])
                                        : schema);
    };
    for (const auto& [name, schema] : ours.items()) {
      const auto found = their_names.find(name);
      if (found == their_names.end()) {
        add(name, schema, b);
      } else {
        properties.emplace_back(name, Both(schema, *found->second));
      }
    }
    for (const auto& [name, schema] : theirs.items()) {
      if (!our_names.contains(name)) add(name, schema, a);
    }
    merged["properties"] = std::move(properties);
  }
  if (!b.contains("additionalProperties")) return;
  merged["additionalProperties"] = a.contains("additionalProperties")
                                       ? Both(a["additionalProperties"], b["additionalProperties"])
                                       : b["additionalProperties"];
}

std::vector<std::string> FlatSchemas::Types(const Json& type, const std::string& pointer) {
  std::vector<std::string> types;
  const Json list = type.is_array() ? type : Json::array({type});
  for (const Json& one : list) {
    if (!one.is_string() || !IsOneOf(one.get<std::string>(), kTypes)) {
      Fail(
          pointer + "/type",
          absl::StrFormat("%s is no type; types are object, array, string, number, integer, boolean and null",
                          Printable(one.dump(), 40)));
      return {};
    }
    const std::string& name = one.get_ref<const std::string&>();
    if (std::find(types.begin(), types.end(), name) == types.end()) types.push_back(name);
  }
  if (types.empty()) Fail(pointer + "/type", "a type is needed");
  return types;
}

}  // namespace efla
