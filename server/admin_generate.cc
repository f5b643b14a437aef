#include "server/admin_generate.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "model/strict_json.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

// The page is a look at a model, not a way to load it.
constexpr int kMostAtOnce = 2;
constexpr int64_t kDefaultTokens = 128, kMostTokens = 4096;
constexpr double kHottest = 2;

struct PageRequest {
  std::string prompt;
  int64_t max_tokens = kDefaultTokens;
  double temperature = 0.8;
  std::optional<uint64_t> seed;
};

absl::StatusOr<PageRequest> Parse(std::string_view body) {
  const absl::StatusOr<nlohmann::json> json = ParseJsonObject(body, "the body");
  if (!json.ok()) return json.status();
  for (const auto& [name, value] : json->items()) {
    if (name != "prompt" && name != "max_tokens" && name != "temperature" && name != "seed") {
      return absl::InvalidArgumentError(absl::StrFormat("the body: there is no field %s", Printable(name)));
    }
  }
  PageRequest request;
  JsonFields fields(*json, "the body");
  request.prompt = fields.Text("prompt");
  request.max_tokens = fields.Integer("max_tokens", 1, kMostTokens, request.max_tokens);
  request.temperature = fields.Number("temperature", 0, kHottest, request.temperature);
  if (const auto seed = json->find("seed"); seed != json->end()) {
    if (seed->is_number_unsigned()) {
      request.seed = seed->get<uint64_t>();
    } else {
      fields.Refuse("seed", "a whole number, 0 or above, is needed");
    }
  }
  if (!fields.status().ok()) return fields.status();
  return request;
}

absl::StatusOr<GenerationRequest> ToGeneration(const PageRequest& page, const ServedModel& model) {
  if (model.tokenizer == nullptr) return absl::FailedPreconditionError("the model has no tokenizer");
  absl::StatusOr<std::vector<TokenId>> prompt = model.tokenizer->Encode(page.prompt, /*parse_special=*/false);
  if (!prompt.ok()) return prompt.status();
  GenerationRequest request;
  request.request_id = "admin-page";
  request.prompt = *std::move(prompt);
  request.prompt.insert(request.prompt.begin(), model.config->bos_token_id);
  request.sampling.temperature = static_cast<float>(page.temperature);
  request.sampling.top_p = model.defaults.top_p;
  request.sampling.top_k = model.defaults.top_k;
  request.sampling.min_p = model.defaults.min_p;
  request.sampling.typical_p = model.defaults.typical_p;
  request.sampling.repetition_penalty = model.defaults.repetition_penalty;
  request.sampling.no_repeat_ngram_size = model.defaults.no_repeat_ngram_size;
  request.sampling.seed = page.seed.value_or(std::random_device()());
  request.stopping.max_tokens = page.max_tokens;
  return request;
}

const char* Name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEos:
      return "end of text";
    case FinishReason::kStopString:
    case FinishReason::kStopToken:
      return "stop";
    case FinishReason::kMaxTokens:
      return "max_tokens";
    case FinishReason::kTimeBudget:
      return "time budget";
    case FinishReason::kConstraintComplete:
      return "constraint";
  }
  return "";
}

// Wakes the page's thread when its generation has something.
struct Bell {
  std::mutex mutex;
  std::condition_variable rung;
  bool ringing = false;  // guarded by mutex

  void Ring() {
    {
      const std::lock_guard lock(mutex);
      ringing = true;
    }
    rung.notify_one();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    rung.wait(lock, [this] { return ringing; });
    ringing = false;
  }
};

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

HttpReply Refusal(const absl::Status& status) {
  const int code = absl::IsUnavailable(status) || absl::IsResourceExhausted(status) ? 503 : 400;
  return {code, std::string(status.message()) + "\n"};
}

}  // namespace

std::optional<HttpReply> StreamCompletion(const ServingState& state, std::string_view body,
                                          const HttpStream& stream) {
  static std::atomic<int> under_way = 0;
  struct Place {
    int before = under_way.fetch_add(1);
    ~Place() { under_way.fetch_sub(1); }
  } place;
  if (place.before >= kMostAtOnce) return HttpReply{503, "other completions are under way\n"};
  if (!state.ready()) return HttpReply{503, "the server is not ready\n"};
  absl::StatusOr<PageRequest> page = Parse(body);
  if (!page.ok()) return Refusal(page.status());
  absl::StatusOr<GenerationRequest> request = ToGeneration(*page, *state.model());
  if (!request.ok()) return Refusal(request.status());

  const auto bell = std::make_shared<Bell>();  // the callback may outlive this call by a moment
  absl::StatusOr<std::shared_ptr<Generation>> submitted =
      state.model()->engine->Submit(*std::move(request), [bell](Generation&) { bell->Ring(); });
  if (!submitted.ok()) return Refusal(submitted.status());
  Generation& generation = **submitted;
  bool reads = true;
  const auto send = [&](const Json& json) {
    if (reads && !stream(Dump(json))) {
      reads = false;
      generation.Cancel();
    }
  };
  for (;;) {
    while (std::optional<Event> event = generation.TakeEvent()) {
      if (auto* delta = std::get_if<DeltaEvent>(&*event)) {
        if (!delta->text.empty()) send({{"text", std::move(delta->text)}});
      } else if (auto* finished = std::get_if<FinishedEvent>(&*event)) {
        if (!finished->text.empty()) send({{"text", std::move(finished->text)}});
        send({{"finish_reason", Name(finished->reason)},
              {"prompt_tokens", finished->usage.prompt_tokens},
              {"completion_tokens", finished->usage.completion_tokens},
              {"first_token_ms", static_cast<double>(finished->timing.first_token_us) * 1e-3},
              {"total_ms", static_cast<double>(finished->timing.total_us) * 1e-3}});
      }
    }
    if (const std::optional<absl::Status> end = generation.TakeEnd()) {
      if (!end->ok()) send({{"error", std::string(end->message())}});
      return std::nullopt;
    }
    bell->Wait();
  }
}

}  // namespace efla
