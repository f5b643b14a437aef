// Runs a parsed template.
#ifndef EFLA_MODEL_CHAT_TEMPLATE_EVALUATOR_H_
#define EFLA_MODEL_CHAT_TEMPLATE_EVALUATOR_H_

#include "absl/status/statusor.h"
#include "model/chat_template/ast.h"
#include "model/chat_template/template.h"

namespace efla::jinja {

absl::StatusOr<Text> Evaluate(const Statements& body, const Variables& variables,
                              const RenderOptions& options);

}  // namespace efla::jinja

#endif  // EFLA_MODEL_CHAT_TEMPLATE_EVALUATOR_H_
