#include "model/chat.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/chat_template/template.h"
#include "model/files.h"
#include "model/strict_json.h"
#include "model/utf8.h"

namespace efla {
namespace {

constexpr int64_t kMaxConfigBytes = 32 << 20;  // lists of added tokens are long
constexpr int64_t kMaxTemplateBytes = 1 << 20;
constexpr char kTemplateFile[] = "chat_template.jinja", kConfigFile[] = "tokenizer_config.json";

bool IsBlank(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

std::string_view WithoutBlanks(std::string_view text) {
  while (!text.empty() && IsBlank(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsBlank(text.back())) text.remove_suffix(1);
  return text;
}

// tokenizer_config.json; an empty object where there is none.
absl::StatusOr<nlohmann::json> ReadConfig(const std::string& folder) {
  absl::StatusOr<std::string> text = ReadFile(folder + "/" + kConfigFile, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return nlohmann::json::object();
  if (!text.ok()) return text.status();
  return ParseJsonObject(*text, kConfigFile);
}

// A special token is a string, or an object that holds it as "content".
std::optional<std::string> SpecialToken(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  if (found->is_object() && found->contains("content") && (*found)["content"].is_string()) {
    return (*found)["content"].get<std::string>();
  }
  return std::nullopt;
}

absl::StatusOr<std::string> TemplateIn(const nlohmann::json& config) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) {
    return absl::NotFoundError(absl::StrFormat("%s has no chat_template", kConfigFile));
  }
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: chat_template is neither a string nor a list", kConfigFile));
  }
  for (const nlohmann::json& entry : *found) {
    if (!entry.is_object() || !entry.contains("name") || entry["name"] != "default") continue;
    if (entry.contains("template") && entry["template"].is_string())
      return entry["template"].get<std::string>();
  }
  return absl::NotFoundError(
      absl::StrFormat("%s: chat_template is a list without a template named \"default\"", kConfigFile));
}

// A text that no message and no template holds. A word, so that templates that trim, split or look for tags
// leave it as it is.
std::string StandInAnswer() {
  std::random_device device;
  return absl::StrFormat("EflaAnswer%08x%08x", device(), device());
}

RenderedChat ToRendered(const jinja::Text& text) {
  RenderedChat chat;
  for (const jinja::Text::Range& range : text.content()) chat.content.push_back({range.begin, range.end});
  chat.text = text.bytes();
  return chat;
}

// What comes after the answer.
absl::StatusOr<jinja::Text> After(std::string_view answer, const absl::StatusOr<jinja::Text>& text) {
  if (!text.ok()) return text.status();
  const std::string& bytes = text->bytes();
  const size_t at = bytes.find(answer);
  if (at == std::string::npos) return absl::NotFoundError("the template does not write answers as they are");
  const size_t end = at + answer.size();
  if (bytes.find(answer, end) != std::string::npos) {
    return absl::NotFoundError("the template writes an answer more than once");
  }
  return text->Slice(end, bytes.size());
}

// How many bytes both begin with: whole characters that the template wrote.
size_t CommonMarkup(const jinja::Text& a, const jinja::Text& b) {
  size_t most = std::min(a.size(), b.size());
  if (!a.content().empty()) most = std::min(most, a.content().front().begin);
  if (!b.content().empty()) most = std::min(most, b.content().front().begin);
  const std::string_view left(a.bytes()), right(b.bytes());
  size_t end = 0;
  while (end < most) {
    const size_t next = end + jinja::CharacterBytes(left.substr(end));
    if (next > most || left.substr(end, next - end) != right.substr(end, next - end)) break;
    end = next;
  }
  return end;
}

class JinjaChatTemplate final : public ChatTemplate {
 public:
  JinjaChatTemplate(jinja::Template parsed, jinja::Variables special_tokens)
      : template_(std::move(parsed)), special_tokens_(std::move(special_tokens)) {}

  absl::StatusOr<RenderedChat> Render(std::span<const ChatMessage> messages,
                                      const ChatOptions& options) const override {
    absl::StatusOr<jinja::Text> text = TextOf(messages, options);
    if (!text.ok()) return text.status();
    return ToRendered(*text);
  }

