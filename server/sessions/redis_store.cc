#include "server/sessions/redis_store.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/sessions/host_lookup.h"
#include "server/sessions/random_id.h"
#include "server/sessions/redis_connection.h"
#include "server/sessions/stored_record.h"

namespace efla {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Words = std::initializer_list<std::string_view>;

constexpr size_t kPieceBytes = 1 << 20;
constexpr size_t kMaxSnapshotBytes = size_t{4} << 30;
constexpr size_t kPiecesAhead = 4;  // on the wire before a reply is waited for: enough to hide its way
constexpr milliseconds kLoadingPollInterval{100};
constexpr int kMaxBusyWaits = 10;  // command_timeouts that a call waits for a connection

// Scripts are given the snapshots' key prefix and the grace in milliseconds before their own arguments.
// Snapshot ID: a hash at PREFIX..ID with fields bytes, pieces, hash, and for each session that names it a
// field "r:SESSION" with the time at which that record expires; pieces at PREFIX..ID..":0" and on.
constexpr std::string_view kSnapshotFunctions = R"lua(
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local snapshots, grace = ARGV[1], tonumber(ARGV[2])

local function is_whole(id)
  local pieces = redis.call('HGET', snapshots .. id, 'pieces')
  if not pieces then return false end
  for i = 0, pieces - 1 do
    if redis.call('EXISTS', snapshots .. id .. ':' .. i) == 0 then return false end
  end
  return true
end

-- Expires a grace after the last record that names it. Pieces outlive their manifest: its readers find them.
local function settle(id)
  local fields = redis.call('HGETALL', snapshots .. id)
  local pieces, last = 0, now
  for i = 1, #fields, 2 do
    if fields[i] == 'pieces' then
      pieces = tonumber(fields[i + 1])
    elseif string.sub(fields[i], 1, 2) == 'r:' then
      last = math.max(last, tonumber(fields[i + 1]))
    end
  end
  redis.call('PEXPIREAT', snapshots .. id, last + grace)
  for i = 0, pieces - 1 do redis.call('PEXPIREAT', snapshots .. id .. ':' .. i, last + 2 * grace) end
end
)lua";

// ARGV: id, hash. 1: it is here already, and kept; 0: it is not; 2: with other content.
constexpr std::string_view kTouchSnapshot = R"lua(
local id = ARGV[3]
if not is_whole(id) then return 0 end
if redis.call('HGET', snapshots .. id, 'hash') ~= ARGV[4] then return 2 end
settle(id)
return 1
)lua";

// The pieces are there. ARGV: id, bytes, pieces, hash.
constexpr std::string_view kPublishSnapshot = R"lua(
local id = ARGV[3]
redis.call('HSET', snapshots .. id, 'bytes', ARGV[4], 'pieces', ARGV[5], 'hash', ARGV[6])
settle(id)
return 1
)lua";

