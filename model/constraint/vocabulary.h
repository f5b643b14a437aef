// The vocabulary's bytes as a trie.
#ifndef EFLA_MODEL_CONSTRAINT_VOCABULARY_H_
#define EFLA_MODEL_CONSTRAINT_VOCABULARY_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/types.h"
#include "model/constraint/code_points.h"
#include "model/constraint/constraint.h"

namespace efla {

class Tokenizer;

// Nodes in depth-first order, the root left out: a node's subtree is nodes [i, nodes[i].end).
struct VocabularyTrie {
  struct Node {
    unsigned char byte = 0;
    int16_t depth = 0;  // bytes from the root, this one included
    int32_t end = 0;
    int32_t first_token = 0;  // tokens that end here: [first_token, the next node's first_token)
  };
  std::vector<Node> nodes;  // and one behind the last
  std::vector<TokenId> tokens;
  int max_depth = 0;

  int32_t size() const { return static_cast<int32_t>(nodes.size()) - 1; }
  std::span<const TokenId> TokensAt(int32_t node) const;
};

class ConstraintVocabulary {
 public:
  ConstraintVocabulary(const Tokenizer& tokenizer, std::span<const TokenId> end_tokens);

  int64_t vocab_size() const { return vocab_size_; }
  size_t mask_words() const { return static_cast<size_t>(vocab_size_ + 31) / 32; }
  std::span<const TokenId> end_tokens() const { return end_tokens_; }
  // What tokens add to a text that goes on, or to one that they begin.
  const VocabularyTrie& trie(bool at_start) const { return at_start ? starting_ : continuing_; }
  // Empty for a token that no constraint allows.
  std::string_view Bytes(TokenId token, bool at_start) const;
  // Characters that tokens can write one by one. Where every byte is a token these are all. Otherwise they
  // are those that are a token each, and only tokens of whole characters are used: then a constraint that is
  // met by a text of these characters can be gone through to the end from any place, a token at a time.
  const CodePointSet& characters() const { return characters_; }

 private:
  struct Place {
    uint32_t begin = 0, bytes = 0;
  };
  int64_t vocab_size_;
  std::vector<TokenId> end_tokens_;
  std::string text_;              // all tokens' bytes
  std::vector<Place> places_[2];  // by token: continuing, at start
  VocabularyTrie continuing_, starting_;
  CodePointSet characters_;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_VOCABULARY_H_
