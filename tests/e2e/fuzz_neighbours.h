// The fuzzers' neighbours: calls whose answers are known, made while anything else goes on.
#ifndef EFLA_TESTS_E2E_FUZZ_NEIGHBOURS_H_
#define EFLA_TESTS_E2E_FUZZ_NEIGHBOURS_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "efla/v1/generation.pb.h"
#include "grpcpp/support/status.h"
#include "tests/e2e/fuzz_books.h"
#include "tests/e2e/fuzzed_server.h"

namespace efla::e2e {

class Neighbours {
 public:
  using Clock = std::chrono::steady_clock;

  Neighbours(FuzzedServer& server, Tally& tally) : server_(server), tally_(tally) {}

  // The server's answers while nobody else asks.
  void Learn();
  // Each on a thread of its own, until `end` or a failure.
  void Call(int number, Clock::time_point end);
  // The same turns again and again, each time with a session of its own; some go on in a fork.
  void CallWithSession(Clock::time_point end);
  // All of Call's once more, afterwards.
  void ExpectAllKnown();

 private:
  // All that a stream says but for its times and ids of its own.
  struct Answer {
    grpc::Status status;
    std::vector<uint32_t> token_ids;
    std::string text;
    std::string logprobs;  // serialised
  };
  struct Known {
    v1::GenerateRequest request;
    Answer answer;
  };

  static Answer AnswerOf(const FuzzResult& result);
  // True: it was answered. False: there was no room for it, which has changed nothing.
  bool ExpectKnown(const Known& known, const v1::GenerateRequest& request);
  std::string Where(const v1::GenerateRequest& request) const;

  FuzzedServer& server_;
  Tally& tally_;
  std::vector<Known> known_, turns_;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_FUZZ_NEIGHBOURS_H_
