#include "server/rpc/request_validation.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/chat_prompt.h"
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

// Ids of a repeated field.
template <typename Ids>
absl::StatusOr<std::vector<TokenId>> ToTokenIds(const Ids& given, std::string_view field,
                                                const ServedModel& model) {
  std::vector<TokenId> ids;
  ids.reserve(static_cast<size_t>(given.size()));
  for (int i = 0; i < given.size(); ++i) {
    absl::StatusOr<TokenId> id = ToTokenId(given[i], field, i, model);
    if (!id.ok()) return id.status();
    ids.push_back(*id);
  }
  return ids;
}

// What is in front of a prompt. Sessions may be continued with nothing; whether there is anything to do then
// is known once the session is.
enum class Before { kNothing, kEmptySession, kSessionText };

EncodeLimits LimitsOf(const ServedModel& model, const StillWanted& wanted) {
  return {
      .max_tokens = model.limits.max_prompt_tokens, .max_stretch_bytes = kMaxStretchBytes, .check = wanted};
}

// The ids of a text, or the request's error where it has none.
absl::StatusOr<std::vector<TokenId>> Encoded(std::string_view field, std::string_view text,
                                             absl::StatusOr<std::vector<TokenId>> ids, int64_t limit) {
  if (ids.ok()) return ids;
  const std::string why(ids.status().message());
  switch (ids.status().code()) {
    case absl::StatusCode::kOutOfRange:
      return InvalidField(field, absl::StrFormat("of %d bytes %s; the limit is %d", text.size(), why, limit));
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
      return ids.status();
    default:
      return InvalidField(field, absl::StrFormat("of %d bytes cannot be tokenised: %s", text.size(), why));
  }
}

// Whether the prompt of such a request may be a chat instead.
template <typename Request>
constexpr bool kMayBeChat = std::is_same_v<Request, v1::GenerateRequest>;

