// Thousands of random operations from several threads, with stores that are slow, full, cut off and killed,
// replicas that are killed and clients that vanish. What must hold: every session is what its own operations
// made of it, token for token, beginning with a secret that no other has; what it answers is, bit for bit,
// what a session of the same history without neighbours answers; a repeated request is answered and not
// carried out again; what was acknowledged as durable survives; nothing stays in the pool.
//
// EFLA_SESSION_OPERATIONS sets the number of operations of each test, EFLA_SESSION_SEED the seed,
// EFLA_SESSION_CLIENTS the number of threads, EFLA_SESSION_LEASE_SECONDS the leases of replicas.
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

#include "tests/server/session_chaos_stores.h"
#include "tests/server/session_rig.h"

namespace efla {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// With a restart after each round.
constexpr int64_t kFewestRounds = 4, kOperationsARound = 10'000;
constexpr int kSlots = 6;
constexpr int kSessionsAThread = 8;
constexpr int64_t kLongestSession = 2'500;  // tokens; then it is deleted
constexpr int kReplays = 12;                // answers a round that are repeated without neighbours
constexpr milliseconds kAfterlife{300};     // of clients, after a replica has been killed

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoll(value) : otherwise;
}

// When a replica has been killed the others wait for the end of its lease. No fault, and no wait for a
// crowded machine, may last as long: they would rightly take over what is still being changed, and the models
// do not know of that.
seconds Lease() { return seconds(FromEnvironment("EFLA_SESSION_LEASE_SECONDS", 4)); }

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

// What a session of a content answered.
struct Witness {
  Content before;
  std::vector<TokenId> drawn;
  Bits bits;
};

// What is drawn after a content, whoever draws it and wherever its state has been.
class Oracle {
 public:
  explicit Oracle(uint32_t seed) : random_(seed) {}

  void Check(const Content& before, const std::vector<TokenId>& drawn, const Bits& bits) {
    const std::lock_guard lock(mutex_);
    // Any of a round's answers is as likely as any other to be among those that are kept.
    const size_t place = random_() % ++answers_;
    if (witnesses_.size() < kReplays) {
      witnesses_.push_back({before, drawn, bits});
    } else if (place < kReplays) {
      witnesses_[place] = {before, drawn, bits};
    }
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
  std::vector<Witness> TakeWitnesses() {
    const std::lock_guard lock(mutex_);
    answers_ = 0;
    return std::exchange(witnesses_, {});
  }
  int repetitions() const { return repetitions_; }

 private:
  std::mutex mutex_;
  std::map<Content, Bits> known_;
  std::vector<Witness> witnesses_;
  size_t answers_ = 0;
  int repetitions_ = 0;
  std::mt19937 random_;
};

// Goes through a witness's history and its answer again, in a session that is alone.
void Replay(SessionRig& alone, const std::string& id, const Witness& witness) {
  std::vector<TokenId> appended, drawn;
  const auto drew = [](int32_t token) { return token >= kDrawn; };
  for (auto next = witness.before.begin(); next != witness.before.end();) {
    const auto first_drawn = std::find_if(next, witness.before.end(), drew);
    appended.assign(next, first_drawn);
    next = std::find_if_not(first_drawn, witness.before.end(), drew);
    if (first_drawn == next) break;
    drawn.clear();
    for (auto token = first_drawn; token != next; ++token) drawn.push_back(*token - kDrawn);
    const Turned turned = alone.Generate(id, std::exchange(appended, {}), std::ssize(drawn));
    ASSERT_TRUE(turned.status.ok()) << turned.status;
    ASSERT_EQ(turned.ids, drawn) << "a history that a session without neighbours does not have";
  }
  const Turned turned = alone.Generate(id, appended, std::ssize(witness.drawn));
  ASSERT_TRUE(turned.status.ok()) << turned.status;
  EXPECT_EQ(turned.ids, witness.drawn) << "after " << witness.before.size() << " tokens";
  EXPECT_EQ(turned.bits, witness.bits) << "after " << witness.before.size() << " tokens";
}

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
  std::atomic<int> operations{0}, creations{0}, turns{0}, appends{0}, repeats{0}, forks{0}, marks{0},
      rewinds{0}, cancels{0}, kept{0}, vanished{0}, exports{0}, deletions{0}, expiries{0}, moves{0},
      contended{0}, refused{0}, checks{0};
};

