#include "model/constraint/disjoint_schemas.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

// Pairs of oneOf's schemas that are compared where nothing tells all of them apart at once.
constexpr int kMaxComparedPairs = 1 << 15;

// Whether only objects meet the schema, and only such as have that property, which it lists.
bool IsObjectWith(const Json& schema, const std::string& name) {
  if (!schema.contains("type") || schema["type"] != "object") return false;
  if (!schema.contains("required") || !schema.contains("properties")) return false;
  const Json& required = schema["required"];
  return required.is_array() && std::find(required.begin(), required.end(), name) != required.end() &&
         schema["properties"].is_object() && schema["properties"].contains(name);
}

size_t NumListed(const Json& schema, const char* keyword) {
  return schema.contains(keyword) ? schema[keyword].size() : 0;
}

// The list of the values that alone can meet a flat schema; nullopt where it lists none.
std::optional<Json> ListedValues(const Json& schema) {
  if (schema.contains("const")) return Json::array({schema["const"]});
  if (schema.contains("enum") && schema["enum"].is_array()) return schema["enum"];
  return std::nullopt;
}

// Of flat schemas that list their values, two that list the same one. Only values of which no two that are
// written differently are equal; with others, all_list is false.
struct Listing {
  bool all_list = false;
  std::optional<std::pair<size_t, size_t>> same;
};
Listing Compare(const std::vector<Json>& schemas) {
  Listing listing;
  std::map<std::string, size_t> seen;  // by which schema, by value
  for (size_t i = 0; i < schemas.size(); ++i) {
    if (schemas[i].is_boolean()) continue;  // met by nothing
    const std::optional<Json> values = ListedValues(schemas[i]);
    if (!values) return {};
    for (const Json& value : *values) {
      if (value.is_structured() || value.is_number_float()) return {};
      const size_t by = seen.try_emplace(value.dump(), i).first->second;
      if (by != i && !listing.same) listing.same = {by, i};
    }
  }
  listing.all_list = true;
  return listing;
}

// Whether certainly no value meets both, or there is an error; both flat, of a oneOf `at` that pointer.
bool Disjoint(FlatSchemas& schemas, const Json& a, const Json& b, const std::string& at, int depth) {
  if (a.is_boolean() || b.is_boolean()) return true;  // one is met by nothing
  if (depth > 4) return false;
  const std::optional<Json> ours = ListedValues(a), theirs = ListedValues(b);
  if (ours && theirs) {
    if (!schemas.MayCompare(ours->size() * theirs->size(), at)) return true;
    return std::none_of(ours->begin(), ours->end(), [&](const Json& value) {
      return std::find(theirs->begin(), theirs->end(), value) != theirs->end();
    });
  }
  const auto types = [&](const Json& schema) {
    std::vector<std::string> known;
    if (schema.contains("type")) known = schemas.Types(schema["type"], "");
    return known;
  };
  const std::vector<std::string> our_types = types(a), their_types = types(b);
  if (!schemas.ok()) return true;
  const auto excludes = [](const std::vector<std::string>& known, const std::optional<Json>& listed) {
    return listed && !known.empty() && std::none_of(listed->begin(), listed->end(), [&](const Json& value) {
             return std::any_of(known.begin(), known.end(),
                                [&](const std::string& type) { return HasType(value, type); });
           });
  };
  if (excludes(our_types, theirs) || excludes(their_types, ours)) return true;
  if (!our_types.empty() && !their_types.empty() && schemas.CommonTypes(our_types, their_types, "").empty())
    return true;
  // Objects that each need a property which differs.
  const bool objects = our_types == std::vector<std::string>{"object"} && their_types == our_types;
  if (!objects || !a.contains("required") || !b.contains("required") || !a.contains("properties") ||
      !b.contains("properties")) {
    return false;
  }
  const Json &our_properties = a["properties"], &their_properties = b["properties"];
  for (const Json& name : a["required"]) {
    if (!schemas.MayCompare(b["required"].size() + our_properties.size() + their_properties.size(), at))
      return true;
    const bool both = std::find(b["required"].begin(), b["required"].end(), name) != b["required"].end();
    if (!both || !name.is_string()) continue;
    const std::string key = name.get<std::string>();
    if (!our_properties.contains(key) || !their_properties.contains(key)) continue;
    const std::string property = "/properties/" + PointerToken(key);
    if (Disjoint(schemas, schemas.Flatten(our_properties[key], property, depth + 1),
                 schemas.Flatten(their_properties[key], property, depth + 1), at, depth + 1)) {
      return true;
    }
  }
  return false;
}

void FailAsNotDisjoint(FlatSchemas& schemas, const std::string& at, size_t one, size_t other) {
  schemas.Fail(
      at, absl::StrFormat("%d and %d are not known to exclude each other (by type, const, enum or a required "
                          "property's); anyOf would do",
                          one, other));
}

// Whether the flat schemas are known to exclude each other, or two of them not to (an error then), by the
// values that they list or by those of one property that all of them require: without comparing all pairs.
bool SettledByLists(FlatSchemas& schemas, const std::vector<Json>& branches, const std::string& at) {
  const auto settled = [&](const std::vector<Json>& lists) {
    const Listing listing = Compare(lists);
    if (!listing.all_list) return false;
    if (!listing.same) return true;
    const auto [one, other] = *listing.same;
    if (Disjoint(schemas, branches[one], branches[other], at, 0)) return false;
    FailAsNotDisjoint(schemas, at, one, other);
    return true;
  };
  if (settled(branches)) return true;
  const Json& first = branches.front();
  if (!first.is_object() || !first.contains("required") || !first["required"].is_array()) return false;
  for (const Json& required : first["required"]) {
    if (!required.is_string()) return false;
    const std::string name = required.get<std::string>();
    std::vector<Json> values;  // of that property, by branch
    for (size_t i = 0; i < branches.size(); ++i) {
      if (branches[i].is_boolean()) {
        values.emplace_back(false);
        continue;
      }
      if (!schemas.MayCompare(NumListed(branches[i], "required") + NumListed(branches[i], "properties"), at))
        return true;
      if (!IsObjectWith(branches[i], name)) break;
      values.push_back(schemas.Flatten(branches[i]["properties"][name],
                                       absl::StrFormat("%s/%d/properties/%s", at, i, PointerToken(name)), 1));
      if (!schemas.ok()) return true;
      if (!values.back().contains("const") && !values.back().contains("enum")) break;
    }
    if (values.size() == branches.size() && settled(values)) return true;
  }
  return false;
}

}  // namespace

void CheckDisjoint(FlatSchemas& schemas, const std::vector<Json>& branches, const std::string& at) {
  if (!schemas.ok() || SettledByLists(schemas, branches, at)) return;
  int num_pairs = 0;
  for (size_t i = 0; i < branches.size(); ++i) {
    for (size_t k = 0; k < i && schemas.ok(); ++k) {
      if (++num_pairs > kMaxComparedPairs) {
        schemas.Fail(
            at, absl::StrFormat("more than %d pairs of its schemas would have to be compared; a property "
                                "that all require, with a const of its own in each, tells them apart at once",
                                kMaxComparedPairs));
      } else if (!Disjoint(schemas, branches[k], branches[i], at, 0)) {
        FailAsNotDisjoint(schemas, at, k, i);
      }
    }
  }
}

}  // namespace efla
