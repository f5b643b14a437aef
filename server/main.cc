// efla_server: options, listeners, model, then a loop that watches signals and health.
#include <malloc.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_format.h"
#include "server/admin_generate.h"
#include "server/admin_http.h"
#include "server/descriptors.h"
#include "server/engine_watch.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/model_loader.h"
#include "server/options.h"
#include "server/port_watch.h"
#include "server/rpc/rpc_server.h"
#include "server/serving_state.h"
#include "server/session_loader.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{200};
// Sessions are written out after the requests have ended, in what is left of the drain's time but at least
// this.
constexpr milliseconds kSessionsPatience{5000};
// Calls that had come when the port closed are let in.
constexpr milliseconds kLateCallsPatience{100};
// A drained server gives its last writes and its health watchers so long.
constexpr milliseconds kShutdownPatience{1000};
constexpr size_t kMaxLoggedSessions = 20;
// Kept back for the admin port and the sessions' files when all others are in use.
constexpr int kReservedDescriptors = 32;
// Blocks of this size or more are pages of their own, which go back to the system when they are freed. The C
// library would raise the bound to the size of whatever large block is freed, states among them, and then
// leave holes of their size in the heap of each thread.
constexpr int kOwnPagesBytes = 128 << 10;

// SIGTERM and SIGINT, and SIGHUP, blocked before the first thread so that every thread has them blocked.
class TerminationSignals {
 public:
  TerminationSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
  }
  // True when one of the first two came within `timeout`.
  bool Wait(milliseconds timeout) const {
    const Clock::time_point end = Clock::now() + timeout;
    for (;;) {
      const auto left = std::max(std::chrono::nanoseconds(end - Clock::now()), std::chrono::nanoseconds(0));
      const timespec time{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
      const int signal = sigtimedwait(&set_, nullptr, &time);
      if (signal != SIGHUP) return signal > 0;
      hangup_ = true;
    }
  }
  // Whether SIGHUP has come since the last call.
  bool TakeHangup() const { return std::exchange(hangup_, false); }

 private:
  sigset_t set_;
  mutable bool hangup_ = false;  // main's thread
};

template <typename T>
bool IsDone(const std::future<T>& future) {
  return future.wait_for(milliseconds(0)) == std::future_status::ready;
}

class Server {
 public:
  Server(const Options& options, const TerminationSignals& signals)
      : options_(options),
        signals_(signals),
        log_(options.log_level, options.log_format),
        metrics_(options.model_name, state_) {}

  // The exit status.
  int Run() {
    if (absl::Status status = Listen(); !status.ok()) return Fail(status);
    absl::StatusOr<bool> loaded = Load();
    if (!loaded.ok()) return Fail(loaded.status());
    AnnounceReady();
    ServeUntilDrain();
    return Drain();
  }

 private:
  int Fail(const absl::Status& status) const {
    if (options_.log_format == LogFormat::kJson) {
      log_.Error("start_failed", std::string(status.message()));
    } else {
      std::fprintf(stderr, "efla_server: %s\n", std::string(status.message()).c_str());
    }
    return EXIT_FAILURE;
  }

  absl::Status Listen() {
    const absl::StatusOr<int64_t> descriptors = RaiseDescriptorLimit();  // each connection needs one
    if (!descriptors.ok()) log_.Warning("descriptor_limit", std::string(descriptors.status().message()));
    const auto page = [](bool good, const char* yes, const char* no) {
      return HttpReply{good ? 200 : 503, good ? yes : no};
    };
    AdminPages pages;
    pages.live = [this, page] {
      return page(state_.healthy() && !state_.deaf(), "ok\n", state_.deaf() ? kDeaf : kEngineFailed);
    };
    pages.ready = [this, page] { return page(state_.ready(), "ready\n", WhyNotReady()); };
    pages.balancer = [this, page]() -> HttpReply {
      if (state_.healthy() && !state_.deaf() && state_.leaving()) return {404, "draining\n"};
      return page(state_.ready(), "ready\n", WhyNotReady());
    };
    pages.metrics = [this] { return HttpReply{200, metrics_.Scrape()}; };
    if (options_.admin_generate) {
      pages.generate = [this](std::string_view body, const HttpStream& stream) {
        return StreamCompletion(state_, body, stream);
      };
    }
    auto admin = AdminHttp::Start(options_.admin, std::move(pages));
    if (!admin.ok()) return admin.status();
    admin_ = *std::move(admin);

    auto rpc = RpcServer::Start({.listen = options_.listen,
                                 .max_message_bytes = options_.max_message_bytes,
                                 .max_queue = options_.max_queue,
                                 .slow_reader_timeout = options_.slow_reader_timeout,
                                 .tls = {.certificate = options_.tls_cert,
                                         .key = options_.tls_key,
                                         .client_ca = options_.tls_client_ca,
                                         .require_client_cert = options_.tls_require_client_cert},
                                 .auth_file = options_.auth_file,
                                 .max_connection_age = options_.max_connection_age,
                                 .keepalive_time = options_.keepalive_time},
                                state_, metrics_, log_);
    if (!rpc.ok()) return rpc.status();
    rpc_ = *std::move(rpc);
    const std::string grpc_address = rpc_->address().ToString(), admin_address = admin_->address().ToString();
    std::vector<LogField> fields = {{"grpc", grpc_address}, {"admin", admin_address}};
    if (descriptors.ok()) fields.push_back({"descriptor_limit", *descriptors});
    log_.Write(LogLevel::kInfo, "listening", "listening; the model is being loaded", fields);
    return absl::OkStatus();
  }

