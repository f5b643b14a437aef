#include "client/resume.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

// "abcdefghij", a token a letter, ids from 0.
constexpr std::string_view kLetters = "abcdefghij";

v1::GenerateResponse AcceptedEvent(const std::string& request_id) {
  v1::GenerateResponse event;
  event.mutable_accepted()->set_request_id(request_id);
  return event;
}

template <typename Detail>
grpc::Status WithDetail(grpc::StatusCode code, const Detail& detail) {
  google::rpc::Status details;
  details.add_details()->PackFrom(detail);
  return grpc::Status(code, "refused", details.SerializeAsString());
}

grpc::Status ComeBackIn(grpc::StatusCode code, int milliseconds_) {
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(milliseconds_ * 1'000'000);
  return WithDetail(code, retry);
}

class ResumeTest : public ::testing::Test {
 protected:
  using Writer = FakeGeneration::Writer;

  ResumeTest() { request_.mutable_session()->set_session_id("s"); }

  // Sends the letters from one to another, `step` a delta.
  static void Send(Writer& writer, size_t from, size_t to, size_t step = 1) {
    for (size_t i = from; i < to; i += step) {
      const std::string part(kLetters.substr(i, std::min(step, to - i)));
      v1::GenerateResponse event;
      event.mutable_delta()->set_text(part);
      for (char letter : part) {
        event.mutable_delta()->add_token_ids(static_cast<uint32_t>(letter - 'a'));
        event.mutable_delta()->add_logprobs()->set_token_id(static_cast<uint32_t>(letter - 'a'));
      }
      writer.Write(event);
    }
  }
  // Call number n (from 0) is answered by `answer`, and recorded.
  void Answer(std::function<grpc::Status(int, const v1::GenerateRequest&, Writer&)> answer) {
    server_.generation.generate = [this, answer](grpc::ServerContext&, const v1::GenerateRequest& request,
                                                 Writer& writer) {
      requests_.push_back(request);
      return answer(static_cast<int>(requests_.size()) - 1, request, writer);
    };
  }
  absl::Status Run(const CallOptions& options = {}) {
    return GenerateResuming(client_, request_, options, resume_, [&](const v1::GenerateResponse& event) {
      accepted_ += event.has_accepted();
      finished_ += event.has_finished();
      const auto take = [&](const auto& part) {
        text_ += part.text();
        ids_.insert(ids_.end(), part.token_ids().begin(), part.token_ids().end());
        logprobs_ += static_cast<size_t>(part.logprobs_size());
      };
      if (event.has_delta()) take(event.delta());
      if (event.has_finished()) take(event.finished());
      return true;
    });
  }
  void ExpectWhole() {
    EXPECT_EQ(text_, kLetters);
    ASSERT_EQ(ids_.size(), kLetters.size());
    for (size_t i = 0; i < ids_.size(); ++i) EXPECT_EQ(ids_[i], i);
    EXPECT_EQ(logprobs_, kLetters.size());
    EXPECT_EQ(accepted_, 1);
    EXPECT_EQ(finished_, 1);
  }

  FakeServer server_;
  Client client_{ClientOptions{.target = server_.target()}};
  v1::GenerateRequest request_;
  ResumeOptions resume_{.attempts = 6, .first_delay = milliseconds(1), .longest_delay = milliseconds(4)};
  std::vector<v1::GenerateRequest> requests_;
  std::string text_;
  std::vector<uint32_t> ids_;
  size_t logprobs_ = 0;
  int accepted_ = 0, finished_ = 0;
};