class Replica {
 public:
  Replica(ChaosStores& stores, int number) : stores_(stores), number_(number), rig_(Options()) {
    StartAgain();
  }
  void StartAgain() {
    rig_.manager.reset();
    std::unique_ptr<SessionStore> store = stores_.Open(number_);
    const bool shared = stores_.shared();
    rig_.StartManager(shared ? nullptr : std::move(store), shared ? std::move(store) : nullptr);
  }
  SessionRig& rig() { return rig_; }
  SessionManager& manager() { return *rig_.manager; }

 private:
  SessionRigOptions Options() const {
    SessionRigOptions options;
    options.engine.slots = kSlots;
    options.engine.engine.max_running = 4;
    options.sessions.host_bytes = 12 * 150'000;
    options.sessions.max_kept_turns = 4;
    options.sessions.max_ttl = std::chrono::hours(24 * 3650);
    options.sessions.claim_wait = milliseconds(50);
    options.sessions.lease_ttl = Lease();
    options.sessions.replica = Numbered("replica", number_);
    options.sessions.address = Numbered("replica", number_) + ":1";
    return options;
  }
  ChaosStores& stores_;
  const int number_;
  SessionRig rig_;
};

class Worker {
 public:
  // `back_off`: after a refusal.
  Worker(std::vector<std::unique_ptr<Replica>>& replicas, int number, uint32_t seed, milliseconds back_off,
         Oracle& oracle, Tally& tally)
      : replicas_(replicas),
        number_(number),
        back_off_(back_off),
        random_(seed),
        oracle_(oracle),
        tally_(tally) {}

  void Run(int operations, const std::atomic<bool>& stop) {
    for (int i = 0; i < operations && !stop; ++i) {
      ++tally_.operations;
      Act();
    }
  }

  // After a restart: every session is at a revision that it had, and no older than was promised.
  void CheckAll() {
    FinishDeletions();
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
    for (const Model& model : models_) half_deleted_.push_back(model.id);
    models_.clear();
    FinishDeletions();
  }

 private:
  void FinishDeletions() {
    for (const std::string& id : std::exchange(half_deleted_, {})) {
      EXPECT_TRUE(Eventually([&] { return TryDelete(AnyReplica().manager(), id); })) << id;
    }
  }
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
  // Few different prompts, so that histories meet again after rewinds and forks. The first of a session
  // begins with its secret.
  std::vector<TokenId> Prompt(const Model& model) {
    constexpr int kLengths[] = {1, 3, 40, 64, 65, 150};
    const int kind = static_cast<int>(Below(6));
    const std::vector<TokenId> prompt = SomePrompt(kLengths[kind], static_cast<uint32_t>(kind));
    if (!model.content().empty()) return prompt;
    std::vector<TokenId> secret = Secret();
    secret.insert(secret.end(), prompt.begin(), prompt.end());
    return secret;
  }
  // Tokens that no other session begins with.
  std::vector<TokenId> Secret() {
    constexpr uint32_t kDigits = 250;
    std::vector<TokenId> secret = {3 + number_};
    for (uint32_t rest = next_secret_++, i = 0; i < 3; ++i, rest /= kDigits) {
      secret.push_back(static_cast<TokenId>(3 + rest % kDigits));
    }
    return secret;
  }

  void Refused(const absl::Status& status) {
    ++tally_.refused;
    const bool elsewhere = absl::IsUnavailable(status);
    EXPECT_TRUE(elsewhere || absl::IsResourceExhausted(status)) << status;
    // As clients do: or most operations would be made while they are refused.
    std::this_thread::sleep_for(back_off_);
  }

  void Act() {
    Replica& replica = AnyReplica();
    SessionManager& manager = replica.manager();
    if (models_.empty() || (std::ssize(models_) < kSessionsAThread && Below(6) == 0)) return Create(replica);
    Model& model = AnyModel();
    if (std::ssize(model.content()) > kLongestSession) return DeleteModel(manager, model);
    switch (Below(21)) {
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
        if (Below(3) == 0) DeleteModel(manager, model);
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
      case 19:
        return Expire(replica);
      default:
        return CheckContent(manager, model);
    }
  }

  void Create(Replica& replica) {
    Model model;
    model.id = Numbered("w", number_) + Numbered("-", next_id_++);
    const absl::StatusOr<SessionInfo> info =
        replica.manager().Create(model.id, milliseconds(0), "", static_cast<Durability>(Below(3)));
    if (!info.ok()) return Refused(info.status());
    ++tally_.creations;
    model.Set("create", *info, {});
    models_.push_back(std::move(model));
  }

