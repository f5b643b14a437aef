// A place in a constraint: the ways in which what has been written may be read.
#ifndef EFLA_MODEL_CONSTRAINT_MATCHER_H_
#define EFLA_MODEL_CONSTRAINT_MATCHER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "model/constraint/compiled_constraint.h"
#include "model/constraint/constraint.h"

namespace efla {

// Open calls as linked lists that share their ends. Equal lists have equal ids.
class CallStacks {
 public:
  static constexpr int32_t kEmpty = -1;

  // `state` is where the caller goes on.
  int32_t Push(int32_t state, int32_t below);
  int32_t state(int32_t stack) const { return nodes_[static_cast<size_t>(stack)].state; }
  int32_t below(int32_t stack) const { return nodes_[static_cast<size_t>(stack)].below; }
  int32_t depth(int32_t stack) const {
    return stack == kEmpty ? 0 : nodes_[static_cast<size_t>(stack)].depth;
  }
  size_t size() const { return nodes_.size(); }
  // Forgets the stacks made since size() was that.
  void Truncate(size_t size);

 private:
  struct Node {
    int32_t state, below, depth;
  };
  std::vector<Node> nodes_;
  absl::flat_hash_map<std::pair<int32_t, int32_t>, int32_t> ids_;
};

class StackMatcher final : public ConstraintMatcher {
 public:
  StackMatcher(std::shared_ptr<const CompiledConstraint> constraint, bool at_start);

  void FillMask(std::span<uint32_t> mask) override;
  bool Accept(TokenId token) override;
  bool CanEnd() const override { return can_end_; }
  bool MustEnd() const override { return can_end_ && !can_go_on_; }

 private:
  struct Reading {
    int32_t state, stack;
    friend bool operator==(const Reading&, const Reading&) = default;
  };
  // Each one can be finished. Several where the constraint is ambiguous so far; beyond kMaxReadings the later
  // ones are dropped, by Accept and FillMask alike, which forbids some texts and never allows a wrong one.
  using Readings = std::vector<Reading>;

  // `readings` and what they reach by calls and returns.
  void Expand(const Readings& readings, Readings& out);
  void Reach(Reading reading, Readings& out);
  // What expanded readings become with `byte`; false when nothing. `next` is another object.
  bool Step(const Readings& expanded, unsigned char byte, Readings& next) const;
  bool Fits(int32_t state, int32_t stack) const;
  void Settle(Readings readings);
  // Allows the tokens among the trie's nodes [first, last), children of a node of `depth` where `readings`
  // are.
  void Walk(const VocabularyTrie& trie, int32_t first, int32_t last, int depth, const Readings& readings,
            TokenMask& mask);
  TokenMask ComputeMask();
  std::vector<int32_t> Place() const;

  const std::shared_ptr<const CompiledConstraint> constraint_;
  const ByteAutomaton& automaton_;
  bool at_start_;
  CallStacks stacks_;
  Readings readings_;
  bool can_end_ = false, can_go_on_ = false;
  // Scratch, kept for its memory.
  absl::flat_hash_set<uint64_t> seen_;
  Readings expanded_, next_;
  std::vector<Readings> by_depth_;  // expanded
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_MATCHER_H_
