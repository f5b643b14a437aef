// Files written whole or not at all.
#ifndef EFLA_CLIENT_FILE_OUTPUT_H_
#define EFLA_CLIENT_FILE_OUTPUT_H_

#include <string>

#include "absl/status/status.h"

namespace efla {

// Replaces the file at once; what was there before stays when this fails. "-": standard output.
absl::Status WriteFile(const std::string& path, const std::string& bytes);

}  // namespace efla

#endif  // EFLA_CLIENT_FILE_OUTPUT_H_
