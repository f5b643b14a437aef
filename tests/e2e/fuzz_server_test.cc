// Random calls, valid ones and others, on a real server: every method with messages of any content and with
// bytes that are none, cancelled, cut off, left unread. All the while neighbours make calls whose answers are
// known, bit for bit, and afterwards the server is as it was.
//
// EFLA_FUZZ_SECONDS is cut into slices, each with a server of its own and other flags; slice i repeats by
// itself with EFLA_FUZZ_SEED = the first one's seed + i. What is sent is the same then, how it meets is not.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/e2e/fuzz_books.h"
#include "tests/e2e/fuzz_neighbours.h"
#include "tests/e2e/fuzzed_server.h"
#include "tests/e2e/fuzzer.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFuzzers = 6;
constexpr int kNeighbours = 2;  // and one with a session
constexpr seconds kSliceSeconds{40};

int EnvironmentInt(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

// One server, from its start to its end.
class Slice {
 public:
  Slice(uint32_t seed, seconds length) : length_(length), server_(seed) {}

  void Run() {
    ASSERT_NO_FATAL_FAILURE(server_.Start());
    ASSERT_NO_FATAL_FAILURE(neighbours_.Learn());
    const Clock::time_point end = Clock::now() + length_;
    std::vector<std::thread> threads;
    for (int i = 0; i < kFuzzers; ++i) threads.emplace_back([this, i, end] { Fuzz(i, end); });
    for (int i = 0; i < kNeighbours; ++i) {
      threads.emplace_back([this, i, end] { neighbours_.Call(i, end); });
    }
    threads.emplace_back([this, end] { neighbours_.CallWithSession(end); });
    for (std::thread& thread : threads) thread.join();
    tally_.Report(server_.setup().name);
    ASSERT_FALSE(server_.process().process().WaitForExit(milliseconds(0)))
        << "the server has ended" << server_.InFlight();
    if (testing::Test::HasFailure()) return;
    CheckGivenBack(server_);
    if (!testing::Test::HasFatalFailure()) neighbours_.ExpectAllKnown();
    tally_.CheckShares();
    server_.End();
  }

 private:
  void Fuzz(int number, Clock::time_point end) {
    Fuzzer fuzzer(server_, tally_, snapshots_, number);
    while (Clock::now() < end && !testing::Test::HasFailure()) fuzzer.Act();
  }

  const seconds length_;
  FuzzedServer server_;
  Tally tally_;
  Neighbours neighbours_{server_, tally_};
  Snapshots snapshots_;
};

TEST(FuzzServerTest, NothingCrashesLeaksHangsOrMixes) {
  const seconds whole(EnvironmentInt("EFLA_FUZZ_SECONDS", EFLA_FUZZ_SECONDS));
  const uint32_t seed = static_cast<uint32_t>(
      EnvironmentInt("EFLA_FUZZ_SEED", static_cast<int>(std::random_device()() % 1'000'000'000)));
  std::printf("%d s from EFLA_FUZZ_SEED=%u\n", static_cast<int>(whole.count()), seed);
  seconds done(0);
  for (uint32_t slice = 0; done < whole && !HasFailure(); ++slice) {
    const seconds length = std::min(kSliceSeconds, whole - done);
    std::printf("%d s with EFLA_FUZZ_SEED=%u\n", static_cast<int>(length.count()), seed + slice);
    std::fflush(stdout);
    Slice(seed + slice, length).Run();
    done += length;
  }
}

}  // namespace
}  // namespace efla::e2e
