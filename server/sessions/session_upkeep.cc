// What the manager does by itself: see session_manager_impl.h.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/session_error.h"
#include "server/sessions/session_manager_impl.h"

namespace efla {
namespace {

constexpr std::chrono::milliseconds kUpkeepInterval{100};
// Calls for slots are answered by what is there; where that does not do, the engine is woken to ask again
// after this.
constexpr std::chrono::milliseconds kShortageInterval{10};
constexpr size_t kSessionsAPass = 2000;
constexpr int kWriters = 2;
constexpr int kDrainWriters = 8;
constexpr std::chrono::milliseconds kFirstRetry{100}, kLongestRetry{5'000};
constexpr std::chrono::milliseconds kRoomPoll{5};
// How long upkeep leaves a session alone whose last write found the state of its head lost.
constexpr std::chrono::minutes kLossPause{5};

template <typename Visit>
bool AnyContext(const SessionState& state, const Visit& is) {
  return is(*state.head) ||
         std::any_of(state.turns.begin(), state.turns.end(),
                     [&](const auto& turn) { return is(*turn.context); }) ||
         std::any_of(state.marks.begin(), state.marks.end(),
                     [&](const auto& mark) { return is(*mark.second.context); });
}

}  // namespace

absl::Status SessionManagerImpl::Begin() {
  if (disk_) {
    const absl::StatusOr<std::vector<ListedRecord>> records = disk_->ListRecords("");
    if (!records.ok()) return records.status();
    // Taken before anything is given out: a process that ends without putting it back leaves it so.
    const absl::StatusOr<bool> clean = disk_->TakeCleanMark();
    if (!clean.ok()) return clean.status();
    if (!*clean) records_.SetUncleanStart();
    for (const ListedRecord& record : *records) {
      const std::string& id = record.session_id;
      // One that cannot be read is left alone; who asks for it gets the error.
      absl::StatusOr<SessionPtr> session = records_.Load(id, kDiskStore, /*may_wait=*/false);
      if (session.ok()) {
        table_.Add(*std::move(session));
      } else if (!absl::IsNotFound(session.status())) {
        residency_->CountStoreError();
        if (options_.on_unusable) options_.on_unusable(id, session.status());
      }
    }
  }
  // While the store cannot be reached the server starts nevertheless; claims ask for the lease again.
  if (shared_) records_.RenewLease().IgnoreError();

  residency_->SetRelief([this](int64_t) { return Relieve(); });
  engine_.SetSlotShortageCallback([shortage = shortage_](int wanted) {
    const std::lock_guard lock(shortage->mutex);
    shortage->wanted = std::max(shortage->wanted, wanted);
    shortage->changed.notify_one();
  });
  threads_.emplace_back([this] { RunUpkeep(); });
  if (records_.has_home()) {
    for (int i = 0; i < kWriters; ++i) threads_.emplace_back([this] { RunWriter(); });
  }
  if (shared_) threads_.emplace_back([this] { RunLease(); });
  return absl::OkStatus();
}

SessionManagerImpl::~SessionManagerImpl() {
  EFLA_CHECK(turns_ == 0);
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  queue_changed_.notify_all();
  stopped_.notify_all();
  {
    const std::lock_guard lock(shortage_->mutex);
    shortage_->stopping = true;
  }
  shortage_->changed.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// ---- Room for states ----

// With the session's mutex held.
bool SessionManagerImpl::HasAnchored(const Session& session) const {
  return AnyContext(session.state, [&](const Context& context) {
    return context.residence != nullptr && residency_->Anchored(*context.residence);
  });
}

bool SessionManagerImpl::HasAnchoredTurn(const Session& session) const {
  return std::any_of(session.state.turns.begin(), session.state.turns.end(), [&](const auto& turn) {
    return turn.context->residence != nullptr && residency_->Anchored(*turn.context->residence);
  });
}

SessionPtr SessionManagerImpl::OldestWith(const std::function<bool(const Session&)>& has) {
  SessionPtr oldest;
  Clock::time_point oldest_use = Clock::time_point::max();
  for (SessionPtr& session : table_.All()) {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive || session->last_use >= oldest_use || !has(*session)) continue;
    oldest_use = session->last_use;
    oldest = session;
  }
  return oldest;
}

// Makes one session's states forgettable: writes them, or, where there is no store that takes them, drops the
// oldest kept turn. False: nothing is left to be done.
bool SessionManagerImpl::Relieve() {
  if (records_.has_home()) {
    const SessionPtr session = OldestWith([this](const Session& s) { return HasAnchored(s); });
    if (session == nullptr) return false;
    if (records_.Write(*session, /*all_turns=*/true).ok()) {
      const std::lock_guard lock(session->mutex);
      if (!HasAnchored(*session)) return true;
    }
  }
  const SessionPtr session = OldestWith([this](const Session& s) { return HasAnchoredTurn(s); });
  if (session == nullptr) return false;
  ContextPtr dropped;  // let go of without the lock
  const std::lock_guard lock(session->mutex);
  auto& turns = session->state.turns;
  const auto turn = std::find_if(turns.begin(), turns.end(), [&](const auto& kept) {
    return kept.context->residence != nullptr && residency_->Anchored(*kept.context->residence);
  });
  if (turn == turns.end()) return true;  // somebody else was faster
  dropped = turn->context;
  turns.erase(turns.begin(), turn + 1);                // a rewind past a gap would be a surprise
  if (!shared_ || session->owned) ++session->changes;  // of another's record this is only a copy
  return true;
}

// Whether a turn's commit may take the place of its session's head and kept turns: nothing else stands on the
// head, so that afterwards no more states are in memory than before.
bool SessionManagerImpl::IsReplaceable(const Session& session) const {
  const std::lock_guard lock(session.mutex);
  const Context& head = *session.state.head;
  // The session's and the turn's; a fork, a mark or a call that is reading it would have another.
  return head.residence != nullptr && session.state.head.use_count() <= 2 && head.residence.use_count() == 1;
}

// Before a turn makes another state.
absl::Status SessionManagerImpl::MakeRoom() {
  const Clock::time_point deadline = Clock::now() + options_.slot_wait;
  while (!residency_->HasRoom()) {
    if (Relieve()) continue;
    if (!records_.has_home() || Clock::now() >= deadline) {
      return WithSessionError(
          absl::ResourceExhaustedError(absl::StrFormat("the states that only memory holds fill it: %d of %d "
                                                       "bytes each; the limit is %d bytes of host memory "
                                                       "beside half of the device's slots",
                                                       residency_->stats().anchored,
                                                       residency_->state_bytes(), options_.host_bytes)),
          "SESSION_LIMIT");
    }
    std::this_thread::sleep_for(kRoomPoll);
  }
  return absl::OkStatus();
}

// ---- Upkeep ----

void SessionManagerImpl::RunUpkeep() {
  std::string last_looked_at;
  Clock::time_point next_pass = Clock::now();
  for (;;) {
    int wanted;
    {
      std::unique_lock lock(shortage_->mutex);
      shortage_->changed.wait_until(lock, next_pass,
                                    [this] { return shortage_->stopping || shortage_->wanted > 0; });
      if (shortage_->stopping) return;
      wanted = std::exchange(shortage_->wanted, 0);
    }
    if (wanted > 0) {
      int freed = residency_->SinkOldest(wanted);
      if (freed < wanted && Relieve()) freed += residency_->SinkOldest(wanted - freed);
      if (freed < wanted) std::this_thread::sleep_for(kShortageInterval);
      engine_.Wake();
    }
    if (Clock::now() < next_pass) continue;
    next_pass = Clock::now() + kUpkeepInterval;

    residency_->SinkIdle(options_.device_idle);
    for (const SessionPtr& session : table_.Next(last_looked_at, kSessionsAPass)) LookAfter(session);
  }
}

void SessionManagerImpl::LookAfter(const SessionPtr& session) {
  bool evict = false, sink = false, expired = false;
  {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) {
      evict = true;
    } else if (session->writer == Session::Writer::kNone && !session->queued) {
      expired = records_.Expired(*session);
      const Clock::time_point now = records_.Now();
      const bool idle = now - session->last_use >= options_.host_idle && now >= session->idle_until;
      const bool dirty = session->changes != session->written_changes;
      if (idle && records_.has_home()) {
        sink = dirty || AnyContext(session->state, [&](const Context& context) {
                 return context.residence != nullptr &&
                        residency_->IdleInMemory(*context.residence, options_.host_idle);
               });
        // What is only a copy of a shared store's record need not be kept for ever.
        evict = !sink && shared_ && !session->owned;
      }
    }
  }
  if (expired && !records_.has_home()) {
    if (records_.Expire(*session)) table_.Remove(session);
  } else if (sink || expired) {
    Enqueue(session, sink);
  } else if (evict && records_.Evict(*session)) {
    table_.Remove(session);
  }
}

// ---- Writing ----

void SessionManagerImpl::Enqueue(const SessionPtr& session, bool sink, std::chrono::milliseconds delay) {
  if (!records_.has_home()) return;
  {
    const std::lock_guard lock(session->mutex);
    session->sink_wanted |= sink;
    if (session->queued) return;
    session->queued = true;
  }
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.emplace(Clock::now() + delay, session);
  }
  queue_changed_.notify_one();
}

