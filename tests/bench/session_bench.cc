// session_bench: what sessions cost, without RPC. Each operation of the session manager, a turn's own
// overhead, the first token early and late in a conversation, and sessions at rest: the memory and disk that
// they take, and how long it takes to go on with one.
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/create_device.h"
#include "model/checkpoint.h"
#include "model/model.h"
#include "model/state_pool.h"
#include "server/engine/engine.h"
#include "server/sessions/disk_store.h"
#include "server/sessions/redis_store.h"
#include "server/sessions/session_manager.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/utc_time.h"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kIdleThreads = 8;       // that make the idle sessions
constexpr int kIdlePromptTokens = 4;  // of each of them
constexpr std::chrono::hours kNever{24};
constexpr std::chrono::minutes kTracesLive{2};  // in Redis, what deleted sessions leave

struct Options : BenchOptions {
  std::string session_dir, redis;
  int slots = 32;
  int repetitions = 12;
  int turns = 50;
  int turn_prompt = 32;
  int turn_draw = 4;
  int idle = 48;
  int idle_device = 0;
  std::optional<int> idle_host;  // absent: half of what is left, as far as host memory goes
  int resumes = 0;               // of each tier; 0: as many as repetitions
  int64_t host_bytes = int64_t{1} << 30;
};

// What is in use of malloc's memory, all of its arenas together.
int64_t AllocatedBytes() {
  const struct mallinfo2 memory = mallinfo2();
  return static_cast<int64_t>(memory.uordblks + memory.hblkhd);
}

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "session_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

void OrFail(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}
template <typename T>
T OrFail(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status());
  return *std::move(value);
}

// A new folder in `parent` (empty: where temporary files go), removed at the end with what is in it.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& parent) {
    const std::filesystem::path in =
        parent.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(parent);
    std::error_code error;
    std::filesystem::create_directories(in, error);
    path_ = (in / "session_bench.XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) {
      Fail(absl::UnavailableError(absl::StrFormat("cannot make the folder %s", path_)));
    }
  }
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string Sub(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Asks the system to forget its copies of the folder's files, so that they will be read from the disk.
void DropFromPageCache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

// Measured times by name, in the order in which the names first came.
class Figures {
 public:
  explicit Figures(std::string title) : title_(std::move(title)) {}

  void Add(const std::string& name, double seconds) {
    if (!recording) return;
    const auto found =
        std::find_if(rows_.begin(), rows_.end(), [&](const auto& row) { return row.first == name; });
    (found != rows_.end() ? found->second : rows_.emplace_back(name, std::vector<double>()).second)
        .push_back(seconds);
  }
  template <typename Work>
  auto Time(const std::string& name, const Work& work) {
    const auto begin = Clock::now();
    auto result = work();
    Add(name, SecondsSince(begin));
    return OrFail(std::move(result));
  }
  double Median(const std::string& name) const {
    for (const auto& [row, seconds] : rows_) {
      if (row == name) return Quantile(seconds, 0.5);
    }
    return 0;
  }
  void Print() const {
    absl::PrintF("\n%-48s %8s %12s %12s\n", title_, "runs", "median ms", "p99 ms");
    for (const auto& [name, seconds] : rows_) {
      absl::PrintF("%-48s %8d %12.4f %12.4f\n", name, seconds.size(), Quantile(seconds, 0.5) * 1e3,
                   Quantile(seconds, 0.99) * 1e3);
    }
  }
  Json ToJson() const {
    Json json = Json::object();
    for (const auto& [name, seconds] : rows_) {
      json[name] = {{"runs", seconds.size()},
                    {"median_seconds", Quantile(seconds, 0.5)},
                    {"p99_seconds", Quantile(seconds, 0.99)}};
    }
    return json;
  }

  bool recording = true;  // false: what comes is a warm-up

 private:
  const std::string title_;
  std::vector<std::pair<std::string, std::vector<double>>> rows_;
};

// Waits for one call's end and notes when its first token came.
class Waiter {
 public:
  static ReadyCallback Ready(const std::shared_ptr<Waiter>& waiter) {
    return [waiter](Generation& generation) { waiter->Take(generation); };
  }
  Clock::time_point AwaitEnd() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return end_.has_value(); });
    OrFail(*end_);
    return first_token_;
  }

 private:
  void Take(Generation& generation) {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    while (const std::optional<Event> event = generation.TakeEvent()) {
      const auto* delta = std::get_if<DeltaEvent>(&*event);
      const auto* finished = std::get_if<FinishedEvent>(&*event);
      const bool has_token = (delta && !delta->tokens.empty()) || (finished && !finished->tokens.empty());
      if (has_token && first_token_ == Clock::time_point()) first_token_ = now;
    }
    if ((end_ = generation.TakeEnd())) ended_.notify_all();
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable ended_;
  Clock::time_point first_token_;
  std::optional<absl::Status> end_;
};

