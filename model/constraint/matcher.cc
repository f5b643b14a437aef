#include "model/constraint/matcher.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace efla {
namespace {

constexpr size_t kMaxReadings = 32;
// Depth first, so that a way on is found long before this.
constexpr size_t kMaxVisited = 1024;
constexpr size_t kListedReadings = 16;  // up to so many are compared one by one
constexpr size_t kMaxIdleStacks = 4096;

}  // namespace

int32_t CallStacks::Push(int32_t state, int32_t below) {
  const auto [id, is_new] = ids_.try_emplace({state, below}, static_cast<int32_t>(nodes_.size()));
  if (is_new) nodes_.push_back({state, below, depth(below) + 1});
  return id->second;
}

void CallStacks::Truncate(size_t size) {
  for (; nodes_.size() > size; nodes_.pop_back()) ids_.erase({nodes_.back().state, nodes_.back().below});
}

StackMatcher::StackMatcher(std::shared_ptr<const CompiledConstraint> constraint, bool at_start)
    : constraint_(std::move(constraint)), automaton_(constraint_->automaton()), at_start_(at_start) {
  by_depth_.resize(static_cast<size_t>(constraint_->vocabulary().trie(false).max_depth) + 1);
  Settle({{automaton_.start(), CallStacks::kEmpty}});
}

bool StackMatcher::Fits(int32_t state, int32_t stack) const {
  const int32_t need = automaton_.need(state);
  return need <= automaton_.max_depth() && stacks_.depth(stack) + need <= automaton_.max_depth();
}

void StackMatcher::Reach(Reading reading, Readings& out) {
  if (out.size() >= kMaxVisited) return;
  const auto key = [](const Reading& r) {
    return uint64_t{static_cast<uint32_t>(r.state)} << 32 | static_cast<uint32_t>(r.stack);
  };
  if (out.size() < kListedReadings) {
    if (std::find(out.begin(), out.end(), reading) != out.end()) return;
  } else {
    if (seen_.empty()) {
      for (const Reading& earlier : out) seen_.insert(key(earlier));
    }
    if (!seen_.insert(key(reading)).second) return;
  }
  out.push_back(reading);
  for (const ByteAutomaton::Call& call : automaton_.calls(reading.state)) {
    int32_t stack = reading.stack;
    if (call.then != ByteAutomaton::kNone) {
      if (stacks_.depth(stack) >= automaton_.max_depth() || !Fits(call.then, stack)) continue;
      stack = stacks_.Push(call.then, stack);
    }
    if (Fits(call.start, stack)) Reach({call.start, stack}, out);
  }
  if (automaton_.accepts(reading.state) && reading.stack != CallStacks::kEmpty) {
    Reach({stacks_.state(reading.stack), stacks_.below(reading.stack)}, out);
  }
}

void StackMatcher::Expand(const Readings& readings, Readings& out) {
  out.clear();
  seen_.clear();
  for (const Reading& reading : readings) Reach(reading, out);
}

bool StackMatcher::Step(const Readings& expanded, unsigned char byte, Readings& next) const {
  next.clear();
  for (const Reading& reading : expanded) {
    const int32_t state = automaton_.Next(reading.state, byte);
    if (state == ByteAutomaton::kNone || !Fits(state, reading.stack)) continue;
    const Reading reached{state, reading.stack};
    if (std::find(next.begin(), next.end(), reached) != next.end()) continue;
    if (next.size() == kMaxReadings) break;
    next.push_back(reached);
  }
  return !next.empty();
}

void StackMatcher::Settle(Readings readings) {
  readings_ = std::move(readings);
  Expand(readings_, expanded_);
  can_end_ = can_go_on_ = false;
  for (const Reading& reading : expanded_) {
    can_end_ |= automaton_.accepts(reading.state) && reading.stack == CallStacks::kEmpty;
    const int32_t need = automaton_.need_after_byte(reading.state);
    can_go_on_ |=
        need != ByteAutomaton::kUnreachable && stacks_.depth(reading.stack) + need <= automaton_.max_depth();
  }
}

