#include "client/resume.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace efla {
namespace {

using Clock = std::chrono::steady_clock;

// What the caller has got, over all calls; takes it out of the events that bring it again.
class Delivered {
 public:
  void BeginCall() { text_at_ = ids_at_ = 0; }

  // The event with what is new; nothing where nothing is. An error where it is not what was delivered.
  absl::StatusOr<std::optional<v1::GenerateResponse>> New(v1::GenerateResponse event) {
    if (event.has_accepted()) {
      if (std::exchange(accepted_, true)) return std::nullopt;
    } else if (event.has_delta()) {
      const bool repeats = Repeats();
      if (absl::Status status = Cut(*event.mutable_delta()); !status.ok()) return status;
      const v1::Delta& delta = event.delta();
      if (repeats && delta.text().empty() && delta.token_ids().empty()) return std::nullopt;
    } else if (event.has_finished()) {
      if (absl::Status status = Cut(*event.mutable_finished()); !status.ok()) return status;
      if (Repeats()) return absl::DataLossError(Differs("ends before"));
    }
    return event;
  }

 private:
  bool Repeats() const { return text_at_ < text_.size() || ids_at_ < ids_.size(); }
  std::string Differs(std::string_view how) const {
    return absl::StrFormat("the repeated turn %s what has been delivered (%d bytes, %d tokens)", how,
                           text_.size(), ids_.size());
  }

  template <typename Part>
  absl::Status Cut(Part& part) {
    const std::string_view text = part.text();
    const size_t known_bytes = std::min(text.size(), text_.size() - text_at_);
    const auto count = static_cast<size_t>(part.token_ids_size());
    const size_t known_ids = std::min(count, ids_.size() - ids_at_);
    if (text.substr(0, known_bytes) != std::string_view(text_).substr(text_at_, known_bytes) ||
        !std::equal(part.token_ids().begin(), part.token_ids().begin() + static_cast<ptrdiff_t>(known_ids),
                    ids_.begin() + static_cast<ptrdiff_t>(ids_at_))) {
      return absl::DataLossError(Differs("differs from"));
    }
    text_at_ += text.size();
    ids_at_ += count;
    text_ += text.substr(known_bytes);
    ids_.insert(ids_.end(), part.token_ids().begin() + static_cast<ptrdiff_t>(known_ids),
                part.token_ids().end());
    if (static_cast<size_t>(part.logprobs_size()) == count) {
      part.mutable_logprobs()->DeleteSubrange(0, static_cast<int>(known_ids));
    }
    part.mutable_token_ids()->erase(part.token_ids().begin(),
                                    part.token_ids().begin() + static_cast<ptrdiff_t>(known_ids));
    part.mutable_text()->erase(0, known_bytes);
    return absl::OkStatus();
  }

  bool accepted_ = false;
  std::string text_;
  std::vector<uint32_t> ids_;
  size_t text_at_ = 0, ids_at_ = 0;  // where the present call stands in them
};

uint64_t RandomBits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// Whether the same call may be made again, and after how long; nothing where it may not.
std::optional<std::chrono::milliseconds> RetryAfter(const absl::Status& status,
                                                    std::chrono::milliseconds backoff) {
  const std::optional<std::chrono::milliseconds> asked = RetryDelay(status);
  if (absl::IsUnavailable(status)) return asked.value_or(backoff);
  if (absl::IsResourceExhausted(status)) return asked;
  if (absl::IsAborted(status) && ErrorReason(status) == "SESSION_BUSY") return asked.value_or(backoff);
  return std::nullopt;
}

// False where a stop came first.
bool Sleep(std::chrono::milliseconds time, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any changed;
  std::unique_lock lock(mutex);
  changed.wait_for(lock, stop, time, [] { return false; });
  return !stop.stop_requested();
}

}  // namespace

absl::Status GenerateResuming(Client& client, v1::GenerateRequest request, const CallOptions& options,
                              const ResumeOptions& resume,
                              const std::function<bool(const v1::GenerateResponse&)>& on_event) {
  if (request.session().session_id().empty()) {
    return absl::InvalidArgumentError("session.session_id is empty; only a session's turn can be resumed");
  }
  if (resume.attempts < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attempts is %d; it must be at least 1", resume.attempts));
  }
  if (request.request_id().empty())
    request.set_request_id(absl::StrFormat("%016x%016x", RandomBits(), RandomBits()));
  if (!request.sampling().has_seed()) request.mutable_sampling()->set_seed(RandomBits());

  const Clock::time_point begin = Clock::now();
  Delivered delivered;
  std::chrono::milliseconds backoff = resume.first_delay;
  for (int attempt = 1;; ++attempt) {
    CallOptions call = options;
    if (options.timeout) {
      const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
      call.timeout = std::max(*options.timeout - passed, std::chrono::milliseconds(0));
    }
    delivered.BeginCall();
    absl::Status differs;
    absl::Status status = client.Generate(request, call, [&](const v1::GenerateResponse& event) {
      absl::StatusOr<std::optional<v1::GenerateResponse>> fresh = delivered.New(event);
      if (!fresh.ok()) {
        differs = fresh.status();
        return false;
      }
      return *fresh ? on_event(**fresh) : true;
    });
    if (!differs.ok()) return differs;
    const std::optional<std::chrono::milliseconds> delay = RetryAfter(status, backoff);
    if (status.ok() || !delay || attempt == resume.attempts) return status;
    const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    if (options.timeout && passed + *delay >= *options.timeout) return status;  // the time would be up before
    if (!Sleep(*delay, options.stop)) return absl::CancelledError("stopped");
    backoff = std::min(backoff * 2, resume.longest_delay);
  }
}

}  // namespace efla
