// Values as JSON, as Python's json.dumps writes it.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_JSON_TEXT_H_
#define EFLA_MODEL_CHAT_TEMPLATE_JSON_TEXT_H_

#include <optional>
#include <string>

#include "model/chat_template/runtime.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

struct JsonStyle {
  bool ascii_only = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  // of each level; absent: all on one line
  std::string item_separator = ", ", key_separator = ": ";
};

// An error of the run for what JSON has no form for.
Text ToJson(Runtime& run, const Value& value, const JsonStyle& style);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_JSON_TEXT_H_
