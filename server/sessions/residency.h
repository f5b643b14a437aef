// Where states rest: a device slot, host memory, the local disk, a shared store; and how they move between
// these.
#ifndef EFLA_SERVER_SESSIONS_RESIDENCY_H_
#define EFLA_SERVER_SESSIONS_RESIDENCY_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/resident_state.h"
#include "server/sessions/context.h"
#include "server/sessions/host_buffer.h"
#include "server/sessions/session_store.h"
#include "server/sessions/snapshot.h"

namespace efla {

class Residency;

enum StoreIndex { kDiskStore = 0, kSharedStore = 1, kNumStores = 2 };

// One state and all the places that hold it now: at least one. The state itself never changes. Shared by the
// contexts that stand on it: heads, kept turns, marks and forks, which may differ in the tokens that wait.
class Residence : public std::enable_shared_from_this<Residence> {
 public:
  ~Residence();
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  const int64_t fed_tokens;    // at least 1
  const std::string made_for;  // a session's key, for messages; forks of it stand on this too

 private:
  friend class Residency;
  enum class Queue { kNone, kDevice, kHost };
  Residence(std::shared_ptr<Residency> residency, int64_t tokens, const std::string& session_id)
      : fed_tokens(tokens), made_for(session_id), residency_(std::move(residency)) {}

  const std::shared_ptr<Residency> residency_;
  std::mutex transfer_;  // held while the state moves; taken before Residency::mutex_

  // Guarded by Residency::mutex_.
  std::shared_ptr<const ContextTokens>
      base_;  // what the context had been when this was made; null: in the stores only
  ResidentStatePtr device_;
  std::shared_ptr<const HostBuffer> host_;
  std::string snapshot_id_;  // of the snapshot of base_ and the state; empty: none was ever made
  std::array<bool, kNumStores> stored_{};
  std::array<int, kNumStores> names_{};  // records that name the snapshot, as far as is known here
  std::array<Clock::time_point, kNumStores> loose_since_{};  // stored and without a name since then
  int pins_ = 0;
  Clock::time_point last_use_;
  absl::Status damage_;      // DATA_LOSS: no store has it whole, as far as was found out
  bool seen_whole_ = false;  // a store has had it whole
  // As booked in the totals and queues.
  Queue queue_ = Queue::kNone;
  std::list<Residence*>::iterator place_;
  bool booked_host_ = false, booked_anchored_ = false;
};
using ResidencePtr = std::shared_ptr<Residence>;

// Thread-safe. mutex_ is held for bookkeeping only: never during a copy, a store's call or an engine's call,
// and no other lock of the sessions is taken under it. Calls that move a state hold that state's transfer
// lock and no other, and none while they make room.
class Residency : public std::enable_shared_from_this<Residency> {
 public:
  struct Options {
    int64_t host_bytes = 0;
    std::chrono::milliseconds slot_wait{5'000};  // for a device slot, in real time
    bool allow_other_numerics = false;
    std::function<Clock::time_point()> now;
  };
  // The stores may be null. `engine` and the stores must outlive every call into this, and the engine's pool
  // every residence.
  static std::shared_ptr<Residency> Create(Engine& engine, SnapshotFormat format, SessionStore* disk,
                                           SessionStore* shared, const Options& options);

  // Called without locks when host memory is short of so many bytes and nothing in it has been stored: writes
  // or forgets states until there may be room. False: there is nothing it can do. Set once, before other
  // calls.
  void SetRelief(std::function<bool(int64_t bytes)> relief) { relief_ = std::move(relief); }

  // A state that a call has just computed. Here and below, `session_id` is Residence::made_for.
  ResidencePtr AddDevice(const std::string& session_id, ContextTokens base, ResidentStatePtr state);
  // An imported one. RESOURCE_EXHAUSTED: no host memory.
  absl::StatusOr<ResidencePtr> AddHost(const std::string& session_id, ContextTokens base, HostBuffer state);
  // The one that a record names: the same object for one id. DATA_LOSS when it is known to cover other
  // tokens.
  absl::StatusOr<ResidencePtr> FromRecord(const std::string& session_id, const std::string& snapshot_id,
                                          int64_t fed_tokens, StoreIndex store);

  struct Lifted {
    ResidentStatePtr state;  // keeps the slot while any copy of this pointer lives
    std::shared_ptr<const ContextTokens> base;
  };
  // To the device. RESOURCE_EXHAUSTED: no slot came free in slot_wait. DATA_LOSS: the snapshot is gone or
  // damaged.
  absl::StatusOr<Lifted> Lift(Residence& residence);
  // From a store into host memory; nothing where it is in memory already. RESOURCE_EXHAUSTED: no host memory.
  // DATA_LOSS as Lift.
  absl::Status LiftToHost(Residence& residence);
  // Off the device, into host memory (nothing else, where a store holds it and host memory is short).
  // RESOURCE_EXHAUSTED: no host memory.
  absl::Status Sink(Residence& residence);
  // Off the least recently used slots that nobody stands on, until `wanted` of them are free or none is left.
  // How many were freed.
  int SinkOldest(int wanted);
  // Likewise off all that have not been used for so long.
  void SinkIdle(std::chrono::milliseconds idle);
  // Sees to it that the store has the snapshot.
  absl::Status Store(Residence& residence, StoreIndex store);
  // The store is said to have lost the snapshot: it is written again when memory has it.
  void Recheck(Residence& residence, StoreIndex store);
  // Out of device and host memory where a store holds it under a record's name and it was not used for
  // `idle`.
  bool DropFromMemory(Residence& residence, std::chrono::milliseconds idle);
  struct State {
    std::shared_ptr<const ContextTokens> base;
    std::shared_ptr<const HostBuffer> bytes;
  };
  // A copy in host memory, wherever it rests.
  absl::StatusOr<State> Read(Residence& residence);

