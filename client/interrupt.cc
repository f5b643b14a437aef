#include "client/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

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

void Interrupt::Watch() {
  sigset_t signals = WatchedSignals();
  int signal = 0;
  while (sigwait(&signals, &signal) == 0 && !closing_) {
    if (!source_.request_stop()) _exit(kExitInterrupted);
  }
}

}  // namespace efla
