#include "client/file_output.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

absl::Status Failure(const std::string& what, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrFormat("cannot write %s: %s", what, why));
}

bool Write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  return static_cast<bool>(file);
}

// What a chain of symbolic links leads to, which need not exist.
fs::path Target(fs::path path) {
  std::error_code error;
  while (fs::is_symlink(fs::symlink_status(path, error))) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

}  // namespace

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  if (path == "-") {
    if (std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() && std::fflush(stdout) == 0) {
      return absl::OkStatus();
    }
    return Failure("to standard output", std::strerror(errno));
  }
  std::error_code error;
  const fs::file_status kind = fs::status(path, error);
  if (!fs::status_known(kind)) return Failure(path, error.message());  // a loop of links, for one
  if (fs::exists(kind) && !fs::is_regular_file(kind)) {
    return Write(path, bytes) ? absl::OkStatus() : Failure(path, std::strerror(errno));
  }
  const std::string target = Target(path);
  const std::string unfinished = absl::StrFormat("%s.%d.tmp", target, getpid());
  if (Write(unfinished, bytes) && std::rename(unfinished.c_str(), target.c_str()) == 0) {
    return absl::OkStatus();
  }
  const absl::Status status = Failure(path, std::strerror(errno));
  std::remove(unfinished.c_str());
  return status;
}

}  // namespace efla
