// A redis-server of the test's own.
#ifndef EFLA_TESTS_E2E_REDIS_PROCESS_H_
#define EFLA_TESTS_E2E_REDIS_PROCESS_H_

#include <memory>
#include <string>

#include "tests/e2e/server_process.h"

namespace efla::e2e {

class RedisProcess {
 public:
  // Whether the program is installed.
  static bool Available();
  // On a free port of 127.0.0.1, in memory only. Null, and a test failure, when it does not answer.
  static std::unique_ptr<RedisProcess> Start();

  std::string url() const;
  // Stops answering, and goes on.
  void Freeze();
  void Thaw();
  void Kill();

 private:
  RedisProcess() = default;

  TempDir folder_;
  int port_ = 0;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_REDIS_PROCESS_H_
