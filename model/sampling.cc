#include "model/sampling.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "model/utf8.h"

namespace efla {
namespace {

constexpr float kMaxTemperature = 100.0f;
constexpr float kMinRepetitionPenalty = 0.01f, kMaxRepetitionPenalty = 10.0f;
constexpr float kMaxPenalty = 2.0f;  // presence and frequency
constexpr float kMaxBias = 100.0f;

absl::Status OutOfRange(const char* field, double value, const char* bound) {
  return absl::InvalidArgumentError(absl::StrFormat("%s is %g; it must be in %s", field, value, bound));
}

absl::Status CheckCount(const char* field, size_t count, int limit) {
  if (count <= static_cast<size_t>(limit)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has %d ids; at most %d are allowed", field, count, limit));
}

absl::Status CheckIds(const char* field, const std::vector<TokenId>& ids, int limit, int64_t vocab_size) {
  if (absl::Status status = CheckCount(field, ids.size(), limit); !status.ok()) return status;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s[%d] is %d; it must be from 0 to %d", field, i, ids[i], vocab_size - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckBias(const std::vector<std::pair<TokenId, float>>& bias, int64_t vocab_size) {
  if (absl::Status status = CheckCount("logit_bias", bias.size(), kMaxLogitBias); !status.ok()) return status;
  std::vector<TokenId> ids;
  for (const auto& [id, value] : bias) {
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("logit_bias has id %d; ids are 0 to %d", id, vocab_size - 1));
    }
    if (!(value >= -kMaxBias && value <= kMaxBias)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("logit_bias of id %d is %g; it must be in [-100, 100]", id, value));
    }
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice == ids.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("logit_bias has id %d twice", *twice));
}

absl::Status CheckSomethingIsLeft(const SamplingParams& params, int64_t vocab_size) {
  std::vector<TokenId> banned = params.banned_token_ids;
  std::sort(banned.begin(), banned.end());
  banned.erase(std::unique(banned.begin(), banned.end()), banned.end());
  if (static_cast<int64_t>(banned.size()) == vocab_size) {
    return absl::InvalidArgumentError("banned_token_ids has every token; nothing is left to draw");
  }
  const std::vector<TokenId>& allowed = params.allowed_token_ids;
  const auto is_banned = [&](TokenId id) { return std::binary_search(banned.begin(), banned.end(), id); };
  if (!allowed.empty() && std::all_of(allowed.begin(), allowed.end(), is_banned)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "allowed_token_ids has %d ids and banned_token_ids has all of them; nothing is left to draw",
        allowed.size()));
  }
  return absl::OkStatus();
}

}  // namespace

// Each test is written so that NaN fails it.
absl::Status SamplingParams::Validate(int64_t vocab_size) const {
  if (!(temperature >= 0 && temperature <= kMaxTemperature)) {
    return OutOfRange("temperature", temperature, "[0, 100]");
  }
  if (top_k < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("top_k is %d; it must be at least 0 (0: off)", top_k));
  }
  if (!(top_p > 0 && top_p <= 1)) return OutOfRange("top_p", top_p, "(0, 1]");
  if (!(min_p >= 0 && min_p < 1)) return OutOfRange("min_p", min_p, "[0, 1)");
  if (!(typical_p > 0 && typical_p <= 1)) return OutOfRange("typical_p", typical_p, "(0, 1]");
  if (!(repetition_penalty >= kMinRepetitionPenalty && repetition_penalty <= kMaxRepetitionPenalty)) {
    return OutOfRange("repetition_penalty", repetition_penalty, "[0.01, 10]");
  }
  if (!(presence_penalty >= -kMaxPenalty && presence_penalty <= kMaxPenalty)) {
    return OutOfRange("presence_penalty", presence_penalty, "[-2, 2]");
  }
  if (!(frequency_penalty >= -kMaxPenalty && frequency_penalty <= kMaxPenalty)) {
    return OutOfRange("frequency_penalty", frequency_penalty, "[-2, 2]");
  }
  if (penalty_window < 1 || penalty_window > kMaxPenaltyWindow) {
    return absl::InvalidArgumentError(
        absl::StrFormat("penalty_window is %d; it must be 1 to %d", penalty_window, kMaxPenaltyWindow));
  }
  if (no_repeat_ngram_size < 0 || no_repeat_ngram_size > kMaxNoRepeatNgram) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "no_repeat_ngram_size is %d; it must be 0 to %d (0: off)", no_repeat_ngram_size, kMaxNoRepeatNgram));
  }
  if (absl::Status status = CheckBias(logit_bias, vocab_size); !status.ok()) return status;
  absl::Status status = CheckIds("allowed_token_ids", allowed_token_ids, kMaxListedIds, vocab_size);
  if (!status.ok()) return status;
  status = CheckIds("banned_token_ids", banned_token_ids, kMaxListedIds, vocab_size);
  if (!status.ok()) return status;
  return CheckSomethingIsLeft(*this, vocab_size);
}

absl::Status StopParams::Validate(int64_t vocab_size) const {
  if (max_tokens < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("max_tokens is %d; it must be at least 0", max_tokens));
  }
  if (stop.size() > static_cast<size_t>(kMaxStopStrings)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("stop has %d strings; at most %d are allowed", stop.size(), kMaxStopStrings));
  }
  for (size_t i = 0; i < stop.size(); ++i) {
    if (stop[i].empty()) return absl::InvalidArgumentError(absl::StrFormat("stop[%d] is empty", i));
    if (stop[i].size() > static_cast<size_t>(kMaxStopBytes)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("stop[%d] has %d bytes; at most %d are allowed", i, stop[i].size(), kMaxStopBytes));
    }
    if (const auto bad = FindInvalidUtf8(stop[i])) {
      return absl::InvalidArgumentError(absl::StrFormat("stop[%d] is not UTF-8 at byte %d", i, *bad));
    }
  }
  if (min_tokens < 0 || min_tokens > max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrFormat("min_tokens is %d; it must be 0 to max_tokens, %d", min_tokens, max_tokens));
  }
  return CheckIds("stop_token_ids", stop_token_ids, kMaxStopTokenIds, vocab_size);
}

}  // namespace efla
