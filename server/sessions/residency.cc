#include "server/sessions/residency.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/sessions/random_id.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

// A snapshot that no record names is taken to be in the store for so long: well below the time for which
// stores keep one.
constexpr std::chrono::seconds kLooseTrust{60};
// Between attempts at a slot while calls run that will give theirs back.
constexpr std::chrono::milliseconds kSlotPoll{2};
// How many more candidates than wanted are looked at, since some are on the move already.
constexpr size_t kSpareCandidates = 16;

}  // namespace

// What Lift hands out: the state, and a mark on its residence that lasts as long.
class Residency::PinnedState {
 public:
  PinnedState(ResidencePtr residence, ResidentStatePtr state)
      : residence_(std::move(residence)), state_(std::move(state)) {}
  ~PinnedState() {
    state_.reset();
    residence_->residency_->Unpin(*residence_);
  }
  PinnedState(const PinnedState&) = delete;
  PinnedState& operator=(const PinnedState&) = delete;
  const ResidentState* get() const { return state_.get(); }

 private:
  const ResidencePtr residence_;
  ResidentStatePtr state_;
};

Residence::~Residence() {
  ResidentStatePtr device;  // let go of without the lock
  std::shared_ptr<const HostBuffer> host;
  {
    const std::lock_guard lock(residency_->mutex_);
    device = std::move(device_);
    host = std::move(host_);
    stored_.fill(false);
    residency_->Book(*this);
    residency_->all_.erase(this);
    const auto known = residency_->by_id_.find(snapshot_id_);
    if (known != residency_->by_id_.end() && known->second == this) residency_->by_id_.erase(known);
  }
}

std::shared_ptr<Residency> Residency::Create(Engine& engine, SnapshotFormat format, SessionStore* disk,
                                             SessionStore* shared, const Options& options) {
  std::shared_ptr<Residency> residency(new Residency(engine, std::move(format), disk, shared, options));
  for (SessionStore* store : {disk, shared}) {
    if (store == nullptr) continue;
    store->SetSnapshotsInUse([weak = std::weak_ptr<Residency>(residency)](const std::string& id) {
      const std::shared_ptr<Residency> known = weak.lock();
      if (known == nullptr) return false;
      const std::lock_guard lock(known->mutex_);
      const auto found = known->by_id_.find(id);
      return found != known->by_id_.end() && !found->second->weak_from_this().expired();
    });
    store->SetSessionOfSnapshot([weak = std::weak_ptr<Residency>(residency)](const std::string& id) {
      const std::shared_ptr<Residency> known = weak.lock();
      return known == nullptr ? std::string() : known->SessionOf(id);
    });
  }
  return residency;
}

Residency::Residency(Engine& engine, SnapshotFormat format, SessionStore* disk, SessionStore* shared,
                     const Options& options)
    : engine_(engine),
      format_(std::move(format)),
      stores_{disk, shared},
      options_(options),
      state_bytes_(format_.state_bytes()),
      total_slots_(engine.stats().slots.total) {}

// ---- Books ----

void Residency::Touch(Residence& residence) {
  residence.last_use_ = Now();
  auto* queue = residence.queue_ == Residence::Queue::kDevice ? &device_queue_
                : residence.queue_ == Residence::Queue::kHost ? &host_queue_
                                                              : nullptr;
  if (queue != nullptr) queue->splice(queue->end(), *queue, residence.place_);
}

// Brings totals and queues into line with what the residence holds.
void Residency::Book(Residence& residence) {
  const bool device = residence.device_ != nullptr, host = residence.host_ != nullptr;
  const bool anchored = (device || host) && !StoredSafely(residence);
  anchored_ += anchored - std::exchange(residence.booked_anchored_, anchored);
  host_bytes_ += (host - std::exchange(residence.booked_host_, host)) * state_bytes_;
  const auto queue = device ? Residence::Queue::kDevice
                     : host ? Residence::Queue::kHost
                            : Residence::Queue::kNone;
  if (queue == residence.queue_) return;
  if (residence.queue_ == Residence::Queue::kDevice) device_queue_.erase(residence.place_);
  if (residence.queue_ == Residence::Queue::kHost) host_queue_.erase(residence.place_);
  residence.queue_ = queue;
  if (queue == Residence::Queue::kNone) return;
  auto& to = queue == Residence::Queue::kDevice ? device_queue_ : host_queue_;
  // In order of last use: what sinks is mostly younger than what has sunk before it.
  auto place = to.end();
  while (place != to.begin() && (*std::prev(place))->last_use_ > residence.last_use_) --place;
  residence.place_ = to.insert(place, &residence);
}

