#include "tests/e2e/random_message.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <variant>

#include "absl/strings/str_format.h"

namespace efla::e2e {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

enum class Kind {
  kTokenId,
  kSession,
  kMark,
  kRequestId,
  kModel,
  kText,
  kPriority,
  kDurability,
  kTier,
  kStop
};
using Numbers = std::vector<double>;
using Texts = std::vector<std::string>;

// How a field is filled in a valid request. Fields without a rule: one time in three, with any of their
// type's values for enums and flags, and what their own rules say for messages.
struct Rule {
  double chance;
  std::variant<Kind, Numbers, Texts> values;
  size_t most = 4;  // of a repeated field
};

// By message and field.
const std::map<std::string, Rule>& Rules() {
  static const std::map<std::string, Rule> kRules = {
      {"GenerateRequest.request_id", {0.2, Kind::kRequestId}},
      {"GenerateRequest.model", {0.3, Kind::kModel}},
      {"GenerateRequest.time_budget_ms", {0.1, Numbers{0, 1, 20, 300, 4294967295.0}}},
      {"GenerateRequest.cache_salt", {0.2, Texts{"", "a", "b", std::string(128, 's')}}},
      {"GenerateRequest.samples", {0.15, Numbers{1, 1, 2, 3, 8}}},
      {"GenerateRequest.priority", {0.3, Kind::kPriority}},
      {"SessionTurn.session_id", {1, Kind::kSession}},
      {"SessionTurn.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"SessionTurn.durability", {0.3, Kind::kDurability}},
      {"SamplingParams.temperature", {0.6, Numbers{0, 0, 1e-6, 0.3, 0.8, 1, 1.5, 100}}},
      {"SamplingParams.top_k", {0.3, Numbers{0, 1, 2, 40, 4096, 2147483648.0, 4294967295.0}}},
      {"SamplingParams.top_p", {0.3, Numbers{1e-6, 0.1, 0.5, 0.95, 1}}},
      {"SamplingParams.min_p", {0.2, Numbers{0, 0.05, 0.5, 0.999}}},
      {"SamplingParams.seed", {0.5, Numbers{0, 1, 42, 4294967296.0, 18446744073709549568.0}}},
      {"SamplingParams.typical_p", {0.2, Numbers{1e-6, 0.2, 0.9, 1}}},
      {"SamplingParams.repetition_penalty", {0.2, Numbers{0.01, 0.9, 1, 1.2, 10}}},
      {"SamplingParams.presence_penalty", {0.2, Numbers{-2, -0.5, 0, 0.7, 2}}},
      {"SamplingParams.frequency_penalty", {0.2, Numbers{-2, -0.5, 0, 0.7, 2}}},
      {"SamplingParams.penalty_window", {0.2, Numbers{1, 2, 64, 1024, 4096}}},
      {"SamplingParams.no_repeat_ngram_size", {0.1, Numbers{0, 1, 2, 3, 64}}},
      {"SamplingParams.allowed_token_ids", {0.05, Kind::kTokenId, 50}},
      {"SamplingParams.banned_token_ids", {0.15, Kind::kTokenId, 50}},
      {"StopParams.max_tokens", {0.97, Numbers{0, 1, 1, 2, 3, 5, 8, 8, 12, 20, 40, 60}}},
      {"StopParams.stop", {0.3, Kind::kStop}},
      {"StopParams.stop_token_ids", {0.2, Kind::kTokenId}},
      {"StopParams.min_tokens", {0.15, Numbers{0, 1, 2, 5, 12}}},
      {"OutputParams.top_logprobs", {0.3, Numbers{0, 1, 5, 20}}},
      {"ScoreRequest.request_id", {0.2, Kind::kRequestId}},
      {"ScoreRequest.model", {0.3, Kind::kModel}},
      {"ScoreRequest.top_logprobs", {0.3, Numbers{0, 1, 5, 20}}},
      {"ScoreRequest.cache_salt", {0.2, Texts{"", "a", std::string(128, 's')}}},
      {"TokenIds.ids", {1, Kind::kTokenId, 60}},
      {"ChatMessage.role", {1, Texts{"system", "user", "assistant"}}},
      {"ChatMessage.content", {1, Kind::kText}},
      {"GetModelRequest.model", {0.5, Kind::kModel}},
      {"TokenizeRequest.model", {0.5, Kind::kModel}},
      {"TokenizeRequest.text", {1, Kind::kText}},
      {"DetokenizeRequest.model", {0.5, Kind::kModel}},
      {"DetokenizeRequest.token_ids", {1, Kind::kTokenId, 200}},
      {"RenderChatRequest.model", {0.5, Kind::kModel}},
      {"CreateSessionRequest.session_id", {0.9, Kind::kSession}},
      {"CreateSessionRequest.request_id", {0.3, Kind::kRequestId}},
      {"CreateSessionRequest.model", {0.3, Kind::kModel}},
      {"CreateSessionRequest.ttl_ms", {0.2, Numbers{0, 1, 500, 60000}}},
      {"CreateSessionRequest.durability", {0.3, Kind::kDurability}},
      {"CreateSessionRequest.cache_salt", {0.2, Texts{"", "a"}}},
      {"GetSessionRequest.session_id", {1, Kind::kSession}},
      {"ListSessionsRequest.prefix", {0.3, Texts{"", "fuzzed-", "fuzzed-1", "x"}}},
      {"ListSessionsRequest.page_size", {0.5, Numbers{0, 1, 10, 1000}}},
      {"ListSessionsRequest.page_token", {0.3, Kind::kSession}},
      {"AppendRequest.session_id", {1, Kind::kSession}},
      {"AppendRequest.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"AppendRequest.request_id", {0.3, Kind::kRequestId}},
      {"AppendRequest.durability", {0.3, Kind::kDurability}},
      {"AppendRequest.cache_salt", {0.2, Texts{"", "a"}}},
      {"ForkRequest.session_id", {1, Kind::kSession}},
      {"ForkRequest.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"ForkRequest.request_id", {0.2, Kind::kRequestId}},
      {"ForkRequest.count", {0.3, Numbers{0, 1, 2, 5}}},
      {"ForkRequest.child_ids", {0.8, Kind::kSession, 3}},
      {"ForkRequest.mark", {0.2, Kind::kMark}},
      {"ForkRequest.durability", {0.3, Kind::kDurability}},
      {"MarkRequest.session_id", {1, Kind::kSession}},
      {"MarkRequest.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"MarkRequest.request_id", {0.2, Kind::kRequestId}},
      {"MarkRequest.name", {1, Kind::kMark}},
      {"MarkRequest.durability", {0.3, Kind::kDurability}},
      {"RewindRequest.session_id", {1, Kind::kSession}},
      {"RewindRequest.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"RewindRequest.request_id", {0.2, Kind::kRequestId}},
      {"RewindRequest.mark", {0.5, Kind::kMark}},
      {"RewindRequest.revision", {0.5, Numbers{1, 2, 3, 4, 5, 6, 1e6}}},
      {"RewindRequest.durability", {0.3, Kind::kDurability}},
      {"DeleteSessionRequest.session_id", {1, Kind::kSession}},
      {"DeleteSessionRequest.expected_revision", {0.1, Numbers{1, 2, 3}}},
      {"DeleteSessionRequest.request_id", {0.2, Kind::kRequestId}},
      {"MoveSessionRequest.session_id", {1, Kind::kSession}},
      {"MoveSessionRequest.tier", {1, Kind::kTier}},
      {"ExportRequest.session_id", {1, Kind::kSession}},
      {"ExportRequest.mark", {0.2, Kind::kMark}},
      {"ImportOptions.session_id", {0.9, Kind::kSession}},
      {"ImportOptions.request_id", {0.2, Kind::kRequestId}},
      {"ImportOptions.ttl_ms", {0.2, Numbers{0, 500, 60000}}},
      {"ImportOptions.durability", {0.3, Kind::kDurability}},
      {"SetLogLevelRequest.level", {1, Texts{"debug", "info", "warning", "error"}}},
  };
  return kRules;
}

const Rule* RuleOf(const FieldDescriptor& field) {
  const auto found = Rules().find(field.containing_type()->name() + "." + field.name());
  return found == Rules().end() ? nullptr : &found->second;
}

constexpr uint64_t kIntegers[] = {0,
                                  1,
                                  2,
                                  8,
                                  9,
                                  20,
                                  21,
                                  63,
                                  64,
                                  65,
                                  256,
                                  257,
                                  1000,
                                  1001,
                                  1024,
                                  1025,
                                  4095,
                                  4096,
                                  4097,
                                  1u << 20,
                                  (1u << 20) + 1,
                                  (1u << 31) - 1,
                                  1u << 31,
                                  (uint64_t{1} << 32) - 1,
                                  uint64_t{1} << 32,
                                  (uint64_t{1} << 63) - 1,
                                  uint64_t{1} << 63,
                                  ~uint64_t{0}};
constexpr double kReals[] = {0,
                             -0.0,
                             1e-45,
                             0.5,
                             1,
                             1.0000001,
                             2,
                             2.1,
                             -1,
                             -2,
                             10,
                             10.1,
                             100,
                             101,
                             -100,
                             1e38,
                             -1e38,
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()};

const char* const kSentences[] = {
    "The captain looked at the sea and said:",
    "Once upon a time there was a little house in the wood, and in the house there lived",
    "\xec\x95\x88\xeb\x85\x95, \xf0\x9f\x98\x80 </s><s> <0x41>",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the "
    "season of "
    "Darkness, it was the spring of hope, it was the winter of despair,",
    " ",
    "\n\n\tvoid f(int x) { return; }",
};

template <typename Container>
const auto& Pick(std::mt19937& random, const Container& values) {
  return std::data(values)[random() % std::size(values)];
}

}  // namespace

std::string RandomMessages::SessionName() { return kFuzzedPrefix + std::to_string(Below(16)); }

std::string RandomMessages::WildText() {
  switch (Below(10)) {
    case 0:
      return "";
    case 1:
      return std::string(1 + Below(3), '\0');
    case 2:
      return std::string(128 + Below(2), 'x');
    case 3:
      return std::string(256 + Below(2), 'x');
    case 4:
      return std::string(1024 + Below(2), ' ');
    case 5:
      return std::string(Below(40'000), OneIn(2) ? 'a' : '(');
    case 6:
      return "../../../etc/passwd%s%n\r\n\"'{{ x }}{% raw %}";
    case 7: {
      std::string text;
      for (size_t i = Below(300); i > 0; --i) text += OneIn(2) ? "\xf4\x8f\xbf\xbf" : "\xef\xbf\xbd\xcc\x81";
      return text;
    }
    case 8: {
      std::string text;
      for (size_t i = Below(60); i > 0; --i) text += static_cast<char>(Below(128));
      return text;
    }
    default:
      return Pick(random_, kSentences);
  }
}

std::string RandomMessages::Scramble(std::string text) {
  constexpr std::string_view kCharacters = "()[]{}<>*+?|\\^$.:;,\"'=#-_/ \n09azAZtu";
  for (size_t times = 1 + Below(4); times > 0 && !text.empty(); --times) {
    const size_t place = Below(text.size());
    if (static_cast<unsigned char>(text[place]) >= 0x80) continue;
    const char other = kCharacters[Below(kCharacters.size())];
    switch (Below(3)) {
      case 0:
        text[place] = other;
        break;
      case 1:
        text.insert(place, 1 + Below(3), other);
        break;
      default:
        text.erase(place, 1);
    }
  }
  return text;
}

std::string RandomMessages::RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random_());
  return bytes;
}

std::string RandomMessages::Mutate(std::string bytes, const std::string& other) {
  for (size_t times = 1 + Below(3); times > 0; --times) {
    switch (Below(6)) {
      case 0:
      case 1:
        for (size_t flips = 1 + Below(4); flips > 0 && !bytes.empty(); --flips) {
          bytes[Below(bytes.size())] ^= static_cast<char>(1 << Below(8));
        }
        break;
      case 2:
        bytes.resize(Below(bytes.size() + 1));
        break;
      case 3:
        bytes = bytes.substr(0, Below(bytes.size() + 1)) + other.substr(Below(other.size() + 1));
        break;
      case 4:
        bytes.insert(Below(bytes.size() + 1), RandomBytes(1 + Below(12)));
        break;
      default:
        if (OneIn(4))
          bytes = RandomBytes(Below(300));
        else if (!bytes.empty())
          bytes.erase(Below(bytes.size()), 1 + Below(8));
    }
  }
  return bytes;
}

std::vector<uint32_t> RandomMessages::PromptIds() {
  // Few beginnings, so that prompts share them, over several of the 64-token blocks that are kept.
  std::vector<uint32_t> ids;
  if (OneIn(2)) {
    std::mt19937 beginning(static_cast<uint32_t>(Below(3)));
    for (size_t i = OneIn(4) ? 200 : 70; i > 0; --i) {
      ids.push_back(static_cast<uint32_t>(3 + beginning() % (facts_.vocab_size - 3)));
    }
  }
  for (size_t i = 1 + Below(20); i > 0; --i) ids.push_back(static_cast<uint32_t>(Below(facts_.vocab_size)));
  return ids;
}

std::string RandomMessages::PromptText() {
  std::string text = Pick(random_, kSentences);
  if (OneIn(3)) text += Pick(random_, kSentences);
  if (OneIn(8)) text = WildText().substr(0, 2000);  // longer ones are of one-byte characters
  return text;
}

void RandomMessages::SetNumber(Message& message, const Field& field, double value) {
  const Reflection& reflection = *message.GetReflection();
  const bool repeated = field.is_repeated();
  // Out of a type's range: its nearest bound, which a conversion would leave undefined.
  const auto integer = [value]<typename T>(T) {
    if (!(value > static_cast<double>(std::numeric_limits<T>::min()))) return std::numeric_limits<T>::min();
    return value >= static_cast<double>(std::numeric_limits<T>::max()) ? std::numeric_limits<T>::max()
                                                                       : static_cast<T>(value);
  };
  switch (field.cpp_type()) {
    case Field::CPPTYPE_FLOAT: {
      const auto real = static_cast<float>(value);
      repeated ? reflection.AddFloat(&message, &field, real) : reflection.SetFloat(&message, &field, real);
      break;
    }
    case Field::CPPTYPE_DOUBLE:
      repeated ? reflection.AddDouble(&message, &field, value)
               : reflection.SetDouble(&message, &field, value);
      break;
    case Field::CPPTYPE_UINT32: {
      const uint32_t number = integer(uint32_t{});
      repeated ? reflection.AddUInt32(&message, &field, number)
               : reflection.SetUInt32(&message, &field, number);
      break;
    }
    case Field::CPPTYPE_UINT64: {
      const uint64_t number = integer(uint64_t{});
      repeated ? reflection.AddUInt64(&message, &field, number)
               : reflection.SetUInt64(&message, &field, number);
      break;
    }
    case Field::CPPTYPE_INT32: {
      const int32_t number = integer(int32_t{});
      repeated ? reflection.AddInt32(&message, &field, number)
               : reflection.SetInt32(&message, &field, number);
      break;
    }
    case Field::CPPTYPE_INT64: {
      const int64_t number = integer(int64_t{});
      repeated ? reflection.AddInt64(&message, &field, number)
               : reflection.SetInt64(&message, &field, number);
      break;
    }
    case Field::CPPTYPE_BOOL:
      repeated ? reflection.AddBool(&message, &field, value != 0)
               : reflection.SetBool(&message, &field, value != 0);
      break;
    case Field::CPPTYPE_ENUM: {
      const int number = integer(int32_t{});
      repeated ? reflection.AddEnumValue(&message, &field, number)
               : reflection.SetEnumValue(&message, &field, number);
      break;
    }
    case Field::CPPTYPE_STRING:
    case Field::CPPTYPE_MESSAGE:
      break;
  }
}

void RandomMessages::SetText(Message& message, const Field& field, std::string value) {
  const Reflection& reflection = *message.GetReflection();
  field.is_repeated() ? reflection.AddString(&message, &field, std::move(value))
                      : reflection.SetString(&message, &field, std::move(value));
}

void RandomMessages::SetValid(Message& message, const Field& field) {
  const Reflection& reflection = *message.GetReflection();
  if (field.is_map()) {
    if (field.name() != "logit_bias") return;
    auto& bias = *static_cast<v1::SamplingParams&>(message).mutable_logit_bias();
    for (size_t i = Below(8); i > 0; --i) {
      bias[static_cast<uint32_t>(Below(facts_.vocab_size))] =
          Pick(random_, Numbers{-100, -1, 0, 0.5, 5, 100});
    }
    return;
  }
  if (field.cpp_type() == Field::CPPTYPE_MESSAGE) {
    FillFields(field.is_repeated() ? *reflection.AddMessage(&message, &field)
                                   : *reflection.MutableMessage(&message, &field));
    return;
  }
  const Rule* const rule = RuleOf(field);
  if (rule == nullptr) {
    if (field.cpp_type() == Field::CPPTYPE_BOOL)
      return SetNumber(message, field, static_cast<double>(Below(2)));
    if (field.cpp_type() == Field::CPPTYPE_ENUM) {
      return SetNumber(
          message, field,
          field.enum_type()
              ->value(static_cast<int>(Below(static_cast<size_t>(field.enum_type()->value_count()))))
              ->number());
    }
    return SetAny(message, field);
  }
  if (const auto* numbers = std::get_if<Numbers>(&rule->values))
    return SetNumber(message, field, Pick(random_, *numbers));
  if (const auto* texts = std::get_if<Texts>(&rule->values))
    return SetText(message, field, Pick(random_, *texts));
  switch (std::get<Kind>(rule->values)) {
    case Kind::kTokenId:
      return SetNumber(message, field, static_cast<double>(Below(facts_.vocab_size)));
    case Kind::kSession:
      return SetText(message, field, SessionName());
    case Kind::kMark:
      return SetText(message, field, "m" + std::to_string(Below(3)));
    case Kind::kRequestId:
      return SetText(message, field, "r" + std::to_string(Below(OneIn(2) ? 6 : 1'000'000'000)));
    case Kind::kModel:
      return SetText(message, field, facts_.model);
    case Kind::kText:
      return SetText(message, field, PromptText());
    case Kind::kPriority:
      return SetNumber(message, field,
                       static_cast<double>(Below(static_cast<size_t>(facts_.max_priority + 9))) - 8);
    case Kind::kDurability:
      return SetNumber(message, field, static_cast<double>(Below(facts_.has_store ? 4 : 3)));
    case Kind::kTier:
      return SetNumber(message, field, static_cast<double>(2 + Below(facts_.has_store ? 3 : 2)));
    case Kind::kStop:
      return SetText(message, field,
                     Pick(random_, Texts{" the", "e", ".", "\n", "</s>", "zzzz", "\xec\x95\x88"}));
  }
}

void RandomMessages::FillFields(Message& message) {
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  std::vector<const Field*> chosen;
  for (int i = 0; i < type.oneof_decl_count(); ++i) {
    const google::protobuf::OneofDescriptor& oneof = *type.oneof_decl(i);
    if (oneof.is_synthetic()) continue;
    chosen.push_back(oneof.field(static_cast<int>(Below(static_cast<size_t>(oneof.field_count())))));
  }
  for (int i = 0; i < type.field_count(); ++i) {
    const Field& field = *type.field(i);
    const bool in_oneof = field.real_containing_oneof() != nullptr;
    if (in_oneof && std::find(chosen.begin(), chosen.end(), &field) == chosen.end()) continue;
    const Rule* const rule = RuleOf(field);
    const double chance = rule != nullptr ? rule->chance : in_oneof ? 1 : 0.35;
    if (std::generate_canonical<double, 20>(random_) >= chance) continue;
    if (!field.is_repeated() || field.is_map()) {
      SetValid(message, field);
      continue;
    }
    for (size_t count = 1 + Below(rule != nullptr ? rule->most : 4); count > 0; --count)
      SetValid(message, field);
  }
}

// ---- What no single field can see ----

template <typename Request>
void RandomMessages::OnePrompt(Request& request, bool may_be_absent) {
  request.clear_text();
  request.clear_token_ids();
  request.clear_add_bos();
  request.clear_parse_special_tokens();
  if (may_be_absent && OneIn(5)) return;
  if (facts_.has_tokenizer && !OneIn(3)) {
    request.set_text(PromptText());
    if (OneIn(4)) request.set_parse_special_tokens(true);
    if (OneIn(4)) request.set_add_bos(true);
    if (request.text().empty()) request.set_add_bos(true);
  } else {
    for (uint32_t id : PromptIds()) request.mutable_token_ids()->add_ids(id);
    if (OneIn(4)) request.set_add_bos(OneIn(2));
  }
}

void RandomMessages::FillConstraint(v1::Constraint& constraint) {
  constraint.Clear();
  switch (Below(5)) {
    case 0:
      for (const char* choice : {" yes", " no", " not yet", "maybe"}) {
        if (!OneIn(3)) constraint.mutable_choices()->add_choices(choice);
      }
      constraint.mutable_choices()->add_choices("{}");
      break;
    case 1:
      constraint.set_regex(Pick(random_, Texts{" [0-9]{3}", "( [a-z]+){3,6}(, [a-z]+)?[.!?]", ".*",
                                               "(a|b)*c{2,}|\\d+", " ?[^\\W\\d]{1,20}", "[\\s\\S]{0,1000}"}));
      break;
    case 2:
      constraint.mutable_json_object();
      break;
    case 3:
      constraint.set_json_schema(Pick(
          random_,
          Texts{R"({"type":"object","properties":{"name":{"type":"string","maxLength":10},
                    "age":{"type":"integer","minimum":0,"maximum":120}},"required":["name","age"]})",
                R"({"type":"object","additionalProperties":{"anyOf":[{"type":"null"},{"type":"boolean"}]}})",
                R"({"type":"object","properties":{"l":{"$ref":"#/$defs/l"}},
                    "$defs":{"l":{"type":"array","items":{"$ref":"#/$defs/l"},"maxItems":3}}})",
                R"({"type":"object","properties":{"d":{"type":"string","format":"date-time"},
                    "p":{"type":"string","pattern":"^[a-c]+x?$"},"n":{"type":"number","exclusiveMinimum":-3}}})"}));
      break;
    default:
      constraint.set_grammar(Pick(
          random_, Texts{"root ::= sum\nsum ::= n ([+] n){1,3}\nn ::= [0-9]{1,2} | \"(\" sum \")\"",
                         "root ::= \"a\" root \"b\" | \"c\"", "# any\nroot ::= (.|[\\n])* \"\\u0041\""}));
  }
}

void RandomMessages::Agree(v1::GenerateRequest& request) {
  if (request.has_session() && OneIn(2)) request.clear_session();
  OnePrompt(request, request.has_session());
  if (request.has_chat() && (!facts_.has_chat_template || OneIn(2))) request.clear_chat();
  if (request.has_chat()) {
    request.clear_text();
    request.clear_token_ids();
    request.clear_parse_special_tokens();
    v1::Chat& chat = *request.mutable_chat();
    if (chat.messages().empty()) FillFields(*chat.add_messages());
    if (chat.continue_final_message()) chat.set_add_generation_prompt(false);
  }
  v1::StopParams& stopping = *request.mutable_stopping();
  if (stopping.has_max_tokens()) {
    stopping.set_min_tokens(std::min(stopping.min_tokens(), stopping.max_tokens()));
  }
  if (!facts_.has_tokenizer) stopping.clear_stop();
  v1::OutputParams& output = *request.mutable_output();
  if (output.top_logprobs() > 0) output.set_logprobs(true);
  const bool draws = !stopping.has_max_tokens() || stopping.max_tokens() > 0;
  if (!draws && request.has_session()) output.clear_echo();
  if (request.has_constraint() && (!facts_.has_tokenizer || !draws || OneIn(3))) request.clear_constraint();
  if (request.has_constraint()) {
    FillConstraint(*request.mutable_constraint());
    request.mutable_sampling()
        ->clear_allowed_token_ids();  // which may leave nothing to draw, as the next may
    request.mutable_sampling()->clear_banned_token_ids();
  }
  if (request.has_session() || request.samples() > facts_.max_samples) request.clear_samples();
  if (request.has_session()) {
    v1::SessionTurn& turn = *request.mutable_session();
    turn.set_create_if_missing(!OneIn(6));
    if (request.text().empty() && request.has_text()) request.set_text("x");
  }
}

void RandomMessages::Agree(v1::ScoreRequest& request) {
  OnePrompt(request, /*may_be_absent=*/false);
  for (v1::ScoreRequest::Continuation& continuation : *request.mutable_continuations()) {
    continuation.Clear();
    if (facts_.has_tokenizer && OneIn(2)) {
      continuation.set_text(" and then");
    } else {
      for (uint32_t id : PromptIds()) continuation.mutable_token_ids()->add_ids(id);
    }
  }
  const uint32_t most = std::min<uint32_t>(4, facts_.max_samples);
  while (static_cast<uint32_t>(request.continuations_size()) > most) {
    request.mutable_continuations()->RemoveLast();
  }
  if (request.continuations().empty()) {
    request.clear_use_prefix_cache();
    request.clear_cache_salt();
  }
}

void RandomMessages::Agree(v1::AppendRequest& request) {
  OnePrompt(request, /*may_be_absent=*/false);
  if (request.has_text()) request.set_text(request.text() + "x");
}

void RandomMessages::Agree(v1::CreateSessionRequest& request) { OnePrompt(request, /*may_be_absent=*/true); }

void RandomMessages::Agree(v1::ForkRequest& request) {
  auto& ids = *request.mutable_child_ids();
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  if (!ids.empty()) request.set_count(static_cast<uint32_t>(ids.size()));
}

void RandomMessages::FillValid(Message& request) {
  request.Clear();
  FillFields(request);
  if (auto* generate = dynamic_cast<v1::GenerateRequest*>(&request)) Agree(*generate);
  if (auto* score = dynamic_cast<v1::ScoreRequest*>(&request)) Agree(*score);
  if (auto* append = dynamic_cast<v1::AppendRequest*>(&request)) Agree(*append);
  if (auto* create = dynamic_cast<v1::CreateSessionRequest*>(&request)) Agree(*create);
  if (auto* fork = dynamic_cast<v1::ForkRequest*>(&request)) Agree(*fork);
}

// ---- Beyond all bounds ----

void RandomMessages::SetAny(Message& message, const Field& field) {
  const Reflection& reflection = *message.GetReflection();
  if (field.is_map()) {
    if (field.name() != "logit_bias") return;
    auto& bias = *static_cast<v1::SamplingParams&>(message).mutable_logit_bias();
    const size_t counts[] = {1, 2, 1024, 1025};
    for (size_t i = Pick(random_, counts); i > 0; --i) {
      const uint64_t id = OneIn(2) ? i : Pick(random_, kIntegers);
      bias[static_cast<uint32_t>(id)] = static_cast<float>(Pick(random_, kReals));
    }
    return;
  }
  switch (field.cpp_type()) {
    case Field::CPPTYPE_MESSAGE: {
      Message& part = field.is_repeated() ? *reflection.AddMessage(&message, &field)
                                          : *reflection.MutableMessage(&message, &field);
      if (OneIn(2)) FillFields(part);
      break;
    }
    case Field::CPPTYPE_STRING:
      if (field.type() == Field::TYPE_BYTES) {
        SetText(message, field, RandomBytes(Below(2000)));
      } else if (!field.is_repeated() && reflection.HasField(message, &field) && !OneIn(3)) {
        SetText(message, field, Scramble(reflection.GetString(message, &field)));
      } else {
        SetText(message, field, WildText());
      }
      break;
    case Field::CPPTYPE_FLOAT:
    case Field::CPPTYPE_DOUBLE:
      SetNumber(message, field, Pick(random_, kReals));
      break;
    case Field::CPPTYPE_BOOL:
      SetNumber(message, field, static_cast<double>(Below(2)));
      break;
    default: {
      const uint64_t number = Pick(random_, kIntegers);
      const bool negative =
          field.cpp_type() != Field::CPPTYPE_UINT32 && field.cpp_type() != Field::CPPTYPE_UINT64;
      // As the type's own bits, where a number would be cut off at the type's bound.
      if (field.cpp_type() == Field::CPPTYPE_UINT64 && !field.is_repeated()) {
        reflection.SetUInt64(&message, &field, number);
      } else {
        SetNumber(message, field, static_cast<double>(number) * (negative && OneIn(2) ? -1 : 1));
      }
    }
  }
}

void RandomMessages::FindSpots(Message& message, std::vector<Spot>& spots) {
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  const Reflection& reflection = *message.GetReflection();
  spots.push_back({&message, nullptr});
  for (int i = 0; i < type.field_count(); ++i) {
    const Field& field = *type.field(i);
    spots.push_back({&message, &field});
    if (field.is_map() || field.cpp_type() != Field::CPPTYPE_MESSAGE) continue;
    if (field.is_repeated()) {
      for (int k = 0; k < reflection.FieldSize(message, &field); ++k) {
        FindSpots(*reflection.MutableRepeatedMessage(&message, &field, k), spots);
      }
    } else if (reflection.HasField(message, &field)) {
      FindSpots(*reflection.MutableMessage(&message, &field), spots);
    }
  }
}

void RandomMessages::Spoil(Message& request, int most) {
  for (size_t times = 1 + Below(static_cast<size_t>(most)); times > 0; --times) {
    std::vector<Spot> spots;  // anew: the last one may have removed some
    FindSpots(request, spots);
    const Spot spot = Pick(random_, spots);
    if (spot.field == nullptr) {
      if (!OneIn(3)) continue;
      google::protobuf::UnknownFieldSet& unknown =
          *spot.message->GetReflection()->MutableUnknownFields(spot.message);
      const int number = OneIn(2) ? 1 + static_cast<int>(Below(60)) : 536'870'911;
      OneIn(2) ? unknown.AddVarint(number, random_())
               : unknown.AddLengthDelimited(number, RandomBytes(Below(40)));
      continue;
    }
    if (OneIn(5)) {
      spot.message->GetReflection()->ClearField(spot.message, spot.field);
    } else if (spot.field->is_repeated() && !spot.field->is_map()) {
      if (OneIn(2)) spot.message->GetReflection()->ClearField(spot.message, spot.field);
      const size_t counts[] = {1, 1, 2, 64, 65, 256, 257, 1024, 1025, 4096, 4097};
      size_t count = Pick(random_, counts);
      const bool message = spot.field->cpp_type() == Field::CPPTYPE_MESSAGE;
      if (message || spot.field->cpp_type() == Field::CPPTYPE_STRING) count = std::min<size_t>(count, 1025);
      const bool valid = OneIn(2);  // too many of good ones
      if (message || (spot.field->cpp_type() == Field::CPPTYPE_STRING && !valid))
        count = std::min<size_t>(count, 257);
      for (; count > 0; --count)
        valid ? SetValid(*spot.message, *spot.field) : SetAny(*spot.message, *spot.field);
    } else {
      SetAny(*spot.message, *spot.field);
    }
  }
}

}  // namespace efla::e2e
