// What the methods that run the engine have in common: from the request to the engine, the turn of a session
// around it, cancellation, and the one way out.
#ifndef EFLA_SERVER_RPC_ENGINE_CALL_H_
#define EFLA_SERVER_RPC_ENGINE_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/branched_generation.h"
#include "server/engine/generation.h"
#include "server/rpc/access.h"
#include "server/rpc/event_messages.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/rpc_environment.h"
#include "server/sessions/session_manager.h"

namespace efla {

// Base of a reactor. Its life, and the threads of it:
//   Start        gRPC's thread: queues the preparation
//   Prepare      a worker: request to CallRequest, then Engine::Submit. In between, where they are needed:
//                the constraint lane compiles the constraint, unless what it becomes is known; a session
//                worker begins the turn, and submits or, where nothing needs computing, commits
//   OnReady      the engine's delivery thread, one at a time: takes events and writes
//   EndTurn      from OnReady when the end has been taken: a session worker commits the turn or drops it;
//                then OnTurnEnd
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
  // Around each write that is not the last: one that waits for too long ends the call.
  void WriteBegins() { watched_->Began(); }
  void WriteEnds() { watched_->Ended(); }
  // Why a call ends whose client takes nothing any more.
  absl::Status ReaderGone() const;
  // Keeps what logs need: of the request, even if it is refused, and of an event that is about to be sent.
  void NoteRequestId(const std::string& request_id);
  void NoteSession(const std::string& session_id);
  void Note(const Event& event);
  // Ends the call as the generation ended.
  void EndAs(const absl::Status& status);
  // The answer is about to begin, and it is no refusal.
  void BeginAnswer();
  // For a last message that carries the status along: what EndAs would record. Before it is written.
  void NoteEnd(const absl::Status& status);
  // Counts and logs the call. In OnDone.
  void RecordEnd();

  // Whether this is a turn of a session. Set before the first OnReady.
  bool has_turn() const { return turn_ != nullptr; }
  // Whether what Record gives will be kept.
  bool records() const { return turn_request_ && !turn_request_->change.request_id.empty(); }
  // Tokens that the turn appends.
  int64_t appended_tokens() const { return reply_context_.prompt_tokens.value_or(0); }
  // The session as the turn's commit will have made it: its name, revision and length.
  const v1::SessionAfterTurn& expected() const { return expected_; }
  // Ends the turn as the generation ended, cancelled calls as their on_cancel says: EndAs, or OnTurnEnd.
  void EndTurn(const absl::Status& end);

  RpcEnvironment& environment() { return environment_; }
  // For long work on the request: why it is not wanted any more.
  absl::Status StillWanted();
  // Set before the first OnReady.
  const ReplyContext& reply_context() const { return reply_context_; }

 private:
  virtual absl::StatusOr<CallRequest> Prepare(const ServedModel& model) = 0;
  virtual void OnReady(Generation& generation) = 0;
  // The reactor's Finish.
  virtual void End(grpc::Status status) = 0;
  // Session worker. What a repetition of the request id is answered with; `cut`: the generation did not
  // finish.
  virtual std::string Record(bool cut) { return {}; }
  // Session worker. A call with a turn ends well; answers and ends it. `computed`: events have been taken.
  virtual void OnTurnEnd(const SessionInfo& after, bool computed) {}
  // Session worker. The request id has been seen: answers with the record and ends the call, or says why not.
  virtual absl::Status OnReplay(const std::string& record, const SessionInfo& now) {
    return absl::OkStatus();
  }

  void PrepareAndSubmit();
  // A worker; then, on the constraint lane, CompileConstraint.
  void WaitForConstraint();
  void CompileConstraint();
  // A worker or the constraint lane.
  void BeginTurnOrSubmit();
  // Session worker.
  void BeginTurn();
  void CommitTurn(const absl::Status& end, bool computed);
  // Leaves the session as it was, and one that was made for this call not at all.
  void DropTurn();
  // Whoever shares the constraint lane fairly with others: the tenant or, where there are none, the peer.
  std::string LaneOwner() const;
  // Takes a place in the tenant's queue and the prompt's tokens, once.
  absl::Status TakeQueuePlace();
  // A worker or the constraint lane, or with a turn a session worker.
  void Submit();
  absl::StatusOr<std::shared_ptr<Generation>> SubmitToEngine(std::shared_ptr<BranchedGeneration>& branched);
  void Ready(Generation& generation);
  // Ends a call that has not run.
  void Refuse(absl::Status status, bool reached_engine);
  bool DeadlineHasCome() const;

  RpcEnvironment& environment_;
  const RpcMethod method_;
  grpc::CallbackServerContext& context_;
  const Clock::time_point begin_ = Clock::now();
  const std::optional<Clock::time_point> deadline_;
  const CallOrigin origin_;
  const WriteWatch::Place watched_;
  Caller caller_;  // set by Start
  TenantWork work_;
  bool answer_begun_ = false;
  ReplyContext reply_context_;
  const ServedModel* model_ = nullptr;  // set by the worker, like what follows
  GenerationRequest request_to_submit_;
  std::optional<ConstraintRequest> constraint_;  // to be compiled
  bool has_queue_place_ = false;                 // TakeQueuePlace
  std::vector<Branch> branches_to_submit_;
  std::optional<TurnRequest> turn_request_;

  // Session workers only, one after the other; turn_ is set before the generation.
  std::unique_ptr<Turn> turn_;
  // Ends a turn's generation when its session is deleted or taken over; may be called when this is no more.
  class Stop;
  std::shared_ptr<Stop> stop_;
  v1::SessionAfterTurn expected_;
  std::optional<SessionInfo> created_;  // the session was made for this call

  std::mutex mutex_;
  std::shared_ptr<Generation> generation_;        // guarded by mutex_; set once, by the worker
  std::shared_ptr<BranchedGeneration> branched_;  // the same, or null where there are no branches; likewise
  bool cancelled_ = false;                        // guarded by mutex_
  bool in_lane_ = false;                          // guarded by mutex_: the constraint lane has been posted to
  bool ready_early_ = false;  // guarded by mutex_: there was something before generation_ was set

  // For RecordEnd.
  std::string session_id_;
  absl::StatusCode end_code_ = absl::StatusCode::kUnknown;
  std::string end_message_, end_reason_;
  Usage usage_;
  Timing timing_;
  std::optional<FinishReason> finish_reason_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_ENGINE_CALL_H_
