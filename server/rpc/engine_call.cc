#include "server/rpc/engine_call.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "server/rpc/chat_prompt.h"
#include "server/rpc/session_messages.h"
#include "server/rpc/status.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

// A session that is made with something in it: the request id under which that is appended.
constexpr char kFirstAppendSuffix[] = "#append";

constexpr milliseconds kLoadingRetry{1000};
// Another server can take the request at once.
constexpr milliseconds kElsewhereRetry{0};
constexpr milliseconds kShortestQueueRetry{100}, kLongestQueueRetry{10'000};
// gRPC cancels a call whose deadline has passed, and its client may do so a little before. Both are
// deadlines.
constexpr milliseconds kDeadlineSlack{20};
// Further away than this is no deadline: the clocks' difference must not overflow.
constexpr std::chrono::hours kLongestDeadline{24 * 365};

std::optional<Clock::time_point> DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto now = std::chrono::system_clock::now();
  const std::chrono::system_clock::time_point deadline = context.deadline();
  if (deadline > now + kLongestDeadline) return std::nullopt;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(deadline - now);
}

Rejection RejectionOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted: {
      const std::string reason = ErrorReason(status);
      if (reason.starts_with("TENANT_")) return Rejection::kLimit;
      return reason == "SESSION_LIMIT" || reason == "NO_STATE_SLOT" ? Rejection::kSessionLimit
                                                                    : Rejection::kQueueFull;
    }
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
      return Rejection::kAuth;
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
      return Rejection::kError;
    case absl::StatusCode::kUnavailable:
      return Rejection::kUnavailable;
    case absl::StatusCode::kDeadlineExceeded:
      return Rejection::kDeadline;
    case absl::StatusCode::kCancelled:
      return Rejection::kCancelled;
    default:
      return Rejection::kInvalid;
  }
}

// By then, the queue has moved on by about what the oldest in it has waited.
milliseconds QueueRetry(const ServedModel* model) {
  const double waited = model == nullptr ? 0 : model->engine->stats().oldest_wait_seconds;
  return std::clamp(milliseconds(static_cast<int64_t>(waited * 1000)), kShortestQueueRetry,
                    kLongestQueueRetry);
}

// Adds what a client needs to try again.
absl::Status WithRefusalDetails(absl::Status status, const ServingState& state) {
  if (HasReason(status)) return status;
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return WithRetry(WithReason(std::move(status), "QUEUE_FULL"), QueueRetry(state.model()));
    case absl::StatusCode::kUnavailable:
      if (state.model() == nullptr)
        return WithRetry(WithReason(std::move(status), "MODEL_LOADING"), kLoadingRetry);
      return WithRetry(WithReason(std::move(status), state.healthy() ? "DRAINING" : "ENGINE_FAILED"),
                       kElsewhereRetry);
    default:
      return status;
  }
}

// The same for a call that has run.
absl::Status WithEndDetails(absl::Status status) {
  if (HasReason(status)) return status;
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return WithReason(std::move(status), "SLOW_READER");
    case absl::StatusCode::kUnavailable:
      return WithRetry(WithReason(std::move(status), "SHUTDOWN"), kElsewhereRetry);
    case absl::StatusCode::kInternal:
      return WithReason(std::move(status), "ENGINE_ERROR");
    case absl::StatusCode::kFailedPrecondition:
      return WithReason(std::move(status), "NOTHING_TO_DRAW");
    default:
      return status;
  }
}

}  // namespace

class EngineCall::Stop {
 public:
  void Call() {
    std::shared_ptr<Generation> generation;
    {
      const std::scoped_lock lock(mutex_);
      called_ = true;
      generation = generation_;
    }
    if (generation != nullptr) generation->Cancel();
  }
  // Whether it has been called already.
  bool Attach(const std::shared_ptr<Generation>& generation) {
    const std::scoped_lock lock(mutex_);
    generation_ = generation;
    return called_;
  }

 private:
  std::mutex mutex_;  // guards what follows
  bool called_ = false;
  std::shared_ptr<Generation> generation_;
};