bool Residency::StoredIn(const Residence& residence, int store) const {
  return residence.stored_[store] &&
         (residence.names_[store] > 0 || Now() - residence.loose_since_[store] < kLooseTrust);
}

bool Residency::StoredSafely(const Residence& residence) const {
  for (int store = 0; store < kNumStores; ++store) {
    if (residence.stored_[store] && residence.names_[store] > 0) return true;
  }
  return false;
}

// With mutex_ held.
ResidencePtr Residency::Make(const std::string& session_id, int64_t fed_tokens) {
  EFLA_CHECK(fed_tokens > 0);
  ResidencePtr residence(new Residence(shared_from_this(), fed_tokens, session_id));
  residence->last_use_ = Now();
  all_.insert(residence.get());
  return residence;
}

ResidencePtr Residency::AddDevice(const std::string& session_id, ContextTokens base, ResidentStatePtr state) {
  EFLA_CHECK(state != nullptr);
  auto tokens = std::make_shared<const ContextTokens>(std::move(base));
  const std::lock_guard lock(mutex_);
  ResidencePtr residence = Make(session_id, tokens->fed_tokens);
  residence->base_ = std::move(tokens);
  residence->device_ = std::move(state);
  Book(*residence);
  return residence;
}

absl::StatusOr<ResidencePtr> Residency::AddHost(const std::string& session_id, ContextTokens base,
                                                HostBuffer state) {
  EFLA_CHECK(static_cast<int64_t>(state.size()) == state_bytes_);
  if (!Reserve()) return HostIsFull();
  auto tokens = std::make_shared<const ContextTokens>(std::move(base));
  const std::lock_guard lock(mutex_);
  reserved_bytes_ -= state_bytes_;
  ResidencePtr residence = Make(session_id, tokens->fed_tokens);
  residence->base_ = std::move(tokens);
  residence->host_ = std::make_shared<const HostBuffer>(std::move(state));
  Book(*residence);
  return residence;
}

absl::StatusOr<ResidencePtr> Residency::FromRecord(const std::string& session_id,
                                                   const std::string& snapshot_id, int64_t fed_tokens,
                                                   StoreIndex store) {
  ResidencePtr residence;  // let go of without the lock
  const std::lock_guard lock(mutex_);
  Residence*& entry = by_id_[snapshot_id];
  if (entry != nullptr) residence = entry->weak_from_this().lock();
  if (residence == nullptr) {
    residence = Make(session_id, fed_tokens);
    residence->snapshot_id_ = snapshot_id;
    entry = residence.get();
  } else if (residence->fed_tokens != fed_tokens) {
    return absl::DataLossError(
        absl::StrFormat("a record says that snapshot %s covers %d tokens; it covers %d", snapshot_id,
                        fed_tokens, residence->fed_tokens));
  }
  if (!residence->stored_[store]) {
    residence->stored_[store] = true;
    residence->loose_since_[store] = Now();
    Book(*residence);
  }
  return residence;
}

void Residency::AddName(Residence& residence, StoreIndex store) {
  const std::lock_guard lock(mutex_);
  ++residence.names_[store];
  Book(residence);
}

void Residency::RemoveName(Residence& residence, StoreIndex store) {
  const std::lock_guard lock(mutex_);
  EFLA_CHECK(residence.names_[store] > 0);
  if (--residence.names_[store] == 0) residence.loose_since_[store] = Now();
  Book(residence);
}

bool Residency::HasOneName(Residence& residence, StoreIndex store) const {
  const std::lock_guard lock(mutex_);
  return residence.names_[store] == 1;
}

std::string Residency::StoredId(Residence& residence, StoreIndex store) const {
  const std::lock_guard lock(mutex_);
  return StoredIn(residence, store) ? residence.snapshot_id_ : std::string();
}

