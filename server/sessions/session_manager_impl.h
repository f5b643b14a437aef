// The manager: what calls find, make and change, and the threads that move and write what rests.
//
// Locks, in the order in which they may be taken:
//   1. Session::record_mutex   one session's record in a store: as long as a store's call
//   2. Residence::transfer_    one state on its way: as long as a copy or a store's call
//   3. Session::mutex          one session's fields
//   4. Residency::mutex_       where all states are
//   alone: the table's, the remembered requests', queue_mutex_, Shortage::mutex
// 3, 4 and the last four are held for bookkeeping only. A session's writer (a call or a turn,
// Session::writer) is no lock: it may last as long as a generation, and whoever finds one under way is
// refused.
//
// Threads: calls run on their callers' threads. Of its own the manager has
//   upkeep   sinks what is idle or in the way, looks for sessions that have expired
//   writers  write sessions to the stores
//   lease    with a shared store: this replica's sign of life
#ifndef EFLA_SERVER_SESSIONS_SESSION_MANAGER_IMPL_H_
#define EFLA_SERVER_SESSIONS_SESSION_MANAGER_IMPL_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/sessions/remembered_requests.h"
#include "server/sessions/session.h"
#include "server/sessions/session_manager.h"
#include "server/sessions/session_records.h"
#include "server/sessions/session_table.h"
#include "server/sessions/session_view.h"

namespace efla {

class SessionManagerImpl final : public SessionManager {
 public:
  SessionManagerImpl(Engine& engine, SnapshotFormat format, std::unique_ptr<SessionStore> disk,
                     std::unique_ptr<SessionStore> shared, const SessionOptions& options);
  ~SessionManagerImpl() override;
  // Takes up the disk's records and starts the threads.
  absl::Status Begin();

