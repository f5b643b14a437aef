#include "server/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <vector>

#include "absl/strings/str_format.h"
#include "model/config.h"
#include "server/build_id.h"
#include "server/sessions/redis_address.h"

namespace efla {
namespace {

constexpr int kBadUsage = 2;
constexpr int kMostSlots = 1 << 20;
constexpr double kLongestIdleSeconds = 10 * 365 * 86400.0;

// Flags whose typed form differs from their text.
struct RawOptions {
  std::string load_format = "auto", dtype = "bf16", model_type, listen = "0.0.0.0:50051",
              admin = "0.0.0.0:9090";
  std::string log_level = "info", log_format = "text";
  double drain_delay_seconds = 0, drain_seconds = 60, slow_reader_seconds = 30;
  double max_connection_age_seconds = 1800, keepalive_seconds = 30;
  double device_idle_seconds = 15, host_idle_seconds = 600, session_ttl_seconds = 30 * 86400;
  std::string session_host_bytes = "1GiB", session_dir_bytes = "0", prefix_cache_slots = "auto";
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

// A file of flags, whose keys are looked at before they are taken: CLI11 names an unknown one without its
// file.
class ConfigFile final : public CLI::ConfigBase {
 public:
  explicit ConfigFile(const CLI::App& app) : app_(app) {}
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> given = ConfigBase::from_config(input);
    for (const CLI::ConfigItem& item : given) {
      if (!item.parents.empty())
        Refuse(absl::StrFormat("has a section [%s]; there are none", item.parents[0]));
      const CLI::Option* const option = app_.get_option_no_throw("--" + item.name);
      if (option == nullptr) {
        Refuse(absl::StrFormat("has the key \"%s\", which is not known; see --help", item.name));
      } else if (!option->get_configurable()) {
        Refuse(absl::StrFormat("has the key \"%s\", which is for the command line only", item.name));
      }
    }
    return given;
  }

