// Runs the ready callbacks, on a thread of its own, so that the engine thread never waits for a reader.
#ifndef EFLA_SERVER_ENGINE_DELIVERY_H_
#define EFLA_SERVER_ENGINE_DELIVERY_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "server/engine/generation_impl.h"

namespace efla {

// However often a generation is enqueued, its callback runs after the last of them, once for as many as came
// together, never twice at once, and never again once its end has been taken: the callback is dropped then.
class Delivery {
 public:
  Delivery();
  ~Delivery();  // runs what is queued, then joins

  // Any thread.
  void Enqueue(const std::shared_ptr<GenerationImpl>& generation);
  void Enqueue(std::span<const std::shared_ptr<GenerationImpl>> generations);

 private:
  using Turn = GenerationImpl::Turn;

  void Run();
  // True when the generation has to be put into the queue.
  static bool Claim(GenerationImpl& generation);
  // Runs the callback; true when it must run again.
  static bool RunReady(GenerationImpl& generation);

  std::mutex mutex_;  // guards queue_ and stopping_
  std::condition_variable wake_;
  std::vector<std::shared_ptr<GenerationImpl>> queue_;
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_DELIVERY_H_