struct TurnRequest {
  std::string session_id;
  int prompt = 1;  // new tokens, at random
  int draw = 1;
  Durability durability = Durability::kNone;
  bool commit = true;  // else the session is left as it was
};

struct TurnTimes {
  double begin = 0, prepare = 0, commit = 0;  // seconds
  double first_token = 0;                     // since the turn's begin
};

SessionChange ChangeOf(const std::string& id, Durability durability = Durability::kNone) {
  SessionChange change;
  change.session_id = id;
  change.durability = durability;
  return change;
}

class SessionBench {
 public:
  SessionBench(Device& device, Engine& engine, const ModelConfig& config, const Options& options)
      : engine_(engine),
        config_(config),
        options_(options),
        buffers_(HostBuffers::Create(
            options.host_bytes, {.allocate = [&device](size_t bytes) { return device.AllocateHost(bytes); },
                                 .free = [&device](void* memory) { device.FreeHost(memory); }})) {}

  std::unique_ptr<DiskStore> OpenDisk(const std::string& folder) const {
    return OrFail(DiskStore::Open({.folder = folder, .buffers = buffers_}));
  }

  // One manager at a time: it is what the engine asks for slots.
  std::unique_ptr<SessionManager> StartManager(std::unique_ptr<SessionStore> disk,
                                               std::unique_ptr<SessionStore> shared,
                                               const std::string& replica) const {
    SessionOptions sessions;
    sessions.max_sessions = options_.idle + 10'000;
    sessions.host_bytes = options_.host_bytes;
    sessions.device_idle = sessions.host_idle = kNever;
    sessions.slot_wait = std::chrono::minutes(1);
    sessions.replica = sessions.address = replica;
    const SnapshotIdentity identity{.weights_fingerprint = std::string(64, '0'),
                                    .tokenizer_fingerprint = "",
                                    .numerics = "session_bench"};
    return OrFail(SessionManager::Start(engine_, SnapshotFormat(identity, config_, buffers_), std::move(disk),
                                        std::move(shared), sessions));
  }

  // Any thread.
  TurnTimes Turn(SessionManager& manager, const TurnRequest& turn) {
    std::vector<TokenId> prompt = RandomTokens(turn.prompt);
    GenerationRequest request;
    request.sampling.temperature = 0;
    request.stopping.max_tokens = turn.draw;
    request.stopping.ignore_eos = true;
    request.use_prefix_cache = false;
    const auto waiter = std::make_shared<Waiter>();

    TurnTimes times;
    const auto begin = Clock::now();
    SessionManager::Begun begun = OrFail(
        manager.BeginTurn(ChangeOf(turn.session_id, turn.durability), OnCancel::kRollback, /*create=*/true));
    times.begin = SecondsSince(begin);
    OrFail(begun.turn->Prepare(std::move(prompt), /*generates=*/true, request));
    times.prepare = SecondsSince(begin) - times.begin;
    const std::shared_ptr<Generation> generation =
        OrFail(engine_.Submit(std::move(request), Waiter::Ready(waiter)));
    times.first_token = std::chrono::duration<double>(waiter->AwaitEnd() - begin).count();
    if (!turn.commit) return times;
    std::optional<FinalState> state = generation->TakeFinalState();
    const auto end = Clock::now();
    OrFail(begun.turn->Commit(std::move(state), /*cancelled=*/false, ""));
    times.commit = SecondsSince(end);
    return times;
  }

