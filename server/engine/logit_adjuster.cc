#include "server/engine/logit_adjuster.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kernels/check.h"

namespace efla {
namespace {

void Clear(std::span<uint32_t> mask, TokenId id) {
  mask[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
}

void Set(std::span<uint32_t> mask, TokenId id) {
  mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
}

}  // namespace

// ---- NgramIndex ----

// From hashes to positions in the text. Equal hashes are told apart by the tokens themselves.
struct NgramIndex::Tables {
  absl::flat_hash_map<uint64_t, int32_t> last_follower;  // of a context: the position that followed it last
  absl::flat_hash_map<uint64_t, int32_t> ngram;          // of context and follower: where it is kept
};

NgramIndex::NgramIndex(int n, int64_t tokens) : n_(n), tables_(std::make_unique<Tables>()) {
  EFLA_CHECK(n >= 1);
  text_.reserve(static_cast<size_t>(tokens));
  next_.reserve(static_cast<size_t>(tokens));
  tables_->last_follower.reserve(static_cast<size_t>(tokens));
  tables_->ngram.reserve(static_cast<size_t>(tokens));
}
NgramIndex::~NgramIndex() = default;
NgramIndex::NgramIndex(NgramIndex&&) noexcept = default;

// FNV-1a over the ids of text_[end - count, end).
uint64_t NgramIndex::HashBefore(size_t end, int count) const {
  constexpr uint64_t kBasis = 14695981039346656037u, kPrime = 1099511628211u;
  uint64_t hash = kBasis;
  for (size_t i = end - static_cast<size_t>(count); i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(text_[i])) * kPrime;
  }
  return hash ^ hash >> 32;
}

bool NgramIndex::SameTokens(size_t end_a, size_t end_b, int count) const {
  const auto a = text_.begin() + static_cast<std::ptrdiff_t>(end_a),
             b = text_.begin() + static_cast<std::ptrdiff_t>(end_b);
  return std::equal(a - count, a, b - count);
}

void NgramIndex::Add(TokenId token) {
  const size_t at = text_.size();
  text_.push_back(token);
  next_.push_back(-1);
  if (at + 1 < static_cast<size_t>(n_)) return;
  // A follower that is known already adds nothing.
  const auto [known, is_new] = tables_->ngram.try_emplace(HashBefore(at + 1, n_), static_cast<int32_t>(at));
  if (!is_new && SameTokens(static_cast<size_t>(known->second) + 1, at + 1, n_)) return;
  const auto [last, first] =
      tables_->last_follower.try_emplace(HashBefore(at, n_ - 1), static_cast<int32_t>(at));
  if (!first) next_[at] = std::exchange(last->second, static_cast<int32_t>(at));
}

int32_t NgramIndex::FirstFollower() const {
  if (text_.size() + 1 < static_cast<size_t>(n_)) return -1;
  const auto found = tables_->last_follower.find(HashBefore(text_.size(), n_ - 1));
  return found == tables_->last_follower.end() ? -1 : found->second;
}

bool NgramIndex::FollowsTheEnd(int32_t at) const {
  return SameTokens(static_cast<size_t>(at), text_.size(), n_ - 1);
}

// ---- LogitAdjuster ----

bool LogitAdjuster::IsNeeded(const SamplingParams& sampling, const StopParams& stopping) {
  return sampling.has_penalties() || sampling.no_repeat_ngram_size > 0 || !sampling.logit_bias.empty() ||
         !sampling.allowed_token_ids.empty() || !sampling.banned_token_ids.empty() || stopping.min_tokens > 0;
}

LogitAdjuster::LogitAdjuster(const SamplingParams& sampling, const StopParams& stopping,
                             std::span<const TokenId> prompt, std::span<const TokenId> end_ids,
                             std::span<const TokenId> stop_ids, int64_t vocab_size)
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
    const int64_t prompt_tokens = static_cast<int64_t>(prompt.size());
    // More than a call usually draws would be memory for nothing.
    constexpr int64_t kMostReserved = 4096;
    const int64_t drawn = std::min(stopping.max_tokens, kMostReserved);
    ngrams_ = std::make_unique<NgramIndex>(sampling.no_repeat_ngram_size, prompt_tokens + drawn);
    for (const TokenId token : prompt) ngrams_->Add(token);
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
