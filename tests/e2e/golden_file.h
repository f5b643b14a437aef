// The golden checkpoints and the float64 answers that lie beside them.
#ifndef EFLA_TESTS_E2E_GOLDEN_FILE_H_
#define EFLA_TESTS_E2E_GOLDEN_FILE_H_

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace efla::e2e {

struct GoldenCase {
  std::vector<uint32_t> tokens;
  std::vector<std::optional<double>> prompt_logprobs;  // [tokens]; the first is absent
  std::vector<std::pair<uint32_t, double>> top5_next;  // best first, after the last token
  std::vector<uint32_t> greedy;                        // the continuation
  std::vector<double> greedy_margins;  // log-probability gap between best and second, one a token
};

// Folders under tests/golden, by name.
std::vector<std::string> GoldenNames();
std::filesystem::path GoldenDir(const std::string& name);
std::vector<GoldenCase> GoldenCases(const std::string& name);

// How far from the float64 answer the device may be; the values are the project's promise.
struct Tolerance {
  double logprob;        // absolute
  double greedy_margin;  // a greedy choice with a smaller margin may differ
  double least_logprob;  // positions less probable than this are not compared
};
Tolerance DeviceTolerance(const std::string& checkpoint = "");

// Compares a continuation with its greedy answer up to the first choice that was too close to call.
void ExpectGreedy(const std::vector<uint32_t>& ids, const std::vector<uint32_t>& expected,
                  const std::vector<double>& margins, const std::string& what,
                  const Tolerance& tolerance = DeviceTolerance());

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_GOLDEN_FILE_H_
