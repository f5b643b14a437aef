// From a request message to what the engine is asked: every id, range and length is checked here.
//
// Errors: INVALID_ARGUMENT naming the field, the value and the bound; NOT_FOUND for another model's name;
// FAILED_PRECONDITION for what needs a tokenizer where there is none; UNIMPLEMENTED for unknown fields.
// Tokenises: takes tens of milliseconds for a megabyte of text.
#ifndef EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
#define EFLA_SERVER_RPC_REQUEST_VALIDATION_H_

#include <chrono>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/generation.pb.h"
#include "efla/v1/sessions.pb.h"
#include "server/engine/generation.h"
#include "server/served_model.h"
#include "server/sessions/session_manager.h"

namespace efla {

enum class ReplyKind { kStream, kWhole };  // a whole answer in one message is bounded by max_reply_bytes

// What a call does to a session.
struct TurnRequest {
  SessionChange change;
  OnCancel on_cancel = OnCancel::kRollback;
  bool create_if_missing = false;
  bool generates = true;  // false: the prompt is only added
  // The prompt where the session holds something already; where it is empty, it is the generation's.
  std::vector<TokenId> continuation;
  // Create: the session is made first; its name in `change` may be empty then.
  std::optional<std::chrono::milliseconds> new_session_ttl;
};

struct CallRequest {
  GenerationRequest generation;  // without a deadline, which is the call's
  std::optional<TurnRequest> turn;
};

absl::StatusOr<CallRequest> ToGenerationRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                                ReplyKind reply);
absl::StatusOr<CallRequest> ToScoringRequest(const v1::ScoreRequest& request, const ServedModel& model);
// With a turn, always.
absl::StatusOr<CallRequest> ToAppendRequest(const v1::AppendRequest& request, const ServedModel& model);
// The prompt is empty where nothing is to be appended.
absl::StatusOr<CallRequest> ToCreateRequest(const v1::CreateSessionRequest& request,
                                            const ServedModel& model);

// NOT_FOUND unless `name` is empty or the served model's.
absl::Status CheckModelName(std::string_view name, const ServedModel& model);
// FAILED_PRECONDITION, saying what needs it, when there is no tokenizer.
absl::Status CheckTokenizer(std::string_view needed_for, const ServedModel& model);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