  const char* WhyNotReady() const {
    if (state_.model() == nullptr) return "the model is being loaded\n";
    if (state_.deaf()) return kDeaf;
    return state_.leaving() ? "draining\n" : kEngineFailed;
  }

  // A signal while loading ends the process: there is nothing to drain, and loading cannot be interrupted.
  absl::StatusOr<bool> Load() {
    options_.replica_name = ReplicaName(options_, rpc_->address());
    auto loading = std::async(std::launch::async,
                              [this] { return LoadModel(options_, rpc_->address(), &metrics_, log_); });
    while (!IsDone(loading)) {
      rpc_->ReloadFiles(signals_.TakeHangup());
      if (signals_.Wait(kLoadPollInterval) || state_.drain_requested()) {
        log_.Info("stopped", "stopped while the model was being loaded");
        std::_Exit(EXIT_SUCCESS);
      }
    }
    auto loaded = loading.get();
    if (!loaded.ok()) return loaded.status();
    loaded_ = *std::move(loaded);
    metrics_.DescribeModel(loaded_->served);
    state_.Publish(&loaded_->served);
    rpc_->UpdateHealth();
    return true;
  }

  void AnnounceReady() const {
    std::printf("efla_server ready grpc=%s admin=%s device=%s model=%s\n", rpc_->address().ToString().c_str(),
                admin_->address().ToString().c_str(), loaded_->served.device.c_str(),
                loaded_->served.name.c_str());
    std::fflush(stdout);
  }

  // Ends the process when the engine has failed.
  void ServeUntilDrain() {
    using Health = EngineWatch::Health;
    EngineWatch watch(Clock::now());
    PortWatch port(rpc_->address());
    while (!signals_.Wait(kWatchInterval) && !state_.drain_requested()) {
      rpc_->ReloadFiles(signals_.TakeHangup());
      const Health health = watch.Look(loaded_->engine->stats(), Clock::now());
      const bool healthy = health == Health::kHealthy;
      if (healthy != state_.healthy()) {
        state_.SetHealthy(healthy);
        rpc_->UpdateHealth();
        if (healthy) {
          log_.Info("engine_recovered", "the engine makes steps again");
        } else {
          log_.Error("engine_failed", health == Health::kStalled ? "the engine has made no step for too long"
                                                                 : "the device failed");
        }
      }
      if (watch.ends()) {
        log_.Error("stopped", "ending, since the engine has failed");
        // The device may hang: no orderly end can be relied on.
        std::_Exit(EXIT_FAILURE);
      }
      if (port.Look(Clock::now()) == PortWatch::Health::kDeaf) return OnDeaf(port);
    }
  }

  // gRPC cannot listen anew: what runs may end, then whoever started this process starts it again.
  void OnDeaf(const PortWatch& port) {
    reserve_.Release();
    state_.SetDeaf();
    rpc_->UpdateHealth();
    log_.Error("port_deaf",
               "the gRPC port takes no connections any more; were all file descriptors in use? Draining",
               {{"grpc", rpc_->address().ToString()}, {"error", port.why()}, {"probes", port.failures()}});
  }

  // Whether a signal came that is to cut the drain short. The supervisor of a deaf server may send one of its
  // own: the first that would have begun the drain.
  bool WaitForCancel(milliseconds timeout) {
    const Clock::time_point end = Clock::now() + timeout;
    while (signals_.Wait(std::chrono::duration_cast<milliseconds>(end - Clock::now()))) {
      if (!state_.deaf() || std::exchange(first_signal_came_, true)) return true;
    }
    return false;
  }

