// From options to a session manager: stores, tiers, this server's name.
#ifndef EFLA_SERVER_SESSION_LOADER_H_
#define EFLA_SERVER_SESSION_LOADER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/engine/engine.h"
#include "server/listen_address.h"
#include "server/log.h"
#include "server/options.h"
#include "server/sessions/session_manager.h"
#include "server/sessions/snapshot.h"

namespace efla {

// The arithmetic of this build on this device: states computed with the same one may go on here, to the bit.
// The number of CPU threads has no part in it.
std::string Numerics(const DeviceInfo& device, size_t activation_bytes);

// --replica-name, or a name of this process alone: a server that starts again is not taken for the one
// before.
std::string ReplicaName(const Options& options, const ListenAddress& grpc_address);

// `options` with a replica name. `grpc_address` as bound. Fails when the directory is another server's or
// cannot be written, and when the shared store cannot be reached: a server that could not keep its promises
// is better seen to fail at once. A store that is loading its data is waited for, half a minute at most.
absl::StatusOr<std::unique_ptr<SessionManager>> StartSessions(const Options& options,
                                                              const SnapshotFormat& format,
                                                              const ListenAddress& grpc_address,
                                                              Engine& engine, const Log& log);

}  // namespace efla

#endif  // EFLA_SERVER_SESSION_LOADER_H_
