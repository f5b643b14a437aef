// What the benchmarks of a model have in common: its flags, the clock, figures of the process, the JSON file.
#ifndef EFLA_TESTS_BENCH_BENCH_OPTIONS_H_
#define EFLA_TESTS_BENCH_BENCH_OPTIONS_H_

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla {

struct BenchOptions {
  std::string checkpoint, preset, dtype = "bf16", device = "auto", json_file;
  int threads = 0;
  int ordinal = 0;
};

// --checkpoint to --ordinal; --json is added last, by AddJsonOption.
inline void AddModelOptions(CLI::App& app, BenchOptions& options) {
  auto* checkpoint = app.add_option("--checkpoint", options.checkpoint, "Checkpoint directory");
  auto* preset = app.add_option("--preset", options.preset, "Random weights of a preset: demo, 340m, 1.3b");
  checkpoint->excludes(preset);
  app.add_option("--dtype", options.dtype, "Weights of --preset")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str()
      ->needs(preset);
  app.add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--threads", options.threads, "CPU threads; 0: one for each usable core")
      ->capture_default_str();
  app.add_option("--ordinal", options.ordinal, "Which GPU")->capture_default_str();
}
inline void AddJsonOption(CLI::App& app, BenchOptions& options) {
  app.add_option("--json", options.json_file, "Also write every figure to this file");
}

inline double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

// A line of /proc/self/status, in bytes: "VmRSS:", "VmHWM:".
inline int64_t ProcessBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::stoll(line.substr(field.size())) * 1024;
  }
  return 0;
}

// False when it cannot be written. An empty name: nothing is asked for.
inline bool WriteJson(const std::string& file_name, const nlohmann::ordered_json& json) {
  if (file_name.empty()) return true;
  std::ofstream file(file_name);
  file << json.dump(2) << "\n";
  return static_cast<bool>(file.flush());
}

}  // namespace efla

#endif  // EFLA_TESTS_BENCH_BENCH_OPTIONS_H_
