// Calls of sessions as a client program makes them, one line each.
#ifndef EFLA_TESTS_E2E_SESSION_CALLS_H_
#define EFLA_TESTS_E2E_SESSION_CALLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "efla/v1/sessions.grpc.pb.h"
#include "tests/e2e/calls.h"

namespace efla::e2e {

// google.rpc.ErrorInfo of a status; empty where it has none.
struct ErrorInfo {
  std::string reason;
  std::map<std::string, std::string> metadata;
};
ErrorInfo InfoOf(const grpc::Status& status);

template <typename Response>
struct Result {
  grpc::Status status;
  Response value;
  const Response* operator->() const { return &value; }
};

using Ids = std::vector<uint32_t>;

// A turn of a session, greedy with log-probabilities and alternatives.
v1::GenerateRequest TurnRequest(const std::string& session, const Ids& prompt, uint32_t max_tokens);

class SessionClient {
 public:
  explicit SessionClient(const std::shared_ptr<grpc::Channel>& channel)
      : generation(v1::Generation::NewStub(channel)), sessions(v1::Sessions::NewStub(channel)) {}
  explicit SessionClient(const ServerProcess& server) : SessionClient(server.NewChannel()) {}

  Result<v1::Session> Create(const std::string& id, const Ids& prompt = {});
  Result<v1::Session> Create(const v1::CreateSessionRequest& request);
  Result<v1::Session> Get(const std::string& id);
  Result<v1::AppendResponse> Append(const std::string& id, const Ids& ids,
                                    v1::Durability durability = v1::DURABILITY_UNSPECIFIED);
  Result<v1::AppendResponse> Append(const v1::AppendRequest& request);
  Result<v1::Session> Fork(const std::string& id, const std::string& child, const std::string& mark = "");
  Result<v1::ForkResponse> Fork(const v1::ForkRequest& request);
  Result<v1::Session> Mark(const std::string& id, const std::string& name);
  Result<v1::Session> Rewind(const std::string& id, const std::string& mark = "");
  Result<v1::Session> Rewind(const v1::RewindRequest& request);
  grpc::Status Delete(const std::string& id);
  Result<v1::Session> Move(const std::string& id, v1::Tier tier);
  Result<v1::ListSessionsResponse> List(const v1::ListSessionsRequest& request);
  Result<std::string> Export(const std::string& id, const std::string& mark = "");
  Result<v1::Session> Import(const std::string& id, const std::string& snapshot);
  // The messages as they are.
  Result<v1::Session> Import(const std::vector<v1::ImportRequest>& messages);

  Reply Turn(const std::string& session, const Ids& prompt, uint32_t max_tokens);
  // Until nobody changes it.
  void WaitUntilIdle(const std::string& id);

  std::unique_ptr<v1::Generation::Stub> generation;
  std::unique_ptr<v1::Sessions::Stub> sessions;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_SESSION_CALLS_H_
