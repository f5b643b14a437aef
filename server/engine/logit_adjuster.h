// What one call's draws are made from beside the logits: its penalties, biases and bans, kept up to date with
// what it has drawn.
#ifndef EFLA_SERVER_ENGINE_LOGIT_ADJUSTER_H_
#define EFLA_SERVER_ENGINE_LOGIT_ADJUSTER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/op_args.h"
#include "model/sampling.h"

namespace efla {

// The tokens that would repeat an n-gram: for each n - 1 tokens that the text has held, the tokens that
// followed.
class NgramIndex {
 public:
  // `tokens`: about how many there will be.
  NgramIndex(int n, int64_t tokens);
  ~NgramIndex();
  NgramIndex(NgramIndex&&) noexcept;

  void Add(TokenId token);
  // Calls `ban` with every token that has followed the text's last n - 1 tokens, each once.
  template <typename Ban>
  void ForEachRepeat(const Ban& ban) const {
    for (int32_t at = FirstFollower(); at >= 0; at = next_[static_cast<size_t>(at)]) {
      if (FollowsTheEnd(at)) ban(text_[static_cast<size_t>(at)]);
    }
  }

 private:
  struct Tables;
  bool SameTokens(size_t end_a, size_t end_b, int count) const;
  uint64_t HashBefore(size_t end, int count) const;
  int32_t FirstFollower() const;
  bool FollowsTheEnd(int32_t at) const;

  const int n_;
  std::vector<TokenId> text_;
  std::vector<int32_t> next_;  // of a follower at that position: an earlier one of the same context, or -1
  std::unique_ptr<Tables> tables_;
};

// Engine thread, but for the construction, which takes all memory but what the index of n-grams grows by.
class LogitAdjuster {
 public:
  // Whether the call's draws need one.
  static bool IsNeeded(const SamplingParams& sampling, const StopParams& stopping);

  // `end_ids`: end tokens that end the call (none with ignore_eos); allowed_token_ids allows them too.
  // `stop_ids`: others that do. min_tokens bans both. The params must outlive it.
  LogitAdjuster(const SamplingParams& sampling, const StopParams& stopping, std::span<const TokenId> prompt,
                std::span<const TokenId> end_ids, std::span<const TokenId> stop_ids, int64_t vocab_size);

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
