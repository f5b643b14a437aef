#include "model/sampling.h"

#include <limits>

#include "absl/strings/str_format.h"
#include "model/utf8.h"

namespace efla {
namespace {

constexpr float kMaxTemperature = 100.0f;

absl::Status OutOfRange(const char* field, double value, const char* bound) {
  return absl::InvalidArgumentError(absl::StrFormat("%s is %g; it must be in %s", field, value, bound));
}

}  // namespace

// Each test is written so that NaN fails it.
absl::Status SamplingParams::Validate() const {
  if (!(temperature >= 0 && temperature <= kMaxTemperature)) {
    return OutOfRange("temperature", temperature, "[0, 100]");
  }
  if (top_k < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("top_k is %d; it must be at least 0 (0: off)", top_k));
  }
  if (!(top_p > 0 && top_p <= 1)) return OutOfRange("top_p", top_p, "(0, 1]");
  if (!(min_p >= 0 && min_p < 1)) return OutOfRange("min_p", min_p, "[0, 1)");
  return absl::OkStatus();
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
  if (stop_token_ids.size() > static_cast<size_t>(kMaxStopTokenIds)) {
    return absl::InvalidArgumentError(absl::StrFormat("stop_token_ids has %d ids; at most %d are allowed",
                                                      stop_token_ids.size(), kMaxStopTokenIds));
  }
  for (size_t i = 0; i < stop_token_ids.size(); ++i) {
    if (stop_token_ids[i] < 0 || stop_token_ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrFormat("stop_token_ids[%d] is %d; it must be from 0 to %d",
                                                        i, stop_token_ids[i], vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace efla