  // A disk only. One state at a time is on the move, so each begins with a session whose head is all it has.
  void Operations(SessionManager& manager, Figures& figures) {
    const std::string base = "base";
    Turn(manager, {.session_id = base, .prompt = options_.turn_prompt});
    for (int run = -1; run < options_.repetitions; ++run) {
      figures.recording = run >= 0;
      const TurnTimes in_memory = Turn(manager, {.session_id = base});
      figures.Add("turn: begin", in_memory.begin);
      figures.Add("turn: prepare, state on the device", in_memory.prepare);
      figures.Add("turn: commit, in memory", in_memory.commit);
      const TurnTimes durable = Turn(manager, {.session_id = base, .durability = Durability::kSync});
      figures.Add("turn: commit, on the disk", durable.commit);

      figures.Time("mark", [&] { return manager.Mark(ChangeOf(base), "mark"); });
      figures.Time("rewind to a mark, nothing done since",
                   [&] { return manager.Rewind(ChangeOf(base), "mark", std::nullopt); });
      Turn(manager, {.session_id = base});
      figures.Time("rewind by one turn", [&] { return manager.Rewind(ChangeOf(base), "", std::nullopt); });

      const std::vector<SessionInfo> children =
          figures.Time("fork", [&] { return manager.Fork(ChangeOf(base), {""}, ""); });
      const std::string child = children[0].session_id;
      AwaitDurable(manager, child);
      figures.Add("first token: parent, after the fork",
                  Turn(manager, {.session_id = base, .commit = false}).first_token);
      figures.Add("first token: child, its first step", Turn(manager, {.session_id = child}).first_token);
      figures.Time("rewind of the child by its first turn",
                   [&] { return manager.Rewind(ChangeOf(child), "", std::nullopt); });
      OrFail(manager.Delete(ChangeOf(child)));

      const std::string host = Named("host", run), disk = Named("disk", run), copy = Named("copy", run);
      Turn(manager, {.session_id = host});
      const HostBuffer snapshot =
          figures.Time("export, state on the device", [&] { return manager.Export(host, ""); });
      snapshot_bytes_ = static_cast<int64_t>(snapshot.size());
      figures.Time("export, state in host memory", [&] { return manager.Export(host, ""); });
      figures.Time("import", [&] {
        return manager.Import(copy, std::chrono::milliseconds(0), snapshot, "", Durability::kNone);
      });
      OrFail(manager.Delete(ChangeOf(copy)));
      OrFail(manager.Delete(ChangeOf(host)));

      Turn(manager, {.session_id = host});
      figures.Time("demote: device to host", [&] { return manager.Move(host, SessionTier::kHost); });
      figures.Time("promote: host to device", [&] { return manager.Move(host, SessionTier::kDevice); });
      figures.Time("demote: device to host, a copy is there",
                   [&] { return manager.Move(host, SessionTier::kHost); });
      OrFail(manager.Delete(ChangeOf(host)));

      Turn(manager, {.session_id = disk});
      figures.Time("demote: device to disk, synced", [&] { return manager.Move(disk, SessionTier::kDisk); });
      figures.Time("promote: disk to device, from the page cache",
                   [&] { return manager.Move(disk, SessionTier::kDevice); });
      OrFail(manager.Delete(ChangeOf(disk)));
    }
  }

  // The first token of turns 1, 2 and the last of a conversation, each with as many new tokens, measured in
  // turns so that drift hits all alike. From the second on, the token drawn last waits to be fed too: a step
  // of its own.
  Json Conversation(SessionManager& manager, Figures& figures) {
    const TurnRequest whole = {.session_id = "conversation",
                               .prompt = options_.turn_prompt,
                               .draw = options_.turn_draw,
                               .durability = Durability::kAsync};
    for (int turn = 1; turn < options_.turns; ++turn) Turn(manager, whole);
    TurnRequest second = whole;
    second.session_id = "begun";
    Turn(manager, second);
    AwaitDurable(manager, whole.session_id);
    AwaitDurable(manager, second.session_id);
    const std::string names[] = {"turn 1", "turn 2", absl::StrFormat("turn %d", options_.turns)};
    const std::string sessions[] = {"", "begun", "conversation"};
    for (int run = -1; run < options_.repetitions; ++run) {
      figures.recording = run >= 0;
      for (int i = 0; i < 3; ++i) {
        const std::string id = sessions[i].empty() ? Named("new", run) : sessions[i];
        const TurnTimes times =
            Turn(manager, {.session_id = id, .prompt = options_.turn_prompt, .commit = false});
        figures.Add(names[i], times.first_token);
      }
    }
    const int64_t tokens = OrFail(manager.Get(whole.session_id)).tokens;
    return {{"turns", options_.turns},
            {"prompt_tokens_a_turn", options_.turn_prompt},
            {"drawn_tokens_a_turn", options_.turn_draw},
            {"tokens_before_the_last_turn", tokens},
            {"ratio_of_last_to_first", figures.Median(names[2]) / figures.Median(names[0])},
            {"ratio_of_last_to_second", figures.Median(names[2]) / figures.Median(names[1])},
            {"time_to_first_token", figures.ToJson()}};
  }

