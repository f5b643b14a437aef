#include "server/rpc/unknown_fields.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>

#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/status.h"

namespace efla {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

absl::Status CheckNoUnknownFields(const Message& message) {
  const Reflection& reflection = *message.GetReflection();
  const google::protobuf::UnknownFieldSet& unknown = reflection.GetUnknownFields(message);
  if (!unknown.empty()) {
    return WithReason(absl::UnimplementedError(absl::StrFormat("%s has no field number %d in this server",
                                                               message.GetDescriptor()->full_name(),
                                                               unknown.field(0).number())),
                      "UNKNOWN_FIELD");
  }
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      if (absl::Status status = CheckNoUnknownFields(reflection.GetMessage(message, field)); !status.ok()) {
        return status;
      }
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      absl::Status status = CheckNoUnknownFields(reflection.GetRepeatedMessage(message, field, i));
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace efla
