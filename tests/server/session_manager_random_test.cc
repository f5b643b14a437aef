// Thousands of random operations from several threads, with stores that fail, replicas that are killed and
// clients that vanish. What must hold: every session is what its own operations made of it, token for token;
// equal histories give equal bits; what was acknowledged as durable survives; nothing stays in the pool.
//
// EFLA_SESSION_OPERATIONS sets the number of operations, EFLA_SESSION_SEED the seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kThreads = 4;
constexpr int kRounds = 4;  // with a restart after each
constexpr int kSlots = 6;
constexpr int kSessionsAThread = 8;

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoll(value) : otherwise;
}

// A context's tokens; drawn ones are told from appended ones.
using Content = std::vector<int32_t>;
constexpr int32_t kDrawn = 1 << 16;

void AddAppended(Content& content, const std::vector<TokenId>& tokens) {
  content.insert(content.end(), tokens.begin(), tokens.end());
}
void AddDrawn(Content& content, const std::vector<TokenId>& tokens) {
  for (const TokenId token : tokens) content.push_back(token + kDrawn);
}
std::vector<TokenId> TailOf(const Content& content) {
  std::vector<TokenId> tail;
  const int64_t kept = std::min<int64_t>(std::ssize(content), ContextTokens::kMaxTail);
  for (auto next = content.end() - kept; next != content.end(); ++next) tail.push_back(*next & (kDrawn - 1));
  return tail;
}

// What is drawn after a content, whoever draws it and wherever its state has been.
class Oracle {
 public:
  void Check(const Content& before, const Bits& bits) {
    const std::lock_guard lock(mutex_);
    if (known_.size() > 20'000) return;
    const auto [known, is_new] = known_.try_emplace(before, bits);
    if (is_new) return;
    ++repetitions_;
    const size_t common = std::min(known->second.drawn.size(), bits.drawn.size());
    EXPECT_TRUE(std::equal(bits.drawn.begin(), bits.drawn.begin() + static_cast<int64_t>(common),
                           known->second.drawn.begin()))
        << "equal histories of " << before.size() << " tokens, other bits";
    if (bits.drawn.size() > common) known->second = bits;
  }
  int repetitions() const { return repetitions_; }

 private:
  std::mutex mutex_;
  std::map<Content, Bits> known_;
  int repetitions_ = 0;
};

// What a session must be.
struct Model {
  std::string id;
  uint64_t revision = 0;
  uint64_t durable = 0;                  // acknowledged
  std::map<uint64_t, Content> contents;  // by revision
  std::string story;                     // what was done with it

  const Content& content() const { return contents.at(revision); }
  void Set(const std::string& done, const SessionInfo& info, Content content) {
    story += absl::StrFormat("%s: revision %d (%d durable), %d tokens\n", done, info.revision,
                             info.durable_revision, content.size());
    revision = info.revision;
    durable = std::max(durable, info.durable_revision);
    contents[revision] = std::move(content);
  }
};

struct Tally {
  std::atomic<int> operations{0}, turns{0}, appends{0}, forks{0}, marks{0}, rewinds{0}, cancels{0}, kept{0},
      exports{0}, deletions{0}, moves{0}, refused{0}, contended{0};
};

class Replica {
 public:
  Replica(const std::string& name, bool shared, std::shared_ptr<MemoryStoreContents> contents)
      : name_(name), shared_(shared), contents_(std::move(contents)), rig_(Options()) {
    StartAgain();
  }
  void StartAgain() {
    rig_.manager.reset();
    auto store = std::make_unique<MemoryStore>(contents_, shared_);
    store_ = store.get();
    rig_.StartManager(shared_ ? nullptr : std::move(store), shared_ ? std::move(store) : nullptr);
  }
  SessionRig& rig() { return rig_; }
  SessionManager& manager() { return *rig_.manager; }
  MemoryStore& store() { return *store_; }

