// A hundred clients do anything with sessions, at any time, on a server with few slots. Each session begins
// with a secret of its own; whatever has happened to it, it must go on exactly as one that has the same
// history and no neighbours.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/e2e/admin_page.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/golden_file.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/session_calls.h"

namespace efla::e2e {
namespace {

constexpr int kClients = 100;
constexpr uint32_t kVocabulary = 320;
constexpr size_t kSecretTokens = 6;
constexpr int kReplays = 60;  // histories that are repeated on a server of their own

int EnvironmentInt(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

// What a context has been through: appended ids and drawn counts, in order.
struct Step {
  Ids appended;
  uint32_t drawn = 0;
};
using History = std::vector<Step>;

uint64_t NumTokens(const History& history) {
  uint64_t tokens = 0;
  for (const Step& step : history) tokens += step.appended.size() + step.drawn;
  return tokens;
}

// A session as its client knows it.
struct Known {
  std::string id;
  History history;
  std::vector<History> before;  // before each of the last turns, oldest first
  std::map<std::string, History> marks;
  std::optional<std::string> snapshot;  // of snapshot_history
  History snapshot_history;
};

// A turn whose answer is to be repeated.
struct Witness {
  History before;
  Step step;
  Reply reply;
};

class SessionsChaosTest : public ::testing::Test {
 protected:
  // One client: sessions of its own, so that it knows what each must be.
  void RunClient(int number, uint32_t seed, std::chrono::steady_clock::time_point end) {
    std::mt19937 random(seed);
    auto client = std::make_unique<SessionClient>(*server_);
    std::vector<Known> sessions;
    for (int operation = 0; std::chrono::steady_clock::now() < end; ++operation) {
      if (random() % 40 == 0)
        client = std::make_unique<SessionClient>(*server_);  // the old connection closes
      if (sessions.empty() || (sessions.size() < 6 && random() % 8 == 0)) {
        Known made;
        made.id = absl::StrFormat("c%d.%d", number, operation);
        if (client->Create(made.id).status.ok()) {
          sessions.push_back(std::move(made));
          Known& known = sessions.back();
          // The secret: which session this is, in tokens.
          Ids secret(kSecretTokens);
          uint32_t rest = static_cast<uint32_t>(number * 100'003 + operation);
          for (uint32_t& id : secret) {
            id = 3 + rest % 300;
            rest /= 300;
          }
          Append(*client, known, secret);
        }
        continue;
      }
      const size_t index = random() % sessions.size();
      if (!Operate(*client, sessions, index, random)) return;
      ++num_operations_;
    }
    for (const Known& known : sessions) {
      const auto session = client->Get(known.id);
      EXPECT_TRUE(session.status.ok()) << known.id << ": " << ToString(session.status);
      EXPECT_EQ(session->tokens(), NumTokens(known.history)) << known.id;
    }
  }

  // Refusals that a full server may give; then nothing has changed.
  static bool Refused(const grpc::Status& status) {
    return status.error_code() == grpc::RESOURCE_EXHAUSTED ||
           (status.error_code() == grpc::ABORTED && InfoOf(status).reason == "SESSION_BUSY");
  }
  static bool Good(const grpc::Status& status, const std::string& what) {
    if (status.ok()) return true;
    EXPECT_TRUE(Refused(status)) << what << ": " << ToString(status);
    return false;
  }

  void Append(SessionClient& client, Known& known, const Ids& ids) {
    if (!Good(client.Append(known.id, ids).status, "append " + known.id)) return;
    Commit(known, {ids, 0});
  }

  static void Commit(Known& known, const Step& step) {
    constexpr size_t kKeptTurns = 8;
    known.before.push_back(known.history);
    if (known.before.size() > kKeptTurns) known.before.erase(known.before.begin());
    known.history.push_back(step);
  }

  bool Operate(SessionClient& client, std::vector<Known>& sessions, size_t index, std::mt19937& random) {
    Known& known = sessions[index];
    Ids ids(random() % 4 == 0 ? 60 + random() % 80 : 1 + random() % 12);
    for (uint32_t& id : ids) id = 3 + random() % (kVocabulary - 3);
    switch (random() % 16) {
      case 0:
      case 1:
        Append(client, known, ids);
        break;
      case 2: {  // cancelled on the way: no trace
        v1::GenerateRequest request = TurnRequest(known.id, ids, 100'000);
        grpc::ClientContext context;
        SetTimeout(context, kCallTimeout);
        const auto reader = client.generation->Generate(&context, request);
        v1::GenerateResponse event;
        for (uint32_t events = 0; events < random() % 5 && reader->Read(&event); ++events) {
        }
        context.TryCancel();
        const grpc::Status status = reader->Finish();
        EXPECT_TRUE(status.error_code() == grpc::CANCELLED || Refused(status)) << ToString(status);
        client.WaitUntilIdle(known.id);
        break;
      }
      case 3: {  // expires: either way, but whole
        v1::GenerateRequest request = TurnRequest(known.id, ids, 5);
        const uint64_t revision = client.Get(known.id)->revision();
        const Reply reply = Generate(*client.generation, request, milliseconds(1 + random() % 40));
        client.WaitUntilIdle(known.id);
        const auto session = client.Get(known.id);
        EXPECT_TRUE(session.status.ok()) << ToString(session.status);
        if (session->revision() == revision) {
          EXPECT_FALSE(reply.status.ok());
          break;
        }
        Commit(known, {ids, 5});
        break;
      }
      case 4: {
        const std::string name = "m" + std::to_string(random() % 3);
        if (Good(client.Mark(known.id, name).status, "mark")) known.marks[name] = known.history;
        break;
      }
      case 5:
        if (!known.marks.empty() && random() % 2 == 0) {
          const auto& [name, history] = *known.marks.begin();
          if (Good(client.Rewind(known.id, name).status, "rewind to " + name)) {
            known.history = history;
            known.before.clear();  // which turns are kept then is the server's business
          }
        } else if (!known.before.empty()) {
          const grpc::Status status = client.Rewind(known.id).status;
          if (status.error_code() == grpc::OUT_OF_RANGE) {
            known.before.clear();  // given up where memory was short
          } else if (Good(status, "rewind")) {
            known.history = known.before.back();
            known.before.pop_back();
            ++num_rewinds_;
          }
        }
        break;
      case 6: {
        const std::string child = known.id + ".f" + std::to_string(random() % 1000);
        const auto forked = client.Fork(known.id, child);
        if (forked.status.error_code() == grpc::ALREADY_EXISTS || sessions.size() > 8) {
          if (forked.status.ok()) {
            EXPECT_TRUE(client.Delete(child).ok());
          }
          break;
        }
        if (!Good(forked.status, "fork")) break;
        Known made;
        made.id = child;
        made.history = known.history;
        sessions.push_back(std::move(made));
        break;
      }
      case 7: {
        auto snapshot = client.Export(known.id);
        if (!Good(snapshot.status, "export")) break;
        known.snapshot = std::move(snapshot.value);
        known.snapshot_history = known.history;
        break;
      }
      case 8: {
        if (!known.snapshot || sessions.size() > 8) break;
        Known made;
        made.id = known.id + ".i" + std::to_string(random() % 1000);
        const auto imported = client.Import(made.id, *known.snapshot);
        if (imported.status.error_code() == grpc::ALREADY_EXISTS || !Good(imported.status, "import")) break;
        made.history = known.snapshot_history;
        EXPECT_EQ(imported->tokens(), NumTokens(made.history));
        sessions.push_back(std::move(made));
        break;
      }
      case 9: {
        const v1::Tier tiers[] = {v1::TIER_HOST, v1::TIER_DISK, v1::TIER_DEVICE};
        Good(client.Move(known.id, tiers[random() % 3]).status, "move");
        break;
      }
      case 10:
        if (random() % 2 == 0) {
          const grpc::Status status = client.Delete(known.id);
          if (Good(status, "delete")) sessions.erase(sessions.begin() + static_cast<ptrdiff_t>(index));
        }
        break;
      default: {
        const uint32_t count = 1 + random() % 8;
        const Reply reply = client.Turn(known.id, ids, count);
        if (!Good(reply.status, "turn")) break;
        const Step step{ids, count};
        if (random() % 8 == 0) {
          const std::scoped_lock lock(mutex_);
          witnesses_.push_back({known.history, step, reply});
        }
        Commit(known, step);
        EXPECT_EQ(reply.finished.session().tokens(), NumTokens(known.history)) << known.id;
        break;
      }
    }
    return !::testing::Test::HasFailure();
  }

  std::unique_ptr<ServerProcess> server_;
  std::mutex mutex_;
  std::vector<Witness> witnesses_;  // under mutex_
  std::atomic<int> num_operations_ = 0, num_rewinds_ = 0;
};

TEST_F(SessionsChaosTest, EverySessionIsItsOwn) {
  const int run_seconds = EnvironmentInt("EFLA_CHAOS_SECONDS", EFLA_SESSIONS_CHAOS_SECONDS);
  const uint32_t seed = EnvironmentInt("EFLA_CHAOS_SEED", static_cast<int>(std::random_device()() >> 1));
  std::printf("%d s; repeat with EFLA_CHAOS_SEED=%u\n", run_seconds, seed);
  const TempDir folder;
  server_ =
      ServerProcess::Start(GoldenDir("efla_basic"),
                           {"--debug-poison", "--session-dir", folder.path().string(), "--state-slots", "48",
                            "--max-running", "24", "--session-device-idle", "0.3", "--session-host-idle", "1",
                            "--session-host-bytes", "128MiB", "--log-level", "warning"});
  ASSERT_NE(server_, nullptr);
  const auto end = std::chrono::steady_clock::now() + seconds(run_seconds);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) threads.emplace_back([&, i] { RunClient(i, seed + i, end); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%d operations, %d of them rewinds; %zu answers to repeat\n", num_operations_.load(),
              num_rewinds_.load(), witnesses_.size());
  EXPECT_GT(num_operations_, 10 * run_seconds);
  EXPECT_GT(num_rewinds_, run_seconds);
  ASSERT_FALSE(witnesses_.empty());
  EXPECT_TRUE(Eventually([&] {
    const Metrics metrics = Metrics::Read(server_->admin_address());
    return metrics.Sum("efla_session_turns_active") == 0 && metrics.Sum("efla_requests_running") == 0;
  }));

  // Alone, on a server that has seen nothing else.
  const auto alone = ServerProcess::Start(GoldenDir("efla_basic"), {"--prefix-cache-slots", "0"});
  ASSERT_NE(alone, nullptr);
  SessionClient client(*alone);
  std::mt19937 random(seed);
  for (int i = 0; i < kReplays; ++i) {
    const Witness& witness = witnesses_[random() % witnesses_.size()];
    const std::string id = "replay" + std::to_string(i);
    ASSERT_TRUE(client.Create(id).status.ok());
    for (const Step& step : witness.before) {
      ASSERT_TRUE(client.Turn(id, step.appended, step.drawn).status.ok());
    }
    ExpectSameTokens(client.Turn(id, witness.step.appended, witness.step.drawn), witness.reply,
                     "a turn among others");
    ASSERT_FALSE(HasFailure()) << "replay " << i;
  }
  EXPECT_EQ(server_->Terminate(), 0);
}

}  // namespace
}  // namespace efla::e2e
