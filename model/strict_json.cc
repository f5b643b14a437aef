#include "model/strict_json.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;
constexpr int64_t kMaxValues = 1 << 20;  // bounds the memory a hostile document can ask for
constexpr size_t kMaxListedTokens = 4096;

// In our words, of what the library says: "[json.exception.parse_error.101] parse error at line 2, column 5:
// syntax error ...", or the same without a place.
std::string NotJson(size_t position, std::string_view what) {
  constexpr std::string_view kLabelEnd = "] ", kError = "parse error", kAtLine = " at line ";
  if (const size_t end = what.find(kLabelEnd); what.starts_with('[') && end != what.npos) {
    what.remove_prefix(end + kLabelEnd.size());
  }
  if (what.starts_with(kError)) {
    what.remove_prefix(kError.size());
    if (what.starts_with(kAtLine)) return "not JSON" + Printable(what, 200);
    if (const size_t colon = what.find(": "); colon != what.npos) what.remove_prefix(colon + 2);
  }
  return absl::StrFormat("not JSON at byte %d: %s", position, Printable(what, 200));
}

// Checks what the tree parser would let pass or would spend memory on.
class Checker : public nlohmann::json_sax<json> {
 public:
  const std::string& error() const { return error_; }

  bool null() override { return Count(); }
  bool boolean(bool) override { return Count(); }
  bool number_integer(number_integer_t) override { return Count(); }
  bool number_unsigned(number_unsigned_t) override { return Count(); }
  bool number_float(number_float_t, const string_t&) override { return Count(); }
  bool string(string_t&) override { return Count(); }
  bool binary(binary_t&) override { return Count(); }
  bool start_object(size_t) override { return Open(); }
  bool start_array(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) {
      error_ = absl::StrFormat("the key \"%s\" is there twice", Printable(name));
      return false;
    }
    return true;
  }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    error_ = NotJson(position, error.what());
    return false;
  }

 private:
  bool Count() {
    if (++values_ <= kMaxValues) return true;
    error_ = absl::StrFormat("more than %d values", kMaxValues);
    return false;
  }
  bool Open() {
    keys_.emplace_back();
    if (keys_.size() <= kMaxDepth) return Count();
    error_ = absl::StrFormat("nested deeper than %d levels", kMaxDepth);
    return false;
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::unordered_set<std::string>> keys_;  // of the objects and arrays that are open
  int64_t values_ = 0;
  std::string error_;
};

std::string Shown(const json& value) { return Printable(value.dump(), 60); }

}  // namespace

std::string Printable(std::string_view text, size_t max_bytes) {
  std::string out;
  size_t end = std::min(text.size(), max_bytes);
  if (end < text.size()) {  // do not cut a character
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  }
  for (char c : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += absl::StrFormat("\\x%02x", byte);
    } else {
      out += c;
    }
  }
  if (end < text.size()) out += "...";
  return out;
}

absl::StatusOr<json> ParseJsonObject(std::string_view text, std::string_view what) {
  Checker checker;
  if (!json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: %s", what, checker.error()));
  }
  json value = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: holds a JSON %s; an object is needed", what, value.type_name()));
  }
  return value;
}

const json* JsonFields::Get(const char* key, bool required) {
  if (!status_.ok()) return nullptr;
  const auto it = object_.find(key);
  if (it != object_.end()) return &*it;
  if (required) status_ = absl::InvalidArgumentError(absl::StrFormat("%s: %s is missing", what_, key));
  return nullptr;
}

void JsonFields::Refuse(const char* key, std::string_view rule) {
  if (!status_.ok()) return;
  const auto it = object_.find(key);
  const std::string value = it == object_.end() ? "missing" : Shown(*it);
  status_ = absl::InvalidArgumentError(absl::StrFormat("%s: %s is %s; %s", what_, key, value, rule));
}

bool JsonFields::Has(const char* key) const {
  const auto it = object_.find(key);
  return it != object_.end() && !it->is_null();
}

int64_t JsonFields::Integer(const char* key, int64_t min, int64_t max, std::optional<int64_t> fallback) {
  const int64_t otherwise = fallback.value_or(min);
  const json* value = Get(key, !fallback.has_value());
  if (value == nullptr) return otherwise;
  const bool fits =
      value->is_number_integer() &&
      (!value->is_number_unsigned() || value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (fits && value->get<int64_t>() >= min && value->get<int64_t>() <= max) return value->get<int64_t>();
  Refuse(key, absl::StrFormat("an integer from %d to %d is needed", min, max));
  return otherwise;
}

double JsonFields::Number(const char* key, double min, double max, std::optional<double> fallback) {
  const double otherwise = fallback.value_or(min);
  const json* value = Get(key, !fallback.has_value());
  if (value == nullptr) return otherwise;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= min && number <= max) return number;
  }
  Refuse(key, absl::StrFormat("a number from %g to %g is needed", min, max));
  return otherwise;
}

bool JsonFields::Boolean(const char* key, bool fallback) {
  const json* value = Get(key, false);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Refuse(key, "true or false is needed");
  return fallback;
}

std::string JsonFields::Text(const char* key, std::optional<std::string> fallback) {
  const json* value = Get(key, !fallback.has_value());
  if (value == nullptr) return fallback.value_or("");
  if (value->is_string()) return value->get<std::string>();
  Refuse(key, "a string is needed");
  return fallback.value_or("");
}

std::optional<int64_t> JsonFields::OptionalInteger(const char* key, int64_t min, int64_t max) {
  if (!Has(key)) return std::nullopt;
  return Integer(key, min, max);
}

std::optional<double> JsonFields::OptionalNumber(const char* key, double min, double max) {
  if (!Has(key)) return std::nullopt;
  return Number(key, min, max);
}

std::vector<int32_t> JsonFields::TokenIds(const char* key, int64_t vocab_size,
                                          std::vector<int32_t> fallback) {
  const json* value = Get(key, false);
  if (value == nullptr) return fallback;
  if (value->is_null()) return {};
  const json listed = value->is_array() ? *value : json::array({*value});
  std::vector<int32_t> ids;
  for (const json& id : listed) {
    const bool fits = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab_size);
    if (!fits || listed.size() > kMaxListedTokens) {
      Refuse(key, absl::StrFormat("a token id from 0 to %d or a list of at most %d of them is needed",
                                  vocab_size - 1, kMaxListedTokens));
      return fallback;
    }
    const auto token = id.get<int32_t>();
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  }
  return ids;
}

}  // namespace efla
