// Whether a server's own port still takes connections, told by making some.
#ifndef EFLA_SERVER_PORT_WATCH_H_
#define EFLA_SERVER_PORT_WATCH_H_

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include "server/listen_address.h"

namespace efla {

// gRPC gives a listener up for good when a connection cannot be taken for want of descriptors. The kernel
// goes on to complete handshakes into the listener's queue, so a connection alone says nothing: a probe
// connects, closes its side without a word and waits for the server's first byte (SETTINGS, in plain text) or
// for its end (TLS). Either comes only from a program that took the connection.
//
// One thread, which it never holds up. Of a host with several addresses the one that answers first is
// watched.
class PortWatch {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kInterval{1};  // between the beginnings of probes
  static constexpr std::chrono::seconds kPatience{3};  // until a probe without an answer has failed
  static constexpr int kMostFailures = 5;              // in a row: the port is deaf

  enum class Health {
    kUnknown,  // no probe has been answered yet, which may be the network's fault
    kListening,
    kDeaf,  // it was listening; for good
  };

  // `address` as bound.
  explicit PortWatch(const ListenAddress& address);
  ~PortWatch();
  PortWatch(const PortWatch&) = delete;
  PortWatch& operator=(const PortWatch&) = delete;

  // Takes the probe further. Times come in order, a few a second.
  Health Look(Clock::time_point now);
  // Why the last probe failed; empty: none has since one was answered.
  const std::string& why() const { return why_; }
  int failures() const { return failures_; }  // in a row

 private:
  struct Target {
    sockaddr_storage address{};
    socklen_t size = 0;
    int family = 0;
  };

  void Begin(Clock::time_point now);
  // Of the probe under way.
  void Advance(Clock::time_point now);
  void Connected();
  void Answered();
  void Failed(const std::string& why);
  void EndProbe();

  std::vector<Target> targets_;
  size_t target_ = 0;
  int fd_ = -1;  // of the probe under way
  bool connected_ = false;
  Clock::time_point begun_{};
  bool ever_answered_ = false;
  int failures_ = 0;
  std::string why_;
};

}  // namespace efla

#endif  // EFLA_SERVER_PORT_WATCH_H_
