#include "model/text_stream.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "kernels/check.h"

namespace efla {

// The trie of all stop strings. Nodes keep their children as a list: stop strings are few, so lists are
// short, and 64 KiB of stop bytes cost a node each instead of a table each.
struct StopMatcher::Automaton {
  struct Node {
    int32_t first_child = -1, next_sibling = -1;
    int32_t failure = 0;  // the longest proper suffix that is a node too
    int32_t depth = 0;    // bytes from the root: the longest suffix of the input that is a prefix of a stop
    int32_t stop = -1;    // the longest stop that ends here
    unsigned char byte = 0;
  };
  std::vector<Node> nodes = std::vector<Node>(1);
  std::vector<int32_t> stop_bytes;
  std::array<int32_t, 256> root_child;

  int32_t Child(int32_t node, unsigned char byte) const {
    if (node == 0) return root_child[byte];
    int32_t child = nodes[node].first_child;
    while (child >= 0 && nodes[child].byte != byte) child = nodes[child].next_sibling;
    return child;
  }

  int32_t Step(int32_t node, char c) const {
    const auto byte = static_cast<unsigned char>(c);
    for (;; node = nodes[node].failure) {
      const int32_t child = Child(node, byte);
      if (child >= 0) return child;
      if (node == 0) return 0;
    }
  }

  explicit Automaton(const std::vector<std::string>& stops) {
    root_child.fill(-1);
    for (size_t i = 0; i < stops.size(); ++i) {
      EFLA_CHECK(!stops[i].empty());
      stop_bytes.push_back(static_cast<int32_t>(stops[i].size()));
      int32_t node = 0;
      for (char c : stops[i]) node = ChildOrNew(node, static_cast<unsigned char>(c));
      if (nodes[node].stop < 0) nodes[node].stop = static_cast<int32_t>(i);
    }
    std::vector<int32_t> queue = {0};  // breadth first: a failure link points to a shallower node
    for (size_t at = 0; at < queue.size(); ++at) {
      const int32_t parent = queue[at];
      for (int32_t child = nodes[parent].first_child; child >= 0; child = nodes[child].next_sibling) {
        Node& node = nodes[child];
        node.failure = parent == 0 ? 0 : Step(nodes[parent].failure, static_cast<char>(node.byte));
        if (node.stop < 0) node.stop = nodes[node.failure].stop;
        queue.push_back(child);
      }
    }
  }