Residency::Tier Residency::tier(const Residence& residence) const {
  const std::lock_guard lock(mutex_);
  if (residence.device_ != nullptr) return Tier::kDevice;
  if (residence.host_ != nullptr) return Tier::kHost;
  if (residence.stored_[kDiskStore]) return Tier::kDisk;
  return residence.stored_[kSharedStore] ? Tier::kShared : Tier::kNone;
}

absl::Status Residency::Damage(const Residence& residence) const {
  const std::lock_guard lock(mutex_);
  return residence.damage_;
}

void Residency::NoteIfLost(Residence& residence) {
  if (residence.device_ != nullptr || residence.host_ != nullptr) return;
  if (residence.stored_[kDiskStore] || residence.stored_[kSharedStore]) return;
  residence.damage_ = WithSessionError(
      absl::DataLossError(absl::StrFormat("snapshot %s is in no store any more", residence.snapshot_id_)),
      "SNAPSHOT_DAMAGED");
}

std::string Residency::SessionOf(const std::string& snapshot_id) const {
  const std::lock_guard lock(mutex_);
  const auto known = by_id_.find(snapshot_id);
  return known == by_id_.end() ? std::string() : known->second->made_for;
}

void Residency::MarkMissing(const std::string& snapshot_id, StoreIndex store) {
  ResidencePtr residence;  // let go of without the lock
  const std::lock_guard lock(mutex_);
  const auto known = by_id_.find(snapshot_id);
  if (known == by_id_.end()) return;
  residence = known->second->weak_from_this().lock();
  if (residence == nullptr) return;
  residence->stored_[store] = false;
  NoteIfLost(*residence);
  Book(*residence);
}

absl::Status Residency::CheckWhole(Residence& residence) {
  {
    const std::lock_guard lock(mutex_);
    if (residence.device_ != nullptr || residence.host_ != nullptr || residence.seen_whole_)
      return residence.damage_;
  }
  const absl::Status status = Read(residence).status();
  return absl::IsDataLoss(status) || absl::IsFailedPrecondition(status) ? status : absl::OkStatus();
}

// It could be dropped if a store had it.
bool Residency::IdleInMemory(const Residence& residence, std::chrono::milliseconds idle) const {
  const std::lock_guard lock(mutex_);
  return (residence.device_ != nullptr || residence.host_ != nullptr) && residence.pins_ == 0 &&
         residence.last_use_ <= Now() - idle;
}

bool Residency::Anchored(const Residence& residence) const {
  const std::lock_guard lock(mutex_);
  return residence.booked_anchored_;
}

bool Residency::HasRoom() const {
  const std::lock_guard lock(mutex_);
  return anchored_ < options_.host_bytes / state_bytes_ + total_slots_ / 2;
}

// ---- Host memory ----

// Room for one more state in host memory, at no cost but to forget copies.
bool Residency::TryReserve() {
  std::vector<std::shared_ptr<const HostBuffer>> dropped;  // freed without the lock
  std::vector<std::shared_ptr<const ContextTokens>> tokens;
  const std::lock_guard lock(mutex_);
  for (Residence* residence : device_queue_) {
    if (FitsHost()) break;
    if (residence->host_ == nullptr) continue;
    dropped.push_back(std::move(residence->host_));
    Book(*residence);
  }
  for (auto next = host_queue_.begin(); next != host_queue_.end() && !FitsHost();) {
    Residence* residence = *next++;
    if (!StoredSafely(*residence)) continue;
    dropped.push_back(std::move(residence->host_));
    tokens.push_back(std::move(residence->base_));
    ++sinks_;
    Book(*residence);
  }
  if (!FitsHost()) return false;
  reserved_bytes_ += state_bytes_;
  return true;
}

bool Residency::Reserve() {
  if (state_bytes_ > options_.host_bytes) return false;
  while (!TryReserve()) {
    if (!relief_ || !relief_(state_bytes_)) return false;
  }
  return true;
}

absl::Status Residency::HostIsFull() const {
  return WithSessionError(
      absl::ResourceExhaustedError(
          absl::StrFormat("host memory for states is full: another %d bytes are needed and the limit is %d",
                          state_bytes_, options_.host_bytes)),
      "SESSION_LIMIT");
}

