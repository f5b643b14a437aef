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

class Stream;

// Told of each stream's end, on a thread of gRPC's.
class EndListener {
 public:
  virtual void OnEnd(Stream* stream) = 0;

 protected:
  ~EndListener() = default;
};

// One request in flight. Its callbacks run on gRPC's threads, one at a time; the last of them tells the
// listener. It must not be freed there: its context may hold the last reference to the channel, which then
// waits for that thread.
class Stream : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Stream(v1::GenerateRequest request, SteadyClock::time_point start, std::atomic<uint64_t>& chunks,
         EndListener& listener)
      : request_(std::move(request)), start_(start), chunks_(chunks), listener_(listener) {}

  // Without `due`, it is due now.
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
  const RequestRecord& record() const { return record_; }  // once it has ended

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
    listener_.OnEnd(this);  // the last touch of this object
  }

 private:
  double Now() const { return Seconds(SteadyClock::now() - start_).count(); }

  const v1::GenerateRequest request_;
  const SteadyClock::time_point start_;
  std::atomic<uint64_t>& chunks_;
  EndListener& listener_;
  grpc::ClientContext context_;
  v1::GenerateResponse event_;
  RequestRecord record_;
  bool finished_ = false;
};

class LoadRun final : public EndListener {
 public:
  LoadRun(v1::Generation::Stub& stub, const LoadPlan& plan, std::stop_token stop,
          const std::function<void(const LoadProgress&)>& on_progress)
      : stub_(stub), plan_(plan), stop_(std::move(stop)), on_progress_(on_progress) {}

  std::vector<RequestRecord> Run() {
    SendAll();
    auto none_in_flight = [this] { return in_flight_.empty(); };
    if (!Wait(SteadyClock::time_point::max(), none_in_flight)) {
      CancelAll();
      std::unique_lock lock(mutex_);
      ended_.wait(lock, none_in_flight);
    }
    TakeEnded();
    return std::move(records_);
  }

 private:
  void SendAll() {
    const bool open_loop = plan_.requests_per_second > 0;
    const double limit =
        plan_.duration_seconds > 0 ? plan_.duration_seconds : std::numeric_limits<double>::infinity();
    std::mt19937_64 arrivals(plan_.seed);
    std::exponential_distribution<double> gap(open_loop ? plan_.requests_per_second : 1);
    double due = 0;
    for (uint64_t i = 0; plan_.requests == 0 || i < plan_.requests; ++i) {
      auto stream = std::make_unique<Stream>(MakeRequest(i), start_, chunks_, *this);
      if (open_loop) {
        due += gap(arrivals);
        if (due >= limit) return;
        Wait(start_ + std::chrono::duration_cast<SteadyClock::duration>(Seconds(due)), [] { return false; });
      } else {
        Wait(SteadyClock::time_point::max(),
             [this] { return in_flight_.size() < static_cast<size_t>(plan_.concurrency); });
        if (Seconds(SteadyClock::now() - start_).count() >= limit) return;
      }
      if (stop_.stop_requested()) return;
      Stream& sent = *stream;
      {
        std::lock_guard lock(mutex_);
        in_flight_.emplace(stream.get(), std::move(stream));
      }
      ++sent_;
      sent.Send(stub_, open_loop ? std::optional(due) : std::nullopt, plan_.timeout);
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

  // Waits for the predicate (called with the lock held) until the time given, freeing what has ended and
  // reporting progress meanwhile. False when a stop came first or the time passed.
  template <typename Predicate>
  bool Wait(SteadyClock::time_point until, Predicate predicate) {
    for (;;) {
      bool reached = false;
      {
        std::unique_lock lock(mutex_);
        reached = ended_.wait_until(lock, stop_, std::min(until, next_progress_), predicate);
      }
      TakeEnded();
      SteadyClock::time_point now = SteadyClock::now();
      if (now >= next_progress_) {
        next_progress_ = now + std::chrono::duration_cast<SteadyClock::duration>(kProgressInterval);
        ReportProgress();
      }
      if (reached) return true;
      if (stop_.stop_requested() || now >= until) return false;
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

  // TryCancel may run OnEnd on this thread, so the lock is not held; only this thread frees streams.
  void CancelAll() {
    std::vector<Stream*> streams;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [stream, owner] : in_flight_) streams.push_back(stream);
    }
    for (Stream* stream : streams) stream->Cancel();
  }

  void TakeEnded() {
    std::vector<std::unique_ptr<Stream>> streams;
    {
      std::lock_guard lock(mutex_);
      streams.swap(ended_streams_);
    }
    for (const std::unique_ptr<Stream>& stream : streams) {
      records_.push_back(stream->record());
      failed_ += !records_.back().error.empty();
    }
  }

  void OnEnd(Stream* stream) override {
    std::lock_guard lock(mutex_);
    auto found = in_flight_.find(stream);
    ended_streams_.push_back(std::move(found->second));
    in_flight_.erase(found);
    ended_.notify_all();
  }

  v1::Generation::Stub& stub_;
  const LoadPlan& plan_;
  const std::stop_token stop_;
  const std::function<void(const LoadProgress&)>& on_progress_;
  const SteadyClock::time_point start_ = SteadyClock::now();
  std::atomic<uint64_t> chunks_ = 0;

  // Of the thread that calls Run.
  SteadyClock::time_point next_progress_ =
      start_ + std::chrono::duration_cast<SteadyClock::duration>(kProgressInterval);
  std::vector<RequestRecord> records_;
  uint64_t sent_ = 0;
  uint64_t failed_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable_any ended_;
  std::unordered_map<Stream*, std::unique_ptr<Stream>> in_flight_;
  std::vector<std::unique_ptr<Stream>> ended_streams_;
};

}  // namespace

std::vector<RequestRecord> RunLoad(v1::Generation::Stub& stub, const LoadPlan& plan, std::stop_token stop,
                                   const std::function<void(const LoadProgress&)>& on_progress) {
  return LoadRun(stub, plan, std::move(stop), on_progress).Run();
}

}  // namespace efla
