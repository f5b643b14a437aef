#include "client/client.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

class ClientTest : public ::testing::Test {
 protected:
  // Writes a delta, then waits until the call is cancelled or expires.
  void GenerateUntilCancelled() {
    server_.generation.generate = [](grpc::ServerContext& context, const v1::GenerateRequest&,
                                     FakeGeneration::Writer& writer) {
      writer.Write(DeltaEvent("a", 1));
      while (!context.IsCancelled()) std::this_thread::sleep_for(milliseconds(1));
      return grpc::Status(grpc::StatusCode::CANCELLED, "seen");
    };
  }

  FakeServer server_;
  Client client_{ClientOptions{.target = server_.target()}};
};

TEST_F(ClientTest, EventsComeInOrderAndTheCallEndsOk) {
  server_.generation.generate = [](grpc::ServerContext&, const v1::GenerateRequest& request,
                                   FakeGeneration::Writer& writer) {
    for (uint32_t id : request.token_ids().ids()) writer.Write(DeltaEvent(std::to_string(id), id));
    writer.Write(FinishedEvent(3, 3));
    return grpc::Status::OK;
  };
  v1::GenerateRequest request;
  for (uint32_t id : {7, 8, 9}) request.mutable_token_ids()->add_ids(id);
  std::string text;
  bool finished = false;
  absl::Status status = client_.Generate(request, {}, [&](const v1::GenerateResponse& event) {
    text += event.delta().text();
    finished = event.has_finished();
    return true;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(text, "789");
  EXPECT_TRUE(finished);
}

TEST_F(ClientTest, ACallOfASessionNamesItForBalancers) {
  std::vector<std::string> seen;
  server_.generation.generate = [&](grpc::ServerContext& context, const v1::GenerateRequest&,
                                    FakeGeneration::Writer& writer) {
    const auto found = context.client_metadata().find("x-session-id");
    seen.push_back(found == context.client_metadata().end()
                       ? "none"
                       : std::string(found->second.data(), found->second.size()));
    writer.Write(FinishedEvent(1, 1));
    return grpc::Status::OK;
  };
  v1::GenerateRequest request;
  const auto ignore = [](const v1::GenerateResponse&) { return true; };
  EXPECT_TRUE(client_.Generate(request, {}, ignore).ok());
  request.mutable_session()->set_session_id("tale");
  EXPECT_TRUE(client_.Generate(request, {}, ignore).ok());
  EXPECT_EQ(seen, (std::vector<std::string>{"none", "tale"}));
}

TEST_F(ClientTest, WhatWasRefusedBeforeItBeganIsTriedAgainAsTheServerSays) {
  int attempts = 0;
  server_.generation.score = [&](const v1::ScoreRequest&, v1::ScoreResponse&) {
    return ++attempts < 3 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining") : grpc::Status::OK;
  };
  Client patient(ClientOptions{.target = server_.target(), .retries = 4});
  EXPECT_TRUE(patient.Score({}, {}).ok());
  EXPECT_EQ(attempts, 3);
  attempts = 0;
  server_.generation.score = [&](const v1::ScoreRequest&, v1::ScoreResponse&) {
    return ++attempts < 2 ? grpc::Status(grpc::StatusCode::CANCELLED, "closing") : grpc::Status::OK;
  };
  EXPECT_TRUE(patient.Score({}, {}).ok());
  EXPECT_EQ(attempts, 2);
  server_.generation.score = [&](const v1::ScoreRequest&, v1::ScoreResponse&) {
    ++attempts;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
  };
  attempts = 0;
  EXPECT_EQ(client_.Score({}, {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(attempts, 1) << "not unless it is asked for";
  attempts = 0;
  server_.generation.generate = [&](grpc::ServerContext&, const v1::GenerateRequest&,
                                    FakeGeneration::Writer& writer) {
    ++attempts;
    writer.Write(DeltaEvent("a", 1));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "shut down");
  };
  EXPECT_EQ(patient.Generate({}, {}, [](const v1::GenerateResponse&) { return true; }).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(attempts, 1) << "it had begun";
}

// 0.0.0.0 leads here and is no address of this machine by itself.
class ClientTokenTest : public ::testing::Test {
 protected:
  ClientTokenTest() {
    server_.generation.generate = [this](grpc::ServerContext& context, const v1::GenerateRequest&,
                                         FakeGeneration::Writer& writer) {
      const auto found = context.client_metadata().find("authorization");
      if (found != context.client_metadata().end()) seen_.assign(found->second.data(), found->second.size());
      writer.Write(FinishedEvent(1, 1));
      return grpc::Status::OK;
    };
    server_.generation.score = [this](const v1::ScoreRequest&, v1::ScoreResponse&) {
      seen_ = "a call";
      return grpc::Status::OK;
    };
    server_.sessions.answer = [this](const std::string& method, const std::string&, v1::Session&) {
      seen_ = method;
      return grpc::Status::OK;
    };
  }
  ClientOptions Options() const {
    return {.target = "0.0.0.0" + server_.target().substr(server_.target().rfind(':')), .token = "secret"};
  }
  static bool Ignore(const v1::GenerateResponse&) { return true; }

  std::string seen_;  // what the server has had
  FakeServer server_;
};

TEST_F(ClientTokenTest, NothingIsSentInClearTextToAnotherMachine) {
  Client client(Options());
  const auto expect_refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(status.message().find("in clear text"), absl::string_view::npos) << status;
  };
  const CallOptions options{.timeout = std::chrono::seconds(10), .stop = {}};
  expect_refused(client.Connect());
  expect_refused(client.Generate({}, options, Ignore));
  expect_refused(client.Score({}, options).status());
  expect_refused(client.GetSession({}, options).status());
  expect_refused(client.Export({}, options).status());
  expect_refused(client.Import({}, "snapshot", options).status());
  expect_refused(client.CheckHealth("", options));
  grpc::ClientContext context;
  v1::ScoreResponse response;
  expect_refused(FromGrpc(client.generation().Score(&context, {}, &response)));
  EXPECT_EQ(seen_, "");
  EXPECT_EQ(server_.sessions.options_at, -1) << "nor has Import sent anything";
}

TEST_F(ClientTokenTest, ItIsWhereTheCallerSaysSoOrStaysOnThisMachine) {
  ClientOptions insecure = Options();
  insecure.insecure_token = true;
  EXPECT_TRUE(Client(insecure).Generate({}, {}, Ignore).ok());
  EXPECT_EQ(seen_, "Bearer secret");
  seen_.clear();
  ClientOptions here = Options();
  here.target = server_.target();
  EXPECT_TRUE(Client(here).Generate({}, {}, Ignore).ok());
  EXPECT_EQ(seen_, "Bearer secret");
  seen_.clear();
  ClientOptions none = Options();
  none.token.clear();
  EXPECT_TRUE(Client(none).Generate({}, {}, Ignore).ok());
  EXPECT_EQ(seen_, "");
}

TEST_F(ClientTest, AServersStatusKeepsItsCodeAndMessage) {
  server_.generation.score = [](const v1::ScoreRequest&, v1::ScoreResponse&) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue holds 256 requests");
  };
  absl::StatusOr<v1::ScoreResponse> score = client_.Score({}, {});
  EXPECT_EQ(score.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(score.status().message(), "the queue holds 256 requests");
}

TEST_F(ClientTest, ALargeScoreIsReceived) {
  constexpr int kTokens = 400'000;  // past gRPC's default of 4 MiB a message
  server_.generation.score = [](const v1::ScoreRequest&, v1::ScoreResponse& response) {
    for (int i = 0; i < kTokens; ++i) {
      v1::TokenLogprob& token = *response.add_logprobs();
      token.set_token_id(1'000'000);
      token.set_logprob(-1);
      token.set_bytes("12345");
    }
    return grpc::Status::OK;
  };
  absl::StatusOr<v1::ScoreResponse> score = client_.Score({}, {});
  ASSERT_TRUE(score.ok()) << score.status();
  EXPECT_GT(score->ByteSizeLong(), 4u << 20);
  EXPECT_EQ(score->logprobs_size(), kTokens);
}

TEST_F(ClientTest, AStreamThatStopsWithoutFinishingIsAnError) {
  server_.generation.generate = [](grpc::ServerContext&, const v1::GenerateRequest&,
                                   FakeGeneration::Writer& writer) {
    writer.Write(DeltaEvent("a", 1));
    return grpc::Status::OK;
  };
  absl::Status status = client_.Generate({}, {}, [](const v1::GenerateResponse&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

TEST_F(ClientTest, AStopRequestCancelsTheCall) {
  GenerateUntilCancelled();
  std::stop_source stop;
  absl::Status status = client_.Generate({}, CallOptions{.timeout = {}, .stop = stop.get_token()},
                                         [&](const v1::GenerateResponse&) {
                                           stop.request_stop();
                                           return true;
                                         });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, AStopBeforeTheCallCancelsItToo) {
  GenerateUntilCancelled();
  std::stop_source stop;
  stop.request_stop();
  absl::Status status = client_.Generate({}, CallOptions{.timeout = {}, .stop = stop.get_token()},
                                         [](const v1::GenerateResponse&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST_F(ClientTest, FalseFromTheCallbackCancelsTheCall) {
  GenerateUntilCancelled();
  int events = 0;
  absl::Status status = client_.Generate({}, {}, [&](const v1::GenerateResponse&) {
    ++events;
    return false;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(events, 1);
}

TEST_F(ClientTest, TheTimeoutIsTheCallsDeadline) {
  GenerateUntilCancelled();
  absl::Status status = client_.Generate({}, CallOptions{.timeout = milliseconds(50), .stop = {}},
                                         [](const v1::GenerateResponse&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ClientTest, ConnectSucceedsWhereAServerListens) {
  absl::Status status = client_.Connect();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ClientConnectTest, ARefusedConnectionIsUnavailableAtOnceAndNamesTheTarget) {
  std::string target;
  {
    FakeServer gone;
    target = gone.target();
  }
  Client client(ClientOptions{.target = target, .connect_timeout = std::chrono::minutes(10)});
  absl::Status status = client.Connect();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find(target), absl::string_view::npos) << status;
}

TEST(ClientConnectTest, AStopEndsTheWait) {
  std::stop_source stop;
  stop.request_stop();
  Client client(ClientOptions{.target = "192.0.2.1:1", .connect_timeout = std::chrono::minutes(10)});
  EXPECT_EQ(client.Connect(stop.get_token()).code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace efla
