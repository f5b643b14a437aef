// From a request message to what the engine is asked: every id, range and length is checked here.
//
// Errors: INVALID_ARGUMENT naming the field, the value and the bound; NOT_FOUND for another model's name;
// FAILED_PRECONDITION for what needs a tokenizer where there is none; UNIMPLEMENTED for unknown fields.
// Tokenises: takes tens of milliseconds for a megabyte of text.
#ifndef EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
#define EFLA_SERVER_RPC_REQUEST_VALIDATION_H_

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "efla/v1/generation.pb.h"
#include "server/engine/generation.h"
#include "server/served_model.h"

namespace efla {

enum class ReplyKind { kStream, kWhole };  // a whole answer in one message is bounded by max_reply_bytes

// Without a deadline, which is the call's.
absl::StatusOr<GenerationRequest> ToGenerationRequest(const v1::GenerateRequest& request,
                                                      const ServedModel& model, ReplyKind reply);
absl::StatusOr<GenerationRequest> ToScoringRequest(const v1::ScoreRequest& request, const ServedModel& model);

// NOT_FOUND unless `name` is empty or the served model's.
absl::Status CheckModelName(std::string_view name, const ServedModel& model);
// FAILED_PRECONDITION, saying what needs it, when there is no tokenizer.
absl::Status CheckTokenizer(std::string_view needed_for, const ServedModel& model);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_REQUEST_VALIDATION_H_
