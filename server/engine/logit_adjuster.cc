#include "server/engine/logit_adjuster.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/numeric/int128.h"
#include "kernels/check.h"

namespace efla {
namespace {

void Clear(std::span<uint32_t> mask, TokenId id) {
  mask[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
}

void Set(std::span<uint32_t> mask, TokenId id) {
  mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
}

// Arithmetic modulo a prime, of numbers below it.
constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

uint64_t Sum(uint64_t a, uint64_t b) {
  const uint64_t sum = a + b;
  return sum < kPrime ? sum : sum - kPrime;
}

uint64_t Product(uint64_t a, uint64_t b) {
  const absl::uint128 product = absl::uint128(a) * b;
  return Sum(absl::Uint128Low64(product) & kPrime, absl::Uint128Low64(product >> 61));
}

uint64_t Power(uint64_t base, int exponent) {
  uint64_t power = 1;
  for (int i = 0; i < exponent; ++i) power = Product(power, base);
  return power;
}

uint64_t Coefficient(TokenId token) { return static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1; }

}  // namespace

// ---- NgramIndex ----

// From hashes to positions in the text. Equal hashes are told apart by the tokens themselves.
struct NgramIndex::Tables {
  absl::flat_hash_map<uint64_t, int32_t> last_follower;  // of a context: the position that followed it last
  absl::flat_hash_map<uint64_t, int32_t> ngram;          // of context and follower: where it is kept
};

uint64_t NgramIndex::RandomBase() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) % kPrime;
}

NgramIndex::NgramIndex(int n, std::span<const TokenId> text, uint64_t base)
    : n_(n), base_(base), leading_(Power(base, n - 1)), tables_(std::make_unique<Tables>()) {
  EFLA_CHECK(n >= 1 && base < kPrime);
  Reserve(text.size());
  for (const TokenId token : text) Add(token);
}

NgramIndex::NgramIndex(std::shared_ptr<const NgramIndex> beginning, int64_t tokens)
    : n_(beginning->n_),
      base_(beginning->base_),
      leading_(beginning->leading_),
      beginning_(std::move(beginning)),
      tables_(std::make_unique<Tables>()) {
  EFLA_CHECK(beginning_->beginning_ == nullptr);
  Reserve(context_size() + static_cast<size_t>(tokens));
  const size_t before = std::min(context_size(), beginning_->text_.size());
  for (const TokenId token : std::span(beginning_->text_).last(before)) Add(token);
}

NgramIndex::~NgramIndex() = default;

void NgramIndex::Reserve(size_t tokens) {
  text_.reserve(tokens);
  next_.reserve(tokens);
  tables_->last_follower.reserve(tokens);
  tables_->ngram.reserve(tokens);
}

size_t NgramIndex::bytes() const {
  const auto bytes_of = [](const auto& table) {
    return table.capacity() * (sizeof(*table.begin()) + 1);  // a byte of control each
  };
  return text_.capacity() * sizeof(TokenId) + next_.capacity() * sizeof(int32_t) +
         bytes_of(tables_->last_follower) + bytes_of(tables_->ngram);
}

bool NgramIndex::Holds(uint64_t ngram_hash, std::span<const TokenId> ngram) const {
  const auto found = tables_->ngram.find(ngram_hash);
  return found != tables_->ngram.end() && EndsWith(static_cast<size_t>(found->second) + 1, ngram);
}

int32_t NgramIndex::LastFollower(uint64_t context_hash) const {
  const auto found = tables_->last_follower.find(context_hash);
  return found == tables_->last_follower.end() ? -1 : found->second;
}

void NgramIndex::Add(TokenId token) {
  const size_t at = text_.size(), n = static_cast<size_t>(n_);
  const uint64_t before_hash = context_hash_;
  const uint64_t hash = Sum(Product(before_hash, base_), Coefficient(token));
  text_.push_back(token);
  next_.push_back(-1);
  context_hash_ = hash;
  if (at + 1 < n) return;
  const std::span<const TokenId> ngram = std::span(text_).last(n);
  context_hash_ = Sum(hash, kPrime - Product(Coefficient(ngram.front()), leading_));
  // A follower that is known already adds nothing.
  if (beginning_ != nullptr && beginning_->Holds(hash, ngram)) return;
  const auto position = static_cast<int32_t>(at);
  const auto [known, is_new] = tables_->ngram.try_emplace(hash, position);
  if (!is_new && EndsWith(static_cast<size_t>(known->second) + 1, ngram)) return;
  const auto [last, first] = tables_->last_follower.try_emplace(before_hash, position);
  if (!first) next_[at] = std::exchange(last->second, position);
}

// ---- LogitAdjuster ----

bool LogitAdjuster::IsNeeded(const SamplingParams& sampling, const StopParams& stopping) {
  return sampling.has_penalties() || sampling.no_repeat_ngram_size > 0 || !sampling.logit_bias.empty() ||
         !sampling.allowed_token_ids.empty() || !sampling.banned_token_ids.empty() || stopping.min_tokens > 0;
}

