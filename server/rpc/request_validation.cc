#include "server/rpc/request_validation.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/session_validation.h"
#include "server/rpc/status.h"
#include "server/rpc/unknown_fields.h"

namespace efla {
namespace {

constexpr size_t kMaxCacheSaltBytes = 128;

uint64_t RandomBits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

absl::StatusOr<std::string> RequestId(const std::string& given) {
  if (absl::Status status = CheckRequestId(given); !status.ok()) return status;
  return given.empty() ? absl::StrFormat("%016x", RandomBits()) : given;
}

// The status of a Validate() begins with the field's name ("top_p is 2; ..."): completes it to a path.
absl::Status InMessage(std::string_view message, const absl::Status& status) {
  if (status.ok()) return status;
  const std::string text(status.message());
  const size_t name_end = text.find(' ');
  return InvalidField(absl::StrFormat("%s.%s", message, text.substr(0, name_end)),
                      name_end == std::string::npos ? "is invalid" : text.substr(name_end + 1));
}

absl::StatusOr<TokenId> ToTokenId(uint32_t id, std::string_view field, int index, const ServedModel& model) {
  if (id >= static_cast<uint64_t>(model.config->vocab_size)) {
    return InvalidField(absl::StrFormat("%s[%d]", field, index),
                        absl::StrFormat("is %d; the vocabulary has %d tokens", id, model.config->vocab_size));
  }
  return static_cast<TokenId>(id);
}

// What is in front of a prompt. Sessions may be continued with nothing; whether there is anything to do then
// is known once the session is.
enum class Before { kNothing, kEmptySession, kSessionText };

absl::StatusOr<std::vector<TokenId>> EncodeText(const std::string& text, bool parse_special,
                                                const ServedModel& model, Before before) {
  if (absl::Status status = CheckTokenizer("text", model); !status.ok()) return status;
  absl::StatusOr<std::vector<TokenId>> ids = before == Before::kSessionText
                                                 ? model.tokenizer->EncodeContinuation(text, parse_special)
                                                 : model.tokenizer->Encode(text, parse_special);
  if (ids.ok()) return ids;
  return InvalidField("text",
                      absl::StrFormat("cannot be tokenised: %s", std::string(ids.status().message())));
}

// All request types have the same prompt fields.
template <typename Request>
absl::StatusOr<std::vector<TokenId>> Prompt(const Request& request, const ServedModel& model,
                                            Before before = Before::kNothing) {
  if (request.has_text() && request.has_token_ids()) {
    return InvalidField("text", before == Before::kNothing
                                    ? "and token_ids are both given; exactly one is needed"
                                    : "and token_ids are both given; at most one is needed");
  }
  if (before == Before::kNothing && !request.has_text() && !request.has_token_ids()) {
    return InvalidField("text", "and token_ids are both absent; exactly one is needed");
  }
  if (request.parse_special_tokens() && !request.has_text()) {
    return InvalidField("parse_special_tokens", request.has_token_ids()
                                                    ? "is set; it applies to text, and token_ids are given"
                                                    : "is set; it applies to text, and none is given");
  }
  const TokenId bos = model.config->bos_token_id;
  std::vector<TokenId> prompt;
  if (request.has_text()) {
    absl::StatusOr<std::vector<TokenId>> ids =
        EncodeText(request.text(), request.parse_special_tokens(), model, before);
    if (!ids.ok()) return ids.status();
    prompt = *std::move(ids);
  } else {
    prompt.reserve(static_cast<size_t>(request.token_ids().ids_size()) + 1);
    for (int i = 0; i < request.token_ids().ids_size(); ++i) {
      absl::StatusOr<TokenId> id = ToTokenId(request.token_ids().ids(i), "token_ids.ids", i, model);
      if (!id.ok()) return id.status();
      prompt.push_back(*id);
    }
  }
  const bool add_bos =
      request.has_add_bos() ? request.add_bos() : request.has_text() && before != Before::kSessionText;
  if (add_bos && (prompt.empty() || prompt.front() != bos)) prompt.insert(prompt.begin(), bos);
  const char* field = request.has_text() ? "text" : "token_ids";
  if (prompt.empty() && before == Before::kNothing) {
    return InvalidField(field, "is empty and no BOS is added; a prompt needs a token");
  }
  if (const int64_t size = static_cast<int64_t>(prompt.size()); size > model.limits.max_prompt_tokens) {
    return InvalidField(field, absl::StrFormat("makes a prompt of %d tokens; the limit is %d", size,
                                               model.limits.max_prompt_tokens));
  }
  return prompt;
}

// use_prefix_cache and cache_salt.
template <typename Request>
absl::Status SetPrefixCache(const Request& request, GenerationRequest& out) {
  if (request.cache_salt().size() > kMaxCacheSaltBytes) {
    return InvalidField("cache_salt", absl::StrFormat("has %d bytes; the limit is %d",
                                                      request.cache_salt().size(), kMaxCacheSaltBytes));
  }
  out.use_prefix_cache = !request.has_use_prefix_cache() || request.use_prefix_cache();
  out.prefix_cache_salt = request.cache_salt();
  return absl::OkStatus();
}

// The part of a GenerateRequest that is about its session.
absl::StatusOr<TurnRequest> ToTurn(const v1::GenerateRequest& request, const ServedModel& model) {
  const v1::SessionTurn& session = request.session();
  TurnRequest turn;
  if (absl::Status status = CheckName("session.session_id", session.session_id()); !status.ok())
    return status;
  turn.change.session_id = session.session_id();
  if (session.has_expected_revision()) turn.change.expected_revision = session.expected_revision();
  if (!session.create_if_missing()) {  // what does not exist yet has revision 0
    absl::Status status = CheckRevision("session.expected_revision", turn.change.expected_revision);
    if (!status.ok()) return status;
  }
  turn.change.request_id = request.request_id();
  absl::StatusOr<Durability> durability = ToDurability("session.durability", session.durability(), model);
  if (!durability.ok()) return durability.status();
  turn.change.durability = *durability;
  absl::StatusOr<OnCancel> on_cancel = ToOnCancel("session.on_cancel", session.on_cancel());
  if (!on_cancel.ok()) return on_cancel.status();
  turn.on_cancel = *on_cancel;
  turn.create_if_missing = session.create_if_missing();
  absl::StatusOr<std::vector<TokenId>> continuation = Prompt(request, model, Before::kSessionText);
  if (!continuation.ok()) return continuation.status();
  turn.continuation = *std::move(continuation);
  return turn;
}

absl::StatusOr<SamplingParams> Sampling(const v1::SamplingParams& given, const RequestDefaults& defaults) {
  SamplingParams params;
  params.temperature = given.has_temperature() ? given.temperature() : defaults.temperature;
  params.top_p = given.has_top_p() ? given.top_p() : defaults.top_p;
  params.min_p = given.has_min_p() ? given.min_p() : defaults.min_p;
  params.top_k = defaults.top_k;
  if (given.has_top_k()) {
    // More than a vocabulary can hold cuts nothing off, like the vocabulary's size.
    params.top_k =
        static_cast<int32_t>(std::min<uint32_t>(given.top_k(), std::numeric_limits<int32_t>::max()));
  }
  params.seed = given.has_seed() ? given.seed() : RandomBits();
  if (absl::Status status = InMessage("sampling", params.Validate()); !status.ok()) return status;
  return params;
}

absl::StatusOr<StopParams> Stopping(const v1::StopParams& given, const ServedModel& model) {
  StopParams params;
  params.max_tokens = given.has_max_tokens() ? given.max_tokens() : model.defaults.max_tokens;
  if (params.max_tokens > model.limits.max_new_tokens) {
    return InvalidField("stopping.max_tokens", absl::StrFormat("is %d; the limit is %d", params.max_tokens,
                                                               model.limits.max_new_tokens));
  }
  params.stop.assign(given.stop().begin(), given.stop().end());
  for (int i = 0; i < given.stop_token_ids_size(); ++i) {
    absl::StatusOr<TokenId> id = ToTokenId(given.stop_token_ids(i), "stopping.stop_token_ids", i, model);
    if (!id.ok()) return id.status();
    params.stop_token_ids.push_back(*id);
  }
  params.ignore_eos = given.ignore_eos();
  if (absl::Status status = InMessage("stopping", params.Validate(model.config->vocab_size)); !status.ok()) {
    return status;
  }
  if (!params.stop.empty()) {
    if (absl::Status status = CheckTokenizer("stopping.stop", model); !status.ok()) return status;
  }
  return params;
}

absl::Status CheckTopLogprobs(std::string_view field, uint32_t top_logprobs) {
  if (top_logprobs <= kMaxTopLogprobs) return absl::OkStatus();
  return InvalidField(field, absl::StrFormat("is %d; the limit is %d", top_logprobs, kMaxTopLogprobs));
}

// Upper bound of what one token takes in a reply: id and text, and with log-probabilities its entry and the
// alternatives, each with tags, lengths, a five-byte id, a float and the token's bytes.
int64_t ReplyBytesPerToken(const ServedModel& model, bool logprobs, int top_logprobs) {
  constexpr int64_t kIdBytes = 5, kEntryBytes = 20;
  const int64_t piece_bytes = model.max_piece_bytes;
  return kIdBytes + piece_bytes + (logprobs ? (1 + top_logprobs) * (kEntryBytes + piece_bytes) : 0);
}

absl::Status CheckReplySize(std::string_view field, int64_t tokens, const ServedModel& model, bool logprobs,
                            int top_logprobs) {
  const int64_t limit = model.limits.max_reply_bytes / ReplyBytesPerToken(model, logprobs, top_logprobs);
  if (tokens <= limit) return absl::OkStatus();
  return InvalidField(field,
                      absl::StrFormat("asks for %d tokens in one reply; with top_logprobs %d the limit is %d "
                                      "(%d MiB)",
                                      tokens, top_logprobs, limit, model.limits.max_reply_bytes >> 20));
}

}  // namespace

absl::Status CheckModelName(std::string_view name, const ServedModel& model) {
  if (name.empty() || name == model.name) return absl::OkStatus();
  return WithReason(
      absl::NotFoundError(absl::StrFormat("model is \"%s\"; this server has \"%s\"", name, model.name)),
      "MODEL_NOT_FOUND");
}

absl::Status CheckTokenizer(std::string_view needed_for, const ServedModel& model) {
  if (model.tokenizer != nullptr) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrFormat(
                        "%s needs a tokenizer and the checkpoint has none; give token ids", needed_for)),
                    "NO_TOKENIZER");
}

