// An engine over a small model on the CPU, and readers of its generations.
#ifndef EFLA_TESTS_SERVER_ENGINE_RIG_H_
#define EFLA_TESTS_SERVER_ENGINE_RIG_H_

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "model/tokenizer.h"
#include "server/engine/engine.h"
#include "tests/server/test_device.h"
#include "tests/source_path.h"

namespace efla {

// A clock that stands still until it is moved.
class ManualClock {
 public:
  std::function<Clock::time_point()> function() {
    return [this] { return now(); };
  }
  Clock::time_point now() const { return Clock::time_point(Clock::duration(ticks_.load())); }
  void Advance(Clock::duration by) { ticks_ += by.count(); }

 private:
  std::atomic<Clock::rep> ticks_{Clock::duration(std::chrono::hours(1)).count()};
};

// Everything one generation gave.
struct Result {
  std::optional<AcceptedEvent> accepted;
  std::vector<ProgressEvent> progress;
  std::vector<DeltaEvent> deltas;
  std::optional<FinishedEvent> finished;
  absl::Status status = absl::UnknownError("not ended");
  std::string text;                 // deltas and finished joined
  std::vector<TokenOutput> tokens;  // likewise

  std::vector<TokenId> ids() const {
    std::vector<TokenId> ids;
    for (const TokenOutput& token : tokens) ids.push_back(token.token);
    return ids;
  }
};

// Tokens and log-probabilities as bits.
struct Bits {
  std::vector<std::pair<TokenId, uint32_t>> drawn, scored;
  friend bool operator==(const Bits&, const Bits&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Bits& bits) {
    for (const auto* list : {&bits.drawn, &bits.scored}) {
      for (const auto& [token, logprob] : *list) out << token << ":" << std::bit_cast<float>(logprob) << " ";
      out << "| ";
    }
    return out;
  }
};

inline void AddBits(const std::vector<TokenOutput>& from, std::vector<std::pair<TokenId, uint32_t>>& to) {
  for (const TokenOutput& token : from) {
    to.emplace_back(token.token, std::bit_cast<uint32_t>(token.logprob));
    for (const auto& [id, logprob] : token.top) to.emplace_back(id, std::bit_cast<uint32_t>(logprob));
  }
}

inline Bits BitsOf(const Result& result) {
  EXPECT_TRUE(result.status.ok()) << result.status;
  Bits bits;
  AddBits(result.tokens, bits.drawn);
  if (result.finished) AddBits(result.finished->prompt_logprobs, bits.scored);
  return bits;
}

// A call with keep_state that has ended, and what it left.
struct Kept {
  Result result;
  std::optional<FinalState> state;
};

// Takes a generation's events in its ready callback, as a reactor does. Shared, for the callback may outlive
// the test's interest.
class Reader : public std::enable_shared_from_this<Reader> {
 public:
  // A paused reader takes nothing until Resume.
  static std::shared_ptr<Reader> Make(bool paused = false) {
    auto reader = std::make_shared<Reader>();
    reader->paused_ = paused;
    return reader;
  }
  ReadyCallback ready() {
    return [self = shared_from_this()](Generation& generation) { self->Take(generation); };
  }
  // The next Engine::Deliver takes what waits.
  void Resume() { paused_ = false; }
  Result Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
    return result_;
  }
  // Waits until so many tokens have been read.
  void AwaitTokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || result_.tokens.size() >= count; });
  }
  bool ended() const {
    const std::lock_guard lock(mutex_);
    return ended_;
  }
  int calls() const { return calls_; }

 private:
  void Take(Generation& generation) {
    EXPECT_FALSE(inside_.exchange(true)) << "ready was called twice at once";
    ++calls_;
    EXPECT_FALSE(ended()) << "ready was called after the end was taken";
    while (!paused_) {
      std::optional<Event> event = generation.TakeEvent();
      if (!event) break;
      const std::lock_guard lock(mutex_);
      EXPECT_FALSE(result_.finished) << "an event after the finished event";
      std::visit([this](auto&& e) { Add(std::move(e)); }, *std::move(event));
      changed_.notify_all();
    }
    if (!paused_) {
      if (std::optional<absl::Status> status = generation.TakeEnd()) {
        const std::lock_guard lock(mutex_);
        result_.status = *std::move(status);
        EXPECT_EQ(result_.status.ok(), result_.finished.has_value());
        ended_ = true;
        changed_.notify_all();
      }
    }
    inside_ = false;
  }
  void Add(AcceptedEvent&& event) {
    EXPECT_FALSE(result_.accepted);
    result_.accepted = event;
  }
  void Add(ProgressEvent&& event) {
    EXPECT_TRUE(result_.accepted && result_.deltas.empty());
    result_.progress.push_back(event);
  }
  void Add(DeltaEvent&& event) {
    EXPECT_TRUE(result_.accepted);
    result_.text += event.text;
    result_.tokens.insert(result_.tokens.end(), event.tokens.begin(), event.tokens.end());
    result_.deltas.push_back(std::move(event));
  }
  void Add(FinishedEvent&& event) {
    result_.text += event.text;
    result_.tokens.insert(result_.tokens.end(), event.tokens.begin(), event.tokens.end());
    result_.finished = std::move(event);
  }

  std::atomic<bool> paused_{false}, inside_{false};
  std::atomic<int> calls_{0};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Result result_;
  bool ended_ = false;
};