  // Readiness goes first and all are still served, so that balancers see it before it hurts. Then the port
  // closes: whoever comes now gets no connection and goes elsewhere at once. Turns commit while calls end;
  // sessions go last, when nobody can change them any more.
  int Drain() {
    log_.Info("draining", "draining",
              {{"running", loaded_->engine->stats().running},
               {"delay_seconds", static_cast<double>(options_.drain_delay.count()) * 1e-3},
               {"timeout_seconds", static_cast<double>(options_.drain_timeout.count()) * 1e-3}});
    state_.SetLeaving();
    rpc_->UpdateHealth();
    bool cancelled = WaitForCancel(options_.drain_delay);
    const Clock::time_point deadline = Clock::now() + options_.drain_timeout;
    rpc_->BeginShutdown();
    if (!cancelled) cancelled = WaitForCancel(kLateCallsPatience);
    state_.SetDraining();
    auto drained = std::async(std::launch::async, [this] { loaded_->engine->Drain(options_.drain_timeout); });
    while (!cancelled && !IsDone(drained)) cancelled = WaitForCancel(kDrainPollInterval);
    if (cancelled) {
      log_.Warning("cancelling", "second signal: cancelling what runs");
      rpc_->Shutdown(milliseconds(0));
    }
    drained.wait();
    if (!cancelled) rpc_->Shutdown(kShutdownPatience);
    auto sessions_drained = std::async(std::launch::async, [&] {
      return DrainSessions(cancelled ? milliseconds(0)
                                     : std::max(kSessionsPatience, std::chrono::duration_cast<milliseconds>(
                                                                       deadline - Clock::now())));
    });
    while (!IsDone(sessions_drained)) {
      if (!WaitForCancel(kDrainPollInterval)) continue;
      log_.Warning("stopped", "second signal: what has not been written yet of the sessions is lost");
      // What is being written may take its time; the files and keys that are there are whole.
      std::_Exit(EXIT_FAILURE);
    }
    const int lost = sessions_drained.get();
    const std::string how = cancelled ? "stopped" : "drained";
    if (lost > 0) {
      log_.Warning("stopped", how + ", and sessions are lost", {{"sessions_lost", lost}});
    } else {
      log_.Info("stopped", how);
    }
    return cancelled || state_.deaf() ? EXIT_FAILURE : EXIT_SUCCESS;
  }

  // The first of them, for the log.
  static std::string NamesOf(const std::vector<std::string>& sessions) {
    std::string names;
    for (size_t i = 0; i < std::min(sessions.size(), kMaxLoggedSessions); ++i) {
      names += (i == 0 ? "" : " ") + sessions[i];
    }
    return sessions.size() > kMaxLoggedSessions ? names + " ..." : names;
  }

  // How many are lost.
  int DrainSessions(milliseconds patience) {
    const SessionManager::Stats before = loaded_->sessions->stats();
    const Clock::time_point begin = Clock::now();
    const std::vector<std::string> lost = loaded_->sessions->Drain(patience);
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    const std::string names = NamesOf(lost);
    const std::initializer_list<LogField> fields = {
        {"sessions", before.sessions},
        {"kept", (loaded_->served.has_disk_store || loaded_->served.has_shared_store)
                     ? before.sessions - static_cast<int>(lost.size())
                     : 0},
        {"lost", static_cast<int>(lost.size())},
        {"names", names},
        {"seconds", seconds.count()}};
    if (!lost.empty()) {
      log_.Warning("sessions_drained", "some sessions could not be kept", fields);
    } else {
      log_.Info("sessions_drained", "sessions are in their stores", fields);
    }
    return static_cast<int>(lost.size());
  }

  static constexpr char kDeaf[] = "the gRPC port takes no connections any more\n";
  static constexpr char kEngineFailed[] = "the engine has failed\n";
  static constexpr milliseconds kLoadPollInterval{20}, kDrainPollInterval{20};

  Options options_;
  const TerminationSignals& signals_;
  Log log_;
  ServingState state_;
  Metrics metrics_;
  DescriptorReserve reserve_{kReservedDescriptors};
  bool first_signal_came_ = false;  // of those that may end a deaf server
  // Calls and pages use the model: it goes last.
  std::unique_ptr<LoadedModel> loaded_;
  std::unique_ptr<AdminHttp> admin_;
  std::unique_ptr<RpcServer> rpc_;
};

}  // namespace
}  // namespace efla

int main(int argc, char** argv) {
  const std::variant<efla::Options, efla::ExitStatus> parsed = efla::ParseOptions(argc, argv);
  if (const auto* status = std::get_if<efla::ExitStatus>(&parsed)) return status->code;
  mallopt(M_MMAP_THRESHOLD, efla::kOwnPagesBytes);
  const efla::TerminationSignals signals;
  return efla::Server(std::get<efla::Options>(parsed), signals).Run();
}
