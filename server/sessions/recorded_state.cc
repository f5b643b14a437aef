#include "server/sessions/recorded_state.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"

namespace efla {

RecordedStates::RecordedStates(std::shared_ptr<Residency> residency, SessionStore* disk)
    : residency_(std::move(residency)), disk_(disk) {}

absl::StatusOr<RecordedStates::Read> RecordedStates::FromPayload(const std::string& session_id,
                                                                 const std::string& bytes, StoreIndex store) {
  absl::StatusOr<SessionPayload> payload = ParsePayload(bytes);
  if (!payload.ok()) {
    return absl::IsDataLoss(payload.status()) ? WithSessionError(payload.status(), "SNAPSHOT_DAMAGED")
                                              : WithSessionError(payload.status(), "SNAPSHOT_MISMATCH");
  }
  const SnapshotIdentity& identity = residency_->format().identity();
  for (const auto& [what, theirs, ours] :
       {std::tuple("weights", &payload->weights_fingerprint, &identity.weights_fingerprint),
        std::tuple("tokenizer", &payload->tokenizer_fingerprint, &identity.tokenizer_fingerprint)}) {
    if (*theirs == *ours) continue;
    return WithSessionError(
        absl::FailedPreconditionError(absl::StrFormat("session %s belongs to %s %s; this server has %s",
                                                      session_id, what, *theirs, *ours)),
        "SNAPSHOT_MISMATCH");
  }

  Read read;
  absl::Status status;
  const auto context = [&](RecordedContext& from) -> ContextPtr {
    Context to{.residence = nullptr, .waiting = std::move(from.waiting)};
    if (!from.snapshot_id.empty()) {
      absl::StatusOr<ResidencePtr> residence =
          residency_->FromRecord(session_id, from.snapshot_id, from.fed_tokens, store);
      if (!residence.ok()) {
        status = WithSessionError(residence.status(), "SNAPSHOT_DAMAGED");
      } else {
        to.residence = *residence;
        // The disk answers from its table. Of a shared store nothing is asked that is not needed.
        if (store == kDiskStore) {
          const absl::StatusOr<bool> has = disk_->HasSnapshot(from.snapshot_id);
          if (has.ok() && !*has) residency_->MarkMissing(from.snapshot_id, store);
        }
        if (std::find(read.named.begin(), read.named.end(), *residence) == read.named.end())
          read.named.push_back(*residence);
      }
    }
    return std::make_shared<const Context>(std::move(to));
  };
  SessionState& state = read.state;
  state.revision = payload->revision;
  state.head_since = payload->head_since;
  state.head = context(payload->head);
  for (auto& turn : payload->turns) state.turns.push_back({turn.since, turn.until, context(turn.context)});
  for (auto& mark : payload->marks) state.marks[mark.name] = {mark.since, context(mark.context)};
  state.replies.assign(std::make_move_iterator(payload->replies.begin()),
                       std::make_move_iterator(payload->replies.end()));
  state.created_unix_ms = payload->created_unix_ms;
  state.ttl_ms = payload->ttl_ms;
  if (!status.ok()) return status;
  return read;
}

std::optional<std::string> RecordedStates::ToPayload(const SessionState& state, StoreIndex store,
                                                     std::map<ResidencePtr, std::string>& named) {
  // Each is asked once: what the answer is may change with time.
  const auto id_of = [&](const ResidencePtr& residence) -> std::string {
    if (residence == nullptr) return "";
    if (const auto known = named.find(residence); known != named.end()) return known->second;
    std::string id = residency_->StoredId(*residence, store);
    if (!id.empty()) named[residence] = id;
    return id;
  };
  bool whole = true;
  const auto context = [&](const Context& from) {
    RecordedContext to;
    to.snapshot_id = id_of(from.residence);
    to.fed_tokens = from.residence == nullptr ? 0 : from.residence->fed_tokens;
    to.waiting = from.waiting;
    if (from.residence != nullptr && to.snapshot_id.empty()) whole = false;
    return to;
  };
  const SnapshotIdentity& identity = residency_->format().identity();
  SessionPayload payload;
  payload.weights_fingerprint = identity.weights_fingerprint;
  payload.tokenizer_fingerprint = identity.tokenizer_fingerprint;
  payload.revision = state.revision;
  payload.head_since = state.head_since;
  payload.created_unix_ms = state.created_unix_ms;
  payload.ttl_ms = state.ttl_ms;
  payload.head = context(*state.head);
  for (const SessionState::KeptTurn& turn : state.turns) {
    if (turn.context->residence != nullptr && id_of(turn.context->residence).empty()) {
      payload.turns.clear();  // a rewind by one turn must not go back two
    } else {
      payload.turns.push_back({turn.since, turn.until, context(*turn.context)});
    }
  }
  for (const auto& [name, mark] : state.marks) {
    const ResidencePtr& residence = mark.context->residence;
    if (residence != nullptr && id_of(residence).empty() && !residency_->Damage(*residence).ok()) continue;
    payload.marks.push_back({name, mark.since, context(*mark.context)});
  }
  payload.replies.assign(state.replies.begin(), state.replies.end());
  if (!whole) return std::nullopt;
  return SerializePayload(payload);
}

absl::Status RecordedStates::Store(const SessionState& state, StoreIndex store, bool all_turns) {
  absl::Status first;
  const auto keep = [&](const Context& context) {
    if (context.residence == nullptr) return;
    absl::Status status = residency_->Store(*context.residence, store);
    if (first.ok()) first = std::move(status);
  };
  // What is lost besides the head is lost alone.
  const auto keep_sound = [&](const Context& context) {
    if (context.residence != nullptr && residency_->Damage(*context.residence).ok()) keep(context);
  };
  keep(*state.head);
  for (const auto& [name, mark] : state.marks) keep_sound(*mark.context);
  if (!first.ok() || !all_turns) return first;
  for (const SessionState::KeptTurn& turn : state.turns) keep_sound(*turn.context);
  return first;
}

bool RecordedStates::AllStored(const SessionState& state, StoreIndex store) const {
  const auto stored = [&](const Context& context) {
    return context.residence == nullptr || !residency_->StoredId(*context.residence, store).empty();
  };
  const auto stored_or_lost = [&](const auto& mark) {
    return stored(*mark.second.context) || !residency_->Damage(*mark.second.context->residence).ok();
  };
  return stored(*state.head) && std::all_of(state.marks.begin(), state.marks.end(), stored_or_lost);
}

bool RecordedStates::HasUnstoredTurn(const SessionState& state, StoreIndex store) const {
  return std::any_of(state.turns.begin(), state.turns.end(), [&](const SessionState::KeptTurn& turn) {
    return turn.context->residence != nullptr &&
           residency_->StoredId(*turn.context->residence, store).empty();
  });
}

}  // namespace efla