LogitAdjuster::LogitAdjuster(const SamplingParams& sampling, const StopParams& stopping,
                             std::span<const TokenId> prompt, std::span<const TokenId> end_ids,
                             std::span<const TokenId> stop_ids, int64_t vocab_size,
                             std::shared_ptr<const NgramIndex> prompt_ngrams)
    : sampling_(sampling), vocab_size_(vocab_size), min_tokens_left_(stopping.min_tokens) {
  if (!sampling.allowed_token_ids.empty() || !sampling.banned_token_ids.empty()) {
    static_mask_.assign(static_cast<size_t>(MaskWords(vocab_size)),
                        sampling.allowed_token_ids.empty() ? ~uint32_t{0} : 0);
    for (const TokenId id : sampling.allowed_token_ids) Set(static_mask_, id);
    if (!sampling.allowed_token_ids.empty()) {
      for (const TokenId id : end_ids) Set(static_mask_, id);
    }
    for (const TokenId id : sampling.banned_token_ids) Clear(static_mask_, id);
  }
  if (min_tokens_left_ > 0) {
    ending_ids_.assign(end_ids.begin(), end_ids.end());
    ending_ids_.insert(ending_ids_.end(), stop_ids.begin(), stop_ids.end());
  }

  const size_t most_listed = sampling.logit_bias.size() +
                             (sampling.has_penalties() ? static_cast<size_t>(sampling.penalty_window) : 0);
  if (most_listed > 0) {
    place_.assign(static_cast<size_t>(vocab_size), -1);
    list_.reserve(most_listed + 1);
    occurrences_.reserve(most_listed + 1);
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    place_[static_cast<size_t>(id)] = static_cast<int32_t>(list_.size());
    list_.push_back({.token = id, .bias = bias});
    occurrences_.push_back({});
  }
  if (sampling.has_penalties()) {
    const size_t window = static_cast<size_t>(sampling.penalty_window);
    window_.reserve(window);
    // Without a repetition penalty the prompt counts for nothing.
    const size_t counted = sampling.repetition_penalty != 1.0f ? std::min(prompt.size(), window) : 0;
    for (const TokenId token : prompt.last(counted)) {
      window_.push_back(token);
      Count(token, 1, /*in_output=*/false);
    }
  }

  if (sampling.no_repeat_ngram_size > 0) {
    if (prompt_ngrams == nullptr) {
      prompt_ngrams = std::make_shared<const NgramIndex>(sampling.no_repeat_ngram_size, prompt);
    }
    EFLA_CHECK(prompt_ngrams->n() == sampling.no_repeat_ngram_size);
    // More than a call usually draws would be memory for nothing.
    constexpr int64_t kMostReserved = 1024;
    ngrams_ =
        std::make_unique<NgramIndex>(std::move(prompt_ngrams), std::min(stopping.max_tokens, kMostReserved));
  }
}

// list_ holds the tokens that have a bias or occur in the window; one that leaves it is replaced by the last.
void LogitAdjuster::Count(TokenId token, int by, bool in_output) {
  int32_t& place = place_[static_cast<size_t>(token)];
  if (place < 0) {
    place = static_cast<int32_t>(list_.size());
    list_.push_back({.token = token});
    occurrences_.push_back({});
  }
  const size_t at = static_cast<size_t>(place);
  Occurrences& occurrences = occurrences_[at];
  occurrences.all += by;
  if (in_output) occurrences.in_output += by;
  LogitAdjustment& entry = list_[at];
  if (occurrences.all == 0 && entry.bias == 0.0f) {
    place = -1;
    if (at + 1 != list_.size()) {
      entry = list_.back();
      occurrences = occurrences_.back();
      place_[static_cast<size_t>(entry.token)] = static_cast<int32_t>(at);
    }
    list_.pop_back();
    occurrences_.pop_back();
    return;
  }
  entry.scale = occurrences.all > 0 ? sampling_.repetition_penalty : 1.0f;
  entry.penalty = occurrences.in_output > 0
                      ? sampling_.presence_penalty +
                            sampling_.frequency_penalty * static_cast<float>(occurrences.in_output)
                      : 0.0f;
}

void LogitAdjuster::AddToken(TokenId token) {
  if (min_tokens_left_ > 0) --min_tokens_left_;
  ++output_tokens_;
  if (ngrams_ != nullptr) ngrams_->Add(token);
  if (!sampling_.has_penalties()) return;
  Count(token, 1, /*in_output=*/true);
  const size_t window = static_cast<size_t>(sampling_.penalty_window);
  if (window_.size() < window) {
    window_.push_back(token);
    return;
  }
  // The token that falls out of a full window is the last but `window`: drawn, if so many have been.
  const TokenId oldest = std::exchange(window_[window_begin_], token);
  window_begin_ = (window_begin_ + 1) % window;
  Count(oldest, -1, /*in_output=*/output_tokens_ > static_cast<int64_t>(window));
}

void LogitAdjuster::Ban(std::span<uint32_t> mask) const {
  EFLA_CHECK(static_cast<int64_t>(mask.size()) == MaskWords(vocab_size_));
  for (size_t i = 0; i < static_mask_.size(); ++i) mask[i] &= static_mask_[i];
  if (ngrams_ != nullptr) {
    ngrams_->ForEachRepeat([&](TokenId id) { Clear(mask, id); });
  }
  if (min_tokens_left_ > 0) {
    for (const TokenId id : ending_ids_) Clear(mask, id);
  }
}

}  // namespace efla