void Residency::Unreserve() {
  const std::lock_guard lock(mutex_);
  reserved_bytes_ -= state_bytes_;
}

// ---- To the device ----

bool Residency::Pin(Residence& residence, Clock::time_point deadline) {
  // Of two slots one must stay for the calls themselves, or calls that hold what they start from would wait
  // for slots that only each other's end could free.
  const int most = std::max(1, total_slots_ / 2);
  std::unique_lock lock(mutex_);
  const auto may = [&] { return residence.pins_ > 0 || pinned_ < most; };
  if (!unpinned_.wait_until(lock, deadline, may)) return false;
  if (residence.pins_++ == 0) ++pinned_;
  return true;
}

void Residency::Unpin(Residence& residence) {
  const std::lock_guard lock(mutex_);
  EFLA_CHECK(residence.pins_ > 0);
  Touch(residence);
  if (--residence.pins_ == 0) --pinned_;
  unpinned_.notify_all();
}

absl::StatusOr<Residency::Lifted> Residency::Lift(Residence& residence) {
  const Clock::time_point deadline = Clock::now() + options_.slot_wait;
  if (!Pin(residence, deadline)) {
    return WithSessionError(
        absl::ResourceExhaustedError(absl::StrFormat(
            "other turns hold the device's slots for what they start from (%d of %d) for longer than %d ms",
            std::max(1, total_slots_ / 2), total_slots_, options_.slot_wait.count())),
        "NO_STATE_SLOT");
  }
  absl::StatusOr<Lifted> lifted = LiftPinned(residence, deadline);
  if (!lifted.ok()) Unpin(residence);
  return lifted;
}

absl::StatusOr<Residency::Lifted> Residency::LiftPinned(Residence& residence, Clock::time_point deadline) {
  const auto lifted = [&](ResidentStatePtr state, std::shared_ptr<const ContextTokens> base) {
    const auto pin = std::make_shared<PinnedState>(residence.shared_from_this(), std::move(state));
    return Lifted{ResidentStatePtr(pin, pin->get()), std::move(base)};
  };
  // Null unless it is there already.
  const auto on_device = [&]() -> Lifted {
    const std::lock_guard lock(mutex_);
    if (residence.device_ == nullptr) return {};
    Touch(residence);
    return {residence.device_, residence.base_};
  };
  State state;
  std::atomic<uint64_t>* from = &lifts_host_;
  for (;;) {
    // Not behind a transfer: a state that is being written to a store can be used meanwhile.
    if (Lifted here = on_device(); here.state != nullptr) return lifted(here.state, here.base);
    {
      const std::lock_guard transfer(residence.transfer_);
      if (Lifted here = on_device(); here.state != nullptr) return lifted(here.state, here.base);
      if (state.bytes == nullptr) {
        const Tier tier = this->tier(residence);
        from = tier == Tier::kHost ? &lifts_host_ : tier == Tier::kDisk ? &lifts_disk_ : &lifts_shared_;
        absl::StatusOr<State> read = ReadHeld(residence);
        if (!read.ok()) return read.status();
        state = *std::move(read);
      }
      absl::StatusOr<ResidentStatePtr> device = engine_.CopyIn(*state.bytes);
      if (device.ok()) {
        ++*from;
        {
          const std::lock_guard lock(mutex_);
          residence.device_ = *device;
          residence.base_ = state.base;
          Book(residence);
          Touch(residence);
        }
        return lifted(*std::move(device), state.base);
      }
      if (device.status().code() != absl::StatusCode::kResourceExhausted) return device.status();
    }
    if (Clock::now() >= deadline) {
      return WithSessionError(
          absl::ResourceExhaustedError(absl::StrFormat("none of the device's %d slots came free within %d ms",
                                                       total_slots_, options_.slot_wait.count())),
          "NO_STATE_SLOT");
    }
    if (SinkOldest(1) == 0) std::this_thread::sleep_for(kSlotPoll);
  }
}