 private:
  SessionRigOptions Options() const {
    SessionRigOptions options;
    options.engine.slots = kSlots;
    options.engine.engine.max_running = 4;
    options.sessions.host_bytes = 12 * 150'000;
    options.sessions.max_kept_turns = 4;
    options.sessions.max_ttl = std::chrono::hours(24 * 3650);
    options.sessions.claim_wait = milliseconds(50);
    options.sessions.replica = name_;
    options.sessions.address = name_ + ":1";
    return options;
  }
  const std::string name_;
  const bool shared_;
  const std::shared_ptr<MemoryStoreContents> contents_;
  SessionRig rig_;
  MemoryStore* store_ = nullptr;
};

class Worker {
 public:
  Worker(std::vector<std::unique_ptr<Replica>>& replicas, int number, uint32_t seed, Oracle& oracle,
         Tally& tally)
      : replicas_(replicas), number_(number), random_(seed), oracle_(oracle), tally_(tally) {}

  void Run(int operations) {
    for (int i = 0; i < operations; ++i) {
      ++tally_.operations;
      Act();
    }
  }

  // After a restart: every session is at a revision that it had, and no older than was promised.
  void CheckAll() {
    for (auto model = models_.begin(); model != models_.end();) {
      absl::StatusOr<SessionInfo> info = absl::UnknownError("not asked");
      // The lease of one that was killed while it made a session has to run out first.
      Eventually([&] {
        info = replicas_[0]->manager().Get(model->id);
        return !absl::IsUnavailable(info.status());
      });
      if (absl::IsNotFound(info.status())) {
        EXPECT_EQ(model->durable, 0u) << model->id << " was durable and is gone";
        model = models_.erase(model);
        continue;
      }
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_GE(info->revision, model->durable) << model->id;
      ASSERT_TRUE(model->contents.contains(info->revision)) << model->id << " revision " << info->revision;
      model->revision = info->revision;
      model->durable = info->durable_revision;
      model->contents.erase(model->contents.upper_bound(info->revision), model->contents.end());
      CheckContent(replicas_[0]->manager(), *model);
      ++model;
    }
  }

  void DeleteAll() {
    for (const Model& model : models_) Delete(model.id);
    models_.clear();
  }

 private:
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  Replica& AnyReplica() { return *replicas_[Below(static_cast<uint32_t>(replicas_.size()))]; }
  Model& AnyModel() { return models_[Below(static_cast<uint32_t>(models_.size()))]; }
  SessionChange To(const Model& model) {
    SessionChange change = ChangeOf(model.id);
    if (Below(2) == 0) change.expected_revision = model.revision;
    change.durability = static_cast<Durability>(Below(3));
    if (Below(4) == 0) change.request_id = Numbered("r", random_());
    return change;
  }
  // Few different prompts, so that histories meet; and one that no other thread has.
  std::vector<TokenId> Prompt() {
    constexpr int kLengths[] = {1, 3, 40, 64, 65, 150};
    const int kind = static_cast<int>(Below(6));
    if (Below(5) == 0) return SomePrompt(1 + kind, static_cast<uint32_t>(1000 + number_));
    return SomePrompt(kLengths[kind], static_cast<uint32_t>(kind));
  }

  void Refused(const absl::Status& status) {
    ++tally_.refused;
    const bool elsewhere = absl::IsUnavailable(status);
    EXPECT_TRUE(elsewhere || absl::IsResourceExhausted(status)) << status;
  }

  void Act() {
    Replica& replica = AnyReplica();
    SessionManager& manager = replica.manager();
    if (models_.empty() || (std::ssize(models_) < kSessionsAThread && Below(6) == 0)) return Create(replica);
    Model& model = AnyModel();
    switch (Below(20)) {
      case 0:
      case 1:
      case 2:
        return Append(replica, model);
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        return Generate(replica, model);
      case 8:
        return Fork(manager, model);
      case 9: {
        const absl::StatusOr<SessionInfo> info = manager.Mark(To(model), Numbered("m", Below(3)));
        if (!info.ok()) return Refused(info.status());
        ++tally_.marks;
        return model.Set("mark", *info, model.content());
      }
      case 10:
      case 11:
        return Rewind(manager, model);
      case 12:
      case 13:
        return Cancel(replica, model);
      case 14:
        return ExportAndImport(manager, model);
      case 15:
        if (Below(3) != 0) return;
        Delete(model.id);
        std::swap(model, models_.back());
        models_.pop_back();
        return;
      case 16: {
        ++tally_.moves;
        const SessionTier tier = static_cast<SessionTier>(1 + Below(4));
        const absl::Status status = manager.Move(model.id, tier).status();
        if (!status.ok() && !absl::IsInvalidArgument(status)) Refused(status);
        return;
      }
      case 17:
        replica.rig().clock.Advance(Below(4) == 0 ? milliseconds(700'000) : milliseconds(16'000));
        return;
      case 18:
        return Contend(replica);
      default:
        return CheckContent(manager, model);
    }
  }

