// The arithmetic of a load run: what prompts to send and when, and what the recorded times say.
#ifndef EFLA_CLIENT_LOAD_STATS_H_
#define EFLA_CLIENT_LOAD_STATS_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace efla {

// Prompt lengths and how often each comes.
class PromptMix {
 public:
  // "32:0.5,512:0.5": tokens:weight; a weight left out is 1. Weights need not sum to 1.
  static absl::StatusOr<PromptMix> Parse(std::string_view mix);

  uint32_t Draw(std::mt19937_64& random) const;
  uint32_t longest() const;

 private:
  std::vector<uint32_t> tokens_;
  std::vector<double> cumulative_weight_;
};

// `length` ids drawn evenly from the vocabulary, those in `excluded` left out. At least one id must remain.
std::vector<uint32_t> RandomTokenIds(uint32_t length, uint32_t vocab_size,
                                     const std::vector<uint32_t>& excluded, std::mt19937_64& random);

// The value below which `percent` of the samples lie, interpolated linearly between the two nearest ranks, as
// numpy.percentile does. `sorted` is ascending and not empty.
double Percentile(const std::vector<double>& sorted, double percent);

struct Summary {
  size_t count = 0;
  double mean = 0, stddev = 0, p50 = 0, p95 = 0, p99 = 0, max = 0;
};
Summary Summarize(std::vector<double> samples);  // all 0 where there are none

// One request as the client saw it. Seconds from the start of the run.
struct RequestRecord {
  double due = 0;  // when it was to be sent: an open loop's arrival, a closed loop's free place
  double sent = 0;
  std::vector<double> chunks;                    // arrivals of messages that held tokens
  double ended = 0;                              // the finished event's arrival, or the error's
  uint64_t input_tokens = 0, output_tokens = 0;  // of the server's usage
  std::string error;                             // the status code's name; empty when it finished
  std::string error_message;
};

// Times in milliseconds, over the requests that finished.
struct LoadReport {
  double duration_seconds = 0;  // first due to last ended
  uint64_t completed = 0, failed = 0;
  std::map<std::string, uint64_t> errors;             // by status code
  std::map<std::string, std::string> error_examples;  // the first message of each
  uint64_t input_tokens = 0, output_tokens = 0;
  double request_throughput = 0, output_throughput = 0, total_token_throughput = 0;  // per second of the run
  double mean_concurrency = 0;  // sum of latencies over duration
  double tokens_per_chunk = 0;  // 1 where each message held one token
  double max_send_lag_ms = 0;   // how late this client sent; not small: the client was the limit
  Summary ttft;                 // due to first token
  Summary tpot;  // (end to end - ttft) / (output tokens - 1), one a request of two tokens or more
  Summary itl;   // gaps between a request's chunks, all requests pooled
  Summary e2el;  // due to the finished event
};
LoadReport MakeReport(const std::vector<RequestRecord>& records);

}  // namespace efla

#endif  // EFLA_CLIENT_LOAD_STATS_H_
