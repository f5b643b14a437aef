// A constraint as an automaton and a vocabulary, with the masks computed so far.
#ifndef EFLA_MODEL_CONSTRAINT_COMPILED_CONSTRAINT_H_
#define EFLA_MODEL_CONSTRAINT_COMPILED_CONSTRAINT_H_

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "model/constraint/automaton.h"
#include "model/constraint/constraint.h"
#include "model/constraint/vocabulary.h"

namespace efla {

using TokenMask = std::vector<uint32_t>;

// What tokens do in a state of the automaton, whatever calls are open.
struct StateMask {
  TokenMask mask;  // of the tokens that stay in the state's rule
  // Where a token may go on by a call or a return: from `state`, after the trie's node `node`. Node -1: at
  // the token's beginning.
  struct Exit {
    int32_t node, state;
  };
  std::vector<Exit> exits;
};

// The last values used, up to a number of bytes. One thread at a time.
template <typename Key, typename Value>
class LruCache {
 public:
  explicit LruCache(size_t max_bytes) : max_bytes_(max_bytes) {}

  std::shared_ptr<const Value> Find(const Key& key) {
    const auto found = places_.find(key);
    if (found == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->value;
  }
  // The last one stays, however large it is.
  void Insert(const Key& key, std::shared_ptr<const Value> value, size_t bytes) {
    if (places_.contains(key)) return;  // another thread was faster
    entries_.push_front({key, std::move(value), bytes});
    places_[key] = entries_.begin();
    for (bytes_ += bytes; bytes_ > max_bytes_ && entries_.size() > 1; entries_.pop_back()) {
      bytes_ -= entries_.back().bytes;
      places_.erase(entries_.back().key);
    }
  }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Value> value;
    size_t bytes;
  };
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::list<Entry> entries_;  // last used first
  absl::flat_hash_map<Key, typename std::list<Entry>::iterator> places_;
};

class CompiledConstraint final : public Constraint, public std::enable_shared_from_this<CompiledConstraint> {
 public:
  CompiledConstraint(ByteAutomaton automaton, std::shared_ptr<const ConstraintVocabulary> vocabulary);

  std::unique_ptr<ConstraintMatcher> NewMatcher(bool at_start) const override;
  size_t max_memory_bytes() const;  // what it may grow to, matchers apart

  const ByteAutomaton& automaton() const { return automaton_; }
  const ConstraintVocabulary& vocabulary() const { return *vocabulary_; }

  // Of a text that goes on. `is_outermost`: no call is open, so that accepting leads nowhere.
  std::shared_ptr<const StateMask> MaskOfState(int32_t state, bool is_outermost) const;
  // Masks without end tokens by place; null where none is kept.
  std::shared_ptr<const TokenMask> FindMask(const std::vector<int32_t>& place) const;
  void KeepMask(const std::vector<int32_t>& place, std::shared_ptr<const TokenMask> mask) const;

 private:
  StateMask ComputeStateMask(int32_t state, bool is_outermost) const;

  const ByteAutomaton automaton_;
  const std::shared_ptr<const ConstraintVocabulary> vocabulary_;
  mutable std::mutex mutex_;  // guards the caches
  mutable LruCache<int64_t, StateMask> state_masks_;
  mutable LruCache<std::vector<int32_t>, TokenMask> masks_;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_COMPILED_CONSTRAINT_H_
