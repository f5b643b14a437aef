// Refuses what a newer client asks for and this server does not know.
#ifndef EFLA_SERVER_RPC_UNKNOWN_FIELDS_H_
#define EFLA_SERVER_RPC_UNKNOWN_FIELDS_H_

#include <google/protobuf/message.h>

#include "absl/status/status.h"

namespace efla {

// UNIMPLEMENTED, naming the message and the field's number, when `message` or any message in it holds a field
// that its type does not have.
absl::Status CheckNoUnknownFields(const google::protobuf::Message& message);

}  // namespace efla

#endif  // EFLA_SERVER_RPC_UNKNOWN_FIELDS_H_
