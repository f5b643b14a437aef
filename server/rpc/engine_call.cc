#include "server/rpc/engine_call.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "server/rpc/session_messages.h"
#include "server/rpc/status.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxLoggedBytes = 256;  // of a text that the request may have made long

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

Rejection RejectionOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kResourceExhausted:
      return Rejection::kQueueFull;
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
    default:
      return status;
  }
}

}  // namespace

EngineCall::EngineCall(RpcEnvironment& environment, RpcMethod method, grpc::CallbackServerContext& context)
    : environment_(environment),
      method_(method),
      context_(context),
      deadline_(DeadlineOf(context)),
      peer_(context.peer()) {
  environment_.metrics.OnCallStarted(method_);
}

void EngineCall::Start(size_t bytes) {
  if (!environment_.workers.TryPost(bytes, [this] { PrepareAndSubmit(); })) {
    Refuse(absl::ResourceExhaustedError("too many requests wait to be prepared"), /*reached_engine=*/false);
  }
}

void EngineCall::PrepareAndSubmit() {
  const ServedModel* model = environment_.state.model();
  if (model == nullptr) {
    return Refuse(absl::UnavailableError("the model is being loaded"), /*reached_engine=*/false);
  }
  {
    std::unique_lock lock(mutex_);
    if (cancelled_) {
      lock.unlock();
      return Refuse(absl::CancelledError("cancelled before it was prepared"), /*reached_engine=*/false);
    }
  }
  if (deadline_ && *deadline_ <= Clock::now()) {
    return Refuse(absl::DeadlineExceededError("the deadline passed before the request was prepared"),
                  /*reached_engine=*/false);
  }
  absl::StatusOr<CallRequest> call = Prepare(*model);
  if (!call.ok()) return Refuse(call.status(), /*reached_engine=*/false);
  model_ = model;
  request_to_submit_ = std::move(call->generation);
  request_to_submit_.deadline = deadline_;
  reply_context_.request_id = request_to_submit_.request_id;
  reply_context_.model = model->name;
  reply_context_.tokenizer = model->tokenizer;
  reply_context_.logprobs = request_to_submit_.logprobs;
  reply_context_.seed = request_to_submit_.sampling.seed;
  if (!call->turn) return Submit();
  turn_request_ = std::move(call->turn);
  session_id_ = turn_request_->change.session_id;
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
  std::vector<TokenId> tokens =
      before.tokens == 0 ? std::move(request_to_submit_.prompt) : std::move(wanted.continuation);
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
  Submit();
}

void EngineCall::Submit() {
  usage_.prompt_tokens = static_cast<int64_t>(request_to_submit_.prompt.size());
  Engine* const engine = model_->engine;
  absl::StatusOr<std::shared_ptr<Generation>> submitted =
      engine->Submit(std::move(request_to_submit_), [this](Generation& generation) { Ready(generation); });
  if (!submitted.ok()) return Refuse(submitted.status(), /*reached_engine=*/true);

  const std::shared_ptr<Generation> generation = *std::move(submitted);
  bool cancel, deliver;
  {
    const std::scoped_lock lock(mutex_);
    generation_ = generation;
    cancel = cancelled_;
    deliver = ready_early_;
  }
  // From here on the call may end at any moment: only local variables.
  if (cancel) generation->Cancel();
  if (deliver) engine->Deliver(generation);
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
  const bool cut = !outcome.ok();
  const bool keeps = turn_request_->on_cancel == OnCancel::kKeep && computed;
  std::optional<FinalState> state = computed ? generation_->TakeFinalState() : std::nullopt;
  if (cut && (!keeps || !state)) {
    DropTurn();
    return EndAs(outcome);
  }
  // A turn raises the revision by one.
  expected_.set_session_id(session_id_);
  expected_.set_revision(turn_->before().revision + 1);
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
  OnReady(generation);
}

bool EngineCall::DeadlineHasCome() const { return deadline_ && Clock::now() + kDeadlineSlack >= *deadline_; }

void EngineCall::Cancel() {
  std::shared_ptr<Generation> generation;
  {
    const std::scoped_lock lock(mutex_);
    cancelled_ = true;
    generation = generation_;
  }
  // At the deadline the engine ends the generation itself, and counts it so.
  if (generation != nullptr && !DeadlineHasCome()) generation->Cancel();
}

void EngineCall::Deliver() {
  std::shared_ptr<Generation> generation;
  {
    const std::scoped_lock lock(mutex_);
    generation = generation_;
  }
  model_->engine->Deliver(generation);
}

void EngineCall::NoteRequestId(const std::string& request_id) {
  reply_context_.request_id = request_id.substr(0, kMaxLoggedBytes);
}

void EngineCall::Note(const Event& event) {
  if (const auto* accepted = std::get_if<AcceptedEvent>(&event)) {
    timing_.queue_us = accepted->queue_us;
  } else if (const auto* delta = std::get_if<DeltaEvent>(&event)) {
    usage_ = delta->usage;
    timing_ = delta->timing;
  } else if (const auto* finished = std::get_if<FinishedEvent>(&event)) {
    usage_ = finished->usage;
    timing_ = finished->timing;
    finish_reason_ = finished->reason;
  }
}

void EngineCall::NoteEnd(const absl::Status& status) {
  end_code_ = status.code();
  end_message_ = std::string(status.message().substr(0, kMaxLoggedBytes));
}

void EngineCall::EndAs(const absl::Status& status) {
  NoteEnd(status);
  End(ToGrpcStatus(WithEndDetails(status), context_));
}

void EngineCall::Refuse(absl::Status status, bool reached_engine) {
  DropTurn();
  const std::chrono::duration<double> seconds = Clock::now() - begin_;
  environment_.metrics.OnRefused(RejectionOf(status.code()), reached_engine, seconds.count());
  NoteEnd(status);
  End(ToGrpcStatus(WithRefusalDetails(std::move(status), environment_.state), context_));
}

void EngineCall::RecordEnd() {
  environment_.metrics.OnCallEnded(method_, static_cast<int>(end_code_));
  if (generation_ != nullptr) usage_ = generation_->usage();
  const std::chrono::duration<double, std::milli> total = Clock::now() - begin_;
  const auto to_ms = [](int64_t microseconds) { return static_cast<double>(microseconds) * 1e-3; };
  environment_.log.Info(
      "request_end", "request ended",
      {{"request_id", reply_context_.request_id},
       {"session", session_id_},
       {"method", RpcMethodName(method_)},
       {"code", absl::StatusCodeToString(end_code_)},
       {"message", end_message_},
       {"finish_reason", finish_reason_ ? v1::FinishReason_Name(ToProto(*finish_reason_)) : ""},
       {"prompt_tokens", usage_.prompt_tokens},
       {"completion_tokens", usage_.completion_tokens},
       {"queue_ms", to_ms(timing_.queue_us)},
       {"prefill_ms", to_ms(timing_.prefill_us)},
       {"first_token_ms", to_ms(timing_.first_token_us)},
       {"total_ms", total.count()},
       {"peer", peer_}});
}

}  // namespace efla
