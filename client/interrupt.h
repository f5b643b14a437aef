// SIGINT and SIGTERM as a stop token.
#ifndef EFLA_CLIENT_INTERRUPT_H_
#define EFLA_CLIENT_INTERRUPT_H_

#include <atomic>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

namespace efla {

// Make one at the start of main, before any other thread: threads inherit the blocked signals. The first
// signal requests a stop; the second ends the process at once with status 130. Any thread.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  std::stop_token token() const;

  // For programs that outlive what a signal stops. A fresh token: the next SIGINT requests its stop, one more
  // ends the process; SIGTERM ends it at once.
  std::stop_token Renew();
  // Nothing is under way that could be stopped: signals end the process at once, until the next Renew; before
  // that, `last` is called in a thread of its own.
  void EndAtOnce(std::function<void()> last = {});

 private:
  void Watch();

  mutable std::mutex mutex_;  // guards what follows, down to last_
  std::stop_source source_;
  bool renewed_ = false;
  bool at_once_ = false;
  std::function<void()> last_;
  std::atomic<bool> closing_ = false;
  std::thread watcher_;
};

}  // namespace efla

#endif  // EFLA_CLIENT_INTERRUPT_H_