TEST_F(ResumeTest, ABrokenStreamGoesOnWhereItBroke) {
  Answer([](int call, const v1::GenerateRequest& request, Writer& writer) {
    writer.Write(AcceptedEvent(request.request_id()));
    if (call == 0) {
      Send(writer, 0, 3);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    if (call == 1) {  // breaks before where the first one did
      Send(writer, 0, 2);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    if (call == 2) {
      Send(writer, 0, 7, 4);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    Send(writer, 0, 10, 10);  // the record, in one delta
    writer.Write(FinishedEvent(1, 10));
    return grpc::Status::OK;
  });
  const absl::Status status = Run();
  EXPECT_TRUE(status.ok()) << status;
  ExpectWhole();
  ASSERT_EQ(requests_.size(), 4u);
  EXPECT_FALSE(requests_[0].request_id().empty());
  EXPECT_TRUE(requests_[0].sampling().has_seed());
  for (const v1::GenerateRequest& request : requests_) {
    EXPECT_EQ(request.SerializeAsString(), requests_[0].SerializeAsString()) << "the very same call";
  }
}

TEST_F(ResumeTest, WhatTheFinishedEventHoldsBackIsDeliveredOnceToo) {
  Answer([](int call, const v1::GenerateRequest&, Writer& writer) {
    writer.Write(AcceptedEvent("r"));
    Send(writer, 0, call == 0 ? 8 : 5);
    if (call == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    v1::GenerateResponse event = FinishedEvent(1, 10);
    event.mutable_finished()->set_text(std::string(kLetters.substr(5)));
    for (uint32_t id = 5; id < 10; ++id) {
      event.mutable_finished()->add_token_ids(id);
      event.mutable_finished()->add_logprobs();
    }
    writer.Write(event);
    return grpc::Status::OK;
  });
  const absl::Status status = Run();
  EXPECT_TRUE(status.ok()) << status;
  ExpectWhole();
}

TEST_F(ResumeTest, GivenIdAndSeedStay) {
  request_.set_request_id("mine");
  request_.mutable_sampling()->set_seed(7);
  Answer([](int, const v1::GenerateRequest&, Writer& writer) {
    writer.Write(FinishedEvent(1, 0));
    return grpc::Status::OK;
  });
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(requests_.at(0).request_id(), "mine");
  EXPECT_EQ(requests_.at(0).sampling().seed(), 7u);
}

TEST_F(ResumeTest, ARepetitionThatDiffersIsDataLoss) {
  Answer([](int call, const v1::GenerateRequest&, Writer& writer) {
    if (call == 0) {
      Send(writer, 0, 3);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    }
    Send(writer, 1, 5);
    return grpc::Status::OK;
  });
  EXPECT_EQ(Run().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(text_, "abc");
  EXPECT_EQ(requests_.size(), 2u);
}

TEST_F(ResumeTest, ARepetitionThatIsShorterIsDataLoss) {
  Answer([](int call, const v1::GenerateRequest&, Writer& writer) {
    Send(writer, 0, call == 0 ? 3 : 2);
    if (call == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    writer.Write(FinishedEvent(1, 2));
    return grpc::Status::OK;
  });
  EXPECT_EQ(Run().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(finished_, 0);
}

TEST_F(ResumeTest, TheServersDelayIsKept) {
  Answer([](int call, const v1::GenerateRequest&, Writer& writer) {
    if (call == 0) return ComeBackIn(grpc::StatusCode::RESOURCE_EXHAUSTED, 80);
    writer.Write(FinishedEvent(1, 0));
    return grpc::Status::OK;
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(Run().ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(80));
  EXPECT_EQ(requests_.size(), 2u);
}

TEST_F(ResumeTest, ABusySessionIsAskedAgain) {
  Answer([](int call, const v1::GenerateRequest&, Writer& writer) {
    if (call == 0) {
      google::rpc::ErrorInfo info;
      info.set_reason("SESSION_BUSY");
      return WithDetail(grpc::StatusCode::ABORTED, info);
    }
    writer.Write(FinishedEvent(1, 0));
    return grpc::Status::OK;
  });
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(requests_.size(), 2u);
}

TEST_F(ResumeTest, OtherErrorsEndIt) {
  for (const auto code :
       {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::ABORTED, grpc::StatusCode::NOT_FOUND,
        grpc::StatusCode::RESOURCE_EXHAUSTED, grpc::StatusCode::INTERNAL}) {
    requests_.clear();
    Answer([code](int, const v1::GenerateRequest&, Writer&) { return grpc::Status(code, "no"); });
    EXPECT_EQ(static_cast<int>(Run().code()), static_cast<int>(code));
    EXPECT_EQ(requests_.size(), 1u) << code;
  }
}

TEST_F(ResumeTest, AttemptsAndTimeAreBounded) {
  Answer([](int, const v1::GenerateRequest&, Writer&) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  resume_.attempts = 3;
  EXPECT_TRUE(absl::IsUnavailable(Run()));
  EXPECT_EQ(requests_.size(), 3u);
  requests_.clear();
  Answer([](int, const v1::GenerateRequest&, Writer&) {
    return ComeBackIn(grpc::StatusCode::UNAVAILABLE, 900);
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(absl::IsUnavailable(Run({.timeout = milliseconds(500), .stop = {}})));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(450))
      << "it does not wait for what is too late";
  EXPECT_EQ(requests_.size(), 1u);
}

TEST_F(ResumeTest, AStopEndsTheWait) {
  std::stop_source stop;
  Answer([&](int, const v1::GenerateRequest&, Writer&) {
    stop.request_stop();
    return ComeBackIn(grpc::StatusCode::UNAVAILABLE, 900);
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(absl::IsCancelled(Run({.timeout = {}, .stop = stop.get_token()})));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(800));
}

TEST_F(ResumeTest, OnlySessionsCanBeResumed) {
  request_.clear_session();
  EXPECT_TRUE(absl::IsInvalidArgument(Run()));
  EXPECT_TRUE(requests_.empty());
}

TEST(ClientStatusTest, DetailsAreKept) {
  const absl::Status busy = FromGrpc(ComeBackIn(grpc::StatusCode::UNAVAILABLE, 250));
  EXPECT_EQ(RetryDelay(busy), milliseconds(250));
  EXPECT_EQ(ErrorReason(busy), "");
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  const absl::Status full = FromGrpc(WithDetail(grpc::StatusCode::RESOURCE_EXHAUSTED, info));
  EXPECT_EQ(RetryDelay(full), std::nullopt);
  EXPECT_EQ(ErrorReason(full), "QUEUE_FULL");
  EXPECT_EQ(ErrorReason(FromGrpc(grpc::Status(grpc::StatusCode::UNAVAILABLE, "x", "\xff\xff"))), "");
}

}  // namespace
}  // namespace efla
