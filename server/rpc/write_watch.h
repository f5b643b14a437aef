// Ends calls whose clients take nothing: what is to be written waits for the client's window, and nothing
// else would ever end a call that has computed all it is to say.
#ifndef EFLA_SERVER_RPC_WRITE_WATCH_H_
#define EFLA_SERVER_RPC_WRITE_WATCH_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

namespace efla {

// All functions: any thread. Began and Ended take no lock, so that a stream may call them for every message.
class WriteWatch {
 public:
  class Call {
   public:
    explicit Call(std::function<void()> cancel) : cancel_(std::move(cancel)) {}
    // Something waits to be written, if nothing does already.
    void Began();
    // All of it has gone, or never will.
    void Ended() { since_.store(kNothing, std::memory_order_relaxed); }
    // Whether the watch has cancelled the call.
    bool was_cut() const { return cut_.load(std::memory_order_acquire); }

   private:
    friend class WriteWatch;
    static constexpr int64_t kNothing = -1;
    const std::function<void()> cancel_;
    std::atomic<int64_t> since_{kNothing};  // the clock's ticks
    std::atomic<bool> cut_{false};
  };
  using Place = std::list<Call>::iterator;

  // Cancels a call once a write has waited for `patience`, within a quarter of it more.
  explicit WriteWatch(std::chrono::milliseconds patience);
  // All calls have left.
  ~WriteWatch();
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  Place Enter(std::function<void()> cancel);
  // `cancel` is not being called any more when it returns, unless it is `cancel` that calls this.
  void Leave(Place place);

  std::chrono::milliseconds patience() const { return patience_; }

 private:
  using Clock = std::chrono::steady_clock;

  void Run();
  // The first call that has waited for too long, with mutex_ held; null when there is none.
  Call* FindLate(Clock::time_point now);

  const std::chrono::milliseconds patience_;
  // Guards what follows. Recursive: gRPC may run the end of a call, with its Leave, inside `cancel`.
  std::recursive_mutex mutex_;
  std::condition_variable_any wake_;
  bool stopping_ = false;
  std::list<Call> calls_;
  std::thread thread_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_WRITE_WATCH_H_
