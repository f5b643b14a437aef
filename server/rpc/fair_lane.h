// A thread for work of which a single caller could ask for seconds: compiling constraints.
#ifndef EFLA_SERVER_RPC_FAIR_LANE_H_
#define EFLA_SERVER_RPC_FAIR_LANE_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace efla {

// One thread, whose jobs' owners take turns, a job each: whoever has one waits for one job of each other
// owner at most, besides the owner's own. Any thread.
class FairLane {
 public:
  // At most `max_jobs` wait, and at most `max_jobs_of_one` of an owner's.
  FairLane(size_t max_jobs, size_t max_jobs_of_one);
  ~FairLane();  // runs what waits, then joins

  // False, and nothing done, when the lane is full. `id` names the job for Withdraw; no two that wait have
  // the same.
  [[nodiscard]] bool TryPost(const std::string& owner, const void* id, std::function<void()> job);
  // Takes back a job that waits: true, and it will not run. False: it runs, has run, or never was.
  bool Withdraw(const std::string& owner, const void* id);
  // How long until a job that was refused may find a place: about as long as a turn of each owner's takes.
  std::chrono::milliseconds RetryDelay() const;

 private:
  struct Job {
    const void* id;
    std::function<void()> run;
  };
  void Run();

  const size_t max_jobs_, max_jobs_of_one_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<std::string, std::deque<Job>> jobs_;  // by owner, none empty
  std::deque<std::string> turns_;                // their owners, the next first
  size_t num_jobs_ = 0;
  double mean_seconds_ = 0;  // of the last jobs
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_FAIR_LANE_H_
