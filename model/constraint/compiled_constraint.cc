#include "model/constraint/compiled_constraint.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "model/constraint/grammar.h"
#include "model/constraint/json_schema.h"
#include "model/constraint/matcher.h"
#include "model/constraint/regex.h"
#include "model/utf8.h"

namespace efla {
namespace {

constexpr size_t kMaxKeptBytes = 128 << 20;  // of a compiler's constraints
constexpr size_t kMaxKeptRefusalBytes = 8 << 20;
constexpr std::chrono::milliseconds kCheckInterval{20};  // while another thread compiles the same
constexpr size_t kMaxStateMaskBytes = 2 << 20, kMaxMaskBytes = 2 << 20;  // of what is kept

absl::Status Refused(const std::string& why) { return absl::InvalidArgumentError(why); }

absl::Status CheckText(std::string_view text) {
  if (text.empty()) return Refused("is empty");
  if (text.size() > kMaxConstraintBytes) {
    return Refused(absl::StrFormat("has %d bytes; the limit is %d", text.size(), kMaxConstraintBytes));
  }
  if (const auto bad = FindInvalidUtf8(text))
    return Refused(absl::StrFormat("is not UTF-8 at byte %d", *bad));
  return absl::OkStatus();
}

absl::Status CheckChoices(const std::vector<std::string>& choices) {
  if (choices.empty() || choices.size() > kMaxConstraintChoices) {
    return Refused(
        absl::StrFormat("has %d choices; 1 to %d are needed", choices.size(), kMaxConstraintChoices));
  }
  size_t bytes = 0;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (absl::Status status = CheckText(choices[i]); !status.ok()) {
      return Refused(absl::StrFormat("choice %d %s", i, std::string(status.message())));
    }
    bytes += choices[i].size();
    if (bytes > kMaxConstraintBytes) {
      return Refused(absl::StrFormat("has more than %d bytes in all its choices", kMaxConstraintBytes));
    }
  }
  return absl::OkStatus();
}

// What can be said in microseconds.
absl::Status CheckSize(const ConstraintSpec& spec) {
  if (spec.kind == ConstraintSpec::Kind::kJsonObject) return absl::OkStatus();
  return spec.kind == ConstraintSpec::Kind::kChoices ? CheckChoices(spec.choices) : CheckText(spec.text);
}

absl::StatusOr<Grammar> ChoicesGrammar(const std::vector<std::string>& choices,
                                       const CodePointSet& characters) {
  std::vector<ExpressionPtr> ways;
  for (size_t i = 0; i < choices.size(); ++i) {
    for (std::string_view rest = choices[i]; !rest.empty();) {
      const char32_t c = TakeCodePoint(rest);
      if (characters.Contains(c)) continue;
      return Refused(absl::StrFormat("choice %d cannot be written: the vocabulary has no U+%04X", i,
                                     static_cast<unsigned>(c)));
    }
    ways.push_back(Literal(choices[i]));
  }
  Grammar grammar;
  grammar.AddRule("choices", Alternate(std::move(ways)));
  return grammar;
}

// Anchors at the ends say what holds anyway.
absl::StatusOr<Grammar> RegexGrammar(const std::string& text) {
  absl::StatusOr<std::vector<RegexAlternative>> alternatives = ParseRegex(text, RegexDialect::kRe2);
  if (!alternatives.ok()) return alternatives.status();
  std::vector<ExpressionPtr> ways;
  for (RegexAlternative& alternative : *alternatives) ways.push_back(std::move(alternative.body));
  Grammar grammar;
  grammar.AddRule("regex", Alternate(std::move(ways)));
  return grammar;
}

absl::StatusOr<Grammar> GrammarOf(const ConstraintSpec& spec, const CodePointSet& characters,
                                  WorkCheck& work) {
  if (absl::Status status = CheckSize(spec); !status.ok()) return status;
  if (spec.kind == ConstraintSpec::Kind::kChoices) return ChoicesGrammar(spec.choices, characters);
  if (spec.kind == ConstraintSpec::Kind::kJsonObject) return AnyJsonObject();
  if (spec.kind == ConstraintSpec::Kind::kRegex) return RegexGrammar(spec.text);
  if (spec.kind == ConstraintSpec::Kind::kJsonSchema) return ParseJsonSchema(spec.text, work);
  return ParseGrammar(spec.text);
}

absl::StatusOr<std::shared_ptr<const CompiledConstraint>> Compile(
    const ConstraintSpec& spec, std::shared_ptr<const ConstraintVocabulary> vocabulary,
    const CompilationCheck& check) {
  WorkCheck work(check);
  absl::StatusOr<Grammar> grammar = GrammarOf(spec, vocabulary->characters(), work);
  if (!grammar.ok()) return grammar.status();
  if (absl::Status status = work.Ask(); !status.ok()) return status;  // reading takes milliseconds at most
  absl::StatusOr<ByteAutomaton> automaton =
      ByteAutomaton::Compile(*std::move(grammar), vocabulary->characters(), work);
  if (!automaton.ok()) return automaton.status();
  return std::make_shared<const CompiledConstraint>(*std::move(automaton), std::move(vocabulary));
}

}  // namespace

CompiledConstraint::CompiledConstraint(ByteAutomaton automaton,
                                       std::shared_ptr<const ConstraintVocabulary> vocabulary)
    : automaton_(std::move(automaton)),
      vocabulary_(std::move(vocabulary)),
      state_masks_(kMaxStateMaskBytes),
      masks_(kMaxMaskBytes) {}

std::unique_ptr<ConstraintMatcher> CompiledConstraint::NewMatcher(bool at_start) const {
  return std::make_unique<StackMatcher>(shared_from_this(), at_start);
}

