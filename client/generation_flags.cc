#include "client/generation_flags.h"

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "client/command.h"

namespace efla {

void GenerationFlags::Fill(v1::GenerateRequest& request) const {
  v1::SamplingParams& sampling = *request.mutable_sampling();
  if (temperature) sampling.set_temperature(*temperature);
  if (top_k) sampling.set_top_k(*top_k);
  if (top_p) sampling.set_top_p(*top_p);
  if (min_p) sampling.set_min_p(*min_p);
  if (seed) sampling.set_seed(*seed);
  v1::StopParams& stopping = *request.mutable_stopping();
  if (max_tokens) stopping.set_max_tokens(*max_tokens);
  stopping.mutable_stop()->Assign(stop.begin(), stop.end());
  stopping.mutable_stop_token_ids()->Assign(stop_token_ids.begin(), stop_token_ids.end());
  stopping.set_ignore_eos(ignore_eos);
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
  app.add_option("--seed", flags.seed, "The same seed and request give the same tokens")
      ->check(WholeNumber(0, kMaxUint64));
  app.add_option("--stop", flags.stop, "Text that ends the continuation; may be repeated")
      ->check(Utf8())
      ->allow_extra_args(false);
  app.add_option("--stop-token-id", flags.stop_token_ids,
                 "Token id that ends the continuation; may be repeated")
      ->check(WholeNumber(0, kMaxUint32))
      ->allow_extra_args(false);
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
