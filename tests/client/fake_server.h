// A server whose answers a test writes down, on a port of its own.
#ifndef EFLA_TESTS_CLIENT_FAKE_SERVER_H_
#define EFLA_TESTS_CLIENT_FAKE_SERVER_H_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "efla/v1/generation.grpc.pb.h"
#include "efla/v1/models.grpc.pb.h"
#include "efla/v1/sessions.grpc.pb.h"
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

class FakeSessions : public v1::Sessions::Service {
 public:
  // The method's name, and the id or prefix that it was asked for.
  std::function<grpc::Status(const std::string&, const std::string&, v1::Session&)> answer;
  std::string snapshot;  // that Export sends
  grpc::Status export_end;
  // What Import has received; more than the limit is refused at once.
  size_t import_limit = size_t{1} << 30;
  std::string imported;
  size_t largest_chunk = 0;
  int options_at = -1;  // the message with the options

  grpc::Status Create(grpc::ServerContext*, const v1::CreateSessionRequest* request,
                      v1::Session* session) override {
    return answer("Create", request->session_id(), *session);
  }
  grpc::Status Get(grpc::ServerContext*, const v1::GetSessionRequest* request,
                   v1::Session* session) override {
    return answer("Get", request->session_id(), *session);
  }
  grpc::Status List(grpc::ServerContext*, const v1::ListSessionsRequest* request,
                    v1::ListSessionsResponse* response) override {
    return answer("List", request->prefix(), *response->add_sessions());
  }
  grpc::Status Append(grpc::ServerContext*, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override {
    return answer("Append", request->session_id(), *response->mutable_session());
  }
  grpc::Status Fork(grpc::ServerContext*, const v1::ForkRequest* request,
                    v1::ForkResponse* response) override {
    return answer("Fork", request->session_id(), *response->add_children());
  }
  grpc::Status Mark(grpc::ServerContext*, const v1::MarkRequest* request, v1::Session* session) override {
    return answer("Mark", request->session_id(), *session);
  }
  grpc::Status Rewind(grpc::ServerContext*, const v1::RewindRequest* request, v1::Session* session) override {
    return answer("Rewind", request->session_id(), *session);
  }
  grpc::Status Delete(grpc::ServerContext*, const v1::DeleteSessionRequest* request,
                      v1::DeleteSessionResponse*) override {
    v1::Session session;
    return answer("Delete", request->session_id(), session);
  }
  grpc::Status Move(grpc::ServerContext*, const v1::MoveSessionRequest* request,
                    v1::Session* session) override {
    return answer("Move", request->session_id(), *session);
  }
  grpc::Status Export(grpc::ServerContext*, const v1::ExportRequest*,
                      grpc::ServerWriter<v1::ExportResponse>* writer) override {
    constexpr size_t kChunk = size_t{1} << 20;
    for (size_t begin = 0; begin < snapshot.size(); begin += kChunk) {
      v1::ExportResponse part;
      part.set_chunk(snapshot.substr(begin, kChunk));
      writer->Write(part);
    }
    return export_end;
  }
  grpc::Status Import(grpc::ServerContext*, grpc::ServerReader<v1::ImportRequest>* reader,
                      v1::Session* session) override {
    v1::ImportRequest part;
    for (int i = 0; reader->Read(&part); ++i) {
      if (part.has_options()) {
        options_at = i;
        session->set_session_id(part.options().session_id());
      }
      largest_chunk = std::max(largest_chunk, part.chunk().size());
      imported += part.chunk();
      if (imported.size() > import_limit) {
        return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                            "chunk makes a snapshot of more bytes than there may be");
      }
    }
    return grpc::Status::OK;
  }
};

class FakeServer {
 public:
  FakeServer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&generation);
    builder.RegisterService(&sessions);
    server_ = builder.BuildAndStart();
    target_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& target() const { return target_; }

  FakeGeneration generation;  // their functions are set before a call needs them
  FakeSessions sessions;

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
