#include "server/sessions/session_turn.h"

#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace efla {

absl::StatusOr<bool> TurnImpl::Prepare(std::vector<TokenId> tokens, bool generates,
                                       GenerationRequest& request) {
  EFLA_CHECK(!feed_);
  Feed feed = PlanFeed(base_->waiting, tokens, generates);
  if (generates && feed.prompt.empty() && !feed.pending_token) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the prompt is empty and session %s, of %d tokens, has nothing that waits to be fed; at least "
        "1 token is needed",
        before_.session_id, before_.tokens));
  }
  if (!generates && feed.waits()) {
    if (base_->residence != nullptr) {
      if (absl::Status damage = manager_.residency_->Damage(*base_->residence); !damage.ok()) return damage;
    }
    feed_ = std::move(feed);
    return false;
  }
  if (absl::Status status = manager_.MakeRoom(); !status.ok()) {
    // Where nothing else can make way, the state that this turn starts from does.
    if (!absl::IsResourceExhausted(status) || !manager_.IsReplaceable(*hold_.session())) return status;
    replaces_ = true;
  }
  if (base_->residence != nullptr) {
    absl::StatusOr<Residency::Lifted> lifted = manager_.residency_->Lift(*base_->residence);
    if (!lifted.ok()) return lifted.status();
    request.start = std::move(lifted->state);
    base_tokens_ = std::move(lifted->base);
  } else {
    request.start = nullptr;
    base_tokens_ = std::make_shared<const ContextTokens>();
  }
  request.pending_token = feed.pending_token;
  request.prompt = feed.prompt;
  request.continues_text = request.start != nullptr;
  request.keep_state = true;
  if (!generates) request.stopping.max_tokens = 0;
  feed_ = std::move(feed);
  computes_ = true;
  return true;
}

absl::StatusOr<SessionInfo> TurnImpl::Commit(std::optional<FinalState> state, bool cancelled,
                                             std::string reply) {
  EFLA_CHECK(feed_ && hold_.session());
  if (cancelled && !(on_cancel_ == OnCancel::kKeep && state && !state->drawn.empty())) {
    const absl::Status lost = Lost();
    Drop();
    if (!lost.ok()) return lost;
    return absl::AbortedError(
        absl::StrFormat("the turn was cancelled; session %s is as it was, at revision %d", before_.session_id,
                        before_.revision));
  }
  if (!computes_) {
    return CommitContext(std::make_shared<const Context>(Context{base_->residence, WaitingWithout(*feed_)}),
                         std::move(reply));
  }
  if (!state || state->state == nullptr || state->prompt_tokens < std::ssize(feed_->prompt)) {
    const SessionPtr session = hold_.session();
    Drop();
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) return efla::Lost(*session);
    return manager_.Info(*session);
  }
  ContextTokens tokens = TokensAfter(*base_tokens_, *feed_, state->drawn);
  WaitingTokens waiting = WaitingOf(tokens);
  ResidencePtr residence =
      manager_.residency_->AddDevice(before_.session_id, std::move(tokens), std::move(state->state));
  return CommitContext(std::make_shared<const Context>(Context{std::move(residence), std::move(waiting)}),
                       std::move(reply));
}

absl::StatusOr<SessionInfo> TurnImpl::CommitContext(ContextPtr next, std::string reply) {
  const SessionPtr session = hold_.session();
  manager_.records_.VerifyOwned(*session).IgnoreError();  // what it finds stands in the session's life
  SessionInfo info;
  std::vector<SessionState::KeptTurn> dropped;  // let go of without the lock
  {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) return efla::Lost(*session);
    session->stop_turn = nullptr;
    SessionState& kept = session->state;
    kept.turns.push_back({kept.head_since, kept.revision, std::move(kept.head)});
    const int64_t most = replaces_ ? 0 : manager_.options_.max_kept_turns;
    while (std::ssize(kept.turns) > most) {
      dropped.push_back(std::move(kept.turns.front()));
      kept.turns.pop_front();
    }
    SetHead(kept, std::move(next));
    RecordReply(kept, {.call = RecordedReply::Call::kTurn,
                       .request_id = change_.request_id,
                       .revision = kept.revision,
                       .has_content = true,
                       .content = std::move(reply)});
    ++session->changes;
    session->last_use = manager_.records_.Now();
    info = manager_.Info(*session);
  }
  return manager_.Finish(std::move(hold_), change_.durability, std::move(info));
}

// What is drawn last waits; a prompt that waits was appended after it.
std::optional<TokenId> TurnImpl::last_drawn() const {
  const WaitingTokens& waiting = base_->waiting;
  return waiting.pending_prompt.empty() ? waiting.pending_token : std::nullopt;
}

void TurnImpl::OnLost(std::function<void()> stop) {
  EFLA_CHECK(hold_.session());
  {
    const std::lock_guard lock(hold_.session()->mutex);
    if (hold_.session()->life == Session::Life::kLive) {
      hold_.session()->stop_turn = std::move(stop);
      return;
    }
  }
  stop();
}

absl::Status TurnImpl::Lost() const {
  if (!hold_.session()) return absl::OkStatus();
  const std::lock_guard lock(hold_.session()->mutex);
  return hold_.session()->life == Session::Life::kLive ? absl::OkStatus() : efla::Lost(*hold_.session());
}

void TurnImpl::Drop() {
  const SessionPtr session = hold_.session();
  if (session == nullptr) return;
  {
    const std::lock_guard lock(session->mutex);
    session->stop_turn = nullptr;
  }
  if (made_) manager_.Unmake(session);
  hold_.GiveUp();
}

}  // namespace efla
