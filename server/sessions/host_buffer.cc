#include "server/sessions/host_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/check.h"

namespace efla {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = 2 << 20;
// An idle buffer serves requests down to this share of its size.
constexpr double kLeastUse = 0.75;

size_t RoundUp(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

std::byte* Allocate(size_t bytes) {
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kAlignment;
  const size_t rounded = std::max(RoundUp(bytes, alignment), alignment);
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();  // as a vector of so many bytes would
  if (huge) madvise(memory, rounded, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

}  // namespace

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  pool_ = std::move(other.pool_);
  block_ = std::exchange(other.block_, {});
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

HostBuffer HostBuffer::CopyOf(std::span<const std::byte> bytes) {
  HostBuffer buffer;
  if (bytes.empty()) return buffer;
  buffer.block_ = {Allocate(bytes.size()), bytes.size()};
  buffer.data_ = buffer.block_.bytes;
  buffer.size_ = bytes.size();
  std::memcpy(buffer.data_, bytes.data(), bytes.size());
  return buffer;
}

void HostBuffer::Narrow(size_t offset, size_t size) {
  EFLA_CHECK(offset <= size_ && size <= size_ - offset);
  if (data_ != nullptr) data_ += offset;
  size_ = size;
}

bool operator==(const HostBuffer& a, std::span<const std::byte> b) {
  return std::equal(a.data_, a.data_ + a.size_, b.begin(), b.end());
}

void HostBuffer::Release() {
  const Block block = std::exchange(block_, {});
  const std::shared_ptr<HostBuffers> pool = std::move(pool_);
  data_ = nullptr;
  size_ = 0;
  if (pool != nullptr) {
    pool->Return(block);
  } else {
    std::free(block.bytes);
  }
}

std::shared_ptr<HostBuffers> HostBuffers::Create(int64_t max_bytes, Memory memory) {
  return std::shared_ptr<HostBuffers>(new HostBuffers(max_bytes, std::move(memory)));
}

HostBuffers::~HostBuffers() {
  for (const auto& [capacity, block] : idle_) Free(block);
}

HostBuffer HostBuffers::Take(size_t bytes) {
  HostBuffer buffer;
  buffer.size_ = bytes;
  if (bytes == 0) return buffer;
  if (bytes < kGranule) {
    buffer.block_ = {Allocate(bytes), bytes};
    buffer.data_ = buffer.block_.bytes;
    return buffer;
  }
  buffer.pool_ = shared_from_this();
  const size_t capacity = RoundUp(bytes, kGranule);
  {
    const std::lock_guard lock(mutex_);
    const auto found = idle_.lower_bound(capacity);
    if (found != idle_.end() &&
        static_cast<double>(found->first) * kLeastUse <= static_cast<double>(capacity)) {
      buffer.block_ = found->second;
      buffer.data_ = buffer.block_.bytes;
      idle_.erase(found);
      stats_.idle_bytes -= static_cast<int64_t>(buffer.block_.capacity);
      stats_.used_bytes += static_cast<int64_t>(buffer.block_.capacity);
      ++stats_.reuses;
      return buffer;
    }
  }
  void* foreign = memory_.allocate ? memory_.allocate(capacity) : nullptr;
  buffer.block_ = foreign != nullptr ? Block{static_cast<std::byte*>(foreign), capacity, true}
                                     : Block{Allocate(capacity), capacity};
  buffer.data_ = buffer.block_.bytes;
  std::vector<Block> surplus;  // idle ones of other sizes
  {
    const std::lock_guard lock(mutex_);
    stats_.used_bytes += static_cast<int64_t>(capacity);
    if (buffer.block_.foreign) stats_.foreign_bytes += static_cast<int64_t>(capacity);
    ++stats_.allocations;
    TakeSurplus(surplus);
  }
  for (const Block& one : surplus) Free(one);
  return buffer;
}

void HostBuffers::Return(const Block& block) {
  std::vector<Block> surplus;
  {
    const std::lock_guard lock(mutex_);
    idle_.emplace(block.capacity, block);
    stats_.used_bytes -= static_cast<int64_t>(block.capacity);
    stats_.idle_bytes += static_cast<int64_t>(block.capacity);
    TakeSurplus(surplus);
  }
  for (const Block& one : surplus) Free(one);
}

void HostBuffers::TakeSurplus(std::vector<Block>& surplus) {
  while (idle_.size() > kWorkingBuffers && stats_.used_bytes + stats_.idle_bytes > max_bytes_) {
    const auto smallest = idle_.begin();
    stats_.idle_bytes -= static_cast<int64_t>(smallest->first);
    if (smallest->second.foreign) stats_.foreign_bytes -= static_cast<int64_t>(smallest->first);
    surplus.push_back(smallest->second);
    idle_.erase(smallest);
  }
}

void HostBuffers::Free(const Block& block) {
  if (block.foreign) {
    memory_.free(block.bytes);
  } else {
    std::free(block.bytes);
  }
}

HostBuffers::Stats HostBuffers::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace efla
