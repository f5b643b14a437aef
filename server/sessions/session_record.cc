#include "server/sessions/session_record.h"

#include <xxhash.h>

#include <concepts>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr std::string_view kMagic = "EFSR";
constexpr uint32_t kVersion = 1;
constexpr size_t kHashBegin = 8, kBodyBegin = 16;

// Writes the fields that Describe visits.
class Writer {
 public:
  template <typename T>
  requires std::integral<T> || std::is_enum_v<T>
  void operator()(const T& value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void operator()(const std::string& text) {
    (*this)(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }
  template <typename T>
  void operator()(const std::vector<T>& list) {
    (*this)(static_cast<uint32_t>(list.size()));
    for (const T& item : list) (*this)(item);
  }
  template <typename T>
  requires std::is_class_v<T>
  void operator()(const T& value) { Describe(*this, value); }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

// Reads the fields that Describe visits; after the first one that is not there, nothing more.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  template <typename T>
  requires std::integral<T> || std::is_enum_v<T>
  void operator()(T& value) {
    const std::string_view bytes = Take(sizeof(value));
    if constexpr (std::is_same_v<T, bool>) {
      value = !bytes.empty() && bytes[0] != 0;
    } else if (!bytes.empty()) {
      std::memcpy(&value, bytes.data(), sizeof(value));
    }
  }
  void operator()(std::string& text) { text = Take(Size()); }
  template <typename T>
  void operator()(std::vector<T>& list) {
    // Every item takes a byte at least, so a length that lies cannot make room for more than there is.
    const uint32_t size = Size();
    if (size > left_.size()) ok_ = false;
    for (uint32_t i = 0; i < size && ok_; ++i) (*this)(list.emplace_back());
  }
  template <typename T>
  requires std::is_class_v<T>
  void operator()(T& value) { Describe(*this, value); }
  bool done() const { return ok_ && left_.empty(); }

 private:
  uint32_t Size() {
    uint32_t size = 0;
    (*this)(size);
    return size;
  }
  std::string_view Take(size_t size) {
    if (!ok_ || size > left_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }

  std::string_view left_;
  bool ok_ = true;
};

template <typename T, typename U>
concept Is = std::same_as<std::remove_const_t<T>, U>;

void Describe(Writer& visit, const WaitingTokens& waiting) {
  visit(waiting.pending_token ? int64_t{*waiting.pending_token} : int64_t{-1});
  visit(waiting.pending_prompt);
}
void Describe(Reader& visit, WaitingTokens& waiting) {
  int64_t pending = -1;
  visit(pending);
  if (pending >= 0) waiting.pending_token = static_cast<TokenId>(pending);
  visit(waiting.pending_prompt);
}
void Describe(auto& visit, Is<RecordedContext> auto& context) {
  visit(context.snapshot_id);
  visit(context.fed_tokens);
  visit(context.waiting);
}
void Describe(auto& visit, Is<RecordedReply> auto& reply) {
  visit(reply.call);
  visit(reply.request_id);
  visit(reply.revision);
  visit(reply.has_content);
  visit(reply.content);
}
void Describe(auto& visit, Is<SessionPayload::Turn> auto& turn) {
  visit(turn.since);
  visit(turn.until);
  visit(turn.context);
}
void Describe(auto& visit, Is<SessionPayload::Mark> auto& mark) {
  visit(mark.name);
  visit(mark.since);
  visit(mark.context);
}
void Describe(auto& visit, Is<SessionPayload> auto& payload) {
  visit(payload.weights_fingerprint);
  visit(payload.tokenizer_fingerprint);
  visit(payload.revision);
  visit(payload.head_since);
  visit(payload.created_unix_ms);
  visit(payload.ttl_ms);
  visit(payload.head);
  visit(payload.turns);
  visit(payload.marks);
  visit(payload.replies);
}
void Describe(auto& visit, Is<SessionInfo::Mark> auto& mark) {
  visit(mark.name);
  visit(mark.revision);
  visit(mark.tokens);
}
void Describe(auto& visit, Is<SessionInfo> auto& info) {
  visit(info.session_id);
  visit(info.revision);
  visit(info.durable_revision);
  visit(info.epoch);
  visit(info.tokens);
  visit(info.waiting_tokens);
  visit(info.tier);
  visit(info.busy);
  visit(info.marks);
  visit(info.turns);
  visit(info.created_unix_ms);
  visit(info.expires_unix_ms);
}

bool Sensible(const RecordedContext& context) {
  const bool has_state = !context.snapshot_id.empty();
  return (has_state ? context.fed_tokens > 0 : context.fed_tokens == 0 && !context.waiting.pending_token) &&
         context.waiting.pending_prompt.size() <= kChunkTokens;
}

bool Sensible(const SessionPayload& payload) {
  bool sensible = payload.revision > 0 && payload.head_since <= payload.revision && Sensible(payload.head);
  for (const auto& turn : payload.turns) sensible &= turn.since <= turn.until && Sensible(turn.context);
  for (const auto& mark : payload.marks) sensible &= Sensible(mark.context);
  return sensible;
}

}  // namespace

std::string SerializePayload(const SessionPayload& payload) {
  Writer write;
  write.bytes() = kMagic;
  write(kVersion);
  write(uint64_t{0});
  write(payload);
  std::string bytes = std::move(write.bytes());
  const uint64_t hash = XXH3_64bits(bytes.data() + kBodyBegin, bytes.size() - kBodyBegin);
  std::memcpy(bytes.data() + kHashBegin, &hash, sizeof(hash));
  return bytes;
}

absl::StatusOr<SessionPayload> ParsePayload(std::string_view bytes) {
  if (bytes.size() < kBodyBegin || bytes.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError(absl::StrFormat(
        "a session's record of %d bytes is damaged: it does not begin with %s", bytes.size(), kMagic));
  }
  uint32_t version = 0;
  uint64_t hash = 0;
  std::memcpy(&version, bytes.data() + kMagic.size(), sizeof(version));
  std::memcpy(&hash, bytes.data() + kHashBegin, sizeof(hash));
  if (version != kVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "a session's record has version %d; this server reads version %d", version, kVersion));
  }
  const std::string_view body = bytes.substr(kBodyBegin);
  if (hash != XXH3_64bits(body.data(), body.size())) {
    return absl::DataLossError(
        absl::StrFormat("a session's record of %d bytes is damaged: its checksum differs", bytes.size()));
  }
  Reader read(body);
  SessionPayload payload;
  read(payload);
  if (!read.done() || !Sensible(payload)) {
    return absl::DataLossError(absl::StrFormat(
        "a session's record of %d bytes is damaged: its fields contradict each other", bytes.size()));
  }
  return payload;
}

std::string SerializeInfos(const std::vector<SessionInfo>& infos) {
  Writer write;
  write(infos);
  return std::move(write.bytes());
}

absl::StatusOr<std::vector<SessionInfo>> ParseInfos(std::string_view bytes) {
  Reader read(bytes);
  std::vector<SessionInfo> infos;
  read(infos);
  if (!read.done()) return absl::DataLossError("a recorded result is damaged");
  return infos;
}

}  // namespace efla