// CheckReplaces of stored_record.h, and the put, in one step. KEYS: the record. ARGV: session, expected
// epoch, epoch, revision (20 digits each, so that they compare as texts), owner, deleted, expiry (0: never),
// snapshots, payload, the put's own id, time to live of a record that never expires. {0}: done; {1, ...}:
// stale, with the stored epoch, revision, owner, deleted, or nothing when there is no record; {2, id}: lacks
// a snapshot.
constexpr std::string_view kPutRecord = R"lua(
local key, session, expected, epoch, revision = KEYS[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local owner, deleted, expires = ARGV[7], ARGV[8], tonumber(ARGV[9])
local old = redis.call('HMGET', key, 'epoch', 'revision', 'owner', 'deleted', 'snapshots', 'put')
-- The same put once more, after its first reply was lost.
if old[6] == ARGV[12] then return {0} end
-- A damaged record counts as none, so that a deletion can replace it.
if old[1] and not (string.match(old[1], '^%d+$') and string.match(old[2] or '', '^%d+$')) then old[1] = false end

local replaces = false
if not old[1] then
  replaces = expected == string.rep('0', 20)
elseif old[4] == '1' then
  local is_expected = expected == string.rep('0', 20) or expected == old[1]
  replaces = is_expected and (epoch > old[1] or (deleted == '1' and epoch == old[1]))
elseif expected == old[1] then
  local takes = owner ~= '' and owner ~= old[3]
  local goes_back = revision < old[2]
  local claims_stale = goes_back and owner ~= '' and revision ~= string.rep('0', 20)
  if epoch > old[1] then
    replaces = not claims_stale or deleted == '1'
  else
    replaces = not goes_back and not takes
  end
end
if not replaces then
  if not old[1] then return {1} end
  return {1, old[1], old[2], old[3], old[4]}
end

local before, named = {}, {}
for id in string.gmatch(old[5] or '', '%S+') do before[id] = true end
for id in string.gmatch(ARGV[10], '%S+') do
  if not named[id] then
    local is_here = before[id] and redis.call('EXISTS', snapshots .. id) == 1 or is_whole(id)
    if not is_here then return {2, id} end
    named[id] = true
  end
end

if expires == 0 then expires = now + tonumber(ARGV[13]) end
-- A deletion makes room first: a server out of memory refuses what a script writes first, not what follows.
if deleted == '1' then redis.call('DEL', key) end
redis.call('HSET', key, 'epoch', epoch, 'revision', revision, 'owner', owner, 'deleted', deleted,
           'expires', ARGV[9], 'snapshots', ARGV[10], 'payload', ARGV[11], 'put', ARGV[12])
redis.call('PEXPIREAT', key, expires)
for id in pairs(named) do
  local until_ms = now + redis.call('PTTL', snapshots .. id)
  if not before[id] or until_ms < expires + grace / 2 then
    redis.call('HSET', snapshots .. id, 'r:' .. session, expires)
    settle(id)
  end
end
for id in pairs(before) do
  if not named[id] and redis.call('HDEL', snapshots .. id, 'r:' .. session) == 1 then settle(id) end
end
return {0}
)lua";

template <typename T>
bool ReadNumber(const RedisReply& reply, T& value) {
  const std::string& text = reply.text;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return reply.type == RedisReply::Type::kText && error == std::errc() && end == text.data() + text.size();
}

