#include "server/session_loader.h"

#include <unistd.h>

#include <random>
#include <regex>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/disk_store.h"
#include "server/sessions/redis_store.h"

namespace efla {
namespace {

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

// The random part makes a name of this process alone: a server that starts again is not taken for the one
// before.
std::string ReplicaName(const Options& options, const ListenAddress& grpc_address) {
  if (!options.replica_name.empty()) return options.replica_name;
  std::random_device random;
  return absl::StrFormat("%s:%d-%08x", HostName(), grpc_address.port, random());
}

// Where all interfaces are listened on, the host's name stands for them.
std::string AdvertisedAddress(const Options& options, const ListenAddress& grpc_address) {
  if (!options.advertise.empty()) return options.advertise;
  const bool any = grpc_address.host == "0.0.0.0" || grpc_address.host == "::" || grpc_address.host.empty();
  return ListenAddress{any ? HostName() : grpc_address.host, grpc_address.port}.ToString();
}

absl::StatusOr<std::unique_ptr<SessionStore>> OpenDisk(const Options& options) {
  if (options.session_dir.empty()) return nullptr;
  auto disk = DiskStore::Open({.folder = options.session_dir, .max_bytes = options.session_dir_bytes});
  if (disk.ok()) return *std::move(disk);
  return absl::Status(disk.status().code(),
                      absl::StrFormat("--session-dir: %s", std::string(disk.status().message())));
}

absl::StatusOr<std::unique_ptr<SessionStore>> OpenShared(const Options& options) {
  if (options.session_store.empty()) return nullptr;
  const absl::StatusOr<RedisAddress> address = RedisAddress::Parse(options.session_store);
  if (!address.ok()) return address.status();
  const auto fail = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrFormat("--session-store %s: %s", address->ToString(),
                                                       std::string(status.message())));
  };
  auto redis = RedisStore::Create(*address, {});
  if (!redis.ok()) return fail(redis.status());
  if (absl::Status status = (*redis)->Ping(); !status.ok()) return fail(status);
  return *std::move(redis);
}

}  // namespace

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
  absl::StatusOr<std::unique_ptr<SessionStore>> disk = OpenDisk(options);
  if (!disk.ok()) return disk.status();
  absl::StatusOr<std::unique_ptr<SessionStore>> shared = OpenShared(options);
  if (!shared.ok()) return shared.status();
  const SessionOptions session_options{.max_sessions = options.max_sessions,
                                       .host_bytes = options.session_host_bytes,
                                       .device_idle = options.session_device_idle,
                                       .host_idle = options.session_host_idle,
                                       .max_ttl = options.session_ttl,
                                       .replica = ReplicaName(options, grpc_address),
                                       .address = AdvertisedAddress(options, grpc_address),
                                       .allow_other_numerics = options.session_any_numerics};
  auto sessions =
      SessionManager::Start(engine, format, *std::move(disk), *std::move(shared), session_options);
  if (!sessions.ok()) return sessions.status();
  log.Info("sessions", "sessions are kept",
           {{"dir", options.session_dir},
            {"shared",
             options.session_store.empty() ? "" : RedisAddress::Parse(options.session_store)->ToString()},
            {"replica", session_options.replica},
            {"address", session_options.address},
            {"found", (*sessions)->stats().sessions}});
  return sessions;
}

}  // namespace efla
