// The client library's resuming calls against servers that are killed in the middle of a turn.
#include "client/resume.h"

#include <signal.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

constexpr uint32_t kTokens = 400;

v1::GenerateRequest Turn(const std::string& session, const std::string& text) {
  v1::GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_seed(11);
  request.mutable_stopping()->set_max_tokens(kTokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_logprobs(true);
  request.mutable_session()->set_session_id(session);
  request.mutable_session()->set_create_if_missing(true);
  request.mutable_session()->set_durability(v1::DURABILITY_SYNC);
  return request;
}

struct Outcome {
  absl::Status status;
  std::string text;
  std::vector<uint32_t> ids;
  std::vector<float> logprobs;
  int accepted = 0, finished = 0;
  v1::SessionAfterTurn session;
};

// `at_tokens` runs once, when that many tokens have come.
Outcome Resumed(Client& client, const v1::GenerateRequest& request, size_t tokens = 0,
                const std::function<void()>& at_tokens = nullptr) {
  Outcome outcome;
  bool done = at_tokens == nullptr;
  const CallOptions options{.timeout = kCallTimeout, .stop = {}};
  const ResumeOptions resume{
      .attempts = 200, .first_delay = milliseconds(20), .longest_delay = milliseconds(200)};
  outcome.status = GenerateResuming(client, request, options, resume, [&](const v1::GenerateResponse& event) {
    const auto take = [&](const auto& part) {
      outcome.text += part.text();
      outcome.ids.insert(outcome.ids.end(), part.token_ids().begin(), part.token_ids().end());
      for (const v1::TokenLogprob& token : part.logprobs()) outcome.logprobs.push_back(token.logprob());
    };
    outcome.accepted += event.has_accepted();
    outcome.finished += event.has_finished();
    if (event.has_delta()) take(event.delta());
    if (event.has_finished()) {
      take(event.finished());
      outcome.session = event.finished().session();
    }
    if (!done && outcome.ids.size() >= tokens) {
      done = true;
      at_tokens();
    }
    return true;
  });
  return outcome;
}

void ExpectSame(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(a.status.ok()) << a.status;
  EXPECT_TRUE(b.status.ok()) << b.status;
  EXPECT_EQ(a.text, b.text);
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.logprobs, b.logprobs);
  EXPECT_EQ(b.accepted, 1);
  EXPECT_EQ(b.finished, 1);
  EXPECT_EQ(a.session.tokens(), b.session.tokens());
}

TEST(ResumeServerTest, ATurnOutlivesItsServer) {
  TempDir sessions;
  const std::vector<std::string> flags = {"--session-dir", sessions.path()};
  auto server = ServerProcess::Start(SourceDir() / "model/demo", flags);
  ASSERT_NE(server, nullptr);
  std::vector<std::string> same_port = flags;
  same_port.insert(same_port.end(), {"--listen", server->grpc_address()});
  Client client(ClientOptions{.target = server->grpc_address()});

  const Outcome first = Resumed(client, Turn("whole", "Once upon a time"));
  const Outcome second = Resumed(client, Turn("whole", " And then"));
  ASSERT_EQ(first.ids.size(), kTokens);

  // Servers are started on this thread: they end with the one that started them.
  const auto with_restart = [&](const v1::GenerateRequest& request, size_t tokens) {
    std::promise<void> reached;
    auto outcome = std::async(std::launch::async,
                              [&] { return Resumed(client, request, tokens, [&] { reached.set_value(); }); });
    reached.get_future().wait_for(kCallTimeout);
    server->process().Signal(SIGKILL);
    server->WaitForExit();
    server = ServerProcess::Start(SourceDir() / "model/demo", same_port);
    return outcome.get();
  };
  // The session's first turn: the next server knows nothing of it. Then a turn on what the store holds.
  ExpectSame(first, with_restart(Turn("broken", "Once upon a time"), 20));
  ASSERT_NE(server, nullptr);
  ExpectSame(second, with_restart(Turn("broken", " And then"), 100));
  ASSERT_NE(server, nullptr);
}

}  // namespace
}  // namespace efla::e2e
