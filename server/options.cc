#include "server/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>

#include "absl/strings/str_format.h"
#include "model/config.h"

namespace efla {
namespace {

constexpr int kBadUsage = 2;

// Flags whose typed form differs from their text.
struct RawOptions {
  std::string load_format = "auto", dtype = "bf16", model_type, listen = "0.0.0.0:50051",
              admin = "0.0.0.0:9090";
  std::string log_level = "info", log_format = "text";
  double drain_seconds = 60, slow_reader_seconds = 30;
  int max_message_mib = 16;
};

std::string EnvironmentName(std::string flag) {
  for (char& c : flag) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return "EFLA_SERVER_" + flag;
}

template <typename T>
CLI::Option* Add(CLI::App& app, const std::string& name, T& value, const std::string& help) {
  return app.add_option("--" + name, value, help)->envname(EnvironmentName(name))->capture_default_str();
}

void Declare(CLI::App& app, Options& options, RawOptions& raw) {
  const auto range = [](auto low, auto high) { return CLI::Range(low, high); };
  app.set_config("--config", "", "TOML or INI file with the same names as the flags");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_version_flag("--version", "efla_server " EFLA_VERSION);

  Add(app, "checkpoint", options.checkpoint, "Directory with config.json, safetensors and tokenizer.model");
  Add(app, "load-format", raw.load_format,
      "auto, or dummy: random weights of the checkpoint's or preset's shape")
      ->check(CLI::IsMember({"auto", "dummy"}));
  Add(app, "preset", options.preset, "Shape for --load-format=dummy without a checkpoint")
      ->check(CLI::IsMember({"demo", "340m", "1.3b"}));
  Add(app, "dtype", raw.dtype, "Dummy weights' type")->check(CLI::IsMember({"f32", "f16", "bf16"}));
  Add(app, "model-type", raw.model_type, "Replaces config.json's model_type")
      ->check(CLI::IsMember({"efla", "gated_efla", "delta_net", "gated_deltanet"}));
  Add(app, "model-name", options.model_name,
      "Name that requests and metrics use; the directory's name if empty");
  Add(app, "device", options.device, "auto: cuda where there is one, else cpu")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  Add(app, "threads", options.threads, "CPU worker threads; 0: one for each core")->check(range(0, 1024));
  Add(app, "listen", raw.listen, "HOST:PORT for gRPC; port 0: any free one");
  Add(app, "admin", raw.admin, "HOST:PORT for /metrics, /livez and /readyz; port 0: any free one");
  Add(app, "max-message-mib", raw.max_message_mib, "Largest request message in MiB")->check(range(1, 1024));
  Add(app, "state-slots", options.state_slots, "Sequences whose state is held at once; 0: from free memory")
      ->check(range(0, 1 << 20));
  Add(app, "max-running", options.max_running, "Sequences in a step's batch; 0: 32 on cpu, 256 on cuda")
      ->check(range(0, 1 << 16));
  Add(app, "max-batch-tokens", options.max_batch_tokens, "Tokens in a step, a multiple of 64")
      ->check(range(64, 1 << 16));
  Add(app, "max-queue", options.max_queue, "Requests that wait at most; more are refused")
      ->check(range(1, 1 << 20));
  Add(app, "max-prompt-tokens", options.max_prompt_tokens, "Longest prompt")
      ->check(range(int64_t{1}, int64_t{1} << 32));
  Add(app, "max-new-tokens", options.max_new_tokens, "Most tokens a request may generate")
      ->check(range(int64_t{1}, int64_t{1} << 32));
  Add(app, "drain-timeout", raw.drain_seconds, "Seconds that running requests have to end after SIGTERM")
      ->check(range(0.0, 86400.0));
  Add(app, "slow-reader-timeout", raw.slow_reader_seconds, "Seconds until a stream that is not read is ended")
      ->check(range(0.001, 86400.0));
  Add(app, "log-level", raw.log_level, "Least serious level that is logged")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
  Add(app, "log-format", raw.log_format, "Lines on stderr")->check(CLI::IsMember({"text", "json"}));
  app.add_flag("--debug-poison", options.debug_poison, "Fills freed state slots with NaN")
      ->envname(EnvironmentName("debug-poison"));
  app.footer(
      "Every flag NAME can also be set in the config file as NAME and in the environment as "
      "EFLA_SERVER_NAME, in\n"
      "capitals with _ for -. The command line beats the file, the file beats the environment.\n"
      "SIGTERM drains and ends with status 0; a second one cancels what runs.");
}

std::chrono::milliseconds Milliseconds(const std::string& flag, double seconds) {
  if (!std::isfinite(seconds))
    throw CLI::ValidationError("--" + flag, absl::StrFormat("%g is not a number of seconds", seconds));
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

ListenAddress Address(const std::string& flag, const std::string& text) {
  absl::StatusOr<ListenAddress> address = ListenAddress::Parse(text);
  if (!address.ok()) throw CLI::ValidationError("--" + flag, std::string(address.status().message()));
  return *address;
}

std::string DirectoryName(const std::string& path) {
  std::filesystem::path directory = std::filesystem::absolute(path).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();
  return directory.filename().string();
}

void Convert(const RawOptions& raw, Options& options) {
  static const std::map<std::string, DType> kDTypes = {
      {"f32", DType::kF32}, {"f16", DType::kF16}, {"bf16", DType::kBF16}};
  static const std::map<std::string, LogLevel> kLevels = {{"debug", LogLevel::kDebug},
                                                          {"info", LogLevel::kInfo},
                                                          {"warning", LogLevel::kWarning},
                                                          {"error", LogLevel::kError}};
  options.dummy_weights = raw.load_format == "dummy";
  options.dummy_dtype = kDTypes.at(raw.dtype);
  if (!raw.model_type.empty()) options.model_type = *ParseModelType(raw.model_type);
  options.listen = Address("listen", raw.listen);
  options.admin = Address("admin", raw.admin);
  options.max_message_bytes = int64_t{raw.max_message_mib} << 20;
  options.drain_timeout = Milliseconds("drain-timeout", raw.drain_seconds);
  options.slow_reader_timeout = Milliseconds("slow-reader-timeout", raw.slow_reader_seconds);
  options.log_level = kLevels.at(raw.log_level);
  options.log_format = raw.log_format == "json" ? LogFormat::kJson : LogFormat::kText;

  if (!options.preset.empty() && (!options.dummy_weights || !options.checkpoint.empty())) {
    throw CLI::ValidationError("--preset", "needs --load-format=dummy and no --checkpoint");
  }
  if (options.checkpoint.empty() && options.preset.empty()) {
    throw CLI::ValidationError("--checkpoint", "is missing (or --load-format=dummy with --preset)");
  }
  if (options.max_batch_tokens % kChunkTokens != 0) {
    throw CLI::ValidationError("--max-batch-tokens", "is " + std::to_string(options.max_batch_tokens) +
                                                         "; it must be a multiple of " +
                                                         std::to_string(kChunkTokens));
  }
  if (options.max_running > options.max_batch_tokens) {
    throw CLI::ValidationError("--max-running", "is " + std::to_string(options.max_running) +
                                                    "; --max-batch-tokens is " +
                                                    std::to_string(options.max_batch_tokens));
  }
  if (options.state_slots > 0 && options.max_running > options.state_slots) {
    throw CLI::ValidationError("--max-running", "is " + std::to_string(options.max_running) +
                                                    "; --state-slots is " +
                                                    std::to_string(options.state_slots));
  }
  if (options.model_name.empty()) {
    options.model_name = options.checkpoint.empty() ? options.preset : DirectoryName(options.checkpoint);
  }
}

}  // namespace

std::variant<Options, ExitStatus> ParseOptions(int argc, const char* const* argv) {
  CLI::App app("Serves an EFLA language model over gRPC.", "efla_server");
  Options options;
  RawOptions raw;
  Declare(app, options, raw);
  try {
    app.parse(argc, argv);
    Convert(raw, options);
  } catch (const CLI::Success& success) {  // --help, --version
    return ExitStatus{app.exit(success)};
  } catch (const CLI::ParseError& error) {
    std::string line = error.what();
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::cerr << "efla_server: " << line << "\n";
    return ExitStatus{kBadUsage};
  }
  return options;
}

}  // namespace efla
