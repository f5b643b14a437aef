// efla_checkpoint: looks into a checkpoint directory, verifies one, or writes one with random weights.
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/files.h"
#include "model/safetensors.h"
#include "model/state_pool.h"
#include "model/tokenizer.h"

namespace efla {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kBadUsage = 2;
constexpr int64_t kMaxConfigBytes = 1 << 20;

struct Arguments {
  std::string directory;
  std::string model_type;
  bool as_json = false;
  std::string preset, config_file;
  uint64_t seed = 0;
  std::string dtype = "bf16";
  int shards = 1;
  bool force = false;
};

absl::StatusOr<CheckpointOptions> OptionsOf(const Arguments& arguments) {
  CheckpointOptions options;
  if (arguments.model_type.empty()) return options;
  absl::StatusOr<ModelType> type = ParseModelType(arguments.model_type);
  if (!type.ok()) return type.status();
  options.type_override = *type;
  return options;
}

// Null when the directory has no tokenizer.model.
absl::StatusOr<std::unique_ptr<const Tokenizer>> OpenTokenizer(const Checkpoint& checkpoint) {
  absl::StatusOr<std::unique_ptr<const Tokenizer>> tokenizer =
      Tokenizer::Open(checkpoint.directory() + "/tokenizer.model");
  if (absl::IsNotFound(tokenizer.status())) return std::unique_ptr<const Tokenizer>();
  if (!tokenizer.ok()) return tokenizer.status();
  if ((*tokenizer)->vocab_size() > checkpoint.config().vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s/tokenizer.model has %d pieces; the model's vocab_size is %d",
                        checkpoint.directory(), (*tokenizer)->vocab_size(), checkpoint.config().vocab_size));
  }
  return tokenizer;
}

json Describe(const Checkpoint& checkpoint, const Tokenizer* tokenizer) {
  const ModelConfig& config = checkpoint.config();
  json out;
  out["directory"] = checkpoint.directory();
  out["config"] = json::parse(config.ToJson());
  out["d_k"] = config.d_k;
  out["d_v"] = config.d_v;
  out["parameters"] = config.parameter_count();
  out["state_bytes_per_sequence"] = StateLayout::Of(config).state_bytes();
  int64_t weight_bytes = 0;
  json totals = json::object();
  out["tensors"] = json::array();
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    const std::string dtype(SafetensorsName(tensor.dtype));
    out["tensors"].push_back({{"name", tensor.name}, {"dtype", dtype}, {"shape", tensor.shape}});
    weight_bytes += tensor.bytes();
    if (!totals.contains(dtype)) totals[dtype] = {{"tensors", 0}, {"bytes", 0}};
    json& total = totals[dtype];
    total["tensors"] = total["tensors"].get<int64_t>() + 1;
    total["bytes"] = total["bytes"].get<int64_t>() + tensor.bytes();
  }
  out["weight_bytes"] = weight_bytes;
  out["dtypes"] = totals;
  out["tokenizer"] = nullptr;
  if (tokenizer != nullptr) {
    out["tokenizer"] = {{"pieces", tokenizer->vocab_size()},
                        {"bos_id", tokenizer->bos_id()},
                        {"eos_id", tokenizer->eos_id()},
                        {"sha256", tokenizer->fingerprint()}};
  }
  return out;
}

void PrintDescription(const json& about) {
  std::printf("%s\n", about["directory"].get<std::string>().c_str());
  for (const auto& [key, value] : about["config"].items()) {
    std::printf("  %-26s %s\n", key.c_str(), value.dump().c_str());
  }
  for (const char* key : {"d_k", "d_v", "parameters", "weight_bytes", "state_bytes_per_sequence"}) {
    std::printf("  %-26s %s\n", key, about[key].dump().c_str());
  }
  for (const auto& [dtype, total] : about["dtypes"].items()) {
    std::printf("  %-26s %s tensors, %s bytes\n", dtype.c_str(), total["tensors"].dump().c_str(),
                total["bytes"].dump().c_str());
  }
  const json& tokenizer = about["tokenizer"];
  std::printf("  %-26s %s\n", "tokenizer", tokenizer.is_null() ? "none" : tokenizer.dump().c_str());
  std::printf("tensors\n");
  for (const json& tensor : about["tensors"]) {
    std::printf("  %-48s %-5s %s\n", tensor["name"].get<std::string>().c_str(),
                tensor["dtype"].get<std::string>().c_str(), tensor["shape"].dump().c_str());
  }
}

absl::Status Inspect(const Arguments& arguments) {
  absl::StatusOr<CheckpointOptions> options = OptionsOf(arguments);
  if (!options.ok()) return options.status();
  absl::StatusOr<std::shared_ptr<const Checkpoint>> checkpoint =
      Checkpoint::Open(arguments.directory, *options);
  if (!checkpoint.ok()) return checkpoint.status();
  absl::StatusOr<std::unique_ptr<const Tokenizer>> tokenizer = OpenTokenizer(**checkpoint);
  if (!tokenizer.ok()) return tokenizer.status();
  const json about = Describe(**checkpoint, tokenizer->get());
  if (arguments.as_json) {
    std::printf("%s\n", about.dump(2).c_str());
  } else {
    PrintDescription(about);
  }
  return absl::OkStatus();
}

