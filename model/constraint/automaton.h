// Rules as automata over bytes that call each other.
#ifndef EFLA_MODEL_CONSTRAINT_AUTOMATON_H_
#define EFLA_MODEL_CONSTRAINT_AUTOMATON_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "model/constraint/code_points.h"
#include "model/constraint/expression.h"
#include "model/constraint/work_check.h"

namespace efla {

// One deterministic automaton a rule, all in one table. A state may be left by a byte, by a call (the called
// rule's automaton runs, then the caller goes on at `then`), or, where it accepts, by returning to the
// caller.
//
// Every state left in it can be gone on from to the end: need(state) is how many calls must at least be open
// at once for that, beside those that are open already. A place whose open calls + need() are at most
// max_depth() can always be finished within the bound.
class ByteAutomaton {
 public:
  struct Call {
    int32_t start = 0;  // the called rule's first state
    int32_t then = 0;   // -1: the caller ends where the called rule does, and nothing need be remembered
  };
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kUnreachable = std::numeric_limits<int32_t>::max();

  // Keeps to texts of `characters`. INVALID_ARGUMENT for left recursion, for a constraint that nothing meets,
  // and for one that is too large, naming the bound. Ways that can never be finished are left out.
  // An error of `work`'s check ends it.
  static absl::StatusOr<ByteAutomaton> Compile(Grammar grammar, const CodePointSet& characters,
                                               WorkCheck& work);

  int32_t start() const { return start_; }
  int max_depth() const { return max_depth_; }
  int32_t num_states() const { return static_cast<int32_t>(need_.size()); }
  size_t memory_bytes() const;
  // kNone: there is no way on.
  int32_t Next(int32_t state, unsigned char byte) const {
    return table_[static_cast<size_t>(state) * num_classes_ + class_of_[byte]];
  }
  bool accepts(int32_t state) const { return accepts_[static_cast<size_t>(state)] != 0; }
  std::span<const Call> calls(int32_t state) const {
    const auto begin = static_cast<size_t>(first_call_[static_cast<size_t>(state)]);
    const auto end = static_cast<size_t>(first_call_[static_cast<size_t>(state) + 1]);
    return std::span(calls_).subspan(begin, end - begin);
  }
  int32_t need(int32_t state) const { return need_[static_cast<size_t>(state)]; }
  int32_t max_need() const { return max_need_; }  // of the states that can be gone on from
  // The smallest need() of the states that a byte leads to; kUnreachable where none does.
  int32_t need_after_byte(int32_t state) const { return need_after_byte_[static_cast<size_t>(state)]; }

 private:
  friend class AutomatonCompiler;

  int32_t start_ = 0;
  int max_depth_ = 0;
  int32_t max_need_ = 0;
  size_t num_classes_ = 0;  // of bytes that no state tells apart
  std::array<uint16_t, 256> class_of_ = {};
  std::vector<int32_t> table_;  // [states, classes]
  std::vector<uint8_t> accepts_;
  std::vector<int32_t> first_call_;  // [states + 1]
  std::vector<Call> calls_;
  std::vector<int32_t> need_, need_after_byte_;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_AUTOMATON_H_
