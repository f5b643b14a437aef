#include "model/state_pool.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/buffer.h"
#include "kernels/check.h"
#include "kernels/create_device.h"

namespace efla {
namespace {

constexpr int64_t kSlotAlignFloats = 64 * 1024 / sizeof(float);
constexpr uint8_t kPoisonByte = 0xff;  // four of them are a float32 NaN

// Live and shared in one word, so that a reader on another thread sees a pair that belongs together.
uint64_t Pack(int live, int shared) {
  return static_cast<uint64_t>(static_cast<uint32_t>(shared)) << 32 | static_cast<uint32_t>(live);
}

}  // namespace

StateLayout StateLayout::Of(const ModelConfig& config) {
  StateLayout layout;
  layout.num_layers = config.num_layers;
  layout.recurrent_floats = int64_t{config.num_heads} * config.d_k * config.d_v;
  layout.conv_floats = config.conv_size > 0 ? int64_t{config.conv_size - 1} * config.conv_channels() : 0;
  const int64_t used = layout.num_layers * (layout.recurrent_floats + layout.conv_floats);
  layout.slot_floats = (used + kSlotAlignFloats - 1) / kSlotAlignFloats * kSlotAlignFloats;
  return layout;
}

int64_t StateLayout::state_bytes() const {
  return num_layers * (recurrent_floats + conv_floats) * static_cast<int64_t>(sizeof(float));
}

struct StatePool::Impl {
  struct Slot {
    int32_t references = 0;
    uint32_t generation = 1;  // a default SlotHandle is never live
  };

  Impl(Device& owner, Buffer pool_memory, int num_slots)
      : device(owner), memory(std::move(pool_memory)), total(num_slots) {
    slots.resize(static_cast<size_t>(num_slots) + kFirstSlot);
    for (int32_t slot = kFirstSlot; slot < num_slots + kFirstSlot; ++slot) free.push_back(slot);
  }

  Device& device;
  const Buffer memory;
  const int total;
  std::vector<std::byte> poison;  // a slot full of it, or empty; constant once the pool is made

  mutable std::mutex mutex;  // guards what follows, down to shared
  std::vector<Slot> slots;   // index is the slot number; the reserved two never have references
  std::deque<int32_t> free;  // reused in the order they were freed: a stale use has long to show itself
  int live = 0, shared = 0;
  std::atomic<uint64_t> packed_counts = 0;  // written under the mutex, read without

  std::mutex callback_mutex;  // guards freed, and is held while it runs; taken without the other
  std::function<void()> freed;

  void* Address(int32_t slot, int64_t slot_bytes) const {
    return static_cast<std::byte*>(memory.get()) + slot * slot_bytes;
  }

  // With the mutex held.
  Slot& Live(SlotHandle handle) {
    EFLA_CHECK(IsLive(handle));
    return slots[static_cast<size_t>(handle.slot)];
  }
  bool IsLive(SlotHandle handle) const {
    if (handle.slot < kFirstSlot || static_cast<size_t>(handle.slot) >= slots.size()) return false;
    const Slot& slot = slots[static_cast<size_t>(handle.slot)];
    return slot.generation == handle.generation && slot.references > 0;
  }
  void PublishCounts() { packed_counts.store(Pack(live, shared), std::memory_order_release); }
};

StatePool::StatePool(std::unique_ptr<Impl> impl, const StateLayout& layout)
    : impl_(std::move(impl)), layout_(layout) {}
StatePool::~StatePool() = default;

absl::StatusOr<std::unique_ptr<StatePool>> StatePool::Create(Device& device, const ModelConfig& config,
                                                             int num_slots, bool poison) {
  constexpr int kMaxSlots = std::numeric_limits<int32_t>::max() - kFirstSlot;
  if (num_slots < 1 || num_slots > kMaxSlots) {
    return absl::InvalidArgumentError(
        absl::StrFormat("state slots are %d; there must be 1 to %d", num_slots, kMaxSlots));
  }
  const StateLayout layout = StateLayout::Of(config);
  const int64_t free_bytes = device.free_memory_bytes();
  const int64_t affordable =
      free_bytes / layout.slot_bytes() - kFirstSlot;  // slot bytes times slots may overflow
  Buffer memory;
  if (num_slots <= affordable) {
    memory = Buffer::Allocate(device,
                              static_cast<size_t>((int64_t{num_slots} + kFirstSlot) * layout.slot_bytes()));
  }
  if (!memory) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d state slots of %d bytes do not fit in the %d bytes of free device memory; at "
                        "most %d slots would fit",
                        num_slots, layout.slot_bytes(), free_bytes, std::max<int64_t>(affordable, 0)));
  }

  device.FillBytes(memory.get(), 0, static_cast<size_t>(kFirstSlot * layout.slot_bytes()));
  if (poison) {
    device.FillBytes(static_cast<std::byte*>(memory.get()) + kFirstSlot * layout.slot_bytes(), kPoisonByte,
                     static_cast<size_t>(num_slots * layout.slot_bytes()));
  }
  if (DeviceStatus status = device.Synchronize(); !status.ok()) return ToStatus(status);

  auto impl = std::make_unique<Impl>(device, std::move(memory), num_slots);
  if (poison) impl->poison.assign(static_cast<size_t>(layout.slot_bytes()), std::byte{kPoisonByte});
  return std::unique_ptr<StatePool>(new StatePool(std::move(impl), layout));
}

