#include "kernels/cpu/machine.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string_view>
#include <thread>

namespace efla {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number in a one-number file; `otherwise` when there is none ("max", no file).
int64_t ReadNumber(const char* path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? number : otherwise;
}

// A field of /proc/meminfo, in bytes; -1 when absent.
int64_t MemInfoBytes(std::string_view field) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kilobytes = 0; file >> name >> kilobytes; std::getline(file, unit)) {
    if (name == field) return kilobytes * 1024;
  }
  return -1;
}

}  // namespace

int AvailableCores() {
  cpu_set_t mask;
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) cores = CPU_COUNT(&mask);
  std::ifstream limit("/sys/fs/cgroup/cpu.max");  // "QUOTA PERIOD" or "max PERIOD"
  int64_t quota = 0, period = 0;
  if (limit >> quota >> period && quota > 0 && period > 0) {
    cores = static_cast<int>(std::min<int64_t>(cores, (quota + period - 1) / period));
  }
  return std::max(cores, 1);
}

int64_t TotalMemoryBytes() {
  const int64_t machine = MemInfoBytes("MemTotal:");
  return std::min(machine < 0 ? kUnlimited : machine, ReadNumber("/sys/fs/cgroup/memory.max", kUnlimited));
}

int64_t FreeMemoryBytes() {
  const int64_t machine = MemInfoBytes("MemAvailable:");
  const int64_t limit = ReadNumber("/sys/fs/cgroup/memory.max", kUnlimited);
  const int64_t group =
      limit == kUnlimited ? kUnlimited : limit - ReadNumber("/sys/fs/cgroup/memory.current", 0);
  return std::max<int64_t>(std::min(machine < 0 ? kUnlimited : machine, group), 0);
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const size_t value = line.find(": ");
      if (value != std::string::npos) return line.substr(value + 2);
    }
  }
  return "CPU";
}

void* AllocateMemory(size_t bytes) {
  if (bytes > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max()) - kHugePageBytes) return nullptr;
  const bool large = bytes >= 2 * kHugePageBytes;
  const size_t alignment = large ? kHugePageBytes : kMemoryAlignment;
  const size_t rounded = std::max((bytes + alignment - 1) / alignment, size_t{1}) * alignment;
  // The kernel promises more than it has and ends the process later; so large requests are checked here.
  if (large && static_cast<int64_t>(rounded) > FreeMemoryBytes()) return nullptr;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (large && memory != nullptr) madvise(memory, rounded, MADV_HUGEPAGE);
  return memory;
}

}  // namespace efla
