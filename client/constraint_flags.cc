#include "client/constraint_flags.h"

#include "absl/status/statusor.h"
#include "client/command.h"
#include "client/prompt.h"

namespace efla {
namespace {

absl::StatusOr<std::string> TextOrFile(const std::string& given) {
  if (!given.starts_with('@')) return given;
  return ReadTextFile(given.substr(1));
}

}  // namespace

absl::Status ConstraintFlags::Fill(v1::GenerateRequest& request) const {
  if (!choices.empty()) {
    request.mutable_constraint()->mutable_choices()->mutable_choices()->Assign(choices.begin(),
                                                                               choices.end());
  }
  if (regex) request.mutable_constraint()->set_regex(*regex);
  if (json_object) request.mutable_constraint()->mutable_json_object();
  if (json_schema) {
    absl::StatusOr<std::string> text = TextOrFile(*json_schema);
    if (!text.ok()) return text.status();
    request.mutable_constraint()->set_json_schema(*std::move(text));
  }
  if (grammar) {
    absl::StatusOr<std::string> text = TextOrFile(*grammar);
    if (!text.ok()) return text.status();
    request.mutable_constraint()->set_grammar(*std::move(text));
  }
  return absl::OkStatus();
}

void AddConstraintFlags(CLI::App& app, ConstraintFlags& flags) {
  CLI::Option_group& group = *app.add_option_group("Constraint", "What the output must be, one of:");
  AddRepeatedFlag(group, "--choice", flags.choices, "One of these texts")->check(Utf8());
  group.add_option("--regex", flags.regex, "A text that this expression matches as a whole")->check(Utf8());
  group.add_flag("--json-object", flags.json_object, "A JSON object");
  group.add_option("--json-schema", flags.json_schema, "JSON that meets this schema (text, or @FILE)")
      ->check(Utf8OrFile());
  group.add_option("--grammar", flags.grammar, "A text of this grammar (text, or @FILE)")
      ->check(Utf8OrFile());
  group.require_option(0, 1);
}

}  // namespace efla
