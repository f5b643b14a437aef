#include "tests/e2e/golden_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_process.h"

namespace efla::e2e {

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names;
  std::error_code none;  // no such folder: no names, and a test says so
  for (const auto& entry : std::filesystem::directory_iterator(SourceDir() / "tests/golden", none)) {
    if (std::filesystem::exists(entry.path() / "expected.json")) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::filesystem::path GoldenDir(const std::string& name) { return SourceDir() / "tests/golden" / name; }

std::vector<GoldenCase> GoldenCases(const std::string& name) {
  std::ifstream file(GoldenDir(name) / "expected.json");
  std::vector<GoldenCase> cases;
  const nlohmann::json expected = nlohmann::json::parse(file);
  for (const nlohmann::json& from : expected.at("cases")) {
    GoldenCase& to = cases.emplace_back();
    from.at("tokens").get_to(to.tokens);
    for (const nlohmann::json& value : from.at("prompt_logprobs")) {
      to.prompt_logprobs.push_back(value.is_null() ? std::nullopt
                                                   : std::optional<double>(value.get<double>()));
    }
    for (const nlohmann::json& pair : from.at("top5_next")) to.top5_next.emplace_back(pair.at(0), pair.at(1));
    from.at("greedy").get_to(to.greedy);
    from.at("greedy_margins").get_to(to.greedy_margins);
  }
  return cases;
}

Tolerance DeviceTolerance(const std::string& checkpoint) {
  if (TestDevice() == "cpu") return {1e-3, 1e-3, -std::numeric_limits<double>::infinity()};
  // The one with F32 weights: tests/model/golden_test.cc says why.
  if (checkpoint == "efla_tied_sharded") return {8e-2, 16e-2, std::log(1e-3)};
  return {3e-2, 6e-2, std::log(1e-3)};
}

void ExpectGreedy(const std::vector<uint32_t>& ids, const std::vector<uint32_t>& expected,
                  const std::vector<double>& margins, const std::string& what, const Tolerance& tolerance) {
  ASSERT_LE(ids.size(), expected.size()) << what;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == expected[i]) continue;
    EXPECT_LE(margins[i], tolerance.greedy_margin)
        << what << ", token " << i << " is " << ids[i] << ", expected " << expected[i];
    return;
  }
}

}  // namespace efla::e2e
