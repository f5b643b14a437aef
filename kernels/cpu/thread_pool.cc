#include "kernels/cpu/thread_pool.h"

#include <algorithm>

#include "kernels/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace efla {
namespace {

constexpr uint32_t kClaimMask = 0xFFFF;
constexpr uint32_t kLoopUnit = 0x10000;
constexpr int64_t kMaxClaims = 0x8000;
// About 30 microseconds: longer than the gaps between the operations of a step, shorter than an idle server
// should burn.
constexpr int kSpins = 1500;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Waits until `value` is no longer `old`: spinning first, then asleep.
void WaitForChange(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    Pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  EFLA_CHECK(num_threads >= 1);
  workers_.reserve(num_threads - 1);
  for (int thread = 1; thread < num_threads; ++thread)
    workers_.emplace_back([this, thread] { Work(thread); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  ticket_.fetch_add(kLoopUnit, std::memory_order_release);
  ticket_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(int64_t count, Loop loop) {
  if (workers_.empty() || count <= 1) {
    for (int64_t index = 0; index < count; ++index) loop.body(loop.context, index, 0);
    return;
  }
  loop.count = count;
  loop.grain = (count + kMaxClaims - 1) / kMaxClaims;
  loop.claims = static_cast<uint32_t>((count + loop.grain - 1) / loop.grain);
  loop_ = loop;
  finished_.store(0, std::memory_order_relaxed);
  const uint32_t loops = (ticket_.load(std::memory_order_relaxed) & ~kClaimMask) + kLoopUnit;
  ticket_.store(loops | loop.claims, std::memory_order_release);
  ticket_.notify_all();
  while (RunOneClaim(0)) {
  }
  for (uint32_t done; (done = finished_.load(std::memory_order_acquire)) != loop.claims;) {
    WaitForChange(finished_, done);
  }
}

void ThreadPool::Work(int thread) {
  while (true) {
    while (RunOneClaim(thread)) {
    }
    const uint32_t ticket = ticket_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if ((ticket & kClaimMask) == 0) WaitForChange(ticket_, ticket);
  }
}

bool ThreadPool::RunOneClaim(int thread) {
  uint32_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if ((ticket & kClaimMask) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
  // The claim keeps the loop open, so loop_ is read only from here on.
  const int64_t claim = loop_.claims - (ticket & kClaimMask);
  const int64_t begin = claim * loop_.grain, end = std::min(begin + loop_.grain, loop_.count);
  const uint32_t claims = loop_.claims;
  for (int64_t index = begin; index < end; ++index) loop_.body(loop_.context, index, thread);
  if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == claims) finished_.notify_all();
  return true;
}

}  // namespace efla