void SessionManagerImpl::RunWriter() {
  for (;;) {
    SessionPtr session;
    {
      std::unique_lock lock(queue_mutex_);
      for (;;) {
        if (stopping_) return;
        const Clock::time_point now = Clock::now();
        if (!queue_.empty() && queue_.begin()->first <= now) break;
        if (queue_.empty()) {
          queue_changed_.wait(lock);
        } else {
          queue_changed_.wait_until(lock, queue_.begin()->first);
        }
      }
      session = std::move(queue_.begin()->second);
      queue_.erase(queue_.begin());
    }
    {
      const std::lock_guard lock(session->mutex);
      session->queued = false;
    }
    if (WriteOut(session).ok()) continue;
    std::chrono::milliseconds delay;
    {
      const std::lock_guard lock(session->mutex);
      if (session->life != Session::Life::kLive) continue;
      delay = std::min(kLongestRetry, kFirstRetry * (1 << std::min(session->failures++, 10)));
    }
    Enqueue(session, false, delay);
  }
}

absl::Status SessionManagerImpl::WriteOut(const SessionPtr& session) {
  bool expired, sink;
  {
    const std::lock_guard lock(session->mutex);
    expired = records_.Expired(*session);
    sink = std::exchange(session->sink_wanted, false);
  }
  absl::Status status;
  if (expired) {
    bool mine;
    {
      const std::lock_guard lock(session->mutex);
      mine = !shared_ || session->owned;
    }
    // Another replica may have used it since: then its record lives longer, else the store itself lets it go.
    if (mine) {
      status = records_.Delete(*session);
    } else {
      records_.Evict(*session);
    }
  } else {
    status = records_.Write(*session, sink);
    if (sink && records_.has_both()) status.Update(records_.WriteToDisk(*session));
  }
  std::vector<ResidencePtr> residences;
  bool over;
  {
    const std::lock_guard lock(session->mutex);
    over = session->life != Session::Life::kLive;
    if (status.ok()) {
      session->failures = 0;
      session->loss_told = false;
    }
    if (!status.ok()) session->sink_wanted |= sink;
    if (sink) {
      AnyContext(session->state, [&](const Context& context) {
        if (context.residence != nullptr) residences.push_back(context.residence);
        return false;
      });
    }
  }
  if (over) table_.Remove(session);
  for (const ResidencePtr& residence : residences) residency_->DropFromMemory(*residence, options_.host_idle);
  if (over) return absl::OkStatus();
  if (expired || !absl::IsDataLoss(status)) return status;
  RestLost(*session, status);
  return absl::OkStatus();
}

