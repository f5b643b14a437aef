// A server whose answers a test writes down, on a port of its own.
#ifndef EFLA_TESTS_CLIENT_FAKE_SERVER_H_
#define EFLA_TESTS_CLIENT_FAKE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "efla/v1/generation.grpc.pb.h"
#include "efla/v1/models.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace efla {

class FakeGeneration : public v1::Generation::Service {
 public:
  using Writer = grpc::ServerWriter<v1::GenerateResponse>;
  std::function<grpc::Status(grpc::ServerContext&, const v1::GenerateRequest&, Writer&)> generate;
  std::function<grpc::Status(const v1::ScoreRequest&, v1::ScoreResponse&)> score;

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        Writer* writer) override {
    return generate(*context, *request, *writer);
  }
  grpc::Status Score(grpc::ServerContext*, const v1::ScoreRequest* request,
                     v1::ScoreResponse* response) override {
    return score(*request, *response);
  }
};

class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&generation);
    server_ = builder.BuildAndStart();
    target_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& target() const { return target_; }

  FakeGeneration generation;  // its functions are set before a call needs them

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

inline v1::GenerateResponse DeltaEvent(const std::string& text, uint32_t token_id) {
  v1::GenerateResponse event;
  event.mutable_delta()->set_text(text);
  event.mutable_delta()->add_token_ids(token_id);
  return event;
}

inline v1::GenerateResponse FinishedEvent(uint64_t prompt_tokens, uint64_t completion_tokens) {
  v1::GenerateResponse event;
  event.mutable_finished()->set_finish_reason(v1::FINISH_REASON_MAX_TOKENS);
  event.mutable_finished()->mutable_usage()->set_prompt_tokens(prompt_tokens);
  event.mutable_finished()->mutable_usage()->set_completion_tokens(completion_tokens);
  return event;
}

}  // namespace efla

#endif  // EFLA_TESTS_CLIENT_FAKE_SERVER_H_