  // One that is written, left alone and asked for too late.
  void Expire(Replica& replica) {
    const std::string id = Numbered("e", number_) + Numbered("-", next_id_++);
    const seconds ttl(1 + Below(1000));
    if (absl::Status made = replica.manager().Create(id, ttl, "", Durability::kAsync).status(); !made.ok()) {
      return Refused(made);
    }
    const Turned turned = replica.rig().Generate(ChangeOf(id), Secret(), 2, /*create=*/false);
    // Another thread may have moved the clock meanwhile.
    if (!turned.status.ok() && !absl::IsNotFound(turned.status)) return Refused(turned.status);
    replica.rig().clock.Advance(ttl);
    const absl::Status status = replica.manager().Get(id).status();
    EXPECT_TRUE(absl::IsNotFound(status) || absl::IsUnavailable(status)) << id << ": " << status;
    ++tally_.expiries;
  }

  void Append(Replica& replica, Model& model) {
    const std::vector<TokenId> prompt = Prompt(model);
    const SessionChange change = To(model);
    const Turned turned = replica.rig().Append(change, prompt);
    if (!turned.status.ok()) return Refused(turned.status);
    ++tally_.appends;
    EXPECT_EQ(turned.info.session_id, model.id);
    Content content = model.content();
    AddAppended(content, prompt);
    EXPECT_EQ(turned.info.tokens, std::ssize(content));
    model.Set(absl::StrFormat("append %d", prompt.size()), turned.info, std::move(content));
    Repeat(change, prompt, false, 0);
  }

  // The same request again, at any replica.
  void Repeat(const SessionChange& change, const std::vector<TokenId>& prompt, bool generates, size_t drawn) {
    if (change.request_id.empty() || Below(2) == 0) return;
    const Turned turned = AnyReplica().rig().Take(change, prompt, generates, SessionRequest(1), false);
    if (!turned.status.ok()) return Refused(turned.status);
    ++tally_.repeats;
    ASSERT_TRUE(turned.reply.has_value()) << change.session_id << " did a request twice";
    const bool nothing = drawn == 0 && *turned.reply == "nothing drawn";
    EXPECT_TRUE(nothing || *turned.reply == absl::StrFormat("%d tokens of %s", drawn, change.session_id))
        << *turned.reply;
  }

