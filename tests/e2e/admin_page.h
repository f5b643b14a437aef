// The server's admin listener over plain HTTP, and its metrics page as numbers.
#ifndef EFLA_TESTS_E2E_ADMIN_PAGE_H_
#define EFLA_TESTS_E2E_ADMIN_PAGE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace efla::e2e {

struct HttpReply {
  int status = 0;  // 0: no connection, or nothing that looks like HTTP
  std::string body;
};
HttpReply HttpGet(const std::string& address, const std::string& path);

// One reading of /metrics (Prometheus text format). A line that is not of that format fails the test.
class Metrics {
 public:
  static Metrics Read(const std::string& admin_address);

  // "counter", "gauge", "histogram"; empty when there is no such family.
  std::string TypeOf(const std::string& family) const;
  // The sum of the series of `name` that carry all of `labels` (each written name="value").
  double Sum(const std::string& name, const std::vector<std::string>& labels = {}) const;
  int NumSeries(const std::string& name) const;

 private:
  struct Series {
    std::string labels;  // with the commas around each: ,a="b",c="d",
    double value;
  };
  std::map<std::string, std::string> types_;
  std::multimap<std::string, Series> series_;
};

// Waits until no request waits or runs and every state slot is free or the prefix cache's; a test failure
// when that does not come. For servers without sessions.
void ExpectIdle(const std::string& admin_address);

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_ADMIN_PAGE_H_