EngineCall::EngineCall(RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context)
    : environment_(environment),
      method_(method),
      context_(context),
      deadline_(DeadlineOf(context)),
      origin_(context),
      watched_(environment.write_watch.Enter([&context] { context.TryCancel(); })) {
  environment_.metrics.OnCallStarted(method_);
}

void EngineCall::Start(size_t bytes) {
  if (absl::Status status = environment_.access.Admit(context_, origin_, method_, caller_); !status.ok()) {
    return Refuse(std::move(status), /*reached_engine=*/false);
  }
  if (!environment_.workers.TryPost(bytes, [this] { PrepareAndSubmit(); })) {
    Refuse(absl::ResourceExhaustedError("too many requests wait to be prepared"), /*reached_engine=*/false);
  }
}

void EngineCall::PrepareAndSubmit() {
  const ServedModel* model = environment_.access.ModelOf(caller_);
  if (model == nullptr) {
    return Refuse(absl::UnavailableError("the model is being loaded"), /*reached_engine=*/false);
  }
  if (absl::Status status = StillWanted(); !status.ok()) return Refuse(status, /*reached_engine=*/false);
  absl::StatusOr<CallRequest> call = Prepare(*model);
  if (!call.ok()) return Refuse(call.status(), /*reached_engine=*/false);
  model_ = model;
  request_to_submit_ = std::move(call->generation);
  branches_to_submit_ = std::move(call->branches);
  request_to_submit_.deadline = deadline_;
  // No tenant's name holds a zero: two tenants never have the same salt.
  request_to_submit_.prefix_cache_salt = caller_.tenant + '\0' + request_to_submit_.prefix_cache_salt;
  reply_context_.request_id = request_to_submit_.request_id;
  reply_context_.model = model->name;
  reply_context_.tokenizer = model->tokenizer;
  reply_context_.logprobs = request_to_submit_.logprobs;
  reply_context_.seed = request_to_submit_.sampling.seed;
  absl::Status allowed =
      environment_.access.CheckPriority(caller_, request_to_submit_.priority, origin_, method_);
  if (allowed.ok()) {
    absl::StatusOr<TenantWork> work = environment_.access.BeginWork(caller_);
    if (work.ok()) {
      work_ = *std::move(work);
    } else {
      allowed = work.status();
      environment_.access.NoteRefusal(allowed, caller_, origin_, method_);
    }
  }
  if (!allowed.ok()) return Refuse(std::move(allowed), /*reached_engine=*/false);
  if (call->turn) {
    turn_request_ = std::move(call->turn);
    session_id_ = turn_request_->change.session_id;
  }
  if (!call->constraint) return BeginTurnOrSubmit();
  constraint_ = std::move(call->constraint);
  std::optional<CompiledOrError> known = model->constraints->Find(constraint_->spec);
  if (!known) return WaitForConstraint();
  absl::Status status = TakeConstraint(constraint_->field, *std::move(known), request_to_submit_);
  status.ok() ? BeginTurnOrSubmit() : Refuse(std::move(status), /*reached_engine=*/false);
}

std::string EngineCall::LaneOwner() const {
  return caller_.tenant.empty() ? origin_.peer.substr(0, origin_.peer.rfind(':')) : caller_.tenant;
}

// The tenant's limits hold for calls that wait here. How many tokens a turn's prompt has is known later.
void EngineCall::WaitForConstraint() {
  if (!turn_request_) {
    if (absl::Status status = TakeQueuePlace(); !status.ok()) {
      return Refuse(std::move(status), /*reached_engine=*/false);
    }
  }
  bool cancelled;
  {
    // Once posted, the call may end as soon as this lock is free: only local variables.
    const std::scoped_lock lock(mutex_);
    cancelled = cancelled_;
    if (!cancelled) {
      in_lane_ = environment_.constraint_lane.TryPost(LaneOwner(), this, [this] { CompileConstraint(); });
      if (in_lane_) return;
    }
  }
  if (cancelled) {
    return Refuse(absl::CancelledError("cancelled before its constraint was compiled"),
                  /*reached_engine=*/false);
  }
  Refuse(WithRetry(WithReason(absl::ResourceExhaustedError("too many constraints wait to be compiled"),
                              "QUEUE_FULL"),
                   environment_.constraint_lane.RetryDelay()),
         /*reached_engine=*/false);
}