  // Sessions at rest: some on the device, some in host memory, the others on the disk only.
  Json Idle(const std::string& folder, Figures& figures) {
    auto opened = OpenDisk(folder);
    const DiskStore& disk = *opened;
    const std::unique_ptr<SessionManager> manager = StartManager(std::move(opened), nullptr, "");
    const int64_t most_in_host = options_.host_bytes * 9 / 10 / state_bytes();
    const int on_device = options_.idle_device;
    const int in_host = options_.idle_host.value_or(
        static_cast<int>(std::min<int64_t>((options_.idle - on_device) / 2, most_in_host)));
    const int on_disk = options_.idle - on_device - in_host;
    CheckSplit(folder, on_device, in_host, on_disk);

    // Memory that many turns at once need, once and for all, is not a session's.
    MakeIdle(*manager, "warm-up", 2 * kIdleThreads, SessionTier::kDisk);
    for (int i = 0; i < 2 * kIdleThreads; ++i) OrFail(manager->Delete(ChangeOf(Named("warm-up", i))));
    const int64_t bytes_before = disk.stats().bytes;

    const int64_t resident_before = ProcessBytes("VmRSS:"), allocated_before = BytesInUse();
    auto begin = Clock::now();
    MakeIdle(*manager, "disk", on_disk, SessionTier::kDisk);
    const double disk_seconds = SecondsSince(begin);
    const int64_t allocated_disk = BytesInUse(), disk_bytes = disk.stats().bytes - bytes_before;
    begin = Clock::now();
    MakeIdle(*manager, "host", in_host, SessionTier::kHost);
    const double host_seconds = SecondsSince(begin);
    const int64_t allocated_host = BytesInUse();
    const SessionManager::Stats with_host = manager->stats();
    MakeIdle(*manager, "device", on_device, SessionTier::kDevice);
    const int64_t allocated_device = BytesInUse(), resident_after = ProcessBytes("VmRSS:");
    const SessionManager::Stats stats = manager->stats();
    // A device's pinned memory is none of malloc's.
    const int64_t host_memory = std::max(allocated_host - allocated_disk, with_host.host_bytes);

    DropFromPageCache(folder);
    std::mt19937 random(1);
    // A resumed session is left as it was, but its state stays where it has been lifted to: no session twice.
    const auto resume = [&](const std::string& from, int count) {
      std::vector<int> order(static_cast<size_t>(count));
      for (int i = 0; i < count; ++i) order[static_cast<size_t>(i)] = i;
      std::shuffle(order.begin(), order.end(), random);
      const int most = options_.resumes > 0 ? options_.resumes : options_.repetitions;
      if (count > most) order.resize(static_cast<size_t>(most));
      for (const int number : order) {
        const TurnRequest turn = {.session_id = Named(from, number), .commit = false};
        const TurnTimes times = Turn(*manager, turn);
        figures.Add("from the " + from + ": state on the device again", times.begin + times.prepare);
        figures.Add("from the " + from + ": first token", times.first_token);
        if (on_device == 0) figures.Add("from the device: first token", Turn(*manager, turn).first_token);
      }
    };
    resume("device", on_device);
    resume("host", in_host);
    resume("disk", on_disk);

    const auto each = [](int64_t bytes, int count) { return count > 0 ? bytes / count : 0; };
    return {{"sessions", options_.idle},
            {"on_device", on_device},
            {"in_host_memory", in_host},
            {"on_disk", on_disk},
            {"resident_bytes_before", resident_before},
            {"resident_bytes_after", resident_after},
            {"memory_bytes_a_session_on_disk", each(allocated_disk - allocated_before, on_disk)},
            {"memory_bytes_a_session_in_host_memory", each(host_memory, in_host)},
            {"memory_bytes_a_session_on_device", each(allocated_device - allocated_host, on_device)},
            {"host_state_bytes", stats.host_bytes},
            {"disk_bytes", disk_bytes},
            {"disk_bytes_a_session", each(disk_bytes, on_disk)},
            {"disk_sessions_made_a_second", on_disk / disk_seconds},
            {"host_sessions_made_a_second", in_host > 0 ? in_host / host_seconds : 0},
            {"resume", figures.ToJson()}};
  }

