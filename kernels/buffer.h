// Memory on a device that is freed with its owner.
#ifndef EFLA_KERNELS_BUFFER_H_
#define EFLA_KERNELS_BUFFER_H_

#include <cstddef>
#include <utility>

#include "kernels/device.h"

namespace efla {

// Move-only. The device must outlive it.
class Buffer {
 public:
  Buffer() = default;
  // Empty when the device has not got the memory.
  static Buffer Allocate(Device& device, size_t bytes) {
    Buffer buffer;
    buffer.memory_ = device.Allocate(bytes);
    if (buffer.memory_ != nullptr) {
      buffer.device_ = &device;
      buffer.bytes_ = bytes;
    }
    return buffer;
  }
  ~Buffer() { Reset(); }
  Buffer(Buffer&& other) noexcept { Swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    Swap(moved);
    return *this;
  }

  explicit operator bool() const { return memory_ != nullptr; }
  void* get() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  void Reset() {
    if (memory_ != nullptr) device_->Free(memory_);
    memory_ = nullptr;
  }
  void Swap(Buffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
  }

  Device* device_ = nullptr;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace efla

#endif  // EFLA_KERNELS_BUFFER_H_
