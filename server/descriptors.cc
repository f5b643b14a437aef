#include "server/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"

namespace efla {

absl::StatusOr<int64_t> RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("the limit of file descriptors cannot be read: %s", std::strerror(errno)));
  }
  const auto before = static_cast<int64_t>(limit.rlim_cur), hard = static_cast<int64_t>(limit.rlim_max);
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::UnavailableError(absl::StrFormat("the limit of %d file descriptors cannot be made %d: %s",
                                                  before, hard, std::strerror(errno)));
  }
  return hard;
}

DescriptorReserve::DescriptorReserve(int count) {
  for (int i = 0; i < count; ++i) {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd < 0) break;
    held_.push_back(fd);
  }
}

void DescriptorReserve::Release() {
  for (const int fd : held_) close(fd);
  held_.clear();
}

}  // namespace efla
