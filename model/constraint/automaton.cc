#include "model/constraint/automaton.h"

#include <algorithm>
#include <bitset>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "model/strict_json.h"

namespace efla {
namespace {

// Together these keep a compilation below some tenths of a second and 100 MB.
constexpr size_t kMaxNodes = 1 << 18;  // of the nondeterministic automata
constexpr size_t kMaxSteps = 1 << 20;  // expressions visited while writing these down
constexpr size_t kMaxStates = 1 << 16;
constexpr size_t kMaxTableEntries = 1 << 21;  // 8 MB
constexpr size_t kMaxWork = 1 << 23;          // nodes visited while making them deterministic
constexpr size_t kWorkBetweenChecks = 1 << 16;

// Of what messages tell.
constexpr size_t kMaxShownName = 60;
constexpr size_t kMaxShownRules = 6;

absl::Status TooLarge(const char* what, size_t bound) {
  return absl::InvalidArgumentError(
      absl::StrFormat("is too large: its automaton has more than %d %s", bound, what));
}

// A nondeterministic automaton, with edges that take nothing, a byte, or a rule.
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

  explicit Nfa(const CodePointSet& characters) : characters_(characters) {}

  int32_t NewNode() {
    if (first_edge_.size() >= kMaxNodes) {
      overflow_ = true;
      return 0;
    }
    first_edge_.push_back(-1);
    return static_cast<int32_t>(first_edge_.size()) - 1;
  }

  // Adds the paths that `expression` matches, from the node `from` on; gives the node where they end. Nothing
  // leads back to `from`.
  int32_t Add(const Expression& expression, int32_t from) {
    if (++steps_ > kMaxSteps) overflow_ = true;
    if (overflow_) return from;
    switch (expression.kind) {
      case Expression::Kind::kSet:
        return AddSet(expression.set, from);
      case Expression::Kind::kLiteral:
        return AddText(expression.literal, from);
      case Expression::Kind::kConcat: {
        for (const ExpressionPtr& part : expression.parts) from = Add(*part, from);
        return from;
      }
      case Expression::Kind::kAlternate: {
        const int32_t end = NewNode();
        for (const ExpressionPtr& part : expression.parts) AddEmpty(Add(*part, from), end);
        return end;
      }
      case Expression::Kind::kRepeat:
        return AddRepeat(expression, from);
      case Expression::Kind::kRule: {
        const int32_t end = NewNode();
        AddEdge(from, {.kind = Edge::Kind::kRule, .rule = expression.rule, .to = end});
        return end;
      }
      case Expression::Kind::kMembers:
        return AddMembers(expression, from);
    }
    return from;
  }

  bool overflow() const { return overflow_; }
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
  void AddEdge(int32_t from, Edge edge) {
    if (overflow_) return;
    edge.next = std::exchange(first_edge_[static_cast<size_t>(from)], static_cast<int32_t>(edges_.size()));
    edges_.push_back(edge);
  }
  void AddEmpty(int32_t from, int32_t to) { AddEdge(from, {.kind = Edge::Kind::kEmpty, .to = to}); }

  int32_t AddText(std::string_view text, int32_t from) {
    while (!text.empty()) {
      const char32_t c = TakeCodePoint(text);
      from = AddSet(CodePointSet({{c, c}}), from);
    }
    return from;
  }

  int32_t AddSet(const CodePointSet& set, int32_t from) {
    const int32_t end = NewNode();
    std::map<std::tuple<int, int, int32_t>, int32_t> tails;  // the nodes before (first, last, node after)
    const CodePointSet usable = set.Intersection(characters_);
    for (const CodePointRange& range : usable.ranges()) {
      for (const ByteRanges& bytes : Utf8Ranges(range)) {
        int32_t to = end;
        for (int i = bytes.length - 1; i > 0 && !overflow_; --i) {
          const auto [tail, is_new] = tails.try_emplace({bytes.first[i], bytes.last[i], to}, 0);
          if (is_new) {
            tail->second = NewNode();
            AddEdge(tail->second,
                    {.kind = Edge::Kind::kBytes, .first = bytes.first[i], .last = bytes.last[i], .to = to});
          }
          to = tail->second;
        }
        AddEdge(from, {.kind = Edge::Kind::kBytes, .first = bytes.first[0], .last = bytes.last[0], .to = to});
      }
    }
    return end;
  }