absl::StatusOr<SlotHandle> StatePool::Acquire() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->free.empty()) {
    return absl::ResourceExhaustedError(absl::StrFormat("all %d state slots are taken", impl_->total));
  }
  const int32_t slot = impl_->free.front();
  impl_->free.pop_front();
  Impl::Slot& entry = impl_->slots[static_cast<size_t>(slot)];
  entry.references = 1;
  ++impl_->live;
  impl_->PublishCounts();
  return SlotHandle{slot, entry.generation};
}

void StatePool::AddReference(SlotHandle handle) {
  const std::lock_guard lock(impl_->mutex);
  if (++impl_->Live(handle).references == 2) {
    --impl_->live;
    ++impl_->shared;
    impl_->PublishCounts();
  }
}

void StatePool::Release(SlotHandle handle) {
  {
    const std::lock_guard lock(impl_->mutex);
    Impl::Slot& slot = impl_->Live(handle);
    --slot.references;
    if (slot.references > 0) {
      if (slot.references == 1) {
        --impl_->shared;
        ++impl_->live;
        impl_->PublishCounts();
      }
      return;
    }
    --impl_->live;
    ++slot.generation;
    // Before anybody can acquire the slot. A device that fails here tells the engine at its next step.
    if (!impl_->poison.empty()) {
      impl_->device.WriteMemory(impl_->Address(handle.slot, layout_.slot_bytes()), impl_->poison.data(),
                                impl_->poison.size());
    }
    impl_->free.push_back(handle.slot);
    impl_->PublishCounts();
  }
  const std::lock_guard lock(impl_->callback_mutex);
  if (impl_->freed) impl_->freed();
}

void StatePool::SetFreedCallback(std::function<void()> callback) {
  const std::lock_guard lock(impl_->callback_mutex);
  impl_->freed = std::move(callback);
}

bool StatePool::IsShared(SlotHandle handle) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->Live(handle).references > 1;
}

bool StatePool::IsLive(SlotHandle handle) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->IsLive(handle);
}

StateView StatePool::View(int layer) const {
  EFLA_CHECK(layer >= 0 && layer < layout_.num_layers);
  return {.pool = static_cast<float*>(impl_->memory.get()),
          .slot_stride = layout_.slot_floats,
          .recurrent_offset = layer * layout_.recurrent_floats,
          .conv_offset = layout_.num_layers * layout_.recurrent_floats + layer * layout_.conv_floats};
}

StatePool::Counts StatePool::counts() const {
  const uint64_t packed = impl_->packed_counts.load(std::memory_order_acquire);
  Counts counts;
  counts.total = impl_->total;
  counts.live = static_cast<int>(packed & 0xffffffffu);
  counts.shared = static_cast<int>(packed >> 32);
  counts.free = counts.total - counts.live - counts.shared;
  return counts;
}

absl::Status StatePool::CheckInvariants(bool read_device) const {
  if (absl::Status status = CheckBooks(); !status.ok() || !read_device) return status;
  std::vector<uint32_t> zero_slot(static_cast<size_t>(layout_.slot_floats));
  if (DeviceStatus status =
          impl_->device.ReadMemory(zero_slot.data(), impl_->Address(kZeroSlot, layout_.slot_bytes()),
                                   static_cast<size_t>(layout_.slot_bytes()));
      !status.ok()) {
    return ToStatus(status);
  }
  const auto written =
      std::find_if(zero_slot.begin(), zero_slot.end(), [](uint32_t word) { return word != 0; });
  if (written != zero_slot.end()) {
    return absl::InternalError(absl::StrFormat("state pool: the zero slot was written, first at float %d",
                                               written - zero_slot.begin()));
  }
  return absl::OkStatus();
}

absl::Status StatePool::CheckBooks() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<int> times_free(impl_->slots.size(), 0);
  for (int32_t slot : impl_->free) {
    if (slot < kFirstSlot || static_cast<size_t>(slot) >= impl_->slots.size()) {
      return absl::InternalError(
          absl::StrFormat("state pool: slot %d on the free list is not in the pool", slot));
    }
    ++times_free[static_cast<size_t>(slot)];
  }
  int live = 0, shared = 0;
  for (size_t i = 0; i < impl_->slots.size(); ++i) {
    const int32_t references = impl_->slots[i].references;
    live += references == 1;
    shared += references > 1;
    const bool belongs_free = i >= kFirstSlot && references == 0;
    if (times_free[i] != (belongs_free ? 1 : 0) || references < 0 || (i < kFirstSlot && references != 0)) {
      return absl::InternalError(absl::StrFormat("state pool: slot %d has %d references and is %d times free",
                                                 i, references, times_free[i]));
    }
  }
  const Counts counts = this->counts();
  if (counts.live != live || counts.shared != shared || counts.free != static_cast<int>(impl_->free.size())) {
    return absl::InternalError(absl::StrFormat(
        "state pool: counts say %d live, %d shared, %d free of %d; the slots say %d, %d, %d", counts.live,
        counts.shared, counts.free, counts.total, live, shared, impl_->free.size()));
  }
  return absl::OkStatus();
}

absl::Status StatePool::CopyOut(SlotHandle handle, std::span<std::byte> to) const {
  EFLA_CHECK(IsLive(handle) && static_cast<int64_t>(to.size()) == layout_.state_bytes());
  return ToStatus(
      impl_->device.ReadMemory(to.data(), impl_->Address(handle.slot, layout_.slot_bytes()), to.size()));
}

absl::Status StatePool::CopyIn(SlotHandle handle, std::span<const std::byte> from) {
  EFLA_CHECK(!IsShared(handle) && static_cast<int64_t>(from.size()) == layout_.state_bytes());
  return ToStatus(
      impl_->device.WriteMemory(impl_->Address(handle.slot, layout_.slot_bytes()), from.data(), from.size()));
}

}  // namespace efla
