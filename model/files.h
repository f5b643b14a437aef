// Reading files that were written by others.
#ifndef EFLA_MODEL_FILES_H_
#define EFLA_MODEL_FILES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace efla {

bool FileExists(const std::string& path);

// A whole file. NOT_FOUND when it is not there, INVALID_ARGUMENT when it is not a regular file or larger than
// `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes);

// A whole regular file mapped read-only; its pages come and go as the system likes. A file that is cut short
// while it is mapped ends the process with SIGBUS: replace checkpoints by renaming, never in place.
class MappedFile {
 public:
  static absl::StatusOr<std::unique_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view contents() const { return contents_; }  // begins on a page

 private:
  explicit MappedFile(std::string_view contents) : contents_(contents) {}
  std::string_view contents_;
};

// Lets the system take back the whole pages inside [begin, begin + bytes).
void DropPages(const void* begin, int64_t bytes);

}  // namespace efla

#endif  // EFLA_MODEL_FILES_H_
