#include "model/constraint/vocabulary.h"

#include <algorithm>
#include <bitset>

#include "model/tokenizer.h"
#include "model/utf8.h"

namespace efla {
namespace {

// Longer tokens are left out, which no vocabulary in use has.
constexpr size_t kMaxTokenBytes = 4096;

bool OccursInUtf8(int byte) { return byte < 0xC0 || (byte >= 0xC2 && byte <= 0xF4); }

VocabularyTrie MakeTrie(const std::vector<std::string_view>& bytes) {
  std::vector<TokenId> order;
  for (size_t id = 0; id < bytes.size(); ++id) {
    if (!bytes[id].empty()) order.push_back(static_cast<TokenId>(id));
  }
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) {
    return bytes[static_cast<size_t>(a)] < bytes[static_cast<size_t>(b)];
  });
  VocabularyTrie trie;
  std::vector<int32_t> path;  // nodes of the token before
  std::string_view before;
  const auto close = [&](size_t depth) {
    for (; path.size() > depth; path.pop_back()) {
      trie.nodes[static_cast<size_t>(path.back())].end = static_cast<int32_t>(trie.nodes.size());
    }
  };
  for (TokenId id : order) {
    const std::string_view text = bytes[static_cast<size_t>(id)];
    const auto differs = std::mismatch(text.begin(), text.end(), before.begin(), before.end()).first;
    close(static_cast<size_t>(differs - text.begin()));
    for (size_t i = path.size(); i < text.size(); ++i) {
      path.push_back(static_cast<int32_t>(trie.nodes.size()));
      trie.nodes.push_back({.byte = static_cast<unsigned char>(text[i]),
                            .depth = static_cast<int16_t>(i + 1),
                            .first_token = static_cast<int32_t>(trie.tokens.size())});
    }
    trie.tokens.push_back(id);
    trie.max_depth = std::max(trie.max_depth, static_cast<int>(text.size()));
    before = text;
  }
  close(0);
  trie.nodes.push_back({.first_token = static_cast<int32_t>(trie.tokens.size())});
  return trie;
}

}  // namespace

std::span<const TokenId> VocabularyTrie::TokensAt(int32_t node) const {
  const auto begin = static_cast<size_t>(nodes[static_cast<size_t>(node)].first_token);
  const auto end = static_cast<size_t>(nodes[static_cast<size_t>(node) + 1].first_token);
  return std::span(tokens).subspan(begin, end - begin);
}

ConstraintVocabulary::ConstraintVocabulary(const Tokenizer& tokenizer, std::span<const TokenId> end_tokens)
    : vocab_size_(tokenizer.vocab_size()) {
  for (TokenId id : end_tokens) {
    if (id >= 0 && id < vocab_size_) end_tokens_.push_back(id);
  }
  const auto num_pieces = static_cast<TokenId>(vocab_size_);
  std::bitset<256> single;
  std::vector<CodePointRange> characters;
  const auto usable = [&](TokenId id) {
    const std::string_view bytes = tokenizer.PieceBytes(id, false);
    const bool ends = std::find(end_tokens_.begin(), end_tokens_.end(), id) != end_tokens_.end();
    return !ends && !tokenizer.is_control(id) && !bytes.empty() && bytes.size() <= kMaxTokenBytes;
  };
  for (TokenId id = 0; id < num_pieces; ++id) {
    if (!usable(id)) continue;
    std::string_view bytes = tokenizer.PieceBytes(id, false);
    if (bytes.size() == 1) single.set(static_cast<unsigned char>(bytes.front()));
    if (FindInvalidUtf8(bytes)) continue;
    const char32_t c = TakeCodePoint(bytes);
    if (bytes.empty()) characters.push_back({c, c});
  }
  bool every_byte = true;
  for (int byte = 0; byte < 256; ++byte)
    every_byte &= single.test(static_cast<size_t>(byte)) || !OccursInUtf8(byte);
  characters_ = every_byte ? CodePointSet::All() : CodePointSet(std::move(characters));

  for (std::vector<Place>& places : places_) places.resize(static_cast<size_t>(num_pieces));
  for (TokenId id = 0; id < num_pieces; ++id) {
    const std::string_view bytes = tokenizer.PieceBytes(id, false);
    if (!usable(id) || (!every_byte && FindInvalidUtf8(bytes))) continue;
    const size_t dropped = bytes.size() - tokenizer.PieceBytes(id, true).size();
    const Place place{static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(bytes.size())};
    places_[0][static_cast<size_t>(id)] = place;
    places_[1][static_cast<size_t>(id)] = {place.begin + static_cast<uint32_t>(dropped),
                                           place.bytes - static_cast<uint32_t>(dropped)};
    text_ += bytes;
  }
  for (const bool at_start : {false, true}) {
    std::vector<std::string_view> bytes;
    for (TokenId id = 0; id < num_pieces; ++id) bytes.push_back(Bytes(id, at_start));
    (at_start ? starting_ : continuing_) = MakeTrie(bytes);
  }
}

std::string_view ConstraintVocabulary::Bytes(TokenId token, bool at_start) const {
  const std::vector<Place>& places = places_[at_start ? 1 : 0];
  if (token < 0 || static_cast<size_t>(token) >= places.size()) return {};
  const Place& place = places[static_cast<size_t>(token)];
  return std::string_view(text_).substr(place.begin, place.bytes);
}

std::shared_ptr<const ConstraintVocabulary> MakeConstraintVocabulary(const Tokenizer& tokenizer,
                                                                     std::span<const TokenId> end_tokens) {
  return std::make_shared<const ConstraintVocabulary>(tokenizer, end_tokens);
}

}  // namespace efla