void EngineCall::CompileConstraint() {
  absl::Status status = StillWanted();
  if (status.ok()) {
    status = TakeConstraint(constraint_->field,
                            model_->constraints->Compile(constraint_->spec, [this] { return StillWanted(); }),
                            request_to_submit_);
  }
  if (!status.ok()) return Refuse(std::move(status), /*reached_engine=*/false);
  constraint_.reset();
  BeginTurnOrSubmit();
}

void EngineCall::BeginTurnOrSubmit() {
  if (!turn_request_) return Submit();
  if (!environment_.session_workers.TryPost([this] { BeginTurn(); })) {
    Refuse(absl::ResourceExhaustedError("too many calls wait for their sessions"), /*reached_engine=*/false);
  }
}

void EngineCall::BeginTurn() {
  {
    std::unique_lock lock(mutex_);
    if (cancelled_) {
      lock.unlock();
      return Refuse(absl::CancelledError("cancelled before its turn began"), /*reached_engine=*/false);
    }
  }
  const auto refuse = [this](const absl::Status& status) {
    Refuse(WithSessionDetails(status), /*reached_engine=*/false);
  };
  if (environment_.state.draining()) {
    return refuse(WithSessionError(absl::UnavailableError("the server is shutting down"), "DRAINING"));
  }
  SessionManager& sessions = *model_->sessions;
  TurnRequest& wanted = *turn_request_;
  if (wanted.new_session_ttl) {
    absl::StatusOr<SessionInfo> created = sessions.Create(wanted.change.session_id, *wanted.new_session_ttl,
                                                          wanted.change.request_id, wanted.change.durability);
    if (!created.ok()) return refuse(created.status());
    session_id_ = wanted.change.session_id = created->session_id;
    if (request_to_submit_.prompt.empty()) return OnTurnEnd(*created, /*computed=*/false);
    created_ = *std::move(created);
    // An id of its own: the session has recorded the call's for its creation.
    if (!wanted.change.request_id.empty()) wanted.change.request_id += kFirstAppendSuffix;
  }
  absl::StatusOr<SessionManager::Begun> begun =
      sessions.BeginTurn(wanted.change, wanted.on_cancel, wanted.create_if_missing);
  if (!begun.ok()) {
    // Somebody else is at it already, a call that this one repeats: it is not ours to delete.
    if (absl::IsAborted(begun.status())) created_.reset();
    return refuse(begun.status());
  }
  if (begun->reply) {
    created_.reset();  // by the call that this one repeats
    if (absl::Status status = OnReplay(*begun->reply, begun->info); !status.ok()) refuse(status);
    return;
  }
  turn_ = std::move(begun->turn);
  const SessionInfo& before = turn_->before();
  if (before.tokens == 0 && !wanted.no_start.ok()) return refuse(wanted.no_start);
  std::vector<TokenId> tokens =
      before.tokens == 0 ? std::move(request_to_submit_.prompt) : std::move(wanted.continuation);
  if (before.tokens > 0) {
    const size_t closed = ClosedAlready(tokens, wanted.seam, turn_->last_drawn(), *model_);
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<int64_t>(closed));
  }
  if (tokens.empty() && (before.tokens == 0 || !wanted.generates)) {
    return refuse(InvalidField(
        "text", before.tokens == 0 ? "is empty and so is the session; a prompt needs a token"
                                   : "is empty and nothing is to be generated; there is nothing to do"));
  }
  reply_context_.prompt_tokens = static_cast<int64_t>(tokens.size());
  reply_context_.session_revision = before.revision;
  const absl::StatusOr<bool> computes =
      turn_->Prepare(std::move(tokens), wanted.generates, request_to_submit_);
  if (!computes.ok()) return refuse(computes.status());
  if (!*computes) return CommitTurn(absl::OkStatus(), /*computed=*/false);
  if (wanted.echoes) {
    request_to_submit_.echo_tokens = *reply_context_.prompt_tokens;
    reply_context_.echo_at_start = !request_to_submit_.continues_text;
  }
  stop_ = std::make_shared<Stop>();
  turn_->OnLost([stop = stop_] { stop->Call(); });
  Submit();
}

