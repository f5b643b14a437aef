#include "client/generation_flags.h"

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "client/command.h"

namespace efla {
namespace {

struct Bias {
  uint32_t id;
  float value;
};

// Of "ID=VALUE".
std::optional<Bias> ParseBias(const std::string& text) {
  const size_t equals = text.find('=');
  Bias bias;
  if (equals == std::string::npos || !absl::SimpleAtoi(text.substr(0, equals), &bias.id) ||
      !absl::SimpleAtof(text.substr(equals + 1), &bias.value)) {
    return std::nullopt;
  }
  return bias;
}

CLI::Validator BiasEntry() {
  return CLI::Validator(
      [](const std::string& text) {
        return ParseBias(text) ? std::string() : text + " is not ID=VALUE, such as 13=-2.5";
      },
      "ID=VALUE");
}

}  // namespace

void GenerationFlags::Fill(v1::GenerateRequest& request) const {
  v1::SamplingParams& sampling = *request.mutable_sampling();
  if (temperature) sampling.set_temperature(*temperature);
  if (top_k) sampling.set_top_k(*top_k);
  if (top_p) sampling.set_top_p(*top_p);
  if (min_p) sampling.set_min_p(*min_p);
  if (seed) sampling.set_seed(*seed);
  if (typical_p) sampling.set_typical_p(*typical_p);
  if (repetition_penalty) sampling.set_repetition_penalty(*repetition_penalty);
  if (presence_penalty) sampling.set_presence_penalty(*presence_penalty);
  if (frequency_penalty) sampling.set_frequency_penalty(*frequency_penalty);
  if (penalty_window) sampling.set_penalty_window(*penalty_window);
  if (no_repeat_ngram) sampling.set_no_repeat_ngram_size(*no_repeat_ngram);
  for (const std::string& entry : logit_bias) {
    const Bias bias = *ParseBias(entry);  // the flag's check has parsed it
    (*sampling.mutable_logit_bias())[bias.id] = bias.value;
  }
  sampling.mutable_allowed_token_ids()->Assign(allow_ids.begin(), allow_ids.end());
  sampling.mutable_banned_token_ids()->Assign(ban_ids.begin(), ban_ids.end());
  v1::StopParams& stopping = *request.mutable_stopping();
  if (max_tokens) stopping.set_max_tokens(*max_tokens);
  stopping.mutable_stop()->Assign(stop.begin(), stop.end());
  stopping.mutable_stop_token_ids()->Assign(stop_token_ids.begin(), stop_token_ids.end());
  stopping.set_ignore_eos(ignore_eos);
  stopping.set_min_tokens(min_tokens);
}

void AddGenerationFlags(CLI::App& app, GenerationFlags& flags) {
  app.add_option("--max-tokens", flags.max_tokens, "Tokens drawn at most")->check(WholeNumber(0, kMaxUint32));
  app.add_option("--temperature", flags.temperature, "0 is greedy");
  app.add_option("--top-k", flags.top_k, "Draw from the k most probable tokens; 0 is off")
      ->check(WholeNumber(0, kMaxUint32));
  app.add_option("--top-p", flags.top_p,
                 "Draw from the most probable tokens that reach this probability; 1 is off");
  app.add_option("--min-p", flags.min_p,
                 "Drop tokens less probable than this times the most probable; 0 is off");
  app.add_option("--typical-p", flags.typical_p,
                 "Draw from the tokens of the most usual surprise that reach this probability; 1 is off");
  app.add_option("--repetition-penalty", flags.repetition_penalty,
                 "Divides the logits of tokens that prompt or output hold; 1 is off");
  app.add_option("--presence-penalty", flags.presence_penalty,
                 "Taken from the logits of tokens that the output holds");
  app.add_option("--frequency-penalty", flags.frequency_penalty,
                 "Taken from them for each time that it holds them");
  app.add_option("--penalty-window", flags.penalty_window, "The penalties look at so many tokens back")
      ->check(WholeNumber(0, kMaxUint32));
  app.add_option("--no-repeat-ngram", flags.no_repeat_ngram,
                 "No so many tokens in a row occur twice in prompt and output; 0 is off")
      ->check(WholeNumber(0, kMaxUint32));
  AddRepeatedFlag(app, "--logit-bias", flags.logit_bias, "Added to a token's logit")->check(BiasEntry());
  app.add_option("--allow-ids", flags.allow_ids, "Draw from these token ids only, and end tokens: 5,6 or 5 6")
      ->check(WholeNumber(0, kMaxUint32))
      ->delimiter(',');
  app.add_option("--ban-ids", flags.ban_ids, "Never draw these token ids: 5,6 or 5 6")
      ->check(WholeNumber(0, kMaxUint32))
      ->delimiter(',');
  app.add_option("--min-tokens", flags.min_tokens, "Tokens drawn before an end token or a stop may end it")
      ->check(WholeNumber(0, kMaxUint32));
  app.add_option("--seed", flags.seed, "The same seed and request give the same tokens")
      ->check(WholeNumber(0, kMaxUint64));
  AddRepeatedFlag(app, "--stop", flags.stop, "Text that ends the continuation")->check(Utf8());
  AddRepeatedFlag(app, "--stop-token-id", flags.stop_token_ids, "Token id that ends the continuation")
      ->check(WholeNumber(0, kMaxUint32));
  app.add_flag("--ignore-eos", flags.ignore_eos, "Go on after an end-of-text token");
}

std::string ReasonName(v1::FinishReason reason) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::FinishReason_Name(reason), "FINISH_REASON_"));
}

std::optional<double> TokensPerSecond(const v1::Finished& finished) {
  constexpr double kMicrosPerSecond = 1e6;
  const uint64_t tokens = finished.usage().completion_tokens();
  const v1::Timing& timing = finished.timing();
  if (tokens < 2 || timing.total_us() <= timing.first_token_us()) return std::nullopt;
  return static_cast<double>(tokens - 1) * kMicrosPerSecond /
         static_cast<double>(timing.total_us() - timing.first_token_us());
}

}  // namespace efla
