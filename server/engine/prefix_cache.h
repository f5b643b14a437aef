// States of prompts' beginnings, kept so that a prompt that begins like an earlier one need not compute that
// part again.
//
// A state is kept at a point of the prompt's 64-token grid. Prompts are cut on that grid anyway, so one that
// goes on from a kept state computes the same bits as one that began at its first token.
#ifndef EFLA_SERVER_ENGINE_PREFIX_CACHE_H_
#define EFLA_SERVER_ENGINE_PREFIX_CACHE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"
#include "model/state_pool.h"
#include "server/engine/resident_state.h"

namespace efla {

// A flat table: beginnings share no storage, so a tree would only be bookkeeping. What is found is decided by
// hashes of whole beginnings.
//
// What is kept: at most two states a prompt, where it parts from earlier ones (the deepest point up to which
// some earlier prompt was the same) and at its last grid point. A state is added when the prompt goes on from
// it in another slot, and is found by others from Publish on. Where there is no room, the state with the
// least value goes: the tokens that it has saved, its own length counted once, halved every few lookups.
//
// Any thread may call anything. States are let go of without the cache's lock.
class PrefixCache {
 public:
  // Stands for all of a prompt up to the end of a block, and for the salt. 256 bits of SHA-256: found by the
  // first half, verified by the second.
  struct BlockHash {
    std::array<uint64_t, 2> key{}, check{};
    friend bool operator==(const BlockHash&, const BlockHash&) = default;
  };
  // Of the blocks that leave at least one token of the prompt over: [(prompt - 1) / kChunkTokens].
  static std::vector<BlockHash> Hash(std::span<const TokenId> prompt, std::string_view salt);

  // `capacity`: states at most, >= 0.
  explicit PrefixCache(int capacity);
  ~PrefixCache();
  bool enabled() const { return capacity_ > 0; }

  struct Plan {
    int64_t position = 0;    // the prompt's tokens that need not be computed, a multiple of kChunkTokens
    ResidentStatePtr state;  // the state after them; null: none
    std::array<int64_t, 2>
        saves{};  // where the prompt's states are worth keeping, behind `position`; 0: none
  };
  // Where a prompt begins and what is to be kept of it. `use`: take a state, if there is one. Remembers the
  // prompt as seen.
  Plan Look(std::span<const BlockHash> blocks, bool use);

  // How many of the prompt's tokens may not have to be computed when its turn comes: what is kept, or has
  // been asked for before and so may be kept by then. Changes nothing.
  int64_t MayCover(std::span<const BlockHash> blocks) const;

  // The state after the first `position` tokens of a prompt, not to be found yet. The entry's id for the two
  // calls below; 0, keeping nothing, when there is one already or no room.
  uint64_t Add(const BlockHash& block, int64_t position, ResidentStatePtr state);
  // The state has proved good: others may use it. Nothing when it has been given back meanwhile.
  void Publish(const BlockHash& block, uint64_t id);
  // It has not: forgets it, unless published.
  void Drop(const BlockHash& block, uint64_t id);
  // Lets go of the least valuable state that nobody reads at the moment; false when there is none.
  bool GiveBack();
  // A slot of the pool that its states lie in; where that has none left, of one that is given back.
  absl::StatusOr<SlotHandle> AcquireSlot(StatePool& pool);

  struct Stats {
    uint64_t lookups = 0, hits = 0, hit_tokens = 0;  // with `use`
    int states = 0;                                  // held now, those not published among them
  };
  Stats stats() const;
  // INTERNAL when the table and the order of values disagree, or a state lies where it cannot.
  absl::Status CheckInvariants() const;

 private:
  using Key = std::array<uint64_t, 2>;
  struct KeyHash {
    size_t operator()(const Key& key) const { return static_cast<size_t>(key[0]); }
  };
  struct Entry {
    Key key;
    std::array<uint64_t, 2> check;
    int64_t position = 0;
    uint64_t id = 0;
    bool published = false;
    // log2 of the value, as it would be worth at the first lookup: values halve at one rate, so this order
    // never changes by itself.
    double rank = 0;
    ResidentStatePtr state;
  };

  // With mutex_ held.
  bool Holds(const BlockHash& block) const { return entries_.contains(block.key); }
  Entry* Find(const BlockHash& block, uint64_t id);
  double Rank(double value) const;
  void Reward(Entry& entry);
  bool Seen(const BlockHash& block) const;
  ResidentStatePtr Remove(Entry& entry);
  ResidentStatePtr RemoveLeast();

  const int capacity_;
  const double half_life_;  // lookups

  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<Key, Entry, KeyHash> entries_;
  std::map<std::pair<double, uint64_t>, Entry*> by_rank_;  // (rank, id)
  std::vector<uint64_t> seen_;  // blocks of earlier prompts: by one half of the key, the other half; lossy
  uint64_t clock_ = 0;          // lookups, for the values
  uint64_t next_id_ = 1;
  Stats stats_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_PREFIX_CACHE_H_
