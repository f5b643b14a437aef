#include "client/client.h"

#include <condition_variable>
#include <mutex>

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