absl::Status EngineCall::TakeQueuePlace() {
  if (has_queue_place_) return absl::OkStatus();
  usage_.prompt_tokens = static_cast<int64_t>(request_to_submit_.prompt.size());
  for (const Branch& branch : branches_to_submit_) usage_.prompt_tokens += std::ssize(branch.continuation);
  absl::Status status = work_.Queue(usage_.prompt_tokens);
  has_queue_place_ = status.ok();
  if (!status.ok()) environment_.access.NoteRefusal(status, caller_, origin_, method_);
  return status;
}

void EngineCall::Submit() {
  if (absl::Status status = TakeQueuePlace(); !status.ok()) {
    return Refuse(std::move(status), /*reached_engine=*/false);
  }
  Engine* const engine = model_->engine;
  const std::shared_ptr<Stop> stop = stop_;
  const bool has_branches = !branches_to_submit_.empty();
  std::shared_ptr<BranchedGeneration> branched;
  absl::StatusOr<std::shared_ptr<Generation>> submitted = SubmitToEngine(branched);
  if (!submitted.ok()) {
    return Refuse(submitted.status(), /*reached_engine=*/!has_branches);
  }

  const std::shared_ptr<Generation> generation = *std::move(submitted);
  bool cancel, deliver;
  {
    const std::scoped_lock lock(mutex_);
    generation_ = generation;
    branched_ = branched;
    cancel = cancelled_;
    deliver = ready_early_;
  }
  // From here on the call may end at any moment: only local variables.
  if (stop != nullptr) cancel |= stop->Attach(generation);
  if (cancel) generation->Cancel();
  if (deliver) branched != nullptr ? branched->Deliver() : engine->Deliver(generation);
}

// `branched`: what is given back, where it has branches.
absl::StatusOr<std::shared_ptr<Generation>> EngineCall::SubmitToEngine(
    std::shared_ptr<BranchedGeneration>& branched) {
  Engine& engine = *model_->engine;
  ReadyCallback ready = [this](Generation& generation) { Ready(generation); };
  if (branches_to_submit_.empty()) return engine.Submit(std::move(request_to_submit_), std::move(ready));
  WorkerPool& workers = environment_.workers;
  const size_t job_bytes = BranchedGeneration::JobBytes(request_to_submit_, branches_to_submit_);
  absl::StatusOr<std::shared_ptr<BranchedGeneration>> submitted = BranchedGeneration::Submit(
      engine, std::move(request_to_submit_), std::move(branches_to_submit_),
      [&workers, job_bytes](std::function<void()> job) { workers.Post(job_bytes, std::move(job)); },
      &environment_.metrics, std::move(ready));
  if (!submitted.ok()) return submitted.status();
  branched = *std::move(submitted);
  return branched;
}

void EngineCall::EndTurn(const absl::Status& end) {
  environment_.session_workers.PostEnd([this, end] { CommitTurn(end, /*computed=*/true); });
}

