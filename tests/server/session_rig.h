// A session manager over a real engine on a small model, and turns as the calls make them.
#ifndef EFLA_TESTS_SERVER_SESSION_RIG_H_
#define EFLA_TESTS_SERVER_SESSION_RIG_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_manager.h"
#include "tests/server/engine_rig.h"
#include "tests/server/memory_store.h"

namespace efla {

constexpr std::chrono::seconds kTestWait{60};

// Waits until `done`, and fails the test when that takes too long.
template <typename Done>
bool Eventually(const Done& done, std::chrono::milliseconds limit = kTestWait) {
  const Clock::time_point deadline = Clock::now() + limit;
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline Result WaitBounded(Reader& reader, Generation& generation) {
  if (!Eventually([&] { return reader.ended(); })) {
    ADD_FAILURE() << "a generation does not end";
    generation.Cancel();
  }
  return reader.Wait();
}

inline std::string ReasonOf(const absl::Status& status) {
  const std::optional<SessionError> error = GetSessionError(status);
  return error ? error->reason : "";
}

// What a turn came to.
struct Turned {
  absl::Status status;
  SessionInfo info;
  Bits bits;
  std::vector<TokenId> ids;
  std::optional<std::string> reply;  // it was a repetition
};

struct SessionRigOptions {
  RigOptions engine{.slots = 8};
  SessionOptions sessions;
  std::unique_ptr<SessionStore> disk, shared;
};

inline GenerationRequest SessionRequest(int64_t max_tokens) {
  GenerationRequest request = Greedy({}, max_tokens);
  request.logprobs = true;
  request.top_logprobs = 2;
  return request;
}

inline std::string Numbered(const std::string& prefix, int64_t number) {
  return absl::StrFormat("%s%d", prefix, number);
}

inline SessionChange ChangeOf(const std::string& id, Durability durability = Durability::kAsync,
                              const std::string& request_id = "") {
  SessionChange change;
  change.session_id = id;
  change.durability = durability;
  change.request_id = request_id;
  return change;
}

class SessionRig {
 public:
  explicit SessionRig(SessionRigOptions options = {}) : rig(options.engine), options_(options.sessions) {
    options_.now = clock.function();
    StartManager(std::move(options.disk), std::move(options.shared));
  }
  ~SessionRig() {
    if (manager != nullptr) {
      EXPECT_TRUE(manager->CheckInvariants().ok()) << manager->CheckInvariants();
    }
  }

  void StartManager(std::unique_ptr<SessionStore> disk, std::unique_ptr<SessionStore> shared) {
    SnapshotFormat format({.weights_fingerprint = std::string(64, 'a'),
                           .tokenizer_fingerprint = std::string(64, 'b'),
                           .numerics = "cpu f32 test"},
                          rig.model->config());
    absl::StatusOr<std::unique_ptr<SessionManager>> started =
        SessionManager::Start(*rig.engine, std::move(format), std::move(disk), std::move(shared), options_);
    ASSERT_TRUE(started.ok()) << started.status();
    manager = *std::move(started);
  }

  // A turn that generates.
  Turned Generate(SessionChange change, std::vector<TokenId> tokens, int64_t max_tokens, bool create = true) {
    return Take(std::move(change), std::move(tokens), true, SessionRequest(max_tokens), create);
  }
  Turned Generate(const std::string& id, std::vector<TokenId> tokens, int64_t max_tokens) {
    return Generate(ChangeOf(id), std::move(tokens), max_tokens);
  }
  Turned Append(SessionChange change, std::vector<TokenId> tokens) {
    return Take(std::move(change), std::move(tokens), false, SessionRequest(1), true);
  }
  Turned Append(const std::string& id, std::vector<TokenId> tokens) {
    return Append(ChangeOf(id), std::move(tokens));
  }

  Turned Take(SessionChange change, std::vector<TokenId> tokens, bool generates, GenerationRequest request,
              bool create) {
    Turned turned;
    absl::StatusOr<SessionManager::Begun> begun = manager->BeginTurn(change, OnCancel::kRollback, create);
    if (!begun.ok()) {
      turned.status = begun.status();
      return turned;
    }
    turned.info = begun->info;
    if (begun->reply) {
      turned.reply = begun->reply;
      return turned;
    }
    const absl::StatusOr<bool> computes = begun->turn->Prepare(std::move(tokens), generates, request);
    if (!computes.ok()) {
      turned.status = computes.status();
      return turned;
    }
    std::optional<FinalState> state;
    std::string reply = "nothing drawn";
    bool cancelled = false;
    if (*computes) {
      const std::shared_ptr<Reader> reader = Reader::Make();
      absl::StatusOr<std::shared_ptr<Generation>> generation =
          rig.TrySubmit(std::move(request), reader->ready());
      if (!generation.ok()) {
        turned.status = generation.status();
        return turned;
      }
      const Result result = WaitBounded(*reader, **generation);
      cancelled = !result.status.ok();
      AddBits(result.tokens, turned.bits.drawn);
      turned.ids = result.ids();
      state = (*generation)->TakeFinalState();
      reply = absl::StrFormat("%d tokens of %s", turned.ids.size(), change.session_id);
    }
    absl::StatusOr<SessionInfo> info = begun->turn->Commit(std::move(state), cancelled, std::move(reply));
    turned.status = info.status();
    if (info.ok()) turned.info = *std::move(info);
    return turned;
  }

  SessionInfo Get(const std::string& id) {
    absl::StatusOr<SessionInfo> info = manager->Get(id);
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() ? *info : SessionInfo{};
  }

  ManualClock clock;  // the manager's
  EngineRig rig;
  std::unique_ptr<SessionManager> manager;  // goes before the engine

 private:
  SessionOptions options_;
};

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_SESSION_RIG_H_