  int32_t AddRepeat(const Expression& repeat, int32_t from) {
    const Expression& part = *repeat.parts.front();
    for (int64_t i = 0; i < repeat.min && !overflow_; ++i) from = Add(part, from);
    if (repeat.max == kUnbounded) {
      const int32_t loop = NewNode();
      AddEmpty(from, loop);
      AddEmpty(Add(part, loop), loop);
      const int32_t end = NewNode();
      AddEmpty(loop, end);
      return end;
    }
    const int32_t end = NewNode();
    for (int64_t i = repeat.min; i < repeat.max && !overflow_; ++i) {
      AddEmpty(from, end);
      from = Add(part, from);
    }
    AddEmpty(from, end);
    return end;
  }

  // A member's opening is written once for all that may come next, and only behind it they part: so the nodes
  // of a state are few while a separator and its spaces are read.
  int32_t AddMembers(const Expression& members, int32_t from) {
    const size_t num_parts = members.parts.size();
    const int32_t end = NewNode();
    const int32_t extra = members.extra == nullptr ? -1 : NewNode();
    // By part: where it begins behind the opening or, if it may be left out, a later one.
    std::vector<int32_t> heads;
    for (size_t i = 0; i < num_parts; ++i) heads.push_back(NewNode());
    size_t num_needed = num_parts;  // the parts behind them may all be left out
    while (num_needed > 0 && !members.required[num_needed - 1]) --num_needed;
    // `next`: the first part that may come.
    const auto begin_member = [&](int32_t node, size_t next) {
      if (next < num_parts) AddEmpty(AddText(members.opening, node), heads[next]);
      if (extra >= 0 && next >= num_needed) AddEmpty(node, extra);
    };
    begin_member(from, 0);
    if (num_needed == 0) AddEmpty(from, end);
    for (size_t i = 0; i < num_parts && !overflow_; ++i) {
      const size_t next = i + 1;
      if (!members.required[i] && next < num_parts) AddEmpty(heads[i], heads[next]);
      const int32_t after = Add(*members.parts[i], heads[i]);
      if (next >= num_needed) AddEmpty(after, end);
      if (next < num_parts || extra >= 0) begin_member(Add(*members.separator, after), next);
    }
    if (extra >= 0) {
      const int32_t after = Add(*members.extra, extra);
      AddEmpty(after, end);
      AddEmpty(Add(*members.separator, after), extra);
    }
    return end;
  }

  const CodePointSet& characters_;
  std::vector<int32_t> first_edge_;
  std::vector<Edge> edges_;
  size_t steps_ = 0;
  bool overflow_ = false;
};

}  // namespace

class AutomatonCompiler {
 public:
  AutomatonCompiler(const Grammar& grammar, const CodePointSet& characters,
                    const std::function<absl::Status()>& check)
      : grammar_(grammar), check_(check), nfa_(characters) {}

