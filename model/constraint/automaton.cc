#include "model/constraint/automaton.h"

#include <algorithm>
#include <bitset>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/str_format.h"
#include "model/constraint/nfa.h"
#include "model/strict_json.h"

namespace efla {
namespace {

constexpr size_t kMaxStates = 1 << 16;
constexpr size_t kMaxTableEntries = 1 << 21;  // 8 MB
constexpr size_t kMaxCalls = 1 << 18;         // of rules, by all states
constexpr size_t kMaxVisits = 1 << 23;        // of nodes while the automata are made deterministic

// Of what messages tell.
constexpr size_t kMaxShownName = 60;
constexpr size_t kMaxShownRules = 6;

}  // namespace

class AutomatonCompiler {
 public:
  AutomatonCompiler(Grammar grammar, const CodePointSet& characters, WorkCheck& work)
      : grammar_(std::move(grammar)), work_(work), nfa_(std::in_place, characters, work) {}

  absl::StatusOr<ByteAutomaton> Compile() {
    out_.max_depth_ = grammar_.max_depth;
    if (absl::Status status = MakeNondeterministic(); !status.ok()) return status;
    FindByteClasses();
    if (absl::Status status = MakeDeterministic(); !status.ok()) return status;
    // They take more memory than what comes now.
    nfa_.reset();
    ids_ = {};
    sets_ = {};
    if (absl::Status status = FindNeeds(); !status.ok()) return status;
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

  absl::Status MakeNondeterministic() {
    std::vector<int32_t> exits;
    for (Grammar::Rule& rule : grammar_.rules) {
      const int32_t entry = nfa_->NewNode();
      entries_.push_back(entry);
      exits.push_back(nfa_->Add(*rule.body, entry));
      if (!nfa_->status().ok()) return nfa_->status();
      rule.body = nullptr;  // for its memory
    }
    is_exit_.resize(nfa_->size());
    for (int32_t exit : exits) is_exit_[static_cast<size_t>(exit)] = 1;
    stamps_.resize(nfa_->size());
    return absl::OkStatus();
  }

  void FindByteClasses() {
    std::bitset<257> begins;
    begins.set(0);
    for (const Nfa::Edge& edge : nfa_->edges()) {
      if (edge.kind != Nfa::Edge::Kind::kBytes) continue;
      begins.set(edge.first);
      begins.set(size_t{edge.last} + 1);
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      if (begins.test(byte)) ++out_.num_classes_;
      out_.class_of_[byte] = static_cast<uint16_t>(out_.num_classes_ - 1);
    }
  }

  // Makes `closure_` the nodes reached from `nodes` without taking anything, as far as they have a way out
  // that takes something or are an exit: sorted, so that equal sets are equal states.
  void FindClosure(std::span<const int32_t> nodes) {
    ++stamp_;
    closure_.clear();
    const auto visit = [&](int32_t node) {
      if (std::exchange(stamps_[static_cast<size_t>(node)], stamp_) != stamp_) visiting_.push_back(node);
    };
    for (int32_t node : nodes) visit(node);
    while (!visiting_.empty()) {
      const int32_t node = visiting_.back();
      visiting_.pop_back();
      bool takes = is_exit_[static_cast<size_t>(node)] != 0;
      ++visits_;
      nfa_->ForEachEdge(node, [&](const Nfa::Edge& edge) {
        ++visits_;
        if (edge.kind == Nfa::Edge::Kind::kEmpty) {
          visit(edge.to);
        } else {
          takes = true;
        }
      });
      if (takes) closure_.push_back(node);
    }
    std::sort(closure_.begin(), closure_.end());
  }

  // Whether the bounds hold so far and the constraint is still wanted.
  absl::Status CheckBounds() {
    if (sets_.size() > kMaxStates) return AutomatonTooLarge("states", kMaxStates);
    if (sets_.size() * out_.num_classes_ > kMaxTableEntries)
      return AutomatonTooLarge("table entries", kMaxTableEntries);
    if (num_calls_ > kMaxCalls) return AutomatonTooLarge("calls", kMaxCalls);
    if (visits_ > kMaxVisits) return AutomatonTooLarge("node visits", kMaxVisits);
    return work_.Add(visits_ - std::exchange(visits_told_, visits_));
  }

  // The state of what is reached from `nodes`.
  absl::Status FindState(std::span<const int32_t> nodes, int32_t& state) {
    FindClosure(nodes);
    const auto [found, is_new] = ids_.try_emplace(closure_, static_cast<int32_t>(sets_.size()));
    if (is_new) sets_.push_back(&found->first);
    state = found->second;
    return CheckBounds();
  }

  absl::Status MakeDeterministic() {
    for (const int32_t& entry : entries_) {
      if (absl::Status status = FindState({&entry, 1}, starts_.emplace_back()); !status.ok()) return status;
    }
    by_class_.resize(out_.num_classes_);
    for (size_t state = 0; state < sets_.size(); ++state) {
      if (absl::Status status = FindWaysOn(*sets_[state]); !status.ok()) return status;
      if (absl::Status status = AddRow(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Sorts what the nodes of a state lead to into `by_class_` and `by_rule_`.
  absl::Status FindWaysOn(const std::vector<int32_t>& nodes) {
    for (std::vector<int32_t>& targets : by_class_) targets.clear();
    by_rule_.clear();
    bool accepts = false;
    for (int32_t node : nodes) {
      accepts |= is_exit_[static_cast<size_t>(node)] != 0;
      nfa_->ForEachEdge(node, [&](const Nfa::Edge& edge) {
        ++visits_;
        if (edge.kind == Nfa::Edge::Kind::kRule) by_rule_[edge.rule].push_back(edge.to);
        if (edge.kind != Nfa::Edge::Kind::kBytes) return;
        const size_t last = out_.class_of_[edge.last];
        for (size_t c = out_.class_of_[edge.first]; c <= last; ++c) by_class_[c].push_back(edge.to);
        visits_ += last - out_.class_of_[edge.first];
      });
      if (absl::Status status = CheckBounds(); !status.ok()) return status;
    }
    out_.accepts_.push_back(accepts ? 1 : 0);
    return absl::OkStatus();
  }

  absl::Status AddRow() {
    const size_t row = out_.table_.size();
    out_.table_.resize(row + out_.num_classes_, ByteAutomaton::kNone);
    for (size_t c = 0; c < out_.num_classes_; ++c) {
      if (by_class_[c].empty()) continue;
      if (c > 0 && by_class_[c] == by_class_[c - 1]) {
        out_.table_[row + c] = out_.table_[row + c - 1];
      } else if (absl::Status status = FindState(by_class_[c], out_.table_[row + c]); !status.ok()) {
        return status;
      }
    }
    std::vector<RuleCall>& calls = rule_calls_.emplace_back();
    for (const auto& [rule, targets] : by_rule_) {
      RuleCall& call = calls.emplace_back();
      call.rule = rule;
      ++num_calls_;
      if (absl::Status status = FindState(targets, call.then); !status.ok()) return status;
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

  struct Caller {
    int32_t state, start, then;
  };
  // What leads to a state: states by a byte, and callers by the called rule's start or by where they go on.
  struct WaysTo {
    std::vector<std::vector<int32_t>> by_byte;
    std::vector<std::vector<Caller>> by_start, by_then;
  };
  absl::Status FindWaysTo(WaysTo& ways) {
    const size_t num_states = rule_calls_.size();
    ways.by_byte.resize(num_states);
    ways.by_start.resize(num_states);
    ways.by_then.resize(num_states);
    for (size_t state = 0; state < num_states; ++state) {
      const auto from = static_cast<int32_t>(state);
      int32_t last = ByteAutomaton::kNone;
      for (size_t c = 0; c < out_.num_classes_; ++c) {
        const int32_t next = out_.table_[state * out_.num_classes_ + c];
        if (next != ByteAutomaton::kNone && next != last)
          ways.by_byte[static_cast<size_t>(next)].push_back(from);
        last = next;
      }
      for (const RuleCall& call : rule_calls_[state]) {
        const Caller caller{from, starts_[static_cast<size_t>(call.rule)], call.then};
        ways.by_start[static_cast<size_t>(caller.start)].push_back(caller);
        ways.by_then[static_cast<size_t>(caller.then)].push_back(caller);
      }
      const size_t steps = out_.num_classes_ + rule_calls_[state].size();
      if (absl::Status status = work_.Add(steps); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The smallest need first: a state's need is known as soon as those of a way on are.
  absl::Status FindNeeds() {
    WaysTo ways;
    if (absl::Status status = FindWaysTo(ways); !status.ok()) return status;
    const size_t num_states = rule_calls_.size();
    for (size_t state = 0; state < num_states; ++state)
      tail_.push_back(EndsAtOnce(static_cast<int32_t>(state)) ? 1 : 0);
    need_.assign(num_states, ByteAutomaton::kUnreachable);
    std::map<int32_t, std::vector<int32_t>> found;  // states, by need
    const auto find = [&](int32_t state, int32_t need) {
      if (need_[static_cast<size_t>(state)] == ByteAutomaton::kUnreachable) found[need].push_back(state);
    };
    for (size_t state = 0; state < num_states; ++state) {
      if (out_.accepts_[state] != 0) find(static_cast<int32_t>(state), 0);
    }
    while (!found.empty()) {
      const auto least = found.begin();
      if (least->second.empty()) {
        found.erase(least);
        continue;
      }
      const int32_t need = least->first;
      const auto state = static_cast<size_t>(least->second.back());
      least->second.pop_back();
      if (std::exchange(need_[state], std::min(need, need_[state])) != ByteAutomaton::kUnreachable) continue;
      for (int32_t from : ways.by_byte[state]) find(from, need);
      const auto call = [&](const Caller& caller) {
        const int32_t inside = need_[static_cast<size_t>(caller.start)];
        const int32_t after = need_[static_cast<size_t>(caller.then)];
        if (inside == ByteAutomaton::kUnreachable || after == ByteAutomaton::kUnreachable) return;
        const bool tail = tail_[static_cast<size_t>(caller.then)] != 0;
        find(caller.state, tail ? inside : std::max(inside + 1, after));
      };
      for (const Caller& caller : ways.by_start[state]) call(caller);
      for (const Caller& caller : ways.by_then[state]) call(caller);
      const size_t steps =
          1 + ways.by_byte[state].size() + ways.by_start[state].size() + ways.by_then[state].size();
      if (absl::Status status = work_.Add(steps); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // By state: whether its rule may end there without a byte.
  std::vector<uint8_t> StatesThatMayEndAtOnce() const {
    const size_t num_states = rule_calls_.size();
    std::vector<uint8_t> empty = out_.accepts_;
    struct MayBe {
      int32_t state, other;  // it may once the other of the called rule's start and of `then` may
    };
    std::vector<std::vector<MayBe>> callers(num_states);
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
      for (const MayBe& caller : callers[static_cast<size_t>(state)]) {
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
    for (size_t state = 0; state < rule_calls_.size(); ++state) {
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

  Grammar grammar_;  // its rules lose their bodies
  WorkCheck& work_;
  std::optional<Nfa> nfa_;
  std::vector<int32_t> entries_;  // nodes, by rule
  std::vector<uint8_t> is_exit_;  // by node
  size_t visits_ = 0, visits_told_ = 0, num_calls_ = 0;

  absl::node_hash_map<std::vector<int32_t>, int32_t> ids_;  // states, by nodes
  std::vector<const std::vector<int32_t>*> sets_;           // nodes, by state
  std::vector<std::vector<RuleCall>> rule_calls_;           // by state
  std::vector<int32_t> starts_;                             // states, by rule
  std::vector<int32_t> need_;
  std::vector<uint8_t> tail_;  // by state: EndsAtOnce
  ByteAutomaton out_;
  // Scratch, kept for its memory.
  std::vector<uint32_t> stamps_;  // by node: the last closure that visited it
  uint32_t stamp_ = 0;
  std::vector<int32_t> visiting_, closure_;
  std::vector<std::vector<int32_t>> by_class_;
  std::map<int32_t, std::vector<int32_t>> by_rule_;
};

size_t ByteAutomaton::memory_bytes() const {
  return (table_.size() + first_call_.size() + need_.size() + need_after_byte_.size()) * sizeof(int32_t) +
         accepts_.size() + calls_.size() * sizeof(Call);
}

absl::StatusOr<ByteAutomaton> ByteAutomaton::Compile(Grammar grammar, const CodePointSet& characters,
                                                     WorkCheck& work) {
  return AutomatonCompiler(std::move(grammar), characters, work).Compile();
}

}  // namespace efla
