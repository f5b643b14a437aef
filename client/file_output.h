// Files written whole or not at all, where the path allows it.
#ifndef EFLA_CLIENT_FILE_OUTPUT_H_
#define EFLA_CLIENT_FILE_OUTPUT_H_

#include <string>

#include "absl/status/status.h"

namespace efla {

// Replaces a regular file at once, the one that a link leads to; what was there before stays when this fails.
// Devices and pipes are written as they are. "-": standard output. FAILED_PRECONDITION where it cannot write.
absl::Status WriteFile(const std::string& path, const std::string& bytes);

}  // namespace efla

#endif  // EFLA_CLIENT_FILE_OUTPUT_H_
