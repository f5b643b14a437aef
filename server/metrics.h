// Everything the server counts, in Prometheus' text form.
#ifndef EFLA_SERVER_METRICS_H_
#define EFLA_SERVER_METRICS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/serving_state.h"
#include "server/tenant_use.h"

namespace efla {

enum class RpcMethod {
  kGenerate,
  kComplete,
  kScore,
  kGetModel,
  kTokenize,
  kDetokenize,
  kRenderChat,
  kCreate,  // from here on of the Sessions service
  kGet,
  kList,
  kAppend,
  kFork,
  kMark,
  kRewind,
  kDelete,
  kMove,
  kExport,
  kImport,
  kGetServerInfo,  // from here on of the Admin service
  kGetLoad,
  kDrain,
  kSetLogLevel
};
inline constexpr int kNumRpcMethods = 22;
inline constexpr RpcMethod kFirstAdminMethod = RpcMethod::kGetServerInfo,
                           kLastAdminMethod = RpcMethod::kSetLogLevel;
// As in metrics and logs: "Generate".
const char* RpcMethodName(RpcMethod method);

// Why a request was refused before it ran.
// kLimit: its tenant's. kSessionLimit: too many sessions, marks, or too little memory for them. kError: a
// fault of the server or its stores, such as a damaged snapshot.
enum class Rejection {
  kInvalid,
  kQueueFull,
  kUnavailable,
  kDeadline,
  kCancelled,
  kAuth,
  kLimit,
  kSessionLimit,
  kError
};
inline constexpr int kNumRejections = 9;

// Why a credential did not do.
enum class AuthFailure { kMissing, kUnknown, kExpired, kRole, kPriority };
inline constexpr int kNumAuthFailures = 5;

// Any thread. The metrics that happen per token or step are found once, here, and never by name.
class Metrics : public EngineObserver {
 public:
  // `model_name` labels every series; `state` is asked at each scrape.
  Metrics(const std::string& model_name, const ServingState& state);
  ~Metrics() override;

  // From when the model is loaded: constants of the model's series.
  void DescribeModel(const ServedModel& model);

  void OnCallStarted(RpcMethod method);
  // `code` is the gRPC status code, 0 to 16; `seconds` since the call began.
  void OnCallEnded(RpcMethod method, int code, double seconds);
  // A generation that was refused. Those that reached Engine::Submit are counted by OnEnd as well, so here
  // only the reason is; the others are counted here alone.
  void OnRefused(Rejection rejection, bool reached_engine, double seconds);

  void OnAuthFailure(AuthFailure failure);
  void OnAuthReload(bool ok);
  void OnTlsReload(bool ok);
  // When certificates end; max(): there is none.
  void SetCertificateEnds(std::chrono::system_clock::time_point server,
                          std::chrono::system_clock::time_point client_ca);
  // Asked at each scrape, for series of each tenant; null: no tenants. The names are the auth file's.
  void SetTenants(std::function<std::vector<TenantUse::Stats>()> tenants);

  void OnStep(const Step& step) override;
  void OnFirstToken(double seconds_since_submit) override;
  void OnTokenGap(double seconds) override;
  void OnEnd(Outcome outcome, const Usage& usage, const Timing& timing) override;

  // The exposition, text format 0.0.4, with gauges as they are now.
  std::string Scrape();

 private:
  struct Series;
  const Clock::time_point start_ = Clock::now();
  const ServingState& state_;
  std::unique_ptr<Series> series_;
};

}  // namespace efla

#endif  // EFLA_SERVER_METRICS_H_