 private:
  [[noreturn]] void Refuse(const std::string& what) const {
    throw CLI::ValidationError(app_.get_config_ptr()->as<std::string>(), what);
  }
  const CLI::App& app_;
};

void Declare(CLI::App& app, Options& options, RawOptions& raw) {
  const auto range = [](auto low, auto high) { return CLI::Range(low, high); };
  app.set_config("--config", "", "TOML or INI file with the same names as the flags");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.config_formatter(std::make_shared<ConfigFile>(app));
  app.set_version_flag("--version", "efla_server " EFLA_VERSION " (build " + BuildId() + ")");

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
  Add(app, "tls-cert", options.tls_cert,
      "PEM file of the gRPC port's certificate and its chain; read again when it changes, and on SIGHUP");
  Add(app, "tls-key", options.tls_key, "PEM file of its private key, without a password");
  Add(app, "tls-client-ca", options.tls_client_ca,
      "PEM file of the authorities that sign clients' certificates; one that a client shows must be good");
  app.add_flag("--tls-require-client-cert", options.tls_require_client_cert, "Refuse clients that show none")
      ->envname(EnvironmentName("tls-require-client-cert"));
  Add(app, "auth-file", options.auth_file,
      "JSON file of the tokens that may call, by tenant; read again when it changes, and on SIGHUP. Without "
      "it everybody may call");
  Add(app, "admin", raw.admin,
      "HOST:PORT for the status page, /metrics, /livez and /readyz; port 0: any free one");
  app.add_flag("--admin-generate", options.admin_generate,
               "Let the status page stream completions, to browsers on this machine only")
      ->envname(EnvironmentName("admin-generate"));
  Add(app, "max-connection-age", raw.max_connection_age_seconds,
      "Seconds until a client is asked to connect anew, 10 % more or less, its running calls unharmed; 0: "
      "never")
      ->check(range(0.0, kLongestIdleSeconds));
  Add(app, "keepalive-time", raw.keepalive_seconds,
      "Seconds until a silent client is pinged; it has 10 seconds to answer, then its calls end")
      ->check(range(1.0, 86400.0));
  Add(app, "max-message-mib", raw.max_message_mib, "Largest request message in MiB")->check(range(1, 1024));
  Add(app, "state-slots", options.state_slots,
      "States held on the device at once, 2 at least; 0: from free memory")
      ->check(range(0, kMostSlots));
  Add(app, "max-running", options.max_running, "Sequences in a step's batch; 0: 32 on cpu, 256 on cuda")
      ->check(range(0, 1 << 16));
  Add(app, "max-batch-tokens", options.max_batch_tokens, "Tokens in a step, a multiple of 64")
      ->check(range(64, 1 << 16));
  Add(app, "max-queue", options.max_queue, "Requests that wait at most; more are refused")
      ->check(range(1, 1 << 20));
  Add(app, "max-queue-tokens", options.max_queue_tokens,
      "Prompt tokens that wait at most, over all requests; more are refused")
      ->check(range(int64_t{1}, int64_t{1} << 40));
  Add(app, "max-prompt-tokens", options.max_prompt_tokens, "Longest prompt")
      ->check(range(int64_t{1}, int64_t{1} << 32));
  Add(app, "max-new-tokens", options.max_new_tokens, "Most tokens a request may generate")
      ->check(range(int64_t{1}, int64_t{1} << 32));
  Add(app, "drain-delay", raw.drain_delay_seconds,
      "Seconds after SIGTERM in which health checks fail and new requests are still served: as long as "
      "balancers need to notice")
      ->check(range(0.0, 86400.0));
  Add(app, "drain-timeout", raw.drain_seconds, "Seconds that running requests have to end after that")
      ->check(range(0.0, 86400.0));
  Add(app, "slow-reader-timeout", raw.slow_reader_seconds, "Seconds until a stream that is not read is ended")
      ->check(range(0.001, 86400.0));
  Add(app, "prefix-cache-slots", raw.prefix_cache_slots,
      "State slots that the prefix cache may hold; 0: none; auto: an eighth of all");
  Add(app, "session-dir", options.session_dir,
      "Directory of sessions' disk tier; they outlive the server there");
  Add(app, "session-dir-bytes", raw.session_dir_bytes,
      "Most bytes there (10GiB works too); 0: what the disk has");
  Add(app, "session-store", options.session_store,
      "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]: a store that servers share, so that each continues any "
      "session");
  Add(app, "max-sessions", options.max_sessions, "Sessions at most")->check(range(1, 100'000'000));
  Add(app, "session-host-bytes", raw.session_host_bytes, "Host memory for idle sessions (1GiB works too)");
  Add(app, "session-device-idle", raw.device_idle_seconds, "Seconds until an idle session leaves the device")
      ->check(range(0.001, kLongestIdleSeconds));
  Add(app, "session-host-idle", raw.host_idle_seconds,
      "Seconds until an idle session leaves the server's memory, where there is a lower tier")
      ->check(range(0.001, kLongestIdleSeconds));
  Add(app, "session-ttl", raw.session_ttl_seconds, "Seconds until a session that is not used is gone")
      ->check(range(1.0, kLongestIdleSeconds));
  app.add_flag("--session-any-numerics", options.session_any_numerics,
               "Take up states that another build or device has computed; they go on with other rounding")
      ->envname(EnvironmentName("session-any-numerics"));
  Add(app, "replica-name", options.replica_name,
      "This server's name in the shared store, no other's; host name, port and a random part if empty");
  Add(app, "advertise", options.advertise,
      "HOST:PORT where clients reach this server, told to those that ask another; from --listen if empty. An "
      "IPv6 HOST needs no brackets");
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

// "1073741824", "1GiB", "1.5 GB".
int64_t Bytes(const std::string& flag, const std::string& text) {
  static const std::map<std::string, double> kUnits = {
      {"", 1},      {"B", 1},           {"KB", 1e3},        {"MB", 1e6},        {"GB", 1e9},
      {"TB", 1e12}, {"KIB", 1LL << 10}, {"MIB", 1LL << 20}, {"GIB", 1LL << 30}, {"TIB", 1LL << 40}};
  constexpr double kMost = static_cast<double>(int64_t{1} << 50);
  size_t end = 0;
  double number = -1;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
  }
  std::string unit;
  for (const char c : text.substr(end)) {
    if (c != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  const auto found = kUnits.find(unit);
  const double bytes = found == kUnits.end() ? -1 : number * found->second;
  if (!(bytes >= 0 && bytes <= kMost)) {
    throw CLI::ValidationError(
        "--" + flag,
        absl::StrFormat("is %s; it must be 0 to 1024TiB, as bytes or with KiB, MiB, GiB, TiB", text));
  }
  return static_cast<int64_t>(bytes);
}

int PrefixCacheSlots(const std::string& text) {
  if (text == "auto") return -1;
  int slots = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), slots);
  if (error != std::errc() || end != text.data() + text.size() || slots < 0 || slots > kMostSlots) {
    throw CLI::ValidationError("--prefix-cache-slots",
                               absl::StrFormat("is %s; it must be auto, or 0 to %d", text, kMostSlots));
  }
  return slots;
}

// Names of replicas are parts of keys and of messages.
void CheckReplicaName(const std::string& name) {
  constexpr size_t kMostCharacters = 128;
  const bool good = std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' || c == ':';
  });
  if (good && name.size() <= kMostCharacters) return;
  throw CLI::ValidationError(
      "--replica-name", absl::StrFormat("is \"%s\"; it may have %d characters of [A-Za-z0-9._:-] at most",
                                        name, kMostCharacters));
}

