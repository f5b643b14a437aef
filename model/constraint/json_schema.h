// JSON Schemas (a subset of draft 2020-12, see README.md) to grammars.
#ifndef EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_
#define EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "model/constraint/expression.h"
#include "model/constraint/work_check.h"

namespace efla {

// INVALID_ARGUMENT naming the JSON pointer of the keyword: "/properties/a/not: ...".
// An error of `work`'s check ends it.
absl::StatusOr<Grammar> ParseJsonSchema(const std::string& text, WorkCheck& work);
// Any JSON object.
Grammar AnyJsonObject();

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_JSON_SCHEMA_H_