  absl::StatusOr<ByteAutomaton> Compile() {
    out_.max_depth_ = grammar_.max_depth;
    for (const Grammar::Rule& rule : grammar_.rules) {
      const int32_t entry = nfa_.NewNode();
      entries_.push_back(entry);
      exits_.push_back(nfa_.Add(*rule.body, entry));
      if (nfa_.overflow()) return TooLarge("nodes", kMaxNodes);
    }
    is_exit_.resize(nfa_.size());
    for (int32_t exit : exits_) is_exit_[static_cast<size_t>(exit)] = 1;
    FindByteClasses();
    if (absl::Status status = MakeDeterministic(); !status.ok()) return status;
    FindNeeds();
    if (absl::Status status = CheckLeftRecursion(); !status.ok()) return status;
    for (size_t rule = 0; rule < starts_.size() && grammar_.every_rule_must_end; ++rule) {
      if (need_[static_cast<size_t>(starts_[rule])] != ByteAutomaton::kUnreachable) continue;
      return absl::InvalidArgumentError(absl::StrFormat(
          "%srule %s can never be finished with this vocabulary's characters", Place(rule), ShownName(rule)));
    }
    out_.start_ = starts_[static_cast<size_t>(grammar_.root)];
    const int32_t need = need_[static_cast<size_t>(out_.start_)];
    if (need == ByteAutomaton::kUnreachable) return NothingMeetsIt();
    if (need > grammar_.max_depth) {
      return absl::InvalidArgumentError(
          absl::StrFormat("needs %d rules open at once; the limit is %d", need, grammar_.max_depth));
    }
    Finish();
    return std::move(out_);
  }

 private:
  struct RuleCall {
    int32_t rule = 0, then = 0;
  };

  void FindByteClasses() {
    std::bitset<257> begins;
    begins.set(0);
    for (const Nfa::Edge& edge : nfa_.edges()) {
      if (edge.kind != Nfa::Edge::Kind::kBytes) continue;
      begins.set(edge.first);
      begins.set(size_t{edge.last} + 1);
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      if (begins.test(byte)) ++out_.num_classes_;
      out_.class_of_[byte] = static_cast<uint16_t>(out_.num_classes_ - 1);
    }
  }

  // The nodes reached from `nodes` without taking anything, as far as they have a way out that takes
  // something or are an exit: sorted, so that equal sets are equal states.
  std::vector<int32_t> Closure(std::span<const int32_t> nodes) {
    ++stamp_;
    stamps_.resize(nfa_.size());
    std::vector<int32_t> kept;
    const auto visit = [&](int32_t node) {
      if (std::exchange(stamps_[static_cast<size_t>(node)], stamp_) != stamp_) visiting_.push_back(node);
    };
    for (int32_t node : nodes) visit(node);
    while (!visiting_.empty()) {
      const int32_t node = visiting_.back();
      visiting_.pop_back();
      bool takes = is_exit_[static_cast<size_t>(node)] != 0;
      nfa_.ForEachEdge(node, [&](const Nfa::Edge& edge) {
        ++work_;
        if (edge.kind == Nfa::Edge::Kind::kEmpty) {
          visit(edge.to);
        } else {
          takes = true;
        }
      });
      if (takes) kept.push_back(node);
    }
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  int32_t StateOf(std::span<const int32_t> nodes) {
    std::vector<int32_t> closure = Closure(nodes);
    const auto [found, is_new] = ids_.try_emplace(closure, static_cast<int32_t>(sets_.size()));
    if (is_new) sets_.push_back(std::move(closure));
    return found->second;
  }

  absl::Status MakeDeterministic() {
    for (const int32_t& entry : entries_) starts_.push_back(StateOf({&entry, 1}));
    size_t work_at_check = 0;
    const size_t num_classes = out_.num_classes_;
    std::vector<std::vector<int32_t>> by_class(num_classes);
    std::map<int32_t, std::vector<int32_t>> by_rule;
    for (size_t state = 0; state < sets_.size(); ++state) {
      if (sets_.size() > kMaxStates) return TooLarge("states", kMaxStates);
      if (sets_.size() * num_classes > kMaxTableEntries) return TooLarge("table entries", kMaxTableEntries);
      if (work_ > kMaxWork) return TooLarge("node visits", kMaxWork);
      if (check_ != nullptr && work_ - work_at_check >= kWorkBetweenChecks) {
        work_at_check = work_;
        if (absl::Status status = check_(); !status.ok()) return status;
      }
      bool accepts = false;
      for (int32_t node : sets_[state]) {
        accepts |= is_exit_[static_cast<size_t>(node)] != 0;
        nfa_.ForEachEdge(node, [&](const Nfa::Edge& edge) {
          if (edge.kind == Nfa::Edge::Kind::kRule) by_rule[edge.rule].push_back(edge.to);
          if (edge.kind != Nfa::Edge::Kind::kBytes) return;
          const size_t last = out_.class_of_[edge.last];
          for (size_t c = out_.class_of_[edge.first]; c <= last; ++c) by_class[c].push_back(edge.to);
          work_ += last - out_.class_of_[edge.first] + 1;
        });
      }
      out_.accepts_.push_back(accepts ? 1 : 0);
      const size_t row = out_.table_.size();
      out_.table_.resize(row + num_classes, ByteAutomaton::kNone);
      for (size_t c = 0; c < num_classes; ++c) {
        if (by_class[c].empty()) continue;
        out_.table_[row + c] =
            c > 0 && by_class[c] == by_class[c - 1] ? out_.table_[row + c - 1] : StateOf(by_class[c]);
      }
      for (std::vector<int32_t>& targets : by_class) targets.clear();
      std::vector<RuleCall>& calls = rule_calls_.emplace_back();
      for (auto& [rule, targets] : by_rule) calls.push_back({rule, StateOf(targets)});
      by_rule.clear();
    }
    return absl::OkStatus();
  }

  bool EndsAtOnce(int32_t state) const {
    const auto row =
        out_.table_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(state) * out_.num_classes_);
    return out_.accepts_[static_cast<size_t>(state)] != 0 &&
           rule_calls_[static_cast<size_t>(state)].empty() &&
           std::all_of(row, row + static_cast<ptrdiff_t>(out_.num_classes_),
                       [](int32_t next) { return next == ByteAutomaton::kNone; });
  }

