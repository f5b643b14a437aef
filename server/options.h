// What the operator asked for: flags, a config file and the environment, typed and checked.
#ifndef EFLA_SERVER_OPTIONS_H_
#define EFLA_SERVER_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "kernels/types.h"
#include "server/listen_address.h"
#include "server/log.h"

namespace efla {

struct Options {
  std::string checkpoint;  // directory; empty with dummy weights
  bool dummy_weights = false;
  std::string preset;                   // with dummy weights and no checkpoint
  DType dummy_dtype = DType::kBF16;     // with dummy weights
  std::optional<ModelType> model_type;  // replaces config.json's
  std::string model_name;               // never empty after parsing

  std::string device = "auto";
  int threads = 0;  // CPU worker threads; 0: one a core

  ListenAddress listen{"0.0.0.0", 50051};
  ListenAddress admin{"0.0.0.0", 9090};
  int64_t max_message_bytes = int64_t{16} << 20;
  std::string tls_cert, tls_key, tls_client_ca;  // files; empty: no TLS, no certificates of clients
  bool tls_require_client_cert = false;
  std::string auth_file;                                    // empty: everybody may do everything
  std::chrono::milliseconds max_connection_age{1'800'000};  // 0: without end
  std::chrono::milliseconds keepalive_time{30'000};
  bool admin_generate = false;

  int state_slots = 0;         // 0: from the device's free memory
  int max_running = 0;         // 0: by the device
  int max_batch_tokens = 512;  // a multiple of kChunkTokens
  int max_queue = 256;
  int64_t max_queue_tokens = 1 << 22;
  int64_t max_prompt_tokens = 1 << 20;
  int64_t max_new_tokens = 1 << 20;
  int prefix_cache_slots = -1;  // below 0: an eighth of the state slots
  std::chrono::milliseconds drain_delay{0}, drain_timeout{60'000};
  std::chrono::milliseconds slow_reader_timeout{30'000};

  std::string session_dir;        // empty: no disk tier
  int64_t session_dir_bytes = 0;  // 0: what the disk has
  std::string session_store;      // redis://...; empty: no shared tier
  int max_sessions = 100'000;
  int64_t session_host_bytes = int64_t{1} << 30;
  std::chrono::milliseconds session_device_idle{15'000}, session_host_idle{600'000};
  std::chrono::milliseconds session_ttl{std::chrono::hours(24 * 30)};
  bool session_any_numerics = false;
  std::string replica_name;  // empty: host name, port, and a random part
  std::string advertise;     // HOST:PORT; empty: made of --listen

  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  bool debug_poison = false;
};

// The program is to end at once with this status; help, version or one line about a bad value has been
// printed.
struct ExitStatus {
  int code;
};

// A flag on the command line beats the config file, the file beats the environment.
std::variant<Options, ExitStatus> ParseOptions(int argc, const char* const* argv);

}  // namespace efla

#endif  // EFLA_SERVER_OPTIONS_H_
