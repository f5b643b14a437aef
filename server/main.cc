// efla_server: options, listeners, model, then a loop that watches signals and health.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "server/admin_http.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/model_loader.h"
#include "server/options.h"
#include "server/rpc/rpc_server.h"
#include "server/serving_state.h"

namespace efla {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{200};
// Sessions are written out after the requests have ended, in what is left of the drain's time but at least
// this.
constexpr milliseconds kSessionsPatience{5000};
// A drained server gives its last writes and its health watchers so long.
constexpr milliseconds kShutdownPatience{1000};
// A server whose engine has failed says so for so long, then ends: whoever started it starts it again.
constexpr std::chrono::seconds kFailedEngineGrace{10};
// Running sequences and no step for so long: the device hangs.
constexpr std::chrono::seconds kStalled{60};

// SIGTERM and SIGINT, blocked before the first thread so that every thread has them blocked.
class TerminationSignals {
 public:
  TerminationSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    signal(SIGPIPE, SIG_IGN);
  }
  // True when one came within `timeout`.
  bool Wait(milliseconds timeout) const {
    const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1'000'000};
    return sigtimedwait(&set_, nullptr, &time) > 0;
  }

 private:
  sigset_t set_;
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
    if (!ServeUntilSignal()) return EXIT_FAILURE;
    return Drain();
  }

 private:
  static int Fail(const absl::Status& status) {
    std::fprintf(stderr, "efla_server: %s\n", std::string(status.message()).c_str());
    return EXIT_FAILURE;
  }

  absl::Status Listen() {
    const auto page = [](bool good, const char* yes, const char* no) {
      return HttpReply{good ? 200 : 503, good ? yes : no};
    };
    auto admin = AdminHttp::Start(
        options_.admin,
        {.live = [this, page] { return page(state_.healthy(), "ok\n", "the engine has failed\n"); },
         .ready = [this, page] { return page(state_.ready(), "ready\n", WhyNotReady()); },
         .metrics =
             [this] {
               return HttpReply{200, metrics_.Scrape()};
             }});
    if (!admin.ok()) return admin.status();
    admin_ = *std::move(admin);

    auto rpc = RpcServer::Start({.listen = options_.listen,
                                 .max_message_bytes = options_.max_message_bytes,
                                 .max_queue = options_.max_queue,
                                 .slow_reader_timeout = options_.slow_reader_timeout},
                                state_, metrics_, log_);
    if (!rpc.ok()) return rpc.status();
    rpc_ = *std::move(rpc);
    log_.Info("listening", "listening; the model is being loaded",
              {{"grpc", rpc_->address().ToString()}, {"admin", admin_->address().ToString()}});
    return absl::OkStatus();
  }

  const char* WhyNotReady() const {
    if (state_.model() == nullptr) return "the model is being loaded\n";
    return state_.draining() ? "draining\n" : "the engine has failed\n";
  }

  // A signal while loading ends the process: there is nothing to drain, and loading cannot be interrupted.
  absl::StatusOr<bool> Load() {
    auto loading = std::async(std::launch::async,
                              [this] { return LoadModel(options_, rpc_->address(), &metrics_, log_); });
    while (!IsDone(loading)) {
      if (signals_.Wait(kLoadPollInterval)) {
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

  // False when the engine failed.
  bool ServeUntilSignal() {
    Clock::time_point healthy_at = Clock::now();
    Clock::time_point moved_at = Clock::now();  // when the engine last made a step or had none to make
    uint64_t steps = 0;
    while (!signals_.Wait(kWatchInterval)) {
      const EngineStats stats = loaded_->engine->stats();
      const Clock::time_point now = Clock::now();
      if (stats.steps != steps || stats.running == stats.parked) {
        steps = stats.steps;
        moved_at = now;
      }
      const bool stalled = now - moved_at > kStalled;
      const bool healthy = stats.healthy && !stalled;
      if (healthy != state_.healthy()) {
        state_.SetHealthy(healthy);
        rpc_->UpdateHealth();
        if (healthy) {
          log_.Info("engine_recovered", "the engine makes steps again");
        } else {
          log_.Error("engine_failed",
                     stalled ? "the engine has made no step for too long" : "the device failed");
        }
      }
      if (healthy) healthy_at = now;
      if (now - healthy_at > kFailedEngineGrace) {
        log_.Error("stopped", "ending, since the engine has failed");
        // The device may hang: no orderly end can be relied on.
        std::_Exit(EXIT_FAILURE);
      }
    }
    return true;
  }

  // Readiness goes first and the sockets stay open, so that balancers see it before calls are refused. Turns
  // commit while calls end; sessions go last, when nobody can change them any more.
  int Drain() {
    log_.Info("draining", "draining",
              {{"running", loaded_->engine->stats().running},
               {"timeout_seconds", static_cast<double>(options_.drain_timeout.count()) * 1e-3}});
    const Clock::time_point deadline = Clock::now() + options_.drain_timeout;
    state_.SetDraining();
    rpc_->UpdateHealth();
    auto drained = std::async(std::launch::async, [this] { loaded_->engine->Drain(options_.drain_timeout); });
    bool cancelled = false;
    while (!IsDone(drained)) {
      if (!signals_.Wait(kDrainPollInterval)) continue;
      log_.Warning("cancelling", "second signal: cancelling what runs");
      cancelled = true;
      rpc_->Shutdown(milliseconds(0));
      break;
    }
    drained.wait();
    if (!cancelled) rpc_->Shutdown(kShutdownPatience);
    DrainSessions(cancelled ? milliseconds(0)
                            : std::max(kSessionsPatience,
                                       std::chrono::duration_cast<milliseconds>(deadline - Clock::now())));
    log_.Info("stopped", cancelled ? "stopped" : "drained");
    return cancelled ? EXIT_FAILURE : EXIT_SUCCESS;
  }

  void DrainSessions(milliseconds patience) {
    const SessionManager::Stats before = loaded_->sessions->stats();
    const Clock::time_point begin = Clock::now();
    const int lost = loaded_->sessions->Drain(patience);
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    const std::initializer_list<LogField> fields = {
        {"sessions", before.sessions},
        {"kept",
         (loaded_->served.has_disk_store || loaded_->served.has_shared_store) ? before.sessions - lost : 0},
        {"lost", lost},
        {"seconds", seconds.count()}};
    if (lost > 0) {
      log_.Warning("sessions_drained", "some sessions could not be kept", fields);
    } else {
      log_.Info("sessions_drained", "sessions are in their stores", fields);
    }
  }

  static constexpr milliseconds kLoadPollInterval{20}, kDrainPollInterval{20};

  const Options& options_;
  const TerminationSignals& signals_;
  Log log_;
  ServingState state_;
  Metrics metrics_;
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
  const efla::TerminationSignals signals;
  return efla::Server(std::get<efla::Options>(parsed), signals).Run();
}