absl::StatusOr<CallRequest> ToGenerationRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                                ReplyKind reply) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  if (absl::Status status = CheckModelName(request.model(), model); !status.ok()) return status;
  CallRequest call;
  GenerationRequest& out = call.generation;

  absl::StatusOr<std::string> request_id = RequestId(request.request_id());
  if (!request_id.ok()) return request_id.status();
  out.request_id = *std::move(request_id);

  absl::StatusOr<SamplingParams> sampling = Sampling(request.sampling(), model.defaults);
  if (!sampling.ok()) return sampling.status();
  out.sampling = *sampling;

  absl::StatusOr<StopParams> stopping = Stopping(request.stopping(), model);
  if (!stopping.ok()) return stopping.status();
  out.stopping = *std::move(stopping);
  out.include_stop = request.stopping().include_stop();

  const v1::OutputParams& output = request.output();
  if (absl::Status status = CheckTopLogprobs("output.top_logprobs", output.top_logprobs()); !status.ok()) {
    return status;
  }
  if (output.top_logprobs() > 0 && !output.logprobs()) {
    return InvalidField(
        "output.top_logprobs",
        absl::StrFormat("is %d and output.logprobs is not set; it needs it", output.top_logprobs()));
  }
  out.logprobs = output.logprobs();
  out.top_logprobs = static_cast<int>(output.top_logprobs());
  if (reply == ReplyKind::kWhole) {
    if (output.progress()) {
      return InvalidField("output.progress", "is set; a single reply has no progress, use Generate");
    }
    absl::Status status =
        CheckReplySize("stopping.max_tokens", out.stopping.max_tokens, model, out.logprobs, out.top_logprobs);
    if (!status.ok()) return status;
  }
  out.progress = output.progress();
  out.skip_special_tokens = !output.has_skip_special_tokens() || output.skip_special_tokens();
  if (request.time_budget_ms() > 0) out.time_budget = std::chrono::milliseconds(request.time_budget_ms());

  if (absl::Status status = SetPrefixCache(request, out); !status.ok()) return status;
  if (request.has_session()) {
    absl::StatusOr<TurnRequest> turn = ToTurn(request, model);
    if (!turn.ok()) return turn.status();
    turn->generates = out.stopping.max_tokens > 0;
    call.turn = *std::move(turn);
  }
  absl::StatusOr<std::vector<TokenId>> prompt =
      Prompt(request, model, call.turn ? Before::kEmptySession : Before::kNothing);
  if (!prompt.ok()) return prompt.status();
  out.prompt = *std::move(prompt);
  return call;
}

