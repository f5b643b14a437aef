#include "model/constraint/nfa.h"

#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr size_t kMaxNodes = 1 << 18;
constexpr size_t kMaxEdges = 1 << 20;  // 16 MB
constexpr size_t kMaxSteps = 1 << 21;  // expressions and ranges of characters that are written down

}  // namespace

absl::Status AutomatonTooLarge(const char* what, size_t bound) {
  return absl::InvalidArgumentError(
      absl::StrFormat("is too large: its automaton has more than %d %s", bound, what));
}

bool Nfa::Spend(size_t steps) {
  if (!ok()) return false;
  steps_ += steps;
  status_ = steps_ > kMaxSteps ? AutomatonTooLarge("steps", kMaxSteps) : work_.Add(steps);
  return ok();
}

int32_t Nfa::NewNode() {
  if (ok() && first_edge_.size() >= kMaxNodes) status_ = AutomatonTooLarge("nodes", kMaxNodes);
  if (!ok()) return 0;
  first_edge_.push_back(-1);
  return static_cast<int32_t>(first_edge_.size()) - 1;
}

void Nfa::AddEdge(int32_t from, Edge edge) {
  if (ok() && edges_.size() >= kMaxEdges) status_ = AutomatonTooLarge("edges", kMaxEdges);
  if (ok()) status_ = work_.Add(1);
  if (!ok()) return;
  edge.next = std::exchange(first_edge_[static_cast<size_t>(from)], static_cast<int32_t>(edges_.size()));
  edges_.push_back(edge);
}

int32_t Nfa::Add(const Expression& expression, int32_t from) {
  if (!Spend(1)) return from;
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
    case Expression::Kind::kLeading:
      return AddLeading(expression, from);
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

int32_t Nfa::AddText(std::string_view text, int32_t from) {
  while (!text.empty() && ok()) {
    const char32_t c = TakeCodePoint(text);
    from = AddSet(CodePointSet({{c, c}}), from);
  }
  return from;
}

int32_t Nfa::AddSet(const CodePointSet& set, int32_t from) {
  if (!Spend(set.ranges().size())) return from;
  const int32_t end = NewNode();
  std::map<std::tuple<int, int, int32_t>, int32_t> tails;  // the nodes before (first, last, node after)
  const CodePointSet usable = set.Intersection(characters_);
  for (const CodePointRange& range : usable.ranges()) {
    for (const ByteRanges& bytes : Utf8Ranges(range)) {
      int32_t to = end;
      for (int i = bytes.length - 1; i > 0 && ok(); --i) {
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
    if (!ok()) break;
  }
  return end;
}

int32_t Nfa::AddRepeat(const Expression& repeat, int32_t from) {
  const Expression& part = *repeat.parts.front();
  for (int64_t i = 0; i < repeat.min && ok(); ++i) from = Add(part, from);
  if (repeat.max == kUnbounded) {
    const int32_t loop = NewNode();
    AddEmpty(from, loop);
    AddEmpty(Add(part, loop), loop);
    const int32_t end = NewNode();
    AddEmpty(loop, end);
    return end;
  }
  const int32_t end = NewNode();
  for (int64_t i = repeat.min; i < repeat.max && ok(); ++i) {
    AddEmpty(from, end);
    from = Add(part, from);
  }
  AddEmpty(from, end);
  return end;
}

int32_t Nfa::AddLeading(const Expression& leading, int32_t from) {
  const int32_t end = NewNode();
  for (size_t i = 0; i < leading.parts.size() && ok(); ++i) {
    if (static_cast<int64_t>(i) >= leading.min) AddEmpty(from, end);
    from = Add(*leading.parts[i], from);
  }
  AddEmpty(from, end);
  return end;
}

// A member's opening is written once for all that may come next, and only behind it they part: so the nodes
// of a state are few while a separator and its spaces are read.
int32_t Nfa::AddMembers(const Expression& members, int32_t from) {
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
  for (size_t i = 0; i < num_parts && ok(); ++i) {
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

}  // namespace efla
