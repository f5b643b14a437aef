// Host memory for states and snapshots on their way: taken, filled, given back, and taken again, since pages
// that the system has to find (or a device to lock) first cost more than what is done with them.
#ifndef EFLA_SERVER_SESSIONS_HOST_BUFFER_H_
#define EFLA_SERVER_SESSIONS_HOST_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace efla {

class HostBuffers;

// Owns bytes of host memory, 64-byte aligned when made; their contents are undefined until they are written.
// Goes back to its pool when destroyed.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  ~HostBuffer() { Release(); }
  // With memory of its own, of no pool.
  static HostBuffer CopyOf(std::span<const std::byte> bytes);

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<std::byte> span() { return {data_, size_}; }
  std::span<const std::byte> span() const { return {data_, size_}; }
  operator std::span<const std::byte>() const { return span(); }
  // From now on, only so many of its bytes, from `offset` on.
  void Narrow(size_t offset, size_t size);

  friend bool operator==(const HostBuffer& a, const HostBuffer& b) { return a == b.span(); }
  friend bool operator==(const HostBuffer& a, std::span<const std::byte> b);

 private:
  friend class HostBuffers;
  struct Block {
    std::byte* bytes = nullptr;
    size_t capacity = 0;
    bool foreign = false;  // from HostBuffers::Memory
  };
  void Release();

  std::shared_ptr<HostBuffers> pool_;  // null: of no pool
  Block block_;
  std::byte* data_ = nullptr;  // in the block
  size_t size_ = 0;
};

// Thread-safe. Lives as long as any buffer of it.
class HostBuffers : public std::enable_shared_from_this<HostBuffers> {
 public:
  // Where memory comes from; any thread. Absent, or null when it has none: the process's own.
  struct Memory {
    std::function<void*(size_t bytes)> allocate;
    std::function<void(void*)> free;
  };
  // Smaller buffers are not worth keeping; the size of larger ones is rounded up to a multiple of it.
  static constexpr size_t kGranule = 64 << 10;
  // Idle buffers that are kept whatever `max_bytes` says: what moves at one time needs about so many.
  static constexpr size_t kWorkingBuffers = 4;

  // Idle buffers are kept as long as they and those in use have at most `max_bytes` together.
  static std::shared_ptr<HostBuffers> Create(int64_t max_bytes, Memory memory = {});
  ~HostBuffers();

  HostBuffer Take(size_t bytes);

  struct Stats {
    int64_t used_bytes = 0, idle_bytes = 0;  // without the small ones
    int64_t foreign_bytes = 0;               // of both, from Memory
    uint64_t allocations = 0, reuses = 0;    // likewise
  };
  Stats stats() const;

 private:
  friend class HostBuffer;
  using Block = HostBuffer::Block;
  HostBuffers(int64_t max_bytes, Memory memory) : max_bytes_(max_bytes), memory_(std::move(memory)) {}
  void Return(const Block& block);
  void Free(const Block& block);
  // With mutex_ held: idle blocks that are too many.
  void TakeSurplus(std::vector<Block>& surplus);

  const int64_t max_bytes_;
  const Memory memory_;
  mutable std::mutex mutex_;           // guards what follows
  std::multimap<size_t, Block> idle_;  // by capacity
  Stats stats_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_HOST_BUFFER_H_