// What is lost stays so: another attempt is worth its while after another change, which comes here by itself.
void SessionManagerImpl::RestLost(Session& session, const absl::Status& why) {
  bool is_news;
  {
    const std::lock_guard lock(session.mutex);
    session.idle_until = records_.Now() + kLossPause;
    is_news = !std::exchange(session.loss_told, true);
  }
  if (is_news && options_.on_lost) options_.on_lost(session.id, why);
}

void SessionManagerImpl::RunLease() {
  std::unique_lock lock(queue_mutex_);
  std::chrono::milliseconds wait = options_.lease_ttl / 3;
  while (!stopped_.wait_for(lock, wait, [this] { return stopping_; })) {
    if (draining_) continue;
    lock.unlock();
    const absl::Status status = records_.RenewLease();
    lock.lock();
    wait = status.ok() ? options_.lease_ttl / 3 : options_.lease_ttl / 20;
  }
}

std::vector<std::string> SessionManagerImpl::Drain(std::chrono::milliseconds timeout) {
  draining_ = true;
  const Clock::time_point deadline = Clock::now() + timeout;
  while (turns_ > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kRoomPoll);

  const std::vector<SessionPtr> sessions = table_.All();
  if (records_.has_home()) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> writers;
    for (int i = 0; i < kDrainWriters; ++i) {
      writers.emplace_back([&] {
        for (size_t at = next++; at < sessions.size() && Clock::now() < deadline; at = next++) {
          for (;;) {
            const absl::Status status = records_.Write(*sessions[at], false);
            // One whose state is lost stays so.
            if (status.ok() || absl::IsDataLoss(status) || Clock::now() + kFirstRetry >= deadline) break;
            std::this_thread::sleep_for(kFirstRetry);
          }
        }
      });
    }
    for (std::thread& writer : writers) writer.join();
  }
  std::vector<std::string> lost;
  bool skips = false;
  for (const SessionPtr& session : sessions) {
    const std::lock_guard lock(session->mutex);
    if (session->life != Session::Life::kLive) continue;
    if (session->durable_revision < session->state.revision) lost.push_back(session->id);
    skips |=
        session->state.skipped > 0;  // nobody has left out yet what an earlier process may have given out
  }
  if (shared_) {
    records_.EndLease();
  } else if (disk_ && lost.empty() && !skips && turns_ == 0) {
    // An error leaves it out, at the cost of revisions that are skipped.
    disk_->PutCleanMark().IgnoreError();
  }
  return lost;
}

}  // namespace efla
