#include "server/sessions/remembered_requests.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_format.h"
#include "server/sessions/session_error.h"

namespace efla {
namespace {

constexpr size_t kMaxRequests = 10'000;

}  // namespace

absl::StatusOr<std::optional<RememberedRequests::Outcome>> RememberedRequests::Begin(
    Call call, const std::string& request_id) {
  const std::lock_guard lock(mutex_);
  const auto [seen, is_new] = requests_.try_emplace({call, request_id});
  if (is_new) {
    order_.push_back(seen->first);
  } else if (!seen->second) {
    return WithSessionError(absl::AbortedError(absl::StrFormat("request %s is under way", request_id)),
                            "SESSION_BUSY", {{"revision", "0"}});
  }
  return seen->second;
}

void RememberedRequests::Finish(Call call, const std::string& request_id, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  const Key key(call, request_id);
  if (requests_.insert_or_assign(key, std::move(outcome)).second) order_.push_back(key);
  DropOldest();
}

void RememberedRequests::Forget(Call call, const std::string& request_id) {
  const std::lock_guard lock(mutex_);
  const Key key(call, request_id);
  if (requests_.erase(key) > 0) std::erase(order_, key);
  DropOldest();
}

void RememberedRequests::ForgetMaking(const std::string& session_id) {
  const std::lock_guard lock(mutex_);
  const auto made = std::find_if(requests_.begin(), requests_.end(), [&](const auto& request) {
    return request.first.first != Call::kDelete && request.second && request.second->session_id == session_id;
  });
  if (made == requests_.end()) return;
  std::erase(order_, made->first);
  requests_.erase(made);
}

std::optional<RememberedRequests::Outcome> RememberedRequests::Find(Call call,
                                                                    const std::string& request_id) const {
  const std::lock_guard lock(mutex_);
  const auto seen = requests_.find({call, request_id});
  return seen == requests_.end() ? std::nullopt : seen->second;
}

void RememberedRequests::DropOldest() {
  while (order_.size() > kMaxRequests) {
    requests_.erase(order_.front());
    order_.pop_front();
  }
}

}  // namespace efla
