#include "model/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace efla {
namespace {

struct OpenFile {
  int descriptor;
  int64_t bytes;
};

absl::Status SystemError(const std::string& path, const char* action, int error) {
  const std::string message = absl::StrFormat("%s: cannot %s: %s", path, action, std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::InvalidArgumentError(message);
  }
}

absl::StatusOr<OpenFile> OpenRegular(const std::string& path) {
  // O_NONBLOCK: a pipe in a file's place must not make the open wait for a writer.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return SystemError(path, "open", errno);
  struct stat found = {};
  if (fstat(descriptor, &found) != 0 || !S_ISREG(found.st_mode)) {
    close(descriptor);
    return absl::InvalidArgumentError(absl::StrFormat("%s: not a regular file", path));
  }
  return OpenFile{descriptor, found.st_size};
}

}  // namespace

bool FileExists(const std::string& path) {
  struct stat found = {};
  return stat(path.c_str(), &found) == 0;
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  absl::StatusOr<OpenFile> file = OpenRegular(path);
  if (!file.ok()) return file.status();
  const absl::Cleanup closer = [&] { close(file->descriptor); };
  if (file->bytes > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %d bytes; at most %d are read", path, file->bytes, max_bytes));
  }
  std::string contents(static_cast<size_t>(file->bytes), '\0');
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t got = read(file->descriptor, contents.data() + done, contents.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(path, "read", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  contents.resize(done);
  return contents;
}

absl::StatusOr<std::unique_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  absl::StatusOr<OpenFile> file = OpenRegular(path);
  if (!file.ok()) return file.status();
  const absl::Cleanup closer = [&] { close(file->descriptor); };
  const auto bytes = static_cast<size_t>(file->bytes);
  if (bytes == 0) return std::unique_ptr<const MappedFile>(new MappedFile({}));
  void* begin = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file->descriptor, 0);
  if (begin == MAP_FAILED) return SystemError(path, "map", errno);
  return std::unique_ptr<const MappedFile>(new MappedFile({static_cast<const char*>(begin), bytes}));
}

MappedFile::~MappedFile() {
  if (!contents_.empty()) munmap(const_cast<char*>(contents_.data()), contents_.size());
}

void DropPages(const void* begin, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes)) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace efla