size_t CompiledConstraint::max_memory_bytes() const {
  return automaton_.memory_bytes() + kMaxStateMaskBytes + kMaxMaskBytes;
}

std::shared_ptr<const StateMask> CompiledConstraint::MaskOfState(int32_t state, bool is_outermost) const {
  const int64_t key = int64_t{state} * 2 + (is_outermost ? 1 : 0);
  {
    const std::lock_guard lock(mutex_);
    if (auto found = state_masks_.Find(key)) return found;
  }
  auto computed = std::make_shared<const StateMask>(ComputeStateMask(state, is_outermost));
  const std::lock_guard lock(mutex_);
  const size_t bytes =
      computed->mask.size() * sizeof(uint32_t) + computed->exits.size() * sizeof(StateMask::Exit);
  state_masks_.Insert(key, computed, bytes + sizeof(StateMask));
  return computed;
}

StateMask CompiledConstraint::ComputeStateMask(int32_t state, bool is_outermost) const {
  const VocabularyTrie& trie = vocabulary_->trie(/*at_start=*/false);
  StateMask out;
  out.mask.resize(vocabulary_->mask_words());
  const auto leaves = [&](int32_t at) {
    return !automaton_.calls(at).empty() || (!is_outermost && automaton_.accepts(at));
  };
  if (leaves(state)) {
    out.exits.push_back({-1, state});
    return out;
  }
  std::vector<int32_t> states(static_cast<size_t>(trie.max_depth) + 1);  // by depth
  states[0] = state;
  for (int32_t node = 0; node < trie.size();) {
    const VocabularyTrie::Node& here = trie.nodes[static_cast<size_t>(node)];
    const int32_t next = automaton_.Next(states[static_cast<size_t>(here.depth) - 1], here.byte);
    if (next == ByteAutomaton::kNone) {
      node = here.end;
      continue;
    }
    for (TokenId token : trie.TokensAt(node)) out.mask[static_cast<size_t>(token) / 32] |= 1U << (token % 32);
    if (here.end > node + 1 && leaves(next)) {
      out.exits.push_back({node, next});
      node = here.end;
      continue;
    }
    states[static_cast<size_t>(here.depth)] = next;
    ++node;
  }
  return out;
}

std::shared_ptr<const TokenMask> CompiledConstraint::FindMask(const std::vector<int32_t>& place) const {
  const std::lock_guard lock(mutex_);
  return masks_.Find(place);
}

void CompiledConstraint::KeepMask(const std::vector<int32_t>& place,
                                  std::shared_ptr<const TokenMask> mask) const {
  const std::lock_guard lock(mutex_);
  const size_t bytes = mask->size() * sizeof(uint32_t) + place.size() * sizeof(int32_t);
  masks_.Insert(place, std::move(mask), bytes);
}

CompiledOrError CompileConstraint(const ConstraintSpec& spec,
                                  std::shared_ptr<const ConstraintVocabulary> vocabulary,
                                  const CompilationCheck& check) {
  return Compile(spec, std::move(vocabulary), check);
}

struct ConstraintCompiler::Kept {
  static std::string KeyOf(const ConstraintSpec& spec) {
    std::string key = std::to_string(static_cast<int>(spec.kind)) + spec.text;
    for (const std::string& choice : spec.choices) key += std::to_string(choice.size()) + ":" + choice;
    return key;
  }
  std::optional<CompiledOrError> Find(const std::string& key) {
    if (auto found = constraints.Find(key)) return found;
    if (const auto refused = refusals.Find(key)) return *refused;
    return std::nullopt;
  }

  std::mutex mutex;  // guards what follows
  LruCache<std::string, Constraint> constraints{kMaxKeptBytes};
  LruCache<std::string, absl::Status> refusals{kMaxKeptRefusalBytes};
  absl::flat_hash_set<std::string> compiling;  // by some thread, now
  std::condition_variable compiled;
};

ConstraintCompiler::ConstraintCompiler(const Tokenizer& tokenizer, std::span<const TokenId> end_tokens)
    : vocabulary_(MakeConstraintVocabulary(tokenizer, end_tokens)), kept_(std::make_unique<Kept>()) {}

ConstraintCompiler::~ConstraintCompiler() = default;

std::optional<CompiledOrError> ConstraintCompiler::Find(const ConstraintSpec& spec) const {
  if (absl::Status status = CheckSize(spec); !status.ok()) return status;
  const std::string key = Kept::KeyOf(spec);
  const std::lock_guard lock(kept_->mutex);
  return kept_->Find(key);
}

CompiledOrError ConstraintCompiler::Compile(const ConstraintSpec& spec, const CompilationCheck& check) const {
  if (absl::Status status = CheckSize(spec); !status.ok()) return status;
  const std::string key = Kept::KeyOf(spec);
  std::unique_lock lock(kept_->mutex);
  while (true) {
    if (std::optional<CompiledOrError> known = kept_->Find(key)) return *std::move(known);
    if (kept_->compiling.insert(key).second) break;
    kept_->compiled.wait_for(lock, kCheckInterval);
    if (check == nullptr) continue;
    lock.unlock();
    if (absl::Status status = check(); !status.ok()) return status;
    lock.lock();
  }
  lock.unlock();
  const auto constraint = efla::Compile(spec, vocabulary_, check);
  lock.lock();
  kept_->compiling.erase(key);
  kept_->compiled.notify_all();
  if (constraint.ok()) {
    kept_->constraints.Insert(key, *constraint, (*constraint)->max_memory_bytes() + key.size());
    return *constraint;
  }
  if (absl::IsInvalidArgument(constraint.status())) {  // and not what the check said
    kept_->refusals.Insert(key, std::make_shared<const absl::Status>(constraint.status()),
                           key.size() + constraint.status().message().size());
  }
  return constraint.status();
}

}  // namespace efla