absl::StatusOr<CallRequest> ToScoringRequest(const v1::ScoreRequest& request, const ServedModel& model) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  if (absl::Status status = CheckModelName(request.model(), model); !status.ok()) return status;
  if (absl::Status status = CheckTopLogprobs("top_logprobs", request.top_logprobs()); !status.ok())
    return status;
  CallRequest call;
  GenerationRequest& out = call.generation;

  absl::StatusOr<std::string> request_id = RequestId(request.request_id());
  if (!request_id.ok()) return request_id.status();
  out.request_id = *std::move(request_id);

  out.stopping.max_tokens = 0;
  out.prompt_logprobs = true;
  out.top_logprobs = static_cast<int>(request.top_logprobs());
  out.use_prefix_cache = false;  // every position is scored

  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model);
  if (!prompt.ok()) return prompt.status();
  out.prompt = *std::move(prompt);
  absl::Status status =
      CheckReplySize(request.has_text() ? "text" : "token_ids", static_cast<int64_t>(out.prompt.size()),
                     model, true, out.top_logprobs);
  if (!status.ok()) return status;
  return call;
}

absl::StatusOr<CallRequest> ToAppendRequest(const v1::AppendRequest& request, const ServedModel& model) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  CallRequest call;
  absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  if (!request.has_text() && !request.has_token_ids()) {
    return InvalidField("text", "and token_ids are both absent; exactly one is needed");
  }
  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model, Before::kEmptySession);
  if (!prompt.ok()) return prompt.status();
  absl::StatusOr<std::vector<TokenId>> continuation = Prompt(request, model, Before::kSessionText);
  if (!continuation.ok()) return continuation.status();
  if (prompt->empty() && continuation->empty()) {
    return InvalidField(request.has_text() ? "text" : "token_ids", "is empty; there is nothing to append");
  }
  if (absl::Status status = SetPrefixCache(request, call.generation); !status.ok()) return status;
  call.generation.request_id = request.request_id();
  call.generation.prompt = *std::move(prompt);
  call.generation.stopping.max_tokens = 0;
  TurnRequest& turn = call.turn.emplace();
  turn.change = *std::move(change);
  turn.generates = false;
  turn.continuation = *std::move(continuation);
  return call;
}

