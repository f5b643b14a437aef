// Text to token ids and back, through the checkpoint's SentencePiece model. Byte-exact.
#ifndef EFLA_MODEL_TOKENIZER_H_
#define EFLA_MODEL_TOKENIZER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace efla {

// When the tokenising of a text is to be given up.
struct EncodeLimits {
  int64_t max_tokens = std::numeric_limits<int64_t>::max();
  // Of a text without a place to cut it, which is tokenised in one go: n log n steps, and some hundred bytes
  // of memory a byte.
  size_t max_stretch_bytes = std::numeric_limits<size_t>::max();
  // Asked every few hundred tokens where the text can be cut there; an error ends the work with it. Null:
  // nothing.
  std::function<absl::Status()> check = nullptr;
};

// Bytes of a text, begin to end; not empty.
struct TextRange {
  size_t begin = 0, end = 0;
  bool operator==(const TextRange&) const = default;
};

// Immutable; safe to use from any thread.
class Tokenizer {
 public:
  // NOT_FOUND when there is no such file, INVALID_ARGUMENT when it is not a SentencePiece model.
  static absl::StatusOr<std::unique_ptr<const Tokenizer>> Open(const std::string& model_file);
  virtual ~Tokenizer() = default;

  // The ids of `text`, no BOS. Special tokens written in the text are plain text, unless `parse_special`.
  // Text must be valid UTF-8 (INVALID_ARGUMENT with the byte offset otherwise).
  // The space mark U+2581 in a text is a space to SentencePiece, and comes back as one.
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, bool parse_special) const = 0;
  // As Encode, for text that goes on after other text: no dummy-prefix space is put before it, and a stream
  // that `continues` gives exactly `text` back.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeContinuation(std::string_view text,
                                                                  bool parse_special) const = 0;
  // As Encode or, with `continues`, EncodeContinuation, and the same ids; but OUT_OF_RANGE, saying how many
  // tokens there are at least, as soon as there are more than `limits` allow. A text that is too long for its
  // bytes alone (max_token_bytes) costs nothing. INVALID_ARGUMENT, saying how long it is, before anything is
  // tokenised, where a stretch of the text is longer than `limits` allow.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeWithin(std::string_view text, bool parse_special,
                                                            bool continues, const EncodeLimits& limits) const;
  // No token stands for more bytes of a text than this; 0: not known.
  virtual size_t max_token_bytes() const { return 0; }
  // As Encode (or EncodeContinuation) with special tokens parsed, but for those that touch a range of
  // `plain`: ascending, apart, within the text. What is no special token is one text, whatever ranges it
  // crosses.
  virtual absl::StatusOr<std::vector<TokenId>> EncodeMarked(std::string_view text,
                                                            std::span<const TextRange> plain, bool continues,
                                                            const EncodeLimits& limits) const = 0;
  // The exact bytes that `id` adds to a text: a byte-fallback piece is one byte, the space mark is a space, a
  // control token and an id outside the vocabulary are empty. `at_start` drops the dummy-prefix space of a
  // text's first piece.
  virtual std::string_view PieceBytes(TokenId id, bool at_start) const = 0;
  // All ids' bytes joined, invalid UTF-8 replaced by U+FFFD: equal to what a TextStream over the ids emits.
  std::string Decode(std::span<const TokenId> ids) const;

  virtual int vocab_size() const = 0;
  virtual TokenId bos_id() const = 0;  // -1: none
  virtual TokenId eos_id() const = 0;  // -1: none
  virtual bool is_control(TokenId id) const = 0;
  // The piece as SentencePiece writes it ("▁the", "<0x0A>", "</s>").
  // Empty for an id outside the vocabulary.
  virtual std::string_view Piece(TokenId id) const = 0;
  // The control token spelled exactly so, or -1.
  virtual TokenId ControlId(std::string_view piece) const = 0;
  // SHA-256 of the model file, lower-case hex.
  virtual const std::string& fingerprint() const = 0;
};

}  // namespace efla

#endif  // EFLA_MODEL_TOKENIZER_H_
