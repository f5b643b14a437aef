#include "server/model_loader.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/create_device.h"
#include "model/files.h"
#include "model/fingerprint.h"
#include "model/safetensors.h"
#include "server/session_loader.h"
#include "server/watched_chat_template.h"

namespace efla {
namespace {

constexpr uint64_t kDummySeed = 1;
constexpr int64_t kDefaultMaxTokens = 256;
constexpr int64_t kMaxConfigBytes = 1 << 20;

absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenCheckpoint(const Options& options) {
  if (!options.preset.empty()) {
    absl::StatusOr<ModelConfig> config = ModelConfig::Preset(options.preset);
    if (!config.ok()) return config.status();
    if (options.model_type) config->type = *options.model_type;
    return Checkpoint::Random(*config, kDummySeed, options.dummy_dtype);
  }
  if (options.dummy_weights) {
    absl::StatusOr<std::string> json = ReadFile(options.checkpoint + "/config.json", kMaxConfigBytes);
    if (!json.ok()) return json.status();
    absl::StatusOr<ModelConfig> config = ModelConfig::Parse(*json, options.model_type);
    if (!config.ok()) return config.status();
    return Checkpoint::Random(*config, kDummySeed, options.dummy_dtype);
  }
  return Checkpoint::Open(options.checkpoint, {.type_override = options.model_type});
}

std::string WeightsFingerprint(const Options& options, const Checkpoint& checkpoint) {
  if (!options.dummy_weights) {
    std::string fingerprint = checkpoint.Fingerprint();
    for (const TensorInfo& tensor : checkpoint.tensors()) checkpoint.Release(tensor);
    return fingerprint;
  }
  // Of what they are made of: making them all again would take as long as loading.
  Sha256 hash;
  hash.Add(absl::StrFormat("dummy weights of type %d, seed %d\n", static_cast<int>(options.dummy_dtype),
                           kDummySeed));
  BeginModel(hash, checkpoint.config());
  return hash.Hex();
}

absl::StatusOr<std::unique_ptr<const Tokenizer>> OpenTokenizer(const Options& options,
                                                               const ModelConfig& config) {
  if (options.checkpoint.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<const Tokenizer>> tokenizer =
      Tokenizer::Open(options.checkpoint + "/tokenizer.model");
  if (absl::IsNotFound(tokenizer.status())) return nullptr;
  if (tokenizer.ok() && (*tokenizer)->vocab_size() > config.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tokenizer.model has %d pieces; the model's vocabulary has %d",
                        (*tokenizer)->vocab_size(), config.vocab_size));
  }
  return tokenizer;
}

// A template that cannot be used costs the chats, not the server.
void OpenChatTemplate(const Options& options, const Log& log, LoadedModel& loaded) {
  loaded.no_chat_template = "the checkpoint has none";
  if (loaded.tokenizer == nullptr) return;
  auto chat_template = ChatTemplate::Open(options.checkpoint, *loaded.tokenizer);
  if (chat_template.ok()) chat_template = WatchChatTemplate(*std::move(chat_template), log);
  if (chat_template.ok()) {
    loaded.chat_template = *std::move(chat_template);
  } else if (!absl::IsNotFound(chat_template.status())) {
    const std::string why(chat_template.status().message());
    loaded.no_chat_template = absl::StrFormat("the checkpoint's cannot be used: %s", why);
    log.Warning("chat_template", "the chat template cannot be used; chats are refused", {{"error", why}});
  }
}

// Slots that fit into a share of the free memory, up to four times what runs at once: a session's turn holds
// two, where it began and where it is, and idle sessions and the prefix cache share the rest.
int DefaultStateSlots(const Device& device, const StateLayout& layout) {
  const bool cpu = device.info().kind == "cpu";
  const int most = cpu ? 128 : 1024;
  const double share = cpu ? 0.5 : 0.8;
  const int64_t fitting =
      static_cast<int64_t>(share * static_cast<double>(device.free_memory_bytes())) / layout.slot_bytes();
  return static_cast<int>(std::clamp<int64_t>(fitting, 2, most));
}

int PrefixCacheSlots(const Options& options, int state_slots) {
  constexpr int kDefaultShare = 8;
  return options.prefix_cache_slots < 0 ? state_slots / kDefaultShare
                                        : std::min(options.prefix_cache_slots, state_slots);
}

int DefaultMaxRunning(const Device& device) { return device.info().kind == "cpu" ? 32 : 256; }

int LongestPiece(const Tokenizer& tokenizer) {
  size_t longest = 0;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    longest = std::max(longest, tokenizer.PieceBytes(id, /*at_start=*/false).size());
  }
  return static_cast<int>(longest);
}