  void Create(Replica& replica) {
    Model model;
    model.id = Numbered("w", number_) + Numbered("-", next_id_++);
    if (Below(8) == 0) {  // one that expires, and that nobody asks for again
      replica.manager()
          .Create("e" + model.id, seconds(1 + Below(1000)), "", Durability::kAsync)
          .status()
          .IgnoreError();
      return;
    }
    const absl::StatusOr<SessionInfo> info =
        replica.manager().Create(model.id, milliseconds(0), "", static_cast<Durability>(Below(3)));
    if (!info.ok()) return Refused(info.status());
    model.Set("create", *info, {});
    models_.push_back(std::move(model));
  }

  void Append(Replica& replica, Model& model) {
    const std::vector<TokenId> prompt = Prompt();
    const Turned turned = replica.rig().Append(To(model), prompt);
    if (!turned.status.ok()) return Refused(turned.status);
    ++tally_.appends;
    Content content = model.content();
    AddAppended(content, prompt);
    EXPECT_EQ(turned.info.tokens, std::ssize(content));
    model.Set(absl::StrFormat("append %d", prompt.size()), turned.info, std::move(content));
  }

  void Generate(Replica& replica, Model& model) {
    const std::vector<TokenId> prompt =
        model.content().empty() || Below(5) != 0 ? Prompt() : std::vector<TokenId>();
    const Turned turned = replica.rig().Generate(To(model), prompt, 1 + Below(5));
    if (absl::IsInvalidArgument(turned.status) && prompt.empty()) return;
    if (!turned.status.ok()) return Refused(turned.status);
    ++tally_.turns;
    Content content = model.content();
    AddAppended(content, prompt);
    oracle_.Check(content, turned.bits);
    AddDrawn(content, turned.ids);
    EXPECT_EQ(turned.info.tokens, std::ssize(content)) << model.id << "\n" << model.story;
    model.Set(absl::StrFormat("generate after %d", prompt.size()), turned.info, std::move(content));
  }

  void Fork(SessionManager& manager, Model& model) {
    if (std::ssize(models_) >= 2 * kSessionsAThread) return;
    const absl::StatusOr<std::vector<SessionInfo>> children =
        manager.Fork(To(model), std::vector<std::string>(1 + Below(2)), "");
    if (!children.ok()) return Refused(children.status());
    ++tally_.forks;
    const Content content = model.content();
    const std::string model_story = model.id;
    for (const SessionInfo& info : *children) {
      Model child;
      child.id = info.session_id;
      child.Set("fork of " + model_story, info, content);
      models_.push_back(std::move(child));
    }
  }

  void Rewind(SessionManager& manager, Model& model) {
    const absl::StatusOr<SessionInfo> now = manager.Get(model.id);
    if (!now.ok()) return Refused(now.status());
    SessionChange change = To(model);
    std::string mark;
    std::optional<uint64_t> revision;
    uint64_t target = now->turns.empty() ? 0 : now->turns.back();
    if (!now->marks.empty() && Below(2) == 0) {
      const SessionInfo::Mark& to = now->marks[Below(static_cast<uint32_t>(now->marks.size()))];
      mark = to.name;
      target = to.revision;
    } else if (!now->turns.empty() && Below(2) == 0) {
      target = now->turns[Below(static_cast<uint32_t>(now->turns.size()))];
      revision = target;
    }
    const absl::StatusOr<SessionInfo> info = manager.Rewind(change, mark, revision);
    // A kept turn may be given up for want of memory at any time, and with it the one before the last.
    if (absl::IsOutOfRange(info.status())) return;
    if (!info.ok()) return Refused(info.status());
    ++tally_.rewinds;
    // Get may have been answered from an older record.
    if (now->revision != model.revision) {
      Adopt(manager, model, *info);
      return;
    }
    ASSERT_TRUE(model.contents.contains(target)) << model.id << " " << target;
    Content content = model.contents.at(target);
    EXPECT_EQ(info->tokens, std::ssize(content)) << model.id << "\n" << model.story;
    model.Set(absl::StrFormat("rewind to %s %d as of %d", mark, target, now->revision), *info,
              std::move(content));
  }

