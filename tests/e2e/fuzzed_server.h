// The server of one slice of the fuzz test: how it is started, calls in good order on it, and what a failed
// check tells of it.
#ifndef EFLA_TESTS_E2E_FUZZED_SERVER_H_
#define EFLA_TESTS_E2E_FUZZED_SERVER_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "grpcpp/channel.h"
#include "grpcpp/support/status.h"
#include "tests/e2e/fuzz_call.h"
#include "tests/e2e/random_message.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {

// Tokens of the auth file, which has the same names.
inline constexpr char kKnownToken[] = "known", kFreeToken[] = "free", kLimitedToken[] = "limited",
                      kExpiredToken[] = "old", kAdminToken[] = "ops";
// Sessions of the neighbours have names that begin with this.
inline constexpr char kNeighbourPrefix[] = "neighbour-";

// Generation, Models, Sessions and Admin.
const std::vector<const google::protobuf::ServiceDescriptor*>& Services();

// For several threads, once it has been started.
class FuzzedServer {
 public:
  // How a server is started.
  struct Setup {
    const char* name;
    const char* golden;  // checkpoint; null: the demonstration model, with a chat template
    bool auth;
    bool disk;
    bool connections_end;  // of their age
    std::vector<std::string> flags;
  };

  explicit FuzzedServer(uint32_t seed);  // which chooses the setup

  void Start();  // a fatal failure where it does not come up
  // In one of two ways, by the seed. Its exit status is expected to be 0.
  void End();

  uint32_t seed() const { return seed_; }
  const Setup& setup() const { return setup_; }
  // Once started:
  const ServedFacts& facts() const { return facts_; }
  ServerProcess& process() { return *process_; }

  // A call as the neighbours make it. `method` is "Service/Method".
  FuzzResult Ask(const std::string& method, const google::protobuf::Message& request,
                 const char* token = kKnownToken) const;
  grpc::Status AskFor(google::protobuf::Message& response, const std::string& method,
                      const google::protobuf::Message& request, const char* token = kKnownToken) const;
  // Whether gRPC may have ended the call since it came just as its connection had reached its age.
  bool MetConnectionsEnd(const FuzzResult& result) const;
  // Of one tenant: all, when nobody else is there (a session that a call still holds fails the test then), or
  // those of the fuzzers, while these are at it.
  void DeleteSessions(const char* token, bool all);

  std::string Repeat() const;  // what makes the same calls again
  void NoteCall(int fuzzer, const std::string& call);
  // The calls that were under way last.
  std::string InFlight();

 private:
  const uint32_t seed_;
  const Setup& setup_;
  const TempDir folder_;
  ServedFacts facts_;
  std::mutex mutex_;
  std::map<int, std::string> last_calls_;   // by fuzzer; under mutex_
  std::unique_ptr<ServerProcess> process_;  // ends before its folder goes
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_FUZZED_SERVER_H_
