#include "server/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace efla {
namespace {

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type,
                                double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  return {name, help, type, {metric}};
}

// Seconds since 1970 at which the machine started.
double BootTime() {
  std::ifstream file("/proc/stat");
  std::string word;
  while (file >> word) {
    if (double seconds; word == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

}  // namespace

std::vector<prometheus::MetricFamily> CollectProcessMetrics() {
  using enum prometheus::MetricType;
  std::vector<prometheus::MetricFamily> families;
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const double page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));

  // proc(5): the fields after the program's name, which is in parentheses and may hold spaces.
  std::ifstream file("/proc/self/stat");
  std::string stat((std::istreambuf_iterator<char>(file)), {});
  if (const size_t name_end = stat.rfind(')'); name_end != std::string::npos) {
    std::istringstream words(stat.substr(name_end + 1));
    const std::vector<std::string> field((std::istream_iterator<std::string>(words)), {});
    constexpr size_t kUserTicks = 11, kSystemTicks = 12, kStartTicks = 19, kVirtualBytes = 20,
                     kResidentPages = 21;
    if (field.size() > kResidentPages) {
      static const double boot_time = BootTime();
      families.push_back(Family("process_cpu_seconds_total", "User and system CPU time.", Counter,
                                (std::stod(field[kUserTicks]) + std::stod(field[kSystemTicks])) / ticks));
      families.push_back(Family("process_start_time_seconds", "Start time since 1970.", Gauge,
                                boot_time + std::stod(field[kStartTicks]) / ticks));
      families.push_back(
          Family("process_virtual_memory_bytes", "Virtual memory.", Gauge, std::stod(field[kVirtualBytes])));
      families.push_back(Family("process_resident_memory_bytes", "Resident memory.", Gauge,
                                std::stod(field[kResidentPages]) * page_bytes));
    }
  }
  std::error_code error;
  const std::filesystem::directory_iterator fds("/proc/self/fd", error);
  if (!error) {
    const auto open = std::distance(begin(fds), end(fds)) - 1;  // without the one that lists them
    families.push_back(
        Family("process_open_fds", "Open file descriptors.", Gauge, static_cast<double>(open)));
  }
  if (rlimit limit; getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    families.push_back(Family("process_max_fds", "Most open file descriptors allowed.", Gauge,
                              static_cast<double>(limit.rlim_cur)));
  }
  return families;
}

}  // namespace efla
