#include "server/rpc/transfer_limit.h"

#include <algorithm>
#include <utility>

namespace efla {

std::optional<TransferLimit::Place> TransferLimit::Enter(std::function<void()> cancel,
                                                         Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  if (transfers_.size() < max_transfers_) {
    transfers_.push_back({.moved = now, .cancel = std::move(cancel)});
    return std::prev(transfers_.end());
  }
  for (Transfer& transfer : transfers_) {
    if (transfer.cancelled || now - transfer.moved < patience_) continue;
    transfer.cancelled = true;
    const std::function<void()> end = transfer.cancel;
    end();  // the transfer may be gone now: one at a time
    break;
  }
  return std::nullopt;
}

void TransferLimit::Moved(Place place, Clock::time_point now) {
  const std::scoped_lock lock(mutex_);
  place->moved = now;
}

void TransferLimit::Leave(Place place) {
  const std::scoped_lock lock(mutex_);
  transfers_.erase(place);
}

}  // namespace efla
