// Constraints for tests: vocabularies, texts fed byte by byte, and random walks through masks.
#ifndef EFLA_TESTS_MODEL_CONSTRAINT_RIG_H_
#define EFLA_TESTS_MODEL_CONSTRAINT_RIG_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "model/constraint/constraint.h"
#include "model/text_stream.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "tests/source_path.h"

namespace efla {

inline const Tokenizer& DemoTokenizer() {
  static const auto tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return **tokenizer;
}

// Pieces of one's own: piece i is token i; "</s>" is the one control token.
class PieceTokenizer final : public Tokenizer {
 public:
  explicit PieceTokenizer(std::vector<std::string> pieces) : pieces_(std::move(pieces)) {}

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view, bool) const override {
    return absl::UnimplementedError("pieces only");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeContinuation(std::string_view, bool) const override {
    return absl::UnimplementedError("pieces only");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeMarked(std::string_view, std::span<const TextRange>, bool,
                                                    const EncodeLimits&) const override {
    return absl::UnimplementedError("pieces only");
  }
  std::string_view PieceBytes(TokenId id, bool at_start) const override {
    if (id < 0 || id >= vocab_size() || is_control(id)) return {};
    std::string_view piece = pieces_[static_cast<size_t>(id)];
    if (at_start && piece.starts_with(' ')) piece.remove_prefix(1);
    return piece;
  }
  int vocab_size() const override { return static_cast<int>(pieces_.size()); }
  TokenId bos_id() const override { return -1; }
  TokenId eos_id() const override { return ControlId("</s>"); }
  bool is_control(TokenId id) const override { return Piece(id) == "</s>"; }
  std::string_view Piece(TokenId id) const override {
    return id < 0 || id >= vocab_size() ? std::string_view() : pieces_[static_cast<size_t>(id)];
  }
  TokenId ControlId(std::string_view piece) const override {
    const auto found = std::find(pieces_.begin(), pieces_.end(), piece);
    return piece != "</s>" || found == pieces_.end() ? -1 : static_cast<TokenId>(found - pieces_.begin());
  }
  const std::string& fingerprint() const override { return fingerprint_; }

 private:
  std::vector<std::string> pieces_;
  std::string fingerprint_ = "pieces";
};

struct ConstraintRig {
  explicit ConstraintRig(const Tokenizer& of = DemoTokenizer()) : tokenizer(of) {
    const std::array<TokenId, 1> end = {of.eos_id()};
    vocabulary = MakeConstraintVocabulary(of, end);
    bytes.fill(-1);
    for (TokenId id = 0; id < of.vocab_size(); ++id) {
      const std::string_view piece = of.PieceBytes(id, false);
      if (piece.size() == 1) bytes[static_cast<unsigned char>(piece.front())] = id;
    }
  }

  absl::StatusOr<std::shared_ptr<const Constraint>> Compile(ConstraintSpec::Kind kind,
                                                            const std::string& text) const {
    return CompileConstraint({.kind = kind, .text = text, .choices = {}}, vocabulary);
  }
  std::shared_ptr<const Constraint> Make(ConstraintSpec::Kind kind, const std::string& text) const {
    auto constraint = Compile(kind, text);
    EXPECT_TRUE(constraint.ok()) << constraint.status() << "\n" << text;
    return constraint.ok() ? *constraint : nullptr;
  }
  std::shared_ptr<const Constraint> Choices(std::vector<std::string> choices) const {
    auto constraint = CompileConstraint(
        {.kind = ConstraintSpec::Kind::kChoices, .text = "", .choices = std::move(choices)}, vocabulary);
    EXPECT_TRUE(constraint.ok()) << constraint.status();
    return constraint.ok() ? *constraint : nullptr;
  }
  std::string Error(ConstraintSpec::Kind kind, const std::string& text) const {
    const auto constraint = Compile(kind, text);
    if (constraint.ok()) return "OK";
    EXPECT_EQ(constraint.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(constraint.status().message());
  }

  // By tokens of one byte.
  bool Accepts(const Constraint& constraint, std::string_view text) const {
    const auto matcher = constraint.NewMatcher();
    for (char byte : text) {
      if (!matcher->Accept(bytes[static_cast<unsigned char>(byte)])) return false;
    }
    return matcher->CanEnd();
  }

  size_t words() const { return static_cast<size_t>(tokenizer.vocab_size() + 31) / 32; }
  std::vector<uint32_t> Mask(ConstraintMatcher& matcher) const {
    std::vector<uint32_t> mask(words(), 0xFFFFFFFF);
    matcher.FillMask(mask);
    return mask;
  }
  std::vector<TokenId> Allowed(ConstraintMatcher& matcher) const {
    const std::vector<uint32_t> mask = Mask(matcher);
    std::vector<TokenId> allowed;
    for (size_t id = 0; id < mask.size() * 32; ++id) {
      if (mask[id / 32] >> (id % 32) & 1) allowed.push_back(static_cast<TokenId>(id));
    }
    return allowed;
  }

  const Tokenizer& tokenizer;
  std::shared_ptr<const ConstraintVocabulary> vocabulary;
  std::array<TokenId, 256> bytes;  // by value; -1: none
};

// What trying each token on the text so far says.
inline std::vector<TokenId> AllowedByTrial(const ConstraintRig& rig, const Constraint& constraint,
                                           const std::vector<TokenId>& so_far, bool at_start) {
  std::vector<TokenId> allowed;
  auto matcher = constraint.NewMatcher(at_start);
  const auto rewind = [&] {
    matcher = constraint.NewMatcher(at_start);
    for (TokenId id : so_far) EXPECT_TRUE(matcher->Accept(id));
  };
  rewind();
  const bool can_end = matcher->CanEnd();
  for (TokenId id = 0; id < rig.tokenizer.vocab_size(); ++id) {
    if (id == rig.tokenizer.eos_id()) {
      if (can_end) allowed.push_back(id);
      EXPECT_FALSE(matcher->Accept(id));
    } else if (matcher->Accept(id)) {
      allowed.push_back(id);
      rewind();
    }
  }
  return allowed;
}

struct WalkResult {
  std::string text;
  std::vector<TokenId> tokens;
  bool finished = false;
};

// Draws allowed tokens, and ends where it may with some probability. After `hasty_after` tokens it prefers
// what closes strings, objects and lists.
inline WalkResult RandomWalk(const ConstraintRig& rig, const Constraint& constraint, std::mt19937& random,
                             size_t hasty_after = 30, size_t max_tokens = 600, bool at_start = false) {
  WalkResult walk;
  const auto matcher = constraint.NewMatcher(at_start);
  TextStream stream(&rig.tokenizer, {}, !at_start);
  while (walk.tokens.size() < max_tokens) {
    const bool hasty = walk.tokens.size() >= hasty_after;
    const bool ends = matcher->CanEnd() && (matcher->MustEnd() || hasty || random() % 4 == 0);
    const std::vector<TokenId> allowed = rig.Allowed(*matcher);
    const bool end_allowed =
        std::find(allowed.begin(), allowed.end(), rig.tokenizer.eos_id()) != allowed.end();
    EXPECT_EQ(end_allowed, matcher->CanEnd());
    EXPECT_EQ(matcher->MustEnd(), allowed.size() == 1 && end_allowed);
    EXPECT_FALSE(allowed.empty()) << "a dead end after: " << walk.text;
    if (allowed.empty()) return walk;
    if (ends) {
      walk.finished = true;
      break;
    }
    TokenId token = allowed[random() % allowed.size()];
    for (int tries = 0; token == rig.tokenizer.eos_id(); ++tries)
      token = allowed[(random() + tries) % allowed.size()];
    for (char closing : {'}', ']', '"'}) {
      const TokenId id = rig.bytes[static_cast<unsigned char>(closing)];
      if (hasty && std::find(allowed.begin(), allowed.end(), id) != allowed.end()) token = id;
    }
    EXPECT_TRUE(matcher->Accept(token)) << walk.text << " + token " << token;
    walk.tokens.push_back(token);
    walk.text += stream.Add(token).text;
  }
  walk.text += stream.Finish().text;
  if (walk.finished) {
    EXPECT_FALSE(FindInvalidUtf8(walk.text)) << walk.text;
  }
  return walk;
}

}  // namespace efla

#endif  // EFLA_TESTS_MODEL_CONSTRAINT_RIG_H_