  void Generate(Replica& replica, Model& model) {
    const std::vector<TokenId> prompt =
        model.content().empty() || Below(5) != 0 ? Prompt(model) : std::vector<TokenId>();
    const SessionChange change = To(model);
    const Turned turned = replica.rig().Generate(change, prompt, 1 + Below(5));
    if (absl::IsInvalidArgument(turned.status) && prompt.empty()) return;
    if (!turned.status.ok()) return Refused(turned.status);
    ++tally_.turns;
    Content content = model.content();
    AddAppended(content, prompt);
    EXPECT_EQ(turned.info.session_id, model.id);
    oracle_.Check(content, turned.ids, turned.bits);
    AddDrawn(content, turned.ids);
    EXPECT_EQ(turned.info.tokens, std::ssize(content)) << model.id << "\n" << model.story;
    model.Set(absl::StrFormat("generate after %d", prompt.size()), turned.info, std::move(content));
    Repeat(change, prompt, true, turned.ids.size());
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
    // With several replicas Get may have been answered from an older record, or from one that lacks some of
    // the turns.
    const auto known = model.contents.find(target);
    if (replicas_.size() > 1 && (now->revision != model.revision || known == model.contents.end() ||
                                 info->tokens != std::ssize(known->second))) {
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
    const std::vector<TokenId> prompt = Prompt(model);
    GenerationRequest request = SessionRequest(100'000);
    const absl::StatusOr<bool> prepared = begun->turn->Prepare(prompt, true, request);
    if (!prepared.ok()) return Refused(prepared.status());
    if (Below(8) == 0) {  // the client vanished before the call was made
      ++tally_.vanished;
      return;
    }
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
    const absl::StatusOr<HostBuffer> bytes = manager.Export(id, "");
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
    ++tally_.checks;
  }

  void ExportAndImport(SessionManager& manager, Model& model) {
    if (std::ssize(models_) >= 2 * kSessionsAThread) return;
    // Another replica's last revision may not have been written yet. What has been seen once is not unseen.
    const absl::StatusOr<SessionInfo> now = manager.Get(model.id);
    if (!now.ok() || now->revision != model.revision) return;
    const absl::StatusOr<HostBuffer> bytes = manager.Export(model.id, "");
    if (!bytes.ok()) return Refused(bytes.status());
    Model copy;
    copy.id = Numbered("w", number_) + Numbered("-", next_id_++);
    const absl::StatusOr<SessionInfo> info =
        manager.Import(copy.id, milliseconds(0), *bytes, "", static_cast<Durability>(Below(3)));
    if (!info.ok()) return Refused(info.status());
    ++tally_.exports;
    copy.Set("import of " + model.id, *info, model.content());
    models_.push_back(std::move(copy));
  }

  void DeleteModel(SessionManager& manager, Model& model) {
    ++tally_.deletions;
    // An error leaves open whether it was carried out; asking again, and whoever has it, settles that, if
    // need be after a restart.
    if (!TryDelete(manager, model.id)) half_deleted_.push_back(model.id);
    std::swap(model, models_.back());
    models_.pop_back();
  }

  bool TryDelete(SessionManager& manager, const std::string& id) {
    const absl::Status status = manager.Delete(ChangeOf(id));
    if (status.ok() || absl::IsNotFound(status)) return true;
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) << status;
    return false;
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
  const milliseconds back_off_;
  std::mt19937 random_;
  Oracle& oracle_;
  Tally& tally_;
  std::vector<Model> models_;
  std::vector<std::string> half_deleted_;
  int next_id_ = 0;
  uint32_t next_secret_ = 0;
};

// Whether all of the workers' sessions are what they must be, after every restart and at the end.
void RunRandomly(ChaosStores& stores, int num_replicas, int64_t operations) {
  operations = FromEnvironment("EFLA_SESSION_OPERATIONS", operations);
  const auto seed = static_cast<uint32_t>(FromEnvironment("EFLA_SESSION_SEED", 20240607));
  const int64_t clients = FromEnvironment("EFLA_SESSION_CLIENTS", 8);
  const int64_t rounds = std::max(kFewestRounds, operations / kOperationsARound);
  std::printf("seed %u, %ld operations, %ld clients, %ld rounds\n", seed, static_cast<long>(operations),
              static_cast<long>(clients), static_cast<long>(rounds));
  const Clock::time_point begin = Clock::now();
  std::vector<std::unique_ptr<Replica>> replicas;
  for (int i = 0; i < num_replicas; ++i) replicas.push_back(std::make_unique<Replica>(stores, i));
  Oracle oracle(seed);
  Tally tally;
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < clients; ++i) {
    workers.push_back(std::make_unique<Worker>(replicas, i, seed + static_cast<uint32_t>(i),
                                               stores.LongestFault() / 20, oracle, tally));
  }
  SessionRig alone;
  int replays = 0, kills = 0, drains = 0;
  uint64_t takeovers = 0;
  std::map<std::string, int> faults;

  std::mt19937 random(seed);
  for (int64_t round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    std::atomic<bool> done{false}, stop{false};
    std::atomic<int64_t> running{clients};
    std::vector<std::thread> threads;
    for (auto& worker : workers) {
      threads.emplace_back([&] {
        worker->Run(static_cast<int>(operations / clients / rounds), stop);
        --running;
      });
    }
    std::thread watcher([&] {
      while (!done) {
        for (auto& replica : replicas) {
          EXPECT_TRUE(replica->manager().CheckInvariants().ok()) << replica->manager().CheckInvariants();
        }
        std::this_thread::sleep_for(milliseconds(20));
      }
    });
    const auto pause = [&](milliseconds length) {
      const Clock::time_point end = Clock::now() + length;
      while (running > 0 && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    };
    const milliseconds longest = stores.LongestFault();
    // The last clients, and what is written in the background, see replicas that are killed.
    const auto killed = [&](int replica) { return (round >> replica) % 2 == 0; };
    while (running > clients / 4) {
      ++faults[stores.BeginFault(random)];
      pause(milliseconds(random() % longest.count()));
      stores.EndFault();
      pause(longest + milliseconds(random() % longest.count()));
    }
    bool any_killed = false;
    for (int i = 0; i < num_replicas; ++i) {
      if (!killed(i)) continue;
      stores.Kill(i);
      any_killed = true;
    }
    if (any_killed) pause(kAfterlife);
    stop = any_killed;
    for (std::thread& thread : threads) thread.join();
    done = true;
    watcher.join();
    if (testing::Test::HasFailure()) break;

    for (int i = 0; i < num_replicas; ++i) {
      if (!killed(i)) {
        for (const std::string& id : replicas[i]->manager().Drain(seconds(60))) {
          ADD_FAILURE() << "not kept: " << id << ", " << replicas[i]->manager().Get(id).status();
        }
      }
      ++(killed(i) ? kills : drains);
      takeovers += replicas[i]->manager().stats().takeovers;
      replicas[i]->rig().manager.reset();
      EXPECT_EQ(replicas[i]->rig().rig.pool->counts().free, kSlots);
    }
    stores.Sweep();
    for (auto& replica : replicas) replica->StartAgain();
    for (auto& worker : workers) worker->CheckAll();
    for (const Witness& witness : oracle.TakeWitnesses()) {
      Replay(alone, Numbered("replay", replays++), witness);
      EXPECT_TRUE(alone.manager->Delete(ChangeOf(Numbered("replay", replays - 1))).ok());
    }
  }

  for (auto& worker : workers) worker->DeleteAll();
  for (int i = 0; i < 3; ++i) {
    replicas[0]->manager().Delete(ChangeOf(Numbered("common", i))).IgnoreError();
  }
  for (auto& replica : replicas) {
    // What a refused call has made nevertheless expires. The replicas' clocks are some days apart.
    replica->rig().clock.Advance(std::chrono::hours(24 * 3700));
    EXPECT_TRUE(Eventually([&] { return replica->manager().stats().sessions == 0; }));
    EXPECT_TRUE(Eventually([&] {
      const SessionManager::Stats stats = replica->manager().stats();
      return stats.contexts_device + stats.contexts_host + stats.contexts_stored == 0;
    }));
    EXPECT_EQ(replica->manager().stats().host_bytes, 0);
    EXPECT_EQ(replica->manager().stats().turns, 0);
    EXPECT_TRUE(replica->manager().CheckInvariants().ok()) << replica->manager().CheckInvariants();
    EXPECT_EQ(replica->rig().rig.pool->counts().free, kSlots);
    EXPECT_TRUE(replica->manager().List("", "", 10)->empty());
  }

  std::printf("%.1f s; %d operations", std::chrono::duration<double>(Clock::now() - begin).count(),
              tally.operations.load());
  for (const auto& [name, count] :
       {std::pair("creations", &tally.creations), std::pair("turns", &tally.turns),
        std::pair("appends", &tally.appends), std::pair("repeated requests", &tally.repeats),
        std::pair("forks", &tally.forks), std::pair("marks", &tally.marks),
        std::pair("rewinds", &tally.rewinds), std::pair("cancels", &tally.cancels),
        std::pair("of these kept", &tally.kept), std::pair("of these vanished", &tally.vanished),
        std::pair("exports and imports", &tally.exports), std::pair("deletions", &tally.deletions),
        std::pair("expiries", &tally.expiries), std::pair("moves", &tally.moves),
        std::pair("contended", &tally.contended), std::pair("refused", &tally.refused),
        std::pair("contents checked", &tally.checks)}) {
    std::printf(", %d %s", count->load(), name);
  }
  std::printf("; %d replicas killed, %d drained, %lu takeovers", kills, drains,
              static_cast<unsigned long>(takeovers));
  for (const auto& [name, count] : faults) std::printf(", %d x %s", count, name.c_str());
  std::printf("; %d histories met, %d answers repeated without neighbours\n", oracle.repetitions(), replays);
  // The mixture must be one.
  EXPECT_GT(tally.turns, operations / 20);
  EXPECT_GT(tally.rewinds, operations / 100);
  EXPECT_GT(tally.kept, 0);
  EXPECT_GT(tally.repeats, 0);
  EXPECT_GT(tally.expiries, 0);
  EXPECT_GT(replays, 0);
  EXPECT_LT(tally.refused, operations * 3 / 4);
}

TEST(SessionRandomTest, StoreInMemory) {
  MemoryChaosStores stores(/*shared=*/false, 1);
  RunRandomly(stores, 1, 3200);
}

TEST(SessionRandomTest, SharedStoreInMemory) {
  MemoryChaosStores stores(/*shared=*/true, 2);
  RunRandomly(stores, 2, 3200);
}

TEST(SessionRandomTest, Disk) {
  DiskChaosStores stores;
  RunRandomly(stores, 1, 1600);
}

TEST(SessionRandomTest, Redis) {
  EFLA_SKIP_WITHOUT_REDIS();
  RedisChaosStores stores(2);
  RunRandomly(stores, 2, 1200);
}

}  // namespace
}  // namespace efla