// All request types have the same prompt fields, but for the chat, which is given where there is one.
template <typename Request>
absl::StatusOr<std::vector<TokenId>> Prompt(const Request& request, const ServedModel& model,
                                            const StillWanted& wanted, Before before = Before::kNothing) {
  if (request.has_text() && request.has_token_ids()) {
    return InvalidField("text", before == Before::kNothing
                                    ? "and token_ids are both given; exactly one is needed"
                                    : "and token_ids are both given; at most one is needed");
  }
  if (before == Before::kNothing && !request.has_text() && !request.has_token_ids()) {
    return InvalidField("text", kMayBeChat<Request>
                                    ? "is absent, and so are token_ids and chat; exactly one is needed"
                                    : "and token_ids are both absent; exactly one is needed");
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
        EncodeText("text", request.text(), request.parse_special_tokens(), before == Before::kSessionText,
                   model, wanted);
    if (!ids.ok()) return ids.status();
    prompt = *std::move(ids);
  } else {
    absl::StatusOr<std::vector<TokenId>> ids = ToTokenIds(request.token_ids().ids(), "token_ids.ids", model);
    if (!ids.ok()) return ids.status();
    prompt = *std::move(ids);
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

// The prompt of a text or ids and, with a turn, what it is where the session holds something.
absl::Status SetPrompt(const v1::GenerateRequest& request, const ServedModel& model,
                       const StillWanted& wanted, CallRequest& call) {
  absl::StatusOr<std::vector<TokenId>> prompt =
      Prompt(request, model, wanted, call.turn ? Before::kEmptySession : Before::kNothing);
  if (!prompt.ok()) return prompt.status();
  call.generation.prompt = *std::move(prompt);
  if (!call.turn) return absl::OkStatus();
  absl::StatusOr<std::vector<TokenId>> continuation = Prompt(request, model, wanted, Before::kSessionText);
  if (!continuation.ok()) return continuation.status();
  call.turn->continuation = *std::move(continuation);
  return absl::OkStatus();
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

// The prompt of a chat and, with a turn, what it is where the session holds something.
absl::Status SetChat(const v1::GenerateRequest& request, const ServedModel& model, const StillWanted& wanted,
                     CallRequest& call) {
  if (request.has_text() || request.has_token_ids()) {
    return InvalidField("chat", absl::StrFormat("and %s are both given; one of them is needed",
                                                request.has_text() ? "text" : "token_ids"));
  }
  const absl::StatusOr<ChatRequest> chat = ToChatRequest(request.chat(), model);
  if (!chat.ok()) return chat.status();
  const bool parse_special = request.parse_special_tokens();
  // The template says whether there is a BOS, and add_bos puts one where there is none.
  const auto with_bos = [&](std::vector<TokenId> ids) {
    const TokenId bos = model.config->bos_token_id;
    if (request.add_bos() && ids.front() != bos) ids.insert(ids.begin(), bos);
    return ids;
  };
  absl::StatusOr<ChatPrompt> start = ChatAlone(*chat, parse_special, /*continues=*/false, model, wanted);
  if (start.ok()) call.generation.prompt = with_bos(std::move(start->ids));
  if (!call.turn) return start.status();
  TurnRequest& turn = *call.turn;
  absl::StatusOr<ChatPrompt> next = request.add_bos()
                                        ? ChatAlone(*chat, parse_special, /*continues=*/true, model, wanted)
                                        : ChatAfterAnswer(*chat, parse_special, model, wanted);
  if (!next.ok()) return start.ok() ? next.status() : start.status();
  turn.no_start = start.status();
  turn.continuation = with_bos(std::move(next->ids));
  turn.seam = next->seam;
  return absl::OkStatus();
}

// The part of a GenerateRequest that is about its session, but for the prompts.
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
  return turn;
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

// A call's parts wait in the queue at once.
absl::Status CheckParts(std::string_view field, int parts, int most, const ServedModel& model) {
  if (parts > most) {
    return InvalidField(field, absl::StrFormat("asks for %d; the limit is %d", parts, most));
  }
  if (parts > 1 && model.limits.max_queue > 0 && parts > model.limits.max_queue) {
    return InvalidField(field, absl::StrFormat("asks for %d; the queue of this server holds %d", parts,
                                               model.limits.max_queue));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Branch>> Samples(const v1::GenerateRequest& request, uint64_t seed,
                                            const ServedModel& model) {
  std::vector<Branch> branches;
  if (!request.has_samples()) return branches;
  const uint32_t samples = request.samples();
  if (samples == 0) return InvalidField("samples", absl::StrFormat("is 0; it must be 1 to %d", kMaxSamples));
  if (samples == 1) return branches;
  absl::Status status = CheckParts(
      "samples", static_cast<int>(std::min<uint32_t>(samples, std::numeric_limits<int32_t>::max())),
      kMaxSamples, model);
  if (!status.ok()) return status;
  if (request.has_session()) {
    return InvalidField("samples",
                        absl::StrFormat("is %d and a session is given; a session has one continuation, "
                                        "fork it",
                                        samples));
  }
  for (uint32_t i = 0; i < samples; ++i) branches.push_back({.seed = seed + i, .continuation = {}});
  return branches;
}

absl::Status SetConstraint(const v1::GenerateRequest& request, const ServedModel& model, CallRequest& call) {
  if (!request.has_constraint()) return absl::OkStatus();
  if (absl::Status status = CheckTokenizer("constraint", model); !status.ok()) return status;
  if (call.generation.stopping.max_tokens == 0) {
    return InvalidField("constraint", "is given and stopping.max_tokens is 0; there is no output then");
  }
  const v1::Constraint& given = request.constraint();
  auto& [field, spec] = call.constraint.emplace();
  switch (given.kind_case()) {
    case v1::Constraint::kChoices:
      field = "constraint.choices";
      spec.kind = ConstraintSpec::Kind::kChoices;
      spec.choices.assign(given.choices().choices().begin(), given.choices().choices().end());
      break;
    case v1::Constraint::kRegex:
      field = "constraint.regex";
      spec.kind = ConstraintSpec::Kind::kRegex;
      spec.text = given.regex();
      break;
    case v1::Constraint::kJsonObject:
      field = "constraint.json_object";
      spec.kind = ConstraintSpec::Kind::kJsonObject;
      break;
    case v1::Constraint::kJsonSchema:
      field = "constraint.json_schema";
      spec.kind = ConstraintSpec::Kind::kJsonSchema;
      spec.text = given.json_schema();
      break;
    case v1::Constraint::kGrammar:
      field = "constraint.grammar";
      spec.kind = ConstraintSpec::Kind::kGrammar;
      spec.text = given.grammar();
      break;
    case v1::Constraint::KIND_NOT_SET:
      return InvalidField("constraint", "has no kind; exactly one is needed");
  }
  return absl::OkStatus();
}

// Of the prompt, how much is in the output at most: which of a session's two prompts it will be is known once
// the session is.
int64_t MostEchoed(const CallRequest& call) {
  if (!call.turn) return call.generation.echo_tokens;
  if (!call.turn->echoes) return 0;
  return std::max(std::ssize(call.generation.prompt), std::ssize(call.turn->continuation));
}

// The output begins with the prompt.
absl::Status SetEcho(const v1::GenerateRequest& request, CallRequest& call) {
  if (!request.output().echo()) return absl::OkStatus();
  const auto check = [](size_t tokens) {
    if (static_cast<int64_t>(tokens) <= kMaxEchoTokens) return absl::OkStatus();
    return InvalidField(
        "output.echo", absl::StrFormat("is set and the prompt has %d tokens; the limit with it is %d", tokens,
                                       kMaxEchoTokens));
  };
  absl::Status status = check(call.generation.prompt.size());
  if (status.ok() && call.turn) status = check(call.turn->continuation.size());
  if (!status.ok()) return status;
  if (!call.turn) {
    call.generation.echo_tokens = static_cast<int64_t>(call.generation.prompt.size());
    return absl::OkStatus();
  }
  if (!call.turn->generates) {
    return InvalidField("output.echo", "is set; a session's turn with max_tokens 0 has no output");
  }
  call.turn->echoes = true;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> Continuation(std::string_view field,
                                                  const v1::ScoreRequest::Continuation& given,
                                                  bool parse_special, const ServedModel& model,
                                                  const StillWanted& wanted) {
  absl::StatusOr<std::vector<TokenId>> ids;
  switch (given.kind_case()) {
    case v1::ScoreRequest::Continuation::kText:
      ids = EncodeText(absl::StrFormat("%s.text", field), given.text(), parse_special, /*continues=*/true,
                       model, wanted);
      break;
    case v1::ScoreRequest::Continuation::kTokenIds:
      ids = ToTokenIds(given.token_ids().ids(), absl::StrFormat("%s.token_ids.ids", field), model);
      break;
    case v1::ScoreRequest::Continuation::KIND_NOT_SET:
      return InvalidField(field, "has neither text nor token_ids; exactly one is needed");
  }
  if (ids.ok() && ids->empty()) return InvalidField(field, "is empty; it needs a token to be scored");
  return ids;
}

// Of a ScoreRequest whose prompt is set.
absl::Status SetContinuations(const v1::ScoreRequest& request, const ServedModel& model,
                              const StillWanted& wanted, CallRequest& call) {
  absl::Status status = CheckParts("continuations", request.continuations_size(), kMaxContinuations, model);
  if (!status.ok()) return status;
  const int64_t context = static_cast<int64_t>(call.generation.prompt.size());
  int64_t scored = 0;
  for (int i = 0; i < request.continuations_size(); ++i) {
    const std::string field = absl::StrFormat("continuations[%d]", i);
    absl::StatusOr<std::vector<TokenId>> ids =
        Continuation(field, request.continuations(i), request.parse_special_tokens(), model, wanted);
    if (!ids.ok()) return ids.status();
    if (const int64_t size = context + std::ssize(*ids); size > model.limits.max_prompt_tokens) {
      return InvalidField(field, absl::StrFormat("makes %d tokens with the %d before it; the limit is %d",
                                                 size, context, model.limits.max_prompt_tokens));
    }
    scored += std::ssize(*ids);
    call.branches.push_back({.seed = 0, .continuation = *std::move(ids)});
  }
  return CheckReplySize("continuations", scored, model, true, call.generation.top_logprobs);
}

// A number that Validate() has the bounds of; what an int32_t cannot hold is beyond them anyway.
absl::StatusOr<int32_t> ToBounded(uint32_t given, std::string_view field, int limit) {
  if (given <= static_cast<uint32_t>(limit)) return static_cast<int32_t>(given);
  return InvalidField(field, absl::StrFormat("is %d; the limit is %d", given, limit));
}

absl::StatusOr<std::vector<std::pair<TokenId, float>>> ToLogitBias(const v1::SamplingParams& given,
                                                                   const ServedModel& model) {
  std::vector<std::pair<TokenId, float>> bias;
  for (const auto& [id, value] : given.logit_bias()) {
    if (id >= static_cast<uint64_t>(model.config->vocab_size)) {
      return InvalidField("sampling.logit_bias", absl::StrFormat("has id %d; the vocabulary has %d tokens",
                                                                 id, model.config->vocab_size));
    }
    bias.emplace_back(static_cast<TokenId>(id), value);
  }
  std::sort(bias.begin(), bias.end());
  return bias;
}

absl::StatusOr<SamplingParams> Sampling(const v1::SamplingParams& given, const ServedModel& model) {
  const RequestDefaults& defaults = model.defaults;
  SamplingParams params;
  params.typical_p = given.has_typical_p() ? given.typical_p() : defaults.typical_p;
  params.repetition_penalty =
      given.has_repetition_penalty() ? given.repetition_penalty() : defaults.repetition_penalty;
  params.presence_penalty = given.presence_penalty();
  params.frequency_penalty = given.frequency_penalty();
  if (given.has_penalty_window()) {
    absl::StatusOr<int32_t> window =
        ToBounded(given.penalty_window(), "sampling.penalty_window", kMaxPenaltyWindow);
    if (!window.ok()) return window.status();
    params.penalty_window = *window;
  }
  params.no_repeat_ngram_size = defaults.no_repeat_ngram_size;
  if (given.has_no_repeat_ngram_size()) {
    absl::StatusOr<int32_t> ngram =
        ToBounded(given.no_repeat_ngram_size(), "sampling.no_repeat_ngram_size", kMaxNoRepeatNgram);
    if (!ngram.ok()) return ngram.status();
    params.no_repeat_ngram_size = *ngram;
  }
  absl::StatusOr<std::vector<std::pair<TokenId, float>>> bias = ToLogitBias(given, model);
  if (!bias.ok()) return bias.status();
  params.logit_bias = *std::move(bias);
  absl::StatusOr<std::vector<TokenId>> allowed =
      ToTokenIds(given.allowed_token_ids(), "sampling.allowed_token_ids", model);
  if (!allowed.ok()) return allowed.status();
  params.allowed_token_ids = *std::move(allowed);
  absl::StatusOr<std::vector<TokenId>> banned =
      ToTokenIds(given.banned_token_ids(), "sampling.banned_token_ids", model);
  if (!banned.ok()) return banned.status();
  params.banned_token_ids = *std::move(banned);
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
  if (absl::Status status = InMessage("sampling", params.Validate(model.config->vocab_size)); !status.ok()) {
    return status;
  }
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
  absl::StatusOr<std::vector<TokenId>> stop_ids =
      ToTokenIds(given.stop_token_ids(), "stopping.stop_token_ids", model);
  if (!stop_ids.ok()) return stop_ids.status();
  params.stop_token_ids = *std::move(stop_ids);
  params.ignore_eos = given.ignore_eos();
  params.min_tokens = given.min_tokens();
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

}  // namespace

absl::Status TakeConstraint(const char* field, CompiledOrError compiled, GenerationRequest& generation) {
  if (absl::IsInvalidArgument(compiled.status())) {
    return InvalidField(field, std::string(compiled.status().message()));
  }
  if (!compiled.ok()) return compiled.status();
  generation.constraint = *std::move(compiled);
  return absl::OkStatus();
}

absl::Status CheckModelName(std::string_view name, const ServedModel& model) {
  if (name.empty() || name == model.name) return absl::OkStatus();
  return WithReason(
      absl::NotFoundError(absl::StrFormat("this server has the model \"%s\", not \"%s\"", model.name, name)),
      "MODEL_NOT_FOUND");
}

absl::StatusOr<std::vector<TokenId>> EncodeText(std::string_view field, std::string_view text,
                                                bool parse_special, bool continues, const ServedModel& model,
                                                const StillWanted& wanted) {
  if (absl::Status status = CheckTokenizer(field, model); !status.ok()) return status;
  const EncodeLimits limits = LimitsOf(model, wanted);
  return Encoded(field, text, model.tokenizer->EncodeWithin(text, parse_special, continues, limits),
                 limits.max_tokens);
}

absl::StatusOr<std::vector<TokenId>> EncodeChat(const RenderedChat& chat, bool parse_special, bool continues,
                                                const ServedModel& model, const StillWanted& wanted) {
  const std::span<const TextRange> plain = parse_special ? std::span<const TextRange>() : chat.content;
  const EncodeLimits limits = LimitsOf(model, wanted);
  return Encoded("chat", chat.text, model.tokenizer->EncodeMarked(chat.text, plain, continues, limits),
                 limits.max_tokens);
}

absl::Status CheckTokenizer(std::string_view needed_for, const ServedModel& model) {
  if (model.tokenizer != nullptr) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrFormat(
                        "%s needs a tokenizer and the checkpoint has none; give token ids", needed_for)),
                    "NO_TOKENIZER");
}

absl::StatusOr<CallRequest> ToGenerationRequest(const v1::GenerateRequest& request, const ServedModel& model,
                                                ReplyKind reply, const StillWanted& wanted) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  if (absl::Status status = CheckModelName(request.model(), model); !status.ok()) return status;
  CallRequest call;
  GenerationRequest& out = call.generation;

  absl::StatusOr<std::string> request_id = RequestId(request.request_id());
  if (!request_id.ok()) return request_id.status();
  out.request_id = *std::move(request_id);

  absl::StatusOr<SamplingParams> sampling = Sampling(request.sampling(), model);
  if (!sampling.ok()) return sampling.status();
  out.sampling = *std::move(sampling);

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
  }
  out.progress = output.progress();
  out.skip_special_tokens = !output.has_skip_special_tokens() || output.skip_special_tokens();
  if (request.priority() < kLowestPriority || request.priority() > kHighestPriority) {
    return InvalidField("priority", absl::StrFormat("is %d; it must be %d to %d", request.priority(),
                                                    kLowestPriority, kHighestPriority));
  }
  out.priority = request.priority();
  if (request.time_budget_ms() > 0) out.time_budget = std::chrono::milliseconds(request.time_budget_ms());

  if (absl::Status status = SetPrefixCache(request, out); !status.ok()) return status;
  if (request.has_session()) {
    absl::StatusOr<TurnRequest> turn = ToTurn(request, model);
    if (!turn.ok()) return turn.status();
    turn->generates = out.stopping.max_tokens > 0;
    call.turn = *std::move(turn);
  }
  absl::Status prompts =
      request.has_chat() ? SetChat(request, model, wanted, call) : SetPrompt(request, model, wanted, call);
  if (!prompts.ok()) return prompts;
  absl::StatusOr<std::vector<Branch>> samples = Samples(request, out.sampling.seed, model);
  if (!samples.ok()) return samples.status();
  call.branches = *std::move(samples);
  if (absl::Status status = SetEcho(request, call); !status.ok()) return status;
  if (absl::Status status = SetConstraint(request, model, call); !status.ok()) return status;
  if (reply == ReplyKind::kWhole) {
    const int64_t tokens = out.stopping.max_tokens + MostEchoed(call);
    absl::Status status =
        CheckReplySize("stopping.max_tokens", tokens * std::max<int64_t>(std::ssize(call.branches), 1), model,
                       out.logprobs, out.top_logprobs);
    if (!status.ok()) return status;
  }
  return call;
}

absl::StatusOr<CallRequest> ToScoringRequest(const v1::ScoreRequest& request, const ServedModel& model,
                                             const StillWanted& wanted) {
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
  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model, wanted);
  if (!prompt.ok()) return prompt.status();
  out.prompt = *std::move(prompt);
  if (request.continuations_size() > 0) {
    out.top_logprobs = std::max(out.top_logprobs, 1);  // which token is the most probable one
    if (absl::Status status = SetPrefixCache(request, out); !status.ok()) return status;
    if (absl::Status status = SetContinuations(request, model, wanted, call); !status.ok()) return status;
    return call;
  }
  if (request.has_use_prefix_cache() || !request.cache_salt().empty()) {
    return InvalidField(request.has_use_prefix_cache() ? "use_prefix_cache" : "cache_salt",
                        "is set and there are no continuations; where all is scored, all is computed");
  }
  out.use_prefix_cache = false;
  absl::Status status =
      CheckReplySize(request.has_text() ? "text" : "token_ids", static_cast<int64_t>(out.prompt.size()),
                     model, true, out.top_logprobs);
  if (!status.ok()) return status;
  return call;
}

absl::StatusOr<CallRequest> ToAppendRequest(const v1::AppendRequest& request, const ServedModel& model,
                                            const StillWanted& wanted) {
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  CallRequest call;
  absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  if (!request.has_text() && !request.has_token_ids()) {
    return InvalidField("text", "and token_ids are both absent; exactly one is needed");
  }
  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model, wanted, Before::kEmptySession);
  if (!prompt.ok()) return prompt.status();
  absl::StatusOr<std::vector<TokenId>> continuation = Prompt(request, model, wanted, Before::kSessionText);
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

absl::StatusOr<CallRequest> ToCreateRequest(const v1::CreateSessionRequest& request, const ServedModel& model,
                                            const StillWanted& wanted) {
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
  absl::StatusOr<std::vector<TokenId>> prompt = Prompt(request, model, wanted, Before::kEmptySession);
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
