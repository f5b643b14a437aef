// JSON from outside: parsed strictly, read field by field into typed values.
#ifndef EFLA_MODEL_STRICT_JSON_H_
#define EFLA_MODEL_STRICT_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace efla {

// Outside text made fit for a one-line message: control bytes escaped, cut after `max_bytes`.
std::string Printable(std::string_view text, size_t max_bytes = 120);

// INVALID_ARGUMENT, beginning with `what`, for anything but one JSON object: syntax errors, bytes that are
// not UTF-8, a key twice in one object, nesting beyond 32 levels, more than a million values.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view what);

// Reads one object's fields. The first bad field is remembered with its name, value and bound, and the
// fallback returned from then on, so that a caller reads all fields and asks for `status` once.
class JsonFields {
 public:
  // Both must outlive this.
  JsonFields(const nlohmann::json& object, std::string_view what) : object_(object), what_(what) {}

  bool Has(const char* key) const;  // there and not null
  // A key that is null is an error here; use Has or the optional form where null has a meaning. Bounds are
  // inclusive. A field without fallback is required.
  int64_t Integer(const char* key, int64_t min, int64_t max, std::optional<int64_t> fallback = std::nullopt);
  double Number(const char* key, double min, double max, std::optional<double> fallback = std::nullopt);
  bool Boolean(const char* key, bool fallback);
  std::string Text(const char* key, std::optional<std::string> fallback = std::nullopt);
  std::optional<int64_t> OptionalInteger(const char* key, int64_t min, int64_t max);
  std::optional<double> OptionalNumber(const char* key, double min, double max);
  // One number or a list of them, repetitions dropped; absent: `fallback`; null: empty.
  std::vector<int32_t> TokenIds(const char* key, int64_t vocab_size, std::vector<int32_t> fallback);

  // Remembers "what: key is VALUE; RULE" unless an earlier error is there.
  void Refuse(const char* key, std::string_view rule);
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json* Get(const char* key, bool required);

  const nlohmann::json& object_;
  std::string_view what_;
  absl::Status status_;
};

}  // namespace efla

#endif  // EFLA_MODEL_STRICT_JSON_H_
