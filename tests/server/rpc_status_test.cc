#include <gtest/gtest.h>

#include <map>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/rpc/status.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

google::rpc::Status DetailsOf(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

TEST(StatusTest, KeepsCodeAndMessage) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("no such model"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no such model");
  EXPECT_TRUE(status.error_details().empty());
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(StatusTest, InvalidFieldNamesItsPath) {
  const grpc::Status status = ToGrpcStatus(InvalidField("stopping.max_tokens", "is 9000; the limit is 4096"));
  EXPECT_EQ(status.error_message(), "stopping.max_tokens is 9000; the limit is 4096");
  const google::rpc::Status details = DetailsOf(status);
  EXPECT_EQ(details.code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_EQ(details.details_size(), 1);
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(details.details(0).UnpackTo(&bad_request));
  ASSERT_EQ(bad_request.field_violations_size(), 1);
  EXPECT_EQ(bad_request.field_violations(0).field(), "stopping.max_tokens");
  EXPECT_EQ(bad_request.field_violations(0).description(), "is 9000; the limit is 4096");
}

// Whatever a client has sent that a message repeats: more than its 8 KiB of trailers would cost it the code.
TEST(StatusTest, LongMessagesAreCutAtACharacter) {
  std::string field = "constraint.grammar", text;
  for (int i = 0; i < 5000; ++i) text += "\u20ac";
  for (const absl::Status& status :
       {absl::NotFoundError(text), absl::NotFoundError("x" + text), InvalidField(field, text),
        InvalidField(text, text), WithReason(InvalidField(field, "xy" + text), "TOO_LONG")}) {
    const grpc::Status sent = ToGrpcStatus(status);
    EXPECT_EQ(sent.error_code(), static_cast<grpc::StatusCode>(status.code()));
    EXPECT_LE(sent.error_message().size() * 3 + sent.error_details().size() * 4 / 3, size_t{8} << 10);
    EXPECT_GT(sent.error_message().size(), 1000u);
    ASSERT_TRUE(sent.error_message().ends_with("\u20ac..."));
    if (!sent.error_details().empty()) {
      EXPECT_EQ(DetailsOf(sent).message(), sent.error_message());
    }
  }
  const std::string whole(1024, 'm');
  EXPECT_EQ(ToGrpcStatus(absl::NotFoundError(whole)).error_message(), whole);
}

TEST(StatusTest, RetryInfoIsAlsoATrailer) {
  const absl::Status refused = WithRetry(
      WithReason(absl::ResourceExhaustedError("the queue is full"), "QUEUE_FULL"), milliseconds(2500));
  const google::rpc::Status details = DetailsOf(ToGrpcStatus(refused));
  ASSERT_EQ(details.details_size(), 2);
  google::rpc::RetryInfo retry;
  google::rpc::ErrorInfo info;
  for (const google::protobuf::Any& detail : details.details()) {
    EXPECT_TRUE(detail.UnpackTo(&retry) || detail.UnpackTo(&info));
  }
  EXPECT_EQ(retry.retry_delay().seconds(), 2);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "efla");
}

}  // namespace
}  // namespace efla
