// What is checked of the fuzz test's calls: how each has ended and what it says, how many there were of which
// kind, and that the server holds nothing of theirs afterwards.
#ifndef EFLA_TESTS_E2E_FUZZ_BOOKS_H_
#define EFLA_TESTS_E2E_FUZZ_BOOKS_H_

#include <array>
#include <atomic>
#include <string>

#include "efla/v1/generation.pb.h"
#include "tests/e2e/fuzz_call.h"
#include "tests/e2e/fuzzed_server.h"

namespace efla::e2e {

// What all threads of a slice count.
struct Tally {
  std::atomic<int> calls = 0, generated = 0, limited = 0, refused = 0, interrupted = 0, neighbours = 0,
                   turns = 0;
  std::array<std::atomic<int>, 17> codes = {};

  void Count(const FuzzResult& result);  // of a fuzzer's call; but for `generated`
  void Report(const char* setup) const;
  void CheckShares() const;
};

// Why a call should not have ended as it did; empty: it may.
std::string Problem(const FuzzCall& call, const FuzzResult& result, bool has_auth);

// What a generation has said must be whole where it ended well, and of the form that was asked for. `where`
// is for messages.
void CheckGenerated(const FuzzCall& call, const v1::GenerateRequest& request, const FuzzResult& result,
                    const std::string& where, Tally& tally);

// Everything is given back, and the server's counters balance. When nobody calls any more.
void CheckGivenBack(FuzzedServer& server);

// The beginning of a long text, for messages.
std::string Short(std::string text);

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_FUZZ_BOOKS_H_
