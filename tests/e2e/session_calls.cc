#include "tests/e2e/session_calls.h"

#include <algorithm>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace efla::e2e {
namespace {

template <typename Request, typename Response>
Result<Response> Unary(v1::Sessions::Stub& stub, const Request& request,
                       grpc::Status (v1::Sessions::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                  Response*)) {
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  Result<Response> result;
  result.status = (stub.*method)(&context, request, &result.value);
  return result;
}

void SetIds(const Ids& ids, v1::TokenIds& message) { message.mutable_ids()->Add(ids.begin(), ids.end()); }

}  // namespace

ErrorInfo InfoOf(const grpc::Status& status) {
  google::rpc::Status details;
  ErrorInfo found;
  if (!details.ParseFromString(status.error_details())) return found;
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (!detail.UnpackTo(&info)) continue;
    found.reason = info.reason();
    for (const auto& [key, value] : info.metadata()) found.metadata[key] = value;
  }
  return found;
}

v1::GenerateRequest TurnRequest(const std::string& session, const Ids& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request = GreedyRequest(prompt, max_tokens);
  if (prompt.empty()) request.clear_token_ids();
  request.mutable_output()->set_logprobs(true);
  request.mutable_output()->set_top_logprobs(2);
  request.mutable_session()->set_session_id(session);
  return request;
}

Result<v1::Session> SessionClient::Create(const std::string& id, const Ids& prompt) {
  v1::CreateSessionRequest request;
  request.set_session_id(id);
  if (!prompt.empty()) SetIds(prompt, *request.mutable_token_ids());
  return Create(request);
}

Result<v1::Session> SessionClient::Create(const v1::CreateSessionRequest& request) {
  return Unary(*sessions, request, &v1::Sessions::Stub::Create);
}

Result<v1::Session> SessionClient::Get(const std::string& id) {
  v1::GetSessionRequest request;
  request.set_session_id(id);
  return Unary(*sessions, request, &v1::Sessions::Stub::Get);
}

Result<v1::AppendResponse> SessionClient::Append(const std::string& id, const Ids& ids,
                                                 v1::Durability durability) {
  v1::AppendRequest request;
  request.set_session_id(id);
  request.set_durability(durability);
  SetIds(ids, *request.mutable_token_ids());
  return Append(request);
}

Result<v1::AppendResponse> SessionClient::Append(const v1::AppendRequest& request) {
  return Unary(*sessions, request, &v1::Sessions::Stub::Append);
}

Result<v1::Session> SessionClient::Fork(const std::string& id, const std::string& child,
                                        const std::string& mark) {
  v1::ForkRequest request;
  request.set_session_id(id);
  request.add_child_ids(child);
  request.set_mark(mark);
  const Result<v1::ForkResponse> forked = Fork(request);
  return {forked.status, forked.status.ok() ? forked->children(0) : v1::Session()};
}

Result<v1::ForkResponse> SessionClient::Fork(const v1::ForkRequest& request) {
  return Unary(*sessions, request, &v1::Sessions::Stub::Fork);
}

Result<v1::Session> SessionClient::Mark(const std::string& id, const std::string& name) {
  v1::MarkRequest request;
  request.set_session_id(id);
  request.set_name(name);
  return Unary(*sessions, request, &v1::Sessions::Stub::Mark);
}

Result<v1::Session> SessionClient::Rewind(const std::string& id, const std::string& mark) {
  v1::RewindRequest request;
  request.set_session_id(id);
  if (!mark.empty()) request.set_mark(mark);
  return Rewind(request);
}

Result<v1::Session> SessionClient::Rewind(const v1::RewindRequest& request) {
  return Unary(*sessions, request, &v1::Sessions::Stub::Rewind);
}

grpc::Status SessionClient::Delete(const std::string& id) {
  v1::DeleteSessionRequest request;
  request.set_session_id(id);
  return Unary(*sessions, request, &v1::Sessions::Stub::Delete).status;
}

Result<v1::Session> SessionClient::Move(const std::string& id, v1::Tier tier) {
  v1::MoveSessionRequest request;
  request.set_session_id(id);
  request.set_tier(tier);
  return Unary(*sessions, request, &v1::Sessions::Stub::Move);
}

Result<v1::ListSessionsResponse> SessionClient::List(const v1::ListSessionsRequest& request) {
  return Unary(*sessions, request, &v1::Sessions::Stub::List);
}

Result<std::string> SessionClient::Export(const std::string& id, const std::string& mark) {
  v1::ExportRequest request;
  request.set_session_id(id);
  request.set_mark(mark);
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  const auto reader = sessions->Export(&context, request);
  Result<std::string> result;
  for (v1::ExportResponse part; reader->Read(&part);) {
    EXPECT_LE(part.chunk().size(), size_t{1} << 20);
    EXPECT_GT(part.chunk().size(), 0u);
    result.value += part.chunk();
  }
  result.status = reader->Finish();
  return result;
}

Result<v1::Session> SessionClient::Import(const std::string& id, const std::string& snapshot) {
  constexpr size_t kChunk = size_t{1} << 20;
  std::vector<v1::ImportRequest> messages(1);
  messages[0].mutable_options()->set_session_id(id);
  for (size_t begin = 0; begin < snapshot.size(); begin += kChunk) {
    messages.emplace_back().set_chunk(snapshot.substr(begin, kChunk));
  }
  return Import(messages);
}

Result<v1::Session> SessionClient::Import(const std::vector<v1::ImportRequest>& messages) {
  grpc::ClientContext context;
  SetTimeout(context, kCallTimeout);
  Result<v1::Session> result;
  const auto writer = sessions->Import(&context, &result.value);
  for (const v1::ImportRequest& message : messages) {
    if (!writer->Write(message)) break;
  }
  writer->WritesDone();
  result.status = writer->Finish();
  return result;
}

Reply SessionClient::Turn(const std::string& session, const Ids& prompt, uint32_t max_tokens) {
  return Generate(*generation, TurnRequest(session, prompt, max_tokens));
}

void SessionClient::WaitUntilIdle(const std::string& id) {
  EXPECT_TRUE(Eventually([&] { return !Get(id)->busy(); })) << id;
}

}  // namespace efla::e2e
