#include "server/rpc/engine_call.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "server/rpc/status.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxLoggedBytes = 256;  // of a text that the request may have made long

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
  absl::StatusOr<GenerationRequest> request = Prepare(*model);
  if (!request.ok()) return Refuse(request.status(), /*reached_engine=*/false);
  request->deadline = deadline_;
  reply_context_ = {.request_id = request->request_id,
                    .model = model->name,
                    .tokenizer = model->tokenizer,
                    .logprobs = request->logprobs,
                    .seed = request->sampling.seed};
  usage_.prompt_tokens = static_cast<int64_t>(request->prompt.size());

  Engine* const engine = model->engine;
  absl::StatusOr<std::shared_ptr<Generation>> submitted =
      engine->Submit(*std::move(request), [this](Generation& generation) { Ready(generation); });
  if (!submitted.ok()) return Refuse(submitted.status(), /*reached_engine=*/true);

  const std::shared_ptr<Generation> generation = *std::move(submitted);
  bool cancel, deliver;
  {
    const std::scoped_lock lock(mutex_);
    generation_ = generation;
    engine_ = engine;
    cancel = cancelled_;
    deliver = ready_early_;
  }
  // From here on the call may end at any moment: only local variables.
  if (cancel) generation->Cancel();
  if (deliver) engine->Deliver(generation);
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
  engine_->Deliver(generation);
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
