#include "model/chat_template/template.h"

#include "model/chat_template/ast.h"
#include "model/chat_template/evaluator.h"
#include "model/chat_template/parser.h"

namespace efla::jinja {

struct Template::Tree {
  Statements body;
};

Template::Template(std::unique_ptr<const Tree> tree) : tree_(std::move(tree)) {}
Template::~Template() = default;
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;

absl::StatusOr<Template> Template::Parse(std::string_view source) {
  absl::StatusOr<Statements> body = jinja::Parse(source);
  if (!body.ok()) return body.status();
  auto tree = std::make_unique<Tree>();
  tree->body = *std::move(body);
  return Template(std::move(tree));
}

absl::StatusOr<Text> Template::Render(const Variables& variables, const RenderOptions& options) const {
  return Evaluate(tree_->body, variables, options);
}

}  // namespace efla::jinja
