// Messages to and from bytes. The services take bytes, so that a request that does not parse gets an answer
// of ours (gRPC's is UNIMPLEMENTED without a word), and large ones are parsed by workers.
#ifndef EFLA_SERVER_RPC_WIRE_H_
#define EFLA_SERVER_RPC_WIRE_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"

namespace efla {

// INVALID_ARGUMENT when the bytes are no such message; a `string` that is not UTF-8 is one reason.
absl::Status ParseRequest(const grpc::ByteBuffer& bytes, google::protobuf::Message& request);

// Replaces what is in `bytes`.
void SerializeReply(const google::protobuf::Message& reply, grpc::ByteBuffer& bytes);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_WIRE_H_
