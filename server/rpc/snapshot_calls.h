// Sessions.Export and Sessions.Import: snapshots as streams of chunks.
#ifndef EFLA_SERVER_RPC_SNAPSHOT_CALLS_H_
#define EFLA_SERVER_RPC_SNAPSHOT_CALLS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "efla/v1/sessions.pb.h"
#include "server/rpc/access.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/transfer_limit.h"
#include "server/sessions/host_buffer.h"

namespace efla {

inline constexpr size_t kMaxChunkBytes = size_t{1} << 20;

// One write is under way at most, so that a slow reader holds one chunk in gRPC. Deletes itself.
class ExportCall : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  ExportCall(RpcEnvironment& environment, TransferLimit& limit, grpc::CallbackServerContext& context,
             const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override;

 private:
  ~ExportCall() override = default;
  absl::Status Begin();
  absl::Status Read();  // session worker
  void WriteNext();
  void End(const absl::Status& status);

  RpcEnvironment& environment_;
  TransferLimit& limit_;
  grpc::CallbackServerContext& context_;
  const grpc::ByteBuffer& request_;
  std::optional<TransferLimit::Place> place_;
  std::atomic<bool> cancelled_ = false;
  std::shared_ptr<const HostBuffer> snapshot_;
  size_t num_sent_ = 0;  // bytes, the write under way included
  grpc::ByteBuffer message_bytes_;
  const Clock::time_point begin_ = Clock::now();
  CallRecord call_;
  const ServedModel* model_ = nullptr;
  absl::Status end_ = absl::UnknownError("");
};

// Chunks are checked as they come: what is too large is refused before the rest has been sent. Deletes
// itself.
class ImportCall : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  ImportCall(RpcEnvironment& environment, TransferLimit& limit, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response);

  void OnReadDone(bool ok) override;
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override;

 private:
  ~ImportCall() override = default;
  absl::Status TakeMessage();
  absl::Status TakeOptions(const v1::ImportOptions& options);
  absl::Status TakeChunk(const std::string& chunk);
  absl::Status Import();  // session worker
  void End(const absl::Status& status);

  RpcEnvironment& environment_;
  TransferLimit& limit_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  const ServedModel* model_ = nullptr;
  std::optional<TransferLimit::Place> place_;
  std::atomic<bool> cancelled_ = false;
  grpc::ByteBuffer message_bytes_;  // being read
  std::optional<v1::ImportOptions> options_;
  Durability durability_ = Durability::kAsync;
  std::chrono::milliseconds ttl_{0};
  std::vector<std::byte> snapshot_;
  const Clock::time_point begin_ = Clock::now();
  CallRecord call_;
  absl::Status end_ = absl::UnknownError("");
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SNAPSHOT_CALLS_H_
