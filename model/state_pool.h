// Every live sequence's state: one page a slot, allocated once. This class keeps the books on the host; the
// device sees only slot indices.
#ifndef EFLA_MODEL_STATE_POOL_H_
#define EFLA_MODEL_STATE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "model/config.h"

namespace efla {

// Where things lie in a slot, in floats. Layer l: recurrent state [heads, d_k, d_v] at
// l * recurrent_floats; convolution state [conv_size - 1, q|k|v channels] at
// num_layers * recurrent_floats + l * conv_floats. A slot is padded to a multiple of 64 KiB.
struct StateLayout {
  int num_layers = 0;
  int64_t recurrent_floats = 0;  // a layer
  int64_t conv_floats = 0;       // a layer
  int64_t slot_floats = 0;
  static StateLayout Of(const ModelConfig& config);
  int64_t state_bytes() const;  // without the padding
  int64_t slot_bytes() const { return slot_floats * 4; }
};

// A reference to a slot. The generation changes whenever the slot is freed, so a stale handle is found out.
struct SlotHandle {
  int32_t slot = -1;
  uint32_t generation = 0;
  friend bool operator==(const SlotHandle&, const SlotHandle&) = default;
};

// Slot 0 is all zero and only read: a new sequence reads it and writes its own slot. Slot 1 takes the writes
// of padding rows. Neither is ever handed out. Any thread may call any method at any time, but for the
// destructor.
class StatePool {
 public:
  static constexpr int32_t kZeroSlot = 0;
  static constexpr int32_t kSinkSlot = 1;
  static constexpr int32_t kFirstSlot = 2;

  // `num_slots` usable slots beside the reserved two. RESOURCE_EXHAUSTED, saying how many slots would fit,
  // when the device lacks the memory. `poison` fills freed slots with NaN (tests, debugging).
  static absl::StatusOr<std::unique_ptr<StatePool>> Create(Device& device, const ModelConfig& config,
                                                           int num_slots, bool poison);
  ~StatePool();

  // A free slot with one reference, contents undefined (a new sequence reads kZeroSlot first).
  // RESOURCE_EXHAUSTED when all are taken.
  absl::StatusOr<SlotHandle> Acquire();
  // One more reference: the slot is shared and must not be written until it has a single reference again.
  void AddReference(SlotHandle handle);
  // Gives one reference back; the slot is free with the last. The device's work on it must be done, not only
  // enqueued: the slot's next owner may write it from the host at once.
  void Release(SlotHandle handle);
  // Called after a slot has become free, on the thread that freed it; must be quick and must not release
  // slots. Null: none. Returns when a call of the one before it is no longer under way.
  void SetFreedCallback(std::function<void()> callback);
  bool IsShared(SlotHandle handle) const;
  // False for handles of freed slots.
  bool IsLive(SlotHandle handle) const;

  // State of one layer, for the device operations.
  StateView View(int layer) const;
  const StateLayout& layout() const { return layout_; }

  struct Counts {
    int total = 0, live = 0, shared = 0,
        free = 0;  // live: one reference; shared: more. They add up to total.
  };
  Counts counts() const;
  // INTERNAL when the books do not balance: live + shared + free = total, no slot in two places, and slot 0
  // (when `read_device`) still zero.
  absl::Status CheckInvariants(bool read_device = false) const;

  // Copies a state to or from the host (state_bytes, without the padding); blocks until it is done and holds
  // up no step. The caller has a reference. No step that is under way may write the slot, nor touch it in
  // CopyIn, which needs the only reference. The device's errors.
  absl::Status CopyOut(SlotHandle handle, std::span<std::byte> to) const;
  absl::Status CopyIn(SlotHandle handle, std::span<const std::byte> from);

 private:
  struct Impl;
  explicit StatePool(std::unique_ptr<Impl> impl, const StateLayout& layout);
  absl::Status CheckBooks() const;
  std::unique_ptr<Impl> impl_;
  StateLayout layout_;
};

}  // namespace efla

#endif  // EFLA_MODEL_STATE_POOL_H_
