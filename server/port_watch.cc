#include "server/port_watch.h"

#include <netdb.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_format.h"

namespace efla {

PortWatch::PortWatch(const ListenAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (code != 0) {
    why_ = gai_strerror(code);
    return;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Target target;
    std::memcpy(&target.address, one->ai_addr, one->ai_addrlen);
    target.size = one->ai_addrlen;
    target.family = one->ai_family;
    targets_.push_back(target);
  }
}

PortWatch::~PortWatch() { EndProbe(); }

PortWatch::Health PortWatch::Look(Clock::time_point now) {
  if (fd_ >= 0) {
    Advance(now);
  } else if (!targets_.empty() && now - begun_ >= kInterval) {
    Begin(now);
  }
  if (!ever_answered_) return Health::kUnknown;
  return failures_ >= kMostFailures ? Health::kDeaf : Health::kListening;
}

void PortWatch::Begin(Clock::time_point now) {
  begun_ = now;
  const Target& target = targets_[target_];
  fd_ = socket(target.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) return Failed(absl::StrFormat("no socket: %s", std::strerror(errno)));
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&target.address), target.size) == 0) {
    Connected();
  } else if (errno != EINPROGRESS) {
    Failed(absl::StrFormat("no connection: %s", std::strerror(errno)));
  }
}

void PortWatch::Advance(Clock::time_point now) {
  // The answer first: whoever was held up for long must not take one that has come for none.
  pollfd waiting{.fd = fd_, .events = static_cast<short>(connected_ ? POLLIN : POLLOUT), .revents = 0};
  const bool moved = poll(&waiting, 1, 0) > 0;
  if (moved && connected_) {
    char byte = 0;
    if (recv(fd_, &byte, 1, 0) >= 0) return Answered();
    if (errno != EAGAIN && errno != EINTR) {
      return Failed(absl::StrFormat("connected, then: %s", std::strerror(errno)));
    }
  } else if (moved) {
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return Failed(absl::StrFormat("no connection: %s", std::strerror(error)));
    Connected();
  }
  if (now - begun_ >= kPatience) {
    Failed(absl::StrFormat("%s and no answer in %d s", connected_ ? "connected" : "no connection",
                           kPatience.count()));
  }
}

void PortWatch::Connected() {
  connected_ = true;
  shutdown(fd_, SHUT_WR);
}

void PortWatch::Answered() {
  ever_answered_ = true;
  failures_ = 0;
  why_.clear();
  EndProbe();
}

void PortWatch::Failed(const std::string& why) {
  ++failures_;
  why_ = why;
  EndProbe();
  if (!ever_answered_) target_ = (target_ + 1) % targets_.size();
}

void PortWatch::EndProbe() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  connected_ = false;
}

}  // namespace efla