// Before glob characters of a key prefix.
std::string EscapeGlob(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (std::string_view("*?[]\\^").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

// Lets calls through, or not: closed, open for a time after failures in a row, half-open while one call
// probes.
class CircuitBreaker {
 public:
  CircuitBreaker(int failures, milliseconds open_for) : max_failures_(failures), open_for_(open_for) {}

  // Each OK is followed by one of Succeeded, Failed, Abandoned.
  absl::Status Admit() {
    const std::lock_guard lock(mutex_);
    if (failures_ < max_failures_) return absl::OkStatus();
    const auto now = SteadyClock::now();
    if (!probing_ && now >= open_until_) {
      probing_ = true;
      return absl::OkStatus();
    }
    ++refused_;
    const int64_t left = std::chrono::ceil<milliseconds>(open_until_ - now).count();
    return absl::UnavailableError(absl::StrFormat("the session store does not answer (%s); next try in %d ms",
                                                  last_error_, std::max<int64_t>(left, 0)));
  }
  void Succeeded() {
    const std::lock_guard lock(mutex_);
    failures_ = 0;
    probing_ = false;
  }
  void Failed(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    ++failures_;
    probing_ = false;
    last_error_ = std::string(status.message());
    if (failures_ >= max_failures_) open_until_ = SteadyClock::now() + open_for_;
  }
  void Abandoned() {
    const std::lock_guard lock(mutex_);
    probing_ = false;
  }
  RedisStore::Breaker state() const {
    const std::lock_guard lock(mutex_);
    if (failures_ < max_failures_) return RedisStore::Breaker::kClosed;
    return probing_ ? RedisStore::Breaker::kHalfOpen : RedisStore::Breaker::kOpen;
  }
  uint64_t refused() const {
    const std::lock_guard lock(mutex_);
    return refused_;
  }

 private:
  const int max_failures_;
  const milliseconds open_for_;
  mutable std::mutex mutex_;
  int failures_ = 0;  // in a row
  bool probing_ = false;
  SteadyClock::time_point open_until_{};
  uint64_t refused_ = 0;
  std::string last_error_;
};

class RedisStoreImpl final : public RedisStore {
 public:
  RedisStoreImpl(const RedisAddress& address, const RedisStoreOptions& options);

  const char* kind() const override { return "redis"; }
  bool shared() const override { return true; }
  absl::Status PutSnapshot(const std::string& id, std::span<const std::byte> bytes) override;
  absl::StatusOr<HostBuffer> GetSnapshot(const std::string& id) override;
  absl::StatusOr<SessionRecord> GetRecord(const std::string& session_id) override;
  absl::Status PutRecord(const SessionRecord& record, uint64_t expected_epoch) override;
  absl::StatusOr<std::vector<ListedRecord>> ListRecords(const std::string& prefix) override;
  absl::Status RenewLease(const std::string& owner, const std::string& address, milliseconds ttl) override;
  absl::StatusOr<std::string> GetLease(const std::string& owner) override;
  absl::Status Ping() override;
  absl::Status PingLoaded(milliseconds patience, const std::function<void()>& on_wait) override;
  absl::StatusOr<std::string> MaxMemoryPolicy() override;
  Stats stats() const override;

 private:
  enum class Use { kShort, kSnapshot };

  std::string SnapshotKey(const std::string& id) const { return snapshot_prefix_ + id; }
  std::string PieceKey(const std::string& id, size_t piece) const {
    return absl::StrFormat("%s%s:%d", snapshot_prefix_, id, piece);
  }
  std::string RecordKey(const std::string& id) const { return options_.key_prefix + "record:" + id; }
  std::string LeaseKey(const std::string& owner) const { return options_.key_prefix + "lease:" + owner; }
  SteadyClock::time_point Deadline() const { return SteadyClock::now() + options_.command_timeout; }

  absl::Status WaitForTurn(Use use);
  void EndTurn(Use use, std::unique_ptr<RedisConnection> connection);
  // Runs `body` with a connection: absl::Status body(RedisConnection&). It may run twice: what it does must
  // be safe to repeat.
  template <typename Body>
  absl::Status Run(Use use, Body body);
  absl::StatusOr<RedisReply> Call(Words words);
  absl::StatusOr<RedisReply> Eval(RedisConnection& connection, std::string_view script,
                                  std::optional<std::string_view> key, Words arguments);

  absl::Status SendPieces(RedisConnection& connection, const std::string& id,
                          std::span<const std::byte> bytes);
  absl::Status ReceivePieces(RedisConnection& connection, const std::string& id, std::span<std::byte> bytes);
  absl::StatusOr<SessionRecord> ReadRecord(const std::string& session_id, const RedisReply& reply) const;

  const RedisAddress address_;
  HostLookup host_;
  const RedisStoreOptions options_;
  const std::string snapshot_prefix_, grace_ms_;
  const std::string put_prefix_;  // of this store's puts, unlike any other's
  std::atomic<uint64_t> next_put_ = 0;
  const std::shared_ptr<HostBuffers> buffers_;
  CircuitBreaker breaker_;

  mutable std::mutex mutex_;
  std::condition_variable turn_ended_;
  std::vector<std::unique_ptr<RedisConnection>> idle_;  // the last used one last
  int in_use_ = 0, snapshots_in_use_ = 0;
  uint64_t calls_ = 0, failures_ = 0, connects_ = 0;
};

RedisStoreImpl::RedisStoreImpl(const RedisAddress& address, const RedisStoreOptions& options)
    : address_(address),
      host_(address.host, address.port),
      options_(options),
      snapshot_prefix_(options.key_prefix + "snapshot:"),
      grace_ms_(std::to_string(options.unnamed_grace.count())),
      put_prefix_(RandomId() + "-"),
      buffers_(options.buffers != nullptr ? options.buffers : HostBuffers::Create(0)),
      breaker_(options.breaker_failures, options.breaker_open) {}

absl::Status RedisStoreImpl::WaitForTurn(Use use) {
  const int snapshot_limit = std::max(options_.max_connections / 2, 1);
  const auto free = [&] {
    return in_use_ < options_.max_connections &&
           (use != Use::kSnapshot || snapshots_in_use_ < snapshot_limit);
  };
  std::unique_lock lock(mutex_);
  if (!turn_ended_.wait_for(lock, kMaxBusyWaits * options_.command_timeout, free)) {
    return absl::UnavailableError(absl::StrFormat(
        "all connections to %s are busy: %d in use, %d of them with "
        "snapshots; the limits are %d and %d",
        address_.ToString(), in_use_, snapshots_in_use_, options_.max_connections, snapshot_limit));
  }
  ++in_use_;
  snapshots_in_use_ += use == Use::kSnapshot;
  return absl::OkStatus();
}

void RedisStoreImpl::EndTurn(Use use, std::unique_ptr<RedisConnection> connection) {
  {
    const std::lock_guard lock(mutex_);
    --in_use_;
    snapshots_in_use_ -= use == Use::kSnapshot;
    if (connection != nullptr && connection->in_step()) idle_.push_back(std::move(connection));
  }
  turn_ended_.notify_all();
}

template <typename Body>
absl::Status RedisStoreImpl::Run(Use use, Body body) {
  absl::Status status = breaker_.Admit();
  if (!status.ok()) return status;
  if (status = WaitForTurn(use); !status.ok()) {
    breaker_.Abandoned();
    return status;
  }
  std::unique_ptr<RedisConnection> connection;
  {
    const std::lock_guard lock(mutex_);
    ++calls_;
    while (connection == nullptr && !idle_.empty()) {
      if (idle_.back()->IsQuiet()) connection = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  bool answered = false;
  if (connection != nullptr) {
    status = body(*connection);
    answered = connection->usable();
    // The server had ended the connection before it saw the command, or has been restarted.
    if (!answered && connection->closed_by_server()) {
      connection.reset();
      const std::lock_guard lock(mutex_);
      idle_.clear();
    }
  }
  if (connection == nullptr) {
    auto fresh = RedisConnection::Connect(address_, host_, SteadyClock::now() + options_.connect_timeout);
    status = fresh.status();
    answered = absl::IsPermissionDenied(status);
    if (fresh.ok()) {
      connection = *std::move(fresh);
      {
        const std::lock_guard lock(mutex_);
        ++connects_;
      }
      status = body(*connection);
      answered = connection->usable();
    }
  }
  EndTurn(use, std::move(connection));
  if (answered) {
    breaker_.Succeeded();
  } else {
    breaker_.Failed(status);
    const std::lock_guard lock(mutex_);
    ++failures_;
  }
  return status;
}

absl::StatusOr<RedisReply> RedisStoreImpl::Call(Words words) {
  RedisReply reply;
  absl::Status status = Run(Use::kShort, [&](RedisConnection& connection) -> absl::Status {
    absl::StatusOr<RedisReply> got = connection.Call(std::span(words.begin(), words.size()), Deadline());
    if (!got.ok()) return got.status();
    reply = *std::move(got);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return reply;
}

absl::StatusOr<RedisReply> RedisStoreImpl::Eval(RedisConnection& connection, std::string_view script,
                                                std::optional<std::string_view> key, Words arguments) {
  const std::string whole = std::string(kSnapshotFunctions) + std::string(script);
  std::vector<std::string_view> words = {"EVAL", whole, key ? "1" : "0"};
  if (key) words.push_back(*key);
  words.push_back(snapshot_prefix_);
  words.push_back(grace_ms_);
  words.insert(words.end(), arguments);
  return connection.Call(words, Deadline());
}

absl::Status RedisStoreImpl::SendPieces(RedisConnection& connection, const std::string& id,
                                        std::span<const std::byte> bytes) {
  // Until the manifest is there: as long as its pieces may take. It sets their time then.
  const std::string ttl = std::to_string(2 * options_.unnamed_grace.count());
  const size_t pieces = (bytes.size() + kPieceBytes - 1) / kPieceBytes;
  absl::Status refused;
  for (size_t sent = 0, received = 0; received < pieces;) {
    if (sent < pieces && sent - received < kPiecesAhead && refused.ok()) {
      const auto piece =
          bytes.subspan(sent * kPieceBytes).first(std::min(kPieceBytes, bytes.size() - sent * kPieceBytes));
      const std::string key = PieceKey(id, sent);
      const std::string_view value(reinterpret_cast<const char*>(piece.data()), piece.size());
      const std::array<std::string_view, 5> words = {"SET", key, value, "PX", ttl};
      if (absl::Status status = connection.Send(words, Deadline()); !status.ok()) return status;
      ++sent;
      continue;
    }
    if (received == sent) break;  // refused, and nothing is under way any more
    absl::StatusOr<RedisReply> reply = connection.Receive(Deadline());
    if (!reply.ok()) return reply.status();
    refused.Update(reply->status());
    ++received;
  }
  if (refused.ok()) return refused;
  // Not to hold a full server's memory until they expire.
  std::vector<std::string> keys;
  for (size_t piece = 0; piece < pieces; ++piece) keys.push_back(PieceKey(id, piece));
  std::vector<std::string_view> words = {"UNLINK"};
  words.insert(words.end(), keys.begin(), keys.end());
  if (absl::Status status = connection.Call(words, Deadline()).status(); !connection.usable()) return status;
  return refused;
}

absl::Status RedisStoreImpl::PutSnapshot(const std::string& id, std::span<const std::byte> bytes) {
  if (absl::Status status = CheckStoreName("snapshot id", id); !status.ok()) return status;
  if (bytes.size() > kMaxSnapshotBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("snapshot %s has %d bytes; the limit is %d", id, bytes.size(), kMaxSnapshotBytes));
  }
  const std::string hash = HashHex(bytes);
  const std::string size = std::to_string(bytes.size());
  const size_t piece_count = (bytes.size() + kPieceBytes - 1) / kPieceBytes;
  const std::string pieces = std::to_string(piece_count);
  return Run(Use::kSnapshot, [&](RedisConnection& connection) -> absl::Status {
    absl::StatusOr<RedisReply> touched = Eval(connection, kTouchSnapshot, std::nullopt, {id, hash});
    if (!touched.ok()) return touched.status();
    if (touched->integer == 1) return absl::OkStatus();
    if (touched->integer == 2) {
      return absl::InvalidArgumentError(
          absl::StrFormat("snapshot %s has other content in the store than in this put", id));
    }
    if (absl::Status status = SendPieces(connection, id, bytes); !status.ok()) return status;
    return Eval(connection, kPublishSnapshot, std::nullopt, {id, size, pieces, hash}).status();
  });
}

absl::Status RedisStoreImpl::ReceivePieces(RedisConnection& connection, const std::string& id,
                                           std::span<std::byte> bytes) {
  const size_t pieces = (bytes.size() + kPieceBytes - 1) / kPieceBytes;
  for (size_t sent = 0, received = 0; received < pieces;) {
    if (sent < pieces && sent - received < kPiecesAhead) {
      const std::string key = PieceKey(id, sent);
      const std::array<std::string_view, 2> words = {"GET", key};
      if (absl::Status status = connection.Send(words, Deadline()); !status.ok()) return status;
      ++sent;
      continue;
    }
    const auto piece = bytes.subspan(received * kPieceBytes)
                           .first(std::min(kPieceBytes, bytes.size() - received * kPieceBytes));
    absl::StatusOr<RedisReply> reply = connection.ReceiveInto(piece, Deadline());
    if (!reply.ok()) return reply.status();
    if (absl::Status status = reply->status(); !status.ok()) return status;
    if (reply->type != RedisReply::Type::kText || reply->integer != std::ssize(piece)) {
      return absl::DataLossError(absl::StrFormat(
          "piece %d of snapshot %s has %d bytes of %d in the store; a server that evicts keys does that",
          received, id, reply->integer, piece.size()));
    }
    ++received;
  }
  return absl::OkStatus();
}

absl::StatusOr<HostBuffer> RedisStoreImpl::GetSnapshot(const std::string& id) {
  HostBuffer bytes;
  std::string hash;
  absl::Status status = Run(Use::kSnapshot, [&](RedisConnection& connection) -> absl::Status {
    const std::string key = SnapshotKey(id);
    const std::array<std::string_view, 4> words = {"HMGET", key, "bytes", "hash"};
    absl::StatusOr<RedisReply> manifest = connection.Call(words, Deadline());
    if (!manifest.ok()) return manifest.status();
    if (manifest->elements.size() != 2 || manifest->elements[0].type == RedisReply::Type::kNil) {
      return absl::NotFoundError(absl::StrFormat("there is no snapshot %s in %s", id, address_.ToString()));
    }
    size_t size = 0;
    if (!ReadNumber(manifest->elements[0], size) || size > kMaxSnapshotBytes) {
      return absl::DataLossError(absl::StrFormat("snapshot %s has a manifest that says \"%s\" bytes", id,
                                                 manifest->elements[0].text));
    }
    hash = manifest->elements[1].text;
    bytes = buffers_->Take(size);
    return ReceivePieces(connection, id, bytes.span());
  });
  if (!status.ok()) return status;
  if (HashHex(bytes) != hash) {
    return absl::DataLossError(
        absl::StrFormat("snapshot %s in %s is damaged: its checksum differs", id, address_.ToString()));
  }
  return bytes;
}

absl::StatusOr<SessionRecord> RedisStoreImpl::ReadRecord(const std::string& session_id,
                                                         const RedisReply& reply) const {
  if (reply.elements.size() != 7)
    return absl::InternalError("HMGET gave another number of fields than asked");
  if (reply.elements[0].type == RedisReply::Type::kNil) {
    return absl::NotFoundError(
        absl::StrFormat("there is no session %s in %s", session_id, address_.ToString()));
  }
  SessionRecord record;
  record.session_id = session_id;
  if (!ReadNumber(reply.elements[0], record.epoch) || !ReadNumber(reply.elements[1], record.revision) ||
      !ReadNumber(reply.elements[4], record.expires_unix_ms)) {
    return absl::DataLossError(absl::StrFormat("the record of session %s is damaged", session_id));
  }
  record.owner = reply.elements[2].text;
  record.deleted = reply.elements[3].text == "1";
  const std::string& names = reply.elements[5].text;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    record.snapshots.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  record.payload = reply.elements[6].text;
  return record;
}

absl::StatusOr<SessionRecord> RedisStoreImpl::GetRecord(const std::string& session_id) {
  absl::StatusOr<RedisReply> reply = Call({"HMGET", RecordKey(session_id), "epoch", "revision", "owner",
                                           "deleted", "expires", "snapshots", "payload"});
  if (!reply.ok()) return reply.status();
  return ReadRecord(session_id, *reply);
}

absl::Status RedisStoreImpl::PutRecord(const SessionRecord& record, uint64_t expected_epoch) {
  if (absl::Status status = CheckRecord(record, expected_epoch); !status.ok()) return status;
  const auto padded = [](uint64_t number) { return absl::StrFormat("%020d", number); };
  std::string snapshots;
  for (const std::string& id : record.snapshots) snapshots += (snapshots.empty() ? "" : " ") + id;
  const milliseconds ttl = record.deleted ? options_.tombstone_ttl : options_.longest_ttl;
  const std::string expires = std::to_string(record.deleted ? 0 : record.expires_unix_ms);
  const std::string put = put_prefix_ + std::to_string(next_put_++);
  RedisReply reply;
  absl::Status status = Run(Use::kShort, [&](RedisConnection& connection) -> absl::Status {
    auto got = Eval(connection, kPutRecord, RecordKey(record.session_id),
                    {record.session_id, padded(expected_epoch), padded(record.epoch), padded(record.revision),
                     record.owner, record.deleted ? "1" : "0", expires, snapshots, record.payload, put,
                     std::to_string(ttl.count())});
    if (!got.ok()) return got.status();
    reply = *std::move(got);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  const auto& parts = reply.elements;
  if (parts.size() == 1 && parts[0].integer == 0) return absl::OkStatus();
  if (parts.size() == 2 && parts[0].integer == 2) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the record of session %s names snapshot %s, which is not in the store",
                        record.session_id, parts[1].text));
  }
  if (parts.size() < 5) return StaleRecord(nullptr, record, expected_epoch);
  SessionRecord stored;
  if (!ReadNumber(parts[1], stored.epoch) || !ReadNumber(parts[2], stored.revision)) {
    return absl::DataLossError(absl::StrFormat("the record of session %s is damaged", record.session_id));
  }
  stored.owner = parts[3].text;
  stored.deleted = parts[4].text == "1";
  return StaleRecord(&stored, record, expected_epoch);
}

absl::StatusOr<std::vector<ListedRecord>> RedisStoreImpl::ListRecords(const std::string& prefix) {
  const size_t before_id = RecordKey("").size();
  const std::string pattern = EscapeGlob(RecordKey(prefix)) + "*";
  std::map<std::string, ListedRecord> listed;  // by id: SCAN may give a key twice
  std::string cursor = "0";
  do {
    // Keys and what is told of them, a batch at a time: other calls come in between.
    absl::Status status = Run(Use::kShort, [&](RedisConnection& connection) -> absl::Status {
      const std::array<std::string_view, 6> scan = {"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"};
      absl::StatusOr<RedisReply> batch = connection.Call(scan, Deadline());
      if (!batch.ok()) return batch.status();
      if (batch->elements.size() != 2) return absl::InternalError("SCAN gave no cursor and keys");
      for (const RedisReply& key : batch->elements[1].elements) {
        const std::array<std::string_view, 5> words = {"HMGET", key.text, "deleted", "revision", "expires"};
        if (absl::Status sent = connection.Send(words, Deadline()); !sent.ok()) return sent;
      }
      for (const RedisReply& key : batch->elements[1].elements) {
        absl::StatusOr<RedisReply> fields = connection.Receive(Deadline());
        if (!fields.ok()) return fields.status();
        ListedRecord record{.session_id = key.text.substr(before_id)};
        if (fields->elements.size() == 3 && fields->elements[0].text == "0" &&
            ReadNumber(fields->elements[1], record.revision) &&
            ReadNumber(fields->elements[2], record.expires_unix_ms)) {
          listed[record.session_id] = std::move(record);
        }
      }
      cursor = batch->elements[0].text;
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
  } while (cursor != "0");
  std::vector<ListedRecord> records;
  records.reserve(listed.size());
  for (auto& [id, record] : listed) records.push_back(std::move(record));
  return records;
}

absl::Status RedisStoreImpl::RenewLease(const std::string& owner, const std::string& address,
                                        milliseconds ttl) {
  if (absl::Status status = CheckOwner(owner); !status.ok()) return status;
  if (ttl < milliseconds(1)) {
    return absl::InvalidArgumentError(absl::StrFormat("a lease of %d ms; the least is 1", ttl.count()));
  }
  return Call({"SET", LeaseKey(owner), address, "PX", std::to_string(ttl.count())}).status();
}

absl::StatusOr<std::string> RedisStoreImpl::GetLease(const std::string& owner) {
  absl::StatusOr<RedisReply> reply = Call({"GET", LeaseKey(owner)});
  if (!reply.ok()) return reply.status();
  if (reply->type == RedisReply::Type::kNil) {
    return absl::NotFoundError(absl::StrFormat("\"%s\" has no lease", owner));
  }
  return std::move(reply->text);
}

absl::Status RedisStoreImpl::Ping() { return Call({"PING"}).status(); }

absl::Status RedisStoreImpl::PingLoaded(milliseconds patience, const std::function<void()>& on_wait) {
  const auto deadline = SteadyClock::now() + patience;
  for (bool waited = false;; waited = true) {
    RedisReply reply;
    const std::string_view word = "PING";
    const absl::Status status = Run(Use::kShort, [&](RedisConnection& connection) -> absl::Status {
      if (absl::Status sent = connection.Send(std::span(&word, 1), Deadline()); !sent.ok()) return sent;
      absl::StatusOr<RedisReply> got = connection.Receive(Deadline());
      if (!got.ok()) return got.status();
      reply = *std::move(got);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    const bool loading = reply.type == RedisReply::Type::kError && reply.text.starts_with("LOADING");
    if (!loading || SteadyClock::now() >= deadline) return reply.status();
    if (!waited) on_wait();
    std::this_thread::sleep_for(kLoadingPollInterval);
  }
}

absl::StatusOr<std::string> RedisStoreImpl::MaxMemoryPolicy() {
  constexpr std::string_view kName = "maxmemory_policy:";
  const absl::StatusOr<RedisReply> reply = Call({"INFO", "memory"});
  if (!reply.ok()) return reply.status();
  const std::string_view text = reply->text;
  const size_t found = text.find(kName);
  if (found == text.npos) return absl::UnavailableError("the server's INFO has no maxmemory_policy");
  const std::string_view rest = text.substr(found + kName.size());
  return std::string(rest.substr(0, rest.find_first_of("\r\n")));
}

RedisStore::Stats RedisStoreImpl::stats() const {
  Stats stats;
  stats.breaker = breaker_.state();
  stats.refused_by_breaker = breaker_.refused();
  const std::lock_guard lock(mutex_);
  stats.connections = in_use_ + static_cast<int>(idle_.size());
  stats.calls = calls_;
  stats.failures = failures_;
  stats.connects = connects_;
  return stats;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RedisStore>> RedisStore::Create(const RedisAddress& address,
                                                               const RedisStoreOptions& options) {
  const auto check = [](const char* name, int64_t value, int64_t least) -> absl::Status {
    if (value >= least) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("%s is %d; the least is %d", name, value, least));
  };
  absl::Status status = check("connect_timeout in ms", options.connect_timeout.count(), 1);
  status.Update(check("command_timeout in ms", options.command_timeout.count(), 1));
  status.Update(check("max_connections", options.max_connections, 2));
  status.Update(check("breaker_failures", options.breaker_failures, 1));
  status.Update(check("breaker_open in ms", options.breaker_open.count(), 1));
  status.Update(check("unnamed_grace in ms", options.unnamed_grace.count(), 1));
  status.Update(check("tombstone_ttl in ms", options.tombstone_ttl.count(), 1));
  status.Update(check("longest_ttl in ms", options.longest_ttl.count(), 1));
  if (!status.ok()) return status;
  return std::unique_ptr<RedisStore>(std::make_unique<RedisStoreImpl>(address, options));
}

}  // namespace efla
