// Calls as a client program makes them, with everything they brought kept for comparison.
#ifndef EFLA_TESTS_E2E_CALLS_H_
#define EFLA_TESTS_E2E_CALLS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "efla/v1/generation.grpc.pb.h"
#include "efla/v1/models.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/e2e/server_process.h"

namespace efla::e2e {

// No call of a test may take longer; one that does ends with DEADLINE_EXCEEDED, which no test takes for
// success.
inline constexpr seconds kCallTimeout{60};

// Greedy, all `max_tokens` of them, whatever the end-of-text token does.
v1::GenerateRequest GreedyRequest(std::span<const uint32_t> prompt, uint32_t max_tokens);

// One streamed generation, whole.
struct Reply {
  grpc::Status status;
  std::vector<v1::GenerateResponse> events;
  // Collected from the events:
  v1::Accepted accepted;
  v1::Finished finished;
  std::string text;
  std::vector<uint32_t> token_ids;
  std::vector<v1::TokenLogprob> logprobs;
};

void SetTimeout(grpc::ClientContext& context, milliseconds timeout);

// Fails the test where events come out of order, or an OK call has no finished event.
Reply Generate(v1::Generation::Stub& stub, const v1::GenerateRequest& request,
               milliseconds timeout = kCallTimeout);

// Bit for bit: ids, log-probabilities, alternatives.
void ExpectSameTokens(const Reply& a, const Reply& b, const std::string& what);
bool SameBits(const v1::TokenLogprob& a, const v1::TokenLogprob& b);

// "UNAVAILABLE: message", for assertions.
std::string ToString(const grpc::Status& status);

// The served tokenizer's text of `ids`; expected to succeed.
std::string Detokenize(v1::Models::Stub& stub, const std::vector<uint32_t>& ids);
// The seconds of the RetryInfo in the status's details; nullopt when there is none.
std::optional<double> RetryDelaySeconds(const grpc::Status& status);
bool IsValidUtf8(std::string_view text);

// A generation read on a thread of its own from the start on.
class BackgroundStream {
 public:
  BackgroundStream(std::shared_ptr<grpc::Channel> channel, const v1::GenerateRequest& request,
                   milliseconds timeout = kCallTimeout);
  ~BackgroundStream();  // cancels

  // Until that many events have come; false when the stream ended or the call's timeout passed first.
  bool WaitForEvents(size_t count);
  size_t num_events();
  void Cancel() { context_.TryCancel(); }
  grpc::Status Join();

 private:
  std::unique_ptr<v1::Generation::Stub> stub_;
  grpc::ClientContext context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_events_ = 0;  // under mutex_
  bool ended_ = false;     // under mutex_
  grpc::Status status_;    // once thread_ has been joined
  std::thread thread_;
};

// A call of any method with bytes of the test's own making. For one thread; ends with the object.
class RawCall {
 public:
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
          milliseconds timeout = kCallTimeout);
  ~RawCall();
  bool Write(const std::string& message);  // false: the call is over
  void WritesDone();
  std::optional<std::string> Read();  // nullopt: no message will come any more
  grpc::Status Finish();

 private:
  bool Await();  // the result of the one operation in flight

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

// A unary call with `message` as its bytes.
grpc::Status SendBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const std::string& message);

// grpc.health.v1.Health/Check. 1 is SERVING, 2 NOT_SERVING; the status's code instead, negative, when it
// fails.
int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);
// The field `number` of a protobuf message without its type; nullopt: not there.
std::optional<uint64_t> VarintField(const std::string& message, int number);
std::optional<std::string> BytesField(const std::string& message, int number);

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_CALLS_H_
