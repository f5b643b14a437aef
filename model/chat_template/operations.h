// Filters, tests and methods: what is applied to a subject, with arguments that are matched when a template
// is loaded. Each kind has its table, in filters.cc, tests.cc and methods.cc.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_OPERATIONS_H_
#define EFLA_MODEL_CHAT_TEMPLATE_OPERATIONS_H_

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "model/chat_template/value.h"

namespace efla::jinja {

class Runtime;

using Arguments = std::span<const std::optional<Value>>;  // one a parameter

struct Operation {
  std::string_view name;
  std::vector<std::string_view> parameters;
  size_t required = 0;  // so many of them
  Value (*apply)(Runtime& run, const Value& subject, Arguments arguments) = nullptr;
  // Which parameters name a filter or a test: these must be literals.
  int filter_parameter = -1, test_parameter = -1;
};

// Null where there is none of that name.
const Operation* FindFilter(std::string_view name);
const Operation* FindTest(std::string_view name);
const Operation* FindMethod(std::string_view name);  // of strings and dicts

inline const Operation* FindByName(std::span<const Operation> operations, std::string_view name) {
  for (const Operation& operation : operations) {
    if (operation.name == name) return &operation;
  }
  return nullptr;
}

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_OPERATIONS_H_