absl::Status Verify(const Arguments& arguments) {
  absl::StatusOr<CheckpointOptions> options = OptionsOf(arguments);
  if (!options.ok()) return options.status();
  absl::StatusOr<std::shared_ptr<const Checkpoint>> checkpoint =
      Checkpoint::Open(arguments.directory, *options);
  if (!checkpoint.ok()) return checkpoint.status();
  if (absl::StatusOr<std::unique_ptr<const Tokenizer>> tokenizer = OpenTokenizer(**checkpoint);
      !tokenizer.ok()) {
    return tokenizer.status();
  }
  for (const TensorInfo& tensor : (*checkpoint)->tensors()) {
    if (absl::Status status = CheckFinite(tensor); !status.ok()) return status;
  }
  std::printf("ok %s\n", (*checkpoint)->Fingerprint().c_str());
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> RequestedConfig(const Arguments& arguments) {
  absl::StatusOr<CheckpointOptions> options = OptionsOf(arguments);
  if (!options.ok()) return options.status();
  if (!arguments.config_file.empty()) {
    absl::StatusOr<std::string> text = ReadFile(arguments.config_file, kMaxConfigBytes);
    if (!text.ok()) return text.status();
    return ModelConfig::Parse(*text, options->type_override);
  }
  absl::StatusOr<ModelConfig> config = ModelConfig::Preset(arguments.preset);
  if (config.ok() && options->type_override) config->type = *options->type_override;
  return config;
}

bool IsWeightFile(const std::string& name) {
  return name == "model.safetensors" || name == "model.safetensors.index.json" ||
         (name.starts_with("model-") && name.ends_with(".safetensors"));
}

absl::Status SystemError(const std::string& path, const char* action, int error) {
  return absl::InternalError(absl::StrFormat("%s: cannot %s: %s", path, action, std::strerror(error)));
}

// Files are written under another name first; the directory becomes a checkpoint when all are whole.
class DirectoryWriter {
 public:
  explicit DirectoryWriter(fs::path directory) : directory_(std::move(directory)) {}
  ~DirectoryWriter() {
    for (const std::string& name : names_) unlink(Temporary(name).c_str());
  }

  std::string Add(const std::string& name) {
    names_.push_back(name);
    return Temporary(name);
  }

  absl::Status AddText(const std::string& name, const std::string& text) {
    const std::string path = Add(name);
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    return file ? absl::OkStatus() : SystemError(path, "write", errno);
  }

  // Removes an earlier checkpoint's files and puts the new ones in place, in the order they were added.
  absl::Status Commit() {
    std::error_code error;
    std::vector<fs::path> old;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_, error)) {
      const std::string name = entry.path().filename();
      if (name == "config.json" || IsWeightFile(name)) old.push_back(entry.path());
    }
    for (const fs::path& path : old) {
      if (unlink(path.c_str()) != 0) return SystemError(path, "remove", errno);
    }
    for (const std::string& name : names_) {
      const std::string path = directory_ / name;
      if (std::rename(Temporary(name).c_str(), path.c_str()) != 0)
        return SystemError(path, "rename to", errno);
    }
    names_.clear();
    return absl::OkStatus();
  }

 private:
  std::string Temporary(const std::string& name) const {
    return directory_ / absl::StrFormat("%s.tmp%d", name, getpid());
  }

  const fs::path directory_;
  std::vector<std::string> names_;
};

// Cuts the tensors, which come in the model's order, into parts of about the same size.
std::vector<std::vector<TensorInfo>> Split(const std::vector<TensorInfo>& tensors, int parts) {
  int64_t total = 0;
  for (const TensorInfo& tensor : tensors) total += tensor.bytes();
  std::vector<std::vector<TensorInfo>> shards(static_cast<size_t>(parts));
  int64_t before = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    // By bytes, but every part gets a tensor.
    const int64_t by_bytes = before / (total / parts + 1);
    const auto last_allowed = static_cast<int64_t>(i);
    const int64_t first_allowed = parts - static_cast<int64_t>(tensors.size() - i);
    const int64_t part = std::clamp<int64_t>(by_bytes, std::max<int64_t>(first_allowed, 0),
                                             std::min<int64_t>(last_allowed, parts - 1));
    shards[static_cast<size_t>(part)].push_back(tensors[i]);
    before += tensors[i].bytes();
  }
  return shards;
}

