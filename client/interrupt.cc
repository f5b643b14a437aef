#include "client/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

namespace efla {
namespace {

constexpr int kExitInterrupted = 130;

sigset_t WatchedSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  return signals;
}

}  // namespace

Interrupt::Interrupt() {
  sigset_t signals = WatchedSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  watcher_ = std::thread([this] { Watch(); });
}

Interrupt::~Interrupt() {
  closing_ = true;
  pthread_kill(watcher_.native_handle(), SIGTERM);
  watcher_.join();
}

std::stop_token Interrupt::token() const {
  const std::scoped_lock lock(mutex_);
  return source_.get_token();
}

std::stop_token Interrupt::Renew() {
  const std::scoped_lock lock(mutex_);
  source_ = std::stop_source();
  renewed_ = true;
  at_once_ = false;
  last_ = {};
  return source_.get_token();
}

void Interrupt::EndAtOnce(std::function<void()> last) {
  const std::scoped_lock lock(mutex_);
  at_once_ = true;
  last_ = std::move(last);
}

void Interrupt::Watch() {
  sigset_t signals = WatchedSignals();
  int signal = 0;
  while (sigwait(&signals, &signal) == 0 && !closing_) {
    std::stop_source source;
    {
      const std::scoped_lock lock(mutex_);
      if (at_once_ || (renewed_ && signal == SIGTERM)) {
        if (last_) last_();
        _exit(kExitInterrupted);
      }
      source = source_;
    }
    if (!source.request_stop()) _exit(kExitInterrupted);
  }
}

}  // namespace efla
