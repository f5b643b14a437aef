#include "server/rpc/models_service.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/chat_prompt.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_answer.h"

namespace efla {
namespace {

absl::Status DoGetModel(const v1::GetModelRequest&, const ServedModel& model, const StillWanted&,
                        v1::Model& message) {
  const ModelConfig& config = *model.config;
  message.set_name(model.name);
  message.set_model_type(std::string(ModelTypeName(config.type)));
  message.set_parameters(static_cast<uint64_t>(config.parameter_count()));
  message.set_vocab_size(static_cast<uint32_t>(config.vocab_size));
  message.set_hidden_size(static_cast<uint32_t>(config.hidden_size));
  message.set_num_layers(static_cast<uint32_t>(config.num_layers));
  message.set_num_heads(static_cast<uint32_t>(config.num_heads));
  message.set_d_k(static_cast<uint32_t>(config.d_k));
  message.set_d_v(static_cast<uint32_t>(config.d_v));
  message.set_state_bytes(static_cast<uint64_t>(model.state_bytes));
  message.set_bos_token_id(static_cast<uint32_t>(config.bos_token_id));
  for (TokenId id : config.eos_token_ids) message.add_eos_token_ids(static_cast<uint32_t>(id));
  message.set_has_tokenizer(model.tokenizer != nullptr);
  message.set_has_chat_template(model.chat_template != nullptr);
  message.set_device(model.device);
  message.set_weight_dtype(model.weight_dtype);

  v1::Limits& limits = *message.mutable_limits();
  limits.set_max_prompt_tokens(static_cast<uint64_t>(model.limits.max_prompt_tokens));
  limits.set_max_new_tokens(static_cast<uint64_t>(model.limits.max_new_tokens));
  limits.set_max_stop_strings(kMaxStopStrings);
  limits.set_max_stop_bytes(kMaxStopBytes);
  limits.set_max_top_logprobs(kMaxTopLogprobs);
  limits.set_state_slots(static_cast<uint32_t>(model.state_slots));
  limits.set_max_queue(static_cast<uint32_t>(model.limits.max_queue));
  limits.set_max_samples(static_cast<uint32_t>(std::min(kMaxSamples, model.limits.max_queue)));
  limits.set_max_penalty_window(kMaxPenaltyWindow);
  limits.set_max_constraint_bytes(model.constraints == nullptr ? 0
                                                               : static_cast<uint32_t>(kMaxConstraintBytes));

  v1::Defaults& defaults = *message.mutable_defaults();
  defaults.set_temperature(model.defaults.temperature);
  defaults.set_top_k(static_cast<uint32_t>(model.defaults.top_k));
  defaults.set_top_p(model.defaults.top_p);
  defaults.set_min_p(model.defaults.min_p);
  defaults.set_typical_p(model.defaults.typical_p);
  defaults.set_repetition_penalty(model.defaults.repetition_penalty);
  defaults.set_no_repeat_ngram_size(static_cast<uint32_t>(model.defaults.no_repeat_ngram_size));
  defaults.set_max_tokens(static_cast<uint32_t>(model.defaults.max_tokens));
  return absl::OkStatus();
}

absl::Status CheckTokenCount(std::string_view field, int64_t tokens, const ServedModel& model) {
  if (tokens <= model.limits.max_prompt_tokens) return absl::OkStatus();
  return InvalidField(
      field, absl::StrFormat("has %d tokens; the limit is %d", tokens, model.limits.max_prompt_tokens));
}

absl::Status DoTokenize(const v1::TokenizeRequest& request, const ServedModel& model,
                        const StillWanted& wanted, v1::TokenizeResponse& response) {
  absl::StatusOr<std::vector<TokenId>> ids =
      EncodeText("text", request.text(), request.parse_special_tokens(),
                 /*continues=*/false, model, wanted);
  if (!ids.ok()) return ids.status();
  const TokenId bos = model.config->bos_token_id;
  if (request.add_bos() && (ids->empty() || ids->front() != bos)) ids->insert(ids->begin(), bos);
  absl::Status status = CheckTokenCount("text", static_cast<int64_t>(ids->size()), model);
  if (!status.ok()) return status;
  for (TokenId id : *ids) {
    response.add_token_ids(static_cast<uint32_t>(id));
    response.add_pieces(std::string(model.tokenizer->Piece(id)));
  }
  return absl::OkStatus();
}

absl::Status DoDetokenize(const v1::DetokenizeRequest& request, const ServedModel& model, const StillWanted&,
                          v1::DetokenizeResponse& response) {
  if (absl::Status status = CheckTokenizer("Detokenize", model); !status.ok()) return status;
  absl::Status status = CheckTokenCount("token_ids", request.token_ids_size(), model);
  if (!status.ok()) return status;
  const uint32_t vocab_size = static_cast<uint32_t>(model.tokenizer->vocab_size());
  std::vector<TokenId> ids;
  ids.reserve(static_cast<size_t>(request.token_ids_size()));
  for (int i = 0; i < request.token_ids_size(); ++i) {
    if (request.token_ids(i) >= vocab_size) {
      return InvalidField(
          absl::StrFormat("token_ids[%d]", i),
          absl::StrFormat("is %d; the tokenizer has %d pieces", request.token_ids(i), vocab_size));
    }
    ids.push_back(static_cast<TokenId>(request.token_ids(i)));
  }
  response.set_text(model.tokenizer->Decode(ids));
  return absl::OkStatus();
}

absl::Status DoRenderChat(const v1::RenderChatRequest& request, const ServedModel& model,
                          const StillWanted& wanted, v1::RenderChatResponse& response) {
  const absl::StatusOr<ChatRequest> chat = ToChatRequest(request.chat(), model);
  if (!chat.ok()) return chat.status();
  absl::StatusOr<ChatPrompt> prompt =
      request.after_answer() ? ChatAfterAnswer(*chat, /*parse_special=*/false, model, wanted)
                             : ChatAlone(*chat, /*parse_special=*/false, /*continues=*/false, model, wanted);
  if (!prompt.ok()) return prompt.status();
  for (TokenId id : prompt->ids) response.add_token_ids(static_cast<uint32_t>(id));
  response.set_text(std::move(prompt->text));
  response.set_alone(request.after_answer() && prompt->alone);
  return absl::OkStatus();
}

// Why nobody waits for the answer any more.
absl::Status CheckWanted(const grpc::CallbackServerContext& context) {
  if (context.deadline() <= std::chrono::system_clock::now()) {
    return WithReason(absl::DeadlineExceededError("the deadline passed before the text was tokenised"),
                      "DEADLINE_PASSED");
  }
  if (context.IsCancelled()) return absl::CancelledError("cancelled before the text was tokenised");
  return absl::OkStatus();
}

}  // namespace

template <typename Request, typename Response>
grpc::ServerUnaryReactor* ModelsService::Answer(RpcMethod method, grpc::CallbackServerContext& context,
                                                const grpc::ByteBuffer& request, grpc::ByteBuffer& response,
                                                absl::Status (*answer)(const Request&, const ServedModel&,
                                                                       const StillWanted&, Response&)) {
  return AnswerUnary<Request, Response>(
      environment_, method, context, request, response,
      [&](std::function<void()> job) {
        return environment_.workers.TryPost(request.Length(), std::move(job));
      },
      "too many requests wait",
      [answer, &context](const Request& message, const ServedModel& model, Response& reply) {
        const absl::Status status = CheckModelName(message.model(), model);
        if (!status.ok()) return status;
        return answer(
            message, model, [&context] { return CheckWanted(context); }, reply);
      });
}

grpc::ServerUnaryReactor* ModelsService::GetModel(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Answer(RpcMethod::kGetModel, *context, *request, *response, DoGetModel);
}

grpc::ServerUnaryReactor* ModelsService::Tokenize(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Answer(RpcMethod::kTokenize, *context, *request, *response, DoTokenize);
}

grpc::ServerUnaryReactor* ModelsService::Detokenize(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  return Answer(RpcMethod::kDetokenize, *context, *request, *response, DoDetokenize);
}

grpc::ServerUnaryReactor* ModelsService::RenderChat(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  return Answer(RpcMethod::kRenderChat, *context, *request, *response, DoRenderChat);
}

}  // namespace efla
