// Everything the server counts, in Prometheus' text form.
#ifndef EFLA_SERVER_METRICS_H_
#define EFLA_SERVER_METRICS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "server/engine/engine.h"
#include "server/serving_state.h"

namespace efla {

enum class RpcMethod {
  kGenerate,
  kComplete,
  kScore,
  kGetModel,
  kTokenize,
  kDetokenize,
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
  kImport
};
inline constexpr int kNumRpcMethods = 17;
// As in metrics and logs: "Generate".
const char* RpcMethodName(RpcMethod method);

// Why a request was refused before it ran.
enum class Rejection { kInvalid, kQueueFull, kUnavailable, kDeadline, kCancelled };
inline constexpr int kNumRejections = 5;

// Any thread. The metrics that happen per token or step are found once, here, and never by name.
class Metrics : public EngineObserver {
 public:
  // `model_name` labels every series; `state` is asked at each scrape.
  Metrics(const std::string& model_name, const ServingState& state);
  ~Metrics() override;

  // From when the model is loaded: constants of the model's series.
  void DescribeModel(const ServedModel& model);

  void OnCallStarted(RpcMethod method);
  // `code` is the gRPC status code, 0 to 16.
  void OnCallEnded(RpcMethod method, int code);
  // A generation that was refused. Those that reached Engine::Submit are counted by OnEnd as well, so here
  // only the reason is; the others are counted here alone.
  void OnRefused(Rejection rejection, bool reached_engine, double seconds);

  void OnStep(const Step& step) override;
  void OnFirstToken(double seconds_since_submit) override;
  void OnTokenGap(double seconds) override;
  void OnEnd(Outcome outcome, const Usage& usage, const Timing& timing) override;

  // The exposition, text format 0.0.4, with gauges as they are now.
  std::string Scrape();

 private:
  struct Series;
  const ServingState& state_;
  std::unique_ptr<Series> series_;
};

}  // namespace efla

#endif  // EFLA_SERVER_METRICS_H_