absl::StatusOr<CallRequest> ToCreateRequest(const v1::CreateSessionRequest& request,
                                            const ServedModel& model) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  if (absl::Status status = CheckModelName(request.model(), model); !status.ok()) return status;
  if (absl::Status status = CheckOptionalName("session_id", request.session_id()); !status.ok())
    return status;
  if (absl::Status status = CheckRequestId(request.request_id()); !status.ok()) return status;
  absl::StatusOr<Durability> durability = DurabilityOf(request, model);
  if (!durability.ok()) return durability.status();
  absl::StatusOr<std::chrono::milliseconds> ttl = ToTtl("ttl_ms", request.ttl_ms(), model);
  if (!ttl.ok()) return ttl.status();
  CallRequest call;
  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model, Before::kEmptySession);
  if (!prompt.ok()) return prompt.status();
  if (absl::Status status = SetPrefixCache(request, call.generation); !status.ok()) return status;
  call.generation.request_id = request.request_id();
  call.generation.prompt = *std::move(prompt);
  call.generation.stopping.max_tokens = 0;
  TurnRequest& turn = call.turn.emplace();
  turn.generates = false;
  turn.new_session_ttl = *ttl;
  turn.change.session_id = request.session_id();
  turn.change.request_id = request.request_id();
  turn.change.durability = *durability;
  return call;
}

}  // namespace efla
