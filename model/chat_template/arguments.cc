#include "model/chat_template/arguments.h"

#include "absl/strings/str_format.h"

namespace efla::jinja {

const Text* NeedText(Runtime& run, const Value& value, std::string_view what) {
  if (value.text() == nullptr)
    run.Fail(absl::StrFormat("%s is a %s and must be a str", what, value.type_name()));
  return value.text();
}

std::optional<int64_t> NeedInteger(Runtime& run, const Value& value, std::string_view what) {
  const auto integer = Runtime::AsInteger(value);
  if (!integer) run.Fail(absl::StrFormat("%s is a %s and must be an int", what, value.type_name()));
  return integer;
}

int64_t CountOr(Runtime& run, Arguments arguments, size_t i) {
  if (!arguments[i] || arguments[i]->is_none()) return -1;
  return NeedInteger(run, *arguments[i], "the count").value_or(0);
}

}  // namespace efla::jinja