void EngineCall::CommitTurn(const absl::Status& end, bool computed) {
  absl::Status outcome = end;
  if (outcome.ok()) {
    const std::scoped_lock lock(mutex_);
    // The client cannot know how far the turn had come, so that it counts as cut.
    if (cancelled_) {
      outcome = DeadlineHasCome()
                    ? absl::DeadlineExceededError("the deadline passed before the turn was committed")
                    : absl::CancelledError("cancelled before the turn was committed");
    }
  }
  // Whatever else has ended it: the session is not there any more.
  if (absl::Status lost = turn_->Lost(); !lost.ok()) {
    DropTurn();
    return EndAs(WithSessionDetails(std::move(lost)));
  }
  const bool cut = !outcome.ok();
  const bool keeps = turn_request_->on_cancel == OnCancel::kKeep && computed;
  std::optional<FinalState> state = computed ? generation_->TakeFinalState() : std::nullopt;
  if (cut && (!keeps || !state)) {
    DropTurn();
    return EndAs(outcome);
  }
  expected_.set_session_id(session_id_);
  expected_.set_began_revision(turn_->before().revision);
  expected_.set_revision(turn_->next_revision());
  expected_.set_tokens(static_cast<uint64_t>(turn_->before().tokens + appended_tokens() +
                                             (state ? std::ssize(state->drawn) : 0)));
  expected_.set_committed(true);
  absl::StatusOr<SessionInfo> after =
      turn_->Commit(std::move(state), cut, records() ? Record(cut) : std::string());
  if (cut || after.ok()) created_.reset();
  DropTurn();
  if (cut) return EndAs(outcome);
  if (!after.ok()) return EndAs(WithSessionDetails(after.status()));
  OnTurnEnd(*after, computed);
}

void EngineCall::DropTurn() {
  turn_.reset();
  if (!created_) return;
  // Whoever has changed it since keeps it.
  SessionChange change;
  change.session_id = created_->session_id;
  change.expected_revision = created_->revision;
  change.undoes_creation = true;
  const absl::Status deleted = model_->sessions->Delete(change);
  if (!deleted.ok() && !absl::IsNotFound(deleted)) {
    environment_.log.Warning(
        "session_left", "a session that could not be filled is still there",
        {{"session", created_->session_id}, {"message", std::string(deleted.message())}});
  }
  created_.reset();
}

void EngineCall::Ready(Generation& generation) {
  {
    const std::scoped_lock lock(mutex_);
    if (generation_ == nullptr) {  // Submit has not returned yet; the worker delivers again
      ready_early_ = true;
      return;
    }
  }
  BeginAnswer();
  OnReady(generation);
}

void EngineCall::BeginAnswer() {
  if (std::exchange(answer_begun_, true)) return;
  EchoTrace(origin_.trace_id, absl::OkStatus(), context_);
}

bool EngineCall::DeadlineHasCome() const { return deadline_ && Clock::now() + kDeadlineSlack >= *deadline_; }

void EngineCall::Cancel() {
  std::shared_ptr<Generation> generation;
  bool in_lane;
  {
    const std::scoped_lock lock(mutex_);
    cancelled_ = true;
    generation = generation_;
    in_lane = in_lane_;
  }
  if (in_lane && generation == nullptr && environment_.constraint_lane.Withdraw(LaneOwner(), this)) {
    return Refuse(DeadlineHasCome()
                      ? absl::DeadlineExceededError("the deadline passed before the constraint was compiled")
                      : absl::CancelledError("cancelled before its constraint was compiled"),
                  /*reached_engine=*/false);
  }
  // At the deadline the engine ends the generation itself, and counts it so.
  if (generation != nullptr && !DeadlineHasCome()) generation->Cancel();
}

void EngineCall::Deliver() {
  std::shared_ptr<Generation> generation;
  std::shared_ptr<BranchedGeneration> branched;
  {
    const std::scoped_lock lock(mutex_);
    generation = generation_;
    branched = branched_;
  }
  branched != nullptr ? branched->Deliver() : model_->engine->Deliver(generation);
}

absl::Status EngineCall::StillWanted() {
  {
    const std::scoped_lock lock(mutex_);
    if (cancelled_) return absl::CancelledError("cancelled before it was prepared");
  }
  if (deadline_ && *deadline_ <= Clock::now()) {
    return absl::DeadlineExceededError("the deadline passed before the request was prepared");
  }
  return absl::OkStatus();
}

