#include "server/rpc/snapshot_calls.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/session_messages.h"
#include "server/rpc/session_validation.h"
#include "server/rpc/status.h"
#include "server/rpc/unknown_fields.h"
#include "server/rpc/wire.h"

namespace efla {
namespace {

constexpr std::chrono::milliseconds kRetry{1000};
// Of a message beside its chunk: tags and lengths.
constexpr size_t kMessageSlack = 64;

absl::Status Loading() {
  return WithRetry(WithReason(absl::UnavailableError("the model is being loaded"), "MODEL_LOADING"), kRetry);
}

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void LogEnd(const RpcEnvironment& environment, RpcMethod method, const CallRecord& call,
            const absl::Status& end, Clock::duration lasted) {
  LogCallEnd(environment.log, {.method = method,
                               .request_id = call.request_id,
                               .session = call.session,
                               .caller = call.caller,
                               .origin = call.origin,
                               .code = end.code(),
                               .reason = ErrorReason(end),
                               .message = LoggedMessage(end),
                               .total = lasted});
}

absl::Status TooMany(const char* what) {
  return WithRetry(
      WithReason(absl::ResourceExhaustedError(absl::StrFormat("too many %s", what)), "QUEUE_FULL"), kRetry);
}

// An ExportResponse whose chunk is a part of the snapshot, which it keeps: nothing is copied.
grpc::ByteBuffer ChunkMessage(const std::shared_ptr<const HostBuffer>& snapshot, size_t offset, size_t size) {
  using google::protobuf::internal::WireFormatLite;
  using google::protobuf::io::CodedOutputStream;
  std::array<uint8_t, 16> head;  // two varints
  uint8_t* end = WireFormatLite::WriteTagToArray(v1::ExportResponse::kChunkFieldNumber,
                                                 WireFormatLite::WIRETYPE_LENGTH_DELIMITED, head.data());
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(size), end);
  using Keeper = std::shared_ptr<const HostBuffer>;
  // gRPC takes a pointer to what may be written, and only reads.
  auto* const bytes = const_cast<std::byte*>(snapshot->data()) + offset;
  const grpc::Slice slices[] = {
      grpc::Slice(head.data(), static_cast<size_t>(end - head.data())),
      grpc::Slice(
          bytes, size, [](void* keeper) { delete static_cast<Keeper*>(keeper); }, new Keeper(snapshot))};
  return grpc::ByteBuffer(slices, std::size(slices));
}

}  // namespace

ExportCall::ExportCall(RpcEnvironment& environment, TransferLimit& limit,
                       grpc::CallbackServerContext& context, const grpc::ByteBuffer& request)
    : environment_(environment), limit_(limit), context_(context), request_(request), call_(context) {
  environment_.metrics.OnCallStarted(RpcMethod::kExport);
  if (absl::Status status = Begin(); !status.ok()) End(status);
}

absl::Status ExportCall::Begin() {
  absl::Status admitted = environment_.access.Admit(context_, call_.origin, RpcMethod::kExport, call_.caller);
  if (!admitted.ok()) return admitted;
  model_ = environment_.access.ModelOf(call_.caller);
  if (model_ == nullptr) return Loading();
  place_ = limit_.Enter([this] { context_.TryCancel(); });
  if (!place_) return TooMany("snapshots are on their way");
  const auto job = [this] {
    if (absl::Status status = Read(); !status.ok()) return End(WithSessionDetails(status));
    WriteNext();
  };
  return environment_.session_workers.TryPost(job) ? absl::OkStatus() : TooMany("calls wait");
}

absl::Status ExportCall::Read() {
  v1::ExportRequest request;
  if (absl::Status status = ParseRequest(request_, request); !status.ok()) return status;
  if (absl::Status status = CheckNoUnknownFields(request); !status.ok()) return status;
  call_.session = LoggedName(request.session_id());
  if (absl::Status status = CheckName("session_id", request.session_id()); !status.ok()) return status;
  if (absl::Status status = CheckOptionalName("mark", request.mark()); !status.ok()) return status;
  if (cancelled_) return absl::CancelledError("cancelled before the snapshot was made");
  absl::StatusOr<HostBuffer> snapshot = model_->sessions->Export(request.session_id(), request.mark());
  if (!snapshot.ok()) return snapshot.status();
  snapshot_ = std::make_shared<const HostBuffer>(*std::move(snapshot));
  return absl::OkStatus();
}

void ExportCall::WriteNext() {
  if (num_sent_ == 0) EchoTrace(call_.origin.trace_id, absl::OkStatus(), context_);
  const size_t size = std::min(snapshot_->size() - num_sent_, kMaxChunkBytes);
  message_bytes_ = ChunkMessage(snapshot_, num_sent_, size);
  num_sent_ += size;
  if (num_sent_ < snapshot_->size()) return StartWrite(&message_bytes_);
  end_ = absl::OkStatus();
  StartWriteAndFinish(&message_bytes_, grpc::WriteOptions(), grpc::Status::OK);
}

void ExportCall::OnWriteDone(bool ok) {
  if (!ok || cancelled_) return End(absl::CancelledError("the client has gone"));
  limit_.Moved(*place_);
  WriteNext();
}

void ExportCall::End(const absl::Status& status) {
  end_ = status;
  EchoTrace(num_sent_ == 0 ? call_.origin.trace_id : "", status, context_);
  Finish(ToGrpcStatus(status, context_));
}

