// Telling the schemas of a oneOf apart.
#ifndef EFLA_MODEL_CONSTRAINT_DISJOINT_SCHEMAS_H_
#define EFLA_MODEL_CONSTRAINT_DISJOINT_SCHEMAS_H_

#include <string>
#include <vector>

#include "model/constraint/flat_schemas.h"

namespace efla {

// oneOf's flat schemas, `branches`, which stand at `at`, must exclude each other: an error of `schemas` where
// they are not known to.
void CheckDisjoint(FlatSchemas& schemas, const std::vector<Json>& branches, const std::string& at);

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_DISJOINT_SCHEMAS_H_