absl::Status Residency::LiftToHost(Residence& residence) {
  {
    const std::lock_guard lock(mutex_);
    if (residence.device_ != nullptr || residence.host_ != nullptr) return absl::OkStatus();
  }
  if (!Reserve()) return HostIsFull();
  const std::lock_guard transfer(residence.transfer_);
  absl::StatusOr<State> state = ReadHeld(residence);
  const std::lock_guard lock(mutex_);
  reserved_bytes_ -= state_bytes_;
  if (!state.ok()) return state.status();
  if (residence.device_ != nullptr || residence.host_ != nullptr) return absl::OkStatus();
  ++(residence.stored_[kDiskStore] ? lifts_disk_ : lifts_shared_);
  residence.host_ = std::move(state->bytes);
  residence.base_ = std::move(state->base);
  Touch(residence);
  Book(residence);
  return absl::OkStatus();
}

// ---- Off the device ----

// Least recently used first.
std::vector<ResidencePtr> Residency::Sinkable(size_t limit, Clock::time_point not_used_since) {
  std::vector<ResidencePtr> found;
  const std::lock_guard lock(mutex_);
  for (Residence* residence : device_queue_) {
    if (found.size() >= limit || residence->last_use_ > not_used_since) break;
    if (residence->pins_ > 0) continue;
    if (ResidencePtr held = residence->weak_from_this().lock()) found.push_back(std::move(held));
  }
  return found;
}

absl::Status Residency::SinkReserved(Residence& residence) {
  ResidentStatePtr device;
  std::shared_ptr<const ContextTokens> base;
  {
    const std::lock_guard lock(mutex_);
    device = residence.device_;
    base = residence.base_;
    if (device == nullptr || residence.host_ != nullptr) {
      reserved_bytes_ -= state_bytes_;
      if (residence.device_ != nullptr) ++sinks_;
      residence.device_.reset();
      Book(residence);
      return absl::OkStatus();
    }
  }
  auto bytes = std::make_shared<HostBuffer>(format_.buffers()->Take(static_cast<size_t>(state_bytes_)));
  const absl::Status status = engine_.CopyOut(*device, bytes->span());
  const std::lock_guard lock(mutex_);
  reserved_bytes_ -= state_bytes_;
  if (!status.ok()) return status;
  residence.host_ = std::move(bytes);
  residence.base_ = std::move(base);
  residence.device_.reset();
  ++sinks_;
  Book(residence);
  return absl::OkStatus();
}

absl::Status Residency::Sink(Residence& residence) {
  if (Reserve()) {
    const std::lock_guard transfer(residence.transfer_);
    return SinkReserved(residence);
  }
  ResidentStatePtr device;
  const std::lock_guard lock(mutex_);
  if (residence.device_ == nullptr) return absl::OkStatus();
  if (residence.host_ == nullptr && !StoredSafely(residence)) return HostIsFull();
  device = std::move(residence.device_);
  if (residence.host_ == nullptr) residence.base_.reset();
  ++sinks_;
  Book(residence);
  return absl::OkStatus();
}

int Residency::SinkOldest(int wanted) {
  int freed = 0;
  for (const ResidencePtr& residence : Sinkable(wanted + kSpareCandidates, Clock::time_point::max())) {
    if (freed >= wanted) break;
    if (Reserve()) {
      const std::unique_lock transfer(residence->transfer_, std::try_to_lock);
      if (!transfer) {
        Unreserve();  // it is on its way somewhere
        continue;
      }
      if (!SinkReserved(*residence).ok()) continue;
    } else if (!Sink(*residence).ok()) {
      continue;
    }
    ++freed;
  }
  if (freed > 0) engine_.Wake();
  return freed;
}

void Residency::SinkIdle(std::chrono::milliseconds idle) {
  bool freed = false;
  for (const ResidencePtr& residence : Sinkable(total_slots_, Now() - idle)) freed |= Sink(*residence).ok();
  if (freed) engine_.Wake();
}

bool Residency::DropFromMemory(Residence& residence, std::chrono::milliseconds idle) {
  ResidentStatePtr device;
  std::shared_ptr<const HostBuffer> host;
  std::shared_ptr<const ContextTokens> base;
  const std::lock_guard lock(mutex_);
  if (residence.pins_ > 0 || !StoredSafely(residence) || residence.last_use_ > Now() - idle) return false;
  if (residence.device_ == nullptr && residence.host_ == nullptr) return true;
  device = std::move(residence.device_);
  host = std::move(residence.host_);
  base = std::move(residence.base_);
  ++sinks_;
  Book(residence);
  return true;
}

