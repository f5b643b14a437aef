#include "server/engine/delivery.h"

namespace efla {

Delivery::Delivery() : thread_([this] { Run(); }) {}

Delivery::~Delivery() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

bool Delivery::Claim(GenerationImpl& generation) {
  Turn turn = generation.turn_.load();
  for (;;) {
    switch (turn) {
      case Turn::kIdle:
        if (generation.turn_.compare_exchange_weak(turn, Turn::kQueued)) return true;
        break;
      case Turn::kRunning:
        if (generation.turn_.compare_exchange_weak(turn, Turn::kAgain)) return false;
        break;
      case Turn::kQueued:
      case Turn::kAgain:
      case Turn::kClosed:
        return false;
    }
  }
}

void Delivery::Enqueue(const std::shared_ptr<GenerationImpl>& generation) {
  Enqueue(std::span(&generation, 1));
}

void Delivery::Enqueue(std::span<const std::shared_ptr<GenerationImpl>> generations) {
  if (generations.empty()) return;
  bool any = false;
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<GenerationImpl>& generation : generations) {
      if (!Claim(*generation)) continue;
      queue_.push_back(generation);
      any = true;
    }
  }
  if (any) wake_.notify_one();
}

bool Delivery::RunReady(GenerationImpl& generation) {
  generation.turn_.store(Turn::kRunning);
  if (!generation.end_taken() && generation.ready_) generation.ready_(generation);
  if (generation.end_taken()) {
    generation.turn_.store(Turn::kClosed);
    generation.ready_ = nullptr;
    return false;
  }
  Turn running = Turn::kRunning;
  if (generation.turn_.compare_exchange_strong(running, Turn::kIdle)) return false;
  generation.turn_.store(Turn::kQueued);  // it was kAgain
  return true;
}

void Delivery::Run() {
  std::vector<std::shared_ptr<GenerationImpl>> batch, again;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      queue_.insert(queue_.end(), again.begin(), again.end());
      again.clear();
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      batch.swap(queue_);
    }
    for (std::shared_ptr<GenerationImpl>& generation : batch) {
      if (RunReady(*generation)) again.push_back(std::move(generation));
    }
    batch.clear();
  }
}

}  // namespace efla