std::string DirectoryName(const std::string& path) {
  std::filesystem::path directory = std::filesystem::absolute(path).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();
  return directory.filename().string();
}

// Where a variable or a key is there for protection and was left empty, none would be there, without a word.
void RefuseEmptyProtection(const CLI::App& app) {
  for (const char* const flag : {"auth-file", "tls-cert", "tls-key", "tls-client-ca"}) {
    const CLI::Option* const option = app.get_option(std::string("--") + flag);
    const char* const variable = std::getenv(option->get_envname().c_str());
    if (variable != nullptr && *variable == '\0') {
      throw CLI::ValidationError(option->get_envname(), "is empty; unset it, or name a file");
    }
    if (option->count() > 0 && option->as<std::string>().empty()) {
      throw CLI::ValidationError(option->get_name(), "is empty; leave it out, or name a file");
    }
  }
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
  options.max_connection_age = Milliseconds("max-connection-age", raw.max_connection_age_seconds);
  options.keepalive_time = Milliseconds("keepalive-time", raw.keepalive_seconds);
  options.drain_delay = Milliseconds("drain-delay", raw.drain_delay_seconds);
  options.drain_timeout = Milliseconds("drain-timeout", raw.drain_seconds);
  options.slow_reader_timeout = Milliseconds("slow-reader-timeout", raw.slow_reader_seconds);
  options.prefix_cache_slots = PrefixCacheSlots(raw.prefix_cache_slots);
  options.session_host_bytes = Bytes("session-host-bytes", raw.session_host_bytes);
  options.session_dir_bytes = Bytes("session-dir-bytes", raw.session_dir_bytes);
  options.session_device_idle = Milliseconds("session-device-idle", raw.device_idle_seconds);
  options.session_host_idle = Milliseconds("session-host-idle", raw.host_idle_seconds);
  options.session_ttl = Milliseconds("session-ttl", raw.session_ttl_seconds);
  options.log_level = kLevels.at(raw.log_level);
  options.log_format = raw.log_format == "json" ? LogFormat::kJson : LogFormat::kText;

  if (!options.preset.empty() && (!options.dummy_weights || !options.checkpoint.empty())) {
    throw CLI::ValidationError("--preset", "needs --load-format=dummy and no --checkpoint");
  }
  if (options.checkpoint.empty() && options.preset.empty()) {
    throw CLI::ValidationError("--checkpoint", "is missing (or --load-format=dummy with --preset)");
  }
  const std::pair<const char*, bool> needs[] = {
      {"--tls-cert", options.tls_cert.empty() && !options.tls_key.empty()},
      {"--tls-key", options.tls_key.empty() && !options.tls_cert.empty()},
      {"--tls-cert", options.tls_cert.empty() && !options.tls_client_ca.empty()},
      {"--tls-client-ca", options.tls_client_ca.empty() && options.tls_require_client_cert}};
  for (const auto& [flag, missing] : needs) {
    if (missing) throw CLI::ValidationError(flag, "is missing; the other --tls flags that are given need it");
  }
  if (options.admin_generate && !options.auth_file.empty()) {
    throw CLI::ValidationError("--admin-generate", "is given with --auth-file; it would let everybody in");
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
  if (options.state_slots == 1) {
    throw CLI::ValidationError("--state-slots",
                               "is 1; it must be 0, or 2 and more: a session's turn holds two");
  }
  if (options.state_slots > 0 && options.prefix_cache_slots > options.state_slots) {
    throw CLI::ValidationError("--prefix-cache-slots", "is " + std::to_string(options.prefix_cache_slots) +
                                                           "; --state-slots is " +
                                                           std::to_string(options.state_slots));
  }
  if (options.session_dir_bytes > 0 && options.session_dir.empty()) {
    throw CLI::ValidationError("--session-dir-bytes", "needs --session-dir");
  }
  if (!options.session_store.empty()) {
    const absl::StatusOr<RedisAddress> address = RedisAddress::Parse(options.session_store);
    if (!address.ok()) throw CLI::ValidationError("--session-store", std::string(address.status().message()));
  }
  CheckReplicaName(options.replica_name);
  if (!options.advertise.empty()) {
    const absl::StatusOr<ListenAddress> address = ListenAddress::ParseJoined(options.advertise);
    if (!address.ok()) throw CLI::ValidationError("--advertise", std::string(address.status().message()));
    if (address->port == 0) {
      throw CLI::ValidationError("--advertise", "is " + options.advertise + "; its port must be 1 to 65535");
    }
    options.advertise = address->ToString();
  }
  if (options.model_name.empty()) {
    options.model_name = options.checkpoint.empty() ? options.preset : DirectoryName(options.checkpoint);
  }
}

// Whether errors of the options themselves are to be JSON: what the command line or else the environment
// says, since nothing else is known yet.
bool AsksForJson(int argc, const char* const* argv) {
  constexpr std::string_view kFlag = "--log-format";
  const char* const variable = std::getenv("EFLA_SERVER_LOG_FORMAT");
  std::string_view format = variable == nullptr ? "" : variable;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == kFlag && i + 1 < argc) {
      format = argv[i + 1];
    } else if (word.starts_with("--log-format=")) {
      format = word.substr(kFlag.size() + 1);
    }
  }
  return format == "json";
}

}  // namespace

std::variant<Options, ExitStatus> ParseOptions(int argc, const char* const* argv) {
  CLI::App app("Serves an EFLA language model over gRPC.", "efla_server");
  Options options;
  RawOptions raw;
  Declare(app, options, raw);
  try {
    app.parse(argc, argv);
    RefuseEmptyProtection(app);
    Convert(raw, options);
  } catch (const CLI::Success& success) {  // --help, --version
    return ExitStatus{app.exit(success)};
  } catch (const CLI::ParseError& error) {
    std::string line = error.what();
    std::replace(line.begin(), line.end(), '\n', ' ');
    if (AsksForJson(argc, argv)) {
      Log(LogLevel::kError, LogFormat::kJson).Error("bad_usage", line);
    } else {
      std::cerr << "efla_server: " << line << "\n";
    }
    return ExitStatus{kBadUsage};
  }
  return options;
}

}  // namespace efla
