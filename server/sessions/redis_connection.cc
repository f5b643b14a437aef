#include "server/sessions/redis_connection.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

constexpr size_t kReceiveBytes = 256 << 10;
constexpr size_t kSendFromPlace = 16 << 10;  // words from this size on are not copied before they are sent
constexpr int kMaxElements = 1 << 20;        // of an array; no command of ours asks for more

// Milliseconds for poll: rounded up, so that it does not spin at the end.
int MillisecondsUntil(RedisConnection::TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
}

// Where the parser's next value goes: into its array, which was made with all its elements, or a reply of its
// own.
RedisReply* Place(const redisReadTask* task) {
  if (task->parent == nullptr) return new RedisReply;
  return &static_cast<RedisReply*>(task->parent->obj)->elements[static_cast<size_t>(task->idx)];
}

void* MakeText(const redisReadTask* task, char* text, size_t size) {
  RedisReply* reply = Place(task);
  reply->type = task->type == REDIS_REPLY_ERROR ? RedisReply::Type::kError : RedisReply::Type::kText;
  reply->integer = static_cast<int64_t>(size);
  // Of ReceiveInto: the reader's own data.
  const auto* place = static_cast<const std::span<std::byte>*>(task->privdata);
  if (place != nullptr && place->size() == size && reply->type == RedisReply::Type::kText) {
    std::memcpy(place->data(), text, size);
  } else {
    reply->text.assign(text, size);
  }
  return reply;
}
void* MakeArray(const redisReadTask* task, int elements) {
  if (elements > kMaxElements) return nullptr;
  RedisReply* reply = Place(task);
  reply->type = RedisReply::Type::kArray;
  reply->elements.resize(static_cast<size_t>(elements));
  return reply;
}
void* MakeInteger(const redisReadTask* task, long long value) {
  RedisReply* reply = Place(task);
  reply->type = RedisReply::Type::kInteger;
  reply->integer = value;
  return reply;
}
void* MakeNil(const redisReadTask* task) { return Place(task); }
void FreeReply(void* reply) { delete static_cast<RedisReply*>(reply); }  // only ever of a whole reply

redisReader* CreateReader() {
  static redisReplyObjectFunctions functions = {MakeText, MakeArray, MakeInteger, MakeNil, FreeReply};
  redisReader* reader = redisReaderCreateWithFunctions(&functions);
  reader->maxbuf = 0;  // keeps its buffer: pieces of snapshots come one after the other
  return reader;
}

// A connected socket, or UNAVAILABLE with the reason alone.
absl::StatusOr<int> ConnectSocket(const SocketAddress& address, RedisConnection::TimePoint deadline) {
  const auto* to = reinterpret_cast<const sockaddr*>(&address.bytes);
  const int fd = socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd < 0) return absl::UnavailableError(std::strerror(errno));
  int error = connect(fd, to, address.size) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting{.fd = fd, .events = POLLOUT, .revents = 0};
    int ready = -1;
    do {
      ready = poll(&waiting, 1, MillisecondsUntil(deadline));
    } while (ready < 0 && errno == EINTR);
    socklen_t length = sizeof(error);
    error = ETIMEDOUT;
    if (ready > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error != 0) {
    close(fd);
    return absl::UnavailableError(std::strerror(error));
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  return fd;
}

// To the first of the host's addresses that takes a connection.
absl::StatusOr<int> ConnectHost(HostLookup& host, RedisConnection::TimePoint deadline) {
  const HostLookup::Answer addresses = host.Find(deadline);
  if (!addresses.ok()) return addresses.status();
  absl::StatusOr<int> fd = absl::UnavailableError("it has no address");
  for (size_t i = 0; i < addresses->size() && !fd.ok(); ++i) {
    // Each has its share of the time that is left: one that does not answer takes nothing from the others.
    const auto now = std::chrono::steady_clock::now();
    fd = ConnectSocket((*addresses)[i], now + (deadline - now) / static_cast<int64_t>(addresses->size() - i));
  }
  return fd;
}

}  // namespace

absl::Status RedisReply::status() const {
  if (type != Type::kError) return absl::OkStatus();
  const std::string kind = text.substr(0, text.find(' '));
  const auto is_one_of = [&](std::initializer_list<const char*> kinds) {
    return std::any_of(kinds.begin(), kinds.end(), [&](const char* one) { return kind == one; });
  };
  const std::string message = "Redis refuses: " + text;
  // Older servers put a script's error into one of their own.
  if (kind == "OOM" || text.find("OOM command") != std::string::npos)
    return absl::ResourceExhaustedError(message);
  // The second: a password that nobody asks for.
  if (is_one_of({"NOAUTH", "WRONGPASS", "NOPERM", "DENIED"}) || text.starts_with("ERR AUTH ")) {
    return absl::PermissionDeniedError(message);
  }
  if (is_one_of({"LOADING", "BUSY", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN",
                 "TRYAGAIN"})) {
    return absl::UnavailableError(message);
  }
  return absl::InternalError(message);
}

