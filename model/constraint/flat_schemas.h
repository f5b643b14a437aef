// JSON Schemas made flat: their references followed, their allOf merged in, what asks for nothing left out.
#ifndef EFLA_MODEL_CONSTRAINT_FLAT_SCHEMAS_H_
#define EFLA_MODEL_CONSTRAINT_FLAT_SCHEMAS_H_

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/constraint/work_check.h"

namespace efla {

using Json = nlohmann::ordered_json;  // properties are written in the schema's order

inline constexpr int kMaxSchemaDepth = 64;  // of schemas in each other, apart from those behind a reference

// As a part of a JSON pointer.
std::string PointerToken(std::string_view name);
// Whether the value is of that type of the keyword "type".
bool HasType(const Json& value, const std::string& type);
// The keyword's value where nothing else says anything; else null.
const Json* OnlyKeyword(const Json& schema, const char* keyword);
// The types that a flat schema's keywords, apart from "type" itself, speak of.
std::vector<std::string> TypesSpokenOf(const Json& schema);

// The schemas of one document, and the first mistake that is found in them; after it, what the functions
// return means nothing. Pointers are JSON pointers from the document's root.
class FlatSchemas {
 public:
  FlatSchemas(const Json& root, WorkCheck& work) : root_(root), work_(work) {}  // which must outlive this

  const Json& root() const { return root_; }
  bool ok() const { return status_.ok(); }
  // INVALID_ARGUMENT, naming the pointer, or what the check says.
  const absl::Status& status() const { return status_; }
  void Fail(const std::string& pointer, std::string_view what);
  // Of work that the bounds below do not count.
  void AskCheck(size_t steps) {
    if (status_.ok()) status_ = work_.Add(steps);
  }
  // Counts what is about to be compared, values with values, for oneOf; false after an error.
  bool MayCompare(size_t num_pairs, const std::string& pointer);

  // The schema that a reference names; null after an error. `target` is its pointer.
  const Json* Resolve(const Json& reference, const std::string& pointer, std::string& target);
  // The keywords that say something, with references (of schemas that say more) and allOf merged in. A schema
  // that nothing meets is `false`. `depth` counts the schemas that are being made flat around it.
  Json Flatten(const Json& schema, const std::string& pointer, int depth);
  // A schema that both meet; both flat.
  Json Merge(const Json& a, const Json& b, const std::string& pointer);
  // Of the value of "type".
  std::vector<std::string> Types(const Json& type, const std::string& pointer);
  // Of two values of "type", a list; empty where they have none in common.
  Json CommonTypes(const Json& a, const Json& b, const std::string& pointer);

 private:
  // Each schema's additionalProperties speaks of the properties that this one does not list.
  void MergeProperties(const Json& a, const Json& b, Json& merged, const std::string& pointer);
  // Counts what is about to be copied: schemas that contain each other several times grow with each merge.
  bool MayCopy(const Json& value, const std::string& pointer);

  const Json& root_;
  WorkCheck& work_;
  absl::Status status_;
  int num_schemas_ = 0;
  size_t num_copied_ = 0;  // JSON values
  size_t num_compared_ = 0;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_FLAT_SCHEMAS_H_
