// Threads for calls into the session manager, which may block for a store or for a copy of a state.
#ifndef EFLA_SERVER_RPC_SESSION_WORKERS_H_
#define EFLA_SERVER_RPC_SESSION_WORKERS_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace efla {

// Two lanes: what begins may be refused, what ends a turn that was begun never is and has threads of its own,
// so that it never waits behind calls that wait for a session. Any thread.
class SessionWorkers {
 public:
  // Each lane has `threads` threads; at most `max_jobs` calls wait to begin.
  SessionWorkers(int threads, size_t max_jobs);
  ~SessionWorkers();  // runs what is queued, then joins

  // A call that begins. False, and nothing done, when too many wait.
  [[nodiscard]] bool TryPost(std::function<void()> job);
  // The end of a turn.
  void PostEnd(std::function<void()> job);

 private:
  struct Lane {
    std::mutex mutex;  // guards jobs and stopping
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    bool stopping = false;
    std::vector<std::thread> threads;
  };
  static void Run(Lane& lane);

  const size_t max_jobs_;
  Lane begins_, ends_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_SESSION_WORKERS_H_