void RedisConnection::ReaderDeleter::operator()(void* reader) const {
  redisReaderFree(static_cast<redisReader*>(reader));
}

RedisConnection::RedisConnection(int fd, std::string name)
    : fd_(fd), name_(std::move(name)), reader_(CreateReader()), received_(kReceiveBytes) {}

RedisConnection::~RedisConnection() { close(fd_); }

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(const RedisAddress& address,
                                                                          HostLookup& host,
                                                                          TimePoint deadline) {
  const absl::StatusOr<int> fd = ConnectHost(host, deadline);
  if (!fd.ok()) {
    return absl::UnavailableError(
        absl::StrFormat("cannot connect to %s: %s", address.ToString(), std::string(fd.status().message())));
  }
  std::unique_ptr<RedisConnection> connection(new RedisConnection(*fd, address.ToString()));
  std::vector<std::string_view> login = {"AUTH"};
  if (!address.user.empty()) login.push_back(address.user);
  login.push_back(address.password);
  const std::string database = std::to_string(address.database);
  const std::array<std::string_view, 2> select = {"SELECT", database};
  absl::Status status;
  if (!address.password.empty()) status = connection->Call(login, deadline).status();
  if (status.ok() && address.database != 0) status = connection->Call(select, deadline).status();
  if (!status.ok()) return status;
  return connection;
}

absl::Status RedisConnection::Broken(const std::string& why) {
  usable_ = false;
  return absl::UnavailableError(absl::StrFormat("connection to %s: %s", name_, why));
}

absl::Status RedisConnection::WaitFor(short events, TimePoint deadline) {
  pollfd waiting{.fd = fd_, .events = events, .revents = 0};
  while (true) {
    const int ready = poll(&waiting, 1, MillisecondsUntil(deadline));
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return Broken("no answer in time; what was asked may have been done");
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

absl::Status RedisConnection::SendBytes(std::string_view left, bool more, TimePoint deadline) {
  while (!left.empty()) {
    const ssize_t sent = send(fd_, left.data(), left.size(), MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (sent >= 0) {
      left.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      if (absl::Status status = WaitFor(POLLOUT, deadline); !status.ok()) return status;
    } else if (errno != EINTR) {
      closed_by_server_ = true;
      return Broken(std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

absl::Status RedisConnection::Send(std::span<const std::string_view> words, TimePoint deadline) {
  // The protocol's array of strings: *COUNT, then $SIZE and the bytes of each.
  ++outstanding_;
  std::string unsent = absl::StrFormat("*%d\r\n", words.size());
  for (const std::string_view word : words) {
    unsent += absl::StrFormat("$%d\r\n", word.size());
    if (word.size() < kSendFromPlace) {
      unsent += word;
    } else {
      if (absl::Status status = SendBytes(unsent, true, deadline); !status.ok()) return status;
      if (absl::Status status = SendBytes(word, true, deadline); !status.ok()) return status;
      unsent.clear();
    }
    unsent += "\r\n";
  }
  return SendBytes(unsent, false, deadline);
}

absl::StatusOr<RedisReply> RedisConnection::Receive(TimePoint deadline) {
  auto* reader = static_cast<redisReader*>(reader_.get());
  while (true) {
    void* parsed = nullptr;
    if (redisReaderGetReply(reader, &parsed) != REDIS_OK) return Broken(reader->errstr);
    if (parsed != nullptr) {
      const std::unique_ptr<RedisReply> reply(static_cast<RedisReply*>(parsed));
      --outstanding_;
      return std::move(*reply);
    }
    const ssize_t count = recv(fd_, received_.data(), received_.size(), 0);
    if (count > 0) {
      if (redisReaderFeed(reader, received_.data(), static_cast<size_t>(count)) != REDIS_OK) {
        return Broken(reader->errstr);
      }
    } else if (count == 0) {
      closed_by_server_ = true;
      return Broken("closed by the server");
    } else if (errno == EAGAIN) {
      if (absl::Status status = WaitFor(POLLIN, deadline); !status.ok()) return status;
    } else if (errno != EINTR) {
      closed_by_server_ = true;
      return Broken(std::strerror(errno));
    }
  }
}

absl::StatusOr<RedisReply> RedisConnection::ReceiveInto(std::span<std::byte> to, TimePoint deadline) {
  auto* reader = static_cast<redisReader*>(reader_.get());
  place_ = to;
  reader->privdata = &place_;
  absl::StatusOr<RedisReply> reply = Receive(deadline);
  reader->privdata = nullptr;
  return reply;
}

absl::StatusOr<RedisReply> RedisConnection::Call(std::span<const std::string_view> words,
                                                 TimePoint deadline) {
  if (absl::Status status = Send(words, deadline); !status.ok()) return status;
  absl::StatusOr<RedisReply> reply = Receive(deadline);
  if (reply.ok() && reply->type == RedisReply::Type::kError) return reply->status();
  return reply;
}

bool RedisConnection::IsQuiet() const {
  pollfd waiting{.fd = fd_, .events = POLLIN, .revents = 0};
  return poll(&waiting, 1, 0) == 0;
}

}  // namespace efla
