#include "server/engine/mask_workers.h"

#include <algorithm>
#include <utility>

#include "kernels/op_args.h"

namespace efla {

ConstraintProgress::ConstraintProgress(std::shared_ptr<const Constraint> constraint,
                                       std::span<const TokenId> end_ids, int64_t constraint_vocab_size,
                                       int64_t vocab_size, bool at_start)
    : constraint_(std::move(constraint)),
      end_ids_(end_ids),
      constraint_words_(static_cast<size_t>(MaskWords(constraint_vocab_size))),
      num_words_(static_cast<size_t>(MaskWords(vocab_size))),
      at_start_(at_start),
      mask_(std::max(constraint_words_, num_words_)) {}

void ConstraintProgress::Compute() {
  if (matcher_ == nullptr) matcher_ = constraint_->NewMatcher(at_start_);
  if (drawn_) {
    accepted_ = matcher_->Accept(*drawn_);
    if (!accepted_) return;
  }
  must_end_ = matcher_->MustEnd();
  if (must_end_ && drawn_) return;
  if (must_end_) {
    std::fill(mask_.begin(), mask_.end(), 0);
    must_end_ = false;  // it has no output yet: an end token is its first
  } else {
    matcher_->FillMask(std::span(mask_).first(constraint_words_));
  }
  const bool can_end = matcher_->CanEnd();
  for (const TokenId id : end_ids_) {
    const uint32_t bit = uint32_t{1} << (id % 32);
    uint32_t& word = mask_[static_cast<size_t>(id) / 32];
    word = can_end ? word | bit : word & ~bit;
  }
}

MaskWorkers::MaskWorkers(int threads, Done done) : done_(std::move(done)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

MaskWorkers::~MaskWorkers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskWorkers::Post(std::shared_ptr<ConstraintProgress> progress) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(progress));
  }
  wake_.notify_one();
}

void MaskWorkers::Run() {
  for (;;) {
    std::shared_ptr<ConstraintProgress> progress;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      progress = std::move(queue_.front());
      queue_.pop_front();
    }
    progress->Compute();
    done_(std::move(progress));
  }
}

}  // namespace efla