  absl::StatusOr<ContinuedChat> RenderAfterAnswer(std::span<const ChatMessage> messages,
                                                  const ChatOptions& options) const override {
    const std::string answer = StandInAnswer();
    const std::vector<ChatMessage> before = {{"user", "Hello"}, {"assistant", answer}};
    std::vector<ChatMessage> all = before;
    all.insert(all.end(), messages.begin(), messages.end());
    const absl::StatusOr<jinja::Text> text = After(answer, TextOf(all, options));
    if (!text.ok()) return text.status();
    ContinuedChat continued{.chat = ToRendered(*text)};
    const ChatOptions no_more = {
        .add_generation_prompt = false, .continue_final_message = false, .now = options.now};
    const absl::StatusOr<jinja::Text> closing = After(answer, TextOf(before, no_more));
    if (closing.ok()) continued.closing_bytes = CommonMarkup(*closing, *text);
    return continued;
  }

 private:
  absl::StatusOr<jinja::Text> TextOf(std::span<const ChatMessage> messages,
                                     const ChatOptions& options) const {
    jinja::Variables variables = special_tokens_;
    std::vector<jinja::Value> list;
    for (const ChatMessage& message : messages) {
      using jinja::Text, jinja::Value;
      list.push_back(Value::OfEntries({{Value::Markup("role"), Value(Text::Content(message.role))},
                                       {Value::Markup("content"), Value(Text::Content(message.content))}}));
    }
    variables.emplace_back("messages", jinja::Value::OfItems(std::move(list)));
    variables.emplace_back("add_generation_prompt", jinja::Value(options.add_generation_prompt));
    for (const char* absent : {"tools", "documents"}) variables.emplace_back(absent, jinja::Value::OfNone());
    jinja::RenderOptions render;
    render.now = options.now;
    absl::StatusOr<jinja::Text> text = template_.Render(variables, render);
    if (!text.ok() || !options.continue_final_message) return text;
    const std::optional<size_t> end = EndOfContent(*text, messages.back().content);
    if (!end) {
      return absl::InvalidArgumentError(
          "the last message cannot be continued: it is blank, or the template does not write it as it is");
    }
    return text->Slice(0, *end);
  }

  // Where the last message's content ends in the text: its last occurrence that came from a message. Its
  // blanks at the end count if the template kept them.
  static std::optional<size_t> EndOfContent(const jinja::Text& text, std::string_view content) {
    const std::string_view core = WithoutBlanks(content);
    if (core.empty()) return std::nullopt;
    const std::string_view blanks =
        content.substr(static_cast<size_t>(core.data() - content.data()) + core.size());
    for (auto range = text.content().rbegin(); range != text.content().rend(); ++range) {
      const std::string_view marked =
          std::string_view(text.bytes()).substr(range->begin, range->end - range->begin);
      const size_t found = marked.rfind(core);
      if (found == std::string_view::npos) continue;
      const bool keeps_blanks = marked.substr(found + core.size()).starts_with(blanks);
      return range->begin + found + core.size() + (keeps_blanks ? blanks.size() : 0);
    }
    return std::nullopt;
  }

  const jinja::Template template_;
  const jinja::Variables special_tokens_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<const ChatTemplate>> ChatTemplate::Open(const std::string& folder,
                                                                       const Tokenizer& tokenizer) {
  absl::StatusOr<nlohmann::json> config = ReadConfig(folder);
  if (!config.ok()) return config.status();
  const char* file = kTemplateFile;
  absl::StatusOr<std::string> source = ReadFile(folder + "/" + kTemplateFile, kMaxTemplateBytes);
  if (absl::IsNotFound(source.status())) {
    file = kConfigFile;
    source = TemplateIn(*config);
  }
  if (!source.ok()) return source.status();
  if (static_cast<int64_t>(source->size()) > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: chat_template has %d bytes; the limit is %d", file,
                                                      source->size(), kMaxTemplateBytes));
  }
  if (const auto bad = FindInvalidUtf8(*source)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the chat template is not UTF-8 at byte %d", file, *bad));
  }
  absl::StatusOr<jinja::Template> parsed = jinja::Template::Parse(*source);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: chat template, %s", file, std::string(parsed.status().message())));
  }
  jinja::Variables special_tokens;
  for (const char* key :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    std::optional<std::string> token = SpecialToken(*config, key);
    if (!token && std::string_view(key) == "bos_token" && tokenizer.bos_id() >= 0) {
      token = tokenizer.Piece(tokenizer.bos_id());
    }
    if (!token && std::string_view(key) == "eos_token" && tokenizer.eos_id() >= 0) {
      token = tokenizer.Piece(tokenizer.eos_id());
    }
    if (token) special_tokens.emplace_back(key, jinja::Value::Markup(*token));
  }
  return std::make_unique<JinjaChatTemplate>(*std::move(parsed), std::move(special_tokens));
}

}  // namespace efla