  // Takes over what a rewind of unknown target has led to, if it is one of the session's own contents.
  void Adopt(SessionManager& manager, Model& model, const SessionInfo& info) {
    absl::StatusOr<Snapshot> snapshot = absl::UnknownError("not asked");
    Eventually([&] {
      snapshot = Exported(manager, model.id);
      return snapshot.ok();
    });
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    for (const auto& [revision, content] : model.contents) {
      if (std::ssize(content) == info.tokens && TailOf(content) == snapshot->tokens.tail) {
        return model.Set(absl::StrFormat("rewind adopted, as of %d", revision), info, Content(content));
      }
    }
    ADD_FAILURE() << model.id << " was rewound to what it never was";
  }

  void Cancel(Replica& replica, Model& model) {
    const OnCancel on_cancel = Below(2) == 0 ? OnCancel::kKeep : OnCancel::kRollback;
    absl::StatusOr<SessionManager::Begun> begun = replica.manager().BeginTurn(To(model), on_cancel, false);
    if (!begun.ok()) return Refused(begun.status());
    ++tally_.cancels;
    const std::vector<TokenId> prompt = Prompt();
    GenerationRequest request = SessionRequest(100'000);
    const absl::StatusOr<bool> prepared = begun->turn->Prepare(prompt, true, request);
    if (!prepared.ok()) return Refused(prepared.status());
    if (Below(8) == 0) return;  // the client vanished before the call was made
    const std::shared_ptr<Reader> reader = Reader::Make();
    absl::StatusOr<std::shared_ptr<Generation>> generation =
        replica.rig().rig.TrySubmit(std::move(request), reader->ready());
    if (!generation.ok()) return;
    const auto enough = static_cast<int64_t>(Below(4));
    Eventually([&] { return (*generation)->usage().completion_tokens >= enough || reader->ended(); });
    (*generation)->Cancel();
    const Result result = WaitBounded(*reader, **generation);
    std::optional<FinalState> state = (*generation)->TakeFinalState();
    std::vector<TokenId> drawn;
    if (state) drawn = state->drawn;
    const absl::StatusOr<SessionInfo> info = begun->turn->Commit(std::move(state), !result.status.ok(), "");
    if (!info.ok()) {
      EXPECT_TRUE(absl::IsAborted(info.status())) << info.status();
      EXPECT_TRUE(on_cancel == OnCancel::kRollback || drawn.empty()) << info.status();
      return;
    }
    ++tally_.kept;
    Content content = model.content();
    AddAppended(content, prompt);
    AddDrawn(content, drawn);
    model.Set(absl::StrFormat("cancelled with %d drawn", drawn.size()), *info, std::move(content));
  }

  absl::StatusOr<Snapshot> Exported(SessionManager& manager, const std::string& id) {
    const absl::StatusOr<std::vector<std::byte>> bytes = manager.Export(id, "");
    if (!bytes.ok()) return bytes.status();
    const SnapshotFormat format({.weights_fingerprint = std::string(64, 'a'),
                                 .tokenizer_fingerprint = std::string(64, 'b'),
                                 .numerics = "cpu f32 test"},
                                replicas_[0]->rig().rig.model->config());
    return format.Decode(*bytes);
  }

  // Its tokens are its own, all of them and no others.
  void CheckContent(SessionManager& manager, const Model& model) {
    const absl::StatusOr<SessionInfo> before = manager.Get(model.id);
    const absl::StatusOr<Snapshot> snapshot = Exported(manager, model.id);
    if (!snapshot.ok()) return Refused(snapshot.status());
    const absl::StatusOr<SessionInfo> info = manager.Get(model.id);
    if (!before.ok() || !info.ok() || before->revision != info->revision) return;
    // Another replica may have a newer revision that has not been written yet.
    ASSERT_TRUE(model.contents.contains(info->revision)) << model.id << " revision " << info->revision << "\n"
                                                         << model.story;
    if (replicas_.size() == 1) {
      EXPECT_EQ(info->revision, model.revision) << model.id;
    }
    const Content& content = model.contents.at(info->revision);
    EXPECT_EQ(snapshot->tokens.total_tokens(), std::ssize(content))
        << model.id << " revision " << info->revision << "\n"
        << model.story;
    EXPECT_EQ(snapshot->tokens.tail, TailOf(content)) << model.id;
  }

  void ExportAndImport(SessionManager& manager, Model& model) {
    if (std::ssize(models_) >= 2 * kSessionsAThread) return;
    const absl::StatusOr<SessionInfo> before = manager.Get(model.id);
    const absl::StatusOr<std::vector<std::byte>> bytes = manager.Export(model.id, "");
    if (!bytes.ok()) return Refused(bytes.status());
    const absl::StatusOr<SessionInfo> after = manager.Get(model.id);
    // Another replica may have what this one has not seen yet.
    if (!before.ok() || before->revision != model.revision || !after.ok() ||
        after->revision != model.revision)
      return;
    Model copy;
    copy.id = Numbered("w", number_) + Numbered("-", next_id_++);
    const absl::StatusOr<SessionInfo> info =
        manager.Import(copy.id, milliseconds(0), *bytes, "", static_cast<Durability>(Below(3)));
    if (!info.ok()) return Refused(info.status());
    ++tally_.exports;
    copy.Set("import of " + model.id, *info, model.content());
    models_.push_back(std::move(copy));
  }

  void Delete(const std::string& id) {
    ++tally_.deletions;
    absl::Status status;
    // An error leaves open whether it was carried out; asking again, and whoever has it, settles it.
    EXPECT_TRUE(Eventually([&] {
      status = AnyReplica().manager().Delete(ChangeOf(id));
      EXPECT_TRUE(status.ok() || absl::IsNotFound(status) || absl::IsUnavailable(status)) << status;
      return status.ok() || absl::IsNotFound(status);
    })) << status;
  }

  // Sessions that all threads write at once: any order is right, every answer but these is wrong.
  void Contend(Replica& replica) {
    ++tally_.contended;
    const SessionChange change = ChangeOf(Numbered("common", Below(3)));
    absl::Status status;
    switch (Below(5)) {
      case 0:
        status = replica.manager().Delete(change);
        break;
      case 1:
        status = replica.manager().Fork(change, {Numbered("common", Below(3))}, "").status();
        break;
      case 2:
        status = replica.manager().Rewind(change, "", std::nullopt).status();
        break;
      default:
        status = replica.rig().Generate(change, SomePrompt(1 + static_cast<int>(Below(80))), 3).status;
    }
    EXPECT_TRUE(status.ok() || absl::IsAborted(status) || absl::IsNotFound(status) ||
                absl::IsAlreadyExists(status) || absl::IsUnavailable(status) ||
                absl::IsResourceExhausted(status) || absl::IsOutOfRange(status))
        << status;
  }

  std::vector<std::unique_ptr<Replica>>& replicas_;
  const int number_;
  std::mt19937 random_;
  Oracle& oracle_;
  Tally& tally_;
  std::vector<Model> models_;
  int next_id_ = 0;
};

// Makes the stores slow, full and unreachable, by turns.
void MakeFaults(std::vector<std::unique_ptr<Replica>>& replicas, const std::atomic<bool>& done,
                uint32_t seed) {
  std::mt19937 random(seed);
  while (!done) {
    MemoryStore& store = replicas[random() % replicas.size()]->store();
    switch (random() % 6) {
      case 0:
        store.down = true;
        break;
      case 1:
        store.full = true;
        break;
      case 2:
        store.failing_percent = 20;
        break;
      case 3:
        store.delay_us = 2000;
        break;
      default:
        break;
    }
    std::this_thread::sleep_for(milliseconds(random() % 60));
    store.down = store.full = false;
    store.failing_percent = store.delay_us = 0;
    std::this_thread::sleep_for(milliseconds(random() % 60));
  }
}

void RunRandomly(bool shared) {
  const auto operations = FromEnvironment("EFLA_SESSION_OPERATIONS", 8000);
  const auto seed = static_cast<uint32_t>(FromEnvironment("EFLA_SESSION_SEED", 20240607));
  std::printf("seed %u, %ld operations\n", seed, static_cast<long>(operations));
  auto contents = std::make_shared<MemoryStoreContents>();
  std::vector<std::unique_ptr<Replica>> replicas;
  replicas.push_back(std::make_unique<Replica>("one", shared, contents));
  if (shared) replicas.push_back(std::make_unique<Replica>("two", shared, contents));
  Oracle oracle;
  Tally tally;
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < kThreads; ++i) {
    workers.push_back(std::make_unique<Worker>(replicas, i, seed + static_cast<uint32_t>(i), oracle, tally));
  }

