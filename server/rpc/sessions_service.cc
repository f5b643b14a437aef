#include "server/rpc/sessions_service.h"

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/rpc/append_call.h"
#include "server/rpc/session_messages.h"
#include "server/rpc/session_validation.h"
#include "server/rpc/snapshot_calls.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_answer.h"

namespace efla {
namespace {

constexpr uint32_t kDefaultPage = 100, kLargestPage = 1000;
constexpr uint32_t kMaxChildren = 256;
// Snapshots on their way at once.
constexpr size_t kMaxTransfers = 32;

// The reply of what returns the session.
absl::Status Reply(const absl::StatusOr<SessionInfo>& session, v1::Session& message) {
  if (session.ok()) FillSession(*session, message);
  return session.status();
}

absl::Status DoGet(const v1::GetSessionRequest& request, const ServedModel& model, v1::Session& message) {
  if (absl::Status status = CheckName("session_id", request.session_id()); !status.ok()) return status;
  return Reply(model.sessions->Get(request.session_id()), message);
}

absl::Status DoList(const v1::ListSessionsRequest& request, const ServedModel& model,
                    v1::ListSessionsResponse& response) {
  if (absl::Status status = CheckOptionalName("prefix", request.prefix()); !status.ok()) return status;
  if (absl::Status status = CheckOptionalName("page_token", request.page_token()); !status.ok())
    return status;
  if (request.page_size() > kLargestPage) {
    return InvalidField("page_size",
                        absl::StrFormat("is %d; the limit is %d", request.page_size(), kLargestPage));
  }
  const uint32_t size = request.page_size() == 0 ? kDefaultPage : request.page_size();
  const absl::StatusOr<std::vector<SessionInfo>> sessions =
      model.sessions->List(request.prefix(), request.page_token(), static_cast<int>(size) + 1);
  if (!sessions.ok()) return sessions.status();
  for (size_t i = 0; i < sessions->size() && i < size; ++i) {
    FillSession((*sessions)[i], *response.add_sessions());
  }
  if (sessions->size() > size) response.set_next_page_token((*sessions)[size - 1].session_id);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ChildIds(const v1::ForkRequest& request) {
  std::vector<std::string> ids(request.child_ids().begin(), request.child_ids().end());
  const size_t count = request.count() > 0 ? request.count() : std::max<size_t>(ids.size(), 1);
  if (count > kMaxChildren) {
    return InvalidField(request.count() > 0 ? "count" : "child_ids",
                        absl::StrFormat("asks for %d children; the limit is %d", count, kMaxChildren));
  }
  if (!ids.empty() && ids.size() != count) {
    return InvalidField("child_ids", absl::StrFormat("has %d names; count is %d", ids.size(), count));
  }
  std::set<std::string> seen;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string field = absl::StrFormat("child_ids[%d]", i);
    if (absl::Status status = CheckOptionalName(field, ids[i]); !status.ok()) return status;
    if (!ids[i].empty() && !seen.insert(ids[i]).second) {
      return InvalidField(field, absl::StrFormat("is \"%s\" a second time", ids[i]));
    }
  }
  ids.resize(count);
  return ids;
}

absl::Status DoFork(const v1::ForkRequest& request, const ServedModel& model, v1::ForkResponse& response) {
  const absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  const absl::StatusOr<std::vector<std::string>> ids = ChildIds(request);
  if (!ids.ok()) return ids.status();
  if (absl::Status status = CheckOptionalName("mark", request.mark()); !status.ok()) return status;
  const absl::StatusOr<std::vector<SessionInfo>> children =
      model.sessions->Fork(*change, *ids, request.mark());
  if (!children.ok()) return children.status();
  for (const SessionInfo& child : *children) FillSession(child, *response.add_children());
  return absl::OkStatus();
}

absl::Status DoMark(const v1::MarkRequest& request, const ServedModel& model, v1::Session& message) {
  const absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  if (absl::Status status = CheckName("name", request.name()); !status.ok()) return status;
  return Reply(model.sessions->Mark(*change, request.name()), message);
}

absl::Status DoRewind(const v1::RewindRequest& request, const ServedModel& model, v1::Session& message) {
  const absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  std::optional<uint64_t> revision;
  if (request.to_case() == v1::RewindRequest::kRevision) revision = request.revision();
  if (absl::Status status = CheckRevision("revision", revision); !status.ok()) return status;
  if (request.to_case() == v1::RewindRequest::kMark) {
    if (absl::Status status = CheckName("mark", request.mark()); !status.ok()) return status;
  }
  return Reply(model.sessions->Rewind(*change, request.mark(), revision), message);
}

absl::Status DoDelete(const v1::DeleteSessionRequest& request, const ServedModel& model,
                      v1::DeleteSessionResponse&) {
  const absl::StatusOr<SessionChange> change = ToChange(request, model);
  if (!change.ok()) return change.status();
  return model.sessions->Delete(*change);
}

absl::Status DoMove(const v1::MoveSessionRequest& request, const ServedModel& model, v1::Session& message) {
  if (absl::Status status = CheckName("session_id", request.session_id()); !status.ok()) return status;
  const absl::StatusOr<SessionTier> tier = ToTier(request.tier(), model);
  if (!tier.ok()) return tier.status();
  return Reply(model.sessions->Move(request.session_id(), *tier), message);
}

}  // namespace

SessionsService::SessionsService(RpcEnvironment& environment, std::chrono::milliseconds transfer_patience)
    : environment_(environment), transfers_(kMaxTransfers, transfer_patience) {}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* SessionsService::Answer(RpcMethod method, Context& context, const Bytes& request,
                                                  Bytes& response,
                                                  absl::Status (*answer)(const Request&, const ServedModel&,
                                                                         Response&)) {
  return AnswerUnary<Request, Response>(
      environment_, method, context, request, response,
      [this](std::function<void()> job) { return environment_.session_workers.TryPost(std::move(job)); },
      "too many calls wait",
      [answer](const Request& message, const ServedModel& model, Response& reply) {
        return WithSessionDetails(answer(message, model, reply));
      });
}

grpc::ServerUnaryReactor* SessionsService::Create(Context* context, const Bytes* request, Bytes* response) {
  return new AppendCall(environment_, RpcMethod::kCreate, *context, *request, *response);
}

grpc::ServerUnaryReactor* SessionsService::Append(Context* context, const Bytes* request, Bytes* response) {
  return new AppendCall(environment_, RpcMethod::kAppend, *context, *request, *response);
}

grpc::ServerUnaryReactor* SessionsService::Get(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kGet, *context, *request, *response, DoGet);
}

grpc::ServerUnaryReactor* SessionsService::List(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kList, *context, *request, *response, DoList);
}

grpc::ServerUnaryReactor* SessionsService::Fork(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kFork, *context, *request, *response, DoFork);
}

grpc::ServerUnaryReactor* SessionsService::Mark(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kMark, *context, *request, *response, DoMark);
}

grpc::ServerUnaryReactor* SessionsService::Rewind(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kRewind, *context, *request, *response, DoRewind);
}

grpc::ServerUnaryReactor* SessionsService::Delete(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kDelete, *context, *request, *response, DoDelete);
}

grpc::ServerUnaryReactor* SessionsService::Move(Context* context, const Bytes* request, Bytes* response) {
  return Answer(RpcMethod::kMove, *context, *request, *response, DoMove);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* SessionsService::Export(Context* context, const Bytes* request) {
  return new ExportCall(environment_, transfers_, *context, *request);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* SessionsService::Import(Context* context, Bytes* response) {
  return new ImportCall(environment_, transfers_, *context, *response);
}

}  // namespace efla
