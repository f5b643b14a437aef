// What the CPU device asks the operating system: cores, memory, names, large allocations.
#ifndef EFLA_KERNELS_CPU_MACHINE_H_
#define EFLA_KERNELS_CPU_MACHINE_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

namespace efla {

// Cores that this process may use: its affinity mask, and its control group's quota rounded up.
int AvailableCores();

int64_t TotalMemoryBytes();
// What may still be allocated without swapping or being killed: the machine's and the control group's room.
int64_t FreeMemoryBytes();

std::string CpuName();

inline constexpr size_t kMemoryAlignment = 256;

// Aligned to kMemoryAlignment, large blocks to huge pages; null when it cannot be had. std::free releases it.
void* AllocateMemory(size_t bytes);

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename T>
using MemoryBlock = std::unique_ptr<T[], FreeMemory>;

template <typename T>
MemoryBlock<T> AllocateBlock(size_t count) {
  return MemoryBlock<T>(static_cast<T*>(AllocateMemory(count * sizeof(T))));
}

}  // namespace efla

#endif  // EFLA_KERNELS_CPU_MACHINE_H_
