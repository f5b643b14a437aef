// From a request message to what the engine is asked: every id, range and length is checked here.
//
// Errors: INVALID_ARGUMENT naming the field, the value and the bound; NOT_FOUND for another model's name;
// FAILED_PRECONDITION for what needs a tokenizer where there is none; UNIMPLEMENTED for unknown fields.
// Tokenises: takes tens of milliseconds for a megabyte of text. A text is given up as soon as it is known to
// be too long, and when the call is not wanted any more. Does not compile constraints, which may take longer.
#ifndef EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
#define EFLA_SERVER_RPC_REQUEST_VALIDATION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/generation.pb.h"
#include "efla/v1/sessions.pb.h"
#include "model/constraint/constraint.h"
#include "server/engine/branched_generation.h"
#include "server/engine/generation.h"
#include "server/served_model.h"
#include "server/sessions/session_manager.h"

namespace efla {

// Whether a call is still wanted, asked while long texts are tokenised: an error ends the work. Null: it is.
using StillWanted = std::function<absl::Status()>;

// Of a text without a place to split it for its tokenising: some seconds on one thread.
inline constexpr size_t kMaxStretchBytes = size_t{1} << 20;
inline constexpr int kMaxSamples = 64, kMaxContinuations = 256;
inline constexpr int64_t kMaxEchoTokens =
    32'768;  // that one message, which many clients bound to 4 MiB, can carry

enum class ReplyKind { kStream, kWhole };  // a whole answer in one message is bounded by max_reply_bytes

// What a chat that goes on after an answer begins with, in tokens: text that closes the answer, and all that
// is in front of the first message's own.
struct ChatSeam {
  size_t closing_tokens = 0, leading_tokens = 0;
};

// What a call does to a session.
struct TurnRequest {
  SessionChange change;
  OnCancel on_cancel = OnCancel::kRollback;
  bool create_if_missing = false;
  bool generates = true;  // false: the prompt is only added
  bool echoes = false;    // the output begins with the prompt
  // The prompt where the session holds something already, but for what ClosedAlready leaves out; where it is
  // empty, it is the generation's.
  std::vector<TokenId> continuation;
  ChatSeam seam;
  absl::Status no_start;  // an error: why an empty session cannot begin so
  // Create: the session is made first; its name in `change` may be empty then.
  std::optional<std::chrono::milliseconds> new_session_ttl;
};

// A constraint that has been read and not been compiled.
struct ConstraintRequest {
  const char* field = "";  // of the request
  ConstraintSpec spec;
};

struct CallRequest {
  GenerationRequest generation;  // without a deadline, which is the call's, and without its constraint
  std::optional<ConstraintRequest> constraint;
  std::vector<Branch> branches;  // of the generation's prompt; none: it is one generation
  std::optional<TurnRequest> turn;
};

absl::StatusOr<CallRequest> ToGenerationRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                                ReplyKind reply, const StillWanted& wanted = nullptr);
// One branch for each continuation.
absl::StatusOr<CallRequest> ToScoringRequest(const v1::ScoreRequest& request, const ServedModel& model,
                                             const StillWanted& wanted = nullptr);
// With a turn, always.
absl::StatusOr<CallRequest> ToAppendRequest(const v1::AppendRequest& request, const ServedModel& model,
                                            const StillWanted& wanted = nullptr);
// The prompt is empty where nothing is to be appended.
absl::StatusOr<CallRequest> ToCreateRequest(const v1::CreateSessionRequest& request, const ServedModel& model,
                                            const StillWanted& wanted = nullptr);

// Gives the generation its constraint. A refusal becomes INVALID_ARGUMENT naming the field.
absl::Status TakeConstraint(const char* field, CompiledOrError compiled, GenerationRequest& generation);

// NOT_FOUND unless `name` is empty or the served model's.
absl::Status CheckModelName(std::string_view name, const ServedModel& model);
// The ids of a text: INVALID_ARGUMENT naming the field when it has too many, or none; the error of `wanted`.
absl::StatusOr<std::vector<TokenId>> EncodeText(std::string_view field, std::string_view text,
                                                bool parse_special, bool continues, const ServedModel& model,
                                                const StillWanted& wanted = nullptr);
// The ids of a chat: special tokens are those that the template wrote, and with `parse_special` those in the
// messages too.
absl::StatusOr<std::vector<TokenId>> EncodeChat(const RenderedChat& chat, bool parse_special, bool continues,
                                                const ServedModel& model,
                                                const StillWanted& wanted = nullptr);

// FAILED_PRECONDITION, saying what needs it, when there is no tokenizer.
absl::Status CheckTokenizer(std::string_view needed_for, const ServedModel& model);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
