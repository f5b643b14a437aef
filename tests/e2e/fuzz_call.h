// One call of any method with any bytes, made and disturbed as told, and what came of it.
#ifndef EFLA_TESTS_E2E_FUZZ_CALL_H_
#define EFLA_TESTS_E2E_FUZZ_CALL_H_

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/channel.h"
#include "grpcpp/support/status.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {

// A deadline that no call of a test may need.
inline constexpr seconds kAmple{300};
// gRPC refuses headers of more than 8 KiB, and gives up the connection at times, with all calls on it; this
// one may be larger.
inline constexpr char kHugeHeader[] = "x-huge";

struct FuzzCall {
  std::string method = {};                 // "/package.Service/Method"
  std::vector<std::string> messages = {};  // of the client, in order
  std::multimap<std::string, std::string> metadata = {};
  milliseconds timeout = kAmple;
  std::optional<milliseconds> interrupt_after = {};  // from the start; cancelled then, or cut off
  bool cuts_connection = false;                      // instead of being cancelled
  milliseconds pause{0};                             // before each of the first few messages is read
  bool half_closes = true;                           // false: the client never says that it has sent all
};

struct FuzzResult {
  grpc::Status status;
  std::vector<std::string> replies;
  milliseconds elapsed{0};
  bool interrupted = false;
  // Nothing came for `kHangBound` after the deadline or the interruption.
  bool hung = false;
};
inline constexpr seconds kHangBound{30};

// On `channel`, or, where the connection is to be cut, over one of its own to `address`.
FuzzResult MakeCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& address,
                    const FuzzCall& call);

// Passes one TCP connection on to `address` until it is cut in the middle of whatever it carries.
class Relay {
 public:
  explicit Relay(const std::string& address);  // 127.0.0.1:PORT
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  const std::string& address() const { return address_; }
  void Cut();  // with a reset

 private:
  void Run(const std::string& to);

  std::string address_;
  int listener_ = -1;
  std::mutex mutex_;
  bool cut_ = false;               // under mutex_
  int client_ = -1, server_ = -1;  // under mutex_
  std::thread thread_;
};

// Bytes sent to a TCP port as they are; the connection is closed when the other side does or has said nothing
// for a while.
void SendToPort(const std::string& address, const std::string& bytes);

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_FUZZ_CALL_H_