  std::mt19937 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<bool> done{false};
    std::vector<std::thread> threads;
    for (auto& worker : workers) {
      threads.emplace_back([&] { worker->Run(static_cast<int>(operations / kThreads / kRounds)); });
    }
    std::thread faults([&] { MakeFaults(replicas, done, seed + static_cast<uint32_t>(round)); });
    std::thread watcher([&] {
      while (!done) {
        for (auto& replica : replicas) {
          EXPECT_TRUE(replica->manager().CheckInvariants().ok()) << replica->manager().CheckInvariants();
        }
        std::this_thread::sleep_for(milliseconds(20));
      }
    });
    for (std::thread& thread : threads) thread.join();
    done = true;
    faults.join();
    watcher.join();
    if (testing::Test::HasFailure()) break;

    // Drained, or killed at once.
    for (auto& replica : replicas) {
      if (random() % 2 == 0) {
        EXPECT_EQ(replica->manager().Drain(seconds(60)), 0);
      }
      replica->rig().manager.reset();
    }
    contents->Sweep();
    for (auto& replica : replicas) {
      EXPECT_EQ(replica->rig().rig.pool->counts().free, kSlots);
      replica->StartAgain();
    }
    for (auto& worker : workers) worker->CheckAll();
  }

  for (auto& worker : workers) worker->DeleteAll();
  for (int i = 0; i < 3; ++i) {
    replicas[0]->manager().Delete(ChangeOf(Numbered("common", i))).IgnoreError();
  }
  for (auto& replica : replicas) {
    replica->rig().clock.Advance(std::chrono::hours(24 * 3651));
    EXPECT_TRUE(Eventually([&] { return replica->manager().stats().sessions == 0; }));
    EXPECT_TRUE(Eventually([&] {
      const SessionManager::Stats stats = replica->manager().stats();
      return stats.contexts_device + stats.contexts_host + stats.contexts_stored == 0;
    }));
    EXPECT_EQ(replica->manager().stats().host_bytes, 0);
    EXPECT_EQ(replica->manager().stats().turns, 0);
    EXPECT_TRUE(replica->manager().CheckInvariants().ok()) << replica->manager().CheckInvariants();
    EXPECT_EQ(replica->rig().rig.pool->counts().free, kSlots);
  }
  EXPECT_EQ(contents->unbacked_records, 0);
  std::printf(
      "%d operations: %d turns, %d appends, %d forks, %d marks, %d rewinds, %d cancels (%d kept), %d copies, "
      "%d deletions, %d moves, %d contended, %d refused; %d histories met\n",
      tally.operations.load(), tally.turns.load(), tally.appends.load(), tally.forks.load(),
      tally.marks.load(), tally.rewinds.load(), tally.cancels.load(), tally.kept.load(), tally.exports.load(),
      tally.deletions.load(), tally.moves.load(), tally.contended.load(), tally.refused.load(),
      oracle.repetitions());
  // The mixture must be one.
  EXPECT_GT(tally.turns, operations / 20);
  EXPECT_GT(tally.rewinds, operations / 100);
  EXPECT_GT(tally.kept, 0);
  EXPECT_GT(oracle.repetitions(), 10);
  EXPECT_LT(tally.refused, operations / 2);
}

TEST(SessionRandomTest, OnOneMachine) { RunRandomly(/*shared=*/false); }
TEST(SessionRandomTest, OnTwoReplicas) { RunRandomly(/*shared=*/true); }

}  // namespace
}  // namespace efla
