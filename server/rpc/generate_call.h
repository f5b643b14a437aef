// Generate: a generation as a stream.
#ifndef EFLA_SERVER_RPC_GENERATE_CALL_H_
#define EFLA_SERVER_RPC_GENERATE_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "efla/v1/generation.pb.h"
#include "server/rpc/engine_call.h"

namespace efla {

// One write is under way at most; while it is, the generation merges what comes. Deletes itself.
class GenerateCall : public grpc::ServerWriteReactor<grpc::ByteBuffer>, private EngineCall {
 public:
  GenerateCall(RpcEnvironment& environment, grpc::CallbackServerContext& context,
               const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override { Cancel(); }
  void OnDone() override;

 private:
  ~GenerateCall() override = default;
  absl::StatusOr<CallRequest> Prepare(const ServedModel& model) override;
  void OnReady(Generation& generation) override;
  void End(grpc::Status status) override { Finish(std::move(status)); }
  std::string Record(bool cut) override;
  void OnTurnEnd(const SessionInfo& after, bool computed) override;
  absl::Status OnReplay(const std::string& record, const SessionInfo& now) override;

  // Adds message_ to what is recorded of a turn, up to the record's bound.
  void Gather();
  // Answers without the engine: the messages, then OK.
  void WriteAll(const std::vector<v1::GenerateResponse>& messages);
  void WriteNext();

  const grpc::ByteBuffer& request_;  // gRPC's, until OnDone
  v1::GenerateResponse message_;
  grpc::ByteBuffer message_bytes_;  // being written
  std::atomic<bool> writing_ = false;
  std::atomic<bool> reader_gone_ = false;  // a write failed: what comes is dropped until the generation ends

  // Of a session's turn. Its finished event waits for the commit.
  std::optional<FinishedEvent> finished_;
  v1::CompleteResponse gathered_;
  size_t gathered_bytes_ = 0;
  std::vector<grpc::ByteBuffer> whole_answer_;  // of WriteAll
  size_t num_written_ = 0;                      // of whole_answer_
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_GENERATE_CALL_H_
