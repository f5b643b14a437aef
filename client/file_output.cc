#include "client/file_output.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "absl/strings/str_format.h"

namespace efla {

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  if (path == "-") {
    if (std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() && std::fflush(stdout) == 0) {
      return absl::OkStatus();
    }
    return absl::UnavailableError(
        absl::StrFormat("cannot write to standard output: %s", std::strerror(errno)));
  }
  const std::string unfinished = absl::StrFormat("%s.%d.tmp", path, getpid());
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (file && std::rename(unfinished.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status status =
      absl::UnavailableError(absl::StrFormat("cannot write %s: %s", path, std::strerror(errno)));
  std::remove(unfinished.c_str());
  return status;
}

}  // namespace efla
