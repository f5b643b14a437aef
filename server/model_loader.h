// From options to a running engine: device, checkpoint, weights, state pool, engine, sessions, in this order.
#ifndef EFLA_SERVER_MODEL_LOADER_H_
#define EFLA_SERVER_MODEL_LOADER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "model/chat.h"
#include "model/checkpoint.h"
#include "model/constraint/constraint.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "model/tokenizer.h"
#include "server/engine/engine.h"
#include "server/listen_address.h"
#include "server/log.h"
#include "server/options.h"
#include "server/served_model.h"
#include "server/sessions/session_manager.h"

namespace efla {

// Owns what ServedModel views; each member outlives those below it.
struct LoadedModel {
  std::unique_ptr<Device> device;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::unique_ptr<const Tokenizer> tokenizer;             // null: the checkpoint has none
  std::unique_ptr<const ConstraintCompiler> constraints;  // null without a tokenizer
  std::unique_ptr<const ChatTemplate> chat_template;      // null: none that can be used
  std::string no_chat_template;                           // why
  std::unique_ptr<Model> model;
  std::unique_ptr<StatePool> states;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<SessionManager> sessions;
  ServedModel served;
};

// Takes seconds to minutes. `grpc_address` is where this server is reached; `observer` must outlive the
// engine.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(const Options& options,
                                                       const ListenAddress& grpc_address,
                                                       EngineObserver* observer, const Log& log);

}  // namespace efla

#endif  // EFLA_SERVER_MODEL_LOADER_H_
