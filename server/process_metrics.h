// The standard process_* metrics, read from /proc when asked.
#ifndef EFLA_SERVER_PROCESS_METRICS_H_
#define EFLA_SERVER_PROCESS_METRICS_H_

#include <prometheus/metric_family.h>

#include <vector>

namespace efla {

// What cannot be read is left out.
std::vector<prometheus::MetricFamily> CollectProcessMetrics();

}  // namespace efla

#endif  // EFLA_SERVER_PROCESS_METRICS_H_