  // A session that one server leaves in Redis and another one goes on with.
  void Redis(const RedisAddress& address, Figures& figures) {
    RedisStoreOptions store;
    store.key_prefix = absl::StrFormat("session_bench-%d:", getpid());
    store.unnamed_grace = store.tombstone_ttl = kTracesLive;
    store.buffers = buffers_;
    const auto connect = [&] {
      auto redis = OrFail(RedisStore::Create(address, store));
      OrFail(redis->Ping());
      return redis;
    };
    std::unique_ptr<SessionManager> manager = StartManager(nullptr, connect(), "one");
    for (int run = -1; run < options_.repetitions; ++run) {
      figures.recording = run >= 0;
      const std::string id = Named("session", run), synced = Named("synced", run);
      figures.Add("turn: commit, in Redis",
                  Turn(*manager, {.session_id = synced, .durability = Durability::kSync}).commit);
      OrFail(manager->Delete(ChangeOf(synced)));
      Turn(*manager, {.session_id = id});
      figures.Time("push: device to Redis", [&] { return manager->Move(id, SessionTier::kShared); });
    }
    if (const auto lost = manager->Drain(std::chrono::seconds(30)); !lost.empty()) {
      Fail(absl::UnavailableError(absl::StrFormat("%d sessions could not be written to Redis", lost.size())));
    }
    manager.reset();
    manager = StartManager(nullptr, connect(), "two");
    for (int run = -1; run < options_.repetitions; ++run) {
      figures.recording = run >= 0;
      const std::string id = Named("session", run);
      const TurnTimes times = Turn(*manager, {.session_id = id, .commit = false});
      figures.Add("claim by another server", times.begin);
      figures.Add("load: Redis to device", times.prepare);
      figures.Add("first token on the other server", times.first_token);
      OrFail(manager->Delete(ChangeOf(id)));
    }
  }

  // Writes every slot once, so that its memory is there from the beginning.
  void Touch(StatePool& states) const {
    const std::vector<std::byte> zeros(static_cast<size_t>(state_bytes()));
    std::vector<SlotHandle> slots;
    while (states.counts().free > 0) {
      slots.push_back(OrFail(states.Acquire()));
      OrFail(states.CopyIn(slots.back(), zeros));
    }
    for (const SlotHandle slot : slots) states.Release(slot);
  }

  int64_t state_bytes() const { return StateLayout::Of(config_).state_bytes(); }
  int64_t snapshot_bytes() const { return snapshot_bytes_; }

