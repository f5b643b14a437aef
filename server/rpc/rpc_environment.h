// What every call needs from the server. Outlives all calls.
#ifndef EFLA_SERVER_RPC_RPC_ENVIRONMENT_H_
#define EFLA_SERVER_RPC_RPC_ENVIRONMENT_H_

#include "server/log.h"
#include "server/metrics.h"
#include "server/rpc/access.h"
#include "server/rpc/fair_lane.h"
#include "server/rpc/session_workers.h"
#include "server/rpc/worker_pool.h"
#include "server/rpc/write_watch.h"
#include "server/serving_state.h"

namespace efla {

struct RpcEnvironment {
  const ServingState& state;
  Access& access;
  WorkerPool& workers;
  FairLane& constraint_lane;  // compiles constraints
  SessionWorkers& session_workers;
  WriteWatch& write_watch;
  Metrics& metrics;
  const Log& log;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_RPC_ENVIRONMENT_H_
