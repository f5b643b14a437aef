// Masks of constrained calls, computed on threads of their own ahead of the steps that draw with them.
#ifndef EFLA_SERVER_ENGINE_MASK_WORKERS_H_
#define EFLA_SERVER_ENGINE_MASK_WORKERS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "kernels/types.h"
#include "model/constraint/constraint.h"

namespace efla {

class Call;

// One call's place in its constraint. Belongs to the engine thread, and to the worker from MaskWorkers::Post
// until its result is handed back.
class ConstraintProgress {
 public:
  // `end_ids` outlive it: all end tokens of the model, allowed just where the output is whole. `at_start`:
  // the output begins a text, and its first piece loses its space.
  ConstraintProgress(std::shared_ptr<const Constraint> constraint, std::span<const TokenId> end_ids,
                     int64_t constraint_vocab_size, int64_t vocab_size, bool at_start);

  // Before Post: the token that has been drawn; none before the first, unless the first draw was another
  // call's.
  void SetDrawn(TokenId token) { drawn_ = token; }

  // After it. False: the token did not fit, which a mask should have kept it from.
  bool accepted() const { return accepted_; }
  // The output is whole and nothing can follow.
  bool must_end() const { return must_end_; }
  // [MaskWords(vocab_size)]. Where the very first token must end the output, its end tokens.
  std::span<const uint32_t> mask() const { return std::span(mask_).first(num_words_); }

  // The call that waits for it; null once that has left. Guarded by the engine's lock.
  Call* call = nullptr;

 private:
  friend class MaskWorkers;
  void Compute();

  const std::shared_ptr<const Constraint> constraint_;
  const std::span<const TokenId> end_ids_;
  const size_t constraint_words_, num_words_;
  const bool at_start_;
  std::unique_ptr<ConstraintMatcher> matcher_;  // made by the first Compute
  std::optional<TokenId> drawn_;
  bool accepted_ = true, must_end_ = false;
  std::vector<uint32_t> mask_;
};

class MaskWorkers {
 public:
  // `done` is called on a worker, without any lock held.
  using Done = std::function<void(std::shared_ptr<ConstraintProgress>)>;
  MaskWorkers(int threads, Done done);
  // Finishes the one under way of each thread and drops the rest.
  ~MaskWorkers();

  // Any thread.
  void Post(std::shared_ptr<ConstraintProgress> progress);

 private:
  void Run();

  const Done done_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::shared_ptr<ConstraintProgress>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace efla

#endif  // EFLA_SERVER_ENGINE_MASK_WORKERS_H_