  // The smallest need first: a state's need is known as soon as those of a way on are.
  void FindNeeds() {
    const size_t num_states = sets_.size();
    for (size_t state = 0; state < num_states; ++state)
      tail_.push_back(EndsAtOnce(static_cast<int32_t>(state)) ? 1 : 0);
    need_.assign(num_states, ByteAutomaton::kUnreachable);
    std::vector<std::vector<int32_t>> before(num_states);  // states that a byte leads here from
    struct Caller {
      int32_t state, start, then;
    };
    std::vector<std::vector<Caller>> by_start(num_states), by_then(num_states);
    for (size_t state = 0; state < num_states; ++state) {
      int32_t last = ByteAutomaton::kNone;
      for (size_t c = 0; c < out_.num_classes_; ++c) {
        const int32_t next = out_.table_[state * out_.num_classes_ + c];
        if (next != ByteAutomaton::kNone && next != last)
          before[static_cast<size_t>(next)].push_back(static_cast<int32_t>(state));
        last = next;
      }
      for (const RuleCall& call : rule_calls_[state]) {
        const Caller caller{static_cast<int32_t>(state), starts_[static_cast<size_t>(call.rule)], call.then};
        by_start[static_cast<size_t>(caller.start)].push_back(caller);
        by_then[static_cast<size_t>(caller.then)].push_back(caller);
      }
    }
    using Entry = std::pair<int32_t, int32_t>;  // need, state
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
    for (size_t state = 0; state < num_states; ++state) {
      if (out_.accepts_[state] != 0) queue.push({0, static_cast<int32_t>(state)});
    }
    while (!queue.empty()) {
      const auto [need, state] = queue.top();
      queue.pop();
      int32_t& known = need_[static_cast<size_t>(state)];
      if (known != ByteAutomaton::kUnreachable) continue;
      known = need;
      for (int32_t from : before[static_cast<size_t>(state)]) queue.push({need, from});
      const auto call = [&](const Caller& caller) {
        const int32_t inside = need_[static_cast<size_t>(caller.start)];
        const int32_t after = need_[static_cast<size_t>(caller.then)];
        if (inside == ByteAutomaton::kUnreachable || after == ByteAutomaton::kUnreachable) return;
        const bool tail = tail_[static_cast<size_t>(caller.then)] != 0;
        queue.push({tail ? inside : std::max(inside + 1, after), caller.state});
      };
      for (const Caller& caller : by_start[static_cast<size_t>(state)]) call(caller);
      for (const Caller& caller : by_then[static_cast<size_t>(state)]) call(caller);
    }
  }

