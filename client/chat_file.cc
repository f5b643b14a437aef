#include "client/chat_file.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/prompt.h"

namespace efla {
namespace {

using Json = nlohmann::json;

absl::Status Refuse(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", name, what));
}

absl::Status AddMessage(std::string_view name, size_t number, const Json& message, v1::Chat& chat) {
  const std::string where = absl::StrFormat("messages[%d]", number);
  if (!message.is_object()) return Refuse(name, where + " is no object");
  v1::ChatMessage& added = *chat.add_messages();
  for (const auto& [key, value] : message.items()) {
    if (key != "role" && key != "content") {
      return Refuse(name, absl::StrFormat("%s has \"%s\"; a message has role and content", where, key));
    }
    if (!value.is_string()) return Refuse(name, absl::StrFormat("%s.%s is no string", where, key));
    (key == "role" ? *added.mutable_role() : *added.mutable_content()) = value.get<std::string>();
  }
  for (const char* key : {"role", "content"}) {
    if (!message.contains(key)) return Refuse(name, absl::StrFormat("%s has no %s", where, key));
  }
  return absl::OkStatus();
}

absl::Status AddMessages(std::string_view name, const Json& messages, v1::Chat& chat) {
  if (!messages.is_array()) return Refuse(name, "messages is no list");
  for (size_t i = 0; i < messages.size(); ++i) {
    if (absl::Status status = AddMessage(name, i, messages[i], chat); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Chat> ParseChat(std::string_view name, std::string_view json) {
  const Json parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  v1::Chat chat;
  if (parsed.is_array()) {
    absl::Status status = AddMessages(name, parsed, chat);
    if (!status.ok()) return status;
    return chat;
  }
  if (!parsed.is_object())
    return Refuse(name, "it is neither a list of messages nor an object with messages, in JSON");
  if (!parsed.contains("messages")) return Refuse(name, "it has no messages");
  for (const auto& [key, value] : parsed.items()) {
    if (key == "messages") {
      if (absl::Status status = AddMessages(name, value, chat); !status.ok()) return status;
      continue;
    }
    const bool adds = key == "add_generation_prompt";
    if (!adds && key != "continue_final_message")
      return Refuse(name, absl::StrFormat("\"%s\" is not known", key));
    if (!value.is_boolean()) return Refuse(name, absl::StrFormat("%s is no boolean", key));
    adds ? chat.set_add_generation_prompt(value.get<bool>())
         : chat.set_continue_final_message(value.get<bool>());
  }
  return chat;
}

absl::StatusOr<v1::Chat> ReadChat(const std::string& path) {
  absl::StatusOr<std::string> text = ReadTextFile(path);
  if (!text.ok()) return text.status();
  return ParseChat(path == "-" ? "standard input" : path, *text);
}

}  // namespace efla
