// absl::Status with the public error details as payloads, and its one conversion to gRPC.
#ifndef EFLA_SERVER_RPC_STATUS_H_
#define EFLA_SERVER_RPC_STATUS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace efla {

// INVALID_ARGUMENT "<field> <problem>" with google.rpc.BadRequest. `field` is a path in the request
// ("stopping.stop[3]"), `problem` says the value and the bound ("is 9000; the limit is 4096").
absl::Status InvalidField(std::string_view field, std::string_view problem);

// Adds google.rpc.ErrorInfo: an upper-case word for programs, in the domain "efla".
absl::Status WithReason(absl::Status status, std::string_view reason,
                        const std::map<std::string, std::string>& metadata = {});
bool HasReason(const absl::Status& status);
// The word; empty where there is none.
std::string ErrorReason(const absl::Status& status);

// What a log may say of an error. Messages of INVALID_ARGUMENT tell clients what they sent, which may be part
// of a prompt: of these, the fields' names only.
std::string LoggedMessage(const absl::Status& status);

// Adds google.rpc.RetryInfo.
absl::Status WithRetry(absl::Status status, std::chrono::milliseconds delay);

// The code, the message, cut to 1 KiB, and, in the details, a google.rpc.Status with the payloads.
grpc::Status ToGrpcStatus(const absl::Status& status);

// ToGrpcStatus, and the delay of a RetryInfo as the trailer that gRPC's own retries obey.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::CallbackServerContext& context);

// Returns the caller's trace id (nothing where that is empty) as x-trace-id: in the headers of an OK answer;
// in the trailers otherwise, since a refusal with headers may not be retried. Before the answer.
void EchoTrace(const std::string& trace_id, const absl::Status& status, grpc::CallbackServerContext& context);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_STATUS_H_