  // By state: whether its rule may end there without a byte.
  std::vector<uint8_t> StatesThatMayEndAtOnce() const {
    const size_t num_states = sets_.size();
    std::vector<uint8_t> empty = out_.accepts_;
    struct Caller {
      int32_t state, other;  // it may once the other of the called rule's start and of `then` may
    };
    std::vector<std::vector<Caller>> callers(num_states);
    std::vector<int32_t> found;
    for (size_t state = 0; state < num_states; ++state) {
      if (empty[state] != 0) found.push_back(static_cast<int32_t>(state));
      for (const RuleCall& call : rule_calls_[state]) {
        const int32_t start = starts_[static_cast<size_t>(call.rule)];
        callers[static_cast<size_t>(start)].push_back({static_cast<int32_t>(state), call.then});
        callers[static_cast<size_t>(call.then)].push_back({static_cast<int32_t>(state), start});
      }
    }
    while (!found.empty()) {
      const int32_t state = found.back();
      found.pop_back();
      for (const Caller& caller : callers[static_cast<size_t>(state)]) {
        if (empty[static_cast<size_t>(caller.other)] == 0) continue;
        if (std::exchange(empty[static_cast<size_t>(caller.state)], 1) == 0) found.push_back(caller.state);
      }
    }
    return empty;
  }

  // A rule that comes to itself without a byte would call itself for ever.
  absl::Status CheckLeftRecursion() {
    const std::vector<uint8_t> empty = StatesThatMayEndAtOnce();
    // Depth first over the rules that a rule may begin with.
    enum : uint8_t { kNew, kOpen, kDone };
    std::vector<uint8_t> colour(grammar_.rules.size(), kNew);
    struct Visit {
      int32_t rule;
      std::vector<int32_t> begins_with;
    };
    const auto begins_with = [&](int32_t rule) {
      std::vector<int32_t> rules;
      std::vector<int32_t> states = {starts_[static_cast<size_t>(rule)]};
      absl::flat_hash_set<int32_t> seen(states.begin(), states.end());
      while (!states.empty()) {
        const int32_t state = states.back();
        states.pop_back();
        for (const RuleCall& call : rule_calls_[static_cast<size_t>(state)]) {
          rules.push_back(call.rule);
          const bool skips = empty[static_cast<size_t>(starts_[static_cast<size_t>(call.rule)])] != 0;
          if (skips && seen.insert(call.then).second) states.push_back(call.then);
        }
      }
      return rules;
    };
    for (size_t root = 0; root < grammar_.rules.size(); ++root) {
      if (colour[root] != kNew) continue;
      std::vector<Visit> path = {{static_cast<int32_t>(root), begins_with(static_cast<int32_t>(root))}};
      colour[root] = kOpen;
      while (!path.empty()) {
        Visit& visit = path.back();
        if (visit.begins_with.empty()) {
          colour[static_cast<size_t>(visit.rule)] = kDone;
          path.pop_back();
          continue;
        }
        const int32_t next = visit.begins_with.back();
        visit.begins_with.pop_back();
        if (colour[static_cast<size_t>(next)] == kDone) continue;
        if (colour[static_cast<size_t>(next)] == kOpen) {
          const auto first =
              std::find_if(path.begin(), path.end(), [&](const Visit& v) { return v.rule == next; });
          std::string cycle;
          for (auto it = first; it != path.end(); ++it) {
            if (static_cast<size_t>(it - first) == kMaxShownRules) {
              cycle += absl::StrFormat("%d more -> ", path.end() - it);
              break;
            }
            cycle += ShownName(static_cast<size_t>(it->rule)) + " -> ";
          }
          const auto rule = static_cast<size_t>(next);
          return absl::InvalidArgumentError(absl::StrFormat("%sleft recursion: %s%s begins with itself",
                                                            Place(rule), cycle, ShownName(rule)));
        }
        colour[static_cast<size_t>(next)] = kOpen;
        path.push_back({next, begins_with(next)});
      }
    }
    return absl::OkStatus();
  }