// ---- To and from the stores ----

// From whichever store has it.
absl::StatusOr<Residency::State> Residency::Fetch(Residence& residence) {
  std::array<bool, kNumStores> stored;
  std::string id;
  {
    const std::lock_guard lock(mutex_);
    stored = residence.stored_;
    id = residence.snapshot_id_;
  }
  absl::Status error = absl::DataLossError(absl::StrFormat("snapshot %s is in no store any more", id));
  // A store that cannot be read now may have it whole: that counts for more than damage in the other one.
  const auto failed = [&](absl::Status status) {
    if (!absl::IsUnavailable(error)) error = std::move(status);
  };
  for (int store = 0; store < kNumStores; ++store) {
    if (!stored[store]) continue;
    absl::StatusOr<HostBuffer> bytes = stores_[store]->GetSnapshot(id);
    if (!bytes.ok()) {
      if (absl::IsNotFound(bytes.status())) {
        const std::lock_guard lock(mutex_);
        residence.stored_[store] = false;
        Book(residence);
      } else {
        ++store_errors_;
        failed(bytes.status());
      }
      continue;
    }
    absl::StatusOr<Snapshot> snapshot =
        format_.DecodeInPlace(*std::move(bytes), options_.allow_other_numerics);
    if (!snapshot.ok()) {
      failed(snapshot.status());
    } else if (snapshot->tokens.fed_tokens != residence.fed_tokens) {
      failed(absl::DataLossError(absl::StrFormat("snapshot %s covers %d tokens; its record says %d", id,
                                                 snapshot->tokens.fed_tokens, residence.fed_tokens)));
    } else {
      {
        const std::lock_guard lock(mutex_);
        residence.damage_ = absl::OkStatus();
        residence.seen_whole_ = true;
      }
      return State{std::make_shared<const ContextTokens>(std::move(snapshot->tokens)),
                   std::make_shared<const HostBuffer>(std::move(snapshot->state))};
    }
  }
  if (absl::IsDataLoss(error)) {
    error = WithSessionError(std::move(error), "SNAPSHOT_DAMAGED");
    const std::lock_guard lock(mutex_);
    residence.damage_ = error;
  }
  if (absl::IsFailedPrecondition(error)) error = WithSessionError(std::move(error), "SNAPSHOT_MISMATCH");
  if (absl::IsUnavailable(error)) error = WithSessionError(std::move(error), "STORE_UNAVAILABLE");
  return error;
}

absl::StatusOr<Residency::State> Residency::ReadHeld(Residence& residence) {
  ResidentStatePtr device;
  State state;
  {
    const std::lock_guard lock(mutex_);
    state = {residence.base_, residence.host_};
    device = residence.device_;
  }
  if (state.bytes != nullptr) return state;
  if (device == nullptr) return Fetch(residence);
  auto bytes = std::make_shared<HostBuffer>(format_.buffers()->Take(static_cast<size_t>(state_bytes_)));
  if (absl::Status status = engine_.CopyOut(*device, bytes->span()); !status.ok()) return status;
  state.bytes = std::move(bytes);
  // Where there is room the copy stays, and the state sinks later at no cost.
  const std::lock_guard lock(mutex_);
  if (residence.device_ != nullptr && residence.host_ == nullptr && FitsHost()) {
    residence.host_ = state.bytes;
    Book(residence);
  }
  return state;
}

absl::StatusOr<Residency::State> Residency::Read(Residence& residence) {
  const std::lock_guard transfer(residence.transfer_);
  return ReadHeld(residence);
}

