#include "client/load_run.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "client/client.h"

namespace efla {
namespace {

using SteadyClock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kProgressInterval{1.0};

// One request in flight. Its callbacks run on gRPC's threads, one at a time.
class Stream : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Stream(v1::GenerateRequest request, SteadyClock::time_point start, std::atomic<uint64_t>& chunks,
         std::function<void(Stream*)> on_end)
      : request_(std::move(request)), start_(start), chunks_(chunks), on_end_(std::move(on_end)) {}

  void Send(v1::Generation::Stub& stub, std::optional<double> due,
            std::optional<std::chrono::milliseconds> timeout) {
    if (timeout) context_.set_deadline(std::chrono::system_clock::now() + *timeout);
    stub.async()->Generate(&context_, &request_, this);
    record_.sent = Now();
    record_.due = due.value_or(record_.sent);
    StartRead(&event_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }
  RequestRecord TakeRecord() { return std::move(record_); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    double now = Now();
    bool has_tokens = event_.has_delta() ? event_.delta().token_ids_size() > 0
                                         : event_.has_finished() && event_.finished().token_ids_size() > 0;
    if (has_tokens) {
      record_.chunks.push_back(now);
      chunks_.fetch_add(1, std::memory_order_relaxed);
    }
    if (event_.has_finished()) {
      finished_ = true;
      record_.ended = now;
      record_.input_tokens = event_.finished().usage().prompt_tokens();
      record_.output_tokens = event_.finished().usage().completion_tokens();
    }
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    absl::Status end = FromGrpc(status);
    if (end.ok() && !finished_) end = absl::InternalError("the stream ended without a finished event");
    if (!end.ok()) {
      record_.ended = Now();
      record_.error = absl::StatusCodeToString(end.code());
      record_.error_message = std::string(end.message());
    }
    on_end_(this);  // frees this
  }

 private:
  double Now() const { return Seconds(SteadyClock::now() - start_).count(); }

  const v1::GenerateRequest request_;
  const SteadyClock::time_point start_;
  std::atomic<uint64_t>& chunks_;
  const std::function<void(Stream*)> on_end_;
  grpc::ClientContext context_;
  v1::GenerateResponse event_;
  RequestRecord record_;
  bool finished_ = false;
};

class LoadRun {
 public:
  LoadRun(v1::Generation::Stub& stub, const LoadPlan& plan, std::stop_token stop,
          const std::function<void(const LoadProgress&)>& on_progress)
      : stub_(stub), plan_(plan), stop_(std::move(stop)), on_progress_(on_progress) {}

  std::vector<RequestRecord> Run() {
    SendAll();
    auto none_in_flight = [this] { return in_flight_.empty(); };
    std::unique_lock lock(mutex_);
    if (!Wait(lock, SteadyClock::time_point::max(), none_in_flight)) {
      CancelAll(lock);
      ended_.wait(lock, none_in_flight);
    }
    return std::move(records_);
  }

 private:
  void SendAll() {
    std::mt19937_64 arrivals(plan_.seed);
    std::exponential_distribution<double> gap(plan_.requests_per_second > 0 ? plan_.requests_per_second : 1);
    const double limit =
        plan_.duration_seconds > 0 ? plan_.duration_seconds : std::numeric_limits<double>::infinity();
    double due = 0;
    for (uint64_t i = 0; plan_.requests == 0 || i < plan_.requests; ++i) {
      auto stream =
          std::make_shared<Stream>(MakeRequest(i), start_, chunks_, [this](Stream* s) { OnEnd(s); });
      const bool open_loop = plan_.requests_per_second > 0;
      {
        std::unique_lock lock(mutex_);
        if (open_loop) {
          due += gap(arrivals);
          if (due >= limit) return;
          Wait(lock, start_ + std::chrono::duration_cast<SteadyClock::duration>(Seconds(due)),
               [] { return false; });
        } else {
          Wait(lock, SteadyClock::time_point::max(),
               [this] { return in_flight_.size() < static_cast<size_t>(plan_.concurrency); });
          if (Seconds(SteadyClock::now() - start_).count() >= limit) return;
        }
        if (stop_.stop_requested()) return;
        in_flight_.emplace(stream.get(), stream);
        ++sent_;
      }
      stream->Send(stub_, open_loop ? std::optional(due) : std::nullopt, plan_.timeout);
    }
  }

