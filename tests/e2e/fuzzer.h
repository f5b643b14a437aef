// A client that does anything.
#ifndef EFLA_TESTS_E2E_FUZZER_H_
#define EFLA_TESTS_E2E_FUZZER_H_

#include <google/protobuf/descriptor.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/channel.h"
#include "tests/e2e/fuzz_books.h"
#include "tests/e2e/fuzz_call.h"
#include "tests/e2e/fuzzed_server.h"
#include "tests/e2e/random_message.h"

namespace efla::e2e {

// Some of the sessions' snapshots that were exported, for all fuzzers of a server.
class Snapshots {
 public:
  // May be the same one; empty where there is none yet.
  std::pair<std::string, std::string> Two(RandomMessages& random);
  void Keep(std::string snapshot, RandomMessages& random);

 private:
  std::mutex mutex_;
  std::vector<std::string> snapshots_;  // under mutex_
};

// For one thread.
class Fuzzer {
 public:
  Fuzzer(FuzzedServer& server, Tally& tally, Snapshots& snapshots, int number);

  // One call, or something else that a client may do, and what is to be checked of it.
  void Act();

 private:
  using MethodDescriptor = google::protobuf::MethodDescriptor;

  bool OneIn(size_t n) { return messages_.OneIn(n); }

  // A message that is one; one in `spoilt` has wild values.
  void Typed(const MethodDescriptor& method, size_t spoilt);
  // Bytes that were a message once.
  void Bytes();
  // Snapshots as they were exported, changed ones, and streams in any order.
  void Import();
  // gRPC's own services, the status page, and ports that are spoken to in no protocol at all.
  void Elsewhere();

  void Disturb(FuzzCall& call, bool gently);
  void AddToken(FuzzCall& call, bool gently);
  void AddMetadata(FuzzCall& call);

  FuzzResult Make(const FuzzCall& call, const std::string& request);
  std::string Where(const FuzzCall& call, const std::string& request) const;
  void Keep(const FuzzResult& result);  // of an export

  FuzzedServer& server_;
  Tally& tally_;
  Snapshots& snapshots_;
  const int number_;
  RandomMessages messages_;
  std::shared_ptr<grpc::Channel> channel_;
  int acts_ = 0;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_FUZZER_H_
