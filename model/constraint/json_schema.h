// JSON Schemas (a subset of draft 2020-12, see README.md) to grammars.
#ifndef EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_
#define EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "model/constraint/expression.h"

namespace efla {

// INVALID_ARGUMENT naming the JSON pointer of the keyword: "/properties/a/not: ...".
absl::StatusOr<Grammar> ParseJsonSchema(const std::string& text);
// Any JSON object.
Grammar AnyJsonObject();

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_
