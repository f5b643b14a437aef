// File descriptors: as many as the system allows, and some kept back for when there are no others.
#ifndef EFLA_SERVER_DESCRIPTORS_H_
#define EFLA_SERVER_DESCRIPTORS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace efla {

// Raises this process's soft limit to its hard one: how many it may have open now. Fails where the system
// refuses; the limit is as before then.
absl::StatusOr<int64_t> RaiseDescriptorLimit();

// One thread.
class DescriptorReserve {
 public:
  // Holds `count` of them, or fewer where there are no more.
  explicit DescriptorReserve(int count);
  ~DescriptorReserve() { Release(); }
  DescriptorReserve(const DescriptorReserve&) = delete;
  DescriptorReserve& operator=(const DescriptorReserve&) = delete;

  // Gives them all back to the process, for whoever asks next.
  void Release();
  int size() const { return static_cast<int>(held_.size()); }

 private:
  std::vector<int> held_;
};

}  // namespace efla

#endif  // EFLA_SERVER_DESCRIPTORS_H_
