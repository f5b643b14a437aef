#include "server/sessions/file_ops.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace efla {
namespace {

template <typename T>
T OrErrno(T result) {
  return result < 0 ? -errno : result;
}

}  // namespace

int FileOps::Create(const std::string& path) {
  return OrErrno(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
}
int FileOps::OpenToRead(const std::string& path) { return OrErrno(open(path.c_str(), O_RDONLY | O_CLOEXEC)); }
long FileOps::Write(int fd, const void* bytes, size_t count) { return OrErrno(write(fd, bytes, count)); }
long FileOps::Read(int fd, void* bytes, size_t count) { return OrErrno(read(fd, bytes, count)); }
int FileOps::SyncData(int fd) { return OrErrno(fdatasync(fd)); }
int FileOps::Close(int fd) { return OrErrno(close(fd)); }
int FileOps::Rename(const std::string& from, const std::string& to) {
  return OrErrno(rename(from.c_str(), to.c_str()));
}
int FileOps::Unlink(const std::string& path) { return OrErrno(unlink(path.c_str())); }
int FileOps::SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -errno;
  const int result = OrErrno(fsync(fd));
  close(fd);
  return result;
}

}  // namespace efla
