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
  absl::Status status = absl::InvalidArgumentError(absl::StrFormat("%s %s", field, problem));
  google::rpc::BadRequest bad_request;
  google::rpc::BadRequest::FieldViolation& violation = *bad_request.add_field_violations();
  violation.set_field(std::string(field));
  violation.set_description(std::string(problem));
  SetDetail(status, bad_request);
  return status;
}

bool HasReason(const absl::Status& status) {
  return status.GetPayload(TypeUrl<google::rpc::ErrorInfo>()).has_value();
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
  const std::string message(status.message());
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

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::CallbackServerContext& context) {
  if (const auto delay = RetryDelay(status)) {
    context.AddTrailingMetadata(kPushbackTrailer, std::to_string(delay->count()));
  }
  return ToGrpcStatus(status);
}

}  // namespace efla