absl::Status WriteRandom(const Arguments& arguments) {
  static const std::map<std::string, DType> kDTypes = {
      {"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f32", DType::kF32}};
  absl::StatusOr<ModelConfig> config = RequestedConfig(arguments);
  if (!config.ok()) return config.status();
  const fs::path directory = arguments.directory;
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return SystemError(directory, "create", error.value());
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (!arguments.force && (name == "config.json" || IsWeightFile(name))) {
      return absl::AlreadyExistsError(
          absl::StrFormat("%s is there already; --force replaces it", entry.path().string()));
    }
  }
  if (error) return SystemError(directory, "read", error.value());

  std::vector<TensorInfo> tensors;
  const std::vector<ExpectedTensor> expected = ExpectedTensors(*config);
  if (static_cast<size_t>(arguments.shards) > expected.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--shards is %d; the model has only %d tensors", arguments.shards, expected.size()));
  }
  absl::StatusOr<std::shared_ptr<const Checkpoint>> random =
      Checkpoint::Random(*config, arguments.seed, kDTypes.at(arguments.dtype));
  if (!random.ok()) return random.status();
  for (const ExpectedTensor& tensor : expected) tensors.push_back(*(*random)->Find(tensor.name));
  const auto written = [&](const TensorInfo& tensor) { (*random)->Release(tensor); };

  DirectoryWriter writer(directory);
  if (arguments.shards == 1) {
    absl::Status status = WriteSafetensors(writer.Add("model.safetensors"), tensors, written);
    if (!status.ok()) return status;
  } else {
    json index;
    int64_t total = 0;
    const std::vector<std::vector<TensorInfo>> shards = Split(tensors, arguments.shards);
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name = absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size());
      if (absl::Status status = WriteSafetensors(writer.Add(name), shards[i], written); !status.ok()) {
        return status;
      }
      for (const TensorInfo& tensor : shards[i]) {
        index["weight_map"][tensor.name] = name;
        total += tensor.bytes();
      }
    }
    index["metadata"]["total_size"] = total;
    absl::Status status = writer.AddText("model.safetensors.index.json", index.dump(1) + "\n");
    if (!status.ok()) return status;
  }
  if (absl::Status status = writer.AddText("config.json", config->ToJson()); !status.ok()) return status;
  if (absl::Status status = writer.Commit(); !status.ok()) return status;
  std::printf("%s: %s, %lld parameters, %s, seed %llu\n", directory.c_str(),
              std::string(ModelTypeName(config->type)).c_str(),
              static_cast<long long>(config->parameter_count()), arguments.dtype.c_str(),
              static_cast<unsigned long long>(arguments.seed));
  return absl::OkStatus();
}

// CLI11 itself takes a negative number as a large one, and one out of range as the nearest in it.
std::string CheckSeed(const std::string& text) {
  uint64_t seed = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, seed);
  if (error == std::errc() && end == last) return "";
  return absl::StrFormat("%s is not a whole number from 0 to 18446744073709551615", text);
}

int Main(int argc, char** argv) {
  CLI::App app("Inspects, verifies and makes checkpoint directories of EFLA language models.",
               "efla_checkpoint");
  app.require_subcommand(1);
  Arguments arguments;
  const auto add_common = [&](CLI::App* command, const char* directory) {
    command->add_option("directory", arguments.directory, directory)->required();
    command->add_option("--model-type", arguments.model_type,
                        "efla, gated_efla, delta_net or gated_deltanet, instead of what the config says");
  };
  CLI::App* inspect = app.add_subcommand("inspect", "Print the config, sizes, tensors and tokenizer");
  add_common(inspect, "checkpoint directory");
  inspect->add_flag("--json", arguments.as_json, "print one JSON object");
  CLI::App* verify =
      app.add_subcommand("verify", "Check every file and every weight; print the model's fingerprint");
  add_common(verify, "checkpoint directory");
  CLI::App* random = app.add_subcommand("random", "Write a checkpoint with random weights (no tokenizer)");
  add_common(random, "directory to write to; made when it is not there");
  CLI::Option* preset = random->add_option("--preset", arguments.preset, "demo, 340m or 1.3b");
  CLI::Option* config = random->add_option("--config", arguments.config_file, "a config.json");
  preset->excludes(config);
  random->add_option("--seed", arguments.seed, "same seed, same weights")
      ->check(CheckSeed, "from 0 to 18446744073709551615")
      ->capture_default_str();
  random->add_option("--dtype", arguments.dtype, "bf16, f16 or f32")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->capture_default_str();
  random->add_option("--shards", arguments.shards, "number of weight files")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  random->add_flag("--force", arguments.force, "replace a checkpoint that is there");
  try {
    app.parse(argc, argv);
    if (random->parsed() && arguments.preset.empty() && arguments.config_file.empty()) {
      throw CLI::RequiredError("random needs --preset or --config", CLI::ExitCodes::RequiredError);
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::string what = error.what();
    const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty()) {
      what = absl::StrFormat("there is no subcommand %s", argv[1]);
    }
    std::replace(what.begin(), what.end(), '\n', ' ');
    std::fprintf(stderr, "efla_checkpoint: %s; see: efla_checkpoint --help\n", what.c_str());
    return kBadUsage;
  }
  const absl::Status status = inspect->parsed()  ? Inspect(arguments)
                              : verify->parsed() ? Verify(arguments)
                                                 : WriteRandom(arguments);
  if (status.ok()) return 0;
  std::fprintf(stderr, "efla_checkpoint: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) { return efla::Main(argc, argv); }
