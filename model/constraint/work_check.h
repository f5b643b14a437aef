// Whether a compilation is still wanted, asked while it works.
#ifndef EFLA_MODEL_CONSTRAINT_WORK_CHECK_H_
#define EFLA_MODEL_CONSTRAINT_WORK_CHECK_H_

#include <cstddef>

#include "absl/status/status.h"
#include "model/constraint/constraint.h"

namespace efla {

// Every stage of a compilation tells it what it does, in steps of some ten nanoseconds.
class WorkCheck {
 public:
  explicit WorkCheck(const CompilationCheck& check) : check_(check) {}  // which must outlive this

  // What the check says where it is time to ask again; else OK.
  absl::Status Add(size_t steps) {
    steps_ += steps;
    if (steps_ < kStepsBetweenChecks) return absl::OkStatus();
    return Ask();
  }
  absl::Status Ask() {
    steps_ = 0;
    return check_ == nullptr ? absl::OkStatus() : check_();
  }

 private:
  static constexpr size_t kStepsBetweenChecks = 1 << 16;

  const CompilationCheck& check_;
  size_t steps_ = 0;  // since it was asked
};

}  // namespace efla

#endif  // EFLA_MODEL_CONSTRAINT_WORK_CHECK_H_
