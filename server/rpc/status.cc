#include "server/rpc/status.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace efla {
namespace {

constexpr char kErrorDomain[] = "efla";
constexpr char kPushbackTrailer[] = "grpc-retry-pushback-ms";
constexpr char kTraceHeader[] = "x-trace-id";
constexpr size_t kMaxLoggedBytes = 256;
// Clients take 8 KiB of headers and trailers by default, and lose the code with what is above. A message goes
// out up to three times: as it is, a byte as three at worst, and twice in the details, in base64.
constexpr size_t kMaxMessageBytes = 1024;
constexpr std::string_view kCutMark = "...";

// Cut at the end of a character.
std::string Clipped(std::string_view text) {
  if (text.size() <= kMaxMessageBytes) return std::string(text);
  size_t end = kMaxMessageBytes - kCutMark.size();
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)).append(kCutMark);
}

template <typename Detail>
std::string TypeUrl() {
  return "type.googleapis.com/" + Detail::descriptor()->full_name();
}

template <typename Detail>
void SetDetail(absl::Status& status, const Detail& detail) {
  status.SetPayload(TypeUrl<Detail>(), absl::Cord(detail.SerializeAsString()));
}

std::optional<std::chrono::milliseconds> RetryDelay(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(TypeUrl<google::rpc::RetryInfo>());
  google::rpc::RetryInfo retry;
  if (!payload || !retry.ParseFromString(std::string(*payload))) return std::nullopt;
  return std::chrono::milliseconds(retry.retry_delay().seconds() * 1000 +
                                   retry.retry_delay().nanos() / 1'000'000);
}

}  // namespace

absl::Status InvalidField(std::string_view field, std::string_view problem) {
  absl::Status status = absl::InvalidArgumentError(Clipped(absl::StrFormat("%s %s", field, problem)));
  google::rpc::BadRequest bad_request;
  google::rpc::BadRequest::FieldViolation& violation = *bad_request.add_field_violations();
  violation.set_field(Clipped(field));
  violation.set_description(Clipped(problem));
  SetDetail(status, bad_request);
  return status;
}

bool HasReason(const absl::Status& status) {
  return status.GetPayload(TypeUrl<google::rpc::ErrorInfo>()).has_value();
}

std::string ErrorReason(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(TypeUrl<google::rpc::ErrorInfo>());
  google::rpc::ErrorInfo info;
  return payload && info.ParseFromString(std::string(*payload)) ? info.reason() : "";
}

std::string LoggedMessage(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kInvalidArgument) {
    return std::string(status.message().substr(0, kMaxLoggedBytes));
  }
  std::string fields;
  google::rpc::BadRequest bad_request;
  const absl::optional<absl::Cord> payload = status.GetPayload(TypeUrl<google::rpc::BadRequest>());
  if (payload && bad_request.ParseFromString(std::string(*payload))) {
    for (const auto& violation : bad_request.field_violations()) {
      fields += (fields.empty() ? "" : ", ") + violation.field();
    }
  }
  return (fields.empty() ? "the request" : fields.substr(0, kMaxLoggedBytes)) + " is not valid";
}

absl::Status WithReason(absl::Status status, std::string_view reason,
                        const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  SetDetail(status, info);
  return status;
}

absl::Status WithRetry(absl::Status status, std::chrono::milliseconds delay) {
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(delay.count() / 1000);
  retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(delay.count() % 1000 * 1'000'000));
  SetDetail(status, retry);
  return status;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Clipped(std::string(status.message()));
  google::rpc::Status details;
  status.ForEachPayload([&](absl::string_view type_url, const absl::Cord& payload) {
    google::protobuf::Any& detail = *details.add_details();
    detail.set_type_url(std::string(type_url));
    detail.set_value(std::string(payload));
  });
  const auto code = static_cast<grpc::StatusCode>(status.code());  // the two enumerations share their numbers
  if (details.details().empty()) return grpc::Status(code, message);
  details.set_code(static_cast<int32_t>(status.code()));
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

void EchoTrace(const std::string& trace_id, const absl::Status& status,
               grpc::CallbackServerContext& context) {
  if (trace_id.empty()) return;
  if (status.ok()) {
    context.AddInitialMetadata(kTraceHeader, trace_id);
  } else {
    context.AddTrailingMetadata(kTraceHeader, trace_id);
  }
}

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::CallbackServerContext& context) {
  if (const auto delay = RetryDelay(status)) {
    context.AddTrailingMetadata(kPushbackTrailer, std::to_string(delay->count()));
  }
  return ToGrpcStatus(status);
}

}  // namespace efla
