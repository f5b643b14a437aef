// The date that a benchmark's JSON carries.
#ifndef EFLA_TESTS_BENCH_UTC_TIME_H_
#define EFLA_TESTS_BENCH_UTC_TIME_H_

#include <ctime>
#include <string>

namespace efla {

inline std::string UtcTime() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace efla

#endif  // EFLA_TESTS_BENCH_UTC_TIME_H_
