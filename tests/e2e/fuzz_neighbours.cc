#include "tests/e2e/fuzz_neighbours.h"

#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "efla/v1/sessions.pb.h"
#include "gtest/gtest.h"
#include "tests/e2e/calls.h"
#include "tests/e2e/session_calls.h"

namespace efla::e2e {

Neighbours::Answer Neighbours::AnswerOf(const FuzzResult& result) {
  Answer answer;
  answer.status = result.status;
  const auto add = [&answer](const auto& part) {
    answer.token_ids.insert(answer.token_ids.end(), part.token_ids().begin(), part.token_ids().end());
    answer.text += part.text();
    for (const v1::TokenLogprob& logprob : part.logprobs()) answer.logprobs += logprob.SerializeAsString();
  };
  for (const std::string& bytes : result.replies) {
    v1::GenerateResponse event;
    EXPECT_TRUE(event.ParseFromString(bytes));
    if (event.has_delta()) add(event.delta());
    if (event.has_finished()) add(event.finished());
  }
  return answer;
}

void Neighbours::Learn() {
  std::vector<v1::GenerateRequest> requests;
  for (const uint32_t length : {3u, 70u, 150u}) {
    Ids prompt(length);
    for (uint32_t i = 0; i < length; ++i) prompt[i] = 3 + i * 7 % 300;
    requests.push_back(GreedyRequest(prompt, 12));
  }
  requests.push_back(requests[1]);
  requests.back().mutable_sampling()->set_temperature(1);
  requests.back().mutable_sampling()->set_seed(7);
  if (server_.facts().has_tokenizer) {
    requests.push_back(requests[0]);
    requests.back().clear_token_ids();
    requests.back().set_text("The captain looked at the sea and said:");
    requests.back().mutable_constraint()->set_regex("( [a-z]+){3,6}[.!?]");
  }
  for (v1::GenerateRequest& request : requests) {
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_top_logprobs(2);
    request.set_priority(8);  // never behind what is fuzzed
    Known known{request, AnswerOf(server_.Ask("Generation/Generate", request))};
    ASSERT_TRUE(known.answer.status.ok()) << ToString(known.answer.status);
    ASSERT_FALSE(known.answer.token_ids.empty());
    known_.push_back(std::move(known));
  }
  for (int turn = 0; turn < 5; ++turn) {
    Known known{GreedyRequest(Ids{static_cast<uint32_t>(10 + turn), 20, 30}, 6), {}};
    known.request.mutable_output()->set_logprobs(true);
    known.request.set_priority(8);
    known.request.mutable_session()->set_session_id("alone");
    known.request.mutable_session()->set_create_if_missing(true);
    known.answer = AnswerOf(server_.Ask("Generation/Generate", known.request));
    ASSERT_TRUE(known.answer.status.ok()) << ToString(known.answer.status);
    turns_.push_back(std::move(known));
  }
  v1::DeleteSessionRequest request;
  request.set_session_id("alone");
  ASSERT_TRUE(server_.Ask("Sessions/Delete", request).status.ok());
}

bool Neighbours::ExpectKnown(const Known& known, const v1::GenerateRequest& request) {
  const FuzzResult result = server_.Ask("Generation/Generate", request);
  if (result.status.error_code() == grpc::RESOURCE_EXHAUSTED && result.replies.empty()) {
    std::this_thread::sleep_for(milliseconds(20));
    return false;
  }
  const Answer answer = AnswerOf(result);
  EXPECT_TRUE(answer.status.ok()) << "a neighbour: " << ToString(answer.status) << Where(request);
  EXPECT_EQ(answer.token_ids, known.answer.token_ids) << "a neighbour's tokens" << Where(request);
  EXPECT_EQ(answer.text, known.answer.text) << "a neighbour's text" << Where(request);
  EXPECT_TRUE(answer.logprobs == known.answer.logprobs)
      << "a neighbour's log-probabilities" << Where(request);
  return true;
}

void Neighbours::Call(int number, Clock::time_point end) {
  std::mt19937 random(server_.seed() + 1000 + static_cast<uint32_t>(number));
  while (Clock::now() < end && !testing::Test::HasFailure()) {
    const Known& known = known_[random() % known_.size()];
    if (ExpectKnown(known, known.request)) ++tally_.neighbours;
    std::this_thread::sleep_for(milliseconds(random() % 20));
  }
}

void Neighbours::CallWithSession(Clock::time_point end) {
  std::mt19937 random(server_.seed() + 2000);
  for (int round = 0; Clock::now() < end && !testing::Test::HasFailure(); ++round) {
    std::string session = kNeighbourPrefix + std::to_string(round);
    std::vector<std::string> made = {session};
    for (size_t turn = 0; turn < turns_.size() && Clock::now() < end && !testing::Test::HasFailure();) {
      v1::GenerateRequest request = turns_[turn].request;
      request.mutable_session()->set_session_id(session);
      request.mutable_session()->set_create_if_missing(turn == 0);
      if (!ExpectKnown(turns_[turn], request)) continue;
      ++turn;
      ++tally_.turns;
      if (random() % 4 == 0) {
        v1::ForkRequest fork;
        fork.set_session_id(session);
        fork.add_child_ids(absl::StrFormat("%s%d.%d", kNeighbourPrefix, round, turn));
        const grpc::Status status = server_.Ask("Sessions/Fork", fork).status;
        EXPECT_TRUE(status.ok() || status.error_code() == grpc::RESOURCE_EXHAUSTED) << ToString(status);
        if (status.ok()) made.push_back(session = fork.child_ids(0));
      }
      std::this_thread::sleep_for(milliseconds(random() % 400));  // long enough to leave the device
    }
    for (const std::string& id : made) {
      v1::DeleteSessionRequest request;
      request.set_session_id(id);
      grpc::Status status;
      Eventually([&] {
        status = server_.Ask("Sessions/Delete", request).status;
        return status.error_code() != grpc::RESOURCE_EXHAUSTED;
      });
      // Where the first turn found no room, there is no session.
      EXPECT_TRUE(status.ok() || (status.error_code() == grpc::NOT_FOUND && Clock::now() >= end))
          << id << ": " << ToString(status);
    }
  }
}

void Neighbours::ExpectAllKnown() {
  for (const Known& known : known_) {
    EXPECT_TRUE(ExpectKnown(known, known.request)) << "a good call afterwards" << Where(known.request);
  }
}

std::string Neighbours::Where(const v1::GenerateRequest& request) const {
  return absl::StrFormat("\n  %s, request %s", server_.Repeat(), Short(request.ShortDebugString()));
}

}  // namespace efla::e2e