  v1::GenerateRequest MakeRequest(uint64_t index) const {
    std::seed_seq seeds{static_cast<uint32_t>(plan_.seed), static_cast<uint32_t>(plan_.seed >> 32),
                        static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)};
    std::mt19937_64 random(seeds);
    v1::GenerateRequest request;
    uint32_t length = plan_.prompts.Draw(random);
    std::vector<uint32_t> ids = RandomTokenIds(length, plan_.vocab_size, plan_.excluded_ids, random);
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
    request.mutable_sampling()->set_temperature(plan_.temperature);
    request.mutable_sampling()->set_seed(random());
    request.mutable_stopping()->set_max_tokens(plan_.max_tokens);
    request.mutable_stopping()->set_ignore_eos(true);
    return request;
  }

  // Waits for the predicate until the time given, reporting progress meanwhile. False when a stop came first
  // or the time passed.
  template <typename Predicate>
  bool Wait(std::unique_lock<std::mutex>& lock, SteadyClock::time_point until, Predicate predicate) {
    for (;;) {
      SteadyClock::time_point wake = std::min(until, next_progress_);
      if (ended_.wait_until(lock, stop_, wake, predicate)) return true;
      if (stop_.stop_requested()) return false;
      SteadyClock::time_point now = SteadyClock::now();
      if (now >= next_progress_) {
        next_progress_ = now + std::chrono::duration_cast<SteadyClock::duration>(kProgressInterval);
        ReportProgress();
      }
      if (now >= until) return false;
    }
  }

  void ReportProgress() const {
    if (!on_progress_) return;
    LoadProgress progress;
    progress.seconds = Seconds(SteadyClock::now() - start_).count();
    progress.sent = sent_;
    progress.ended = records_.size();
    progress.failed = failed_;
    progress.chunks = chunks_.load(std::memory_order_relaxed);
    on_progress_(progress);
  }

  // TryCancel may run OnEnd on this thread, so the lock is let go of; the copies keep the streams alive.
  void CancelAll(std::unique_lock<std::mutex>& lock) {
    std::vector<std::shared_ptr<Stream>> streams;
    for (const auto& [key, stream] : in_flight_) streams.push_back(stream);
    lock.unlock();
    for (const std::shared_ptr<Stream>& stream : streams) stream->Cancel();
    streams.clear();
    lock.lock();
  }

  void OnEnd(Stream* stream) {
    std::shared_ptr<Stream> last_use;
    std::lock_guard lock(mutex_);
    records_.push_back(stream->TakeRecord());
    if (!records_.back().error.empty()) ++failed_;
    auto found = in_flight_.find(stream);
    last_use = std::move(found->second);
    in_flight_.erase(found);
    ended_.notify_all();
  }

  v1::Generation::Stub& stub_;
  const LoadPlan& plan_;
  const std::stop_token stop_;
  const std::function<void(const LoadProgress&)>& on_progress_;
  const SteadyClock::time_point start_ = SteadyClock::now();
  SteadyClock::time_point next_progress_ =
      start_ + std::chrono::duration_cast<SteadyClock::duration>(kProgressInterval);
  std::atomic<uint64_t> chunks_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable_any ended_;
  std::unordered_map<Stream*, std::shared_ptr<Stream>> in_flight_;
  std::vector<RequestRecord> records_;
  uint64_t sent_ = 0;
  uint64_t failed_ = 0;
};

}  // namespace

std::vector<RequestRecord> RunLoad(v1::Generation::Stub& stub, const LoadPlan& plan, std::stop_token stop,
                                   const std::function<void(const LoadProgress&)>& on_progress) {
  return LoadRun(stub, plan, std::move(stop), on_progress).Run();
}

}  // namespace efla
