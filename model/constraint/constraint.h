// What an output must be, as masks over token ids. README.md tells what can be asked for.
#ifndef EFLA_MODEL_CONSTRAINT_CONSTRAINT_H_
#define EFLA_MODEL_CONSTRAINT_CONSTRAINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/types.h"

namespace efla {

class Tokenizer;

// The vocabulary as bytes, ordered for masks. Immutable; one for each served model.
class ConstraintVocabulary;
// `end_tokens` end a generation; other control tokens are never allowed. Keeps no reference. Takes some 10 ms
// for 32,000 pieces.
std::shared_ptr<const ConstraintVocabulary> MakeConstraintVocabulary(const Tokenizer& tokenizer,
                                                                     std::span<const TokenId> end_tokens);

struct ConstraintSpec {
  enum class Kind { kChoices, kRegex, kJsonObject, kJsonSchema, kGrammar };
  Kind kind = Kind::kRegex;
  std::string text;                  // the expression, schema or grammar
  std::vector<std::string> choices;  // kChoices
};

// One sequence's place in a constraint. One thread at a time.
class ConstraintMatcher {
 public:
  virtual ~ConstraintMatcher() = default;
  // Bit id % 32 of mask[id / 32] says whether id may come next; (vocab_size() + 31) / 32 words of the
  // tokenizer's, spare bits 0.
  // End tokens are allowed where CanEnd(). Never empty but where MustEnd() and there is no end token, or
  // where a text begins, only a space could come, and every piece's first space is dropped there.
  virtual void FillMask(std::span<uint32_t> mask) = 0;
  // False, and nothing has changed, when the token may not come next. An end token is not fed: false.
  virtual bool Accept(TokenId token) = 0;
  virtual bool CanEnd() const = 0;   // what has been accepted is whole
  virtual bool MustEnd() const = 0;  // and nothing can follow
};

// Compiled once, shared by any number of sequences and threads.
class Constraint {
 public:
  virtual ~Constraint() = default;
  // The matcher keeps what it needs alive. The constraint is on the text that a TextStream emits: with
  // `at_start` the output begins a text, so that the first piece's space is dropped; without, it follows
  // other text and the space is a part of it.
  virtual std::unique_ptr<ConstraintMatcher> NewMatcher(bool at_start = false) const = 0;
};

// Bounds of what is compiled; beyond them it is refused, naming the bound.
inline constexpr size_t kMaxConstraintBytes = 64 * 1024;  // of the text, or of all choices
inline constexpr size_t kMaxConstraintChoices = 1024;

using CompiledOrError = absl::StatusOr<std::shared_ptr<const Constraint>>;
// Whether a compilation is still wanted, asked every few milliseconds, about 0.1 s apart at most: an
// error ends it, and is its result.
using CompilationCheck = std::function<absl::Status()>;

// INVALID_ARGUMENT naming the place and the reason. Bounded: at most some tenths of a second and 100 MB, for
// hostile specifications only; milliseconds for common ones. A stack of 512 KB is enough. Not for gRPC's or
// the engine's threads.
CompiledOrError CompileConstraint(const ConstraintSpec& spec,
                                  std::shared_ptr<const ConstraintVocabulary> vocabulary,
                                  const CompilationCheck& check = nullptr);

// Compiles for one vocabulary and keeps the last constraints, within some 100 MB, and the last refusals. Any
// thread.
class ConstraintCompiler {
 public:
  ConstraintCompiler(const Tokenizer& tokenizer, std::span<const TokenId> end_tokens);
  ~ConstraintCompiler();
  // What Compile would give, where that is known without compiling: it is kept, or is refused by its size.
  std::optional<CompiledOrError> Find(const ConstraintSpec& spec) const;
  // As CompileConstraint. Threads that ask for the same at once compile it once, and wait for that.
  CompiledOrError Compile(const ConstraintSpec& spec, const CompilationCheck& check = nullptr) const;

 private:
  struct Kept;
  const std::shared_ptr<const ConstraintVocabulary> vocabulary_;
  const std::unique_ptr<Kept> kept_;
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_CONSTRAINT_H_