  std::string ShownName(size_t rule) const { return Printable(grammar_.rules[rule].name, kMaxShownName); }
  std::string Place(size_t rule) const {
    const int64_t line = grammar_.rules[rule].line;
    return line == 0 ? "" : absl::StrFormat("line %d: ", line);
  }

  absl::Status NothingMeetsIt() const {
    return absl::InvalidArgumentError(
        "cannot be met: no text of this vocabulary's characters is what it asks for");
  }

  // Leaves out what cannot be gone on from.
  void Finish() {
    const auto dead = [&](int32_t state) {
      return need_[static_cast<size_t>(state)] == ByteAutomaton::kUnreachable;
    };
    for (size_t state = 0; state < sets_.size(); ++state) {
      int32_t after_byte = ByteAutomaton::kUnreachable;
      for (size_t c = 0; c < out_.num_classes_; ++c) {
        int32_t& next = out_.table_[state * out_.num_classes_ + c];
        if (next == ByteAutomaton::kNone) continue;
        if (dead(next)) {
          next = ByteAutomaton::kNone;
        } else {
          after_byte = std::min(after_byte, need_[static_cast<size_t>(next)]);
        }
      }
      out_.need_after_byte_.push_back(after_byte);
    }
    for (int32_t need : need_) {
      if (need != ByteAutomaton::kUnreachable) out_.max_need_ = std::max(out_.max_need_, need);
    }
    out_.first_call_.push_back(0);
    for (const std::vector<RuleCall>& calls : rule_calls_) {
      for (const RuleCall& call : calls) {
        const int32_t start = starts_[static_cast<size_t>(call.rule)];
        if (dead(start) || dead(call.then)) continue;
        out_.calls_.push_back(
            {start, tail_[static_cast<size_t>(call.then)] != 0 ? ByteAutomaton::kNone : call.then});
      }
      out_.first_call_.push_back(static_cast<int32_t>(out_.calls_.size()));
    }
    out_.need_ = std::move(need_);
  }

  const Grammar& grammar_;
  const std::function<absl::Status()>& check_;
  Nfa nfa_;
  std::vector<int32_t> entries_, exits_;  // nodes, by rule
  std::vector<uint8_t> is_exit_;          // by node
  std::vector<uint32_t> stamps_;          // by node: the last closure that visited it
  std::vector<int32_t> visiting_;
  uint32_t stamp_ = 0;
  size_t work_ = 0;

  absl::flat_hash_map<std::vector<int32_t>, int32_t> ids_;
  std::vector<std::vector<int32_t>> sets_;         // nodes, by state
  std::vector<std::vector<RuleCall>> rule_calls_;  // by state
  std::vector<int32_t> starts_;                    // states, by rule
  std::vector<int32_t> need_;
  std::vector<uint8_t> tail_;  // by state: EndsAtOnce
  ByteAutomaton out_;
};

size_t ByteAutomaton::memory_bytes() const {
  return (table_.size() + first_call_.size() + need_.size() + need_after_byte_.size()) * sizeof(int32_t) +
         accepts_.size() + calls_.size() * sizeof(Call);
}

absl::StatusOr<ByteAutomaton> ByteAutomaton::Compile(const Grammar& grammar, const CodePointSet& characters,
                                                     const std::function<absl::Status()>& check) {
  return AutomatonCompiler(grammar, characters, check).Compile();
}

}  // namespace efla