void EngineCall::NoteRequestId(const std::string& request_id) {
  reply_context_.request_id = LoggedText(request_id);
}

void EngineCall::NoteSession(const std::string& session_id) { session_id_ = LoggedName(session_id); }

void EngineCall::Note(const Event& event) {
  if (const auto* accepted = std::get_if<AcceptedEvent>(&event)) {
    timing_.queue_us = accepted->queue_us;
    work_.LeaveQueue();
  } else if (const auto* delta = std::get_if<DeltaEvent>(&event)) {
    usage_ = delta->usage;
    timing_ = delta->timing;
    work_.Drawn(usage_.completion_tokens);
  } else if (const auto* finished = std::get_if<FinishedEvent>(&event)) {
    usage_ = finished->usage;
    timing_ = finished->timing;
    finish_reason_ = finished->reason;
  }
}

absl::Status EngineCall::ReaderGone() const {
  if (!watched_->was_cut()) return absl::CancelledError("the client has gone");
  return absl::ResourceExhaustedError(
      absl::StrFormat("the client took nothing for %d ms", environment_.write_watch.patience().count()));
}

void EngineCall::NoteEnd(const absl::Status& status) {
  watched_->Began();  // the last write, or the reply
  end_code_ = status.code();
  end_message_ = status.ok() ? "" : LoggedMessage(status);
  end_reason_ = ErrorReason(status);
}

void EngineCall::EndAs(const absl::Status& status) {
  if (status.ok()) BeginAnswer();
  const absl::Status detailed = WithEndDetails(status);
  NoteEnd(detailed);
  End(ToGrpcStatus(detailed, context_));
}

void EngineCall::Refuse(absl::Status status, bool reached_engine) {
  DropTurn();
  if (has_queue_place_) work_.Refund(usage_.prompt_tokens);
  const std::chrono::duration<double> seconds = Clock::now() - begin_;
  environment_.metrics.OnRefused(RejectionOf(status), reached_engine, seconds.count());
  if (absl::IsDeadlineExceeded(status) && !HasReason(status)) {
    status = WithReason(std::move(status), DeadlineHasCome() ? "DEADLINE_PASSED" : "DEADLINE_UNMEETABLE");
  }
  status = WithRefusalDetails(std::move(status), environment_.state);
  NoteEnd(status);
  EchoTrace(origin_.trace_id, status, context_);
  End(ToGrpcStatus(status, context_));
}

void EngineCall::RecordEnd() {
  environment_.write_watch.Leave(watched_);
  environment_.metrics.OnCallEnded(method_, static_cast<int>(end_code_),
                                   std::chrono::duration<double>(Clock::now() - begin_).count());
  if (generation_ != nullptr) usage_ = generation_->usage();
  work_.Drawn(usage_.completion_tokens);
  work_.End();
  const std::chrono::duration<double, std::milli> total = Clock::now() - begin_;
  const auto to_ms = [](int64_t microseconds) { return static_cast<double>(microseconds) * 1e-3; };
  const bool generates = method_ == RpcMethod::kGenerate || method_ == RpcMethod::kComplete;
  const std::string finish_reason = finish_reason_ ? v1::FinishReason_Name(ToProto(*finish_reason_)) : "";
  std::vector<LogField> more;
  if (generates) more.push_back({"finish_reason", finish_reason});
  more.insert(more.end(), {{"prompt_tokens", usage_.prompt_tokens},
                           {"completion_tokens", usage_.completion_tokens},
                           {"queue_ms", to_ms(timing_.queue_us)},
                           {"prefill_ms", to_ms(timing_.prefill_us)},
                           {"first_token_ms", to_ms(timing_.first_token_us)}});
  LogCallEnd(environment_.log,
             {.method = method_,
              .request_id = reply_context_.request_id,
              .session = session_id_,
              .caller = caller_,
              .origin = origin_,
              .code = end_code_,
              .reason = end_reason_,
              .message = end_message_,
              .total = total},
             std::move(more));
}

}  // namespace efla