  int32_t ChildOrNew(int32_t parent, unsigned char byte) {
    const int32_t found = Child(parent, byte);
    if (found >= 0) return found;
    const auto child = static_cast<int32_t>(nodes.size());
    Node node;
    node.byte = byte;
    node.depth = nodes[parent].depth + 1;
    node.next_sibling = nodes[parent].first_child;
    nodes.push_back(node);
    nodes[parent].first_child = child;
    if (parent == 0) root_child[byte] = child;
    return child;
  }
};

StopMatcher::StopMatcher(const std::vector<std::string>& stops)
    : automaton_(stops.empty() ? nullptr : std::make_shared<const Automaton>(stops)) {}

std::optional<StopMatcher::Match> StopMatcher::Feed(std::string_view bytes) {
  if (automaton_ == nullptr) return std::nullopt;
  for (size_t i = 0; i < bytes.size(); ++i) {
    node_ = automaton_->Step(node_, bytes[i]);
    const int32_t stop = automaton_->nodes[node_].stop;
    if (stop >= 0) return Match{stop, i + 1, static_cast<size_t>(automaton_->stop_bytes[stop])};
  }
  return std::nullopt;
}

size_t StopMatcher::held() const { return HeldAfter({}); }

size_t StopMatcher::HeldAfter(std::string_view bytes) const {
  if (automaton_ == nullptr) return 0;
  int32_t node = node_;
  for (char c : bytes) node = automaton_->Step(node, c);
  return static_cast<size_t>(automaton_->nodes[node].depth);
}

TextStream::TextStream(const Tokenizer* tokenizer, const std::vector<std::string>& stops, bool continues,
                       bool include_stop, bool skip_special_tokens)
    : tokenizer_(tokenizer),
      at_start_(!continues),
      include_stop_(include_stop),
      skip_special_tokens_(skip_special_tokens),
      stops_(stops) {}

TextStream::Push TextStream::Add(TokenId id) {
  EFLA_CHECK(!ended_);
  Push push;
  std::string_view bytes;
  if (tokenizer_ != nullptr) {
    bytes = tokenizer_->PieceBytes(id, at_start_);
    // A first piece that is the dummy-prefix space alone adds nothing, and yet the text has begun.
    if (at_start_ && !tokenizer_->PieceBytes(id, false).empty()) at_start_ = false;
    if (!skip_special_tokens_ && tokenizer_->is_control(id)) bytes = tokenizer_->Piece(id);
  }
  tokens_.push_back({bytes_in_ + bytes.size(), 0});
  std::string character;
  for (size_t i = 0; i < bytes.size() && !push.stopped;) {
    const bool taken = repair_.Push(bytes[i], character);
    if (taken) {
      ++bytes_in_;
      ++i;
    }
    if (!character.empty()) Take(std::exchange(character, {}), push);
  }
  if (!push.stopped) Release(text_out_ + held_.size() - HeldBytes(), push);
  return push;
}

TextStream::Push TextStream::Echo(TokenId id) {
  echo_end_ = std::numeric_limits<size_t>::max();
  Push push = Add(id);
  echo_end_ = bytes_in_;
  return push;
}

TextStream::Push TextStream::Finish() {
  Push push;
  if (ended_) return push;
  std::string character;
  repair_.Finish(character);
  if (!character.empty()) Take(character, push);
  if (!push.stopped) Release(text_out_ + held_.size(), push);
  ended_ = true;
  return push;
}

void TextStream::Take(std::string_view character, Push& push) {
  held_ += character;
  const size_t text_end = text_out_ + held_.size();
  const size_t settled = bytes_in_ - repair_.pending().size();
  for (; placed_ < tokens_.size() && tokens_[placed_].bytes_end <= settled; ++placed_) {
    tokens_[placed_].text_end = text_end;
  }
  if (settled <= echo_end_) return;
  const std::optional<StopMatcher::Match> match = stops_.Feed(character);
  if (!match) return;
  push.stopped = true;
  push.stop_index = match->stop_index;
  held_.resize(held_.size() - (character.size() - match->end_in_input));
  if (!include_stop_) held_.resize(held_.size() - match->stop_bytes);
  push.text += held_;
  push.tokens_released = static_cast<int>(tokens_.size());
  text_out_ += held_.size();
  held_.clear();
  tokens_.clear();
  ended_ = true;
}

void TextStream::Release(size_t text_end, Push& push) {
  const size_t settled = bytes_in_ - repair_.pending().size();
  for (; placed_ < tokens_.size() && tokens_[placed_].bytes_end <= settled; ++placed_) {
    tokens_[placed_].text_end = text_out_ + held_.size();  // tokens without bytes
  }
  const size_t bytes = text_end - text_out_;
  push.text.append(held_, 0, bytes);
  held_.erase(0, bytes);
  text_out_ = text_end;
  while (placed_ > 0 && tokens_.front().text_end <= text_out_) {
    tokens_.pop_front();
    --placed_;
    ++push.tokens_released;
  }
}

// The unfinished character will turn into a character that begins with its bytes, or into U+FFFD: text before
// it is held only if a stop may go on with one of the two.
size_t TextStream::HeldBytes() const {
  const std::string_view pending = repair_.pending();
  if (pending.empty()) return stops_.held();
  const auto before = [&](std::string_view next) {
    const size_t held = stops_.HeldAfter(next);
    return held - std::min(held, next.size());
  };
  return std::max(before(pending), before(kReplacementCharacter));
}

}  // namespace efla