bool StackMatcher::Accept(TokenId token) {
  const std::string_view bytes = constraint_->vocabulary().Bytes(token, at_start_);
  if (bytes.empty()) return false;
  const size_t stacks_before = stacks_.size();
  Readings now = readings_;
  for (char byte : bytes) {
    Expand(now, expanded_);
    if (!Step(expanded_, static_cast<unsigned char>(byte), now)) {
      stacks_.Truncate(stacks_before);
      return false;
    }
  }
  at_start_ = false;
  if (stacks_.size() > kMaxIdleStacks) {  // keep those in use
    CallStacks kept;
    std::vector<int32_t> states;
    for (Reading& reading : now) {
      states.clear();
      for (int32_t s = reading.stack; s != CallStacks::kEmpty; s = stacks_.below(s))
        states.push_back(stacks_.state(s));
      reading.stack = CallStacks::kEmpty;
      for (auto state = states.rbegin(); state != states.rend(); ++state)
        reading.stack = kept.Push(*state, reading.stack);
    }
    stacks_ = std::move(kept);
  }
  Settle(std::move(now));
  return true;
}

void StackMatcher::Walk(const VocabularyTrie& trie, int32_t first, int32_t last, int depth,
                        const Readings& readings, TokenMask& mask) {
  Expand(readings, by_depth_[static_cast<size_t>(depth)]);
  for (int32_t node = first; node < last;) {
    const VocabularyTrie::Node& here = trie.nodes[static_cast<size_t>(node)];
    const auto at = static_cast<size_t>(here.depth);
    if (!Step(by_depth_[at - 1], here.byte, next_)) {
      node = here.end;
      continue;
    }
    for (TokenId token : trie.TokensAt(node)) mask[static_cast<size_t>(token) / 32] |= 1U << (token % 32);
    if (here.end > node + 1) Expand(next_, by_depth_[at]);
    ++node;
  }
}

TokenMask StackMatcher::ComputeMask() {
  const VocabularyTrie& trie = constraint_->vocabulary().trie(at_start_);
  const size_t stacks_before = stacks_.size();
  TokenMask mask;
  // What a state's tokens are does not depend on the open calls, as long as these leave room for all it
  // needs.
  const bool has_room =
      stacks_.depth(readings_.front().stack) + automaton_.max_need() <= automaton_.max_depth();
  if (at_start_ || readings_.size() > 1 || !has_room) {
    mask.resize(constraint_->vocabulary().mask_words());
    Walk(trie, 0, trie.size(), 0, readings_, mask);
  } else {
    const Reading reading = readings_.front();
    const auto of_state = constraint_->MaskOfState(reading.state, reading.stack == CallStacks::kEmpty);
    mask = of_state->mask;
    for (const StateMask::Exit& exit : of_state->exits) {
      const Readings here = {{exit.state, reading.stack}};
      if (exit.node < 0) {
        Walk(trie, 0, trie.size(), 0, here, mask);
      } else {
        const VocabularyTrie::Node& node = trie.nodes[static_cast<size_t>(exit.node)];
        Walk(trie, exit.node + 1, node.end, node.depth, here, mask);
      }
    }
  }
  stacks_.Truncate(stacks_before);
  return mask;
}

std::vector<int32_t> StackMatcher::Place() const {
  std::vector<int32_t> place;
  place.push_back(at_start_ ? 1 : 0);
  for (const Reading& reading : readings_) {
    place.push_back(reading.state);
    for (int32_t s = reading.stack; s != CallStacks::kEmpty; s = stacks_.below(s))
      place.push_back(stacks_.state(s));
    place.push_back(-1);
  }
  return place;
}

void StackMatcher::FillMask(std::span<uint32_t> mask) {
  EFLA_CHECK(mask.size() == constraint_->vocabulary().mask_words());
  const std::vector<int32_t> place = Place();
  std::shared_ptr<const TokenMask> known = constraint_->FindMask(place);
  if (known == nullptr) {
    known = std::make_shared<const TokenMask>(ComputeMask());
    constraint_->KeepMask(place, known);
  }
  std::copy(known->begin(), known->end(), mask.begin());
  if (!can_end_) return;
  for (TokenId token : constraint_->vocabulary().end_tokens())
    mask[static_cast<size_t>(token) / 32] |= 1U << (token % 32);
}

}  // namespace efla
