#include "server/rpc/wire.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/rpc/status.h"

namespace efla {

absl::Status ParseRequest(const grpc::ByteBuffer& bytes, google::protobuf::Message& request) {
  grpc::ByteBuffer shared(bytes);  // the same bytes; the reader wants one that it may change
  grpc::ProtoBufferReader reader(&shared);
  if (reader.status().ok() && request.ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError(absl::StrFormat(
                        "the request's bytes are no %s; its strings must be UTF-8, among other things",
                        request.GetDescriptor()->full_name())),
                    "MALFORMED_REQUEST");
}

void SerializeReply(const google::protobuf::Message& reply, grpc::ByteBuffer& bytes) {
  const int size = static_cast<int>(reply.ByteSizeLong());  // replies are bounded well below 2 GiB
  bytes.Clear();
  grpc::ProtoBufferWriter writer(&bytes, grpc::kProtoBufferWriterMaxBufferLength, size);
  EFLA_CHECK(reply.SerializeToZeroCopyStream(&writer));
}

}  // namespace efla
