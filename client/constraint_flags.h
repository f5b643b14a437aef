// Flags of what an output must be.
#ifndef EFLA_CLIENT_CONSTRAINT_FLAGS_H_
#define EFLA_CLIENT_CONSTRAINT_FLAGS_H_

#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "efla/v1/generation.pb.h"

namespace efla {

// At most one is given.
struct ConstraintFlags {
  std::vector<std::string> choices;
  std::optional<std::string> regex;
  bool json_object = false;
  std::optional<std::string> json_schema, grammar;  // the text, or "@FILE"

  // Reads files. Sets no constraint where no flag is given.
  absl::Status Fill(v1::GenerateRequest& request) const;
};
void AddConstraintFlags(CLI::App& app, ConstraintFlags& flags);

}  // namespace efla

#endif  // EFLA_CLIENT_CONSTRAINT_FLAGS_H_