// Counts what the engine reports.
class Counter : public EngineObserver {
 public:
  void OnStep(const Step& step) override {
    ++steps;
    prefill_tokens += step.prefill_tokens;
    decode_rows += step.decode_rows;
    EXPECT_GE(step.seconds, 0);
    EXPECT_GE(step.host_seconds, 0);
  }
  void OnFirstToken(double seconds) override {
    ++first_tokens;
    EXPECT_GE(seconds, 0);
  }
  void OnTokenGap(double seconds) override {
    ++gaps;
    EXPECT_GE(seconds, 0);
  }
  void OnEnd(Outcome outcome, const Usage& usage, const Timing& timing) override {
    ++ends[static_cast<size_t>(outcome)];
    completion_tokens += usage.completion_tokens;
    if (timing.prefill_us > 0) ++timed_prompts;
    EXPECT_LE(timing.queue_us + timing.prefill_us, timing.total_us);
  }
  int ended(Outcome outcome) const { return ends[static_cast<size_t>(outcome)]; }
  int all_ends() const {
    int sum = 0;
    for (const auto& count : ends) sum += count;
    return sum;
  }

  std::atomic<int64_t> steps{0}, prefill_tokens{0}, decode_rows{0}, first_tokens{0}, gaps{0},
      completion_tokens{0}, timed_prompts{0};  // the last: ends that tell how long the prompt took
  std::array<std::atomic<int>, 8> ends{};
};

struct RigOptions {
  std::string checkpoint = "tests/golden/efla_basic";
  bool tokenizer = false;  // the demo's
  int slots = 4;
  EngineOptions engine = {.max_batch_tokens = 128, .max_running = 64, .max_queue = 64};
};

class EngineRig {
 public:
  explicit EngineRig(const RigOptions& options) : EngineRig(Open(options.checkpoint), options) {}
  EngineRig(std::shared_ptr<const Checkpoint> checkpoint, const RigOptions& options)
      : model(Model::Load(std::move(checkpoint), device, options.engine.RequiredLimits()).value()),
        pool(StatePool::Create(device, model->config(), options.slots, /*poison=*/true).value()) {
    if (options.tokenizer) tokenizer = Tokenizer::Open(SourcePath("model/demo/tokenizer.model")).value();
    engine = Engine::Start(*model, *pool, tokenizer.get(), options.engine, &counter).value();
  }
  // Nothing may be left in the pool when the engine is gone.
  ~EngineRig() {
    device.Open();
    engine.reset();
    EXPECT_EQ(pool->counts().free, pool->counts().total);
    EXPECT_TRUE(pool->CheckInvariants(/*read_device=*/true).ok()) << pool->CheckInvariants(true);
    EXPECT_EQ(counter.all_ends(), submitted);
  }

  static std::shared_ptr<const Checkpoint> Open(const std::string& checkpoint) {
    return Checkpoint::Open(SourcePath(checkpoint)).value();
  }

  absl::StatusOr<std::shared_ptr<Generation>> TrySubmit(GenerationRequest request, ReadyCallback ready) {
    ++submitted;
    return engine->Submit(std::move(request), std::move(ready));
  }
  std::shared_ptr<Generation> Submit(GenerationRequest request, const std::shared_ptr<Reader>& reader) {
    absl::StatusOr<std::shared_ptr<Generation>> generation = TrySubmit(std::move(request), reader->ready());
    EXPECT_TRUE(generation.ok()) << generation.status();
    return *generation;
  }
  Result Run(GenerationRequest request) {
    const std::shared_ptr<Reader> reader = Reader::Make();
    const std::shared_ptr<Generation> generation = Submit(std::move(request), reader);
    return reader->Wait();
  }
  Kept RunKept(GenerationRequest request) {
    request.keep_state = true;
    const std::shared_ptr<Reader> reader = Reader::Make();
    const std::shared_ptr<Generation> generation = Submit(std::move(request), reader);
    Result result = reader->Wait();
    return {std::move(result), generation->TakeFinalState()};
  }
  std::vector<std::byte> BytesOf(const ResidentState& state) {
    std::vector<std::byte> bytes(static_cast<size_t>(pool->layout().state_bytes()));
    EXPECT_TRUE(engine->CopyOut(state, bytes).ok());
    return bytes;
  }
  absl::Status Refusal(GenerationRequest request) {
    const std::shared_ptr<Reader> reader = Reader::Make();
    absl::Status status = TrySubmit(std::move(request), reader->ready()).status();
    EXPECT_EQ(reader->calls(), 0);
    return status;
  }

  TestDevice device;
  std::unique_ptr<Model> model;
  std::unique_ptr<StatePool> pool;
  std::unique_ptr<const Tokenizer> tokenizer;
  Counter counter;
  std::atomic<int> submitted{0};
  std::unique_ptr<Engine> engine;
};

// A greedy request that goes on for max_tokens.
inline GenerationRequest Greedy(std::vector<TokenId> prompt, int64_t max_tokens) {
  GenerationRequest request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.stopping.max_tokens = max_tokens;
  request.stopping.ignore_eos = true;
  return request;
}

// A prompt of ids below 256, all different for different seeds.
inline std::vector<TokenId> SomePrompt(int length, uint32_t seed = 1) {
  std::vector<TokenId> prompt;
  uint32_t state = seed * 2654435761u + 12345;
  for (int i = 0; i < length; ++i) {
    state = state * 1664525u + 1013904223u;
    prompt.push_back(static_cast<TokenId>((state >> 16) % 253 + 3));
  }
  return prompt;
}

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_ENGINE_RIG_H_