ServedModel Describe(const Options& options, const LoadedModel& loaded) {
  ServedModel served;
  served.name = options.model_name;
  served.replica = options.replica_name;
  served.config = &loaded.model->config();
  served.tokenizer = loaded.tokenizer.get();
  served.constraints = loaded.constraints.get();
  served.chat_template = loaded.chat_template.get();
  served.no_chat_template = loaded.no_chat_template;
  served.engine = loaded.engine.get();
  served.sessions = loaded.sessions.get();
  served.has_disk_store = !options.session_dir.empty();
  served.has_shared_store = !options.session_store.empty();
  served.limits.max_prompt_tokens = options.max_prompt_tokens;
  served.limits.max_new_tokens = options.max_new_tokens;
  served.limits.max_queue = options.max_queue;
  served.limits.max_session_ttl_ms = options.session_ttl.count();
  const GenerationDefaults& defaults = loaded.checkpoint->defaults();
  served.defaults.temperature = defaults.temperature.value_or(served.defaults.temperature);
  served.defaults.top_k = defaults.top_k.value_or(served.defaults.top_k);
  served.defaults.top_p = defaults.top_p.value_or(served.defaults.top_p);
  served.defaults.min_p = defaults.min_p.value_or(served.defaults.min_p);
  served.defaults.typical_p = defaults.typical_p.value_or(served.defaults.typical_p);
  served.defaults.repetition_penalty =
      defaults.repetition_penalty.value_or(served.defaults.repetition_penalty);
  served.defaults.no_repeat_ngram_size =
      defaults.no_repeat_ngram_size.value_or(served.defaults.no_repeat_ngram_size);
  served.defaults.max_tokens =
      std::min(defaults.max_new_tokens.value_or(kDefaultMaxTokens), options.max_new_tokens);
  if (loaded.tokenizer != nullptr) served.max_piece_bytes = LongestPiece(*loaded.tokenizer);
  served.state_bytes = loaded.states->layout().state_bytes();
  served.slot_bytes = loaded.states->layout().slot_bytes();
  served.state_slots = loaded.states->counts().total;
  served.device = loaded.device->info().kind;
  if (auto embeddings = loaded.checkpoint->Find("model.embeddings.weight"); embeddings.ok()) {
    served.weight_dtype = absl::AsciiStrToLower(std::string(SafetensorsName(embeddings->dtype)));
  }
  return served;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(const Options& options,
                                                       const ListenAddress& grpc_address,
                                                       EngineObserver* observer, const Log& log) {
  const auto begin = std::chrono::steady_clock::now();
  auto loaded = std::make_unique<LoadedModel>();

  auto device = CreateDevice({.kind = options.device, .threads = options.threads});
  if (!device.ok()) return device.status();
  loaded->device = *std::move(device);
  log.Info("device", "device opened",
           {{"kind", loaded->device->info().kind},
            {"name", loaded->device->info().name},
            {"free_bytes", loaded->device->free_memory_bytes()}});

  auto checkpoint = OpenCheckpoint(options);
  if (!checkpoint.ok()) return checkpoint.status();
  loaded->checkpoint = *std::move(checkpoint);
  const ModelConfig& config = loaded->checkpoint->config();
  if (const std::vector<std::string>& keys = loaded->checkpoint->defaults().unsupported; !keys.empty()) {
    log.Warning("generation_config",
                "generation_config.json asks for what this server does not do; it is left out",
                {{"keys", absl::StrJoin(keys, ", ")}});
  }

  // Reads every weight: beside the loading, which reads them too.
  auto fingerprint = std::async(std::launch::async, [&options, checkpoint = loaded->checkpoint] {
    return WeightsFingerprint(options, *checkpoint);
  });

  auto tokenizer = OpenTokenizer(options, config);
  if (!tokenizer.ok()) return tokenizer.status();
  loaded->tokenizer = *std::move(tokenizer);
  if (loaded->tokenizer == nullptr) {
    log.Warning("no_tokenizer", "there is no tokenizer.model; only token ids can be served");
  }

  OpenChatTemplate(options, log, *loaded);
  if (loaded->tokenizer != nullptr) {
    std::vector<TokenId> end_tokens = config.eos_token_ids;
    const std::vector<TokenId>& more = loaded->checkpoint->defaults().eos_token_ids;
    end_tokens.insert(end_tokens.end(), more.begin(), more.end());
    loaded->constraints = std::make_unique<const ConstraintCompiler>(*loaded->tokenizer, end_tokens);
  }

  EngineOptions engine_options{
      .max_batch_tokens = options.max_batch_tokens,
      .max_running = options.max_running > 0 ? options.max_running : DefaultMaxRunning(*loaded->device),
      .max_queue = options.max_queue,
      // A session's prompt is computed with up to a chunk of tokens that waited there.
      .max_prompt_tokens = options.max_prompt_tokens + kChunkTokens,
      .max_queued_tokens = options.max_queue_tokens,
      .max_new_tokens = options.max_new_tokens,
      .slow_reader_timeout = options.slow_reader_timeout};
  if (absl::Status status = engine_options.Validate(); !status.ok()) return status;
  auto model = Model::Load(loaded->checkpoint, *loaded->device, engine_options.RequiredLimits());
  if (!model.ok()) return model.status();
  loaded->model = *std::move(model);

  const int slots = options.state_slots > 0 ? options.state_slots
                                            : DefaultStateSlots(*loaded->device, StateLayout::Of(config));
  auto states = StatePool::Create(*loaded->device, config, slots, options.debug_poison);
  if (!states.ok()) return states.status();
  loaded->states = *std::move(states);

  engine_options.max_running = std::min(engine_options.max_running, slots);
  engine_options.prefix_cache_slots = PrefixCacheSlots(options, slots);
  auto engine =
      Engine::Start(*loaded->model, *loaded->states, loaded->tokenizer.get(), engine_options, observer);
  if (!engine.ok()) return engine.status();
  loaded->engine = *std::move(engine);

  // Memory that the device copies from and to at its best, where it has such.
  const HostBuffers::Memory memory{
      .allocate = [&device = *loaded->device](size_t bytes) { return device.AllocateHost(bytes); },
      .free = [&device = *loaded->device](void* bytes) { device.FreeHost(bytes); }};
  const SnapshotFormat format(
      {.weights_fingerprint = fingerprint.get(),
       .tokenizer_fingerprint = loaded->tokenizer == nullptr ? "" : loaded->tokenizer->fingerprint(),
       .numerics = Numerics(loaded->device->info(), loaded->device->activation_bytes())},
      config, HostBuffers::Create(options.session_host_bytes, memory));
  auto sessions = StartSessions(options, format, grpc_address, *loaded->engine, log);
  if (!sessions.ok()) return sessions.status();
  loaded->sessions = *std::move(sessions);

  loaded->served = Describe(options, *loaded);
  loaded->served.max_snapshot_bytes = format.max_bytes();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  log.Info("model_loaded", "model loaded",
           {{"model", loaded->served.name},
            {"type", ModelTypeName(config.type)},
            {"parameters", config.parameter_count()},
            {"dtype", loaded->served.weight_dtype},
            {"weight_bytes", loaded->model->weight_bytes()},
            {"state_slots", slots},
            {"slot_bytes", loaded->served.slot_bytes},
            {"max_running", engine_options.max_running},
            {"prefix_cache_slots", engine_options.prefix_cache_slots},
            {"seconds", seconds.count()}});
  return loaded;
}

}  // namespace efla