  // DATA_LOSS: it is known to be lost or damaged; a read that succeeds ends that.
  absl::Status Damage(const Residence& residence) const;
  // DATA_LOSS or FAILED_PRECONDITION: it cannot be used. Reads what only a store has and was never read or
  // written here; what the store cannot answer now is taken to be whole.
  absl::Status CheckWhole(Residence& residence);
  // Which session it was made for; empty: it is not known here.
  std::string SessionOf(const std::string& snapshot_id) const;
  // The store has been found not to have the snapshot.
  void MarkMissing(const std::string& snapshot_id, StoreIndex store);

  // A record that names the snapshot has been written, or names it no longer.
  void AddName(Residence& residence, StoreIndex store);
  void RemoveName(Residence& residence, StoreIndex store);
  // Only one record names it: the asking one's.
  bool HasOneName(Residence& residence, StoreIndex store) const;
  // The snapshot's id where the store holds it and will not soon drop it; else empty.
  std::string StoredId(Residence& residence, StoreIndex store) const;

  // The highest tier; kNone: it is lost.
  enum class Tier { kNone, kDevice, kHost, kDisk, kShared };
  Tier tier(const Residence& residence) const;
  bool IdleInMemory(const Residence& residence, std::chrono::milliseconds idle) const;
  // In memory only: it would be lost with this process.
  bool Anchored(const Residence& residence) const;

  // Whether the states that only memory holds leave room for another one: they must fit into host memory and
  // half of the device's slots, or they could not make way for running calls.
  bool HasRoom() const;
  int64_t state_bytes() const { return state_bytes_; }
  const SnapshotFormat& format() const { return format_; }

  struct Stats {
    int device = 0, host = 0, stored = 0, anchored = 0;  // residences by their highest tier; in memory only
    int64_t host_bytes = 0;
    uint64_t lifts_host = 0, lifts_disk = 0, lifts_shared = 0, sinks = 0, store_errors = 0;
    int64_t stored_bytes = 0;
  };
  Stats stats() const;
  void CountStored(int64_t bytes) { stored_bytes_ += bytes; }
  void CountStoreError() { ++store_errors_; }
  // INTERNAL, naming what does not agree.
  absl::Status CheckInvariants() const;

 private:
  friend class Residence;
  class PinnedState;
  Residency(Engine& engine, SnapshotFormat format, SessionStore* disk, SessionStore* shared,
            const Options& options);

  Clock::time_point Now() const { return options_.now ? options_.now() : Clock::now(); }

  // With mutex_ held.
  ResidencePtr Make(const std::string& session_id, int64_t fed_tokens);
  void Book(Residence& residence);
  void Touch(Residence& residence);
  bool StoredIn(const Residence& residence, int store) const;
  bool StoredSafely(const Residence& residence) const;
  bool FitsHost() const { return host_bytes_ + reserved_bytes_ + state_bytes_ <= options_.host_bytes; }

  // With mutex_ held: `residence` is in no place any more?
  void NoteIfLost(Residence& residence);

  // Without it.
  bool Pin(Residence& residence, Clock::time_point deadline);
  void Unpin(Residence& residence);
  absl::StatusOr<Lifted> LiftPinned(Residence& residence, Clock::time_point deadline);
  std::vector<ResidencePtr> Sinkable(size_t limit, Clock::time_point not_used_since);
  bool TryReserve();
  bool Reserve();
  void Unreserve();
  absl::Status HostIsFull() const;

  // Without it, with the residence's transfer lock.
  absl::Status SinkReserved(Residence& residence);
  absl::StatusOr<State> ReadHeld(Residence& residence);
  absl::StatusOr<State> Fetch(Residence& residence);

  Engine& engine_;
  const SnapshotFormat format_;
  const std::array<SessionStore*, kNumStores> stores_;
  const Options options_;
  const int64_t state_bytes_;
  const int total_slots_;
  std::function<bool(int64_t)> relief_;

  mutable std::mutex mutex_;  // guards what follows, down to by_id_
  std::condition_variable unpinned_;
  std::list<Residence*> device_queue_,
      host_queue_;  // with a slot; with host bytes alone: least recently used first
  std::unordered_set<Residence*> all_;
  int anchored_ = 0;
  int pinned_ = 0;              // residences with pins
  int64_t host_bytes_ = 0;      // of the states in host memory
  int64_t reserved_bytes_ = 0;  // for states on their way there
  std::unordered_map<std::string, Residence*> by_id_;

  std::atomic<uint64_t> lifts_host_{0}, lifts_disk_{0}, lifts_shared_{0}, sinks_{0}, store_errors_{0};
  std::atomic<int64_t> stored_bytes_{0};
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_RESIDENCY_H_
