// What the three methods that run the engine have in common: from the request to the engine, cancellation,
// and the one way out.
#ifndef EFLA_SERVER_RPC_ENGINE_CALL_H_
#define EFLA_SERVER_RPC_ENGINE_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/generation.h"
#include "server/rpc/event_messages.h"
#include "server/rpc/rpc_environment.h"

namespace efla {

// Base of a reactor. Its life, and the threads of it:
//   Start        gRPC's thread: queues the preparation
//   Prepare      a worker: request to GenerationRequest, then Engine::Submit
//   OnReady      the engine's delivery thread, one at a time: takes events and writes
//   Cancel       gRPC's thread, at any moment of the above (the reactor's OnCancel)
//   End          whoever finds the end, once; then gRPC calls the reactor's OnDone, which calls RecordEnd and
//                deletes it. Nothing may be touched after End.
class EngineCall {
 public:
  EngineCall(const EngineCall&) = delete;
  EngineCall& operator=(const EngineCall&) = delete;

 protected:
  EngineCall(RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context);
  virtual ~EngineCall() = default;

  // `bytes`: size of the request, which chooses the lane.
  void Start(size_t bytes);
  // The client has gone or the server shuts down: the generation ends, which ends the call.
  void Cancel();
  // Has OnReady called again: a write has ended.
  void Deliver();
  // Keeps what logs need: of the request, even if it is refused, and of an event that is about to be sent.
  void NoteRequestId(const std::string& request_id);
  void Note(const Event& event);
  // Ends the call as the generation ended.
  void EndAs(const absl::Status& status);
  // For a last message that carries the status along: what EndAs would record.
  void NoteEnd(const absl::Status& status);
  // Counts and logs the call. In OnDone.
  void RecordEnd();

  RpcEnvironment& environment() { return environment_; }
  // Set before the first OnReady.
  const ReplyContext& reply_context() const { return reply_context_; }

 private:
  virtual absl::StatusOr<GenerationRequest> Prepare(const ServedModel& model) = 0;
  virtual void OnReady(Generation& generation) = 0;
  // The reactor's Finish.
  virtual void End(grpc::Status status) = 0;

  void PrepareAndSubmit();
  void Ready(Generation& generation);
  // Ends a call that has not run.
  void Refuse(absl::Status status, bool reached_engine);
  bool DeadlineHasCome() const;

  RpcEnvironment& environment_;
  const RpcMethod method_;
  grpc::CallbackServerContext& context_;
  const Clock::time_point begin_ = Clock::now();
  const std::optional<Clock::time_point> deadline_;
  const std::string peer_;  // gRPC forgets it when the connection is gone
  ReplyContext reply_context_;

  std::mutex mutex_;
  std::shared_ptr<Generation> generation_;  // guarded by mutex_; set once, by the worker
  bool cancelled_ = false;                  // guarded by mutex_
  bool ready_early_ = false;  // guarded by mutex_: there was something before generation_ was set
  Engine* engine_ = nullptr;  // set with generation_

  // For RecordEnd.
  absl::StatusCode end_code_ = absl::StatusCode::kUnknown;
  std::string end_message_;
  Usage usage_;
  Timing timing_;
  std::optional<FinishReason> finish_reason_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_ENGINE_CALL_H_
