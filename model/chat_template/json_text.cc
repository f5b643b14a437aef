#include "model/chat_template/json_text.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace efla::jinja {
namespace {

class Writer {
 public:
  Writer(Runtime& run, const JsonStyle& style) : run_(run), style_(style) {}

  Text Write(const Value& value) {
    Any(value, 0);
    return std::move(out_);
  }

 private:
  void Any(const Value& value, int level) {
    if (!run_.Charge()) return;
    if (out_.size() > run_.options().max_output_bytes) {
      run_.FailBound(absl::StrFormat("the JSON has more than %d bytes", run_.options().max_output_bytes));
      return;
    }
    if (value.is_none()) return out_.Append("null");
    if (const Text* text = value.text()) return String(*text);
    if (const std::optional<std::string> number = Number(value)) return out_.Append(*number);
    if (const Dict* dict = value.dict()) return Object(*dict, level);
    const Sequence* const items = value.sequence();
    if (items != nullptr && (items->form == Sequence::Form::kList || items->form == Sequence::Form::kTuple)) {
      return Array(*items, level);
    }
    run_.Fail(absl::StrFormat("JSON has no form for a %s", value.type_name()));
  }

  static std::optional<std::string> Number(const Value& value) {
    if (const bool* boolean = value.As<bool>()) return *boolean ? "true" : "false";
    if (const int64_t* integer = value.As<int64_t>()) return absl::StrFormat("%d", *integer);
    const double* const real = value.As<double>();
    if (real == nullptr) return std::nullopt;
    if (std::isnan(*real)) return "NaN";
    if (std::isinf(*real)) return *real < 0 ? "-Infinity" : "Infinity";
    return FloatText(*real);
  }

  void String(const Text& text) {
    const std::string& bytes = text.bytes();
    if (!run_.Charge(bytes.size() / 16)) return;
    out_.Append("\"");
    size_t plain = 0;  // where what is written as it is begins
    for (size_t at = 0; at < bytes.size();) {
      const std::string_view rest = std::string_view(bytes).substr(at);
      const size_t length = CharacterBytes(rest);
      const std::string escaped = Escaped(CodePoint(rest));
      if (!escaped.empty()) {
        out_.Append(text.Slice(plain, at));
        out_.Append(Text::MadeOf(text.Slice(at, at + length), escaped));
        plain = at + length;
      }
      at += length;
    }
    out_.Append(text.Slice(plain, bytes.size()));
    out_.Append("\"");
  }

  // Empty for what is written as it is.
  std::string Escaped(char32_t c) const {
    constexpr std::string_view kCharacters = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    if (c < 0x80) {
      const size_t found = kCharacters.find(static_cast<char>(c));
      if (found != std::string_view::npos) return std::string("\\") + kLetters[found];
    }
    if (c >= 0x20 && (c < 0x7F || !style_.ascii_only)) return "";
    if (c == 0x7F) return "";
    const auto code = static_cast<uint32_t>(c);
    if (code < 0x10000) return absl::StrFormat("\\u%04x", code);
    const uint32_t offset = code - 0x10000;
    return absl::StrFormat("\\u%04x\\u%04x", 0xD800 + (offset >> 10), 0xDC00 + (offset & 0x3FF));
  }

  void LineBreak(int level) {
    if (!style_.indent) return;
    out_.Append("\n");
    for (int i = 0; i < level; ++i) out_.Append(*style_.indent);
  }

  void Array(const Sequence& items, int level) {
    if (items.items.empty()) return out_.Append("[]");
    out_.Append("[");
    for (size_t i = 0; i < items.items.size() && run_.ok(); ++i) {
      if (i > 0) out_.Append(style_.item_separator);
      LineBreak(level + 1);
      Any(items.items[i], level + 1);
    }
    LineBreak(level);
    out_.Append("]");
  }

  void Object(const Dict& dict, int level) {
    if (dict.entries.empty()) return out_.Append("{}");
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [&](const auto* a, const auto* b) {
        return run_.ok() && run_.Compare(a->first, b->first) < 0;
      });
    }
    out_.Append("{");
    for (size_t i = 0; i < entries.size() && run_.ok(); ++i) {
      if (i > 0) out_.Append(style_.item_separator);
      LineBreak(level + 1);
      const Value& key = entries[i]->first;
      if (key.text() != nullptr) {
        String(*key.text());
      } else if (key.is_none()) {
        out_.Append("\"null\"");
      } else if (const std::optional<std::string> number = Number(key)) {
        out_.Append("\"" + *number + "\"");
      } else {
        run_.Fail(absl::StrFormat("JSON has no key that is a %s", key.type_name()));
      }
      out_.Append(style_.key_separator);
      Any(entries[i]->second, level + 1);
    }
    LineBreak(level);
    out_.Append("}");
  }

  Runtime& run_;
  const JsonStyle& style_;
  Text out_;
};

}  // namespace

Text ToJson(Runtime& run, const Value& value, const JsonStyle& style) {
  return Writer(run, style).Write(value);
}

}  // namespace efla::jinja
