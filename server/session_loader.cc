#include "server/session_loader.h"

#include <unistd.h>

#include <chrono>
#include <functional>
#include <random>
#include <regex>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/disk_store.h"
#include "server/sessions/observed_store.h"
#include "server/sessions/redis_store.h"
#include "server/store_failure_log.h"

namespace efla {
namespace {

// What the start cannot use, a line each. A folder in which everything is damaged does not flood the log.
class StartProblems {
 public:
  explicit StartProblems(const Log& log) : log_(log) {}
  void Add(const char* message, const char* kind, const std::string& name, const absl::Status& why) {
    constexpr int kMostLines = 100;
    if (++count_ > kMostLines) return;
    const std::string code = absl::StatusCodeToString(why.code());
    log_.Warning("session_unusable", message,
                 {{kind, name}, {"code", code}, {"error", std::string(why.message())}});
  }
  int count() const { return count_; }

 private:
  const Log& log_;
  int count_ = 0;
};

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

// Where all interfaces are listened on, the host's name stands for them.
std::string AdvertisedAddress(const Options& options, const ListenAddress& grpc_address) {
  if (!options.advertise.empty()) return options.advertise;
  const bool any = grpc_address.host == "0.0.0.0" || grpc_address.host == "::" || grpc_address.host.empty();
  return ListenAddress{any ? HostName() : grpc_address.host, grpc_address.port}.ToString();
}

// A Redis server that has come up with this one reads its data first.
constexpr std::chrono::seconds kLoadingPatience{30};

using OnFailure = std::function<void(const StoreFailure&)>;

absl::StatusOr<std::unique_ptr<SessionStore>> OpenDisk(const Options& options,
                                                       const std::shared_ptr<HostBuffers>& buffers,
                                                       const OnFailure& on_failure, StartProblems& problems) {
  if (options.session_dir.empty()) return nullptr;
  auto disk = DiskStore::Open(
      {.folder = options.session_dir, .max_bytes = options.session_dir_bytes, .buffers = buffers});
  if (!disk.ok()) {
    return absl::Status(disk.status().code(),
                        absl::StrFormat("--session-dir: %s", std::string(disk.status().message())));
  }
  for (const DiskStore::Problem& problem : (*disk)->problems()) {
    problems.Add("a file of the session folder is unusable", "path", problem.path, problem.status);
  }
  return ObserveFailures(*std::move(disk), on_failure);
}

absl::StatusOr<std::unique_ptr<SessionStore>> OpenShared(const Options& options,
                                                         const std::shared_ptr<HostBuffers>& buffers,
                                                         const OnFailure& on_failure, const Log& log) {
  if (options.session_store.empty()) return nullptr;
  const absl::StatusOr<RedisAddress> address = RedisAddress::Parse(options.session_store);
  if (!address.ok()) return address.status();
  const auto fail = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrFormat("--session-store %s: %s", address->ToString(),
                                                       std::string(status.message())));
  };
  auto redis = RedisStore::Create(*address, {.buffers = buffers});
  if (!redis.ok()) return fail(redis.status());
  const absl::Status status = (*redis)->PingLoaded(kLoadingPatience, [&] {
    log.Warning("session_store_loading", "the session store is loading its data; waiting for it",
                {{"store", address->ToString()}, {"patience_seconds", kLoadingPatience.count()}});
  });
  if (!status.ok()) return fail(status);
  // A store that does not tell this user does not tell that it evicts, either.
  if (const absl::StatusOr<std::string> policy = (*redis)->MaxMemoryPolicy();
      policy.ok() && *policy != "noeviction") {
    log.Warning(
        "session_store_evicts",
        "the session store forgets sessions when its memory is full; set its maxmemory-policy to noeviction",
        {{"store", address->ToString()}, {"maxmemory_policy", *policy}});
  }
  return ObserveFailures(*std::move(redis), on_failure);
}

}  // namespace

std::string ReplicaName(const Options& options, const ListenAddress& grpc_address) {
  if (!options.replica_name.empty()) return options.replica_name;
  std::random_device random;
  return absl::StrFormat("%s:%d-%08x", HostName(), grpc_address.port, random());
}

std::string Numerics(const DeviceInfo& device, size_t activation_bytes) {
  static const std::regex kThreads(", [0-9]+ threads?");
  std::string numerics = absl::StrFormat("%s; %s; activations of %d bytes; efla %s, %s", device.kind,
                                         std::regex_replace(device.name, kThreads, ""), activation_bytes,
                                         EFLA_VERSION, __VERSION__);
  constexpr size_t kMostBytes = 192;  // of the snapshot's field
  return numerics.substr(0, kMostBytes);
}

absl::StatusOr<std::unique_ptr<SessionManager>> StartSessions(const Options& options,
                                                              const SnapshotFormat& format,
                                                              const ListenAddress& grpc_address,
                                                              Engine& engine, const Log& log) {
  const auto failures = std::make_shared<StoreFailureLog>(log);
  const OnFailure on_failure = [failures](const StoreFailure& failure) { failures->Write(failure); };
  StartProblems problems(log);
  absl::StatusOr<std::unique_ptr<SessionStore>> disk =
      OpenDisk(options, format.buffers(), on_failure, problems);
  if (!disk.ok()) return disk.status();
  absl::StatusOr<std::unique_ptr<SessionStore>> shared =
      OpenShared(options, format.buffers(), on_failure, log);
  if (!shared.ok()) return shared.status();
  const SessionOptions session_options{.max_sessions = options.max_sessions,
                                       .host_bytes = options.session_host_bytes,
                                       .device_idle = options.session_device_idle,
                                       .host_idle = options.session_host_idle,
                                       .max_ttl = options.session_ttl,
                                       .replica = ReplicaName(options, grpc_address),
                                       .address = AdvertisedAddress(options, grpc_address),
                                       .allow_other_numerics = options.session_any_numerics,
                                       .on_unusable =
                                           [&](const std::string& id, const absl::Status& why) {
                                             problems.Add("a session cannot be taken up", "session", id, why);
                                           },
                                       .on_lost =
                                           [&log](const std::string& id, const absl::Status& why) {
                                             log.Warning("session_lost", "a session's state is lost",
                                                         {{"session", id},
                                                          {"code", absl::StatusCodeToString(why.code())},
                                                          {"error", std::string(why.message())}});
                                           }};
  auto sessions =
      SessionManager::Start(engine, format, *std::move(disk), *std::move(shared), session_options);
  if (!sessions.ok()) return sessions.status();
  log.Info("sessions", "sessions are kept",
           {{"dir", options.session_dir},
            {"shared",
             options.session_store.empty() ? "" : RedisAddress::Parse(options.session_store)->ToString()},
            {"replica", session_options.replica},
            {"address", session_options.address},
            {"found", (*sessions)->stats().sessions},
            {"unusable", problems.count()}});
  return sessions;
}

}  // namespace efla
