// SIGINT and SIGTERM as a stop token.
#ifndef EFLA_CLIENT_INTERRUPT_H_
#define EFLA_CLIENT_INTERRUPT_H_

#include <atomic>
#include <stop_token>
#include <thread>

namespace efla {

// Make one at the start of main, before any other thread: threads inherit the blocked signals. The first
// signal requests a stop; the second ends the process at once with status 130.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  std::stop_token token() const { return source_.get_token(); }

 private:
  void Watch();

  std::stop_source source_;
  std::atomic<bool> closing_ = false;
  std::thread watcher_;
};

}  // namespace efla

#endif  // EFLA_CLIENT_INTERRUPT_H_
