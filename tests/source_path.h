// Where tests find golden files and the demo model.
#ifndef EFLA_TESTS_SOURCE_PATH_H_
#define EFLA_TESTS_SOURCE_PATH_H_

#include <cstdlib>
#include <string>

namespace efla {

// A path below the source tree, e.g. "tests/golden/efla_basic". EFLA_TEST_SOURCE_DIR replaces the tree that
// the tests were built from: an installed test runs on another machine.
inline std::string SourcePath(const std::string& relative) {
  const char* given = std::getenv("EFLA_TEST_SOURCE_DIR");
  return std::string(given != nullptr && *given != '\0' ? given : EFLA_SOURCE_DIR) + "/" + relative;
}

}  // namespace efla

#endif  // EFLA_TESTS_SOURCE_PATH_H_