 private:
  // Buffers that wait to be used again are nobody's; those of the device are not malloc's.
  int64_t BytesInUse() const {
    const HostBuffers::Stats stats = buffers_->stats();
    return AllocatedBytes() + stats.foreign_bytes - stats.idle_bytes;
  }
  static std::string Named(const std::string& kind, int number) {
    return absl::StrFormat("%s-%d", kind, number);
  }
  std::vector<TokenId> RandomTokens(int count) {
    std::mt19937 random(++seed_);
    std::uniform_int_distribution<TokenId> token(3, static_cast<TokenId>(config_.vocab_size) - 1);
    std::vector<TokenId> tokens(static_cast<size_t>(count));
    for (TokenId& id : tokens) id = token(random);
    return tokens;
  }
  // What the manager writes in the background is not to disturb what is measured next.
  static void AwaitDurable(SessionManager& manager, const std::string& id) {
    for (;;) {
      const SessionInfo info = OrFail(manager.Get(id));
      if (info.durable_revision == info.revision) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Before hours are spent on sessions for which there is no room.
  void CheckSplit(const std::string& folder, int on_device, int in_host, int on_disk) const {
    const auto refuse = [](const std::string& why) { Fail(absl::InvalidArgumentError(why)); };
    if (on_disk < 0) {
      refuse(absl::StrFormat("--idle-device %d and --idle-host %d are more than --idle %d", on_device,
                             in_host, options_.idle));
    }
    // Half of the slots stay with the turns that make and resume them.
    if (on_device > options_.slots / 2) {
      refuse(absl::StrFormat("--idle-device %d needs %d --slots; there are %d", on_device, 2 * on_device,
                             options_.slots));
    }
    const int64_t host_bytes = (in_host + 2 * kIdleThreads) * state_bytes();
    if (host_bytes > options_.host_bytes) {
      refuse(absl::StrFormat("--idle-host %d needs --host-bytes %d; it is %d", in_host, host_bytes,
                             options_.host_bytes));
    }
    const auto free = static_cast<int64_t>(std::filesystem::space(folder).available);
    const int64_t disk_bytes = (on_disk + 2 * kIdleThreads) * (snapshot_bytes_ + (64 << 10));
    if (disk_bytes > free) {
      refuse(absl::StrFormat("%d sessions on the disk need %d bytes; %s has %d", on_disk, disk_bytes, folder,
                             free));
    }
  }
  void MakeIdle(SessionManager& manager, const std::string& kind, int count, SessionTier tier) {
    std::atomic<int> next{0};
    std::vector<std::jthread> threads;
    for (int i = 0; i < kIdleThreads; ++i) {
      threads.emplace_back([&] {
        for (int number = next++; number < count; number = next++) {
          const std::string id = Named(kind, number);
          Turn(manager, {.session_id = id, .prompt = kIdlePromptTokens});
          OrFail(manager.Move(id, tier));
        }
      });
    }
  }

  Engine& engine_;
  const ModelConfig& config_;
  const Options& options_;
  const std::shared_ptr<HostBuffers> buffers_;
  std::atomic<uint32_t> seed_{0};
  int64_t snapshot_bytes_ = 0;
};

DType ParseDType(const std::string& name) {
  if (name == "f32") return DType::kF32;
  return name == "f16" ? DType::kF16 : DType::kBF16;
}

int RunBench(const Options& options, const std::string& command) {
  const auto start = Clock::now();
  const std::shared_ptr<const Checkpoint> checkpoint =
      options.preset.empty() ? OrFail(Checkpoint::Open(options.checkpoint))
                             : OrFail(Checkpoint::Random(OrFail(ModelConfig::Preset(options.preset)), 1,
                                                         ParseDType(options.dtype)));
  const std::unique_ptr<Device> device =
      OrFail(CreateDevice({options.device, options.threads, options.ordinal}));
  const EngineOptions engine_options;
  const std::unique_ptr<Model> model =
      OrFail(Model::Load(checkpoint, *device, engine_options.RequiredLimits()));
  const std::unique_ptr<StatePool> states =
      OrFail(StatePool::Create(*device, model->config(), options.slots, /*poison=*/false));
  const std::unique_ptr<Engine> engine =
      OrFail(Engine::Start(*model, *states, /*tokenizer=*/nullptr, engine_options, /*observer=*/nullptr));
  SessionBench bench(*device, *engine, model->config(), options);
  bench.Touch(*states);
  static const ScratchFolder scratch(options.session_dir);  // static: Fail removes it too

  Json json;
  json["command"] = command;
  json["date"] = UtcTime();
  double load_average = 0;
  if (getloadavg(&load_average, 1) == 1) json["load_average_at_start"] = load_average;
  json["device"] = {{"kind", device->info().kind}, {"name", device->info().name}};
  json["model"] = {{"source", options.preset.empty() ? options.checkpoint : "preset " + options.preset},
                   {"parameters", model->config().parameter_count()},
                   {"state_bytes", bench.state_bytes()}};
  absl::PrintF("device     %s: %s; load average at the start %.1f\n", device->info().kind,
               device->info().name, load_average);
  absl::PrintF("model      %s, %.1f M parameters; a state is %.2f MB\n",
               json["model"]["source"].get<std::string>(),
               static_cast<double>(model->config().parameter_count()) / 1e6,
               static_cast<double>(bench.state_bytes()) / 1e6);
  std::fflush(stdout);

  {
    const std::unique_ptr<SessionManager> manager =
        bench.StartManager(bench.OpenDisk(scratch.Sub("operations")), nullptr, "");
    Figures operations("operation");
    bench.Operations(*manager, operations);
    operations.Print();
    absl::PrintF("a snapshot is %.2f MB\n", static_cast<double>(bench.snapshot_bytes()) / 1e6);
    json["snapshot_bytes"] = bench.snapshot_bytes();
    json["operations"] = operations.ToJson();

    Figures first_tokens("first token of a turn");
    const Json conversation = bench.Conversation(*manager, first_tokens);
    first_tokens.Print();
    absl::PrintF(
        "%d + %d tokens a turn, %d tokens before turn %d; turn %d takes %.3f of turn 1, %.3f of turn 2\n",
        options.turn_prompt, options.turn_draw, conversation["tokens_before_the_last_turn"].get<int64_t>(),
        options.turns, options.turns, conversation["ratio_of_last_to_first"].get<double>(),
        conversation["ratio_of_last_to_second"].get<double>());
    json["conversation"] = conversation;
  }
  std::fflush(stdout);

  if (!options.redis.empty()) {
    Figures redis("Redis");
    bench.Redis(OrFail(RedisAddress::Parse(options.redis)), redis);
    redis.Print();
    json["redis"] = redis.ToJson();
    std::fflush(stdout);
  }

  if (options.idle > 0) {
    Figures resume("going on with an idle session");
    const Json idle = bench.Idle(scratch.Sub("idle"), resume);
    const auto bytes = [&](const char* name) { return static_cast<double>(idle[name].get<int64_t>()); };
    absl::PrintF(
        "\nidle       %d sessions: %d on the device, %d in host memory, %d on the disk alone; resident %.1f "
        "MB, "
        "before %.1f MB\n",
        options.idle, idle["on_device"].get<int>(), idle["in_host_memory"].get<int>(),
        idle["on_disk"].get<int>(), bytes("resident_bytes_after") / 1e6,
        bytes("resident_bytes_before") / 1e6);
    absl::PrintF(
        "           one in host memory takes %.3f MB; one on the disk %.3f MB there and %.1f KB of memory\n",
        bytes("memory_bytes_a_session_in_host_memory") / 1e6, bytes("disk_bytes_a_session") / 1e6,
        bytes("memory_bytes_a_session_on_disk") / 1e3);
    absl::PrintF("           made at %.0f (host), %.0f (disk) a second by %d threads\n",
                 idle["host_sessions_made_a_second"].get<double>(),
                 idle["disk_sessions_made_a_second"].get<double>(), kIdleThreads);
    resume.Print();
    json["idle"] = idle;
  }

  json["total_seconds"] = SecondsSince(start);
  absl::PrintF("\ntotal      %.1f s\n", SecondsSince(start));
  if (!WriteJson(options.json_file, json)) Fail(absl::UnavailableError("cannot write " + options.json_file));
  return 0;
}

}  // namespace
}  // namespace efla

