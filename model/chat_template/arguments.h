// What operations ask of their arguments.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_ARGUMENTS_H_
#define EFLA_MODEL_CHAT_TEMPLATE_ARGUMENTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "model/chat_template/operations.h"
#include "model/chat_template/runtime.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

// Null where it is not given.
inline const Value* Given(Arguments arguments, size_t i) { return arguments[i] ? &*arguments[i] : nullptr; }

// Whether it is given and true.
inline bool Flag(Runtime& run, Arguments arguments, size_t i) {
  return arguments[i] && run.Truthy(*arguments[i]);
}

// The text; null, and an error that says what it should have been, for another value.
const Text* NeedText(Runtime& run, const Value& value, std::string_view what);
std::optional<int64_t> NeedInteger(Runtime& run, const Value& value, std::string_view what);

// How often something is to be done; -1, as often as can be, where it is not given.
int64_t CountOr(Runtime& run, Arguments arguments, size_t i);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_ARGUMENTS_H_