absl::Status Residency::Store(Residence& residence, StoreIndex store) {
  EFLA_CHECK(stores_[store] != nullptr);
  const std::lock_guard transfer(residence.transfer_);
  {
    const std::lock_guard lock(mutex_);
    if (StoredIn(residence, store)) return absl::OkStatus();
  }
  absl::StatusOr<State> state = ReadHeld(residence);
  if (!state.ok()) return state.status();
  absl::StatusOr<HostBuffer> bytes = format_.Encode(*state->base, *state->bytes);
  if (!bytes.ok()) return bytes.status();
  std::string id;
  {
    const std::lock_guard lock(mutex_);
    if (residence.snapshot_id_.empty()) {
      residence.snapshot_id_ = RandomId();
      by_id_[residence.snapshot_id_] = &residence;
    }
    id = residence.snapshot_id_;
  }
  if (absl::Status status = stores_[store]->PutSnapshot(id, *bytes); !status.ok()) {
    ++store_errors_;
    return status;
  }
  stored_bytes_ += static_cast<int64_t>(bytes->size());
  const std::lock_guard lock(mutex_);
  residence.stored_[store] = residence.seen_whole_ = true;
  residence.loose_since_[store] = Now();
  Book(residence);
  return absl::OkStatus();
}

void Residency::Recheck(Residence& residence, StoreIndex store) {
  std::string id;
  bool in_memory;
  {
    const std::lock_guard lock(mutex_);
    id = residence.snapshot_id_;
    in_memory = residence.device_ != nullptr || residence.host_ != nullptr;
  }
  if (!in_memory) {
    const absl::StatusOr<bool> has = stores_[store]->HasSnapshot(id);
    if (!has.ok() || *has) return;
  }
  const std::lock_guard lock(mutex_);
  residence.stored_[store] = false;
  NoteIfLost(residence);
  Book(residence);
}

// ---- Readings ----

Residency::Stats Residency::stats() const {
  Stats stats;
  stats.lifts_host = lifts_host_;
  stats.lifts_disk = lifts_disk_;
  stats.lifts_shared = lifts_shared_;
  stats.sinks = sinks_;
  stats.store_errors = store_errors_;
  stats.stored_bytes = stored_bytes_;
  const std::lock_guard lock(mutex_);
  stats.device = static_cast<int>(device_queue_.size());
  stats.host = static_cast<int>(host_queue_.size());
  stats.stored = static_cast<int>(all_.size()) - stats.device - stats.host;
  stats.anchored = anchored_;
  stats.host_bytes = host_bytes_;
  return stats;
}

absl::Status Residency::CheckInvariants() const {
  const std::lock_guard lock(mutex_);
  const auto differs = [](const char* what, int64_t booked, int64_t counted) {
    return absl::InternalError(absl::StrFormat("%s: %d are booked, %d are there", what, booked, counted));
  };
  int64_t device = 0, host_only = 0, host = 0, anchored = 0, pinned = 0;
  for (const Residence* residence : all_) {
    const bool in_device = residence->device_ != nullptr, in_host = residence->host_ != nullptr;
    device += in_device;
    host += in_host;
    host_only += in_host && !in_device;
    anchored += (in_device || in_host) && !StoredSafely(*residence);
    pinned += residence->pins_ > 0;
    if (residence->pins_ < 0) return absl::InternalError("a state has fewer than no pins");
    if ((in_device || in_host) && residence->base_ == nullptr) {
      return absl::InternalError("a state in memory has lost its tokens");
    }
    if (in_host && static_cast<int64_t>(residence->host_->size()) != state_bytes_) {
      return absl::InternalError("a state in host memory has not its size");
    }
  }
  if (device != std::ssize(device_queue_))
    return differs("states on the device", std::ssize(device_queue_), device);
  if (host_only != std::ssize(host_queue_))
    return differs("states in host memory", std::ssize(host_queue_), host_only);
  if (host * state_bytes_ != host_bytes_)
    return differs("bytes of host memory", host_bytes_, host * state_bytes_);
  if (anchored != anchored_) return differs("states in memory only", anchored_, anchored);
  if (pinned != pinned_) return differs("states that are stood on", pinned_, pinned);
  if (host_bytes_ + reserved_bytes_ > options_.host_bytes) {
    return differs("bytes of host memory against the limit", options_.host_bytes,
                   host_bytes_ + reserved_bytes_);
  }
  for (const auto& [id, residence] : by_id_) {
    if (residence->snapshot_id_ != id) return absl::InternalError("a snapshot's id leads to another state");
  }
  return absl::OkStatus();
}

}  // namespace efla
