// What one call's draws are made from beside the logits: its penalties, biases and bans, kept up to date with
// what it has drawn.
#ifndef EFLA_SERVER_ENGINE_LOGIT_ADJUSTER_H_
#define EFLA_SERVER_ENGINE_LOGIT_ADJUSTER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/op_args.h"
#include "model/sampling.h"

namespace efla {

// The tokens that would repeat an n-gram: for each n - 1 tokens that the text has held, the tokens that
// followed. A text's beginning may have an index of its own that several continuations share; n-grams that
// reach over its end are theirs. Any thread while it is const.
class NgramIndex {
 public:
  // N-grams are hashed as polynomials in a number below 2^61 - 1. No client knows it, so that none can choose
  // n-grams with equal hashes, which would cost time; they change nothing.
  static uint64_t RandomBase();

  // Of `text`.
  NgramIndex(int n, std::span<const TokenId> text, uint64_t base = RandomBase());
  // Of a text that goes on from that of `beginning`, which has none itself, by about `tokens` tokens.
  NgramIndex(std::shared_ptr<const NgramIndex> beginning, int64_t tokens);
  ~NgramIndex();

  int n() const { return n_; }
  // That it takes itself; what its beginning takes does not count.
  size_t bytes() const;

  void Add(TokenId token);
  // Calls `ban` with every token that has followed the text's last n - 1 tokens; each once, but where hashes
  // are equal by chance.
  template <typename Ban>
  void ForEachRepeat(const Ban& ban) const {
    if (text_.size() < context_size()) return;
    const std::span<const TokenId> context = std::span(text_).last(context_size());
    for (const NgramIndex* index : {this, beginning_.get()}) {
      if (index == nullptr) continue;
      for (int32_t at = index->LastFollower(context_hash_); at >= 0;
           at = index->next_[static_cast<size_t>(at)]) {
        if (index->EndsWith(static_cast<size_t>(at), context)) ban(index->text_[static_cast<size_t>(at)]);
      }
    }
  }

 private:
  struct Tables;
  void Reserve(size_t tokens);
  size_t context_size() const { return static_cast<size_t>(n_) - 1; }
  // Whether text_ holds `tokens` before `end`.
  bool EndsWith(size_t end, std::span<const TokenId> tokens) const {
    return std::equal(tokens.begin(), tokens.end(),
                      text_.begin() + static_cast<std::ptrdiff_t>(end - tokens.size()));
  }
  bool Holds(uint64_t ngram_hash, std::span<const TokenId> ngram) const;
  int32_t LastFollower(uint64_t context_hash) const;

  const int n_;
  const uint64_t base_;
  const uint64_t leading_;  // base_ to the power of n - 1
  const std::shared_ptr<const NgramIndex> beginning_;
  std::vector<TokenId> text_;  // after a beginning: its last n - 1 tokens, or all, and what follows
  std::vector<int32_t> next_;  // of a follower at that position: an earlier one of the same context, or -1
  uint64_t context_hash_ = 0;  // of the text's last n - 1 tokens
  std::unique_ptr<Tables> tables_;
};

// Engine thread, but for the construction, which takes all memory but what the index of n-grams grows by.
class LogitAdjuster {
 public:
  // Whether the call's draws need one.
  static bool IsNeeded(const SamplingParams& sampling, const StopParams& stopping);

  // `end_ids`: end tokens that end the call (none with ignore_eos); allowed_token_ids allows them too.
  // `stop_ids`: others that do. min_tokens bans both. The params must outlive it. `prompt_ngrams`: as of
  // GenerationRequest.
  LogitAdjuster(const SamplingParams& sampling, const StopParams& stopping, std::span<const TokenId> prompt,
                std::span<const TokenId> end_ids, std::span<const TokenId> stop_ids, int64_t vocab_size,
                std::shared_ptr<const NgramIndex> prompt_ngrams = nullptr);

  // `token` has been drawn.
  void AddToken(TokenId token);

  // Penalties and biases of the next draw, no token twice; at most kMaxPenaltyWindow + kMaxLogitBias.
  std::span<const LogitAdjustment> adjustments() const { return list_; }
  // Whether the next draw has bans of its own.
  bool bans() const { return !static_mask_.empty() || ngrams_ != nullptr || min_tokens_left_ > 0; }
  // Takes its bans out of `mask` ([MaskWords(vocab_size)]).
  void Ban(std::span<uint32_t> mask) const;

 private:
  // How often a token occurs in the window.
  struct Occurrences {
    int32_t all = 0, in_output = 0;
  };
  void Count(TokenId token, int by, bool in_output);

  const SamplingParams& sampling_;
  const int64_t vocab_size_;
  std::vector<uint32_t> static_mask_;  // of allowed and banned ids; empty: none are given
  std::vector<TokenId> ending_ids_;    // banned while min_tokens_left_ > 0
  int64_t min_tokens_left_ = 0;

  // The last penalty_window tokens of prompt and output, or of the output where the prompt counts for
  // nothing; a ring. Only with penalties.
  std::vector<TokenId> window_;
  size_t window_begin_ = 0;               // the oldest, once the ring is full
  int64_t output_tokens_ = 0;             // drawn
  std::vector<int32_t> place_;            // [vocab_size] where a token stands in list_, -1: nowhere
  std::vector<Occurrences> occurrences_;  // of list_'s tokens
  std::vector<LogitAdjustment> list_;     // tokens with a bias or in the window

  std::unique_ptr<NgramIndex> ngrams_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_LOGIT_ADJUSTER_H_
