// A constraint that names the tokens of each position, with handles for tests.
#ifndef EFLA_TESTS_SERVER_FAKE_CONSTRAINT_H_
#define EFLA_TESTS_SERVER_FAKE_CONSTRAINT_H_

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "model/constraint/constraint.h"

namespace efla {

// Holds up the threads that compute masks.
class Gate {
 public:
  void Close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  void AwaitOneInside() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

// Position i takes one of positions[i]. Whole after `can_end` and at the end.
class FakeConstraint final : public Constraint {
 public:
  explicit FakeConstraint(std::vector<std::vector<TokenId>> positions, std::set<size_t> can_end = {},
                          Gate* gate = nullptr)
      : positions_(std::move(positions)), can_end_(std::move(can_end)), gate_(gate) {}

  std::unique_ptr<ConstraintMatcher> NewMatcher(bool at_start) const override {
    return std::make_unique<Matcher>(*this);
  }
  bool refuses_all = false;  // Accept fails

 private:
  class Matcher final : public ConstraintMatcher {
   public:
    explicit Matcher(const FakeConstraint& constraint) : constraint_(constraint) {}
    void FillMask(std::span<uint32_t> mask) override {
      if (constraint_.gate_ != nullptr) constraint_.gate_->Pass();
      std::fill(mask.begin(), mask.end(), 0);
      for (const TokenId id : constraint_.positions_.at(position_)) mask[id / 32] |= uint32_t{1} << (id % 32);
    }
    bool Accept(TokenId token) override {
      if (constraint_.refuses_all || position_ >= constraint_.positions_.size()) return false;
      const std::vector<TokenId>& here = constraint_.positions_[position_];
      if (std::find(here.begin(), here.end(), token) == here.end()) return false;
      ++position_;
      return true;
    }
    bool CanEnd() const override { return MustEnd() || constraint_.can_end_.count(position_) > 0; }
    bool MustEnd() const override { return position_ == constraint_.positions_.size(); }

   private:
    const FakeConstraint& constraint_;
    size_t position_ = 0;
  };

  const std::vector<std::vector<TokenId>> positions_;
  const std::set<size_t> can_end_;
  Gate* const gate_;
};

}  // namespace efla

#endif  // EFLA_TESTS_SERVER_FAKE_CONSTRAINT_H_
