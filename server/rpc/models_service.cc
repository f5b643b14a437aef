#include "server/rpc/models_service.h"

#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/request_validation.h"
#include "server/rpc/status.h"
#include "server/rpc/unknown_fields.h"
#include "server/rpc/wire.h"

namespace efla {
namespace {

constexpr std::chrono::milliseconds kRetry{1000};

absl::Status DoGetModel(const v1::GetModelRequest&, const ServedModel& model, v1::Model& message) {
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

  v1::Defaults& defaults = *message.mutable_defaults();
  defaults.set_temperature(model.defaults.temperature);
  defaults.set_top_k(static_cast<uint32_t>(model.defaults.top_k));
  defaults.set_top_p(model.defaults.top_p);
  defaults.set_min_p(model.defaults.min_p);
  defaults.set_max_tokens(static_cast<uint32_t>(model.defaults.max_tokens));
  return absl::OkStatus();
}

absl::Status CheckTokenCount(std::string_view field, int64_t tokens, const ServedModel& model) {
  if (tokens <= model.limits.max_prompt_tokens) return absl::OkStatus();
  return InvalidField(
      field, absl::StrFormat("has %d tokens; the limit is %d", tokens, model.limits.max_prompt_tokens));
}

absl::Status DoTokenize(const v1::TokenizeRequest& request, const ServedModel& model,
                        v1::TokenizeResponse& response) {
  if (absl::Status status = CheckTokenizer("text", model); !status.ok()) return status;
  absl::StatusOr<std::vector<TokenId>> ids =
      model.tokenizer->Encode(request.text(), request.parse_special_tokens());
  if (!ids.ok())
    return InvalidField("text",
                        absl::StrFormat("cannot be tokenised: %s", std::string(ids.status().message())));
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

absl::Status DoDetokenize(const v1::DetokenizeRequest& request, const ServedModel& model,
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

}  // namespace

template <typename Request, typename Response>
grpc::ServerUnaryReactor* ModelsService::Answer(RpcMethod method, grpc::CallbackServerContext& context,
                                                const grpc::ByteBuffer& request, grpc::ByteBuffer& response,
                                                absl::Status (*answer)(const Request&, const ServedModel&,
                                                                       Response&)) {
  grpc::ServerUnaryReactor* const reactor = context.DefaultReactor();
  environment_.metrics.OnCallStarted(method);
  const auto end = [this, reactor, method, &context](const absl::Status& status) {
    environment_.metrics.OnCallEnded(method, static_cast<int>(status.code()));
    reactor->Finish(ToGrpcStatus(status, context));
  };
  const ServedModel* model = environment_.state.model();
  if (model == nullptr) {
    end(WithRetry(WithReason(absl::UnavailableError("the model is being loaded"), "MODEL_LOADING"), kRetry));
    return reactor;
  }
  const auto job = [=, &request, &response] {
    Request message;
    Response reply;
    absl::Status status = ParseRequest(request, message);
    if (status.ok()) status = CheckNoUnknownFields(message);
    if (status.ok()) status = CheckModelName(message.model(), *model);
    if (status.ok()) status = answer(message, *model, reply);
    if (status.ok()) SerializeReply(reply, response);
    end(status);
  };
  if (!environment_.workers.TryPost(request.Length(), job)) {
    end(WithRetry(WithReason(absl::ResourceExhaustedError("too many requests wait"), "QUEUE_FULL"), kRetry));
  }
  return reactor;
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

}  // namespace efla
