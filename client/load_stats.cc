#include "client/load_stats.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace efla {
namespace {

constexpr double kMsPerSecond = 1000.0;

}  // namespace

absl::StatusOr<PromptMix> PromptMix::Parse(std::string_view mix) {
  PromptMix parsed;
  double total = 0;
  for (absl::string_view part : absl::StrSplit(absl::string_view(mix.data(), mix.size()), ',')) {
    std::pair<absl::string_view, absl::string_view> fields = absl::StrSplit(part, absl::MaxSplits(':', 1));
    uint32_t tokens = 0;
    double weight = 1;
    bool has_weight = part.find(':') != part.npos;
    if (!absl::SimpleAtoi(fields.first, &tokens) || tokens == 0 ||
        (has_weight && !absl::SimpleAtod(fields.second, &weight)) || !std::isfinite(weight) || weight <= 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "prompt length \"%s\" is not TOKENS or TOKENS:WEIGHT with both above 0, as in 32:0.5,512:0.5",
          part));
    }
    total += weight;
    parsed.tokens_.push_back(tokens);
    parsed.cumulative_weight_.push_back(total);
  }
  return parsed;
}

uint32_t PromptMix::Draw(std::mt19937_64& random) const {
  double at = std::uniform_real_distribution<double>(0, cumulative_weight_.back())(random);
  size_t i =
      std::upper_bound(cumulative_weight_.begin(), cumulative_weight_.end(), at) - cumulative_weight_.begin();
  return tokens_[std::min(i, tokens_.size() - 1)];
}

uint32_t PromptMix::longest() const { return *std::max_element(tokens_.begin(), tokens_.end()); }

std::vector<uint32_t> RandomTokenIds(uint32_t length, uint32_t vocab_size,
                                     const std::vector<uint32_t>& excluded, std::mt19937_64& random) {
  std::uniform_int_distribution<uint32_t> any(0, vocab_size - 1);
  std::vector<uint32_t> ids(length);
  for (uint32_t& id : ids) {
    do {
      id = any(random);
    } while (std::find(excluded.begin(), excluded.end(), id) != excluded.end());
  }
  return ids;
}

double Percentile(const std::vector<double>& sorted, double percent) {
  double rank = percent / 100 * (sorted.size() - 1);
  size_t below = static_cast<size_t>(rank);
  size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (rank - below) * (sorted[above] - sorted[below]);
}

Summary Summarize(std::vector<double> samples) {
  Summary summary;
  if (samples.empty()) return summary;
  std::sort(samples.begin(), samples.end());
  summary.count = samples.size();
  for (double sample : samples) summary.mean += sample / samples.size();
  double variance = 0;
  for (double sample : samples)
    variance += (sample - summary.mean) * (sample - summary.mean) / samples.size();
  summary.stddev = std::sqrt(variance);
  summary.p50 = Percentile(samples, 50);
  summary.p95 = Percentile(samples, 95);
  summary.p99 = Percentile(samples, 99);
  summary.max = samples.back();
  return summary;
}

LoadReport MakeReport(const std::vector<RequestRecord>& records) {
  LoadReport report;
  if (records.empty()) return report;
  double first = records.front().due;
  double last = 0;
  double latency_seconds = 0;
  uint64_t chunks = 0;
  std::vector<double> ttft, tpot, itl, e2el;
  for (const RequestRecord& record : records) {
    first = std::min(first, record.due);
    last = std::max(last, record.ended);
    report.max_send_lag_ms = std::max(report.max_send_lag_ms, (record.sent - record.due) * kMsPerSecond);
    latency_seconds += record.ended - record.due;
    if (!record.error.empty()) {
      ++report.failed;
      ++report.errors[record.error];
      report.error_examples.emplace(record.error, record.error_message);
      continue;
    }
    ++report.completed;
    report.input_tokens += record.input_tokens;
    report.output_tokens += record.output_tokens;
    chunks += record.chunks.size();
    e2el.push_back((record.ended - record.due) * kMsPerSecond);
    if (record.chunks.empty()) continue;
    ttft.push_back((record.chunks.front() - record.due) * kMsPerSecond);
    if (record.output_tokens > 1) {
      tpot.push_back((record.ended - record.chunks.front()) * kMsPerSecond / (record.output_tokens - 1));
    }
    for (size_t i = 1; i < record.chunks.size(); ++i) {
      itl.push_back((record.chunks[i] - record.chunks[i - 1]) * kMsPerSecond);
    }
  }
  report.duration_seconds = last - first;
  if (report.duration_seconds > 0) {
    report.request_throughput = report.completed / report.duration_seconds;
    report.output_throughput = report.output_tokens / report.duration_seconds;
    report.total_token_throughput = (report.input_tokens + report.output_tokens) / report.duration_seconds;
    report.mean_concurrency = latency_seconds / report.duration_seconds;
  }
  if (chunks > 0) report.tokens_per_chunk = static_cast<double>(report.output_tokens) / chunks;
  report.ttft = Summarize(std::move(ttft));
  report.tpot = Summarize(std::move(tpot));
  report.itl = Summarize(std::move(itl));
  report.e2el = Summarize(std::move(e2el));
  return report;
}

}  // namespace efla
