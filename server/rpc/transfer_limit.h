// How many snapshots may be on their way at once: each lies in memory as a whole.
#ifndef EFLA_SERVER_RPC_TRANSFER_LIMIT_H_
#define EFLA_SERVER_RPC_TRANSFER_LIMIT_H_

#include <chrono>
#include <functional>
#include <list>
#include <mutex>
#include <optional>

namespace efla {

// Any thread. When all places are taken and one stands still, it is cancelled: its client no longer reads or
// sends.
class TransferLimit {
 public:
  using Clock = std::chrono::steady_clock;
  struct Transfer {
    Clock::time_point moved;  // when a chunk last came or went
    std::function<void()> cancel;
    bool cancelled = false;
  };
  using Place = std::list<Transfer>::iterator;

  TransferLimit(size_t max_transfers, std::chrono::milliseconds patience)
      : max_transfers_(max_transfers), patience_(patience) {}

  // Nothing when all places are taken.
  std::optional<Place> Enter(std::function<void()> cancel, Clock::time_point now = Clock::now());
  void Moved(Place place, Clock::time_point now = Clock::now());
  void Leave(Place place);

 private:
  const size_t max_transfers_;
  const std::chrono::milliseconds patience_;
  // Guards transfers_. Recursive: gRPC may run the end of a call, with its Leave, inside `cancel`.
  std::recursive_mutex mutex_;
  std::list<Transfer> transfers_;
};

}  // namespace efla

#endif  // EFLA_SERVER_RPC_TRANSFER_LIMIT_H_