  absl::StatusOr<Begun> BeginTurn(const SessionChange& change, OnCancel on_cancel, bool create) override;
  absl::StatusOr<SessionInfo> Create(const std::string& id, std::chrono::milliseconds ttl,
                                     const std::string& request_id, Durability durability,
                                     const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Get(const std::string& id) override;
  absl::StatusOr<std::vector<SessionInfo>> List(const std::string& prefix, const std::string& after,
                                                int limit) override;
  int Count(const std::string& prefix) override;
  absl::StatusOr<std::vector<SessionInfo>> Fork(const SessionChange& change,
                                                const std::vector<std::string>& ids, const std::string& mark,
                                                const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Mark(const SessionChange& change, const std::string& name) override;
  absl::StatusOr<SessionInfo> Rewind(const SessionChange& change, const std::string& mark,
                                     std::optional<uint64_t> revision) override;
  absl::Status Delete(const SessionChange& change) override;
  absl::StatusOr<HostBuffer> Export(const std::string& id, const std::string& mark) override;
  absl::StatusOr<SessionInfo> Import(const std::string& id, std::chrono::milliseconds ttl,
                                     std::span<const std::byte> snapshot, const std::string& request_id,
                                     Durability durability, const MayMake& may_make) override;
  absl::StatusOr<SessionInfo> Move(const std::string& id, SessionTier tier) override;
  std::vector<std::string> Drain(std::chrono::milliseconds timeout) override;
  Stats stats() const override;
  absl::Status CheckInvariants() const override;

 private:
  friend class TurnImpl;

  // The right to change a session, until it is given up or destroyed.
  class Hold {
   public:
    Hold() = default;
    Hold(SessionManagerImpl& manager, SessionPtr session)
        : manager_(&manager), session_(std::move(session)) {}
    Hold(Hold&& other) noexcept : manager_(other.manager_), session_(std::move(other.session_)) {}
    Hold& operator=(Hold&& other) noexcept {
      GiveUp();
      manager_ = other.manager_;
      session_ = std::move(other.session_);
      return *this;
    }
    ~Hold() { GiveUp(); }
    void GiveUp() {
      if (session_) manager_->Leave(session_);
      session_.reset();
    }
    const SessionPtr& session() const { return session_; }

   private:
    SessionManagerImpl* manager_ = nullptr;
    SessionPtr session_;
  };
  struct Opened {
    Hold hold;                            // or:
    std::optional<RecordedReply> replay;  // the request has been seen
    SessionPtr session;
  };

  // session_manager.cc: finding a session, the right to change it, changes
  absl::StatusOr<SessionPtr> Find(const std::string& id);
  absl::StatusOr<Opened> Open(const SessionChange& change, Session::Writer writer, RecordedReply::Call call);
  absl::StatusOr<std::optional<RecordedReply>> Enter(Session& session, const SessionChange& change,
                                                     Session::Writer writer, RecordedReply::Call call);
  void Leave(const SessionPtr& session);
  absl::StatusOr<SessionInfo> Change(const SessionChange& change, RecordedReply::Call call,
                                     const std::function<absl::Status(SessionState&)>& edit);
  SessionInfo ToRecord(const SessionInfo& info, Durability durability) const;
  void CorrectReply(Session& session, RecordedReply::Call call, const std::string& request_id,
                    const SessionInfo& info, Durability durability);
  absl::StatusOr<SessionInfo> Finish(Hold hold, Durability durability, SessionInfo info);
  SessionInfo Info(const Session& session) const;  // with its mutex held
  absl::Status DamageOf(const Context& context) const;

  // session_creation.cc
  absl::StatusOr<SessionInfo> Make(std::string id, ContextPtr head, std::chrono::milliseconds ttl,
                                   RecordedReply::Call call, const std::string& request_id,
                                   Durability durability, Hold* for_turn = nullptr);
  void Unmake(const SessionPtr& session);
  absl::StatusOr<SessionInfo> MakeOnce(const std::string& id, RecordedReply::Call call,
                                       const std::string& request_id, const MayMake& may_make,
                                       const std::function<absl::StatusOr<SessionInfo>()>& make_it);

  // session_reading.cc
  bool IsAlive(const Session& session) const;  // with its mutex held
  absl::Status Look(const std::string& id, const std::function<absl::Status(Session&)>& look);

  // session_upkeep.cc
  absl::Status MakeRoom();
  bool IsReplaceable(const Session& session) const;
  bool Relieve();
  SessionPtr OldestWith(const std::function<bool(const Session&)>& has);
  bool HasAnchored(const Session& session) const;
  bool HasAnchoredTurn(const Session& session) const;
  void Enqueue(const SessionPtr& session, bool sink = false, std::chrono::milliseconds delay = {});
  void RunUpkeep();
  void LookAfter(const SessionPtr& session);
  void RunWriter();
  absl::Status WriteOut(const SessionPtr& session);
  void RestLost(Session& session, const absl::Status& why);
  void RunLease();

  Engine& engine_;
  const std::unique_ptr<SessionStore> disk_, shared_;
  const SessionOptions options_;
  const std::shared_ptr<Residency> residency_;
  SessionRecords records_;
  std::atomic<int> turns_{0};
  std::atomic<bool> draining_{false};

  SessionTable table_;
  RememberedRequests remembered_;

  std::mutex queue_mutex_;  // guards what follows, down to stopping_
  std::condition_variable queue_changed_;
  std::multimap<Clock::time_point, SessionPtr> queue_;  // when it is due, in real time
  std::condition_variable stopped_;
  bool stopping_ = false;

  // Shared with the engine's callback, which may outlive the manager.
  struct Shortage {
    std::mutex mutex;  // guards what follows
    std::condition_variable changed;
    int wanted = 0;
    bool stopping = false;
  };
  const std::shared_ptr<Shortage> shortage_ = std::make_shared<Shortage>();

  std::vector<std::thread> threads_;
};

}  // namespace efla

#endif  // EFLA_SERVER_SESSIONS_SESSION_MANAGER_IMPL_H_