void ExportCall::OnDone() {
  if (place_) limit_.Leave(*place_);
  environment_.metrics.OnCallEnded(RpcMethod::kExport, static_cast<int>(end_.code()), SecondsSince(begin_));
  LogEnd(environment_, RpcMethod::kExport, call_, end_, Clock::now() - begin_);
  delete this;
}

ImportCall::ImportCall(RpcEnvironment& environment, TransferLimit& limit,
                       grpc::CallbackServerContext& context, grpc::ByteBuffer& response)
    : environment_(environment), limit_(limit), context_(context), response_(response), call_(context) {
  environment_.metrics.OnCallStarted(RpcMethod::kImport);
  const absl::Status admitted =
      environment_.access.Admit(context_, call_.origin, RpcMethod::kImport, call_.caller);
  if (admitted.ok()) model_ = environment_.access.ModelOf(call_.caller);
  if (!admitted.ok()) {
    End(admitted);
  } else if (model_ == nullptr) {
    End(Loading());
  } else if (place_ = limit_.Enter([this] { context_.TryCancel(); }); !place_) {
    End(TooMany("snapshots are on their way"));
  } else {
    StartRead(&message_bytes_);
  }
}

void ImportCall::OnReadDone(bool ok) {
  if (ok) {
    limit_.Moved(*place_);
    if (absl::Status status = TakeMessage(); !status.ok()) return End(WithSessionDetails(status));
    return StartRead(&message_bytes_);
  }
  if (cancelled_) return End(absl::CancelledError("cancelled before the snapshot was whole"));
  if (snapshot_.empty()) return End(InvalidField("chunk", "is missing; the stream ended without a snapshot"));
  if (!environment_.session_workers.TryPost([this] { End(WithSessionDetails(Import())); })) {
    End(TooMany("calls wait"));
  }
}

absl::Status ImportCall::TakeMessage() {
  // Before it is parsed: this is one of gRPC's threads.
  if (message_bytes_.Length() > kMaxChunkBytes + kMessageSlack) {
    return InvalidField("chunk", absl::StrFormat("is in a message of %d bytes; a chunk has at most %d",
                                                 message_bytes_.Length(), kMaxChunkBytes));
  }
  v1::ImportRequest message;
  if (absl::Status status = ParseRequest(message_bytes_, message); !status.ok()) return status;
  if (absl::Status status = CheckNoUnknownFields(message); !status.ok()) return status;
  if (message.has_options()) return TakeOptions(message.options());
  if (!message.has_chunk())
    return InvalidField("chunk", "and options are both absent; exactly one is needed");
  return TakeChunk(message.chunk());
}

absl::Status ImportCall::TakeOptions(const v1::ImportOptions& options) {
  call_.request_id = LoggedText(options.request_id());
  call_.session = LoggedName(options.session_id());
  if (options_) return InvalidField("options", "come a second time; they are the first message alone");
  if (absl::Status status = CheckOptionalName("options.session_id", options.session_id()); !status.ok())
    return status;
  if (absl::Status status = CheckRequestId(options.request_id()); !status.ok()) return status;
  absl::StatusOr<Durability> durability = ToDurability("options.durability", options.durability(), *model_);
  if (!durability.ok()) return durability.status();
  durability_ = *durability;
  absl::StatusOr<std::chrono::milliseconds> ttl = ToTtl("options.ttl_ms", options.ttl_ms(), *model_);
  if (!ttl.ok()) return ttl.status();
  ttl_ = *ttl;
  options_ = options;
  return absl::OkStatus();
}

absl::Status ImportCall::TakeChunk(const std::string& chunk) {
  if (!options_) return InvalidField("chunk", "comes first; the first message has the options");
  if (chunk.empty() || chunk.size() > kMaxChunkBytes) {
    return InvalidField("chunk",
                        absl::StrFormat("has %d bytes; it must have 1 to %d", chunk.size(), kMaxChunkBytes));
  }
  const size_t most = static_cast<size_t>(model_->max_snapshot_bytes);
  if (snapshot_.size() + chunk.size() > most) {
    return InvalidField("chunk",
                        absl::StrFormat("makes a snapshot of more than %d bytes; those of this model have at "
                                        "most %d",
                                        snapshot_.size() + chunk.size() - 1, most));
  }
  const auto bytes = std::as_bytes(std::span(chunk));
  snapshot_.reserve(most);  // no copies as it grows
  snapshot_.insert(snapshot_.end(), bytes.begin(), bytes.end());
  return absl::OkStatus();
}

absl::Status ImportCall::Import() {
  absl::StatusOr<SessionInfo> session =
      model_->sessions->Import(options_->session_id(), ttl_, snapshot_, options_->request_id(), durability_);
  if (absl::IsInvalidArgument(session.status())) return WithReason(session.status(), "NOT_A_SNAPSHOT");
  if (!session.ok()) return session.status();
  v1::Session message;
  FillSession(*session, message);
  SerializeReply(message, response_);
  return absl::OkStatus();
}

void ImportCall::End(const absl::Status& status) {
  end_ = status;
  EchoTrace(call_.origin.trace_id, status, context_);
  Finish(ToGrpcStatus(status, context_));
}

void ImportCall::OnDone() {
  if (place_) limit_.Leave(*place_);
  environment_.metrics.OnCallEnded(RpcMethod::kImport, static_cast<int>(end_.code()), SecondsSince(begin_));
  LogEnd(environment_, RpcMethod::kImport, call_, end_, Clock::now() - begin_);
  delete this;
}

}  // namespace efla
