// A folder of a test's own, removed with it, and whole files as strings.
#ifndef EFLA_TESTS_MODEL_SCRATCH_H_
#define EFLA_TESTS_MODEL_SCRATCH_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/source_path.h"

namespace efla {

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = ::testing::TempDir() + "/efla_test_XXXXXX";
    path_ = mkdtemp(name.data()) == nullptr ? "" : name;
    EXPECT_FALSE(path_.empty());
  }
  ~ScratchDirectory() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  void Write(const std::string& name, const std::string& contents) const {
    std::ofstream file(File(name), std::ios::binary);
    file << contents;
    EXPECT_TRUE(file.good()) << name;
  }
  // A checkpoint's files, writable.
  void CopyFrom(const std::string& directory) const {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      Write(entry.path().filename(), ReadWhole(entry.path()));
    }
  }

 private:
  std::string path_;
};

}  // namespace efla

#endif  // EFLA_TESTS_MODEL_SCRATCH_H_
