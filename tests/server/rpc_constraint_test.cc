// GenerateRequest.constraint, as it is read from a request.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>

#include "server/rpc/request_validation.h"
#include "tests/source_path.h"

namespace efla {
namespace {

class ConstraintValidationTest : public testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
    const std::array<TokenId, 1> end = {tokenizer_->eos_id()};
    constraints_ = std::make_unique<const ConstraintCompiler>(*tokenizer_, end);
    config_.vocab_size = tokenizer_->vocab_size();
    config_.bos_token_id = 1;
    model_.config = &config_;
    model_.tokenizer = tokenizer_.get();
    model_.constraints = constraints_.get();
    model_.limits.max_prompt_tokens = 1000;
    model_.limits.max_new_tokens = 4096;
    model_.max_piece_bytes = 16;
    request_.set_text("Once upon a time");
  }

  // With its constraint.
  absl::StatusOr<CallRequest> Convert() const {
    absl::StatusOr<CallRequest> call = ToGenerationRequest(request_, model_, ReplyKind::kStream);
    if (!call.ok() || !call->constraint) return call;
    EXPECT_EQ(call->generation.constraint, nullptr) << "reading a request compiles nothing";
    const auto& [field, spec] = *call->constraint;
    const absl::Status status = TakeConstraint(field, constraints_->Compile(spec), call->generation);
    if (!status.ok()) return status;
    return call;
  }

  ModelConfig config_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<const ConstraintCompiler> constraints_;
  ServedModel model_;
  v1::GenerateRequest request_;
};

TEST_F(ConstraintValidationTest, EveryKindIsCompiled) {
  EXPECT_EQ(Convert()->generation.constraint, nullptr);
  v1::Constraint& constraint = *request_.mutable_constraint();
  constraint.mutable_choices()->add_choices("yes");
  EXPECT_NE(Convert()->generation.constraint, nullptr);
  constraint.set_regex("[a-z]+");
  EXPECT_NE(Convert()->generation.constraint, nullptr);
  constraint.mutable_json_object();
  EXPECT_NE(Convert()->generation.constraint, nullptr);
  constraint.set_json_schema(R"({"type":"null"})");
  EXPECT_NE(Convert()->generation.constraint, nullptr);
  constraint.set_grammar("root ::= \"a\"");
  EXPECT_NE(Convert()->generation.constraint, nullptr);
}

TEST_F(ConstraintValidationTest, EqualConstraintsAreCompiledOnce) {
  request_.mutable_constraint()->set_regex("[a-z]+");
  const auto first = Convert()->generation.constraint;
  EXPECT_EQ(Convert()->generation.constraint, first);
  request_.mutable_constraint()->set_regex("[a-y]+");
  EXPECT_NE(Convert()->generation.constraint, first);
  request_.mutable_constraint()->set_grammar("[a-z]+");
  EXPECT_FALSE(Convert().ok());
}

TEST_F(ConstraintValidationTest, RefusalsNameTheField) {
  request_.mutable_constraint();
  EXPECT_EQ(Convert().status().message(), "constraint has no kind; exactly one is needed");
  request_.mutable_constraint()->set_regex("(");
  EXPECT_EQ(Convert().status().message(), "constraint.regex at byte 0 (\"(\"): the group has no )");
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kInvalidArgument);
  request_.mutable_constraint()->set_regex("a");
  request_.mutable_stopping()->set_max_tokens(0);
  EXPECT_EQ(Convert().status().message(),
            "constraint is given and stopping.max_tokens is 0; there is no output then");
}

TEST_F(ConstraintValidationTest, WhatEndsACompilationIsNoErrorOfTheField) {
  GenerationRequest generation;
  EXPECT_EQ(TakeConstraint("constraint.regex", absl::CancelledError("gone"), generation),
            absl::CancelledError("gone"));
  EXPECT_EQ(generation.constraint, nullptr);
}

TEST_F(ConstraintValidationTest, WithoutATokenizerThereIsNone) {
  model_.tokenizer = nullptr;
  model_.constraints = nullptr;
  request_.mutable_token_ids()->add_ids(1);
  request_.clear_text();
  request_.mutable_constraint()->mutable_json_object();
  EXPECT_EQ(Convert().status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace efla
