// Templates in the part of the Jinja language that chat templates use: see README.md.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_TEMPLATE_H_
#define EFLA_MODEL_CHAT_TEMPLATE_TEMPLATE_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "model/chat_template/text.h"
#include "model/chat_template/value.h"

namespace efla::jinja {

struct RenderOptions {
  std::chrono::system_clock::time_point now;  // of strftime_now, in local time
  // Bounds of one run; more is an error.
  size_t max_output_bytes = size_t{16} << 20;
  size_t max_made_bytes = size_t{256} << 20;  // of all strings and lists on the way
  size_t max_steps = 2'000'000;               // nodes evaluated, items gone through
};

using Variables = std::vector<std::pair<std::string, Value>>;

// Immutable; safe to use from any thread.
class Template {
 public:
  // INVALID_ARGUMENT "line N: ..." for what is no template or is not supported.
  static absl::StatusOr<Template> Parse(std::string_view source);
  ~Template();
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;

  // Strings in `variables` are well-formed UTF-8. INVALID_ARGUMENT "line N: ..." for what the template
  // refuses (raise_exception) and what exceeds the bounds, FAILED_PRECONDITION for what cannot be computed.
  absl::StatusOr<Text> Render(const Variables& variables, const RenderOptions& options) const;

 private:
  struct Tree;
  explicit Template(std::unique_ptr<const Tree> tree);
  std::unique_ptr<const Tree> tree_;
};

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_TEMPLATE_H_