int main(int argc, char** argv) {
  efla::Options options;
  CLI::App app{"Measures what sessions cost, without RPC."};
  efla::AddModelOptions(app, options);
  app.add_option("--session-dir", options.session_dir,
                 "Where the sessions' own folder is made, and removed at the end [where temporary files go]");
  app.add_option("--redis", options.redis,
                 "redis://[[user]:password@]host[:port][/database]; measures it too");
  app.add_option("--slots", options.slots, "State slots on the device")
      ->check(CLI::Range(16, 1 << 16))
      ->capture_default_str();
  app.add_option("--host-bytes", options.host_bytes, "Host memory for states, such as 4GiB")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--repetitions", options.repetitions, "Runs of each operation")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--turns", options.turns, "Turns of the conversation")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--turn-prompt", options.turn_prompt, "New prompt tokens a turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--turn-draw", options.turn_draw, "Tokens drawn a turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--idle", options.idle, "Idle sessions; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--idle-device", options.idle_device, "Of these, on the device; at most half of --slots")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option(
         "--idle-host", options.idle_host,
         "Of these, in host memory; the rest is on the disk [half of the rest, as far as memory goes]")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--resumes", options.resumes, "Idle sessions of each tier to go on with; 0: --repetitions")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  efla::AddJsonOption(app, options);
  CLI11_PARSE(app, argc, argv);
  if (options.checkpoint.empty() && options.preset.empty()) {
    std::fprintf(stderr, "session_bench: give --checkpoint DIR or --preset NAME; --help lists all flags\n");
    return 2;
  }
  std::string command = "session_bench";  // without where things lie
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string name = argument.substr(0, argument.find('='));
    if (name != "--json" && name != "--session-dir" && name != "--redis") {
      command += " " + argument;
    } else if (name == argument) {
      ++i;
    }
  }
  return efla::RunBench(options, command);
}
