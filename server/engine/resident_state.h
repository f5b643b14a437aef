// A sequence's state that stays in the pool after its call has ended.
#ifndef EFLA_SERVER_ENGINE_RESIDENT_STATE_H_
#define EFLA_SERVER_ENGINE_RESIDENT_STATE_H_

#include <memory>

#include "model/state_pool.h"

namespace efla {

// Immutable: calls read its slot and write slots of their own, so any number of them may stand on it at once.
// The slot goes back to the pool with the last reference. Any thread; must not outlive the pool.
class ResidentState {
 public:
  // Takes over one reference to `slot`.
  ResidentState(StatePool& pool, SlotHandle slot) : pool_(pool), slot_(slot) {}
  ~ResidentState() { pool_.Release(slot_); }
  ResidentState(const ResidentState&) = delete;
  ResidentState& operator=(const ResidentState&) = delete;

  SlotHandle slot() const { return slot_; }
  bool IsIn(const StatePool& pool) const { return &pool == &pool_; }

 private:
  StatePool& pool_;
  const SlotHandle slot_;
};

using ResidentStatePtr = std::shared_ptr<const ResidentState>;

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_RESIDENT_STATE_H_
