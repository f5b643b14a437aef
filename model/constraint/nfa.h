// Expressions as nondeterministic automata over bytes.
#ifndef EFLA_MODEL_CONSTRAINT_NFA_H_
#define EFLA_MODEL_CONSTRAINT_NFA_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/constraint/code_points.h"
#include "model/constraint/expression.h"
#include "model/constraint/work_check.h"

namespace efla {

// INVALID_ARGUMENT: "is too large: its automaton has more than 8 nodes".
absl::Status AutomatonTooLarge(const char* what, size_t bound);

// A nondeterministic automaton, with edges that take nothing, a byte, or a rule. After an error, a bound that
// is passed or what the check says, it stays as it is and means nothing.
class Nfa {
 public:
  struct Edge {
    enum class Kind : uint8_t { kEmpty, kBytes, kRule };
    Kind kind = Kind::kEmpty;
    unsigned char first = 0, last = 0;  // kBytes
    int32_t rule = 0;                   // kRule
    int32_t to = 0;
    int32_t next = -1;  // of the same node
  };

  // Texts of `characters`. Both must outlive this.
  Nfa(const CodePointSet& characters, WorkCheck& work) : characters_(characters), work_(work) {}

  int32_t NewNode();
  // Adds the paths that `expression` matches, from the node `from` on; gives the node where they end. Nothing
  // leads back to `from`.
  int32_t Add(const Expression& expression, int32_t from);

  const absl::Status& status() const { return status_; }
  size_t size() const { return first_edge_.size(); }
  const std::vector<Edge>& edges() const { return edges_; }
  template <typename Visit>
  void ForEachEdge(int32_t node, Visit visit) const {
    for (int32_t i = first_edge_[static_cast<size_t>(node)]; i >= 0;
         i = edges_[static_cast<size_t>(i)].next) {
      visit(edges_[static_cast<size_t>(i)]);
    }
  }

 private:
  bool ok() const { return status_.ok(); }
  // Before that much is done: false after an error.
  bool Spend(size_t steps);
  void AddEdge(int32_t from, Edge edge);
  void AddEmpty(int32_t from, int32_t to) { AddEdge(from, {.kind = Edge::Kind::kEmpty, .to = to}); }
  int32_t AddText(std::string_view text, int32_t from);
  int32_t AddSet(const CodePointSet& set, int32_t from);
  int32_t AddRepeat(const Expression& repeat, int32_t from);
  int32_t AddLeading(const Expression& leading, int32_t from);
  int32_t AddMembers(const Expression& members, int32_t from);

  const CodePointSet& characters_;
  WorkCheck& work_;
  std::vector<int32_t> first_edge_;
  std::vector<Edge> edges_;
  size_t steps_ = 0;
  absl::Status status_;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_NFA_H_
